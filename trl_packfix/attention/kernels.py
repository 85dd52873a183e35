"""Causal attention over N documents laid end to end: the computation only, independent of models.

    device  features                                     how
    CPU     plain causal, dropout                        F.scaled_dot_product_attention, document by document
    CPU     sliding window, sinks                        the flash kernel used by it, on tiles of queries
    CPU     softcap; dropout with a window or sinks      plain torch on tiles of queries, recomputed in backward
    CUDA    sliding window, sinks                        FlashAttention-2 as built into torch, all documents at once
    other   all of them                                  documents of similar length as rows of one batch

The last row is for devices and features without a flash kernel: F.scaled_dot_product_attention, which chooses the best
kernel of the device, or plain torch on tiles of queries for sinks and softcap.

Memory is always linear in the number of tokens. A window of w tokens costs w x length, not length squared.

Shapes: T tokens, N documents, H query heads, G key/value heads (H a multiple of G), D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .flash import (
    CpuFlash,
    CudaKernel,
    FlashAttention,
    FlashCall,
    FlashCalls,
    WindowMasks,
    flash_on_cuda,
    kernel_head_dim,
    pad_head_dim,
    tiles,
    visible_keys,
)
from .packed_forward import PackedForward
from .rows import Axes, DocumentRows

# Queries per tile. A window of w costs w + 64 keys per query; 64 was the fastest of 64 to 1024 for windows of 128 to
# 1024 tokens. Plain torch is faster with fewer, larger matrix products.
FLASH_TILE, MATH_TILE = 64, 256
HEADS = Axes((2,), 0)  # of (rows, heads, tokens, head dim)


class Options(TypedDict, total=False):
    """What changes attention besides its tensors.

    Keys:
        scale: factor of the logits.
        window: each token attends to so many, up to itself; None: to all of its document before it.
        dropout: of the weights.
        softcap: bounds the logits to softcap * tanh(logit / softcap) (Gemma 2, arXiv 2408.00118).
        sinks: one more logit per head, (H,), which takes part in the softmax and has no value (arXiv 2309.17453,
            gpt_oss).
    """

    scale: Required[float]
    window: int | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None


# Not compiled: the loop over documents would be recompiled for every number of documents.
@torch.compiler.disable
def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], **options: Unpack[Options]) -> Tensor:
    """Causal attention within each document (`lengths`, in tokens, sum T).

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> together = attend_on_cpu(q, k, v, [3, 2], scale=0.5)
    >>> second = attend_on_cpu(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], [2], scale=0.5)
    >>> torch.allclose(together[:, :, 3:], second)
    True
    """
    window, sinks = only_if_shorter(options.get("window"), max(lengths)), options.get("sinks")
    scale, dropout, is_plain = options["scale"], options.get("dropout", 0.0), window is None and sinks is None
    # flash needs one head dim: padding with zeros changes no logit, and the padded values are cut off below
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    # split, not slices: the backward of each slice would allocate a gradient of the whole row
    documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    if options.get("softcap") is not None or (dropout > 0 and not is_plain):
        options["window"] = window
        outs = [tile for q, k, v in documents for tile in _math_tiles(q, k, v, **options)]
    elif is_plain:
        gqa = query.shape[1] != key.shape[1]
        outs = [
            F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa)
            for q, k, v in documents
        ]
    else:
        calls = FlashCalls([*_document_calls(lengths, window, scale, masks=WindowMasks(window, query))])
        outs = [FlashAttention.apply(query, key, value, sinks, calls)]
    # token-major, as the output projection reads it: the transpose is contiguous
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2)[..., :value_dim]


def _document_calls(lengths: list[int], window: int | None, scale: float, *, masks: WindowMasks) -> Iterator[FlashCall]:
    """One call per document, or per tile of queries if it is longer than the window."""
    start = 0
    for length in lengths:
        if window is None or length <= window:
            document = slice(start, start + length)
            yield FlashCall(document, document, CpuFlash(scale, True))
        else:
            for first, stop, first_key in tiles(length, window, FLASH_TILE):
                queries, keys = slice(start + first, start + stop), slice(start + first_key, start + stop)
                yield FlashCall(queries, keys, CpuFlash(scale, False, masks[stop - first, stop - first_key]))
        start += length


class Launch(NamedTuple):
    """What one launch of FlashAttention-2 computes.

    Attributes:
        cu_seq_lens: boundaries of queries and of keys, int32, (N + 1,).
        max_lengths: most queries and most keys between two boundaries.
        queries: the rows of queries.
        keys: the rows of keys, or the number of each, which are then copied end to end and may be in several launches.
    """

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    queries: slice = slice(None)
    keys: slice | Tensor = slice(None)


def launches_of(pack: PackedForward, chunk: int | None, num_tokens: int) -> list[Launch]:
    """The launches of all documents, or of all chunks of them, without a device-to-host copy."""
    bounds, longest = (pack.cu_seq_lens_q, pack.cu_seq_lens_k), (pack.max_length_q, pack.max_length_k)
    # From shapes alone: to compare `cu_seq_lens` itself the host would wait for the device.
    if max(longest) > num_tokens or bounds[0].numel() - 1 > num_tokens:
        raise ValueError(
            f"the boundaries describe {bounds[0].numel() - 1} documents of up to {max(longest)} tokens, and the pack "
            f"has {num_tokens} tokens: the kernel would read beyond them. Pass the boundaries of this pack, as "
            "PackedDataCollator returns them."
        )
    if chunk is not None and longest[1] > chunk:  # tokens attend within their chunk only
        ends = chunk_bounds(bounds[0], num_tokens, chunk)
        return [Launch((ends, ends), (chunk, chunk))]
    if not pack.launches:
        return [Launch(bounds, longest)]
    if "launches" not in pack.derived:
        pack.derived["launches"] = launches = []
        for first, last, start, stop, most in pack.launches:
            own, tokens = bounds[0][first : last + 1] - start, slice(start, stop)
            launches.append(Launch((own, own), (most, most), tokens, tokens))
    return pack.derived["launches"]


def attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    launches: list[Launch],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same for bfloat16 and float16 on CUDA, without a device-to-host copy, softcap and dropout.

    Each query is in one launch. Heads have at most 256 dimensions. Raises `KernelError` for other dtypes.
    """
    calls = []
    for bounds, longest, queries, keys in launches:
        kernel = CudaKernel(bounds, longest, only_if_shorter(window, longest[1]), scale)
        calls.append(FlashCall(queries, keys, kernel))
    copies = isinstance(calls[0].keys, Tensor)
    is_one = len(calls) == 1 and not copies
    return flash_on_cuda(query, key, value, sinks, calls[0].kernel if is_one else FlashCalls(calls, shares_keys=copies))


