"""The user's own loss and step on packs, beside stock TRL on padded batches of the same documents.

Each kind of user code is written as transformers' and TRL's documentation write it, once, and runs on both trainers.
Accumulation is 3, and the last step of the epoch has fewer micro-batches, so a packed run has dummies.
"""

import copy
import inspect
import re
from functools import partial
from math import isfinite

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from support.features import needs
from support.models import build_tiny_model
from support.paths import ROOT
from support.rounding import weight_difference
from support.runs import (
    build_trainer,
    log_of_steps,
    plain_sgd,
    record_steps,
    run_training,
    start_weights,
    stock,
    tokenised,
    weights,
)
from support.user_code import (
    USER_CODE,
    with_mean,
    with_penalty,
    with_scaled_mean,
    with_step,
    with_sum,
    with_teacher,
)
from support.versions import evaluates_own_losses, trl_trains
from transformers import TrainerCallback

from trl_packfix import PackingLeakError, SFTTrainer, prepare_for_packing
from trl_packfix.isolation.user_hooks import gradient_hooks_aside
from trl_packfix.planning.balance import even_targets
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.planning.schedule import Schedule
from trl_packfix.planning.units import Bins, Units
from trl_packfix.training.user_code import uneven_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def documents():
    """Return documents of 4 to 60 tokens, all of them trained."""
    rng = np.random.default_rng(0)
    return tokenised(rng, rng.integers(4, 61, 20))


SETTINGS = plain_sgd(0.05, num_train_epochs=2, gradient_accumulation_steps=3, seed=7)

# Several documents in each micro-batch
SEVERAL = {"packing_strategy": "minibatch", "per_device_train_batch_size": 4, "max_steps": 1}


def run_both(folder, user_code=USER_CODE[""], model="llama", prepare=lambda trainer: None, **settings):
    """Train with user code, packed by ours and unpacked by stock TRL, and return both runs."""
    make_class, loss_func, _ = user_code
    settings = SETTINGS | {"compute_loss_func": loss_func} | settings
    packed = {"trainer_class": make_class(SFTTrainer), "packing_strategy": "minibatch"}
    unpacked = {"trainer_class": make_class(trl.SFTTrainer), "config_class": trl.SFTConfig, "packing": False}
    trainers = [build_trainer(folder, documents(), model, **settings | kind) for kind in (packed, unpacked)]
    for trainer in trainers:
        prepare(trainer)
        trainer.train()
    return trainers


def difference(packed, unpacked, model_type="llama"):
    """Return the difference of the weights, relative to what the unpacked run changes."""
    return weight_difference(weights(packed), weights(unpacked), start_weights(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (*_, is_mean) in USER_CODE.items() if not is_mean])
