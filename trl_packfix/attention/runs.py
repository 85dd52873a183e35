"""Causal attention over a pack whose documents share prefixes (`data/prefix_collator.py`): the computation only.

Each run of rows attends to the rows of its document that come before it, and causally to itself. `kv_index` names the
keys of each run; the last of them are its own rows.

    CPU     the flash kernel: each run by itself, then with the keys before it looked up, merged by log-sum-exp; with
            windows and chunks on tiles of queries
    CUDA    FlashAttention-2 as built into torch over the keys of all runs, copied end to end: one launch, or several
            that copy at most `COPIED_BYTES` each

Where no flash kernel runs there is no such attention, and documents are packed whole. Nothing copied is saved for
backward. Gradients of keys and values are summed in at least fp32 over all documents that share them; with
`torch.use_deterministic_algorithms` torch sums them in one order. Shapes are those in `kernels.py`, for T rows. The
launches of whole documents on CUDA are made here, too.
"""

from itertools import pairwise
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from .flash import KernelOptions, RowsAndKeys, flash_on_cpu
from .kernels import KernelLaunch, attend_on_cuda
from .packed_forward import PackedForward, once_per_pack

# What the copied keys and values of one launch on CUDA may take, with their gradients in backward. One layer at a time.
COPIED_BYTES = 2**30


