"""Every adapter of peft that stock TRL trains is trained unpacked to the same weights; in packs, or refused."""

import pytest
import torch
from datasets import Dataset
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from support.rounding import weight_difference
from support.runs import PROMPT, build_trainer, stock, texts, weights
from support.versions import scores_tokens

from trl_packfix import PackingLeakError

pytestmark = scores_tokens

NUM_ROWS = 4
FORMS = {
    "text": texts(NUM_ROWS),
    "chat": Dataset.from_list(
        [{"messages": [*PROMPT, {"role": "assistant", "content": "word " * (i + 1)}]} for i in range(NUM_ROWS)]
    ),
    "prompt": Dataset.from_list(
        [{"prompt": "count " * (i % 3 + 1), "completion": "words " * (i + 1)} for i in range(NUM_ROWS)]
    ),
}
LAYERS = {"target_modules": ["q_proj", "down_proj"]}
VIRTUAL = {"num_virtual_tokens": 4}
# What a type needs beside `LAYERS`, or in their place: sizes that fit the tiny model
SETTINGS = {
    "ADALORA": LAYERS | {"total_step": 10},
    "C3A": LAYERS | {"block_size": 16},
    "CARTRIDGE": VIRTUAL,
    "IA3": LAYERS | {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": LAYERS | {"r": 4},
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "P_TUNING": VIRTUAL | {"encoder_hidden_size": 32},
    "ROAD": LAYERS | {"group_size": 16},
    "SHIRA": LAYERS | {"r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [68, 90]},  # "a" and "w"
    "VBLORA": LAYERS | {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": LAYERS | {"n_frequency": 64},
}
# Stock TRL gives no `task_ids`; or peft needs adapters that were saved before, or scikit-learn
NOT_TRAINED = {"ADAMSS", "MULTITASK_PROMPT_TUNING", "POLY", "XLORA"}
OF_LOGITS = {"ADAPTION_PROMPT", "CPT", "SHADOW"}  # they have no way to the fused LM head of TRL
LEAKING = {"LILY"}  # its router takes the mean over all tokens of a batch
BEFORE_ROWS = {"CARTRIDGE", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"}  # with virtual tokens
DRAWING = {"PVERA"}  # random numbers, so packs and rows get other ones

TYPES = sorted({kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - NOT_TRAINED - OF_LOGITS)


def run_of(folder, kind, form, make=build_trainer, **settings):
    (config,) = (config_class for name, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items() if name.value == kind)
    torch.manual_seed(0)
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "logging_strategy": "no"} | settings
    adapter = config(task_type="CAUSAL_LM", **SETTINGS.get(kind, LAYERS))
    return make(folder, FORMS[form], peft_config=adapter, **settings)


def trained(trainer):
    """Train, and return the weights before and after, and the loss."""
    start_weights = weights(trainer)
    loss = trainer.train().training_loss
    return start_weights, weights(trainer), loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_type_trains_as_in_stock_trl_or_is_refused_in_packs(kind, tmp_path):
    """Forms of rows come in turns, so that each is trained with many types."""
    form = [*FORMS][TYPES.index(kind) % len(FORMS)]
    start_weights, expected, loss = trained(run_of(tmp_path, kind, form, make=stock))
    assert not torch.equal(expected, start_weights)
    _, unpacked, unpacked_loss = trained(run_of(tmp_path, kind, form, packing=False))
    assert torch.equal(unpacked, expected)
    assert unpacked_loss == loss
    if kind in BEFORE_ROWS:
        with pytest.raises(ValueError, match=rf"{kind} with 4 virtual tokens was given with packing\."):
            run_of(tmp_path, kind, form)
        return
    packed = run_of(tmp_path, kind, form, packing_strategy="minibatch")
    if kind in LEAKING:
        with pytest.raises(PackingLeakError):
            packed.train()
        return
    _, ours, _ = trained(packed)
    assert not torch.equal(ours, start_weights)
    if kind not in DRAWING:
        assert weight_difference(ours, expected, start_weights, least_change=0.0) < 1e-3


VIRTUAL_TYPES = sorted(BEFORE_ROWS & {*TYPES})


# All types with texts, and one with each other form: what a form changes is done before the adapter
@pytest.mark.parametrize(
    "kind, form", [*((kind, "text") for kind in VIRTUAL_TYPES), ("PREFIX_TUNING", "prompt"), ("PROMPT_TUNING", "chat")]
)
def test_virtual_tokens_are_trained_and_evaluated_as_in_stock_trl(kind, form, tmp_path):
    ends = []
    for make, settings in ((stock, {}), (build_trainer, {"packing": False})):
        settings |= {"eval_on_start": True, "eval_steps": 1, "logging_strategy": "steps", "eval_dataset": FORMS[form]}
        # One batch, so that TRL's mean of batches is that of all tokens
        trainer = run_of(tmp_path, kind, form, make, per_device_eval_batch_size=NUM_ROWS, **settings)
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
        names = ("loss", "entropy", "mean_token_accuracy", "eval_loss", "eval_entropy")
        # Without the entry of the whole training, which TRL does not log
        entries = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
        logged = [entry[name] for entry in entries for name in names if name in entry]
        assert len(logged) == 2 * 3 + 3 * 2  # in two steps, and before and after them
        ends.append((weights(trainer), logged, predicted))
    (expected, expected_log, of_trl), (ours, log, predicted) = ends
    assert torch.equal(ours, expected)
    assert (predicted.predictions == of_trl.predictions).all()
    assert predicted.metrics["test_loss"] == pytest.approx(of_trl.metrics["test_loss"], rel=1e-6)
    assert log == pytest.approx(expected_log, rel=1e-6)
