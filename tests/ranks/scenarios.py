"""What a comparison of weights does not show, on ranks: which rank trains what, evaluation, the probe.

Each scenario returns what `test_distributed.py` looks at, which calls some in its own process, for one rank.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset, concatenate_datasets
from support import engine_state
from support.models import build_tokenizer
from support.versions import load_on_cpu_ranks
from transformers import EvalPrediction, TrainerCallback

import trl_packfix.data.epochs
from trl_packfix import check_isolation
from trl_packfix.isolation import check_isolation as isolation
from trl_packfix.training.checks import synchronisation

from . import faults
from .engines import engine_of, weights_of
from .table import ROWS, Row
from .training import make_trainer

load_on_cpu_ranks()
TOKENIZER = build_tokenizer()
NUM_DOCUMENTS = 97
NUM_EVALUATED = 23
DIGITS = 3


def documents(num: int, seed: int = 0) -> Dataset:
    """Return texts of 3 to 60 letters, so many tokens plus one; each begins with its own number."""
    rng = np.random.default_rng(seed)
    letters = ("".join(rng.choice(list("abcdef "), n)) for n in rng.integers(0, 58, num))
    return Dataset.from_dict({"text": [f"{i:0{DIGITS}d}{text}" for i, text in enumerate(letters)]})


def document_ids(batch: dict) -> list[int]:
    """Return the numbers of the documents of a batch, packed or padded.

    Dummies, which begin with padding, have none.
    """
    rows = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        rows = rows[0].split(batch["cu_seq_lens_q"].diff().tolist())
    starts = (TOKENIZER.decode(row[:DIGITS]) for row in rows)
    return [int(start) for start in starts if start.isdigit()]


class Numbered(trl_packfix.SFTTrainer):
    """Notes the engine that trains and the documents of every micro-batch of its steps."""

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        self.engine = engine_of(self.model_wrapped)
        self.seen += map(document_ids, batches)
        return batches, num_items


class Reversed(Numbered):
    """Adds up the gradients of an optimizer step in the opposite order, which changes nothing but their rounding."""

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        return batches[::-1], num_items


def make(folder: Path, engine: str | None = None, cls: type = Numbered, num: int = NUM_DOCUMENTS, **settings) -> Any:
    """Make a trainer on `num` numbered texts; `row` is a row of the table to take settings from."""
    row = settings.pop("row", Row())
    defaults = {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    defaults |= {"max_steps": -1, "learning_rate": 1e-2, "optim": "adamw_torch", "packing_strategy": "stream"}
    return make_trainer(folder, row, engine, cls, **{"data": documents(num)} | defaults | settings)


def outcome(trainer: Any, **further) -> dict:
    """Return what every scenario tells; `seen` is [rank][micro-batch][document]."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "engine": trainer.engine,
        "world_size": trainer.args.world_size,
        "synchronisation": synchronisation(trainer.accelerator, trainer.model),
        "seen": gather_object([trainer.seen]),
        "num_steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in entries],
        "num_tokens": [entry["num_tokens"] for entry in entries],
        "weights": weights_of(trainer),
    } | further


# Which rank trains what


def drop_last(folder: Path, engine: str | None = None, **settings) -> dict:
    """Train an epoch without its last, incomplete step, and one with it.

    Return the outcome of the first with what its report says, and of the second as `whole`.
    """
    results = []
    for drop in (True, False):
        trainer = make(folder, engine, num_train_epochs=1, dataloader_drop_last=drop, **settings)
        trainer.train()
        results.append(outcome(trainer, report=trainer.packing_report.to_dict()))
    return results[0] | {"whole": results[1]}


# Evaluation


def evaluation(folder: Path, engine: str | None, trains: bool = True, first: bool = False, **settings) -> dict:
    """Return the numbers of an evaluation packed, padded, and padded for a metric.

    With them come the documents that the metric and `predict` got.
    """
    held_out = documents(NUM_EVALUATED, seed=1)
    trainer = make(folder, engine, **{"max_steps": 2, "num": 37, "eval_data": held_out} | settings)
    if first:
        trainer.evaluate()
    if trains:
        trainer.train()
    rows = []

    def count_rows(prediction: EvalPrediction) -> dict:
        rows.append(document_ids({"input_ids": torch.from_numpy(prediction.label_ids)}))
        return {"rows": len(prediction.predictions)}

    results = {}
    for name, packing, metric in (("packed", True, None), ("padded", False, None), ("metric", True, count_rows)):
        trainer.args.eval_packing = packing
        trainer.compute_metrics = metric
        trainer.evaluate()
        logged = trainer.state.log_history[-1]
        results[name] = {key: logged[f"eval_{key}"] for key in ("loss", "mean_token_accuracy", "entropy")}
    predicted = trainer.predict(trainer.eval_dataset)
    results |= {"rows": rows[0], "predicted": document_ids({"input_ids": torch.from_numpy(predicted.label_ids)})}
    norms = [float(p.detach().double().norm()) for p in trainer.model.parameters()]
    return outcome(trainer, evaluation=results, norms=gather_object([norms]))


# The probe


