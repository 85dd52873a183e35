"""One model, several trainers: each trains as on a fresh model, whatever was built or trained on it before."""

import copy
import threading

import pytest
import torch
import trl
from packaging.version import Version
from support.examples import leaking_example
from support.features import needs
from support.models import build_tiny_model
from support.runs import build_trainer, checkpointing, start_weights, texts, weights
from support.versions import TRL, enable_checkpointing, is_checkpointing
from transformers import TrainerCallback

from trl_packfix import PackingLeakError, check_isolation
from trl_packfix.attention.forwards import CarryingCheckpoint

pytestmark = pytest.mark.slow

# On packs as they are and on repaired packs; whether all trainers are built before the first trains; reentrant or not
MAMBA = pytest.param("mamba", True, False, marks=needs("hybrids"))
MODELS = [("llama", True, None), ("bloom", False, True), MAMBA]
KINDS = ["packed", "unpacked", "stock", "stock packed"]


def build(kind, model, folder, **settings):
    settings = {"max_steps": 2, "learning_rate": 1e-2, "packing": "unpacked" not in kind and kind != "stock"} | settings
    of_trl = {"trainer_class": trl.SFTTrainer, "config_class": trl.SFTConfig} if kind.startswith("stock") else {}
    return build_trainer(folder, texts(12), model, **of_trl, **settings)


def our_hooks(model):
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook for hook in hooks if hook.__module__.startswith("trl_packfix")]


@pytest.mark.parametrize("model_type, built_first, reentrant", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_next_trainer_trains_as_on_a_fresh_model(model_type, built_first, reentrant, tmp_path):
    model = build_tiny_model(model_type)
    own_attention = model.config._attn_implementation
    state = copy.deepcopy(model.state_dict())
    settings = checkpointing(reentrant)
    kinds = ["packed", *KINDS]
    if Version("1.15") > TRL and model_type == "mamba":
        # TRL cannot train it: its loss in chunks reads what it does not have, and stays on the model
        kinds = [kind for kind in kinds if not kind.startswith("stock")]
    trainers = [build(kind, model, tmp_path, **settings) for kind in kinds] if built_first else [None] * len(kinds)
    expected = {}
    for kind, trainer in zip(kinds, trainers, strict=True):
        assert model.config._attn_implementation == own_attention
        trainer = trainer or build(kind, model, tmp_path, **settings)
        model.load_state_dict(state)
        trainer.train()
        if kind not in expected:
            fresh = build(kind, build_tiny_model(model_type), tmp_path, **settings)
            fresh.train()
            expected[kind] = weights(fresh)
        assert trainer.model is model, kind
        assert torch.equal(weights(trainer), expected[kind]), kind
        assert not torch.equal(weights(trainer), start_weights(model_type))
        if kind == "packed":
            assert bool(trainer.packed_model.repaired) is (model_type == "bloom")
            assert not trainer.packed_model.is_unpacked
            assert not our_hooks(model)
            trainer.packed_model.attach_packed_attention()
            assert our_hooks(model), "there is nothing to remove"
            trainer.packed_model.restore_own_attention()
        checkpoints = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
        assert not any(isinstance(checkpoint, CarryingCheckpoint) for checkpoint in checkpoints)


@pytest.mark.parametrize(
    "model_type, reentrant", [("llama", False), ("mpt", True), pytest.param("mamba", False, marks=needs("hybrids"))]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")
def test_checkpointing_may_be_enabled_while_training_runs(model_type, reentrant, tmp_path):
    class Enable(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                enable_checkpointing(model, reentrant)
                model.enable_input_require_grads()

    trainers = [build("packed", build_tiny_model(model_type), tmp_path, max_steps=3) for _ in range(2)]
    trainers[1].add_callback(Enable())
    for trainer in trainers:
        trainer.train()
    assert is_checkpointing(trainers[1].model)
    assert not is_checkpointing(trainers[0].model)
    torch.testing.assert_close(*map(weights, trainers), rtol=1e-5, atol=1e-6)


def test_attention_set_between_trainers_is_what_the_model_gets_back(tmp_path):
    """Choose for packs by the model's own attention, which may change after a trainer was built."""
    model = build_tiny_model()
    first, second = (build("packed", model, tmp_path) for _ in range(2))
    with first.packed_model.attending():  # built, proved and used while another trainer's packs run
        third = build("packed", model, tmp_path)
        assert third.packed_model.attention.previous == first.packed_model.attention.name
        third.evaluate(texts(5))
        assert model.config._attn_implementation == first.packed_model.attention.name
    model.set_attn_implementation("eager")
    for trainer in (first, second, third):
        trainer.train()
        assert trainer.packed_model.attention.previous == model.config._attn_implementation == "eager"
        assert trainer.packed_model.attention.name == trainer.packing_report.isolation.attention == "packfix_varlen"


def test_a_run_that_fails_gives_the_model_back(tmp_path):
    model = build_tiny_model(leaking_example().model_type)
    trainer = build("packed", model, tmp_path, on_leak="raise")
    with pytest.raises(PackingLeakError):
        trainer.train()
    assert not our_hooks(model)
    assert not trainer.packed_model.has_packed_attention
    trainer = build("packed", model, tmp_path, on_leak="unpack")
    trainer.train()
    assert trainer.packed_model.is_unpacked
    assert not our_hooks(model)
    assert not check_isolation(model, max_length=64).isolated


@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_a_deep_copy_of_a_trained_model(model_type, tmp_path):
    """TRL binds the copy's forward to the original, so that it computes with the original's weights."""
    first = build("packed", build_tiny_model(model_type), tmp_path)
    first.train()
    copied = copy.deepcopy(first.model)
    fresh = build_tiny_model(model_type)
    fresh.load_state_dict(copied.state_dict())
    with pytest.raises(ValueError, match=r"ran and did not call its LM head.*deep copy.*`del model"):
        build("packed", copied, tmp_path).train()
    assert not our_hooks(copied)
    del copied.forward
    trainers = [build("packed", fresh_model, tmp_path) for fresh_model in (copied, fresh)]
    for trainer in trainers:
        trainer.train()
    assert torch.equal(*map(weights, trainers))
    assert not torch.equal(weights(trainers[0]), weights(first))


# On varlen attention, repaired, on mixers
@pytest.mark.parametrize("model_type", ["llama", "bloom", pytest.param("lfm2", marks=needs("hybrids"))])
def test_two_trainers_train_at_once_in_threads_as_one_after_the_other(model_type, tmp_path):
    in_turn, at_once = (
        [build("packed", build_tiny_model(model_type), tmp_path / f"{order}{seed}", seed=seed) for seed in (1, 2)]
        for order in ("in turn", "at once")
    )
    for trainer in in_turn:
        trainer.train()
    threads = [threading.Thread(target=trainer.train) for trainer in at_once]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, trainer in zip(in_turn, at_once, strict=True):
        assert trainer.state.global_step == 2
        assert torch.equal(weights(expected), weights(trainer))
