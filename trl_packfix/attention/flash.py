"""Flash kernels: attention as calls of them on parts of a pack, with exact gradients, and with sinks.

A kernel returns its output and the log-sum-exp of its logits. By these, calls with different keys of the same queries
are merged, and sinks are added.

T tokens, H query heads, G key/value heads, D head dimension.
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

CUDA_DTYPES = (torch.bfloat16, torch.float16)  # of FlashAttention-2
MAX_CUDA_HEAD_DIM = 256
# Queries of a call on the CPU. A window of w costs w + 64 keys per query; 64 was the fastest of 64 to 1024 for windows
# of 128 to 1024 tokens.
FLASH_TILE = 64


# With torch.compile the environment is looked at once, not in every layer.
@torch.compiler.assume_constant_result
def cuda_varlen_problem() -> str | None:
    """Why the FlashAttention-2 kernels built into torch cannot run in this environment; None if they can."""
    return _environment_problem()


@lru_cache(maxsize=1)  # every layer asks
def _environment_problem() -> str | None:
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


class KernelOptions(TypedDict, total=False):
    """What changes attention besides its tensors, on flash kernels."""

    scale: Required[float]  # factor of the logits
    window: int | None  # each token attends to so many, up to itself; None: to all of its document before it
    sinks: Tensor | None  # (H,): a logit per head that takes part in the softmax, without a value (arXiv 2309.17453)


class FlashKernel(Protocol):
    """A flash kernel: its output (1, H, T, D) with the log-sum-exp (1, H, T), and from both the gradients."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class RowsAndKeys(NamedTuple):
    """Rows of a document, and their keys: places in `kv_index`, or the same rows where documents are whole."""

    rows: slice
    keys: slice

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    @property
    def before(self) -> int:
        """Keys before the first row."""
        return self.num_keys - self.num_rows


def flash_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: list[RowsAndKeys],
    kv_index: Tensor | None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """Causal attention of each run to its keys, of which those before its rows are looked up in `kv_index`."""
    scale = options["scale"]
    window = options.get("window")

    @cache
    def mask(num_queries: int, num_keys: int) -> Tensor:
        hidden = ~visible_keys(num_queries, num_keys, window, device=query.device)
        return query.new_zeros(num_queries, num_keys).masked_fill_(hidden, float("-inf"))

    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    causal = CpuFlash(scale, True)
    full = CpuFlash(scale, False)
    calls = []
    for run in runs:
        row = run.rows.start
        before = run.before
        keys: Any = run.keys if kv_index is None else kv_index[run.keys]
        if window is None or run.num_keys <= window:
            calls.append(FlashCall(run.rows, run.rows, causal))
            if before:
                calls.append(FlashCall(run.rows, keys[:before], full, merges=True))
            continue
        for start, stop, first in query_tiles(run.num_rows, window, FLASH_TILE, before=before):
            seen = slice(row + first - before, row + stop) if first >= before else keys[first : before + stop]
            kernel = CpuFlash(scale, False, mask(stop - start, before + stop - first))
            calls.append(FlashCall(slice(row + start, row + stop), seen, kernel))
    return FlashAttention.apply(query, key, value, options.get("sinks"), FlashCalls(calls))[..., :value_dim]


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


def pad_head_dim(head_dim: int, *tensors: Tensor) -> list[Tensor]:
    return [x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1])) for x in tensors]


