"""Flash kernels for packs: calls on parts of a pack, merged into one attention with exact gradients and with sinks.

`kernels.py` and `runs.py` divide a pack into calls of a kernel. This module runs the calls, on the CPU by torch's flash
kernel and on CUDA by the FlashAttention-2 kernels that are built into torch, and returns the attention output of the
whole pack.

A flash kernel returns its output and, per query, the log-sum-exp: the logarithm of the sum of exp(logit) over its keys.
The log-sum-exp allows two things. Two calls with equal queries and different keys can be merged, and a sink can be
added after the call.

Words:

    pack    the documents that pass through the model together, end to end in one sequence of T tokens, its rows
    run     consecutive rows of the pack that belong to one document. Usually a run is a whole document. But where
            documents share a prefix, the pack has the prefix once, and a run is the rows of a document behind it
    keys    a run attends to the earlier tokens of its document, and causally to itself. Where documents share
            prefixes, `kv_index` lists the rows that are the keys of each run, run after run
    window  each query attends to the last w tokens only, itself included
    sink    one more logit per head in the softmax, without a value

Shapes: T tokens, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernel_errors import KernelError

CUDA_DTYPES = (torch.bfloat16, torch.float16)  # the dtypes that FlashAttention-2 computes with
MAX_CUDA_HEAD_DIM = 256
# Queries per call on the CPU if there is a window. With a window of w tokens a call reads w + 64 keys per query. Of
# tile sizes from 64 to 1024, 64 was the fastest for windows of 128 to 1024 tokens.
FLASH_TILE = 64


# Every layer calls this function. torch.compile calls it while it traces, and takes the result for a constant of the
# graph. Other code gets the cached result of `_find_varlen_problem`. The two decorators do not work on one function.
@torch.compiler.assume_constant_result
def cuda_varlen_problem() -> str | None:
    """Return why the FlashAttention-2 kernels of torch cannot run in this environment; None if they can."""
    return _find_varlen_problem()


@lru_cache(maxsize=1)
def _find_varlen_problem() -> str | None:
    """Find the result of `cuda_varlen_problem`, once."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm, where its varlen kernels are not tested"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    return capability_problem()


def capability_problem() -> str | None:
    """Return why this GPU is too old for FlashAttention-2; None if it is new enough, or if there is no GPU."""
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))} is below 8.0"
    return None


class KernelOptions(TypedDict, total=False):
    """The options of attention that flash kernels support."""

    scale: Required[float]  # factor of the logits
    window: int | None  # number of tokens that each query attends to, itself included; None: no limit
    sinks: Tensor | None  # (H,): per head a logit that takes part in the softmax without a value (arXiv 2309.17453)


class FlashKernel(Protocol):
    """A flash kernel that is ready to be called: everything but the tensors is fixed."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention: return the output (1, H, T, D) and the log-sum-exp of the logits (1, H, T)."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and value from `grad`, the gradient of the output `out`.

        `lse` is the log-sum-exp. The kernel computes the attention weights as exp(logit - lse).
        """
        ...


class RowsAndKeys(NamedTuple):
    """One run: its rows in the pack, and its keys.

    Attributes:
        rows: the rows in the pack.
        keys: without shared prefixes, the rows of the keys in the pack. With shared prefixes, the entries of `kv_index`
            that hold the rows of the keys.
    """

    rows: slice
    keys: slice

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    @property
    def num_earlier_keys(self) -> int:
        """The number of keys before the first row of the run: the length of its prefix."""
        return self.num_keys - self.num_rows


def flash_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: list[RowsAndKeys],
    kv_index: Tensor | None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """Compute causal attention of each run to its keys on the CPU.

    Args:
        query, key, value: (1, H, T, D), (1, G, T, D) and (1, G, T, D_value).
        runs: the runs of the pack. Each row of the pack is in one of them.
        kv_index: the rows of the keys of all runs, end to end; None if each run is a whole document.

    Returns:
        (1, H, T, D_value).
    """
    scale = options["scale"]
    window = options.get("window")

    @cache  # most tiles have the same sizes
    def additive_mask(num_queries: int, num_keys: int) -> Tensor:
        """Return what is added to the logits of a tile: -inf for keys that a query does not attend to, else 0."""
        hidden = ~visible_keys(num_queries, num_keys, window, device=query.device)
        return query.new_zeros(num_queries, num_keys).masked_fill_(hidden, float("-inf"))

    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    causal = CpuKernel(scale, is_causal=True)
    full = CpuKernel(scale, is_causal=False)
    calls = []
    for run in runs:
        first_row = run.rows.start
        num_earlier = run.num_earlier_keys
        # The rows of the keys. Without `kv_index` it is a slice, and the run has no earlier keys.
        keys: Any = run.keys if kv_index is None else kv_index[run.keys]
        if window is None or run.num_keys <= window:
            # The rows attend causally to each other. In a second call they all attend to all keys of the prefix.
            calls.append(FlashCall(run.rows, run.rows, causal))
            if num_earlier:
                calls.append(FlashCall(run.rows, keys[:num_earlier], full, merges=True))
            continue
        # `start` and `stop` count the rows of the run, `first_key` and `stop_key` its keys.
        for start, stop, first_key in query_tiles(run.num_rows, window, FLASH_TILE, num_earlier=num_earlier):
            stop_key = num_earlier + stop
            if first_key >= num_earlier:
                # All keys of the tile are rows of the run. A slice is cheaper than an index.
                tile_keys = slice(first_row + first_key - num_earlier, first_row + stop)
            else:
                tile_keys = keys[first_key:stop_key]
            kernel = CpuKernel(scale, is_causal=False, mask=additive_mask(stop - start, stop_key - first_key))
            calls.append(FlashCall(slice(first_row + start, first_row + stop), tile_keys, kernel))
    return FlashAttention.apply(query, key, value, options.get("sinks"), FlashCalls(calls))[..., :value_dim]


