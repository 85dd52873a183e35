"""`packfix_flash_tower`: images of a pack in one call, with the result of `sdpa` image by image."""

import copy

import pytest
import torch
from features.images.processed import examples_of
from support.attention import bounds_of
from support.runs import packed_model
from support.strict_varlen import StrictVarlen
from support.versions import current_models
from support.vision import build_model
from test_image_parts import call_of_tower, leaves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from trl_packfix.attention import flash, varlen
from trl_packfix.feature import PLAIN
from trl_packfix.features.images import tower_attention
from trl_packfix.features.images.tower_attention import REPLACED_ATTENTION, TOWER_ATTENTION, tower_configs

HANDING_OVER = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "mistral3")


def on_both(family):
    """Return (tower on sdpa, tower on our attention, arguments), in float64."""
    tower, call = call_of_tower(family)
    stock = tower.double()
    ours = copy.deepcopy(stock)
    assert stock.config._attn_implementation == REPLACED_ATTENTION
    ours.config._attn_implementation = TOWER_ATTENTION
    return stock, ours, tree_map_only(torch.FloatTensor, torch.Tensor.double, call)


def outcome(tower, args, kwargs):
    outs = leaves(tower(*args, **kwargs))
    loss = sum((out * torch.arange(out.numel()).view_as(out).sin()).sum() for out in outs)
    grads = torch.autograd.grad(loss, [*tower.parameters()], allow_unused=True)
    return [out.detach() for out in outs], [torch.zeros(()) if grad is None else grad for grad in grads]


def distance(ours, stock):
    return max(((a - b).norm() / max(b.norm().item(), 1e-6)).item() for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("device", ["rows", "kernel"])
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=current_models) if f == "mistral3" else f for f in HANDING_OVER]
)
def test_outputs_and_gradients_are_those_of_sdpa(family, device, monkeypatch):
    stock, ours, (args, kwargs) = on_both(family)
    expected_outputs, expected_grads = outcome(stock, args, kwargs)
    with StrictVarlen() as strict:
        if device == "kernel":  # as on CUDA
            monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cpu"})
            for module in (flash, tower_attention):
                monkeypatch.setattr(module, "CUDA_DTYPES", (torch.float64,))
        outputs, grads = outcome(ours, args, kwargs)
    assert distance(outputs, expected_outputs) < 1e-11
    assert distance(grads, expected_grads) < 1e-11
    assert any(grad.abs().max() > 1e-3 for grad in expected_grads)
    layers = getattr(ours.config, "depth", None) or ours.config.num_hidden_layers
    calls = layers if device == "kernel" else 0
    assert len(strict.forwards) == len(strict.backwards) == calls
    assert not any(is_causal for *_, is_causal in strict.forwards)


def test_families_whose_towers_have_rows_of_images_are_left_alone():
    for family in ("llava", "gemma3", "idefics3"):
        assert tower_configs(build_model(family)) == []


class Counted(TorchDispatchMode):
    """Count the calls of attention."""

    attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += "attention" in str(func)
        return func(*args, **(kwargs or {}))


def test_windows_of_all_images_are_few_calls():
    """Qwen2.5-VL cuts an image into windows, and calls attention on sdpa once for each of them."""
    config = Qwen2_5_VLVisionConfig(
        depth=4, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=32, fullatt_block_indexes=[3]
    )
    config._attn_implementation = REPLACED_ATTENTION
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(config).train()
    grid = torch.tensor([[1, 20, 24]] * 3)
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * config.temporal_patch_size * config.patch_size**2)
    counts = {}
    for name in (REPLACED_ATTENTION, TOWER_ATTENTION):
        config._attn_implementation = name
        with Counted() as counted:
            tower(pixels, grid_thw=grid)
        counts[name] = counted.attention
    assert counts[REPLACED_ATTENTION] == 3 * 3 * 9 + 3  # 3 x 3 windows per image
    assert counts[TOWER_ATTENTION] == 3 * 2 + 1  # windows of two sizes; images of one size


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_a_tower_that_our_attention_fails_on_goes_back_to_sdpa(fault, monkeypatch):
    def faulty(query, key, value, lengths, **options):
        if fault == "refused":
            raise tower_attention.TowerAttentionError("heads of 7 dimensions")
        return query.flip(2)

    monkeypatch.setattr(tower_attention, "attend_by_document", faulty)
    packed = prepared("qwen2_5_vl")
    report = packed.prove(packed.model)
    assert report.passed
    assert not (packed.is_unpacked or packed.repaired)
    assert packed.model.config.vision_config._attn_implementation == REPLACED_ATTENTION
    assert "vision tower on sdpa, image by image: " in packed.attention.reason
    assert "attn_implementation='flash_attention_2'" in packed.attention.reason


@pytest.mark.parametrize(
    "error, raised",
    [
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),  # `auto_find_batch_size` catches it
        (RuntimeError("FlashAttention only supports Ampere GPUs."), tower_attention.TowerAttentionError),
    ],
    ids=["memory", "refusal"],
)
def test_a_full_memory_is_no_refusal_of_a_kernel(error, raised, monkeypatch):
    def kernel(*args, **kwargs):
        raise error

    monkeypatch.setattr(tower_attention, "flash_on_cuda", kernel)
    monkeypatch.setattr(tower_attention, "runs_flash", lambda *args, **kwargs: True)
    q = torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    with pytest.raises(raised, match=str(error)):
        tower_attention.tower_attention(
            torch.nn.Module(), q, q, q, None, cu_seq_lens_q=bounds_of([3, 2]), max_length_q=3
        )


def prepared(family):
    return packed_model(build_model(family), feature=examples_of(family))


def test_the_tower_is_ours_while_the_model_takes_packs_only():
    packed = prepared("qwen3_vl")
    config = packed.model.config.vision_config
    report = packed.prove(packed.model)
    assert report.passed
    assert packed.has_packed_attention
    assert config._attn_implementation == TOWER_ATTENTION
    assert f"vision tower on {TOWER_ATTENTION}, all images of a pack together" in packed.attention.reason
    packed.restore_own_attention()
    assert config._attn_implementation == REPLACED_ATTENTION


@pytest.mark.parametrize("name, has_images", [("eager", True), (REPLACED_ATTENTION, False)])
def test_the_users_choice_and_a_model_of_text_keep_their_tower(name, has_images):
    model = build_model("qwen3_vl")
    model.config.vision_config._attn_implementation = name
    packed = packed_model(model, feature=examples_of("qwen3_vl") if has_images else PLAIN)
    packed.attach_packed_attention()
    assert model.config.vision_config._attn_implementation == name
    reason = "vision tower on eager, image by image: it is the user's choice"
    assert reason in packed.attention.reason if has_images else "tower" not in packed.attention.reason


@pytest.mark.parametrize(
    "argument, value", [("is_causal", True), ("softcap", 5.0), ("s_aux", torch.zeros(2))], ids=lambda x: str(x)[:9]
)
def test_what_a_tower_needs_beyond_full_attention_is_refused(argument, value):
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(tower_attention.TowerAttentionError, match=f"gives {argument} to .*attn_implementation='sdpa'"):
        tower_attention.tower_attention(
            torch.nn.Module(), q, q, q, None, cu_seq_lens_q=bounds_of([3, 2]), **{argument: value}
        )