class Watched(TrainerCallback):
    """Notes the state of the engine before and after each probe: the trainer's own, one more, and one in training.

    It is called twice for each event, before and after all other callbacks.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.states = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.packed_model.attach_packed_attention()  # adds hooks, and is not the probe
        self.states.append(engine_state.snapshot(self.trainer))
        if len(self.states) == 2:
            self.probe()

    def on_step_end(self, args, state, control, **kwargs):
        if len(self.states) == 3:
            self.states.append(engine_state.snapshot(self.trainer))
            self.probe()

    def probe(self) -> None:
        assert check_isolation(self.trainer.model_wrapped, self.trainer.args.max_length).isolated
        self.states.append(engine_state.snapshot(self.trainer))


def probed(folder: Path, engine: str) -> dict:
    """Return what the probes changed of the engine's state, and what an optimizer step did, on each rank."""
    trainer = make(folder, engine, num=37, max_steps=2)
    watched = Watched(trainer)
    trainer.callback_handler.callbacks.insert(0, watched)
    trainer.callback_handler.callbacks.append(watched)
    trainer.train()
    names = ("first probe", "second probe", "step", "probe after the step")
    changed = [sorted(engine_state.changed(*pair)) for pair in pairwise(watched.states)]
    counts = {name: len(values) for name, values in watched.states[0].items()}
    ranks = gather_object([dict(zip(names, changed, strict=True))])
    return outcome(trainer, changed={name: [rank[name] for rank in ranks] for name in names}, counts=counts)


def repaired_in_bf16(folder: Path, engine: str) -> dict:
    """Return the proof of a model that leaks, on ranks, and which modules were repaired."""
    trainer = make(folder, engine, row=Row("leaking"), num=37, max_steps=1, bf16=True)
    trainer.train()
    report = trainer.packing_report.isolation
    repaired = [repair.module.removeprefix("FSDP") for repair in report.repaired]
    return outcome(trainer, repaired=repaired, proof=(report.isolated, report.equal))


def rounded(folder: Path, engine: str) -> dict:
    """Return the verdict of each rank on a model that leaks in bf16.

    Rank 1 sees nothing move at the end of the model.
    """
    trainer = make(folder, engine, row=Row("leaking"), num=37, max_steps=1, bf16=True, on_leak="unpack")
    measured = isolation.largest_distance
    if trainer.args.process_index == 1:
        isolation.largest_distance = lambda *args: 0.0
    verdicts = []

    class Judge(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
                verdicts.append(check_isolation(trainer.model_wrapped, trainer.args.max_length))
            isolation.largest_distance = measured

    trainer.callback_handler.callbacks.insert(0, Judge())
    trainer.train()
    leaks = [leak.module.removeprefix("FSDP") for leak in verdicts[0].leaks]
    return outcome(trainer, verdicts=gather_object([[verdicts[0].isolated, verdicts[0].max_change, leaks]]))


# What is refused


def reversed_on_odd_ranks(dataset: Dataset) -> Dataset:
    """Return other documents on every second rank, so that packs differ and their shapes do not."""
    if int(os.environ["RANK"]) % 2 == 0:
        return dataset
    return dataset.map(lambda row: {name: row[name][::-1] for name in ("input_ids", "labels")})


def stream_of_each_rank() -> IterableDataset:
    return Row().documents().to_iterable_dataset().shuffle(seed=dist.get_rank(), buffer_size=50)


def rows_of_each_rank() -> Dataset:
    """Return a split as if it was drawn without a seed: each rank has other rows."""
    return Row().documents().train_test_split(test_size=3, seed=dist.get_rank())["train"]


def later_rows_of_each_rank() -> IterableDataset:
    """Return a stream that begins with the same rows on all ranks, and of which rank 1 reads other rows later."""
    data = Row().documents()
    later = reversed_on_odd_ranks(data.select(range(2, len(data))))
    return concatenate_datasets([data.select(range(2)), later]).to_iterable_dataset()


def other_second_pass() -> IterableDataset:
    """Return a stream that on rank 1 has shorter documents in its second pass, so that other degrees may be chosen."""
    data = ROWS["parts"].documents()
    ended = []

    def shorter(row, index):
        num_kept = len(row["input_ids"]) - (len(ended) > 1 and dist.get_rank() == 1)  # the first step reads it, too
        if index == len(data) - 1:
            ended.append(True)
        return {"input_ids": row["input_ids"][:num_kept], "labels": row["labels"][:num_kept]}

    return data.to_iterable_dataset().map(shorter, with_indices=True)


def refused(
    folder: Path, engine: str, row: Row, fault: str | None = None, data: Callable | None = None, **settings
) -> dict:
    """Return what each rank says to settings or documents that cannot work, and after which step."""
    message = ""
    trainer = None
    try:
        with faults.ALL[fault]() if fault else nullcontext(), faults.behind_proofs() if fault else nullcontext():
            trainer = make_trainer(folder, row, engine, data=data and data(), **settings)
            trainer.train()
            trainer.predict(trainer.eval_dataset)
    except ValueError as error:
        message = str(error)
    return {"messages": gather_object([message]), "step": trainer.state.global_step if trainer else 0}


def predicted(folder: Path, engine: str | None) -> dict:
    """Return what a model that ranks divide predicts for each row, before it is trained."""
    trainer = make_trainer(folder, ROWS["dividing"], engine, eval_data=ROWS["dividing"].documents(seed=1))
    return {"predicted": torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions).clone()}
