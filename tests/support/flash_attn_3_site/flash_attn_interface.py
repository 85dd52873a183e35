"""A strict stand-in for flash-attn-3: its two operators, with their signature and refusals, in plain torch on the CPU.

`torch.nn.attention.activate_flash_attention_impl("FA3")` imports this module and calls `torch.ops.flash_attn_3`. The
schemas are those of `hopper/flash_api.cpp`, so torch refuses calls that do not fit them. `Strict.calls` counts calls;
`Strict.fault` makes the kernels refuse ("forward", "backward") or compute something else ("wrong").

Limits: as `support.strict_varlen`, whose numbers these are. Nothing of what happens in a kernel is shown.
"""

from collections import Counter

import torch
from support.strict_varlen import StrictVarlen


class Strict:
    calls: Counter[str] = Counter()
    fault = ""


_numbers = StrictVarlen()
_library = torch.library.Library("flash_attn_3", "DEF")
_library.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
    "Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> ()"
)


def _check(q, *other_tensors):
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if any(x.dtype != q.dtype for x in other_tensors):
        raise RuntimeError("query, key and value must have the same dtype")
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256, a multiple of 8")


def _fwd(q, k, v, *more):
    (k_new, v_new, q_v, out, cu_q, cu_k, k_bounds, used_q, used_k, max_q, max_k, *nothing) = more[:20]
    scale, causal, window_left, right, chunk, softcap = more[20:26]
    assert (k_new, v_new, q_v, out, k_bounds, used_q, used_k, *nothing) == (None,) * 16
    assert chunk == 0
    assert softcap == 0
    Strict.calls["forward"] += 1
    if Strict.fault == "forward":
        raise RuntimeError("FlashAttention-3 only supports Hopper GPUs in this build.")
    _check(q, k, v)
    out, lse, *_ = _numbers.forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, window_size_left=window_left,
        window_size_right=right,
    )  # fmt: skip
    out = out.roll(1, 0) if Strict.fault == "wrong" else out
    return out, lse, q.new_empty(0), q.new_empty(0)


def _bwd(g, q, k, v, out, lse, dq, dk, dv, *more):
    cu_q, cu_k, used_q, used_k, max_q, max_k, scale, *options = more
    # torch leaves out trailing arguments that are the defaults of the schema
    causal, window_left, right, softcap, deterministic, _ = [*options, *(False, -1, -1, 0.0, False, 0)[len(options) :]]
    assert used_q is None
    assert used_k is None
    assert softcap == 0
    Strict.calls["backward"] += 1
    if Strict.fault == "backward":
        raise RuntimeError("This flash attention build does not support backward.")
    if deterministic and q.shape[-1] > 192:
        raise RuntimeError("Deterministic backward not supported for hdim 256.")
    _check(q, k, v, g, out)
    seed = torch.zeros(2, dtype=torch.uint64)
    grads = _numbers.backward(
        g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, seed, None, scale=scale,
        window_size_left=window_left, window_size_right=right,
    )  # fmt: skip
    for ours, grad in zip((dq, dk, dv), grads, strict=True):
        ours.copy_(grad)


_library.impl("fwd", _fwd, "CPU")
_library.impl("bwd", _bwd, "CPU")
