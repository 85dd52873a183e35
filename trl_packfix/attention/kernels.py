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

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .rows import Axes, DocumentRows

CUDA_VARLEN_TORCH = (2, 10)  # the first torch whose FlashAttention-2 varlen kernels take windows
CUDA_DTYPES, MAX_CUDA_HEAD_DIM = (torch.bfloat16, torch.float16), 256  # of FlashAttention-2
# Queries per tile. A window of w costs w + 64 keys per query; 64 was the fastest of 64 to 1024 for windows of 128 to
# 1024 tokens. Plain torch is faster with fewer, larger matrix products.
FLASH_TILE, MATH_TILE = 64, 256
# The backward of FlashAttention-2 sums the gradient of the queries in fp32 rows, and adds 128 rows per document.
ROWS_PER_DOCUMENT = 128
# Texts of errors of a device and of communication, which libraries also raise as plain RuntimeError
DEVICE_ERROR = re.compile(
    r"out of memory|\b(CUDA|HIP) (driver |runtime )?error|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS|MIOPEN)_STATUS"
    r"|device-side assert|illegal memory access|can't allocate memory|\b(NCCL|RCCL|HCCL)\b|ProcessGroup|\[.*gloo/"
)
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


class FlashKernel(Protocol):
    """A flash kernel: its forward, and its backward with a given output and log-sum-exp."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output (1, H, T, D), log-sum-exp of the logits (1, H, T))."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""


class KernelError(ValueError):
    """An attention kernel cannot compute this: heads, dtype, device or a feature. It says nothing about isolation."""


def is_device_error(error: Exception) -> bool:
    """Whether the device or communication failed, as with a full memory. It says nothing about the model."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)) is not None


class OwnAttentionError(KernelError):
    """The model needs its own attention: the kernels of this package would compute something else.

    Attributes:
        cause: why, without the remedy of the message.
    """

    def __init__(self, cause: str, remedy: str):
        super().__init__(f"{cause}. {remedy}")
        self.cause = cause


# With torch.compile the environment is looked at once, not in every layer.
@torch.compiler.assume_constant_result
def cuda_varlen_problem() -> str | None:
    """Why the FlashAttention-2 kernels built into torch cannot run in this environment; None if they can."""
    return _environment_problem()


@lru_cache(maxsize=1)  # every layer asks
def _environment_problem() -> str | None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < CUDA_VARLEN_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, CUDA_VARLEN_TORCH))}"
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm, where its varlen kernels are not tested"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    return capability_problem()


def capability_problem() -> str | None:
    """Why this GPU is too old for FlashAttention-2; None if it is not, or if there is no GPU."""
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))} is below 8.0"
    return None


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
    window, sinks, dropout = (
        only_if_shorter(options.get("window"), max(lengths)),
        options.get("sinks"),
        options.get("dropout", 0.0),
    )
    is_plain = window is None and sinks is None
    if options.get("softcap") is not None or (dropout > 0 and not is_plain):
        options["window"] = window
        documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        return _join([tile for q, k, v in documents for tile in _math_tiles(q, k, v, **options)])
    # flash needs one head dim: padding with zeros changes no logit, and the padded values are cut off below
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    if is_plain:
        out = _sdpa_documents(query, key, value, lengths=lengths, scale=options["scale"], dropout=dropout)
    else:
        out = FlashAttention.apply(query, key, value, sinks, _CpuKernel(tuple(lengths), window, options["scale"]))
    return out[..., :value_dim]


def attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: tuple[Tensor, Tensor],
    max_lengths: tuple[int, int],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same for bfloat16 and float16 on CUDA, without a device-to-host copy, softcap and dropout.

    `cu_seq_lens` (int32, (N + 1,)) and `max_lengths` (tokens) are pairs: of queries and of keys. Heads have at
    most 256 dimensions. Raises `KernelError` for other dtypes.
    """
    kernel = CudaKernel(cu_seq_lens, max_lengths, only_if_shorter(window, max_lengths[1]), scale)
    return flash_on_cuda(query, key, value, sinks, kernel)


def attend_on_cuda_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slices: list[tuple[slice, Tensor, int]],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same with a launch for each slice of the tokens: (tokens, boundaries from 0, longest document) of each.

    The slices follow each other and hold all tokens.
    """
    parts = [
        (tokens, CudaKernel((bounds, bounds), (longest, longest), only_if_shorter(window, longest), scale))
        for tokens, bounds, longest in slices
    ]
    return flash_on_cuda(query, key, value, sinks, SlicedKernel(parts))