@once_per_pack
def runs_of(pack: PackedForward) -> list[RowsAndKeys]:
    """The runs of a pack, without empty ones that pad. Waits for the device without `run_lengths`.

    Raises ValueError if boundaries and `kv_index` contradict each other; seen on the CPU only.
    """
    assert pack.kv_index is not None
    on_host = pack.kv_index.device.type == "cpu"
    if on_host or pack.run_lengths is None:
        q_bounds, k_bounds = (bounds.cpu().numpy() for bounds in (pack.cu_seq_lens_q, pack.cu_seq_lens_k))
    else:
        q_bounds, k_bounds = np.pad(pack.run_lengths.numpy().cumsum(axis=0), ((1, 0), (0, 0))).T
    if on_host:
        index = pack.kv_index.numpy()
        num_rows = np.diff(q_bounds)
        num_keys = np.diff(k_bounds)
        fits = len(num_rows) == len(num_keys) and (num_rows >= 0).all() and (num_rows <= num_keys).all()
        if fits := fits and k_bounds[-1] == len(index):
            first = np.repeat(q_bounds[:-1], num_keys)
            is_row = np.arange(len(index)) >= np.repeat(k_bounds[1:] - num_rows, num_keys)
            rows = index[is_row]
            before = index[~is_row]
            fits = (rows == np.arange(q_bounds[-1])).all() and (before < first[~is_row]).all() and index.min() >= 0
        if not fits:
            raise ValueError(
                f"A pack of {len(num_rows)} runs with {q_bounds[-1]} rows and {k_bounds[-1]} keys came with a kv_index "
                f"of {len(index)} rows. The keys of each run must be rows before it and then its own rows. Pass the "
                'batch of the collator unchanged, or set share_prefixes="off".'
            )
    spans = zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True)
    return [RowsAndKeys(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]


# Not compiled, as all loops over documents.
@torch.compiler.disable
def attend_shared_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: PackedForward,
    chunk: int | None = None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """Attention of each row to the keys of its run up to itself, of these to the last `window` or the own chunk."""
    runs = runs_of(pack)
    if chunk is not None:
        parts = []
        for run in runs:
            before = run.before
            row = run.rows.start
            key_of_first = run.keys.start
            for low in range(before // chunk * chunk, run.num_keys, chunk):
                first = max(low, before)
                high = min(low + chunk, run.num_keys)
                rows = slice(row + first - before, row + high - before)
                parts.append(RowsAndKeys(rows, slice(key_of_first + low, key_of_first + high)))
        runs = parts
    return flash_on_cpu(query, key, value, runs, pack.kv_index, **options)


def attend_pack_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: PackedForward,
    chunk: int | None = None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """The same for bfloat16 and float16 on CUDA, also of whole documents, without a device-to-host copy."""
    launches = launches_of(pack, query.shape[2], most_copied_keys(query, key, value))
    if chunk is not None:
        launches = [_in_chunks(launch, query.shape[2], chunk) for launch in launches]
    return attend_on_cuda(query, key, value, launches, **options)


def most_copied_keys(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Keys whose copies, and gradients by key head and by query head where keys are shared, fit into `COPIED_BYTES`."""
    heads = 2 * key.shape[1] + (query.shape[1] if query.shape[1] > key.shape[1] else 0)
    return COPIED_BYTES // (heads * (key.shape[-1] + value.shape[-1]) * 2)  # in half precision


def launches_of(pack: PackedForward, num_rows: int, most_keys: int = 0) -> list[KernelLaunch]:
    """The launches of a pack; each copies at most `most_keys` shared keys, but for a run that has more."""
    bounds = (pack.cu_seq_lens_q, pack.cu_seq_lens_k)
    longest = (pack.max_length_q, pack.max_length_k)
    # From shapes alone: to compare `cu_seq_lens` itself the host would wait for the device.
    if max(longest) > num_rows or bounds[0].numel() - 1 > num_rows:
        raise ValueError(
            f"the boundaries describe {bounds[0].numel() - 1} documents of up to {max(longest)} tokens, and the pack "
            f"has {num_rows} tokens: the kernel would read beyond them. Pass the boundaries of this pack, as "
            "PackedDataCollator returns them."
        )
    if pack.launches:
        return _launches_by_length(pack)
    if pack.kv_index is None:
        return [KernelLaunch(bounds, longest, slice(None), slice(None))]
    # A compiled graph would have to be another one for every number of launches
    if torch.compiler.is_compiling() or pack.run_lengths is None or len(pack.kv_index) <= most_keys:
        return [KernelLaunch(bounds, longest, slice(None), pack.kv_index)]
    return _launches_by_keys(pack, most_keys)


@once_per_pack
def _launches_by_length(pack: PackedForward) -> list[KernelLaunch]:
    launches = []
    for first, last, start, stop, longest in pack.launches:
        bounds = pack.cu_seq_lens_q[first : last + 1] - start
        tokens = slice(start, stop)
        launches.append(KernelLaunch((bounds, bounds), (longest, longest), tokens, tokens))
    return launches


@once_per_pack
def _launches_by_keys(pack: PackedForward, most_keys: int) -> list[KernelLaunch]:
    assert pack.kv_index is not None
    runs = runs_of(pack)
    firsts = [0]
    launches = []
    for i, run in enumerate(runs):
        if i > firsts[-1] and run.keys.stop - runs[firsts[-1]].keys.start > most_keys:
            firsts.append(i)
    for first, stop in pairwise([*firsts, len(runs)]):
        group = runs[first:stop]
        rows, keys = (slice(start.start, end.stop) for start, end in zip(group[0], group[-1], strict=True))
        q_bounds = pack.cu_seq_lens_q[first : stop + 1] - rows.start
        k_bounds = pack.cu_seq_lens_k[first : stop + 1] - keys.start
        longest = max(run.num_rows for run in group), max(run.num_keys for run in group)
        launches.append(KernelLaunch((q_bounds, k_bounds), longest, rows, pack.kv_index[keys]))
    return launches


def _in_chunks(launch: KernelLaunch, num_rows: int, chunk: int) -> KernelLaunch:
    """Boundaries of the parts of runs in each chunk, made on the device. The launch has at most `num_rows` rows.

    What is known of their number without reading the lengths is an upper bound; empty parts at the end fill it up. The
    keys of a run before its first chunk are a part without rows, so that keys stay end to end.

    >>> launch = KernelLaunch((torch.tensor([0, 4]), torch.tensor([0, 7])), (4, 7), slice(None), slice(None))
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
    # a part without rows may have more keys than a chunk
    longest = min(chunk, launch.max_lengths[0]), launch.max_lengths[1] if isinstance(launch.keys, Tensor) else chunk
    return launch._replace(cu_seq_lens=(rows, keys), max_lengths=longest)
