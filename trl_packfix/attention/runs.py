"""Causal attention over a pack whose documents share prefixes (`data/prefix_collator.py`): the computation only.

Each run of rows attends to the rows of its document that come before it, and causally to itself. `kv_index` names the
keys of each run; the last of them are its own rows.

    device  features                how
    CPU     full attention, sinks   the flash kernel: each run by itself, then with the keys before it looked up, merged
                                    by log-sum-exp
    CPU     windows, chunks         the flash kernel on tiles of queries with keys looked up
    CUDA    all of them             FlashAttention-2 as built into torch over the keys of all runs, copied end to end:
                                    one launch, or several that copy at most `COPIED_BYTES` each

Where no flash kernel runs there is no such attention, and documents are packed whole.

Nothing copied is saved for backward. Gradients of keys and values are summed in at least fp32 over all documents that
share them; with `torch.use_deterministic_algorithms` torch sums them in one order.

Shapes: T rows, N runs, K keys of all runs, H query heads, G key/value heads, D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .flash import (
    CpuFlash,
    CudaKernel,
    FlashAttention,
    FlashCall,
    FlashCalls,
    WindowMasks,
    flash_on_cuda,
    pad_head_dim,
    tiles,
)
from .kernels import FLASH_TILE, only_if_shorter

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
    """What one launch on CUDA computes: rows, places in `kv_index`, boundaries and largest numbers of both."""

    rows: slice
    keys: slice
    cu_seq_lens: tuple[Tensor, Tensor]
    max_lengths: tuple[int, int]


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

    @property
    def runs(self) -> list[Run]:
        """All runs, without empty ones that pad. Waits for the device if `run_lengths` is None.

        Raises ValueError if boundaries and `kv_index` contradict each other; seen on the CPU only.
        """
        if "runs" not in self.derived:
            on_host = self.kv_index.device.type == "cpu"
            if on_host or self.run_lengths is None:
                q_bounds, k_bounds = (bounds.cpu().numpy() for bounds in self.cu_seq_lens)
            else:
                q_bounds, k_bounds = np.pad(self.run_lengths.numpy().cumsum(axis=0), ((1, 0), (0, 0))).T
            if on_host:
                _check_keys(q_bounds, k_bounds, self.kv_index.numpy())
            spans = zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True)
            self.derived["runs"] = [Run(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]
        return self.derived["runs"]

    def chunked(self, chunk: int | None) -> list[Run]:
        """The runs, or the parts of them in each chunk of their document; a part has keys of its own chunk only."""
        if chunk is None:
            return self.runs
        if chunk not in self.derived:
            self.derived[chunk] = [part for run in self.runs for part in _parts(run, chunk)]
        return self.derived[chunk]

    def launches(self, most_keys: int) -> list[Launch]:
        """All runs in launches of at most `most_keys` keys; a run is in one launch, and may have more."""
        # A compiled graph would have to be another one for every number of launches
        if torch.compiler.is_compiling() or self.run_lengths is None or len(self.kv_index) <= most_keys:
            return [Launch(slice(None), slice(None), self.cu_seq_lens, self.max_lengths)]
        if ("launches", most_keys) in self.derived:
            return self.derived["launches", most_keys]
        firsts = [0]
        for i, run in enumerate(self.runs):
            if i > firsts[-1] and run.keys.stop - self.runs[firsts[-1]].keys.start > most_keys:
                firsts.append(i)
        launches = self.derived["launches", most_keys] = []
        for first, stop in pairwise([*firsts, len(self.runs)]):
            group = self.runs[first:stop]
            rows, keys = (slice(start.start, end.stop) for start, end in zip(group[0], group[-1], strict=True))
            q_bounds, k_bounds = (
                bounds[first : stop + 1] - start
                for bounds, start in zip(self.cu_seq_lens, (rows.start, keys.start), strict=True)
            )
            longest = max(run.num_rows for run in group), max(run.num_keys for run in group)
            launches.append(Launch(rows, keys, (q_bounds, k_bounds), longest))
        return launches


def _check_keys(q_bounds: npt.NDArray[np.int64], k_bounds: npt.NDArray[np.int64], index: npt.NDArray[np.int64]) -> None:
    num_rows, num_keys = np.diff(q_bounds), np.diff(k_bounds)
    fits = len(num_rows) == len(num_keys) and (num_rows >= 0).all() and (num_rows <= num_keys).all()
    if fits and k_bounds[-1] == len(index):
        first = np.repeat(q_bounds[:-1], num_keys)
        is_row = np.arange(len(index)) >= np.repeat(k_bounds[1:] - num_rows, num_keys)
        rows, before = index[is_row], index[~is_row]
        fits = (rows == np.arange(q_bounds[-1])).all() and (before < first[~is_row]).all() and index.min() >= 0
        if fits:
            return
    raise ValueError(
        f"A pack of {len(num_rows)} runs with {q_bounds[-1]} rows and {k_bounds[-1]} keys came with a kv_index of "
        f"{len(index)} rows. The keys of each run must be rows before it and then its own rows. Pass the batch of the "
        'collator unchanged, or set share_prefixes="off".'
    )


def _parts(run: Run, chunk: int) -> Iterator[Run]:
    before, row, key = run.before, run.rows.start, run.keys.start
    for low in range(before // chunk * chunk, run.num_keys, chunk):
        first, high = max(low, before), min(low + chunk, run.num_keys)
        yield Run(slice(row + first - before, row + high - before), slice(key + low, key + high))


# Not compiled, as all loops over documents.
@torch.compiler.disable
def attend_shared_on_cpu(
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
    value_dim = value.shape[-1]
    query, key, value = pad_head_dim(max(query.shape[-1], value_dim), query, key, value)
    kernel = _LookUpKernel(shared.chunked(chunk), shared.kv_index, window, scale)
    return FlashAttention.apply(query, key, value, sinks, kernel)[..., :value_dim]


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
    launches = shared.launches(most_copied_keys(query, key, value))
    if chunk is not None:
        launches = [_in_chunks(launch, query.shape[2], chunk) for launch in launches]
    return flash_on_cuda(query, key, value, sinks, _CopyKernel(launches, shared.kv_index, window, scale))


def most_copied_keys(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Keys whose copies, and gradients by key head and by query head where keys are shared, fit into `COPIED_BYTES`."""
    heads = 2 * key.shape[1] + (query.shape[1] if query.shape[1] > key.shape[1] else 0)
    return COPIED_BYTES // (heads * (key.shape[-1] + value.shape[-1]) * 2)  # in half precision


@dataclass(frozen=True)
class _LookUpKernel(FlashCalls):
    """On the CPU: run by run, with the keys before it looked up."""

    runs: list[Run]
    kv_index: Tensor
    window: int | None
    scale: float
    merges = True

    def calls(self, like: Tensor) -> Iterator[FlashCall]:
        causal, full = CpuFlash(self.scale, True), CpuFlash(self.scale, False)
        masks = WindowMasks(self.window, like)
        for run in self.runs:
            keys = self.kv_index[run.keys]
            if self.window is None or run.num_keys <= self.window:
                yield FlashCall(run.rows, run.rows, causal)
                if run.before:
                    yield FlashCall(run.rows, keys[: run.before], full, merges=True)
                continue
            row = run.rows.start
            for start, stop, first in tiles(run.num_rows, self.window, FLASH_TILE, before=run.before):
                last = run.before + stop
                among_own = first >= run.before
                seen = slice(row + first - run.before, row + stop) if among_own else keys[first:last]
                tile = CpuFlash(self.scale, False, masks[stop - start, last - first])
                yield FlashCall(slice(row + start, row + stop), seen, tile)


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
