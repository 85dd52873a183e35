"""Compute causal attention over the N documents of a pack, laid end to end. No function here needs the model.

`varlen.py` calls these functions with the queries, keys and values of a pack, and with the length of each document or
the boundaries between documents. They choose and call the kernel:

    device  supports at most          how
    CPU     sliding window, sinks     the flash kernel of F.scaled_dot_product_attention, windows on tiles of queries
    CPU     softcap, dropout          plain torch on tiles of queries, recomputed in backward
    CUDA    sliding window, sinks     FlashAttention-2 as built into torch, all documents at once
    CUDA    heads above 256 dims      ffpa-attn, where it is installed, all documents at once
    other   all features              documents of similar length as rows of one batch

The last line serves devices and features without a flash kernel. It calls F.scaled_dot_product_attention, which chooses
the best kernel of the device. Sinks and softcap run in plain torch instead, on tiles of queries. A tile is a group of
consecutive queries that are computed in one call.

Memory is always linear in the number of tokens. A window of w tokens costs w x length operations, not length squared.

Shapes: T tokens, N documents, H query heads, G key/value heads (H is a multiple of G), D head dimension.
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

MATH_TILE = 256  # queries per tile in plain torch, which is faster with fewer, larger matrix products
# The axes of queries, keys and values, (rows, heads, tokens, head dim)
AXES_OF_HEADS = TensorAxes(tokens=(2,), batch=0)


class AttentionOptions(KernelOptions, total=False):
    """All options of attention: the options of flash kernels, and two that only other kernels support."""

    dropout: float  # rate at which attention weights are dropped
    softcap: float | None  # logits become softcap * tanh(logit / softcap) (Gemma 2, arXiv 2408.00118)


# Not compiled: the loop over documents would be recompiled for every number of documents.
@torch.compiler.disable
def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], **options: Unpack[AttentionOptions]
) -> Tensor:
    """Compute causal attention within each document on the CPU: (1, H, T, D_value).

    Args:
        lengths: tokens of each document; their sum is T.
    """
    if options.get("softcap") is None and not options.get("dropout"):
        # `flash_on_cpu` gets the rows of each document, and the rows of its keys. Here these are the same rows. They
        # differ only where documents share prefixes, and then `kv_index` lists the keys.
        documents = [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]
        runs = [RowsAndKeys(document, document) for document in documents]
        scale = options["scale"]
        window = options.get("window")
        sinks = options.get("sinks")
        return flash_on_cpu(query, key, value, runs, kv_index=None, scale=scale, window=window, sinks=sinks)
    # `split` and not slices: the backward of each slice would allocate a gradient of the whole row.
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    outs = [math_in_tiles(q, k, v, **options).transpose(1, 2) for q, k, v in zip(queries, keys, values, strict=True)]
    # The output projection reads tokens before heads. In this order its input is contiguous.
    return torch.cat(outs, dim=1).transpose(1, 2)


class KernelLaunch(NamedTuple):
    """One launch of FlashAttention-2, for some documents of a pack.

    Where documents share prefixes, the pack has each prefix once. The queries of a document are then only its rows
    behind the prefix. Its keys are the rows of the prefix, followed by the rows of its queries.

    No field has a default, because torch 2.11 does not compile a slice as a default.

    Attributes:
        cu_seq_lens: where the queries and where the keys of each document begin, int32, (N + 1,) each. Both are counted
            from the first query and the first key of the launch.
        max_lengths: the most queries and the most keys of a document.
        queries: the rows of the queries in the pack.
        keys: the rows of the keys in the pack. With shared prefixes it is a tensor of row numbers, and the launch
            copies these rows end to end. Several launches may copy one row.
    """

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    queries: slice
    keys: slice | Tensor


def attend_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, launches: list[KernelLaunch], **options: Unpack[KernelOptions]
) -> Tensor:
    """Compute causal attention within each document on CUDA, by FlashAttention-2: (1, H, T, D_value).

    The host never waits for the device. Heads have at most 256 dimensions.

    Args:
        launches: the launches of the pack. Each query is in one of them.

    Raises:
        KernelError: the dtype is neither bfloat16 nor float16.
    """
    scale = options["scale"]
    window = options.get("window")
    sinks = options.get("sinks")
    # A launch whose documents all fit into the window runs without it, which is faster.
    calls = [
        FlashCall(queries, keys, CudaKernel(bounds, max_lengths, limit_if_shorter(window, max_lengths[1]), scale))
        for bounds, max_lengths, queries, keys in launches
    ]
    # Where documents share prefixes, all launches of the pack copy keys; in other packs none does.
    copies_keys = isinstance(calls[0].keys, Tensor)
    is_whole_pack = len(calls) == 1 and not copies_keys
    # Both are a `FlashKernel`: one kernel, or several calls that behave like one
    kernel = calls[0].kernel if is_whole_pack else FlashCalls(calls, shares_keys=copies_keys)
    return flash_on_cuda(query, key, value, sinks, kernel)


@lru_cache(maxsize=1)  # called in every layer
def wide_kernel() -> Callable[..., Tensor] | None:
    """Return the kernel of ffpa-attn for heads above 256 dimensions, or None if the package is not installed.

    The kernel computes causal attention without windows, sinks, softcap and dropout.
    """
    try:
        from ffpa_attn import ffpa_attn_varlen_func
    except ImportError:
        return None
    return ffpa_attn_varlen_func


def attend_wide(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Compute causal attention within each document for heads above 256 dimensions, by `wide_kernel`.

    Args:
        bounds: where each document begins, int32, (N + 1,).
        longest: tokens of the longest document.

    Returns:
        (1, H, T, D_value).
    """
    if value.data_ptr() == key.data_ptr():
        value = value.clone()  # the kernel refuses keys and values that are the same memory
    value_dim = value.shape[-1]
    # The kernel takes multiples of 64 dimensions, from 320 on.
    head_dim = max(320, -(-max(query.shape[-1], value_dim) // 64) * 64)
    tensors = (x[0].transpose(0, 1) for x in pad_head_dim(head_dim, query, key, value))  # (T, H, D)
    kernel: Any = wide_kernel()
    out = kernel(*tensors, bounds, bounds, longest, longest, softmax_scale=scale, causal=True, enable_gqa=True)
    return out.transpose(0, 1)[None, ..., :value_dim]


def limit_if_shorter(size: int | None, longest: int) -> int | None:
    """Return `size` if it is below the length of the longest document; else None, because it limits nothing.

    Args:
        size: the tokens of a window, or of a chunk: some layers cut a document into chunks of tokens, and a token
            attends to its own chunk only (`varlen.py`). None for no limit.
        longest: the tokens of the longest document.
    """
    return None if size is None or size >= longest else size


# Not compiled: the number of batches depends on the lengths.
@torch.compiler.disable
def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    is_causal: bool = True,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute attention within each document on any device: (1, H, T, D_value).

    Documents of similar length are rows of a right-padded batch of at most T tokens, padding included. With
    `is_causal=False` all documents of a batch have one length, because queries would attend to padding.

    Args:
        lengths: tokens of each document; their sum is T. Zeros are skipped. A vision tower, which cuts images into
            windows and computes each window like a document, may have windows without tokens.
        is_causal: whether a token attends to the tokens up to itself only.
    """
    value_dim = value.shape[-1]
    # Pad heads to a width that the kernel takes. The output is cut to the width of the values.
    query, key, value = pad_head_dim(kernel_head_dim(query, value), query, key, value)
    lengths_above_zero = tuple(length for length in lengths if length)
    # The documents in `rows.padded_batches`, one document per row. `split` cuts a tensor of the pack into the rows of a
    # batch, and `join` lays the results of all batches end to end again.
    rows = _document_rows(lengths_above_zero, query.device, mixes_lengths=is_causal)
    has_sdpa_options = options.get("softcap") is None and options.get("sinks") is None
    attend = _sdpa_rows if has_sdpa_options else math_in_tiles
    outs = []
    for batch in rows.padded_batches:
        q, k, v = (batch.split(x, AXES_OF_HEADS) for x in (query, key, value))
        outs.append(attend(q, k, v, is_causal=is_causal, **options))
    return rows.join(outs, AXES_OF_HEADS)[..., :value_dim]


# The layers of a model, and those of a vision tower, call this with up to two lists of lengths each.
@lru_cache(maxsize=4)
def _document_rows(lengths: tuple[int, ...], device: torch.device, mixes_lengths: bool) -> DocumentRows:
    """Return the documents as rows of batches of at most T tokens, padding included; cached.

    `mixes_lengths` is whether documents of different lengths may share a batch.
    """
    return DocumentRows(list(lengths), device, budget=sum(lengths), mixes_lengths=mixes_lengths)


def _sdpa_rows(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Unpack[AttentionOptions]
) -> Tensor:
    """Compute attention within each row of a batch by F.scaled_dot_product_attention: (B, H, L, D_value).

    A window is given for causal attention only.
    """
    scale = options["scale"]
    dropout = options.get("dropout", 0.0)
    window = options.get("window")
    # Repeat each key/value head once per query head. With `enable_gqa` instead, the memory-efficient kernel of CUDA
    # does not run.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale)
    outs = []
    for start, stop, first_key in query_tiles(length, window, max(window, MATH_TILE)):
        visible = visible_keys(stop - start, stop - first_key, window, device=query.device)  # bool, (queries, keys)
        q = query[:, :, start:stop]
        k = key[:, :, first_key:stop]
        v = value[:, :, first_key:stop]
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
    """Compute attention by its formula, with the softmax in at least fp32: (B, H, queries, D_value).

    Args:
        query, key, value: (B, H, queries, D), (B, G, keys, D) and (B, G, keys, D_value).
        visible: which keys each query attends to, bool, or a bias that is added to the logits. (queries, keys), or
            (B, heads, queries, keys) with 1 or H heads. None: all keys.
        scale: factor of the logits.
        dropout: rate at which attention weights are dropped.
        softcap: the logits become softcap * tanh(logit / softcap).
        sinks: a logit per head that takes part in the softmax without a value, (H,).
    """
    B, H, num_queries, _ = query.shape
    G = key.shape[1]
    logits = query.unflatten(1, (G, H // G)) @ key.unsqueeze(2).mT * scale  # (B, G, H/G, queries, keys)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(1, 2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        # Not -inf: a query without visible keys (left padding) must not give nan.
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    elif visible is not None:
        logits = logits + visible
    if sinks is not None:
        sink_logits = sinks.to(logits.dtype).view(1, H, 1, 1).expand(B, H, num_queries, 1)
        logits = torch.cat([logits, sink_logits], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    weights = F.dropout(weights, p=dropout)  # outside of training, modules pass a rate of 0
    weights = weights.to(value.dtype).unflatten(1, (G, H // G))
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
    """Run `math_attention` on one tile of queries after the other: (B, H, queries, D_value).

    Args:
        is_causal: whether a query attends to the keys up to its own only. There are then as many keys as queries.
        mask: the argument `visible` of `math_attention` for all queries; read only if `is_causal` is False.
    """
    window = options.pop("window", None)
    draws_random_numbers = options.get("dropout", 0.0) > 0
    outs = []
    for start, stop, first_key in query_tiles(query.shape[2], window, MATH_TILE):
        rows = slice(start, stop)
        keys = slice(None)
        visible = mask
        if is_causal:
            keys = slice(first_key, stop)
            visible = visible_keys(stop - start, stop - first_key, window, device=query.device)
        elif mask is not None and mask.shape[-2] > 1:  # a mask with one row holds for all queries
            visible = mask[..., rows, :]
        # Each tile is computed again in backward. The saved attention weights of all tiles would take length x length.
        out = checkpoint(
            math_attention,
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            visible,
            use_reentrant=False,
            preserve_rng_state=draws_random_numbers,
            **options,
        )
        outs.append(out)
    return torch.cat(outs, dim=2)
