"""Causal attention over a pack whose documents share prefixes (`data/prefix_collator.py`): the computation only.

Each run of rows attends to the rows of its document that come before it, and causally to itself. `kv_index` names the
keys of each run; the last of them are its own rows.

    device  features                         how
    CPU     full attention, sinks            the flash kernel: each run by itself, then each shared stretch of rows as
                                             keys of all rows below it, merged by log-sum-exp; no keys are copied
    CPU     windows, chunks, with sinks      the flash kernel on tiles of queries with keys looked up
    CUDA    full attention, windows, chunks, FlashAttention-2 as built into torch over the keys of all runs, copied end
            with sinks                       to end: one launch. Above `COPIED_BYTES`: full attention as on the
                                             CPU, one launch per level of nesting; windows and chunks in several groups
    any     no flash kernel                  tiles of queries with keys looked up, recomputed in backward

Nothing copied is saved for backward. Gradients of keys and values are summed in at least fp32 over all documents that
share them; with `torch.use_deterministic_algorithms` torch sums them in one order.

Shapes: T rows, N runs, K keys of all runs, H query heads, G key/value heads, D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import (
    FLASH_TILE,
    MATH_TILE,
    CpuFlash,
    CudaKernel,
    FlashAttention,
    FlashCall,
    FlashCalls,
    WindowMasks,
    flash_on_cuda,
    math_attention,
    only_if_shorter,
    pad_head_dim,
    tiles,
    visible_keys,
)

# What the copied keys and values of one launch on CUDA may take, with their gradients in backward. One layer at a time.
COPIED_BYTES = 2**30


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


class Launch(NamedTuple):
    """What one launch on CUDA computes: rows and keys, boundaries and largest numbers of both.

    Of runs, `keys` are places in `kv_index`. Of stretches, rows and keys are numbers of rows.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]


class Stretch(NamedTuple):
    """Rows that several documents share, as keys of the rows below them; both are contiguous."""

    rows: slice
    keys: slice


def _once(derive: Callable[[Any], Any]) -> property:
    """A property that is derived once per pack."""

    @wraps(derive)
    def get(runs: "SharedRuns") -> Any:
        name = derive.__name__
        if name not in runs.derived:
            runs.derived[name] = derive(runs)
        return runs.derived[name]

    return property(get)


