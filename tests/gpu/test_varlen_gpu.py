"""The FlashAttention-2 kernels built into torch, through our attention function: every feature against the CPU in fp64.

pytest tests/gpu/test_varlen_gpu.py
"""

import copy
from itertools import pairwise

import pytest
import torch
from support.features import needs, sharing
from support.models import select_attention
from support.versions import enable_checkpointing
from torch import nn

from trl_packfix.attention import runs
from trl_packfix.attention.choice import cuda_varlen_problem
from trl_packfix.attention.flash import visible_keys
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.attention.kernels import (
    KernelLaunch,
    attend_by_document,
    attend_on_cpu,
    attend_on_cuda,
    attend_wide,
    math_attention,
    wide_kernel,
)
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.attention.runs import attend_pack_on_cuda, attend_shared_on_cpu
from trl_packfix.attention.varlen import ATTENTION_NAME, varlen_attention
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.layout import LAYOUT_KEY

pytestmark = pytest.mark.gpu

LENGTHS = [1, 300, 17, 129, 1024, 64, 1]
T = sum(LENGTHS)
LONGEST = max(LENGTHS)


@pytest.fixture(autouse=True)
def kernels_exist():
    if (problem := cuda_varlen_problem()) is not None:
        pytest.skip(problem)


def random_inputs(head_dim, value_dim, heads, kv_heads, sinks, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, T, head_dim), (1, kv_heads, T, head_dim), (1, kv_heads, T, value_dim)]
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    tensors += [torch.randn(heads, generator=generator)] if sinks else []
    # rounded once, so that the reference starts from the very same numbers; sinks stay fp32, as under autocast
    return [x.to(dtype) if x.dim() == 4 else x for x in tensors]


def run_attention(function, tensors, device, dtype=None):
    tensors = [x.to(device, dtype).requires_grad_() for x in tensors]
    out = function(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, tensors, grad))]


def on_cpu(function, tensors):
    """Return outputs and gradients in fp64, and what the dtype alone costs."""
    return run_attention(function, tensors, "cpu", torch.float64), run_attention(function, tensors, "cpu")


def check_errors(results, exact, rounded, least=0.0):
    """Check that no result is further from fp64 than three times what its dtype costs, and a thousandth."""
    for name, got, want, third in zip(("out", "dq", "dk", "dv", "dsinks"), results, exact, rounded, strict=False):
        error, allowed = ((x.double() - want).norm() / want.norm().clamp(min=least) for x in (got, third))
        assert error <= 3 * allowed + 1e-3, (name, error.item(), allowed.item())


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def boundaries():
    bounds = bounds_of(LENGTHS).cuda()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": LONGEST, "max_length_k": LONGEST}


def on_cuda(window, scale, lengths=LENGTHS):
    bounds = bounds_of(lengths).cuda()

    def attend(q, k, v, s=None):
        launch = KernelLaunch((bounds, bounds), (max(lengths), max(lengths)), slice(None), slice(None))
        return attend_on_cuda(q, k, v, [launch], scale=scale, window=window, sinks=s)

    return attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 128, 300, 5000])
@pytest.mark.parametrize(
    "head_dim,value_dim,heads,kv_heads",
    [(64, 64, 8, 8), (64, 64, 8, 2), (128, 128, 4, 1), (96, 64, 4, 4), (50, 50, 2, 1)],
)
def test_outputs_and_gradients_equal_the_cpu(head_dim, value_dim, heads, kv_heads, window, sinks, dtype):
    tensors = random_inputs(head_dim, value_dim, heads, kv_heads, sinks, dtype)
    scale = head_dim**-0.5

    def reference(q, k, v, s=None):
        return attend_on_cpu(q, k, v, LENGTHS, scale=scale, window=window, sinks=s)

    exact, rounded = on_cpu(reference, tensors)
    # With a window of 1 and no sinks the softmax is 1, so dq and dk are exactly 0 and what is computed is rounding: it
    # is measured by the other results. Everywhere else each norm is far above a hundredth of the largest.
    least = 1e-2 * max(want.norm() for want in exact)
    check_errors(run_attention(on_cuda(window, scale), tensors, "cuda"), exact, rounded, least)


