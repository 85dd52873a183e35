"""Adapters that would never learn are refused after the first step, no others; inputs of LoRA are not cast twice.

New tokens of tied embeddings are trained.
"""

import pytest
import torch
from peft import LoKrConfig, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from support.models import build_tiny_model
from support.rounding import weight_difference
from support.runs import build_trainer, plain_sgd, run_training, texts, weights, weights_of
from transformers import TrainerCallback

from trl_packfix import SFTTrainer
from trl_packfix.attention.packed_forward import running_forward
from trl_packfix.training.lora_inputs import LoraInputs

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


class Fused(torch.nn.Module):
    """Calls the weights of a projection, as a fused kernel does, and not the projection."""

    def __init__(self, mlp):
        super().__init__()
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj

    def forward(self, states):
        return torch.nn.functional.linear(self.up_proj(states).relu(), self.down_proj.weight)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("layers", [(0, 1), (1,), ()], ids=str)
def test_adapters_that_a_kernel_leaves_out_are_refused(layers, packing, tmp_path):
    """Names are refused if all their adapters are left out: with one of two layers fused, the other one learns."""
    model = build_tiny_model()
    for layer in layers:
        model.model.layers[layer].mlp = Fused(model.model.layers[layer].mlp)
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "packing": packing}
    trainer = build_trainer(tmp_path, texts(), model, peft_config=LORA, **settings)
    if layers == (0, 1):
        name = r"`base_model\.model\.model\.layers\.\*\.mlp\.down_proj`"
        message = rf"No adapter of {name} got a gradient.*`down_proj` from `target_modules`"
        with pytest.raises(ValueError, match=message) as error:
            trainer.train()
        assert ("`packing=True`" in str(error.value)) is not packing
        assert trainer.state.global_step == 0
    else:
        trainer.train()
    hooks = [hook for m in trainer.model.modules() for hook in m._forward_hooks.values()]
    assert not any("CheckAdapterGradients" in repr(hook) for hook in hooks)


class Detached(Fused):
    """Calls the projection, and hides it from autograd."""

    def forward(self, states):
        return self.down_proj(self.up_proj(states).relu()).detach()


def test_adapters_that_run_without_a_way_to_the_loss_are_refused(tmp_path):
    model = build_tiny_model()
    for layer in model.model.layers:
        layer.mlp = Detached(layer.mlp)
    trainer = build_trainer(tmp_path, texts(), model, peft_config=LORA, packing=False, max_steps=1)
    for _ in range(2):  # also if the user calls it again
        with pytest.raises(ValueError, match=r"No adapter of .*`.*\.mlp\.down_proj` \(and of 1 other\) got a gradient"):
            trainer.train()


class FailsInFirstStep(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        raise MemoryError


def test_a_first_step_that_fails_leaves_no_hooks(tmp_path):
    trainer = build_trainer(tmp_path, texts(), trainer_class=FailsInFirstStep, peft_config=LORA, max_steps=1)
    with pytest.raises(MemoryError):
        trainer.train()
    hooks = [hook for m in trainer.model.modules() for hook in m._forward_hooks.values()]
    assert not any("CheckAdapterGradients" in repr(hook) for hook in hooks)


@pytest.mark.parametrize("packing", [True, False])
def test_adapters_whose_first_gradient_is_zero_are_trained(packing, tmp_path):
    """B of LoRA starts at zero, so A of the others has no gradient where the projections behind them are zero, too."""
    model = build_tiny_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    trainer = build_trainer(
        tmp_path, texts(), model, peft_config=LORA, packing=packing, max_steps=3, learning_rate=1e-2
    )
    adapters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    late: list[str] = []

    class FirstGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *call, **kwargs):
            if trainer.state.global_step == 0:
                late.extend(name for name in adapters if not trainer.model.get_parameter(name).grad.any())

    trainer.add_callback(FirstGradients())
    trainer.train()
    assert any("q_proj" in name for name in late)
    assert all(
        not torch.equal(trainer.model.get_parameter(name), start_value) for name, start_value in adapters.items()
    )


NEW = (68, 90)  # "a" and "w" of the tokenizer, which stand for new tokens


def with_new_tokens():
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[*NEW], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return get_peft_model(build_tiny_model(tie_word_embeddings=True), config)