def test_user_code_that_sums_trains_as_unpacked(name, tmp_path):
    packed, unpacked = run_both(tmp_path, USER_CODE[name], per_device_train_batch_size=4)
    assert difference(packed, unpacked) < 5e-6
    losses = [[entry["loss"] for entry in log_of_steps(trainer)] for trainer in (packed, unpacked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@evaluates_own_losses
def test_the_loss_of_the_documentation_trains_and_evaluates(tmp_path):
    (code,) = re.findall("```python\n(.*?)```", (ROOT / "docs/user_code.md").read_text(), re.DOTALL)
    exec(code, names := {})
    settings = {"eval_dataset": documents(), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    runs = [
        run_training(tmp_path, documents(), compute_loss_func=loss, **settings) for loss in (names["summed_loss"], None)
    ]
    for name in ("loss", "eval_loss"):
        values = [entry[name] for run in runs for entry in run.state.log_history if name in entry]
        assert values[0] == pytest.approx(values[1], rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (*_, is_mean) in USER_CODE.items() if is_mean])
def test_means_of_one_document_train_as_unpacked(name, tmp_path):
    """If each micro-batch has one document, both runs take the same means. Dummies of the last step must not count."""
    packed, unpacked = run_both(tmp_path, USER_CODE[name], per_device_train_batch_size=1)
    assert len(packed.train_dataset) % 3 != 0, "no dummy"
    assert difference(packed, unpacked) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["minibatch", "stream"])
def test_means_of_packs_are_near_those_of_unpacked_training(strategy, tmp_path):
    """Packs as they come would be 2.0 of an update away from the unpacked run (micro-batches of 143, 145, 4 tokens)."""
    settings = SETTINGS | {"num_train_epochs": 1, "per_device_train_batch_size": 4}
    options = {"trainer_class": with_mean(SFTTrainer), "packing_strategy": strategy}
    trainer = build_trainer(tmp_path, documents(), **options, **settings)
    steps = record_steps(trainer)
    trainer.train()
    for step in steps:
        counts = [int((batch["labels"] != -100).sum()) for batch in step]
        counts = [count for count in counts if count]  # without dummies
        assert len(counts) > 1, "a step of one micro-batch is even"
        assert max(counts) < 1.1 * min(counts)
    if strategy == "minibatch":
        unpacked = stock(tmp_path, documents(), **settings)
        unpacked.train()
        tokens, expected = ([entry["num_tokens"] for entry in log_of_steps(run)] for run in (trainer, unpacked))
        assert tokens == expected


def test_a_mean_is_divided_by_the_micro_batches_of_all_ranks(tmp_path, monkeypatch):
    """In a step of two micro-batches this rank has two documents, and another rank has one and a dummy."""
    divisors = []

    class Noting(with_scaled_mean(SFTTrainer)):
        def compute_loss(self, *args, **kwargs):
            divisors.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(*args, **kwargs)

    settings = {"packing_strategy": "minibatch", "per_device_train_batch_size": 1, "max_steps": 1}
    trainer = build_trainer(
        tmp_path, documents().select([0, 1]), trainer_class=Noting, gradient_accumulation_steps=2, **settings
    )
    reduce = trainer.accelerator.reduce

    def reduce_over_two_ranks(value, reduction="sum", **kwargs):
        return (value + 1) / 2 if reduction == "mean" else reduce(value, reduction, **kwargs)

    monkeypatch.setattr(trainer.accelerator, "reduce", reduce_over_two_ranks)
    trainer.train()
    assert divisors == [1.5, 1.5]


class DummiesSecond(SFTTrainer):
    """Has dummies only in the second step, as a rank has that gets none of the last documents of an epoch."""

    def get_batch_samples(self, batches, *args):
        def mask(batch):
            return batch | {"labels": torch.full_like(batch["labels"], -100)}

        return super().get_batch_samples(map(mask, batches) if self.state.global_step == 1 else batches, *args)


@pytest.mark.parametrize("make_class", [with_penalty, with_step])
def test_a_rank_with_dummies_only_is_not_told_that_its_loss_has_no_weights(make_class, tmp_path):
    """The user's code gets no dummies, so in such a step it calls no loss of this package."""
    settings = {"document_weighting": "document", "max_steps": 3}
    trainer = run_training(tmp_path, documents(), trainer_class=make_class(DummiesSecond), **settings)
    counts = [entry["trained_tokens"] for entry in log_of_steps(trainer)]
    assert [count > 0 for count in counts] == [True, False, True]


def test_what_remains_uneven_is_said_once_with_its_number(tmp_path, caplog):
    trainer = run_training(tmp_path, documents(), trainer_class=with_mean(SFTTrainer), max_steps=1, **SETTINGS)
    source = trainer.data.source
    _, _, gap = uneven_weights(source.planner.schedule(0), source.documents.trained)
    (text,) = [record.getMessage() for record in caplog.records if "micro-batch" in record.getMessage()]
    assert text.startswith("`MeanLoss.compute_loss` computes the loss of packs. In the first epoch they hold ")
    assert f"counts up to {gap:.0%} more or less" in text
    assert "Divide a sum over trained tokens by `num_items_in_batch`" in text


def test_nothing_is_said_without_user_code_or_of_steps_of_one_micro_batch(tmp_path, caplog):
    run_training(tmp_path, documents(), max_steps=1, gradient_accumulation_steps=3)
    run_training(tmp_path, documents(), trainer_class=with_mean(SFTTrainer), max_steps=1)
    assert not [record for record in caplog.records if "micro-batch" in record.getMessage()]


def test_uneven_weights_are_those_of_a_mean_of_means():
    """Micro-batches of 10 and 30 trained tokens, then 20 and a dummy: 1/10 and 1/30 for 2/40 each."""
    schedule = Schedule(np.arange(3), np.array([0, 1, 2, 3, 3]), accumulation=2, world_size=1)
    assert uneven_weights(schedule, np.array([10, 30, 20])) == pytest.approx((30, 10, 1.0))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 5))
