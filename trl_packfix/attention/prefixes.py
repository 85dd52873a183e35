"""Causal attention over a pack whose documents share prefixes (`data/prefixes.py`): the computation only.

Each run of rows attends to the rows of its document that come before it, and causally to itself. `kv_index` names the
keys of each run; the last of them are its own rows.

    device     features                          how
    CPU        full attention, sinks             the flash kernel: each run by itself, then each shared stretch of rows
                                                 as keys of all rows below it, merged by log-sum-exp; keys not copied
    CPU        windows, chunks, with sinks       the flash kernel on tiles of queries, keys looked up
    any other  softcap, dropout, no flash kernel tiles of queries, keys looked up, recomputed in backward

Gradients of keys and values are summed in at least fp32 over all documents that share them.

Shapes: T rows, K keys of all runs, H query heads, G key/value heads, D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import (
    FLASH_TILE,
    MATH_TILE,
    CpuKernel,
    FlashAttention,
    FlashCall,
    WindowMasks,
    math_attention,
    pad_head_dim,
    tiles,
    visible_keys,
)


class Run(NamedTuple):
    """Rows and keys of a run, or of the part of it in one chunk; `keys` are places in `kv_index`."""

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
        """Keys before the first row of the run."""
        return self.num_keys - self.num_rows


@dataclass(frozen=True)
class SharedRuns:
    """The runs of a pack, and what attention derives from them once per pack."""

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    kv_index: Tensor
    _chunked: dict[int, list[Run]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def runs(self) -> list[Run]:
        """All runs that have rows, on the host.

        Raises ValueError if boundaries and `kv_index` contradict each other.
        """
        q_bounds, k_bounds = (bounds.tolist() for bounds in self.cu_seq_lens)
        if len(q_bounds) != len(k_bounds) or k_bounds[-1] != len(self.kv_index):
            raise ValueError(
                f"A pack whose documents share prefixes has boundaries of {len(q_bounds) - 1} runs with "
                f"{k_bounds[-1]} keys, and kv_index holds {len(self.kv_index)} keys. It is then unknown which keys "
                "belong to a run. Pass the batch of the collator unchanged, or set share_prefixes='off'."
            )
        spans = zip(pairwise(q_bounds), pairwise(k_bounds), strict=True)
        return [Run(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]

    @cached_property
    def stretches(self) -> list[tuple[slice, slice]]:
        """(rows, keys) of stretches of rows that several documents share, each cut where a document leaves it.

        All `rows` attend to all `keys`. Both are contiguous, as documents are sorted by their tokens.

        >>> bounds = torch.tensor([0, 4, 7]), torch.tensor([0, 4, 9])
        >>> SharedRuns(bounds, (4, 5), torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6])).stretches
        [(slice(4, 7, None), slice(0, 2, None))]
        """
        index = self.kv_index.numpy()
        found: list[tuple[slice, slice]] = []
        # the path of the run before, from its first key: [first place in the path, first row, first row below, rows]
        path: list[list[int]] = []
        keys = index[:0]

        def leave(length: int, row: int) -> None:
            """Only the first `length` keys of the path go on; the rest were keys of all rows below until `row`."""
            while path and path[-1][0] + path[-1][3] > length:
                place, first, below, count = path[-1]
                stay = max(length - place, 0)
                if below < row:
                    found.append((slice(below, row), slice(first + stay, first + count)))
                if stay:
                    path[-1][3] = stay
                else:
                    path.pop()

        for run in self.runs:
            before, start, stop = run.before, run.rows.start, run.rows.stop
            others, keys = keys, index[run.keys]
            num = min(before, len(others))
            differ = np.flatnonzero(keys[:num] != others[:num])
            common = int(differ[0]) if len(differ) else num
            leave(common, start)
            edges = [common, *(np.flatnonzero(np.diff(keys[common:before]) != 1) + common + 1).tolist(), before]
            path += [[a, int(keys[a]), start, b - a] for a, b in pairwise(edges) if a < b]
            path.append([before, start, stop, stop - start])
        leave(0, self.runs[-1].rows.stop)
        return found

    def chunked(self, chunk: int | None) -> list[Run]:
        """The runs, or the parts of them in each chunk of their document; a part has keys of its own chunk only."""
        if chunk is None:
            return self.runs
        if chunk not in self._chunked:
            self._chunked[chunk] = [part for run in self.runs for part in _parts(run, chunk)]
        return self._chunked[chunk]


def _parts(run: Run, chunk: int) -> Iterator[Run]:
    before, row, key = run.before, run.rows.start, run.keys.start
    for low in range(before // chunk * chunk, run.num_keys, chunk):
        first, high = max(low, before), min(low + chunk, run.num_keys)
        yield Run(slice(row + first - before, row + high - before), slice(key + low, key + high))


def attend_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedRuns,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row to the keys of its run up to itself, of these to the last `window` or the own chunk.

    `sinks` and `softcap` as for `kernels.attend_on_cpu`.
    """
    longest = shared.max_lengths[1]
    window = None if window is None or window >= longest else window
    chunk = None if chunk is None or chunk >= longest else chunk
    if query.device.type == "cpu" and softcap is None and dropout == 0:
        return _attend_on_cpu(query, key, value, shared, scale, window, chunk, sinks)
    return _attend_in_tiles(query, key, value, shared, scale, window, chunk, dropout, softcap, sinks)


