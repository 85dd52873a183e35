"""Causal attention over N documents laid end to end: the computation only, independent of models.

    device  features                                     how
    CPU     sliding window, sinks     the flash kernel of F.scaled_dot_product_attention, windows on tiles of queries
    CPU     softcap, dropout          plain torch on tiles of queries, recomputed in backward
    CUDA    sliding window, sinks     FlashAttention-2 as built into torch, all documents at once
    CUDA    heads above 256 dims      ffpa-attn, where it is installed, all documents at once
    other   all of them               documents of similar length as rows of one batch

The last row is for devices and features without a flash kernel: F.scaled_dot_product_attention, which chooses the best
kernel of the device, or plain torch on tiles of queries for sinks and softcap.

Memory is always linear in the number of tokens. A window of w tokens costs w x length, not length squared.

Shapes: T tokens, N documents, H query heads, G key/value heads (H a multiple of G), D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .flash import (
    CudaKernel,
    FlashCall,
    FlashCalls,
    KernelOptions,
    RowsAndKeys,
    flash_on_cpu,
    flash_on_cuda,
    kernel_head_dim,
    pad_head_dim,
    query_tiles,
    visible_keys,
)
from .rows import DocumentRows, TensorAxes

MATH_TILE = 256  # queries of a tile in plain torch, which is faster with fewer, larger matrix products
AXES_OF_HEADS = TensorAxes((2,), 0)  # of (rows, heads, tokens, head dim)


class AttentionOptions(KernelOptions, total=False):
    """And on other kernels."""

    dropout: float  # of the weights
    softcap: float | None  # logits become softcap * tanh(logit / softcap) (Gemma 2, arXiv 2408.00118)


# Not compiled: the loop over documents would be recompiled for every number of documents.
@torch.compiler.disable
def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], **options: Unpack[AttentionOptions]
) -> Tensor:
    """Causal attention within each document (`lengths`, in tokens, sum T)."""
    if options.get("softcap") is None and not options.get("dropout"):
        documents = [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]
        runs = [RowsAndKeys(document, document) for document in documents]
        scale = options["scale"]
        window = options.get("window")
        sinks = options.get("sinks")
        return flash_on_cpu(query, key, value, runs, None, scale=scale, window=window, sinks=sinks)
    # split, not slices: the backward of each slice would allocate a gradient of the whole row
    states = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [math_in_tiles(q, k, v, **options).transpose(1, 2) for q, k, v in states]
    # token-major, as the output projection reads it: the transpose is contiguous
    return torch.cat(outs, dim=1).transpose(1, 2)


class KernelLaunch(NamedTuple):
    """What one launch of FlashAttention-2 computes: boundaries and longest of queries and of keys, and their rows.

    If `keys` are the numbers of rows, these are copied end to end, and may be in several launches. No field has a
    default: torch 2.11 does not compile a default slice.
    """

    cu_seq_lens: tuple[Tensor, Tensor]  # int32, (N + 1,) each
    max_lengths: tuple[int, int]
    queries: slice
    keys: slice | Tensor


def attend_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, launches: list[KernelLaunch], **options: Unpack[KernelOptions]
) -> Tensor:
    """The same for bfloat16 and float16 on CUDA, without a device-to-host copy, softcap and dropout.

    Each query is in one launch. Heads have at most 256 dimensions. Raises `KernelError` for other dtypes.
    """
    scale = options["scale"]
    window = options.get("window")
    sinks = options.get("sinks")
    calls = [
        FlashCall(queries, keys, CudaKernel(bounds, longest, only_if_shorter(window, longest[1]), scale))
        for bounds, longest, queries, keys in launches
    ]
    copies = isinstance(calls[0].keys, Tensor)
    is_one = len(calls) == 1 and not copies
    return flash_on_cuda(query, key, value, sinks, calls[0].kernel if is_one else FlashCalls(calls, shares_keys=copies))


@lru_cache(maxsize=1)  # every layer asks
def wide_kernel() -> Callable[..., Tensor] | None:
    """The kernel of ffpa-attn for heads above 256 dimensions, if it is installed: causal, and nothing else."""
    try:
        from ffpa_attn import ffpa_attn_varlen_func
    except ImportError:
        return None
    return ffpa_attn_varlen_func


def attend_wide(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """The same for heads above 256 dimensions, by `wide_kernel`."""
    if value.data_ptr() == key.data_ptr():
        value = value.clone()  # it refuses keys that are the values
    value_dim = value.shape[-1]
    head_dim = max(320, -(-max(query.shape[-1], value.shape[-1]) // 64) * 64)
    states = (x[0].transpose(0, 1) for x in pad_head_dim(head_dim, query, key, value))  # (T, H, D)
    kernel: Any = wide_kernel()
    out = kernel(*states, bounds, bounds, longest, longest, softmax_scale=scale, causal=True, enable_gqa=True)
    return out.transpose(0, 1)[None, ..., :value_dim]


def only_if_shorter(size: int | None, longest: int) -> int | None:
    """A window or a chunk; None if no document is longer than it."""
    return None if size is None or size >= longest else size


# Not compiled: the number of groups depends on the lengths.
@torch.compiler.disable
def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    is_causal: bool = True,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """The same on any device, in right-padded batches of at most T padded tokens; not causal, of one length each."""
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(kernel_head_dim(query, value), query, key, value)
    rows = _document_rows(tuple(length for length in lengths if length), query.device, is_causal)
    attend = _sdpa_rows if options.get("softcap") is None and options.get("sinks") is None else math_in_tiles
    outs = []
    for group in rows.groups:
        q, k, v = (group.split(x, AXES_OF_HEADS) for x in (query, key, value))
        outs.append(attend(q, k, v, is_causal=is_causal, **options))
    return rows.join(outs, AXES_OF_HEADS)[..., :value_dim]


@lru_cache(maxsize=4)  # the same in every layer; models have up to two kinds of layers, and so do towers
def _document_rows(lengths: tuple[int, ...], device: torch.device, pads: bool) -> DocumentRows:
    return DocumentRows(list(lengths), device, sum(lengths), pads=pads)


def _sdpa_rows(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Unpack[AttentionOptions]
) -> Tensor:
    scale = options["scale"]
    dropout = options.get("dropout", 0.0)
    window = options.get("window")
    # Each key/value head once per query head: with `enable_gqa` the memory-efficient kernel of CUDA does not run.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale)
    outs = []
    for start, stop, first in query_tiles(length, window, max(window, MATH_TILE)):
        visible = visible_keys(stop - start, stop - first, window, device=query.device)
        q = query[:, :, start:stop]
        k = key[:, :, first:stop]
        v = value[:, :, first:stop]
        outs.append(F.scaled_dot_product_attention(q, k, v, visible, dropout_p=dropout, scale=scale))
    return torch.cat(outs, dim=2)


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by its formula, with softmax in at least fp32, softcap and sinks; any batch size.

    `visible` is None (all keys), bool or additive, of shape (queries, keys) or (B, 1 or H, queries, keys).
    """
    B, H, num_queries, _ = query.shape
    G = key.shape[1]
    logits = query.unflatten(1, (G, H // G)) @ key.unsqueeze(2).mT * scale  # (B, G, H/G, queries, keys)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(1, 2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        # not -inf: a query without visible keys (left padding) must not give nan
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    elif visible is not None:
        logits = logits + visible
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype).view(1, H, 1, 1).expand(B, H, num_queries, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    weights = F.dropout(weights, p=dropout).to(value.dtype).unflatten(1, (G, H // G))
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def math_in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = True,
    mask: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """`math_attention` on tiles of queries, causal or under a `mask` (`visible` there): (B, H, queries, D_value)."""
    window = options.pop("window", None)
    keeps_state = options.get("dropout", 0.0) > 0
    outs = []
    for start, stop, first in query_tiles(query.shape[2], window, MATH_TILE):
        rows = slice(start, stop)
        keys = slice(None)
        visible = mask
        if is_causal:
            keys = slice(first, stop)
            visible = visible_keys(stop - start, stop - first, window, device=query.device)
        elif mask is not None and mask.shape[-2] > 1:
            visible = mask[..., rows, :]
        tile = query[:, :, rows], key[:, :, keys], value[:, :, keys], visible
        # recomputed in backward: saved attention weights would be length x length
        outs.append(checkpoint(math_attention, *tile, use_reentrant=False, preserve_rng_state=keeps_state, **options))
    return torch.cat(outs, dim=2)