def test_even_targets_keeps_units_and_capacity_and_is_never_less_even(units, num):
    rows = np.array([max(pair) for pair in units])
    targets = np.array([min(pair) for pair in units])
    members = np.arange(len(units))
    given_packs = [members[i::num] for i in range(num)]
    capacity = max(int(rows[pack].sum()) for pack in given_packs)
    packs = even_targets(given_packs, Units(rows, LLAMA_7B, targets=targets), num, bins=Bins(capacity=capacity))

    def spread(packs):
        sums = [targets[pack].sum() for pack in packs]
        return max(sums) - min(sums)

    assert sorted(np.concatenate(packs).tolist()) == members.tolist()
    assert len(packs) == num
    assert max(rows[pack].sum() for pack in packs) <= capacity
    assert spread(packs) <= spread(given_packs)


@needs("prefixes")
def test_families_are_evened_out_too(tmp_path):
    """Families count the trained tokens of all their documents."""
    begin = list(range(10, 50))
    data = Dataset.from_dict({"input_ids": [begin + [60 + i] * (1 + i % 9) for i in range(40)]})
    settings = {"share_prefixes": "family", "packing_strategy": "minibatch", "gradient_accumulation_steps": 2}
    trainer = build_trainer(tmp_path, data, trainer_class=USER_CODE["penalty"][0](SFTTrainer), max_steps=1, **settings)
    assert isfinite(trainer.train().training_loss)
    units = trainer.data.source.planner.units(0)
    assert len(units) < len(data), "no families"
    assert units.targets.sum() == trainer.data.source.documents.trained.sum()