def only_if_shorter(size: int | None, longest: int) -> int | None:
    """A window or a chunk; None if no document is longer than it."""
    return None if size is None or size >= longest else size


def chunk_bounds(cu_seq_lens: Tensor, num_tokens: int, chunk: int) -> Tensor:
    """Boundaries of all chunks of all documents, made on the device: int32, shape (N + T // chunk + 1,).

    Their number is known without reading the lengths only as an upper bound; empty documents at the end fill it up.

    >>> chunk_bounds(torch.tensor([0, 5, 7]), num_tokens=7, chunk=2).tolist()
    [0, 2, 4, 5, 7, 7]
    """
    starts, num_chunks = cu_seq_lens[:-1], (cu_seq_lens.diff() + chunk - 1) // chunk
    ends = num_chunks.cumsum(0)
    index = torch.arange(len(starts) + num_tokens // chunk + 1, device=cu_seq_lens.device)
    document = torch.searchsorted(ends, index, right=True).clamp(max=len(starts) - 1)
    bounds = starts[document] + (index - (ends - num_chunks)[document]) * chunk
    return torch.where(index < ends[-1], bounds, num_tokens).to(torch.int32)


# Not compiled: the number of groups depends on the lengths.
@torch.compiler.disable
def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    is_causal: bool = True,
    **options: Unpack[Options],
) -> Tensor:
    """The same on any device, without a flash kernel and without a (T, T) mask.

    Documents of similar length are rows of one right-padded batch of at most T padded tokens, so that many short
    documents need few launches. In a causal module padding at the end changes no earlier token. Not causal, only
    documents of one length, such as the windows of images, share a batch.

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> together = attend_by_document(q, k, v, [3, 2], scale=0.5)
    >>> second = attend_by_document(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], [2], scale=0.5)
    >>> torch.allclose(together[:, :, 3:], second)
    True
    """
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(kernel_head_dim(query, value), query, key, value)
    rows = _document_rows(tuple(length for length in lengths if length), query.device, is_causal)
    is_sdpa = options.get("softcap") is None and options.get("sinks") is None
    outs = []
    for group in rows.groups:
        q, k, v = (group.split(x, HEADS) for x in (query, key, value))
        if is_sdpa:
            outs.append(_sdpa_rows(q, k, v, is_causal=is_causal, **options))
        else:
            outs.append(torch.cat([*_math_tiles(q, k, v, **options)], dim=2))
    return rows.join(outs, HEADS)[..., :value_dim]


@lru_cache(maxsize=4)  # the same in every layer; models have up to two kinds of layers, and so do towers
def _document_rows(lengths: tuple[int, ...], device: torch.device, pads: bool) -> DocumentRows:
    return DocumentRows(list(lengths), device, sum(lengths), pads=pads)


def _sdpa_rows(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Unpack[Options]) -> Tensor:
    scale, dropout, window = options["scale"], options.get("dropout", 0.0), options.get("window")
    # Each key/value head once per query head: with `enable_gqa` the memory-efficient kernel of CUDA does not run.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale)
    outs = []
    for start, stop, first in tiles(length, window, max(window, MATH_TILE)):
        visible = visible_keys(stop - start, stop - first, window, device=query.device)
        q, k, v = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
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


def _math_tiles(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Iterator[Tensor]:
    """Causal attention of each row by its formula, on tiles of queries."""
    window = options.pop("window", None)
    for start, stop, first in tiles(query.shape[2], window, MATH_TILE):
        visible = visible_keys(stop - start, stop - first, window, device=query.device)
        tile = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop], visible)
        yield _recomputed(tile, options)


def math_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, **options: Unpack[Options]
) -> Tensor:
    """`math_attention` on tiles of queries: (B, H, queries, D_value). `mask` as `visible` there."""
    outs = []
    for start, stop, _ in tiles(query.shape[2], None, MATH_TILE):
        visible = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
        outs.append(_recomputed((query[:, :, start:stop], key, value, visible), options))
    return torch.cat(outs, dim=2)


def _recomputed(tile: tuple[Tensor, Tensor, Tensor, Tensor | None], options: Options) -> Tensor:
    # recomputed in backward: saved attention weights would be length x length
    keeps_state = options.get("dropout", 0.0) > 0
    return checkpoint(math_attention, *tile, use_reentrant=False, preserve_rng_state=keeps_state, **options)
