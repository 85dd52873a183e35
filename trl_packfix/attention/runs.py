"""Compute causal attention over a pack whose documents share prefixes, and plan the launches on CUDA of every pack.

`varlen.py` calls the two functions `attend_...` with the queries, keys and values of a pack. They prepare the calls of
the kernels, which `flash.py` (CPU) and `kernels.py` (CUDA) run.

Where documents begin alike, the pack has their common prefix once (`features/prefixes` builds such packs). The
rows of a document behind its prefix are a *run*. A run attends to its prefix, and causally to itself. `kv_index` lists
the rows of the keys of each run, run after run: first its prefix, then its own rows.

    prefix A, documents A B and A C       rows     A B C
                                          runs     A B, C
                                          keys     A B, A C

    CPU     the flash kernel: each run attends to itself, then to its prefix, and both outputs are merged. With windows
            and chunks it runs on tiles of queries
    CUDA    FlashAttention-2 as built into torch, on the keys of all runs, copied end to end: one launch, or several
            launches that copy at most `COPIED_BYTES` each

Only flash kernels can do this. Elsewhere documents are packed whole. The copies are not saved for backward. The
gradients of a key are summed over all runs that read it, in at least fp32. With `torch.use_deterministic_algorithms`
torch sums them in one order.

With *chunks* of c tokens (Llama 4) a query attends only to keys of its own chunk. Chunks are counted from the first
token of the document.

Shapes as in `kernels.py`, for T rows: query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T,
D_value).
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from .dense import attend_dense, takes_dense
from .flash import KernelOptions, RowsAndKeys, flash_on_cpu
from .kernels import KernelLaunch, attend_on_cuda, only_if_shorter
from .packed_forward import PackedForward, once_per_pack

# The most bytes that the copied keys and values of one launch on CUDA take, together with their gradients in backward.
# Only one layer at a time holds such copies.
COPIED_BYTES = 2**30


@once_per_pack
def runs_of(pack: PackedForward) -> list[RowsAndKeys]:
    """Return the runs of a pack, without the empty runs that pad its boundaries.

    Without `run_lengths` the host waits for the device.

    Raises:
        ValueError: boundaries and `kv_index` contradict each other. This is checked on the CPU only.
    """
    assert pack.kv_index is not None
    on_host = pack.kv_index.device.type == "cpu"
    if on_host or pack.run_lengths is None:
        q_bounds = pack.cu_seq_lens_q.cpu().numpy()
        k_bounds = pack.cu_seq_lens_k.cpu().numpy()
    else:
        q_bounds, k_bounds = np.pad(pack.run_lengths.numpy().cumsum(axis=0), ((1, 0), (0, 0))).T
    if on_host:
        _check_kv_index(pack.kv_index.numpy(), q_bounds, k_bounds)
    spans = zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True)
    return [RowsAndKeys(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]


def _check_kv_index(index: np.ndarray, q_bounds: np.ndarray, k_bounds: np.ndarray) -> None:
    """Refuse a `kv_index` in which the keys of a run are anything else than earlier rows and then its own rows.

    Args:
        q_bounds: where the rows of each run begin, (runs + 1,).
        k_bounds: where the keys of each run begin in `index`, (runs + 1,).
    """
    num_rows = np.diff(q_bounds)
    num_keys = np.diff(k_bounds)
    is_valid = len(num_rows) == len(num_keys) and (num_rows >= 0).all() and (num_rows <= num_keys).all()
    is_valid = is_valid and k_bounds[-1] == len(index)
    if is_valid:
        first_row = np.repeat(q_bounds[:-1], num_keys)  # of the run of each key
        is_own_row = np.arange(len(index)) >= np.repeat(k_bounds[1:] - num_rows, num_keys)
        own_rows_are_in_order = (index[is_own_row] == np.arange(q_bounds[-1])).all()
        prefixes_are_earlier = (index[~is_own_row] < first_row[~is_own_row]).all() and index.min() >= 0
        is_valid = own_rows_are_in_order and prefixes_are_earlier
    if not is_valid:
        raise ValueError(
            f"A pack of {len(num_rows)} runs with {q_bounds[-1]} rows and {k_bounds[-1]} keys came with a kv_index "
            f"of {len(index)} rows. The keys of each run must be rows before it and then its own rows. Pass the "
            'batch of the collator unchanged, or set share_prefixes="off".'
        )


# Not compiled: the loop over runs would be recompiled for every number of runs.
@torch.compiler.disable
def attend_shared_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: PackedForward,
    chunk: int | None = None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """Compute causal attention of each run to its keys on the CPU: (1, H, T, D_value).

    Args:
        chunk: tokens of a chunk; None without chunks.
    """
    runs = runs_of(pack)
    if chunk is not None:
        runs = [piece for run in runs for piece in _cut_run_at_chunks(run, chunk)]
    return flash_on_cpu(query, key, value, runs, pack.kv_index, **options)


def _cut_run_at_chunks(run: RowsAndKeys, chunk: int) -> Iterator[RowsAndKeys]:
    """Yield the rows of a run in each chunk of its document, with the keys in the chunk."""
    num_earlier = run.num_earlier_keys
    # Tokens are counted inside of the document. Chunks before the first row of the run have no rows.
    for chunk_start in range(num_earlier // chunk * chunk, run.num_keys, chunk):
        chunk_stop = min(chunk_start + chunk, run.num_keys)
        first_token = max(chunk_start, num_earlier)
        row_of_document = run.rows.start - num_earlier
        yield RowsAndKeys(
            rows=slice(row_of_document + first_token, row_of_document + chunk_stop),
            keys=slice(run.keys.start + chunk_start, run.keys.start + chunk_stop),
        )


def attend_pack_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: PackedForward,
    chunk: int | None = None,
    **options: Unpack[KernelOptions],
) -> Tensor:
    """Compute causal attention within each document on CUDA, for every kind of pack: (1, H, T, D_value).

    The dtype is bfloat16 or float16. The host never waits for the device.

    Args:
        chunk: tokens of a chunk; None without chunks.
    """
    launches = launches_of(pack, query.shape[2], most_copied_keys(query, key, value))
    window = only_if_shorter(options.get("window"), pack.max_length_k)
    scale = options["scale"]
    if chunk is None and window is None and options.get("sinks") is None:
        on_flash = partial(_attend_one_document, scale=scale)
        if takes_dense((query, key, value), pack, scale=scale, on_flash=on_flash):
            return attend_dense(query, key, value, scale=scale)
    if chunk is not None:
        launches = [_in_chunks(launch, query.shape[2], chunk) for launch in launches]
    return attend_on_cuda(query, key, value, launches, **options)


def _attend_one_document(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute causal attention of one document on the FlashAttention-2 kernels: (1, H, T, D_value)."""
    length = query.shape[2]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=query.device)
    launch = KernelLaunch((bounds, bounds), (length, length), slice(None), slice(None))
    return attend_on_cuda(query, key, value, [launch], scale=scale)