def only_if_shorter(size: int | None, longest: int) -> int | None:
    """A window or a chunk; None if no document is longer than it."""
    return None if size is None or size >= longest else size


def flash_on_cuda(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel) -> Tensor:
    """`kernel` with heads padded to what CUDA kernels take, and `sinks`. Raises `KernelError` for other dtypes."""
    if query.dtype not in CUDA_DTYPES:
        raise KernelError(
            f"attention got {query.dtype} on CUDA: the FlashAttention-2 kernels support bfloat16 and float16 only. Set "
            "bf16=True (autocast), or load the model with dtype=torch.bfloat16."
        )
    value_dim = value.shape[-1]
    head_dim = kernel_head_dim(query, value)
    assert head_dim <= MAX_CUDA_HEAD_DIM, f"heads of {head_dim} dimensions are for `attend_by_document`"
    query, key, value = pad_head_dim(head_dim, query, key, value)
    return FlashAttention.apply(query, key, value, sinks, kernel)[..., :value_dim]


def kernel_head_dim(query: Tensor, value: Tensor) -> int:
    """Head dimensions that the CUDA kernels compute with: a multiple of 8, equal for queries, keys and values."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


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
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], **options: Unpack[Options]
) -> Tensor:
    """The same on any device, without a flash kernel and without a (T, T) mask.

    Documents of similar length are rows of one right-padded batch of at most T padded tokens, so that many short
    documents need few launches. In a causal module padding at the end changes no earlier token.

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> together = attend_by_document(q, k, v, [3, 2], scale=0.5)
    >>> second = attend_by_document(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], [2], scale=0.5)
    >>> torch.allclose(together[:, :, 3:], second)
    True
    """
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(kernel_head_dim(query, value), query, key, value)
    rows = _document_rows(tuple(lengths), query.device)
    is_sdpa = options.get("softcap") is None and options.get("sinks") is None
    outs = []
    for group in rows.groups:
        q, k, v = (group.split(x, HEADS) for x in (query, key, value))
        outs.append(_sdpa_rows(q, k, v, **options) if is_sdpa else torch.cat([*_math_tiles(q, k, v, **options)], dim=2))
    return rows.join(outs, HEADS)[..., :value_dim]


@lru_cache(maxsize=2)  # a pack has the same rows in every layer; a model with chunks has two kinds of layers
def _document_rows(lengths: tuple[int, ...], device: torch.device) -> DocumentRows:
    return DocumentRows(list(lengths), device, sum(lengths))


# Not compiled: the number of groups depends on the lengths.
@torch.compiler.disable
def attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention of each token to all tokens of its document, not causal, on any device and without a mask.

    Documents of one length are rows of one batch, so that the images of a pack, or the windows of all its images, need
    few launches.

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> together = attend_in_rows(q, k, v, [3, 2], scale=0.5)
    >>> torch.allclose(together[:, :, 3:], attend_in_rows(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], [2], scale=0.5))
    True
    """
    rows = _rows_of_one_length(tuple(lengths), query.device)
    gqa = query.shape[1] != key.shape[1]
    states = [x if rows.source is None else x.index_select(2, rows.source) for x in (query, key, value)]
    sizes = [count * length for count, length in rows.shapes]
    outs = []
    for shape, *parts in zip(rows.shapes, *(x.split(sizes, dim=2) for x in states), strict=True):
        q, k, v = (x[0].unflatten(1, shape).transpose(0, 1) for x in parts)  # (rows, heads, tokens, D)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, enable_gqa=gqa)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    joined = torch.cat(outs)
    if rows.place is not None:
        joined = joined.index_select(0, rows.place)
    return joined.transpose(0, 1)[None]


class _Rows(NamedTuple):
    """Documents by length: (number, length) of each group, and where tokens come from and go to; None: in order."""

    shapes: list[tuple[int, int]]
    source: Tensor | None
    place: Tensor | None


@lru_cache(maxsize=4)  # the same in every layer; a tower may have layers with windows and layers without
def _rows_of_one_length(lengths: tuple[int, ...], device: torch.device) -> _Rows:
    sizes = torch.tensor([length for length in lengths if length])
    ordered, order = sizes.sort(stable=True)
    distinct, counts = ordered.unique_consecutive(return_counts=True)
    shapes = list(zip(counts.tolist(), distinct.tolist(), strict=True))
    if torch.equal(order, torch.arange(len(sizes))):
        return _Rows(shapes, None, None)
    starts = (sizes.cumsum(0) - sizes)[order]
    source = torch.repeat_interleave(starts - (ordered.cumsum(0) - ordered), ordered) + torch.arange(int(sizes.sum()))
    return _Rows(shapes, source.to(device), source.argsort().to(device))


