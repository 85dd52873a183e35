"""Attention of a pack that is one long document: dense causal attention on cuDNN, where it is faster.

One document needs no boundaries, so `F.scaled_dot_product_attention` computes it, and torch brings cuDNN for that.
`runs.py` asks `takes_dense` for each packed call on CUDA. The first such call for a kind of heads is measured on
`MEASURED_TOKENS` of its tokens, forward and backward, on cuDNN and on the FlashAttention-2 kernels. cuDNN is used from
then on if it is faster, and gives the same output and gradients up to rounding.

Not with windows, chunks or sinks, in compiled code, nor with `torch.use_deterministic_algorithms`: two runs of one
training might choose differently.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .packed_forward import PackedForward

LONG_DOCUMENT = 32_768  # tokens from which on a document is long: cuDNN plans anew for each shape, for about a second
MEASURED_TOKENS = 32_768
MOST_NUMBERS = 2**31 - 1  # of a tensor, so that its offsets fit into 32 bits
# Relative distance that is rounding: bfloat16 has 8 bits, and gradients sum over many keys
MAX_DISTANCE = 2e-2
BACKENDS = {"cuda": SDPBackend.CUDNN_ATTENTION}  # on a CPU torch chooses

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class HeadKind(NamedTuple):
    """What decides which kernel is faster, besides the length, which is always long."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int


measured: dict[HeadKind, bool] = {}  # whether cuDNN is used


def attend_dense(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention of one document: (1, H, T, D_value)."""
    backend = BACKENDS.get(query.device.type)
    if backend is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def takes_dense(states: tuple[Tensor, Tensor, Tensor], pack: PackedForward, *, scale: float, on_flash: Attend) -> bool:
    """Return whether `attend_dense` computes a call without window, chunk and sinks. Nothing is read from the device.

    Args:
        states: queries, keys and values.
        pack: the pack of the call.
        scale: factor of the logits.
        on_flash: computes the attention of one document on the FlashAttention-2 kernels.
    """
    query, key, _ = states
    if torch.compiler.is_compiling() or query.shape[2] < LONG_DOCUMENT or query.numel() > MOST_NUMBERS:
        return False
    if pack.kv_index is not None or len(pack.cu_seq_lens_q) != 2 or torch.are_deterministic_algorithms_enabled():
        return False
    kind = HeadKind(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3])
    if kind not in measured:
        first = [x[:, :, :MEASURED_TOKENS].detach() for x in states]
        # In a thread of its own, so that neither checkpointing nor autocast sees what is computed
        with ThreadPoolExecutor(1) as thread:
            measured[kind] = thread.submit(is_faster, partial(attend_dense, scale=scale), on_flash, first).result()
    return measured[kind]


def is_faster(dense: Attend, flash: Attend, states: list[Tensor]) -> bool:
    """Return whether `dense` is faster than `flash`, and computes the same, on queries, keys and values `states`."""
    try:
        dense_seconds, results = _time_both_passes(dense, states)
        flash_seconds, expected = _time_both_passes(flash, states)
    except RuntimeError:  # cuDNN does not support these heads or this GPU, or memory is not enough to measure
        return False
    distances = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(results, expected, strict=True)]
    return dense_seconds < flash_seconds and max(float(distance) for distance in distances) < MAX_DISTANCE


def _time_both_passes(attend: Attend, states: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Return the seconds of forward and backward in the second of two runs; the output and the gradients."""
    device = states[0].device
    for _ in range(2):  # the first plans
        states = [x.detach().requires_grad_() for x in states]
        start = _seconds(device)
        out = attend(*states)
        gradients = torch.autograd.grad(out, states, states[0].detach()[..., : out.shape[-1]])
        seconds = _seconds(device) - start
    return seconds, [out.detach(), *gradients]


def _seconds(device: torch.device) -> float:
    """Return the time when the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
