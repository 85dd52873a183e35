"""FlashAttention-3 that the user activated in torch: what our calls give it, and that the probe judges it.

Calls on the CPU are sent to the functions with which torch replaces the operators on CUDA, and these call a strict
stand-in for the kernels (`support/flash_attn_3_site`).
"""

import sys
from pathlib import Path

import pytest
import support
import torch
import torch.nn.attention
from support.attention import bounds_of, one_launch, outputs_and_gradients, random_inputs, take_path_of_cuda
from support.features import PRESENT, needs, sharing
from support.models import build_tiny_model
from support.runs import packed_model
from support.shared_rows import pack_of
from support.strict_varlen import ATEN, StrictVarlen

from trl_packfix.attention.choice import activated_in_torch, choose_attention
from trl_packfix.attention.flash import CudaKernel, flash_on_cuda
from trl_packfix.attention.kernel_errors import KernelError
from trl_packfix.attention.kernels import attend_on_cuda
from trl_packfix.attention.runs import attend_pack_on_cuda
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.isolation.packed_model import LOOKS_UP

_fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="torch has FlashAttention-3 from 2.11 on")
pytestmark = pytest.mark.slow

LENGTHS = [1, 70, 17, 129, 0, 64, 1]
BOUNDS = bounds_of(LENGTHS)


class Dispatched(StrictVarlen):
    """Run FlashAttention-2 as it is, and FlashAttention-3 while it is active."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if activated_in_torch() == "FA3" and func is ATEN._flash_attention_forward.default:
            return _fa3._fa3_flash_attention_forward_impl_default(*args, **kwargs)
        if activated_in_torch() == "FA3" and func is ATEN._flash_attention_backward.default:
            return _fa3._fa3_flash_attention_backward_impl(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def fa3(monkeypatch):
    """Activate the stand-in as on a machine with a Hopper GPU, and yield its record."""
    monkeypatch.syspath_prepend(str(Path(support.__file__).parent / "flash_attn_3_site"))
    take_path_of_cuda(monkeypatch)
    checked = _fa3._fa3_common_support_error

    def on_this_device(query, tensors, dropout_p, cum_seq_q, *descale):
        """Check all that torch checks, but not that tensors are on a GPU of compute capability 9."""
        error = checked(query, (), dropout_p, cum_seq_q, *descale)
        return None if error in ("inputs must share device", "CUDA not available") and query.dim() == 3 else error

    monkeypatch.setattr(_fa3, "_fa3_common_support_error", on_this_device)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 0)
    import flash_attn_interface

    strict = flash_attn_interface.Strict
    strict.calls.clear()
    strict.fault = ""
    torch.nn.attention.activate_flash_attention_impl("FA3")
    yield strict
    torch.nn.attention.restore_flash_attention_impl()
    assert activated_in_torch() is None
    sys.path_importer_cache.clear()


def shared_runs():
    documents = [{"input_ids": [*range(1, 9 * n), *([100 + n] * 5)]} for n in range(1, 7)]
    batch = sharing().make_collator(PackedDataCollator())(documents)
    return batch["input_ids"].shape[1], pack_of(batch)


def documents(window=None, sinks=None):
    return lambda q, k, v: attend_on_cuda(q, k, v, [one_launch(LENGTHS)], scale=0.125, window=window, sinks=sinks)


def images(q, k, v):
    return flash_on_cuda(q, k, v, None, CudaKernel((BOUNDS, BOUNDS), (129, 129), None, 0.125, is_causal=False))


CALLS = {
    "plain": (sum(LENGTHS), documents()),
    "window, sinks": (sum(LENGTHS), documents(50, torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "tower": (sum(LENGTHS), images),
}
if "prefixes" in PRESENT:
    ROWS, RUNS = shared_runs()
    CALLS["prefixes"] = ROWS, lambda q, k, v: attend_pack_on_cuda(q, k, v, RUNS, scale=0.125)
    CALLS["prefixes, chunk"] = ROWS, lambda q, k, v: attend_pack_on_cuda(q, k, v, RUNS, scale=0.125, chunk=16)


@pytest.mark.parametrize("name", CALLS)
def test_our_calls_fit_its_functions(name, fa3):
    num_tokens, function = CALLS[name]
    inputs = random_inputs(num_tokens, head_dim=64, dtype=torch.bfloat16)
    with StrictVarlen() as fa2:
        expected = outputs_and_gradients(function, inputs)
    with Dispatched() as mode:
        results = outputs_and_gradients(function, inputs)
    assert fa3.calls == {"forward": len(fa2.forwards), "backward": len(fa2.backwards)}
    assert not mode.forwards
    assert all(map(torch.equal, results, expected))
    assert all(result.any() for result in results)


def test_the_report_names_it(fa3):
    model = build_tiny_model("llama")
    choice = choose_attention(model, dtype=torch.bfloat16, device_type="cuda")
    assert choice.name == "packfix_varlen"
    assert choice.reason.startswith("FA3, which is activated in torch; in place of the model's sdpa")
    model.config._attn_implementation_internal = "flash_attention_3"
    assert choose_attention(model, dtype=torch.bfloat16, device_type="cuda").name == "flash_attention_3"
    shares = choose_attention(model, dtype=torch.bfloat16, device_type="cuda", needs_varlen=LOOKS_UP)
    assert shares.reason == f"FA3, which is activated in torch; flash_attention_3 {LOOKS_UP}"


@pytest.mark.parametrize("fault, setting", [pytest.param("", "pack", marks=needs("prefixes")), ("wrong", "off")])
def test_the_probe_judges_it(fault, setting, fa3):
    fa3.fault = fault
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    packed = packed_model(model, torch.bfloat16, "cuda", on_leak="raise", feature=sharing(setting))
    with Dispatched() as mode:
        report = packed.prove(model)
        assert report.passed is not bool(fault)
        if not fault:
            assert packed.prove_feature(model) is None
    assert not mode.forwards
    assert fa3.calls["forward"] > 10
    assert fa3.calls["backward"] > 1
    packed.restore_own_attention()
    assert activated_in_torch() == "FA3"
    assert model.config._attn_implementation == "sdpa"


def test_a_refusal_is_raised(fa3):
    """Replace nothing that the user activated."""
    fa3.fault = "forward"
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    with Dispatched(), pytest.raises(KernelError, match="only supports Hopper GPUs"):
        packed_model(model, torch.bfloat16, "cuda").prove(model)