def flash_on_cuda(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel) -> Tensor:
    """Run `kernel` on CUDA, with heads padded to a size that it takes, and add `sinks`: (1, H, T, D_value).

    Heads have at most `MAX_CUDA_HEAD_DIM` dimensions. `attend_by_document` in `kernels.py` computes larger heads.

    Raises:
        KernelError: the dtype is neither bfloat16 nor float16.
    """
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
    """Return the head dimension for the CUDA kernels: a multiple of 8, equal for queries, keys and values."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def pad_head_dim(head_dim: int, *tensors: Tensor) -> list[Tensor]:
    """Pad the last axis of each tensor with zeros to `head_dim`, which changes neither logits nor outputs."""
    return [x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1])) for x in tensors]


def visible_keys(num_queries: int, num_keys: int, window: int | None, *, device: torch.device | str) -> Tensor:
    """Return which keys each query attends to: bool, (queries, keys).

    The last query is at the position of the last key.

    >>> visible_keys(2, 3, 2, device="cpu").int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return visible if window is None else visible.triu(num_keys - num_queries - window + 1)


def query_tiles(length: int, window: int | None, size: int, *, num_earlier: int = 0) -> Iterator[tuple[int, int, int]]:
    """Cut the queries of a run into tiles of `size` queries.

    Args:
        length: number of queries.
        window: tokens that each query attends to; None for all tokens up to its own.
        num_earlier: number of keys before the position of the first query.

    Yields:
        (start, stop, first_key): the queries of the tile, and the first key that any of them attends to.

    >>> list(query_tiles(5, window=2, size=2))
    [(0, 2, 0), (2, 4, 1), (4, 5, 3)]
    """
    for start in range(0, length, size):
        stop = min(start + size, length)
        first_key = 0 if window is None else max(0, num_earlier + start - window + 1)
        yield start, stop, first_key


@dataclass(frozen=True)
class CpuKernel:
    """torch's flash kernel on the CPU.

    Attributes:
        scale: factor of the logits.
        is_causal: whether query i attends to the keys up to i only. There are then as many keys as queries.
        mask: added to the logits, (queries, keys).
    """

    scale: float
    is_causal: bool
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        dropout = 0.0
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, self.is_causal, attn_mask=self.mask, scale=self.scale
        )

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dropout = 0.0
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, dropout, self.is_causal, attn_mask=self.mask, scale=self.scale
        )