def visible_keys(num_queries: int, num_keys: int, window: int | None, *, device: torch.device | str) -> Tensor:
    """Which keys each query attends to, bool (queries, keys); the last query is at the position of the last key.

    >>> visible_keys(2, 3, 2, device="cpu").int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return visible if window is None else visible.triu(num_keys - num_queries - window + 1)


def query_tiles(length: int, window: int | None, size: int, *, before: int = 0) -> Iterator[tuple[int, int, int]]:
    """Cut the queries of a document into tiles: (start, stop, first key that any query of the tile attends to).

    `before` keys come before that of the first query.

    >>> list(query_tiles(5, window=2, size=2))
    [(0, 2, 0), (2, 4, 1), (4, 5, 3)]
    """
    for start in range(0, length, size):
        yield start, min(start + size, length), 0 if window is None else max(0, before + start - window + 1)


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


@dataclass(frozen=True)
class FlashCalls:
    """A flash kernel that is a sequence of calls of others; each query is in a call that merges nothing.

    Outputs of the same queries are merged by their log-sum-exp: the softmax over all keys is the mean of those over
    parts of them, weighted by exp(log-sum-exp). In backward each call gets the merged output and log-sum-exp, from
    which a kernel computes the weights of its keys among all.

    Attributes:
        shares_keys: whether several calls may have the same keys, whose gradients are then summed in fp32.
    """

    calls: list[FlashCall]
    shares_keys: bool = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        B, H, T, D = query.shape
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        merged_dtype = sum_dtype if any(call.merges for call in self.calls) else query.dtype
        out = query.new_empty(B, T, H, D, dtype=merged_dtype).transpose(1, 2)
        lse = query.new_empty(B, H, T, dtype=sum_dtype)
        for queries, keys, kernel, merges in self.calls:
            o, s = kernel.forward(query[:, :, queries], key[:, :, keys], value[:, :, keys])
            if merges:
                both = torch.logaddexp(lse[:, :, queries], s)
                old, new = (torch.exp(part - both).unsqueeze(-1) for part in (lse[:, :, queries], s))
                o = out[:, :, queries] * old + o * new
                s = both
            out[:, :, queries], lse[:, :, queries] = o.to(out.dtype), s
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sum_dtype = torch.promote_types(key.dtype, torch.float32)  # in half precision each sum would be rounded
        merged_dtype = sum_dtype if any(call.merges for call in self.calls) else query.dtype
        grad_query = torch.empty_like(query, dtype=merged_dtype)
        key_dtype = sum_dtype if self.shares_keys else key.dtype
        grad_key, grad_value = (torch.zeros_like(x, dtype=key_dtype) for x in (key, value))
        for queries, keys, kernel, merges in self.calls:
            g = grad[:, :, queries]
            q = query[:, :, queries]
            o = out[:, :, queries]
            s = lse[:, :, queries]
            dq, dk, dv = kernel.backward(g, q, key[:, :, keys], value[:, :, keys], o, s)
            if merges:
                _add_at_places(grad_query, queries, dq)
            else:
                grad_query[:, :, queries] = dq.to(grad_query.dtype)
            _add_at_places(grad_key, keys, dk)
            _add_at_places(grad_value, keys, dv)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _add_at_places(total: Tensor, places: slice | Tensor, part: Tensor) -> None:
    """Add to the given tokens of (1, heads, T, D), of which several may be the same."""
    if isinstance(places, slice):
        total[:, :, places] += part
    else:
        total.index_add_(2, places, part.to(total.dtype))


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

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Boundaries, dropout and whether the call is causal; and the options."""
        left = -1 if self.window is None else self.window - 1  # keys to the left, without the query's own
        options = {"scale": self.scale, "window_size_left": left, "window_size_right": 0 if self.is_causal else -1}
        return (*self.cu_seq_lens, *self.max_lengths, 0.0, self.is_causal and self.window is None), options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        given, options = self._arguments()
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *given, False, **options)
        assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}, not (H, T)"
        return out.transpose(0, 1)[None], lse[None]

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Any:
        g, q, k, v, o = (x[0].transpose(0, 1) for x in (grad, query, key, value, out))
        given, options = self._arguments()
        # without dropout the kernel reads no generator state
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            g.contiguous(), q, k, v, o.contiguous(), lse[0].contiguous(), *given, state, unused, **options
        )
        return tuple(x.transpose(0, 1)[None] for x in grads)


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