def most_copied_keys(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return how many keys may be copied for one launch, so that copies and gradients fit into `COPIED_BYTES`.

    Each key head is counted twice: for its copy and for its gradient. Where several query heads read one key head, the
    kernel first computes a gradient per query head.
    """
    heads = 2 * key.shape[1] + (query.shape[1] if query.shape[1] > key.shape[1] else 0)
    bytes_per_number = 2  # half precision
    return COPIED_BYTES // (heads * (key.shape[-1] + value.shape[-1]) * bytes_per_number)


def launches_of(pack: PackedForward, num_rows: int, most_keys: int = 0) -> list[KernelLaunch]:
    """Return the launches of a pack.

    Args:
        num_rows: rows of the pack, T.
        most_keys: the most keys that one launch copies, where documents share prefixes. A run with more keys is a
            launch by itself.

    Raises:
        ValueError: the boundaries describe more tokens or more documents than the pack has rows.
    """
    bounds = (pack.cu_seq_lens_q, pack.cu_seq_lens_k)
    longest = (pack.max_length_q, pack.max_length_k)
    # This check reads shapes only. To read `cu_seq_lens` itself, the host would wait for the device.
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
    # torch.compile would need a graph for each number of launches, so in compiled code there is one launch.
    if torch.compiler.is_compiling() or pack.run_lengths is None or len(pack.kv_index) <= most_keys:
        return [KernelLaunch(bounds, longest, slice(None), pack.kv_index)]
    return _launches_by_keys(pack, most_keys)


@once_per_pack
def _launches_by_length(pack: PackedForward) -> list[KernelLaunch]:
    """Return one launch for each group of documents of similar length, as `pack.launches` lists them."""
    launches = []
    for first_document, stop_document, first_token, stop_token, longest in pack.launches:
        bounds = pack.cu_seq_lens_q[first_document : stop_document + 1] - first_token
        tokens = slice(first_token, stop_token)
        launches.append(KernelLaunch((bounds, bounds), (longest, longest), tokens, tokens))
    return launches


@once_per_pack
def _launches_by_keys(pack: PackedForward, most_keys: int) -> list[KernelLaunch]:
    """Return launches of consecutive runs with at most `most_keys` keys each; a run with more is a launch by itself."""
    assert pack.kv_index is not None
    runs = runs_of(pack)
    first_runs = [0]  # of each launch
    for i, run in enumerate(runs):
        num_keys = run.keys.stop - runs[first_runs[-1]].keys.start
        if i > first_runs[-1] and num_keys > most_keys:
            first_runs.append(i)
    launches = []
    for first_run, stop_run in pairwise([*first_runs, len(runs)]):
        group = runs[first_run:stop_run]
        rows = slice(group[0].rows.start, group[-1].rows.stop)
        keys = slice(group[0].keys.start, group[-1].keys.stop)
        q_bounds = pack.cu_seq_lens_q[first_run : stop_run + 1] - rows.start
        k_bounds = pack.cu_seq_lens_k[first_run : stop_run + 1] - keys.start
        max_lengths = max(run.num_rows for run in group), max(run.num_keys for run in group)
        launches.append(KernelLaunch((q_bounds, k_bounds), max_lengths, rows, pack.kv_index[keys]))
    return launches


def _in_chunks(launch: KernelLaunch, num_rows: int, chunk: int) -> KernelLaunch:
    """Cut the runs of a launch into pieces, one for each chunk of their documents; on the device, without waiting.

    The keys that a run has before its first chunk become a piece without rows, so that the keys of all pieces still
    follow each other. The number of pieces depends on the lengths, which the host does not read. So there are as many
    as the shapes allow, and the last ones are empty.

    Args:
        num_rows: the most rows that the launch may have.

    >>> launch = KernelLaunch((torch.tensor([0, 4]), torch.tensor([0, 7])), (4, 7), slice(None), slice(None))
    >>> [bounds.tolist() for bounds in _in_chunks(launch, 4, 2).cu_seq_lens]
    [[0, 0, 1, 3, 4, 4], [0, 2, 4, 6, 7, 7]]
    """
    q_bounds, k_bounds = (bounds.long() for bounds in launch.cu_seq_lens)
    num_runs = len(q_bounds) - 1
    # Per run: its earlier keys, the chunk of its first row, its pieces, and the pieces up to its end
    num_earlier = k_bounds.diff() - q_bounds.diff()
    first_chunk = num_earlier // chunk
    num_pieces = 1 + (k_bounds.diff() + chunk - 1) // chunk - first_chunk
    piece_ends = num_pieces.cumsum(0)
    # Per piece: its run, its number in the run, and its first key, counted in the document
    index = torch.arange(num_rows // chunk + 3 * num_runs + 1, device=piece_ends.device)
    run = torch.searchsorted(piece_ends, index, right=True).clamp(max=num_runs - 1)
    piece = index - (piece_ends - num_pieces)[run]
    first_key = torch.where(piece > 0, (first_chunk[run] + piece - 1) * chunk, 0)
    rows = q_bounds[run] + (first_key - num_earlier[run]).clamp(min=0)
    is_piece = index < piece_ends[-1]
    rows = torch.where(is_piece, rows, q_bounds[-1]).to(torch.int32)
    keys = torch.where(is_piece, k_bounds[run] + first_key, k_bounds[-1]).to(torch.int32)
    # A piece without rows may have more keys than a chunk.
    most_keys = launch.max_lengths[1] if isinstance(launch.keys, Tensor) else chunk
    return launch._replace(cu_seq_lens=(rows, keys), max_lengths=(min(chunk, launch.max_lengths[0]), most_keys))
