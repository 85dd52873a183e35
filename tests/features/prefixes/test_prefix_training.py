"""Shared prefixes in the trainer: counts, evaluation, restarts, refusals (weights: `test_equivalence.py`)."""

import warnings
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from datasets import Dataset
from ranks import faults
from support.prefixes import forest, shared_prefixes
from support.runs import build_trainer, logged, plain_sgd, weights
from transformers import PrinterCallback, TrainerCallback

from trl_packfix import SFTTrainer
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.layout import layout_of
from trl_packfix.planning.strategies import plan_packs
from trl_packfix.training.flops import training_flops

pytestmark = pytest.mark.slow

DOCUMENTS = forest()
SGD = plain_sgd(0.2, max_steps=5, max_length=96, per_device_train_batch_size=8, seed=11)
OURS = {"packing_strategy": "minibatch", "share_prefixes": "pack"}
COLUMNS = {"weight_column": "share", "source_column": "source"}


def run_training(plant=None, **more):
    """Train five steps, and return the trainer and its trained weights."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = build_trainer(folder, DOCUMENTS, **(OURS | SGD | more))
        trainer.remove_callback(PrinterCallback)
        if plant is not None:
            plant(trainer)
        trainer.train()
    return trainer, weights(trainer)


# What is counted


def test_flops_are_those_of_the_computed_tokens(tmp_path):
    """Count for a token what it adds to the cost of its document, and count a shared token once."""
    trainer = build_trainer(tmp_path, DOCUMENTS, **OURS | SGD)
    batch = PrefixCollator(min_shared=1, pad_to_multiple_of=16)(DOCUMENTS.to_list()[:9])
    shared = layout_of(batch)
    trainer.training_objective.count_batch(batch, shared, shared.trained)
    sums = trainer.training_objective.totals.gather(trainer.accelerator)
    positions = batch["position_ids"][0][shared.num_documents > 0].double()
    costs = [training_flops(trainer.data.cost_model, lengths, 1.0).sum() for lengths in (positions, positions + 1)]
    assert sums["flops"] == pytest.approx((costs[1] - costs[0]).item(), rel=1e-12)
    assert sums["computed"] == len(positions) < sums["row_tokens"] == batch["labels"].numel()
    assert sums["tokens"] == shared.lengths.sum().item() > 1.2 * sums["computed"]
    assert sums["documents"] == 9
    assert sums["micro_batches"] == 1


# Without training


def test_evaluation_mode_does_not_compute_a_loss_of_rows(tmp_path):
    trainer = build_trainer(tmp_path, DOCUMENTS, **OURS | SGD)
    batch = next(iter(trainer.get_train_dataloader()))
    assert shared_prefixes([batch])
    trainer.model.eval()
    with pytest.raises(ValueError, match=r"8 documents in \d+ rows, came to `compute_loss`.*Use `trainer.evaluate"):
        trainer.compute_loss(trainer.model, batch)


# Switched off before the first step


class Refuses(TrainerCallback):
    """Do what a proof does that fails."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.data.shares_rows = False


def test_switched_off_before_the_first_step_nothing_is_shared():
    _, off = run_training(share_prefixes="off")
    shared, on = run_training()
    assert max(logged(shared, "computed_share")) < 0.85
    for workers in (0, 1):
        refused, after = run_training(
            lambda trainer: trainer.add_callback(Refuses(trainer)), dataloader_num_workers=workers
        )
        assert torch.equal(after, off)
        assert set(logged(refused, "computed_share")) == {1.0}
    assert torch.equal(run_training(dataloader_num_workers=1)[1], on)


# Evaluation


def evaluated(folder, **settings):
    """Evaluate, and return the trainer, its metrics, the number of rows that were computed, and the batches."""
    settings = {"per_device_eval_batch_size": 4, "packing_strategy": "stream"} | settings
    held_out = {"eval_dataset": forest(90, seed=3)}
    trainer = build_trainer(folder, DOCUMENTS, **OURS | SGD | COLUMNS | held_out | settings)
    trainer.evaluate()
    metrics = trainer.state.log_history[-1]
    timed = ("time", "second")
    metrics = {name: metrics[name] for name in metrics if name.startswith("eval_") and not name.endswith(timed)}
    batches = list(trainer.get_eval_dataloader())
    return trainer, metrics, sum(batch["labels"].numel() for batch in batches), batches


def test_evaluation_brings_families_together(tmp_path):
    _, unshared, tokens, whole_batches = evaluated(tmp_path, share_prefixes="off")
    trainer, shared, rows, batches = evaluated(tmp_path, share_prefixes="family")
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_loss/a"} <= unshared.keys()
    assert shared == pytest.approx(unshared, rel=1e-6)
    # Packed as it comes, the set shares less
    data = trainer.eval_dataset.to_list()
    plan = plan_packs([len(row["input_ids"]) for row in data], 4 * 96, "bfd")
    packs = np.split(plan.order, plan.offsets[1:-1])
    rows_unsorted = sum(PrefixCollator()([data[i] for i in pack])["labels"].numel() for pack in packs)
    assert rows < 0.9 * rows_unsorted < tokens
    assert len(batches) < len(whole_batches)
    assert max(batch["labels"].numel() for batch in batches) <= 4 * 96
    assert sum(layout_of(batch).document_count for batch in batches) == 90
    # The same packs with sequence parallelism, here on one rank
    settings = {"tokens_per_rank": 4 * 96, "per_device_eval_batch_size": 1, "per_device_train_batch_size": 1}
    _, on_parts, rows_on_parts, _ = evaluated(tmp_path, share_prefixes="family", **settings)
    assert rows_on_parts < 0.9 * rows_unsorted
    assert on_parts == pytest.approx(unshared, rel=1e-6)
    # The control: each row once
    with faults.ONE["each_row_once"]():
        _, wrong, *_ = evaluated(tmp_path, share_prefixes="family")
    assert wrong["eval_loss"] != pytest.approx(unshared["eval_loss"], rel=1e-5)


def test_losses_of_the_user_are_evaluated_whole(tmp_path):
    class Doubled(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    settings = {"trainer_class": Doubled, "eval_dataset": forest(20, seed=3)}
    trainer = build_trainer(tmp_path, DOCUMENTS, **settings, **OURS | SGD)
    batches = list(trainer.get_eval_dataloader())
    assert not shared_prefixes(batches)
    assert shared_prefixes(list(trainer.get_train_dataloader()))


def test_documents_with_other_labels_do_not_share(tmp_path):
    """Plan an evaluation of such documents without counting on shared rows, or packs would be too large."""
    stem = list(range(5, 75))
    rows = [{"input_ids": [*stem, 80 + i, 90], "labels": [*stem, 80 + i, 90 - i % 2]} for i in range(8)]
    data = Dataset.from_list(rows)
    settings = {"eval_dataset": data, "per_device_eval_batch_size": 1}
    trainer = build_trainer(tmp_path, DOCUMENTS, **settings, **OURS | SGD)
    batches = list(trainer.get_eval_dataloader())
    assert max(batch["labels"].numel() for batch in batches) <= 96
