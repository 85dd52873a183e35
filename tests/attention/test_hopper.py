"""FlashAttention-3 behind torch's attention operators: when it is used, what it is given, and what happens if it fails.

Calls on the CPU are sent to the functions with which torch replaces the operators on CUDA, and these call a strict
stand-in for the kernels (`support/flash_attn_3_site`).
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import support
import torch
from support.models import build_tiny_model
from support.strict_varlen import ATEN, StrictVarlen
from torch.nn.attention import _fa3

from trl_packfix.attention import choice, hopper, varlen
from trl_packfix.attention.choice import choose_attention
from trl_packfix.attention.kernels import CudaKernel, attend_on_cuda, flash_on_cuda
from trl_packfix.attention.runs import SharedRuns, attend_shared_on_cuda
from trl_packfix.data.prefix_collator import PrefixCollator
from trl_packfix.isolation import packed_model
from trl_packfix.isolation.packed_model import LOOKS_UP, PackedModel

pytestmark = pytest.mark.slow

LENGTHS = [1, 70, 17, 129, 0, 64, 1]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)


class OnHopper(StrictVarlen):
    """FlashAttention-2 as it is, and FlashAttention-3 while it is active."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if hopper.activated_by_user() == "FA3" and func is ATEN._flash_attention_forward.default:
            return _fa3._fa3_flash_attention_forward_impl_default(*args, **kwargs)
        if hopper.activated_by_user() == "FA3" and func is ATEN._flash_attention_backward.default:
            return _fa3._fa3_flash_attention_backward_impl(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def fa3(monkeypatch):
    """The stand-in, installed on a machine with a Hopper GPU."""
    monkeypatch.syspath_prepend(str(Path(support.__file__).parent / "flash_attn_3_site"))
    monkeypatch.setattr(hopper, "fa3_problem", lambda: None)
    monkeypatch.setattr(choice, "fa3_problem", lambda: None)
    monkeypatch.setattr(choice, "cuda_varlen_problem", lambda: None)
    monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cpu"})
    checked = _fa3._fa3_common_support_error

    def on_this_device(query, tensors, dropout_p, cum_seq_q, *descale):
        """All that torch checks, but that tensors are on a GPU of compute capability 9."""
        error = checked(query, (), dropout_p, cum_seq_q, *descale)
        return None if error in ("inputs must share device", "CUDA not available") and query.dim() == 3 else error

    monkeypatch.setattr(_fa3, "_fa3_common_support_error", on_this_device)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 0)
    import flash_attn_interface

    strict = flash_attn_interface.Strict
    strict.calls.clear()
    strict.fault = ""
    yield strict
    hopper.deactivate()
    assert hopper.activated_by_user() is None
    sys.path_importer_cache.clear()


def tensors(num_tokens, heads=4, kv_heads=2, dim=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, num_tokens, dim, generator=generator).bfloat16() for h in (heads, kv_heads, kv_heads)]


def outcome(function, given):
    given = [x.clone().requires_grad_() for x in given]
    out = function(*given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, given, grad)]


def shared_runs():
    documents = [{"input_ids": [*range(1, 9 * n), *([100 + n] * 5)]} for n in range(1, 7)]
    batch = PrefixCollator()(documents)
    layout = batch["layout"]
    bounds, longest = ((batch[f"{name}_q"], batch[f"{name}_k"]) for name in ("cu_seq_lens", "max_length"))
    return batch["input_ids"].shape[1], SharedRuns(bounds, longest, layout.kv_index, layout.run_lengths)


def documents(window=None, sinks=None):
    return lambda q, k, v: attend_on_cuda(
        q, k, v, (BOUNDS, BOUNDS), (129, 129), scale=0.125, window=window, sinks=sinks
    )


def images(q, k, v):
    return flash_on_cuda(q, k, v, None, CudaKernel((BOUNDS, BOUNDS), (129, 129), None, 0.125, is_causal=False))