def by_hand(rows, rate):
    """Return the weights after one step of plain torch on the model's own logits."""
    model = with_new_tokens()
    labels = [torch.tensor([row["input_ids"]]) for row in rows]
    num_trained = sum(ids.shape[1] - 1 for ids in labels)
    for ids in labels:
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        (-log_probs.gather(1, ids[0, 1:, None]).sum() / num_trained).backward()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter -= rate * parameter.grad
    return weights_of(model)


@pytest.mark.parametrize("packing", [True, False])
def test_new_tokens_of_tied_embeddings_are_trained(packing, tmp_path):
    """They are in the head, too, which is not the module that TRL's fused head reads."""
    settings = plain_sgd(1.0, max_steps=1, packing=packing)
    trainer = build_trainer(tmp_path, texts(4), with_new_tokens(), per_device_train_batch_size=4, **settings)
    start_weights = weights(trainer)
    expected = by_hand(trainer.train_dataset, rate=1.0)
    trainer.train()
    deltas = {name: p for name, p in trainer.model.named_parameters() if "trainable_tokens_delta" in name}
    assert len(deltas) == 1
    assert weight_difference(weights(trainer), expected, start_weights) < 1e-5
    trainer.evaluate(trainer.train_dataset)


@pytest.mark.parametrize("packing", [True, False])
def test_new_tokens_that_the_first_step_has_not_are_trained_later(packing, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5], task_type="CAUSAL_LM")
    trainer = run_training(tmp_path, texts(), peft_config=config, packing=packing, max_steps=1)
    assert trainer.state.global_step == 1


def test_adapters_of_modules_that_did_not_run_may_learn_later(tmp_path):
    """Such modules are experts that no token of the first step chose, or a vision tower without images."""
    model = build_tiny_model()
    skipped = model.model.layers[1].mlp
    skipped.forward = lambda states: states
    model.model.layers[1].mlp = torch.nn.Identity()
    model.model.layers[1].mlp.inner = skipped
    trainer = run_training(tmp_path, texts(), model, peft_config=LORA, max_steps=1)
    assert trainer.state.global_step == 1


DROPLESS = {"r": 4, "lora_dropout": 0.0, "init_lora_weights": False, "target_modules": "all-linear"}
ADAPTERS = {
    "lora": LoraConfig(**DROPLESS),
    "dora": LoraConfig(**DROPLESS, use_dora=True),
    "lokr": LoKrConfig(r=4, init_weights=False, target_modules=["q_proj", "down_proj"]),
}


@pytest.mark.parametrize("adapter, autocast", [("lora", True), ("lora", False), ("dora", True), ("lokr", True)])
def test_inputs_of_lora_are_not_cast_under_autocast(adapter, autocast, tmp_path, monkeypatch):
    """In packs, and only where they would be cast back: elsewhere the layers compute in the dtype of their inputs."""
    cast = BaseTunerLayer._cast_input_dtype
    packed = []
    rows = []

    def counting(layer, x, dtype):
        if x.dtype != dtype:
            (rows if running_forward() is None else packed).append(layer)
        return cast(layer, x, dtype)

    monkeypatch.setattr(BaseTunerLayer, "_cast_input_dtype", counting)
    ends = []
    for is_ours in (True, False):
        if not is_ours:
            monkeypatch.setattr(LoraInputs, "_register", lambda hooks: [])
        packed.clear()
        rows.clear()
        torch.manual_seed(0)
        model = build_tiny_model().to(torch.bfloat16)
        settings = {"bf16": autocast, "gradient_checkpointing": True, "max_steps": 3, "learning_rate": 1e-2}
        trainer = build_trainer(tmp_path, texts(), model, peft_config=ADAPTERS[adapter], **settings)
        start_weights = weights(trainer)
        trainer.train()
        assert not torch.equal(weights(trainer), start_weights)
        assert bool(packed) is not (is_ours and adapter == "lora" and autocast)
        assert not any("_cast_input_dtype" in vars(module) for module in trainer.model.modules())
        ends.append((weights(trainer), len(rows)))
    (ours, in_reference), (theirs, expected) = ends
    assert torch.equal(ours, theirs)  # the first step is compared with peft's own
    assert in_reference == expected > 0
