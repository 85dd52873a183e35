"""The training loss: TRL's to the bit, or documents that count the same; its auxiliary terms, and what is logged."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import trl
from packaging.version import Version
from support.models import build_tiny_model
from support.runs import (
    build_trainer,
    checkpointing,
    documents_of,
    gradient_of,
    log_of_steps,
    record_steps,
    run_training,
    start_weights,
    tokenised,
    weights,
)
from support.versions import TRANSFORMERS, current_models, scores_tokens
from sweep import zoo
from sweep.zoo import shrink
from torch.nn import functional as F
from transformers import DeepseekV4Config, TrainerCallback
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trl_packfix import SFTTrainer
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.layout import layout_of
from trl_packfix.training import objective

pytestmark = pytest.mark.slow


def halves(num=24, seed=0):
    """Return documents of 4 to 60 tokens, of which between one and all are trained."""
    rng = np.random.default_rng(seed)
    return tokenised(rng, rng.integers(4, 61, num), lambda i, length: rng.integers(1, length))


def first_step(trainer):
    """Return the micro-batches of the first optimizer step, and the count that transformers divides by."""
    trainer.model.train()
    if trainer.args.packing:
        trainer.packed_model.attach_packed_attention()
    accumulation = trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.state.max_steps = 1  # `train` sets it; after the last step no batch is fetched
    return trainer.get_batch_samples(iter(trainer.get_train_dataloader()), accumulation, trainer.args.device)


def gradients(trainer, batches, num_items, compute_loss=None):
    """Return the loss of each micro-batch and the gradient of the step."""
    trainer.model.zero_grad()
    losses = []
    for batch in batches:
        torch.manual_seed(0)
        inputs = trainer._prepare_inputs(dict(batch))
        losses.append((compute_loss or trainer.compute_loss)(trainer.model, inputs, num_items_in_batch=num_items))
        losses[-1].backward()
    return torch.stack(losses).detach(), gradient_of(trainer.model)


# With token weights: TRL's, to the bit


def summed_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


OBJECTIVES = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": 0.1},
    "function": {"compute_loss_func": summed_loss},
    "experts": {"model": "mixtral", "router_aux_loss_coef": 0.1},
}


@scores_tokens
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_token_weights_are_trl_to_the_bit(objective, packing, tmp_path):
    trainer = build_trainer(
        tmp_path, halves(), packing=packing, gradient_accumulation_steps=2, **{"max_length": 64} | OBJECTIVES[objective]
    )
    step = first_step(trainer)
    losses, gradient = gradients(trainer, *step)
    expected, gradient_of_trl = gradients(trainer, *step, super(SFTTrainer, trainer).compute_loss)
    assert torch.equal(losses, expected)
    assert losses.abs().min() > 0
    assert torch.equal(gradient, gradient_of_trl)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("more", [{}, {"pad_to_multiple_of": 64}, {"packing": False}], ids=str)
def test_a_router_loss_is_trained_with_label_smoothing(more, tmp_path):
    """TRL leaves it out in silence, so the reference is its gradient alone."""
    settings = {"model": "mixtral", "label_smoothing_factor": 0.1, "max_length": 64} | more
    gradient_of_weight = {}
    for weight in (0.0, 0.5):
        trainer = build_trainer(tmp_path, halves(), router_aux_loss_coef=weight, **settings)
        batches, num_items = first_step(trainer)
        _, gradient_of_weight[weight] = gradients(trainer, batches, num_items)
    batch = {name: value for name, value in batches[0].items() if name != "labels"}
    trainer.model.zero_grad()
    routed = trainer.model(**batch, output_router_logits=True).router_logits
    real = batch["input_ids"].flatten() != 0
    (0.5 * load_balancing_loss_func(tuple(layer[real] for layer in routed), 4, 2)).backward()
    added = gradient_of(trainer.model)
    assert added.norm() > 0.01 * gradient_of_weight[0.0].norm()
    assert (gradient_of_weight[0.5] - gradient_of_weight[0.0] - added).norm() < 1e-4 * added.norm()


def test_a_router_loss_without_gradients_is_refused_or_left_out(tmp_path):
    settings = checkpointing(True) | {"model": build_tiny_model("mixtral", router_aux_loss_coef=0.02)}
    with pytest.raises(ValueError, match=r"`router_aux_loss_coef=0.5` was given.*have none.*Set `use_reentrant"):
        build_trainer(tmp_path, halves(), router_aux_loss_coef=0.5, **settings)
    with pytest.warns(UserWarning, match=r"is in the config of the model.*Set `use_reentrant=False`"):
        trainer = build_trainer(tmp_path, halves(), max_steps=1, **settings)
    trainer.train()  # the first step, packed and unpacked, is compared without the router loss
    comparison = dict(trainer.packing_report.lines())["first step"]
    assert "the router loss is not compared under reentrant checkpointing" in comparison


# A loss of a subclass: all that is not the loss itself is there


class OwnLoss(SFTTrainer):
    """Computes the loss as transformers' documentation shows it, without `super().compute_loss`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.model.training:
            self.num_items = num_items_in_batch
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        loss = summed_loss(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("packing", [True, False])
def test_document_weights_are_not_ignored_by_a_loss_of_a_subclass(packing, tmp_path):
    settings = {"packing": packing, "document_weighting": "document", "gradient_accumulation_steps": 2}
    trainer = build_trainer(tmp_path, halves(), trainer_class=OwnLoss, **settings)
    with pytest.raises(ValueError, match=r"`OwnLoss.compute_loss`, which does not call.*no weights of documents.*set"):
        trainer.train()
    assert torch.equal(weights(trainer), start_weights())
    plain = build_trainer(tmp_path, halves(), **settings | {"document_weighting": "token"})
    assert trainer.num_items == first_step(plain)[1]  # trained tokens, and not documents

    class Doubled(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    loss, doubled = (
        run_training(tmp_path, halves(), trainer_class=kind, max_steps=1, **settings).state.log_history[-1][
            "train_loss"
        ]
        for kind in (SFTTrainer, Doubled)
    )
    assert doubled == pytest.approx(2 * loss, rel=1e-6)


OF_OUTPUTS = {"entropy", "mean_token_accuracy"}


@pytest.mark.parametrize("packing", [True, False])
def test_what_is_logged_of_a_loss_of_a_subclass_is_right_or_not_there(packing, tmp_path):
    logs = []
    for kind in (SFTTrainer, OwnLoss):
        settings = {"packing": packing, "max_steps": 4, "logging_steps": 2, "learning_rate": 0.0}
        trainer = run_training(tmp_path, halves(), trainer_class=kind, gradient_accumulation_steps=2, **settings)
        logs.append(log_of_steps(trainer))
    assert len(logs[0]) == len(logs[1]) == 2
    for ours, theirs in zip(*logs, strict=True):
        assert theirs.keys() == ours.keys() - OF_OUTPUTS
        for name in ("num_tokens", "trained_tokens", "efficiency", "documents_per_step"):
            assert theirs[name] == ours[name] > 0
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)


# Mixtures of experts


def experts(tmp_path, data, **settings):
    return build_trainer(tmp_path, data, model="mixtral", router_aux_loss_coef=1.0, **settings)


def statistic(trainer, batch):
    """Return TRL's statistic on the documents of a batch alone."""
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    keep = torch.cat([(part != -100).any().expand(len(part)) for part in batch["labels"][0].split(lengths)])
    trainer.model.train()
    with torch.no_grad():
        outputs = trainer.model(**{k: v for k, v in batch.items() if k != "labels"}, output_router_logits=True)
    return load_balancing_loss_func(tuple(layer[keep] for layer in outputs.router_logits), 4, 2).item()


@pytest.mark.parametrize("padding", [{}, {"pad_to_multiple_of": 64}, {"pad_documents_to_multiple_of": 16}], ids=str)
def test_padding_and_empty_micro_batches_add_nothing_to_the_router_statistic(padding, tmp_path):
    trainer = experts(tmp_path, halves(3), gradient_accumulation_steps=5, **padding)
    batches, num_items = first_step(trainer)
    filled = [batch for batch in batches if (batch["labels"] != -100).any()]
    assert len(batches) == 5
    assert len(filled) == 3
    assert not padding or all((batch["input_ids"][0, -4:] == 0).all() for batch in filled), "no padding"
    losses, gradient = gradients(trainer, batches, num_items)
    nll = sum(-trainer.model(**batch, fused_lm_head=True).log_probs.sum().item() for batch in filled) / num_items.item()
    expected = nll + np.mean([statistic(trainer, batch) for batch in filled])
    assert losses.sum().item() == pytest.approx(expected, rel=1e-5)
    assert gradient.isfinite().all()
    assert [loss for loss, batch in zip(losses, batches, strict=True) if not (batch["labels"] != -100).any()] == [0, 0]
    trainer.train()
    assert trainer.state.log_history[-2]["aux_loss"] == pytest.approx(expected - nll, rel=1e-4)


def test_padding_adds_nothing_to_the_router_statistic_of_an_evaluation(tmp_path):
    losses = [
        experts(tmp_path, halves(3), eval_packing=True, **padding).evaluate(halves(3))["eval_aux_loss"]
        for padding in ({}, {"pad_to_multiple_of": 64}, {"pad_documents_to_multiple_of": 16})
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_dummies_of_other_ranks_do_not_lower_the_router_loss_of_an_evaluation(tmp_path, monkeypatch):
    trainer = experts(tmp_path, halves(3))
    expected = trainer.evaluate(halves(3))["eval_aux_loss"]
    gather = trainer.accelerator.gather

    def gather_with_a_rank_of_dummies(values):
        return torch.cat([gather(values).flatten(), torch.zeros(values.numel(), dtype=values.dtype)])

    monkeypatch.setattr(trainer.accelerator, "gather", gather_with_a_rank_of_dummies)
    assert trainer.evaluate(halves(3))["eval_aux_loss"] == pytest.approx(expected, rel=1e-6)


# What is logged


def lengths_of(batch):
    """Return the lengths of the documents of a batch; padding is left out."""
    return [len(tokens) for tokens, labels in documents_of(batch) if any(label >= 0 for label in labels)]


FILLED = {"packing_strategy": "minibatch", "pad_to_multiple_of": 64}


@pytest.mark.parametrize("settings", [{}, FILLED, {"pad_documents_to_multiple_of": 16}, {"packing": False}], ids=str)
def test_what_is_logged_is_right(settings, tmp_path):
    """Loss, entropy and accuracy are those of TRL, which `test_equivalence.py` compares."""
    logs = {"logging_steps": 2, "include_num_input_tokens_seen": "non_padding", "peak_tflops": 0.5}
    saves = {"save_steps": 1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    trainer = build_trainer(tmp_path, halves(), learning_rate=0.1, **logs, **saves, **settings)
    steps = record_steps(trainer)
    trainer.train()
    num_tokens = 0
    logs = log_of_steps(trainer)
    assert len(logs) == trainer.state.global_step // 2 > 1
    for i, entry in enumerate(logs):
        window = steps[2 * i] + steps[2 * i + 1]
        lengths = [length for batch in window for length in lengths_of(batch)]
        tokens = sum(lengths)
        num_tokens += tokens
        assert entry["num_tokens"] == entry["num_input_tokens_seen"] == num_tokens
        room = sum(batch["input_ids"].numel() for batch in window)
        if not settings.keys() & {"packing_strategy", "packing"}:
            room = sum(bool((batch["labels"] != -100).any()) for batch in window) * 2 * 64
        assert entry["efficiency"] == pytest.approx(tokens / room, abs=1e-4)
        costs = make_cost_model(trainer.model.config)(np.array(lengths))
        rate = entry["tflops_per_second_per_rank"] / entry["tokens_per_second"]  # the time cancels
        assert rate == pytest.approx(3 * costs.sum() / tokens / 1e12, rel=2e-3)
        assert entry["mfu"] == pytest.approx(entry["tflops_per_second_per_rank"] / 0.5, rel=1e-3)
    end = trainer.state.log_history[-1]
    assert end["train_samples_per_second"] == pytest.approx(48 / end["train_runtime"], rel=1e-3)


class OwnLabels:
    """Trains every other token of the labels only."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs["labels"].masked_fill(inputs["input_ids"] % 2 == 0, -100)
        return super().compute_loss(model, inputs | {"labels": labels}, *args, **kwargs)


@scores_tokens
@pytest.mark.parametrize("settings", [{"packing": False}, {"packing_strategy": "minibatch"}], ids=str)
def test_scores_are_means_over_the_labels_that_a_subclass_trains(settings, tmp_path):
    of_trl = {"config_class": trl.SFTConfig, "packing": False}
    logs = []
    for kind, config_of_kind in ((SFTTrainer, settings), (trl.SFTTrainer, of_trl)):
        subclass = type("Own", (OwnLabels, kind), {})
        trainer = run_training(tmp_path, halves(), trainer_class=subclass, max_steps=3, **config_of_kind)
        logs.append(log_of_steps(trainer))
    assert len(logs[0]) == 3
    for ours, expected in zip(*logs, strict=True):
        for name in ("loss", "entropy", "mean_token_accuracy"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4)


def test_smoothing_is_that_of_the_constructed_smoother(tmp_path):
    """Setting the share later changes nothing, as in TRL. In packs it is refused (`test_replaced.py`)."""
    ends = []
    for share in (0.1, 0.3):
        trainer = build_trainer(tmp_path, halves(), label_smoothing_factor=0.1, packing=False, max_steps=2)
        trainer.args.label_smoothing_factor = share
        trainer.train()
        ends.append(weights(trainer))
    assert torch.equal(*ends)


def test_the_last_line_is_of_the_whole_training(tmp_path):
    """Return from `train()` what all five steps did, though the last window has one step."""
    rows = halves().add_column("source", [f"s{i % 2}" for i in range(24)])
    settings = {"logging_steps": 4, "max_steps": 5, "gradient_accumulation_steps": 2, "source_column": "source"}
    trainer = build_trainer(tmp_path, rows, learning_rate=0.0, **settings)
    steps = record_steps(trainer)
    metrics = trainer.train().metrics
    (window,) = log_of_steps(trainer)
    lengths = [[length for batch in step for length in lengths_of(batch)] for step in steps]
    trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for step in steps for batch in step)
    assert metrics["trained_tokens"] == trained
    assert trained > window["trained_tokens"]
    assert metrics["documents_per_step"] == pytest.approx(sum(map(len, lengths)) / 5, abs=0.01)
    assert metrics["trained_tokens/s0"] + metrics["trained_tokens/s1"] == trained
    seconds = sum(map(sum, lengths)) / metrics["tokens_per_second"]
    of_window = sum(map(sum, lengths[:4])) / window["tokens_per_second"]
    assert of_window < seconds < metrics["train_runtime"]
    assert trainer.state.log_history[-1]["tokens_per_second"] == metrics["tokens_per_second"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_share_of_time_without_data_is_logged(is_slow, tmp_path):
    trainer = build_trainer(tmp_path, halves(), logging_steps=2, max_steps=4)
    collate = trainer.data_collator

    def slow(documents):
        time.sleep(0.5)
        return collate(documents)

    if is_slow:
        trainer.data_collator = slow
    trainer.train()
    shares = [entry["data_wait"] for entry in log_of_steps(trainer)]
    assert len(shares) == 2
    assert all(0 <= share <= 1 for share in shares)
    assert (min(shares) > 0.5) is is_slow


def test_num_tokens_is_up_to_date_at_every_checkpoint(tmp_path):
    trainer = build_trainer(tmp_path, halves(), num_train_epochs=1, logging_steps=1000, save_steps=1)
    steps = record_steps(trainer)
    at_checkpoint = []

    class Save(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            num_tokens = sum(batch["input_ids"].numel() for step in steps for batch in step)
            at_checkpoint.append((trainer._total_train_tokens, num_tokens))

    trainer.add_callback(Save())
    trainer.train()
    assert len(at_checkpoint) == trainer.state.global_step > 3
    assert all(counted == expected > 0 for counted, expected in at_checkpoint)
    assert trainer.state.log_history[-1]["num_tokens"] == at_checkpoint[-1][0], (
        "the last line of a short run has them, too"
    )


@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}], ids=str)
def test_the_loss_of_a_micro_batch_reads_its_layout_once(settings, tmp_path, monkeypatch):
    trainer = build_trainer(tmp_path, halves(8), **settings)
    batches, num_items = first_step(trainer)
    calls = []
    monkeypatch.setattr(objective, "layout_of", lambda batch: calls.append(batch) or layout_of(batch))
    trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=num_items)
    assert len(calls) == 1


# Configs with fields of a mixture, of models without one, and of a mixture under other names than TRL reads.
TINY_V4 = shrink(DeepseekV4Config()) | {"mlp_layer_types": ["hash_moe"] * 3, "vocab_size": 300}
DENSE = {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 8}
EXPERTS_IN_CONFIG = {
    "no experts": ("granitemoehybrid", DENSE, False),
    "experts without a router": ("deepseek_v4", TINY_V4, False),
    "dense layers only": ("qwen3_moe", {"router_aux_loss_coef": 0.1, "mlp_only_layers": [0, 1]}, False),
    "experts by another name": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
}


@current_models
@pytest.mark.parametrize("name, packing", [*((name, True) for name in EXPERTS_IN_CONFIG), ("no experts", False)])
def test_a_config_of_experts_without_a_router_trains(name, packing, tmp_path):
    model_type, config, has_router = EXPERTS_IN_CONFIG[name]
    model = build_tiny_model(model_type, **config)
    assert model.config.router_aux_loss_coef > 0  # which TRL would weigh a router loss with
    trainer = run_training(tmp_path, halves(), model=model, packing=packing, max_steps=1, logging_steps=1)
    (log,) = log_of_steps(trainer)
    assert np.isfinite(log["loss"])
    assert ("aux_loss" in log) == has_router
    if not has_router:
        with pytest.raises(ValueError, match="router_aux_loss_coef=0.1.*None of its layers has a router.*=0.0"):
            build_trainer(tmp_path, halves(), model=build_tiny_model(model_type, **config), router_aux_loss_coef=0.1)


@pytest.mark.parametrize("model_type", ["dbrx", "granitemoe"])
def test_routers_whose_logits_are_not_returned_train_without_their_loss(model_type, tmp_path):
    """transformers below 5.18 does not return these logits; in later versions the same model trains with the loss."""
    model = zoo.build_model(model_type, vocab_size=300)
    is_returned = Version("5.18") <= TRANSFORMERS
    with nullcontext() if is_returned else pytest.warns(UserWarning, match="does not return the logits of its routers"):
        trainer = build_trainer(tmp_path, halves(), model=model, max_steps=1, logging_steps=1)
    trainer.train()
    (log,) = log_of_steps(trainer)
    assert np.isfinite(log["loss"])
    if not is_returned:
        assert "aux_loss" not in log
        with pytest.raises(ValueError, match=r"`router_aux_loss_coef=0.1`.*routers.*transformers>=5.18.*=0.0"):
            build_trainer(
                tmp_path, halves(), model=zoo.build_model(model_type, vocab_size=300), router_aux_loss_coef=0.1
            )