@dataclass(frozen=True)
class SharedRuns:
    """The runs of a pack, and what attention derives from them once per pack.

    Attributes:
        run_lengths: rows and keys of each run, (N, 2), on the host; None if they are not known there.
        derived: what was derived from them. The owner of the pack passes it, as `torch.compile` can trace neither a
            `cached_property` nor an owner that holds an object of this class.
    """

    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]
    kv_index: Tensor
    run_lengths: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @_once
    def runs(self) -> list[Run]:
        """All runs, without empty ones that pad. Waits for the device if `run_lengths` is None.

        Raises ValueError if boundaries and `kv_index` contradict each other; seen on the CPU only.
        """
        on_host = self.kv_index.device.type == "cpu"
        if on_host or self.run_lengths is None:
            q_bounds, k_bounds = (bounds.cpu().numpy() for bounds in self.cu_seq_lens)
        else:
            q_bounds, k_bounds = np.pad(self.run_lengths.numpy().cumsum(axis=0), ((1, 0), (0, 0))).T
        if on_host:
            _check_keys(q_bounds, k_bounds, self.kv_index.numpy())
        spans = zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True)
        return [Run(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]

    @_once
    def stretches(self) -> list[Stretch]:
        """Stretches of rows that several documents share, each cut where a document leaves it.

        Documents are sorted by their tokens, so all rows below a stretch are contiguous. On the CPU `kv_index` says
        what a run shares. On other devices the lengths of runs do: its first keys are those of the run before.

        >>> bounds = torch.tensor([0, 4, 7]), torch.tensor([0, 4, 9])
        >>> SharedRuns(bounds, (4, 5), torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6])).stretches
        [Stretch(rows=slice(4, 7, None), keys=slice(0, 2, None))]
        """
        index = self.kv_index.numpy() if self.kv_index.device.type == "cpu" else None
        path = _Path()
        before = np.zeros(0, dtype=np.int64)  # keys of the run before
        for run in self.runs:
            if index is None:
                path.leave(run.before, run.rows.start)
            else:
                keys = index[run.keys]
                common, others = _compared(keys[: run.before], before)
                path.leave(common, run.rows.start)
                for place, first, count in others:
                    path.enter(place, first, count, below=run.rows.start)
                before = keys
            path.enter(run.before, run.rows.start, run.num_rows, below=run.rows.stop)
        path.leave(0, self.runs[-1].rows.stop)
        return path.left

    def chunked(self, chunk: int | None) -> list[Run]:
        """The runs, or the parts of them in each chunk of their document; a part has keys of its own chunk only."""
        if chunk is None:
            return self.runs
        if chunk not in self.derived:
            self.derived[chunk] = [part for run in self.runs for part in _parts(run, chunk)]
        return self.derived[chunk]

    def groups(self, most: int) -> list[Launch]:
        """All runs in groups of at most `most` keys; a run is in one group, and may have more."""
        if ("groups", most) not in self.derived:
            self.derived["groups", most] = self._groups(most)
        return self.derived["groups", most]

    def _groups(self, most: int) -> list[Launch]:
        firsts = [0]
        for i, run in enumerate(self.runs):
            if i > firsts[-1] and run.keys.stop - self.runs[firsts[-1]].keys.start > most:
                firsts.append(i)
        launches = []
        for first, stop in pairwise([*firsts, len(self.runs)]):
            group = self.runs[first:stop]
            starts = group[0].rows.start, group[0].keys.start
            q_bounds, k_bounds = (
                x[first : stop + 1] - start for x, start in zip(self.cu_seq_lens, starts, strict=True)
            )
            longest = max(run.num_rows for run in group), max(run.num_keys for run in group)
            rows, keys = (slice(start, end.stop) for start, end in zip(starts, group[-1], strict=True))
            launches.append(Launch(rows, keys, (q_bounds, k_bounds), longest))
        return launches

    @_once
    def levels(self) -> list[Launch]:
        """The stretches by level of nesting.

        The rows below two stretches of one level are different. Only a stretch whose rows lie within those of another
        is of a higher level.
        """
        by_level: list[list[Stretch]] = []
        stops: list[int] = []
        for stretch in sorted(self.stretches, key=lambda stretch: (stretch.rows.start, -stretch.rows.stop)):
            while stops and stops[-1] <= stretch.rows.start:
                stops.pop()
            if len(stops) == len(by_level):
                by_level.append([])
            by_level[len(stops)].append(stretch)
            stops.append(stretch.rows.stop)
        if not by_level:
            return []
        index, bounds, longest = [], [], []
        for level in by_level:
            for spans in zip(*level, strict=True):
                lengths = np.array([span.stop - span.start for span in spans])
                index.append(np.concatenate([np.arange(span.start, span.stop) for span in spans]))
                bounds.append(np.pad(lengths.cumsum(), (1, 0)).astype(np.int32))
                longest.append(int(lengths.max()))
        device = self.kv_index.device
        columns = zip(_on_device(index, device), _on_device(bounds, device), longest, strict=True)
        return [
            Launch(rows, keys, (q_bounds, k_bounds), (most_rows, most_keys))
            for (rows, q_bounds, most_rows), (keys, k_bounds, most_keys) in zip(columns, columns, strict=True)
        ]


def _check_keys(q_bounds: npt.NDArray[np.int64], k_bounds: npt.NDArray[np.int64], index: npt.NDArray[np.int64]) -> None:
    num_rows, num_keys = np.diff(q_bounds), np.diff(k_bounds)
    fits = len(num_rows) == len(num_keys) and (num_rows >= 0).all() and (num_rows <= num_keys).all()
    if fits and k_bounds[-1] == len(index):
        first = np.repeat(q_bounds[:-1], num_keys)
        own = np.arange(len(index)) >= np.repeat(k_bounds[1:] - num_rows, num_keys)
        fits = (index[own] == np.arange(q_bounds[-1])).all() and (index[~own] < first[~own]).all() and index.min() >= 0
        if fits:
            return
    raise ValueError(
        f"A pack of {len(num_rows)} runs with {q_bounds[-1]} rows and {k_bounds[-1]} keys came with a kv_index of "
        f"{len(index)} rows. The keys of each run must be rows before it and then its own rows. Pass the batch of the "
        'collator unchanged, or set share_prefixes="off".'
    )


def _compared(keys: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> tuple[int, list[tuple[int, int, int]]]:
    """How many first keys are those of the run before, and the rest as (place, first row, number) of stretches."""
    num = min(len(keys), len(before))
    differ = np.flatnonzero(keys[:num] != before[:num])
    common = int(differ[0]) if len(differ) else num
    breaks = np.flatnonzero(np.diff(keys[common:]) != 1) + common + 1
    edges = pairwise([common, *breaks.tolist(), len(keys)])
    return common, [(start, int(keys[start]), stop - start) for start, stop in edges if start < stop]


class _Path:
    """The rows of the document before, from its first, as stretches; `left` are those that documents have left."""

    def __init__(self) -> None:
        self.left: list[Stretch] = []
        # place in the document, first row, number of rows, first row below
        self._stretches: list[tuple[int, int, int, int]] = []

    def enter(self, place: int, first: int, count: int, *, below: int) -> None:
        self._stretches.append((place, first, count, below))

    def leave(self, place: int, row: int) -> None:
        """The document of `row` shares the rows before `place`; the others were keys of the rows before `row`."""
        while self._stretches and sum(self._stretches[-1][::2]) > place:
            start, first, count, below = self._stretches.pop()
            stays = max(place - start, 0)
            if below < row:
                self.left.append(Stretch(slice(below, row), slice(first + stays, first + count)))
            if stays:
                self.enter(start, first, stays, below=below)


def _parts(run: Run, chunk: int) -> Iterator[Run]:
    before, row, key = run.before, run.rows.start, run.keys.start
    for low in range(before // chunk * chunk, run.num_keys, chunk):
        first, high = max(low, before), min(low + chunk, run.num_keys)
        yield Run(slice(row + first - before, row + high - before), slice(key + low, key + high))


def _on_device(parts: Sequence[npt.NDArray[np.integer[Any]]], device: torch.device) -> list[Tensor]:
    """All of them in one copy, which the host does not wait for."""
    joined = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return list(joined.to(device, non_blocking=True).split([len(part) for part in parts]))


def attend_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedRuns,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row to the keys of its run up to itself, of these to the last `window` or the own chunk.

    `sinks` as for `kernels.attend_on_cpu`.
    """
    window, chunk = (only_if_shorter(size, shared.max_lengths[1]) for size in (window, chunk))
    attend = _attend_on_cpu if query.device.type == "cpu" else _attend_in_tiles
    return attend(query, key, value, shared, scale=scale, window=window, chunk=chunk, sinks=sinks)


def attend_shared_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedRuns,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same for bfloat16 and float16 on CUDA, without a device-to-host copy; see `kernels.attend_on_cuda`."""
    window, chunk = (only_if_shorter(size, shared.max_lengths[1]) for size in (window, chunk))
    kernel = _cuda_kernel(
        shared, query.shape[2], most_copied_keys(query, key, value), scale=scale, window=window, chunk=chunk
    )
    return flash_on_cuda(query, key, value, sinks, kernel)


def most_copied_keys(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Keys whose copies, and gradients by key head and by query head where keys are shared, fit into `COPIED_BYTES`."""
    heads = 2 * key.shape[1] + (query.shape[1] if query.shape[1] > key.shape[1] else 0)
    return COPIED_BYTES // (heads * (key.shape[-1] + value.shape[-1]) * 2)  # in half precision


# Not compiled, as all loops over documents.
@torch.compiler.disable
def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedRuns, *, scale: float, window: int | None,
    chunk: int | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    kernel: FlashCalls
    if window is None and chunk is None:
        kernel = _StretchKernel(shared, scale)
    else:
        kernel = _LookUpKernel(shared.chunked(chunk), shared.kv_index, window, scale)
    return FlashAttention.apply(query, key, value, sinks, kernel)[..., :value_dim]


@dataclass(frozen=True)
class _StretchKernel(FlashCalls):
    """On the CPU: each run by itself, then each shared stretch of rows as keys of all rows below it."""

    shared: SharedRuns
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        own, others = CpuFlash(self.scale, True), CpuFlash(self.scale, False)
        for run in self.shared.runs:
            yield FlashCall(run.rows, run.rows, own)
        for rows, keys in self.shared.stretches:
            yield FlashCall(rows, keys, others, merges=True)


@dataclass(frozen=True)
class _LookUpKernel(FlashCalls):
    """On the CPU: run by run, with the keys before it looked up."""

    runs: list[Run]
    kv_index: Tensor
    window: int | None
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        own, others = CpuFlash(self.scale, True), CpuFlash(self.scale, False)
        masks = WindowMasks(self.window, like)
        for run in self.runs:
            keys = self.kv_index[run.keys]
            if self.window is None or run.num_keys <= self.window:
                yield FlashCall(run.rows, run.rows, own)
                if run.before:
                    yield FlashCall(run.rows, keys[: run.before], others, merges=True)
                continue
            row = run.rows.start
            for start, stop, first in tiles(run.num_rows, self.window, FLASH_TILE, before=run.before):
                last = run.before + stop
                among_own = first >= run.before
                seen = slice(row + first - run.before, row + stop) if among_own else keys[first:last]
                tile = CpuFlash(self.scale, False, masks[stop - start, last - first])
                yield FlashCall(slice(row + start, row + stop), seen, tile)


def _cuda_kernel(
    shared: SharedRuns, num_rows: int, most_keys: int, *, scale: float, window: int | None, chunk: int | None
) -> FlashCalls:
    # A compiled graph would have to be another one for every number of launches
    if torch.compiler.is_compiling() or shared.run_lengths is None or len(shared.kv_index) <= most_keys:
        launches = [Launch(slice(None), slice(None), shared.cu_seq_lens, shared.max_lengths)]
    elif window is None and chunk is None:
        return _LevelKernel(shared, scale)
    else:
        launches = shared.groups(most_keys)
    if chunk is not None:
        launches = [_in_chunks(launch, num_rows, chunk) for launch in launches]
    return _CopyKernel(launches, shared.kv_index, window, scale)


@dataclass(frozen=True)
class _CopyKernel(FlashCalls):
    """On CUDA: the keys of all runs are copied end to end, or those of some runs at a time."""

    launches: list[Launch]
    kv_index: Tensor
    window: int | None
    scale: float
    merges = False

    def calls(self, like: Tensor) -> list[FlashCall]:
        return [
            FlashCall(rows, self.kv_index[keys], CudaKernel(cu_seq_lens, max_lengths, self.window, self.scale))
            for rows, keys, cu_seq_lens, max_lengths in self.launches
        ]


@dataclass(frozen=True)
class _LevelKernel(FlashCalls):
    """On CUDA: all runs by themselves in one launch, then all shared stretches of each level in one."""

    shared: SharedRuns
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        bounds, longest = self.shared.cu_seq_lens[0], self.shared.max_lengths[0]
        own = CudaKernel((bounds, bounds), (longest, longest), None, self.scale)
        yield FlashCall(slice(None), slice(None), own)
        for rows, keys, cu_seq_lens, (most_rows, most_keys) in self.shared.levels:
            # For single queries that attend to all keys the kernel swaps heads and queries, as in generation, and then
            # returns another shape of the log-sum-exp
            most = (max(most_rows, 2), most_keys)
            yield FlashCall(rows, keys, CudaKernel(cu_seq_lens, most, None, self.scale, is_causal=False), merges=True)


def _in_chunks(launch: Launch, num_rows: int, chunk: int) -> Launch:
    """Boundaries of the parts of runs in each chunk, made on the device. The launch has at most `num_rows` rows.

    What is known of their number without reading the lengths is an upper bound; empty parts at the end fill it up. The
    keys of a run before its first chunk are a part without rows, so that keys stay end to end.

    >>> launch = Launch(slice(0, 4), slice(0, 7), (torch.tensor([0, 4]), torch.tensor([0, 7])), (4, 7))
    >>> [bounds.tolist() for bounds in _in_chunks(launch, 4, 2).cu_seq_lens]
    [[0, 0, 1, 3, 4, 4], [0, 2, 4, 6, 7, 7]]
    """
    q_bounds, k_bounds = (bounds.long() for bounds in launch.cu_seq_lens)
    num_runs = len(q_bounds) - 1
    before = k_bounds.diff() - q_bounds.diff()
    first_chunk = before // chunk
    num_parts = 1 + (k_bounds.diff() + chunk - 1) // chunk - first_chunk
    ends = num_parts.cumsum(0)
    index = torch.arange(num_rows // chunk + 3 * num_runs + 1, device=ends.device)
    run = torch.searchsorted(ends, index, right=True).clamp(max=num_runs - 1)
    part = index - (ends - num_parts)[run]
    place = torch.where(part > 0, (first_chunk[run] + part - 1) * chunk, 0)  # of the first key in the document
    rows = q_bounds[run] + (place - before[run]).clamp(min=0)
    is_part = index < ends[-1]
    rows = torch.where(is_part, rows, q_bounds[-1]).to(torch.int32)
    keys = torch.where(is_part, k_bounds[run] + place, k_bounds[-1]).to(torch.int32)
    # not less than the lengths of runs: a part without rows may have more keys than a chunk
    return launch._replace(cu_seq_lens=(rows, keys))


@torch.compiler.disable
def _attend_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedRuns, *, scale: float, window: int | None,
    chunk: int | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    return _Tiles.apply(query, key, value, sinks, _TileKernel(shared.chunked(chunk), shared.kv_index, window, scale))


@dataclass(frozen=True)
class _TileKernel:
    """Attention of a tile of queries to keys that are looked up."""

    runs: list[Run]
    kv_index: Tensor
    window: int | None
    scale: float

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, keys, which keys each row attends to) of each tile."""
        for run in self.runs:
            keys, row = self.kv_index[run.keys], run.rows.start
            for start, stop, first in tiles(run.num_rows, self.window, MATH_TILE, before=run.before):
                last = run.before + stop
                visible = visible_keys(stop - start, last - first, self.window, device=self.kv_index.device)
                yield slice(row + start, row + stop), keys[first:last], visible

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, visible: Tensor) -> Tensor:
        if sinks is not None:
            return math_attention(query, key, value, visible, sinks=sinks, scale=self.scale)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, visible, scale=self.scale)


class _Tiles(torch.autograd.Function):
    """All tiles of a pack. Backward computes each once more, so that no attention weights are saved.

    Not `torch.utils.checkpoint` for each tile: autograd would make a gradient of all keys for every tile, and would sum
    them in the dtype of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: _TileKernel
    ) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks)
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        for rows, keys, visible in kernel.tiles():
            out[:, :, rows] = kernel.attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], sinks, visible)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x for x in ctx.saved_tensors if x is not None]
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        for rows, keys, visible in ctx.kernel.tiles():
            # each key is once among those of a tile, so that += adds all of it
            places: list[Any] = [(..., where, slice(None)) for where in (rows, keys, keys)] + [...]
            tile = [x[place].detach().requires_grad_() for x, place in zip(inputs, places, strict=False)]
            with torch.enable_grad():
                out = ctx.kernel.attend(*tile[:3], tile[3] if len(tile) > 3 else None, visible)
            parts = torch.autograd.grad(out, tile, grad[:, :, rows])
            for total, place, part in zip(sums, places, parts, strict=False):
                total[place] += part
        grads: list[Tensor | None] = [total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]
        return *grads, *[None] * (5 - len(grads))