def by_ffpa(query, key, value, lengths, scale, **options):
    if wide_kernel() is None:
        pytest.skip("ffpa-attn is not installed")
    bounds = torch.tensor([0, *lengths, 0, 0], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()  # and empty ones
    return attend_wide(query, key, value, bounds, max(lengths), scale)


ALL_OPTIONS = ({}, {"window": 100}, {"sinks": True}, {"softcap": 30.0})


@pytest.mark.parametrize(
    "attend, head_dim, options",
    [
        *((attend_by_document, dim, options) for dim in (64, 512) for options in ALL_OPTIONS),
        *((by_ffpa, dim, {}) for dim in (288, 512)),
    ],
)
def test_what_torchs_kernels_do_not_take_equals_the_cpu(attend, head_dim, options):
    """Outputs and gradients agree also with the mask of a window and the padding of short rows."""
    tensors = random_inputs(head_dim, head_dim, 8, 2, options.get("sinks", False), torch.bfloat16)
    options = {name: value for name, value in options.items() if name != "sinks"} | {"scale": head_dim**-0.5}

    def by(function):
        return lambda q, k, v, s=None: function(q, k, v, LENGTHS, sinks=s, **options)

    check_errors(run_attention(by(attend), tensors, "cuda"), *on_cpu(by(attend_on_cpu), tensors))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_forward_is_deterministic_and_documents_are_alone(sinks):
    tensors = [x.cuda() for x in random_inputs(64, 64, 4, 2, sinks, torch.bfloat16)]
    attend = on_cuda(None, 0.125)
    out = attend(*tensors)
    assert torch.equal(out, attend(*tensors))
    changed = [x.clone() for x in tensors]
    for x in changed[:3]:
        x[:, :, 1:301] = torch.randn_like(x[:, :, 1:301])
    outputs_changed = attend(*changed)
    keep = torch.ones(T, dtype=torch.bool, device="cuda")
    keep[1:301] = False
    assert torch.equal(out[:, :, keep], outputs_changed[:, :, keep])
    assert not torch.equal(out, outputs_changed)


EXTREME = ([16384], [8] * 2048, [1] * 2048, [1, 4000, 1, 200, 12182])


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("lengths", EXTREME, ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}")
def test_documents_of_extreme_packs_are_what_they_are_alone(lengths, head_dim):
    """Check the first document and the last. FlashAttention-2 allocates fp32 for T + 128 N rows of query gradients."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, n, sum(lengths), head_dim, generator=generator).bfloat16() for n in (8, 2, 2)]

    def attend(lengths, rows):
        inputs = [x[:, :, rows].cuda().requires_grad_() for x in tensors]
        out = on_cuda(None, head_dim**-0.5, lengths)(*inputs)
        weights = torch.linspace(-1, 1, head_dim, device=out.device, dtype=out.dtype).expand_as(out)
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]

    outputs = attend(lengths, slice(None))
    assert all(x.isfinite().all() for x in outputs)
    for rows_of_document in (slice(0, lengths[0]), slice(sum(lengths) - lengths[-1], None)):
        outputs_alone = attend([outputs[0][:, :, rows_of_document].shape[2]], rows_of_document)
        # for a document of one token the gradients of queries and keys are 0 but for rounding
        least = 1e-2 * max(own_outputs.float().norm() for own_outputs in outputs_alone)
        for packed, own_part in zip(outputs, outputs_alone, strict=True):
            assert (packed[:, :, rows_of_document] - own_part).float().norm() <= 0.02 * own_part.float().norm().clamp(
                min=least
            )


def test_no_host_sync():
    """If all four boundary arguments are passed, the host never waits, forward or backward."""
    query, key, value, sinks = (x.cuda().requires_grad_() for x in random_inputs(64, 64, 4, 2, True, torch.bfloat16))
    pack = boundaries()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"s_aux": sinks}, {"sliding_window": 100}):
            out, _ = varlen_attention(nn.Module(), query, key, value, None, **pack, **options)
            out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp32_reaches_the_kernel_through_autocast_only():
    query, key, value = (x.cuda() for x in random_inputs(64, 64, 4, 2, False, torch.float32))
    with pytest.raises(ValueError, match="Set bf16=True"):
        varlen_attention(nn.Module(), query, key, value, None, **boundaries())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, _ = varlen_attention(nn.Module(), query, key, value, None, **boundaries())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gpt_oss", "stablelm"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_packed_equals_alone(model_type, checkpointing, tiny_model):
    """Whole packed models in bf16 must be as close to fp32 as each document alone through stock eager attention."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 64} if model_type in ("gemma3", "gpt_oss") else {}
    sizes |= {"num_experts_per_tok": 4} if model_type == "gpt_oss" else {}  # all: rounding makes a router choose others
    model = tiny_model(model_type, dtype=torch.bfloat16, **sizes).cuda().train()
    model_alone = tiny_model(model_type, dtype=torch.bfloat16, attn_implementation="eager", **sizes).cuda().train()
    exact = copy.deepcopy(model_alone).float()
    generator = torch.Generator().manual_seed(0)
    documents = [{"input_ids": torch.randint(3, 300, (n,), generator=generator).tolist()} for n in (1, 40, 7, 100)]
    batch = PackedDataCollator()(documents)
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items() if k != "labels"}
    choice = select_attention(model)
    if choice.name != ATTENTION_NAME:  # flash-attn is installed here; this file is about the kernels in torch
        model.set_attn_implementation(ATTENTION_NAME)
    mark_packed_forwards(model)
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    ids = [torch.tensor([d["input_ids"]]).cuda() for d in documents]
    outs = [
        torch.cat([any_model(x, use_cache=False).logits.float() for x in ids], 1) for any_model in (exact, model_alone)
    ]
    outs.append(model(**batch).logits.float())
    for out in outs:
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).cuda()).sum().backward()
    grads = [
        torch.cat([p.grad.flatten().float() for p in any_model.parameters()])
        for any_model in (exact, model_alone, model)
    ]
    for right, rounded, packed in (outs, grads):
        assert (packed - right).norm() <= 3 * (rounded - right).norm()
        assert (rounded - right).norm() < 0.1 * right.norm()