def test_a_loader_of_the_users_own_is_refused(tmp_path):
    class OwnLoader(SFTTrainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    message = r"`OwnLoader.get_train_dataloader`, which does not call .* given with packing"
    with pytest.raises(ValueError, match=message):
        run_training(tmp_path, documents(), trainer_class=OwnLoader)


def test_a_loader_that_wraps_ours_trains(tmp_path):
    class Wrapped(SFTTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    assert isfinite(build_trainer(tmp_path, documents(), trainer_class=Wrapped, max_steps=1).train().training_loss)


def test_the_report_says_that_the_users_step_is_not_tested(tmp_path):
    trainer = run_training(tmp_path, documents(), trainer_class=with_step(SFTTrainer), max_steps=1)
    assert "without OwnStep.training_step, which is not tested" in trainer.packing_report.first_step


# Other models in a step


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_a_prepared_teacher_teaches_each_document(model_type, tmp_path):
    """OPT's positions ignore `position_ids`, so documents of a pack would see each other in an unprepared teacher."""

    def add_teacher(trainer):
        trainer.teacher = build_tiny_model(model_type, seed=9).eval()
        if isinstance(trainer, SFTTrainer):
            prepare_for_packing(trainer.teacher, max_length=64)

    trainers = run_both(tmp_path, (with_teacher, None, False), model_type, add_teacher, learning_rate=0.5)
    assert difference(*trainers, model_type) < 1e-5


def test_an_unprepared_teacher_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, documents(), trainer_class=with_teacher(SFTTrainer), **SEVERAL)
    trainer.teacher = build_tiny_model(seed=9).eval()
    message = r"LlamaForCausalLM was called .* a pack of \d+ documents.*prepare_for_packing"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_the_trained_model_without_boundaries_is_refused(tmp_path):
    class WithoutBoundaries(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss

    with pytest.raises(ValueError, match=r"without their boundaries.*model\(\*\*inputs\)"):
        run_training(tmp_path, documents(), trainer_class=WithoutBoundaries, **SEVERAL)


def test_a_model_of_single_documents_and_own_embeddings_are_not_refused(tmp_path):
    """Teachers that get each document alone are right, and so is a table of weights by token."""

    class Alone(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            lengths = inputs["cu_seq_lens_q"].diff().tolist()
            with torch.no_grad():
                for tokens in inputs["input_ids"].split(lengths, dim=1):
                    self.teacher(input_ids=tokens)
            self.token_weights(inputs["input_ids"])
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = build_trainer(tmp_path, documents(), trainer_class=Alone, **SEVERAL)
    trainer.teacher = build_tiny_model("llama", seed=9).eval()
    trainer.token_weights = torch.nn.Embedding(300, 1)
    assert isfinite(trainer.train().training_loss)


def test_a_loss_of_the_users_own_trains_in_bfloat16(tmp_path):
    """With `bf16`, the default of TRL, accelerate puts an object that is no function around the model's forward."""
    settings = {"trainer_class": with_sum(SFTTrainer), "bf16": True} | SEVERAL
    trainer = run_training(tmp_path, documents(), **settings)
    assert type(inspect.unwrap(trainer.model_wrapped.forward, stop=is_no_function)).__name__ == "ConvertOutputsToFp32"
    assert isfinite(trainer.state.log_history[-1]["train_loss"])


def is_no_function(value):
    return not inspect.isroutine(value)


def as_partial(model):
    model.forward = partial(type(model).forward, model)


def with_an_empty_cell(model):
    forward = model.forward

    def forward_or_default(*args, **kwargs):
        return forward(*args, **kwargs) if args or kwargs else default_output

    if forward is None:
        default_output = None
    model.forward = forward_or_default


@pytest.mark.parametrize("replace_forward", [as_partial, with_an_empty_cell])
def test_a_teacher_with_a_forward_of_its_own_gets_single_documents(replace_forward, tmp_path):
    class Alone(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            with torch.no_grad():
                for tokens in inputs["input_ids"].split(inputs["cu_seq_lens_q"].diff().tolist(), dim=1):
                    self.teacher(input_ids=tokens)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = build_trainer(tmp_path, documents(), trainer_class=Alone, **SEVERAL)
    trainer.teacher = build_tiny_model("llama", seed=9).eval()
    replace_forward(trainer.teacher)
    assert isfinite(trainer.train().training_loss)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_deep_copy_that_is_made_in_a_step_is_refused(bf16, tmp_path):
    class Copying(with_teacher(SFTTrainer)):
        def compute_loss(self, *args, **kwargs):
            self.teacher = copy.deepcopy(self.model).eval()
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ValueError, match=r"A deep copy of a LlamaForCausalLM .*`del copy.forward`"):
        run_training(tmp_path, documents(), trainer_class=Copying, bf16=bf16, **SEVERAL)


def test_a_deep_copy_that_would_compute_with_the_original_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, documents(), trainer_class=with_teacher(SFTTrainer), **SEVERAL)
    trainer.teacher = copy.deepcopy(trainer.model).eval()
    with pytest.raises(ValueError, match=r"A deep copy of a LlamaForCausalLM .*`del copy.forward`"):
        trainer.train()
    del trainer.teacher.forward
    prepare_for_packing(trainer.teacher, max_length=64)
    assert isfinite(trainer.train().training_loss)


@pytest.mark.parametrize("part", ["", "model.layers.0"], ids=["whole", "layer"])
def test_a_loss_may_set_the_model_to_evaluation_mode_and_back(part, tmp_path):
    modes = []

    class ReadsInEvaluationMode(SFTTrainer):
        def compute_loss(self, model, *args, **kwargs):
            model.get_submodule(part).eval()
            model.train()
            modes.append(all(module.training for module in model.modules()))
            return super().compute_loss(model, *args, **kwargs)

    run_training(tmp_path, documents(), trainer_class=ReadsInEvaluationMode, max_steps=2)
    assert modes == [True, True]


def test_the_mode_of_a_deep_copy_that_is_made_in_a_step_is_its_own(tmp_path):
    copies = []

    class Copying(SFTTrainer):
        def compute_loss(self, model, *args, **kwargs):
            copies.append(copy.deepcopy(model))
            assert copies[-1].eval() is copies[-1]
            assert model.training
            return super().compute_loss(model, *args, **kwargs)

    run_training(tmp_path, documents(), trainer_class=Copying, **SEVERAL)
    assert not any(module.training for module in copies[-1].modules())
    assert all(module.training for module in copies[-1].train().modules())


# Callbacks that change the model


class SetsAttention(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.set_attn_implementation("sdpa")


@pytest.mark.slow
def test_attention_that_a_callback_sets_is_set_back_in_packs(tmp_path):
    """On OPT sdpa lets documents of packs see each other, which changes 0.1 of an update and more."""
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    with pytest.warns(UserWarning, match=r"attn_implementation='sdpa' was set .*'packfix_varlen' is set again"):
        trainers = run_both(tmp_path, model="opt", callbacks=[SetsAttention()], **settings)
    assert difference(*trainers, "opt") < 1e-5


class Swaps(TrainerCallback):
    """Replaces a module before the second step."""

    def __init__(self, make):
        self.make = make

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.model.layers[0].mlp = self.make(model.model.layers[0].mlp)


class Shifted(torch.nn.Module):
    """Adds to each token what it computed of the token 8 before it, also across documents."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        states = self.inner(states)
        return states + torch.nn.functional.pad(states, (0, 0, 8, 0))[:, : states.shape[1]]


def test_a_module_that_a_callback_swaps_in_is_tested(tmp_path, caplog):
    run_training(tmp_path, documents(), max_steps=3, callbacks=[Swaps(copy.deepcopy)])
    (text,) = [record.getMessage() for record in caplog.records if "were changed" in record.getMessage()]
    assert text.startswith("Modules of LlamaForCausalLM were changed before optimizer step 2, so documents in packs")


def test_a_leaking_module_that_a_callback_swaps_in_is_refused(tmp_path):
    with pytest.raises(PackingLeakError):
        run_training(tmp_path, documents(), max_steps=3, on_leak="raise", callbacks=[Swaps(Shifted)])


class Mixing(torch.nn.Module):
    """Adds to each token a share of all tokens of its row, also of other documents."""

    def forward(self, states):
        return states + states.mean(1, keepdim=True)


class SwapsAtOneAddress(TrainerCallback):
    """Deletes a norm before the second step, and puts a module in its place, at the same address if it is free."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            layer = model.model.layers[0]
            address = id(layer.post_attention_layernorm)
            del layer.post_attention_layernorm
            candidates = []
            while len(candidates) < 100 and (not candidates or id(candidates[-1]) != address):
                candidates.append(Mixing())
            layer.post_attention_layernorm = candidates[-1]


def test_a_module_at_the_address_of_a_deleted_one_is_tested(tmp_path):
    with pytest.raises(PackingLeakError):
        run_training(tmp_path, documents(), max_steps=3, on_leak="raise", callbacks=[SwapsAtOneAddress()])


# Hooks that the tests before the first step meet


def fuse_optimizer(trainer):
    """Step in the backward, as PyTorch's recipe and transformers' layer-wise optimizers do; counts the steps."""
    trainer.num_hooked = 0
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in trainer.model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        trainer.num_hooked += 1

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def schedule_gradients(trainer):
    """Scale gradients by a schedule that counts its own calls."""
    trainer.num_hooked = 0

    def scale(gradient):
        trainer.num_hooked += 1
        return gradient * (1 + 0.1 * (trainer.num_hooked // 21))

    for parameter in trainer.model.parameters():
        parameter.register_hook(scale)


def test_layerwise_optimizers_of_transformers_are_left_out_and_other_hooks_stay():
    """transformers sums gradients of divided experts in such a hook, which the comparison of the first step needs."""
    model = build_tiny_model("llama")
    names = []

    def hook_of(name):
        def hook(parameter):
            names.append(name)

        hook.__module__ = "transformers.trainer"
        hook.__qualname__ = f"make.<locals>.{name}"
        return hook

    for name in ("optimizer_hook", "average_gradient"):
        model.lm_head.weight.register_post_accumulate_grad_hook(hook_of(name))
    with gradient_hooks_aside(model):
        model(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    assert names == ["average_gradient"]
    model(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    assert sorted(names[1:]) == ["average_gradient", "optimizer_hook"]


@trl_trains
@pytest.mark.parametrize("register", [fuse_optimizer, schedule_gradients])
def test_hooks_on_gradients_run_as_often_as_in_unpacked_training(register, tmp_path):
    settings = {"num_train_epochs": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    settings["learning_rate"] = 0.0 if register is fuse_optimizer else 0.05
    packed, unpacked = run_both(tmp_path, prepare=register, **settings)
    assert packed.num_hooked == unpacked.num_hooked > 0
    assert difference(packed, unpacked) < 1e-5
    assert f"hooks on gradients left out: {register.__name__}" in packed.packing_report.first_step


def test_forward_hooks_run_in_the_tests_and_the_report_says_so(tmp_path):
    trainer = build_trainer(tmp_path, documents(), max_steps=1)

    def observe(module, args, output):
        pass

    trainer.model.model.embed_tokens.register_forward_hook(observe)
    trainer.train()
    assert "forward hooks ran, and count their calls in the tests, too: " in trainer.packing_report.first_step
    assert "observe of model.embed_tokens" in trainer.packing_report.first_step


def test_a_forward_hook_that_trains_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, documents(), max_steps=1)

    def train(module, args, output):
        with torch.no_grad():
            module.weight.mul_(0.99)

    trainer.model.model.embed_tokens.register_forward_hook(train)
    with pytest.raises(ValueError, match=r"changed parameters of LlamaForCausalLM.*train of model.embed_tokens"):
        trainer.train()


def test_no_hooks_are_named_without_any(tmp_path):
    """Neither those of this package nor those of the libraries."""
    trainer = run_training(tmp_path, documents(), max_steps=1, peft_config=LoraConfig(target_modules=["q_proj"]))
    assert "hook" not in trainer.packing_report.first_step