class FlashCall(NamedTuple):
    """A call of a flash kernel with some of the queries and some of the keys of a pack.

    Attributes:
        queries: the rows of the queries in the pack.
        keys: the rows of the keys in the pack.
        kernel: the kernel that is called.
        merges: whether an earlier call had these queries with other keys, so that both outputs must be merged.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    kernel: FlashKernel
    merges: bool = False


@dataclass(frozen=True)
class FlashCalls:
    """A flash kernel that makes several calls of other kernels and merges their outputs.

    Each query is in exactly one call that does not merge, and maybe in later calls that do. Outputs with equal queries
    are merged by their log-sum-exp. The output over all keys is the mean of the outputs over subsets of the keys,
    weighted by exp(log-sum-exp) of each subset. In backward each call gets the merged output and the merged
    log-sum-exp, so that the kernel computes the weights of its keys among all keys.

    Attributes:
        calls: the calls, in the order in which they are made.
        shares_keys: whether several calls may read one key, as tiles of a window do. The gradients of a key are then
            summed in fp32.
    """

    calls: list[FlashCall]
    shares_keys: bool = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.calls) == 1:
            # Each query is in a call, so the only call has all of them, and its output is returned. In training with
            # `torch_compile`, compiled code always gets here, because packs are then not divided (`launches_of` in
            # `runs.py`). Writing into a tensor, as below, would be wrong in compiled code, whose backward with torch
            # 2.11 reads tensors as they were before they were written.
            queries, keys, kernel, _ = self.calls[0]
            return kernel.forward(query[:, :, queries], key[:, :, keys], value[:, :, keys])
        B, H, T, D = query.shape
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        merged_dtype = sum_dtype if any(call.merges for call in self.calls) else query.dtype
        # The output projection reads a tensor (B, T, H, D), so the memory has this order, and `out` is a view of it.
        out = query.new_empty(B, T, H, D, dtype=merged_dtype).transpose(1, 2)
        lse = query.new_empty(B, H, T, dtype=sum_dtype)
        for queries, keys, kernel, merges in self.calls:
            call_out, call_lse = kernel.forward(query[:, :, queries], key[:, :, keys], value[:, :, keys])
            if merges:
                earlier_lse = lse[:, :, queries]
                merged_lse = torch.logaddexp(earlier_lse, call_lse)
                earlier_weight = torch.exp(earlier_lse - merged_lse).unsqueeze(-1)
                call_weight = torch.exp(call_lse - merged_lse).unsqueeze(-1)
                call_out = out[:, :, queries] * earlier_weight + call_out * call_weight
                call_lse = merged_lse
            out[:, :, queries] = call_out.to(out.dtype)
            lse[:, :, queries] = call_lse
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # In half precision each partial sum would be rounded.
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        merged_dtype = sum_dtype if any(call.merges for call in self.calls) else query.dtype
        grad_query = torch.empty_like(query, dtype=merged_dtype)
        key_dtype = sum_dtype if self.shares_keys else key.dtype
        grad_key = torch.zeros_like(key, dtype=key_dtype)
        grad_value = torch.zeros_like(value, dtype=key_dtype)
        for queries, keys, kernel, merges in self.calls:
            g = grad[:, :, queries]
            q = query[:, :, queries]
            merged_out = out[:, :, queries]
            merged_lse = lse[:, :, queries]
            dq, dk, dv = kernel.backward(g, q, key[:, :, keys], value[:, :, keys], merged_out, merged_lse)
            if merges:
                _add_at_rows(grad_query, queries, dq)
            else:
                grad_query[:, :, queries] = dq.to(grad_query.dtype)
            _add_at_rows(grad_key, keys, dk)
            _add_at_rows(grad_value, keys, dv)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _add_at_rows(total: Tensor, rows: slice | Tensor, summand: Tensor) -> None:
    """Add `summand` in place to `rows` of `total` (1, heads, T, D). A row may occur several times in `rows`."""
    if isinstance(rows, slice):
        total[:, :, rows] += summand
    else:
        total.index_add_(2, rows, summand.to(total.dtype))


@dataclass(frozen=True)
class CudaKernel:
    """FlashAttention-2 varlen on CUDA: all documents of a pack in one launch.

    A causal call with fewer queries than keys has the last query at the position of the last key. In a call that is
    not causal, every query attends to all keys of its document.

    The class calls the aten operators below `torch.nn.attention.varlen.varlen_attn`, not that function, for two
    reasons. The signature of the function changed in each of torch 2.10 to 2.12, and the signatures of the operators
    did not. And the backward of the function drops the gradient of the log-sum-exp, which sinks need.

    Attributes:
        cu_seq_lens: where the queries and where the keys of each document begin, int32, (N + 1,) each for N documents.
        max_lengths: the most queries and the most keys of a document.
        window: tokens that each query attends to; None for no limit.
        scale: factor of the logits.
        is_causal: whether the call is causal.
    """

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    window: int | None
    scale: float
    is_causal: bool = True

    def _call_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what both operators get besides queries, keys and values: by position and by name."""
        # The kernel counts the keys to the left of a query, without the query's own; -1 is no limit.
        window_left = -1 if self.window is None else self.window - 1
        window_right = 0 if self.is_causal else -1
        dropout = 0.0
        # With a window, `window_right = 0` makes the call causal, without the flag.
        causal_flag = self.is_causal and self.window is None
        by_position = (*self.cu_seq_lens, *self.max_lengths, dropout, causal_flag)
        by_name = {"scale": self.scale, "window_size_left": window_left, "window_size_right": window_right}
        return by_position, by_name

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        by_position, by_name = self._call_arguments()
        returns_debug_mask = False
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *by_position, returns_debug_mask, **by_name)
        assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}, not (H, T)"
        return out.transpose(0, 1)[None], lse[None]

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Any:
        g, q, k, v, o = (x[0].transpose(0, 1) for x in (grad, query, key, value, out))
        by_position, by_name = self._call_arguments()
        # Without dropout the kernel does not read the state of the random generator, so nothing is written into it.
        generator_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            g.contiguous(),
            q,
            k,
            v,
            o.contiguous(),
            lse[0].contiguous(),
            *by_position,
            generator_state,
            unused,
            **by_name,
        )
        return tuple(x.transpose(0, 1)[None] for x in grads)


class FlashAttention(torch.autograd.Function):
    """Attention by a flash kernel, with sinks added exactly through its log-sum-exp.

    A sink is one more logit s in the softmax, without a value. It scales every attention weight, and so the output, by
    sigmoid(lse - s). The backward of the kernel computes the weights as exp(logit - lse). If it gets the output and the
    log-sum-exp *with* the sink, it therefore returns the gradients with the sink. The gradient of the sink itself is
    minus its weight times <grad, out>.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel
    ) -> Tensor:
        """Run the kernel and add `sinks` (H,): return the output (1, H, T, D)."""
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
        """Return the gradients of the arguments of `forward`."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad_sinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
            grad_sinks = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *ctx.kernel.backward(grad, query, key, value, out, lse), grad_sinks, None
