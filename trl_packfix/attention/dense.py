"""Compute the attention of a pack that is one long document on cuDNN, where cuDNN is faster than FlashAttention-2.

One document needs no boundaries. So its attention is *dense*: plain causal attention of one sequence, which
`F.scaled_dot_product_attention` computes on cuDNN. `runs.py` asks `uses_dense` for each packed call on CUDA. The first
call for a kind of heads is measured on `MEASURED_TOKENS` of its tokens, forward and backward, on cuDNN and on the
FlashAttention-2 kernels. From then on cuDNN is used if it was faster, and if its output and gradients were the same up
to rounding.

cuDNN is never used for windows, chunks or sinks, and not in compiled code. With `torch.use_deterministic_algorithms`
it is not used either, because two trainings that should be equal might measure differently.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .packed_forward import PackedForward

# Fewest tokens of a document that may run on cuDNN, which needs about a second to plan for each new shape
LONG_DOCUMENT = 32_768
MEASURED_TOKENS = 32_768  # both kernels are measured on this many tokens
MAX_ELEMENTS = 2**31 - 1  # the most elements of a tensor that cuDNN gets, so that their offsets fit into 32 bits
# The largest relative distance that rounding explains: bfloat16 has 8 bits, and gradients are sums over many keys
MAX_DISTANCE = 2e-2
# By type of device, the backend of `F.scaled_dot_product_attention`. On a CPU, as in tests, torch chooses the backend.
BACKENDS = {"cuda": SDPBackend.CUDNN_ATTENTION}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal attention of queries, keys and values of one document


class HeadKind(NamedTuple):
    """A kind of attention heads for which the faster kernel is measured once. The length of documents is not in it."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int


measured: dict[HeadKind, bool] = {}  # for each kind that was measured, whether it runs on cuDNN


def attend_dense(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention of one document, on CUDA by cuDNN: (1, H, T, D_value)."""
    backend = BACKENDS.get(query.device.type)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def uses_dense(
    tensors: tuple[Tensor, Tensor, Tensor], pack: PackedForward, *, scale: float, attend_on_flash: Attend
) -> bool:
    """Return whether `attend_dense` shall compute the attention of a pack, which has no window, chunks and sinks.

    The host does not wait for the device, except when it measures a new kind of heads.

    Args:
        tensors: queries, keys and values: (1, H, T, D), (1, G, T, D) and (1, G, T, D_value).
        pack: the pack of the call.
        scale: factor of the logits.
        attend_on_flash: computes the attention of one document on the FlashAttention-2 kernels.
    """
    query, key, value = tensors
    # First, because in compiled code each later condition would add a guard on the shapes of the pack
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return False
    # A `kv_index` means that documents share a prefix.
    is_one_document = pack.kv_index is None and len(pack.cu_seq_lens_q) == 2
    if not is_one_document or query.shape[2] < LONG_DOCUMENT:
        return False
    most_elements = query.shape[1] * query.shape[2] * max(query.shape[3], value.shape[3])  # of queries or of the output
    if most_elements > MAX_ELEMENTS:
        return False
    kind = HeadKind(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    if kind not in measured:
        first_tokens = [x[:, :, :MEASURED_TOKENS].detach() for x in tensors]
        attend_on_cudnn = partial(attend_dense, scale=scale)
        # The checkpointing and the autocast of this forward act in this thread only. So measure in another thread.
        with ThreadPoolExecutor(1) as thread:
            measured[kind] = thread.submit(is_faster, attend_on_cudnn, attend_on_flash, first_tokens).result()
    return measured[kind]


def is_faster(dense: Attend, flash: Attend, tensors: list[Tensor]) -> bool:
    """Return whether `dense` is faster than `flash` and gives equal results up to rounding.

    Args:
        dense, flash: two functions that compute causal attention.
        tensors: the queries, keys and values on which both are measured.
    """
    try:
        dense_seconds, results = _time_both_passes(dense, tensors)
        flash_seconds, expected = _time_both_passes(flash, tensors)
    except RuntimeError:  # cuDNN does not support these heads or this GPU, or memory is not enough to measure
        return False
    distances = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(results, expected, strict=True)]
    # Not of the largest distance: it may be smaller than a distance that is NaN.
    return dense_seconds < flash_seconds and all(float(distance) < MAX_DISTANCE for distance in distances)


def _time_both_passes(attend: Attend, tensors: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Run forward and backward twice, and return the seconds and the results of the second time.

    The first time does not count, because cuDNN then plans for the shape.

    Returns:
        The seconds of both passes, and a list of the output and the gradients of queries, keys and values.
    """
    device = tensors[0].device
    for _ in range(2):
        tensors = [x.detach().requires_grad_() for x in tensors]
        start = _time_when_finished(device)
        out = attend(*tensors)
        grad_out = tensors[0].detach()[..., : out.shape[-1]]  # any numbers of this shape would do
        gradients = torch.autograd.grad(out, tensors, grad_out)
        seconds = _time_when_finished(device) - start
    return seconds, [out.detach(), *gradients]


def _time_when_finished(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
