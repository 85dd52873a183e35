"""torch's FlashAttention-2 varlen operators, as strict as on a GPU, computed in plain torch on the CPU.

Within `StrictVarlen()` the operators `aten._flash_attention_forward` and `aten._flash_attention_backward`

- raise where their CUDA code refuses a call (`flash_api.cpp`): dtypes, shapes, boundaries that are not int32 or not
  contiguous, heads of more than 256 dimensions or of no multiple of 8;
- raise where a GPU would compute something else without an error: boundaries that do not begin at 0, do not rise, or
  do not end at the last token; largest lengths below the longest; causal sequences with more queries than keys; calls
  for which the kernel swaps heads and queries;
- return nan where the kernels leave memory uninitialised, and infinity as log-sum-exp of queries without keys.

float64 is allowed, too, so that a difference can be told from rounding. Not shown: what happens within a kernel, atomic
additions, streams, memory, speed.
"""

from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
DTYPES = {torch.float16, torch.bfloat16, torch.float64}


class StrictVarlen(TorchDispatchMode):
    """`forwards` and `backwards`: for each call the number of queries, keys and sequences, and whether it is causal."""

    def __init__(self):
        super().__init__()
        self.forwards = []
        self.backwards = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATEN._flash_attention_forward.default:
            return self.forward(*args, **kwargs)
        if func is ATEN._flash_attention_backward.default:
            return self.backward(*args, **kwargs)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def registered(self):
        """Within this context torch has the operators for the CPU. Under a dispatch mode it would compile nothing."""
        with torch.library._scoped_library("aten", "IMPL") as operators:
            operators.impl("_flash_attention_forward", self.forward, "CPU")
            operators.impl("_flash_attention_backward", self.backward, "CPU")
            yield self

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        assert dropout == 0
        assert not debug
        self.forwards.append((len(q), len(k), len(cu_q) - 1, causal or options["window_size_right"] == 0))
        out = torch.full_like(q, torch.nan)
        lse = q.new_full((q.shape[1], len(q)), torch.nan, dtype=_wide(q))
        for rows, keys, logits in _sequences(q, k, v, cu_q, cu_k, max_q, max_k, causal, **options):
            lse[:, rows] = logits.logsumexp(-1)
            out[rows] = (logits.softmax(-1).nan_to_num(0) @ _heads(v[keys], q)).transpose(0, 1).to(q.dtype)
            lse[:, rows] = lse[:, rows].masked_fill(lse[:, rows] == -torch.inf, torch.inf)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(self, g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, **options):
        assert dropout == 0
        assert seed.dtype == torch.uint64
        assert g.dtype == out.dtype == q.dtype
        assert g.shape == out.shape == q.shape
        assert g.stride(-1) == 1
        assert lse.shape == (q.shape[1], len(q))
        assert lse.dtype == _wide(q)
        assert lse.is_contiguous()
        self.backwards.append((len(q), len(k), len(cu_q) - 1, causal or options["window_size_right"] == 0))
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        groups = k.shape[1], q.shape[1] // k.shape[1]
        for rows, keys, logits in _sequences(q, k, v, cu_q, cu_k, max_q, max_k, causal, **options):
            weights = torch.exp(logits - lse[:, rows, None])  # (H, queries, keys)
            grad, out_rows = (x[rows].transpose(0, 1).to(lse.dtype) for x in (g, out))
            change = weights * (grad @ _heads(v[keys], q).mT - (grad * out_rows).sum(-1, keepdim=True))
            change = change * options["scale"]
            grads[0][rows] = (change @ _heads(k[keys], q)).transpose(0, 1).to(q.dtype)
            for total, gradient in zip(grads[1:], (change.mT @ _heads(q[rows], q), weights.mT @ grad), strict=True):
                total[keys] = gradient.unflatten(0, groups).sum(1).transpose(0, 1).to(q.dtype)
        return tuple(grads)


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def _heads(x, q):
    """Return (tokens, heads, D) as (query heads, tokens, D), in at least float32."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1).to(_wide(q))


def _sequences(q, k, v, cu_q, cu_k, max_q, max_k, causal, *, scale, window_size_left, window_size_right):
    """Yield (queries, keys, logits (H, queries, keys)) of each sequence."""
    assert q.dtype in DTYPES, "FlashAttention takes bfloat16 and float16"
    assert q.dtype == k.dtype == v.dtype, "FlashAttention takes bfloat16 and float16"
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape == v.shape
    assert k.shape[2] == q.shape[2]
    assert isinstance(max_q, int), "the host would wait for the device"
    assert isinstance(max_k, int), "the host would wait for the device"
    for bounds, longest, states in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        assert bounds.dim() == 1
        assert bounds[0] == 0
        assert bounds[-1] == len(states)
        assert (bounds.diff() >= 0).all()
        assert bounds.diff().max() <= longest <= len(states) + 1, "some blocks of a sequence are not computed"
    assert cu_q.shape == cu_k.shape
    assert len(cu_q) > 1
    assert not (causal and window_size_left >= 0), "a window and causal at once is not what we call"
    swapped = max_q == 1 and q.shape[1] > k.shape[1] and window_size_left < 0 and window_size_right < 0
    assert not swapped, "the kernel swaps heads and queries"
    right = 0 if causal else window_size_right
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert right != 0 or b - a <= d - c, "more queries than keys"
        logits = _heads(q[a:b], q) @ _heads(k[c:d], q).mT * scale
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden |= distance < -right
        if window_size_left >= 0:
            hidden |= distance > window_size_left
        yield slice(a, b), slice(c, d), logits.masked_fill(hidden, -torch.inf)
