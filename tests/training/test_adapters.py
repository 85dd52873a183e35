"""Adapters that would never learn are refused after the first step, and no others."""

import pytest
import torch
from peft import LoraConfig
from support.models import build_tiny_model
from support.runs import texts, trainer

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


class Fused(torch.nn.Module):
    """Calls the weights of a projection, as a fused kernel does, and not the projection."""

    def __init__(self, mlp):
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, states):
        return torch.nn.functional.linear(self.up_proj(states).relu(), self.down_proj.weight)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("layers", [(0, 1), (1,), ()], ids=str)
def test_adapters_that_a_kernel_leaves_out_are_refused(layers, packing, tmp_path):
    """All adapters of a name: with one of two layers fused, the other one learns."""
    model = build_tiny_model()
    for layer in layers:
        model.model.layers[layer].mlp = Fused(model.model.layers[layer].mlp)
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "packing": packing}
    run = trainer(tmp_path, texts(), model, {"peft_config": LORA}, **settings)
    if layers == (0, 1):
        name = r"`base_model\.model\.model\.layers\.\*\.mlp\.down_proj`"
        with pytest.raises(
            ValueError, match=rf"No adapter of {name} got a gradient.*`down_proj` from `target_modules`"
        ):
            run.train()
        assert run.state.global_step == 0
    else:
        run.train()
    hooks = [hook for m in run.model.modules() for hook in m._forward_hooks.values()]
    assert not any("AdaptersLearn" in repr(hook) for hook in hooks)


def test_adapters_of_modules_that_did_not_run_may_learn_later(tmp_path):
    """Such as experts that no token of the first step chose, or a vision tower without images."""
    model = build_tiny_model()
    skipped = model.model.layers[1].mlp
    skipped.forward = lambda states: states
    model.model.layers[1].mlp = torch.nn.Identity()
    model.model.layers[1].mlp.inner = skipped
    run = trainer(tmp_path, texts(), model, {"peft_config": LORA}, max_steps=1)
    run.train()
    assert run.state.global_step == 1
