"""What the kernels of flash-attn 2.8 accept, refuse, and compute wrongly without an error, computed in plain torch.

- A call that the kernels refuse raises the RuntimeError that they raise (csrc/flash_attn/flash_api.cpp): dtypes that
  differ, or are not float16 or bfloat16; heads of more than 256 dimensions; heads of queries that are no multiple of
  those of keys; shapes; boundaries that are not int32 or not contiguous; softcap with dropout.
- A call that a GPU would compute wrongly without an error is a line in `silent`: boundaries that do not begin at 0, do
  not rise, or do not end at T; a `max_seqlen` below the longest document. So is a `max_seqlen` that is a tensor: the
  host would wait for the GPU. Tokens that no block of the kernel would reach are nan here.
- `calls` counts calls by kind, so that a test can see that this code ran.

Limits: it shows that calls are right, and nothing of what happens in a kernel. Its numbers are those of plain torch: no
tiles, no atomic additions in backward, no alignment, no memory of the kernel, no streams, no speed, no second GPU.
It checks no device and no compute capability, because all tensors are on the CPU.
"""

from collections import Counter
from itertools import pairwise

import torch
import torch.nn.functional as F

# A test may add float32 and float64, in which a judge can tell a leak from rounding. The kernels have neither.
dtypes = {torch.float16, torch.bfloat16}
calls: Counter[str] = Counter()
silent: list[str] = []


def attend(kind, q, k, v, cu_q, cu_k, max_q, max_k, dropout, scale, causal, window, softcap):
    calls[kind] += 1
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # as flash_attn_interface.py
    _check(kind, q, k, v, cu_q, cu_k, softcap, dropout)
    max_q, max_k = (_as_int(x) for x in (max_q, max_k))
    if kind == "rows":
        visible = torch.ones(q.shape[-3], k.shape[-3], dtype=torch.bool)
        first_q = 0  # the last query is at the position of the last key
        first_k = k.shape[-3] - q.shape[-3]
        places = torch.arange(q.shape[-3]) + first_k - first_q, torch.arange(k.shape[-3])
        reached = torch.ones(q.shape[-3], dtype=torch.bool)
    else:
        doc_q, own_q = _documents(cu_q, max_q, len(q))
        doc_k, own_k = _documents(cu_k, max_k, len(k))
        longer = (cu_k.diff() - cu_q.diff()).long()
        visible = (doc_q[:, None] == doc_k) & (doc_q >= 0)[:, None]
        places = own_q + longer[doc_q.clamp(min=0)], own_k
        reached = doc_q >= 0
    distance = places[0][:, None] - places[1]
    window_left = window[0]
    right = 0 if causal else window[1]
    if window_left >= 0:
        visible &= distance <= window_left
    if right >= 0:
        visible &= distance >= -right
    out = _compute(q, k, v, visible, q.shape[-1] ** -0.5 if scale is None else scale, softcap, dropout)
    return out if reached.all() else out.masked_fill(~reached[:, None, None], float("nan"))


def _as_int(length):
    if isinstance(length, torch.Tensor):
        silent.append("max_seqlen is a tensor: the host waits for the GPU in every call")
    return int(length)


def _documents(bounds, longest, num_tokens):
    """Return (document of each token, place of each token in it); -1 for tokens that no block of the kernel reaches."""
    starts = bounds.tolist()
    if starts[0] != 0 or starts[-1] != num_tokens:
        silent.append(f"cu_seqlens begin at {starts[0]} and end at {starts[-1]} for {num_tokens} tokens")
    document = torch.full((num_tokens,), -1)
    place = torch.zeros(num_tokens, dtype=torch.long)
    for i, (begin, stop) in enumerate(pairwise(starts)):
        if stop < begin:
            silent.append(f"cu_seqlens fall from {begin} to {stop}")
        if stop - begin > longest:
            silent.append(f"a document has {stop - begin} tokens and max_seqlen is {longest}")
        reached = slice(begin, min(stop, begin + longest, num_tokens))
        document[reached] = i
        place[reached] = torch.arange(len(document[reached]))
    return document, place


def _check(kind, q, k, v, cu_q, cu_k, softcap, dropout):
    _require(q.dtype in dtypes, "FlashAttention only support fp16 and bf16 data type")
    _require(k.dtype == q.dtype, "query and key must have the same dtype")
    _require(v.dtype == q.dtype, "query and value must have the same dtype")
    _require(softcap == 0 or dropout == 0, "Softcapping does not support dropout for now")
    heads = q.shape[-2]
    kv_heads = k.shape[-2]
    head_dim = q.shape[-1]
    # the interface pads heads to a multiple of 8 before the kernel looks at them
    _require(-(-head_dim // 8) * 8 <= 256, "FlashAttention forward only supports head dimension at most 256")
    _require(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    tokens = (q.shape[0], k.shape[1]) if kind == "rows" else (k.shape[0],)
    _require(q.dim() == (4 if kind == "rows" else 3), "q must have shape (total_q, num_heads, head_size)")
    for name, x in (("k", k), ("v", v)):
        _require(x.shape == (*tokens, kv_heads, head_dim), f"{name} must have shape (total_k, num_heads_k, head_size)")
    if kind == "varlen":
        for name, bounds in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            _require(bounds.dtype == torch.int32, f"{name} must have dtype int32")
            _require(bounds.is_contiguous(), f"{name} must be contiguous")
            _require(bounds.shape == cu_q.shape and bounds.dim() == 1, f"{name} must have shape (batch_size + 1)")
        _require(len(cu_q) > 1, "batch size must be positive")


def _require(condition, message):
    if not condition:
        raise RuntimeError(message)


def _compute(q, k, v, visible, scale, softcap, dropout):
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):  # as in a kernel of one's own
        queries, keys, values = (x.to(wide).transpose(-2, -3) for x in (q, k, v))
        repeats = queries.shape[-3] // keys.shape[-3]
        keys = keys.repeat_interleave(repeats, -3)
        values = values.repeat_interleave(repeats, -3)
        logits = queries @ keys.mT * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)  # a query without keys is zero
        return (F.dropout(weights, dropout) @ values).transpose(-2, -3).to(q.dtype)