def _sdpa_rows(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    scale, dropout, window = options["scale"], options.get("dropout", 0.0), options.get("window")
    # Each key/value head once per query head: with `enable_gqa` the memory-efficient kernel of CUDA does not run.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
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


def visible_keys(num_queries: int, num_keys: int, window: int | None, *, device: torch.device | str) -> Tensor:
    """Which keys each query attends to, bool (queries, keys); the last query is at the position of the last key.

    >>> visible_keys(2, 3, 2, device="cpu").int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return visible if window is None else visible.triu(num_keys - num_queries - window + 1)


def pad_head_dim(head_dim: int, *tensors: Tensor) -> list[Tensor]:
    return [x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1])) for x in tensors]


def _sdpa_documents(
    query: Tensor, key: Tensor, value: Tensor, *, lengths: list[int], scale: float, dropout: float
) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    # split, not slices: the backward of each slice would allocate a gradient of the whole row
    documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa)
        for q, k, v in documents
    ]
    return _join(outs)


def _join(outs: Sequence[Tensor]) -> Tensor:
    # token-major, as the output projection reads it: the transpose is contiguous
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2)


def tiles(length: int, window: int | None, size: int, *, before: int = 0) -> Iterator[tuple[int, int, int]]:
    """Cut the queries of a document into tiles: (start, stop, first key that any query of the tile attends to).

    `before` keys come before that of the first query.

    >>> list(tiles(5, window=2, size=2))
    [(0, 2, 0), (2, 4, 1), (4, 5, 3)]
    """
    for start in range(0, length, size):
        yield start, min(start + size, length), 0 if window is None else max(0, before + start - window + 1)


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


@dataclass(frozen=True)
class CpuFlash:
    """One call of the flash kernel on the CPU; `mask` is additive."""

    scale: float
    is_causal: bool
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale
        )

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale
        )


class FlashCall(NamedTuple):
    """A call of a flash kernel with some of the queries and keys: slices of them, or their numbers.

    With `merges`, these are more keys for queries that had a call before, and both outputs are merged.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    kernel: FlashKernel
    merges: bool = False


class FlashCalls(ABC):
    """A flash kernel that is a sequence of calls of others; each query is in a call that merges nothing.

    Outputs of the same queries are merged by their log-sum-exp: the softmax over all keys is the mean of those over
    parts of them, weighted by exp(log-sum-exp). In backward each call gets the merged output and log-sum-exp, from
    which a kernel computes the weights of its keys among all.
    """

    merges: bool  # whether any call does: then outputs and the gradients of queries are summed in at least fp32, too

    @abstractmethod
    def calls(self, like: Tensor) -> Iterable[FlashCall]:
        """All calls; masks are made with the dtype of `like`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        B, H, T, D = query.shape
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(B, T, H, D, dtype=sum_dtype if self.merges else query.dtype).transpose(1, 2)
        lse = query.new_empty(B, H, T, dtype=sum_dtype)
        for queries, keys, kernel, merges in self.calls(query):
            o, s = kernel.forward(query[:, :, queries], key[:, :, keys], value[:, :, keys])
            if merges:
                both = torch.logaddexp(lse[:, :, queries], s)
                old, new = (torch.exp(part - both).unsqueeze(-1) for part in (lse[:, :, queries], s))
                o, s = out[:, :, queries] * old + o * new, both
            out[:, :, queries], lse[:, :, queries] = o.to(out.dtype), s
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # several calls add to the gradients of the same keys: in half precision each sum would be rounded
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        grad_query = torch.empty_like(query, dtype=sum_dtype if self.merges else query.dtype)
        grad_key, grad_value = (torch.zeros_like(x, dtype=sum_dtype) for x in (key, value))
        for queries, keys, kernel, merges in self.calls(query):
            g, q, o, s = grad[:, :, queries], query[:, :, queries], out[:, :, queries], lse[:, :, queries]
            dq, dk, dv = kernel.backward(g, q, key[:, :, keys], value[:, :, keys], o, s)
            if merges:
                _add(grad_query, queries, dq)
            else:
                grad_query[:, :, queries] = dq.to(grad_query.dtype)
            _add(grad_key, keys, dk)
            _add(grad_value, keys, dv)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _add(total: Tensor, places: slice | Tensor, part: Tensor) -> None:
    """Add to the given tokens of (1, heads, T, D), of which several may be the same."""
    if isinstance(places, slice):
        total[:, :, places] += part
    else:
        total.index_add_(2, places, part.to(total.dtype))


@dataclass(frozen=True)
class _CpuKernel(FlashCalls):
    """One call per document, or per tile of queries if it is longer than the window."""

    lengths: tuple[int, ...]
    window: int | None
    scale: float
    merges = False

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        masks = WindowMasks(self.window, like)
        start = 0
        for length in self.lengths:
            if self.window is None or length <= self.window:
                document = slice(start, start + length)
                yield FlashCall(document, document, CpuFlash(self.scale, True))
            else:
                for first, stop, first_key in tiles(length, self.window, FLASH_TILE):
                    queries, keys = slice(start + first, start + stop), slice(start + first_key, start + stop)
                    mask = masks[stop - first, stop - first_key]
                    yield FlashCall(queries, keys, CpuFlash(self.scale, False, mask))
            start += length


class WindowMasks(dict[tuple[int, int], Tensor]):
    """Additive masks of tiles by (queries, keys). They are small, one per shape of tile."""

    def __init__(self, window: int | None, like: Tensor):
        super().__init__()
        self.window, self.like = window, like

    def __missing__(self, shape: tuple[int, int]) -> Tensor:
        hidden = ~visible_keys(*shape, self.window, device=self.like.device)
        self[shape] = self.like.new_zeros(shape).masked_fill_(hidden, float("-inf"))
        return self[shape]


@dataclass(frozen=True)
class CudaKernel:
    """FlashAttention-2 varlen on CUDA, all documents in one launch.

    With fewer queries than keys the last query is at the position of the last key. Not causal, every query attends to
    all keys of its document.

    It calls the aten operators used by `torch.nn.attention.varlen.varlen_attn`, not that function: its signature
    changed in each of torch 2.10 to 2.12, theirs did not, and its backward drops the gradient of the log-sum-exp,
    which sinks need.
    """

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    window: int | None
    scale: float
    is_causal: bool = True

    def _options(self) -> dict[str, Any]:
        left = -1 if self.window is None else self.window - 1  # keys to the left, without the query's own
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0 if self.is_causal else -1}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output (1, H, T, D), log-sum-exp of the logits (1, H, T))."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        is_causal = self.is_causal and self.window is None
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self.cu_seq_lens, *self.max_lengths, 0.0, is_causal, False, **self._options()
        )
        assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}, not (H, T)"
        return out.transpose(0, 1)[None], lse[None]

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Any:
        g, q, k, v, o = (x[0].transpose(0, 1) for x in (grad, query, key, value, out))
        is_causal = self.is_causal and self.window is None
        # without dropout the kernel reads no generator state
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        bounds = (*self.cu_seq_lens, *self.max_lengths)
        grads = torch.ops.aten._flash_attention_backward(
            g.contiguous(), q, k, v, o.contiguous(), lse[0].contiguous(), *bounds, 0.0, is_causal, state, unused,
            **self._options(),
        )  # fmt: skip
        return tuple(x.transpose(0, 1)[None] for x in grads)


@dataclass(frozen=True)
class SlicedKernel:
    """Kernels for slices of the tokens that follow each other; documents in different slices do not meet."""

    parts: list[tuple[slice, CudaKernel]]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output (1, H, T, D), log-sum-exp of the logits (1, H, T))."""
        outs = [kernel.forward(*(x[:, :, own] for x in (query, key, value))) for own, kernel in self.parts]
        return _join([out for out, _ in outs]), torch.cat([lse for _, lse in outs], dim=2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = grad, query, key, value, out, lse
        grads = [kernel.backward(*(x[:, :, own] for x in inputs)) for own, kernel in self.parts]
        dq, dk, dv = map(_join, zip(*grads, strict=True))
        return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    """A flash kernel, with sinks added exactly through its log-sum-exp.

    A sink is one more logit s in the softmax, without a value: it scales every weight by the factor sigmoid(lse - s).
    The flash backward computes the weights as exp(logit - lse). So, given the output and the log-sum-exp *with* the
    sink, it returns the gradients with the sink. The gradient of the sink itself is -(its weight) * <grad, out>.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        if sinks is not None:
            logit = sinks.to(lse.dtype).view(1, -1, 1)
            out = (out * torch.sigmoid(lse - logit).unsqueeze(-1)).to(out.dtype)
            lse = torch.logaddexp(lse, logit)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad_sinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
            grad_sinks = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *ctx.kernel.backward(grad, query, key, value, out, lse), grad_sinks, None