def shared_runs(device):
    """Return turns of a chat, each beginning as the one before it, and a document of its own: 5.5 keys per row."""
    turns = [{"input_ids": [*range(1, 150 * n), *([1000 + n] * 9)]} for n in range(1, 12)]
    batch = sharing().make_collator(PackedDataCollator())([*turns, {"input_ids": [7] * 70}])
    shared = batch[LAYOUT_KEY].to(device)
    bounds = batch["cu_seq_lens_q"].to(device), batch["cu_seq_lens_k"].to(device)
    return PackedForward(*bounds, batch["max_length_q"], batch["max_length_k"], **shared.attention_fields())


@needs("prefixes")
@pytest.mark.parametrize("most_bytes", [2**30, 1], ids=["one launch", "several"])
@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"window": 128}, {"chunk": 100}], ids=str)
def test_shared_prefixes_equal_the_cpu(features, most_bytes, monkeypatch):
    monkeypatch.setattr(runs, "COPIED_BYTES", most_bytes)
    features = dict(features)
    cpu_runs, gpu_runs = (shared_runs(device) for device in ("cpu", "cuda"))
    sinks = features.pop("sinks", False)
    num_rows = int(cpu_runs.cu_seq_lens_q[-1])
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, num_rows, 64, generator=generator).to(torch.bfloat16) for heads in (8, 2, 2)]
    tensors += [torch.randn(8, generator=generator)] if sinks else []

    def attention(attend, shared):
        return lambda q, k, v, s=None: attend(q, k, v, shared, scale=0.125, sinks=s, **features)

    exact, rounded = on_cpu(attention(attend_shared_on_cpu, cpu_runs), tensors)
    inputs = [x.cuda().requires_grad_() for x in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(attention(attend_pack_on_cuda, gpu_runs)(*inputs).sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = run_attention(attention(attend_pack_on_cuda, gpu_runs), tensors, "cuda")
    for got, want, third in zip(results, exact, rounded, strict=True):
        assert (got - want).norm() < 2 * (third - want).norm() + 1e-3 * want.norm()


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_3_equals_the_cpu(head_dim, window):
    """Compare also empty documents, and documents with fewer queries than keys, as shared prefixes make them."""
    pytest.importorskip("flash_attn_interface", reason="flash-attn-3 is not installed")
    q_lengths = [0, 40, 300, 1, 64]
    k_lengths = [0, 40, 900, 129, 64]
    bounds = [bounds_of(lengths) for lengths in (q_lengths, k_lengths)]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 8, sum(q_lengths), head_dim), *[(1, 2, sum(k_lengths), head_dim)] * 2]
    tensors = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    scale = head_dim**-0.5

    def reference(q, k, v):
        outs = []
        for (a, b), (c, d) in zip(*(pairwise(x.tolist()) for x in bounds), strict=True):
            visible = visible_keys(b - a, d - c, window, device="cpu")
            outs.append(math_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], visible, scale=scale))
        return torch.cat(outs, dim=2)

    def on_fa3(q, k, v):
        launch = KernelLaunch(
            tuple(x.cuda() for x in bounds), (max(q_lengths), max(k_lengths)), slice(None), slice(None)
        )
        return attend_on_cuda(q, k, v, [launch], scale=scale, window=window)

    exact = run_attention(reference, tensors, "cpu", torch.float64)
    fa2 = run_attention(on_fa3, tensors, "cuda")
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        results = run_attention(on_fa3, tensors, "cuda")
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for mine, theirs, right in zip(results, fa2, exact, strict=True):
        error, usual = ((x.double() - right).norm() / right.norm() for x in (mine, theirs))
        assert error < 2 * usual + 1e-3
