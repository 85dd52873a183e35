"""Recurrent mixers in packs: which functions are replaced and when, and that documents start anew in them."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support.models import build_tiny_model
from support.rounding import LIMIT
from support.runs import texts, trainer, weights
from support.versions import current_models
from sweep.judge import Judge
from torch._subclasses.fake_tensor import FakeTensorMode

from trl_packfix.attention import mixers
from trl_packfix.attention.forwards import PackedForward, mark_packed_forwards, packed_forwards
from trl_packfix.attention.mixers import REPLACEMENTS, MixerNames
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.survey import zoo

CONVOLUTION = "causal_conv1d_fn"
SHORT = {CONVOLUTION}
DELTA = {CONVOLUTION, "torch_chunk_gated_delta_rule"}
KIMI = {CONVOLUTION, "chunk_kimi_delta_attention"}
MAMBA2 = {CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}
MAMBA1 = {CONVOLUTION, "mamba_selective_scan", "mamba_inner_fn"}
# What must be replaced for each type. A release that renames one of these functions makes the type leak.
NAMES = {
    **dict.fromkeys("qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid".split(), DELTA),
    **dict.fromkeys("lfm2 lfm2_moe".split(), SHORT),
    **dict.fromkeys("bamba falcon_h1 granitemoehybrid mamba2 nemotron_h zamba2".split(), MAMBA2),
    **dict.fromkeys("falcon_mamba jamba mamba".split(), MAMBA1),
    "zamba": MAMBA1 - {"mamba_inner_fn"},
}
NEW = {
    **dict.fromkeys("bailing_hybrid kimi_linear".split(), KIMI),
    **dict.fromkeys("inkling_text inkling2_text lfm3".split(), SHORT),
    "qwen4_exp_text": DELTA,
}
ALL = [*NAMES, *(pytest.param(kind, marks=current_models) for kind in NEW)]
# Types with a mixer whose code is in no function that can be replaced
REPAIRED = {
    "inkling2_text": {"Inkling2DynamicShortConvolution", "Inkling2RelativeLogits"},
    "qwen4_exp_text": {"Qwen4ExpTextPLELayer"},
}
# Functions of the same packages that only generation calls
GENERATION = {
    "causal_conv1d_update",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "selective_state_update",
}


def packed_model(model, **settings):
    return PackedModel(model, torch.float32, "cpu", 64, **settings)


def functions(model):
    """The modules and names of the functions that are replaced, and what is there now."""
    found = MixerNames(model, lambda: None)
    return {(names["__name__"], name): names[name] for names, name in found._places}


def pack(*lengths):
    batch = PackedDataCollator()([{"input_ids": torch.randint(16, 128, (n,))} for n in lengths])
    del batch["labels"]
    return batch


@pytest.mark.parametrize("model_type", ALL)
def test_every_mixer_is_found(model_type):
    found = MixerNames(zoo.build_model(model_type), lambda: None).found
    assert {name.partition(".")[2] for name in found} == (NAMES | NEW)[model_type], found
    assert all(name.startswith("modeling_") for name in found)


def test_transformers_has_no_other_function_with_a_kernel():
    """A release with a new kind of mixer fails here, and its functions get an entry in `REPLACEMENTS`."""
    pattern = re.compile(r'^@use_kernel_func_from_hub_with_fallback\("(\w+)".*\)\n(?:@.*\n)*def (\w+)', re.MULTILINE)
    folder = Path(transformers.__file__).parent / "models"
    found = {pair for path in folder.glob("*/modeling_*.py") for pair in pattern.findall(path.read_text())}
    others = {(kernel, function) for kernel, function in found if kernel not in GENERATION}
    assert len(others) >= 6 and {function for _, function in others} <= set(REPLACEMENTS), others


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ALL)
def test_a_pack_equals_its_documents(model_type):
    """Without kernels, on the functions of transformers in torch."""
    judge = Judge(zoo.build_model(model_type), zoo.WIDTH, zoo.FIRST_WORD, zoo.VOCABULARY)
    model = zoo.build_model(model_type)
    packed = packed_model(model)
    report = packed.prove(model)
    assert report.isolated and report.equal and not packed.is_unpacked
    assert {repair.module for repair in packed.repaired} == REPAIRED.get(model_type, set())
    found = judge.judge(model)
    assert found.right, found


def test_names_are_replaced_while_a_pack_runs_only():
    model = zoo.build_model("qwen3_next")
    before = functions(model)
    guard = mark_packed_forwards(model)
    model.set_attn_implementation("packfix_varlen")
    during = []
    model.model.layers[0].linear_attn.register_forward_hook(lambda *given: during.append(functions(model)))
    model.eval()(input_ids=torch.arange(20, 29)[None], use_cache=False)
    model.train()(**pack(5, 4))
    assert functions(model) == before and during[0] == before
    assert all(during[1][place] is not function for place, function in before.items()) and len(before) == 2
    broken = model.model.layers[1].register_forward_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**pack(5, 4))
    assert functions(model) == before and not packed_forwards
    broken.remove()
    other = zoo.build_model("qwen3_next", seed=1)  # two models of a type, one within the other
    other.set_attn_implementation("packfix_varlen")
    mark_packed_forwards(other)
    model.model.layers[0].register_forward_hook(lambda *given: other(**pack(3, 3)) and None)
    model(**pack(5, 4))
    assert functions(model) == before and functions(model) == functions(other)
    guard.remove()


@pytest.mark.slow
def test_what_is_not_found_is_repaired(monkeypatch):
    """As if transformers had renamed the function."""
    monkeypatch.delitem(REPLACEMENTS, "mamba2_chunk_scan")
    model = zoo.build_model("bamba")
    packed = packed_model(model)
    assert packed.prove(model).isolated and [repair.module for repair in packed.repaired] == ["BambaMixer"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba", "mamba"])
def test_checkpointed_layers_recompute_with_the_same_boundaries(model_type, tmp_path):
    runs = []
    for reentrant in (None, True, False):
        kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}} if reentrant is not None else {}
        model = zoo.build_model(model_type, vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        before, start = functions(model), torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.2, "gradient_checkpointing": bool(kwargs)}
        run = trainer(tmp_path, texts(), model, **settings, **kwargs)
        run.train()
        assert run.packed_model.is_proved and not run.packed_model.repaired
        assert functions(model) == before
        runs.append(weights(run) - start)
    assert runs[0].norm() > 1e-2
    assert max((change - runs[0]).norm() / runs[0].norm() for change in runs[1:]) < LIMIT


@pytest.mark.slow
def test_compiled_mixers_start_anew_in_each_document(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    runs = [trainer(tmp_path, texts(), "lfm2", max_steps=2, learning_rate=1e-2, **more) for more in ({}, compiled)]
    for run in runs:
        torch.compiler.reset()
        run.train()
        assert run.packed_model.is_proved and not run.packed_model.repaired
    assert torch.equal(*map(weights, runs))


def running(*lengths, **more):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedForward(bounds, bounds, max(lengths), max(lengths), **more)


@pytest.mark.parametrize("lengths", [(5, 1, 2, 9), (17,), (4, 13, 0, 0), (1,) * 17], ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_of_a_pack_is_that_of_its_documents(width, lengths):
    """Empty documents pad the number of documents to a constant."""
    module = sys.modules[type(build_tiny_model("lfm2").model.layers[0]).__module__]
    states = torch.randn(1, 6, 17, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64)
    inner = module.causal_conv1d_fn
    out = mixers.convolve(inner, running(*lengths), states, weight, None, "silu")
    parts = states.split([n for n in lengths if n], dim=2)
    expected = torch.cat([inner(part, weight, None, "silu") for part in parts], dim=2)
    assert torch.allclose(out, expected, atol=1e-14)
    given = torch.randn_like(out)
    first, second = (torch.autograd.grad(x, states, given, retain_graph=True)[0] for x in (out, expected))
    assert torch.allclose(first, second, atol=1e-14) and first.any()


def test_boundaries_of_kernels_need_no_host():
    """A fake tensor raises where the host would read it."""
    with FakeTensorMode():
        pack = running(5, 1, 2, 9)
        assert mixers._boundaries(pack, "seq_idx", torch.empty(1, 17, 3)).shape == (1, 17)
        assert mixers._boundaries(pack, "cu_seqlens", torch.empty(1, 17, 3)) is pack.cu_seq_lens_q
        source, own = mixers._stretches(pack, 4, 17, torch.device("cpu"))
        assert own.shape == (17,) and source.shape == (17 + 4 * 3,)


def test_a_triton_kernel_without_a_gpu_is_named():
    """As flash-linear-attention ends on a machine without a GPU, where transformers uses it nevertheless."""
    model = zoo.build_model("lfm2")

    def raise_as_triton(*given):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    model.model.layers[0].register_forward_hook(raise_as_triton)
    with pytest.raises(ValueError, match=r"in Triton ran without a GPU \(0 active.*Uninstall `flash-linear-attention`"):
        packed_model(model).prove(model)