# Not compiled, as all loops over documents.
@torch.compiler.disable
def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedRuns, scale: float, window: int | None,
    chunk: int | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    kernel: CpuKernel
    if window is None and chunk is None:
        kernel = _StretchKernel(shared, scale)
    else:
        kernel = _LookUpKernel(shared.chunked(chunk), shared.kv_index, window, scale)
    return FlashAttention.apply(query, key, value, sinks, kernel)[..., :value_dim]


@dataclass(frozen=True)
class _StretchKernel(CpuKernel):
    """Each run causally, then each shared stretch of rows as keys of all rows below it."""

    shared: SharedRuns
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        for run in self.shared.runs:
            yield FlashCall(run.rows, run.rows, True)
        for rows, keys in self.shared.stretches:
            yield FlashCall(rows, keys, False)


@dataclass(frozen=True)
class _LookUpKernel(CpuKernel):
    """Run by run, with the keys before it looked up."""

    runs: list[Run]
    kv_index: Tensor
    window: int | None
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        masks = WindowMasks(self.window, like)
        for run in self.runs:
            if self.window is None or run.num_keys <= self.window:
                yield FlashCall(run.rows, run.rows, True)
                if run.before:
                    yield FlashCall(run.rows, self.kv_index[run.keys][: run.before], False)
                continue
            for start, stop, first in tiles(run.num_rows, self.window, FLASH_TILE, run.before):
                last = run.before + stop
                own = first - run.before
                keys = (
                    self.kv_index[run.keys][first:last]
                    if own < 0
                    else slice(run.rows.start + own, run.rows.start + stop)
                )
                rows = slice(run.rows.start + start, run.rows.start + stop)
                yield FlashCall(rows, keys, False, masks[stop - start, last - first])


@torch.compiler.disable
def _attend_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedRuns, scale: float, window: int | None,
    chunk: int | None, dropout: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    options = {"scale": scale, "dropout": dropout, "softcap": softcap}
    return _Tiles.apply(query, key, value, sinks, _TileKernel(shared.chunked(chunk), shared.kv_index, window, options))


@dataclass(frozen=True)
class _TileKernel:
    """Attention of one tile of queries to keys that are looked up."""

    runs: list[Run]
    kv_index: Tensor
    window: int | None
    options: dict[str, Any]

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, keys, which keys each row attends to) of each tile."""
        for run in self.runs:
            for start, stop, first in tiles(run.num_rows, self.window, MATH_TILE, run.before):
                last = run.before + stop
                visible = visible_keys(stop - start, last - first, self.window, self.kv_index.device)
                rows = slice(run.rows.start + start, run.rows.start + stop)
                yield rows, self.kv_index[run.keys][first:last], visible

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, visible: Tensor) -> Tensor:
        if sinks is not None or self.options["softcap"] is not None:
            return math_attention(query, key, value, visible, sinks=sinks, **self.options)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        dropout, scale = self.options["dropout"], self.options["scale"]
        return F.scaled_dot_product_attention(query, key, value, visible, dropout_p=dropout, scale=scale)

    def random(self, seed: int | None, device: torch.device) -> Any:
        """Within this context, dropout draws the numbers of `seed`."""
        if seed is None:
            return nullcontext()
        return _Seeded(seed, device)


class _Seeded:
    def __init__(self, seed: int, device: torch.device):
        devices = [] if device.type == "cpu" else [device]
        self.seed, self.fork = seed, torch.random.fork_rng(devices, device_type=device.type)

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


class _Tiles(torch.autograd.Function):
    """All tiles of a pack. Backward computes each once more, so that no attention weights are saved.

    Not `torch.utils.checkpoint` for each tile: autograd would make a gradient of all keys for every tile, and would sum
    them in the dtype of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: _TileKernel
    ) -> Tensor:
        # from the generator of the CPU, which no GPU is waited for
        ctx.seed = int(torch.randint(2**62, ())) if kernel.options["dropout"] else None
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks)
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        with kernel.random(ctx.seed, query.device):
            for rows, keys, visible in kernel.tiles():
                tile = query[:, :, rows], key[:, :, keys], value[:, :, keys], sinks
                out[:, :, rows] = kernel.attend(*tile, visible)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states = ctx.saved_tensors
        query, key, value, sinks = states
        sums = [None if x is None else torch.zeros_like(x, dtype=_sum_dtype(x)) for x in states]
        with ctx.kernel.random(ctx.seed, query.device):
            for rows, keys, visible in ctx.kernel.tiles():
                tile = [query[:, :, rows], key[:, :, keys], value[:, :, keys], sinks]
                places = [(slice(None), slice(None), where) for where in (rows, keys, keys)]
                tile = [None if x is None else x.detach().requires_grad_() for x in tile]
                with torch.enable_grad():
                    out = ctx.kernel.attend(*tile, visible)
                given = [x for x in tile if x is not None]
                found = torch.autograd.grad(out, given, grad[:, :, rows])
                for total, place, part in zip(sums, [*places, ...], found, strict=False):
                    total[place] += part  # each key once: nothing is lost
        return *(None if x is None else total.to(x.dtype) for x, total in zip(states, sums, strict=True)), None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