ROWS, RUNS = shared_runs()
CALLS = {
    "plain": (sum(LENGTHS), documents()),
    "window": (sum(LENGTHS), documents(50)),
    "sinks": (sum(LENGTHS), documents(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "window, sinks": (sum(LENGTHS), documents(50, torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "tower": (sum(LENGTHS), images),
    "prefixes": (ROWS, lambda q, k, v: attend_shared_on_cuda(q, k, v, RUNS, scale=0.125)),
    "prefixes, window": (ROWS, lambda q, k, v: attend_shared_on_cuda(q, k, v, RUNS, scale=0.125, window=20)),
    "prefixes, chunk": (ROWS, lambda q, k, v: attend_shared_on_cuda(q, k, v, RUNS, scale=0.125, chunk=16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_our_calls_fit_its_functions(name, fa3):
    num_tokens, function = CALLS[name]
    with OnHopper() as mode:
        wanted = outcome(function, tensors(num_tokens))
        on_fa2 = len(mode.forwards), len(mode.backwards)
        assert not fa3.calls
        hopper.activate()
        found = outcome(function, tensors(num_tokens))
    assert (fa3.calls["forward"], fa3.calls["backward"]) == on_fa2 and min(on_fa2) > 0
    assert (len(mode.forwards), len(mode.backwards)) == on_fa2
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.abs().sum() > 0 and torch.equal(mine, theirs)


def chosen(attention="sdpa", **settings):
    model = build_tiny_model("llama")
    model.config._attn_implementation_internal = attention
    return choose_attention(model, dtype=torch.bfloat16, device_type="cuda", **settings)


def test_it_is_chosen_on_hopper_and_named(fa3, monkeypatch):
    found = chosen()
    assert (found.name, found.is_flash, found.activates) == ("packfix_varlen", True, "FA3")
    assert found.reason == "FlashAttention-3 (flash-attn-3 is installed and the GPU is Hopper)"
    monkeypatch.setattr(choice, "fa3_problem", lambda: "flash-attn-3 is not installed")
    assert chosen().activates is None and chosen().reason == "the FlashAttention-2 kernels built into torch"


def test_the_users_flash_attention_3_keeps_its_kernels_where_ranks_or_documents_share(fa3):
    assert chosen("flash_attention_3").name == "flash_attention_3"
    found = chosen("flash_attention_3", needs_varlen=LOOKS_UP)
    assert (found.name, found.activates, found.previous) == ("packfix_varlen", "FA3", "flash_attention_3")
    assert found.reason.startswith("FlashAttention-3 ") and LOOKS_UP in found.reason


def test_what_the_user_activated_stays(fa3, monkeypatch):
    monkeypatch.setattr(choice, "activated_by_user", lambda: "FA4")
    assert chosen().activates is None and chosen().reason == "FA4, which is activated in torch"


@pytest.mark.parametrize(
    ("capability", "problem"), [((9, 0), None), ((8, 0), "has 8.0"), ((10, 0), "has 10.0")], ids=str
)
def test_the_gpu_decides(capability, problem, monkeypatch):
    monkeypatch.setattr(hopper, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = hopper.fa3_problem()
    assert found is None if problem is None else problem in found
    monkeypatch.setattr(hopper, "find_spec", lambda name: None)
    assert hopper.fa3_problem() == "flash-attn-3 is not installed"


@pytest.mark.parametrize("fault", ["", "forward", "backward", "wrong", "import"])
def test_the_probe_judges_it(fault, fa3, monkeypatch):
    fa3.fault = fault
    if fault == "import":
        monkeypatch.setattr(hopper, "activate", lambda: (_ for _ in ()).throw(ImportError("undefined symbol")))
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    packed = PackedModel(model, torch.bfloat16, "cuda", 64)
    assert packed.attention.activates == "FA3"
    with OnHopper() as mode:
        report = packed.prove(model)
    assert report.isolated and report.equal and not packed.repaired and not packed.is_unpacked
    if fault:
        assert packed.attention.activates is None and hopper.activated_by_user() is None and mode.forwards
        assert packed.attention.reason.startswith("the FlashAttention-2 kernels built into torch; FA3 cannot be used: ")
    else:
        assert hopper.activated_by_user() == "FA3" and not mode.forwards
        assert fa3.calls["forward"] > 10 and fa3.calls["backward"] > 1
    packed.rest()
    assert hopper.activated_by_user() is None and model.config._attn_implementation == "sdpa"


def wrong_where(monkeypatch, strict, is_shared):
    """FlashAttention-3 computes something else in the calls for which `is_shared(query lengths, key lengths)` holds."""
    import flash_attn_interface

    right = flash_attn_interface._numbers._forward

    def forward(q, k, v, cu_q, cu_k, *given, **more):
        out, *others = right(q, k, v, cu_q, cu_k, *given, **more)
        if is_shared(cu_q, cu_k):
            strict.calls["wrong"] += 1
            out = out.roll(1, 0)
        return out, *others

    monkeypatch.setattr(flash_attn_interface._numbers, "_forward", forward)


def more_keys(cu_q, cu_k):
    """A call of runs, as `attend_shared_on_cuda` makes."""
    return not torch.equal(cu_q, cu_k)


def proved_on_fa3(**settings):
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    packed = PackedModel(model, torch.bfloat16, "cuda", 64, **settings)
    report = packed.prove(model)
    assert report.isolated and report.equal and packed.attention.activates == "FA3"
    return model, packed


@pytest.mark.parametrize("fault", ["", "wrong", "refused"])
def test_shared_prefixes_are_proved_without_it_where_it_fails(fault, fa3, monkeypatch):
    with OnHopper() as mode:
        model, packed = proved_on_fa3(shares_prefixes=True)
        if fault == "wrong":
            wrong_where(monkeypatch, fa3, more_keys)
        fa3.fault = "forward" if fault == "refused" else ""
        assert not mode.forwards
        if fault:
            with pytest.warns(UserWarning, match="packs run on the FlashAttention-2 kernels .*; FA3 cannot be used: "):
                assert packed.prove_prefixes(model) is None
            assert packed.attention.activates is None and hopper.activated_by_user() is None
            assert len(mode.forwards) > 20, "packs must be proved again, too"
        else:
            assert packed.prove_prefixes(model) is None
            assert packed.attention.activates == "FA3" and not mode.forwards
    assert packed.prefixes_are_proved and packed.is_proved
    packed.rest()


def test_it_stays_where_nothing_is_right_without_it(fa3, monkeypatch):
    """Prefixes fail on every kernel, so documents are packed whole, on FlashAttention-3 as before."""
    with OnHopper() as mode:
        model, packed = proved_on_fa3(shares_prefixes=True)
        before, calls = packed.isolation, []
        right = packed_model.check_prefixes

        def fails(*given, **more):
            calls.append(hopper.activated_by_user())
            return replace(right(*given, **more), equal=False)

        monkeypatch.setattr(packed_model, "check_prefixes", fails)
        assert packed.prove_prefixes(model).startswith("where documents share prefixes, ")
    assert calls == ["FA3", None] and mode.forwards
    assert hopper.activated_by_user() == packed.attention.activates == "FA3"
    assert packed.isolation is before and packed.is_proved and not packed.prefixes_are_proved
    packed.rest()


@pytest.mark.parametrize("shares_prefixes", [False, True], ids=["documents", "prefixes"])
def test_a_degree_is_proved_without_it_where_it_fails(shares_prefixes, fa3, monkeypatch):
    """Of a degree that had passed, and of prefixes, the proofs run again. One process is a group of one rank."""
    with OnHopper() as mode:
        model, packed = proved_on_fa3(shares_packs=True)
        checked = []
        for name in ("check_isolation", "check_prefixes"):
            right = getattr(packed_model, name)

            def alone(wrapped, longest, degree=1, name=name, right=right, **more):
                """As on ranks of which each holds the whole pack."""
                checked.append((name, degree, hopper.activated_by_user()))
                fa3.fault = "forward" if degree == 4 else ""
                return right(wrapped, longest, 1, **more)

            monkeypatch.setattr(packed_model, name, alone)
        if shares_prefixes:
            assert packed.prove_prefixes(model) is None
        packed.prove_degree(model, 2)
        assert not mode.forwards and {kernel for _, _, kernel in checked} == {"FA3"}
        checked.clear()
        with pytest.warns(UserWarning, match="packs run on the FlashAttention-2 kernels"):
            packed.prove_degree(model, 4)
    expected = [("check_isolation", 4, "FA3"), ("check_isolation", 1, None), ("check_isolation", 2, None)]
    if shares_prefixes:
        expected += [("check_prefixes", 1, None), ("check_prefixes", 2, None)]
    expected.append(("check_isolation", 4, None))
    if shares_prefixes:
        expected.append(("check_prefixes", 4, None))
    assert checked == expected
    assert {*packed._proved_degrees} == {2, 4} and packed.prefixes_are_proved is shares_prefixes
    assert packed.attention.activates is None and packed.is_proved
    packed.rest()
