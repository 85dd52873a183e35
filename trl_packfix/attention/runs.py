"""Compute causal attention of packs whose documents share prefixes, and, on CUDA, of all packs.

`varlen.py` calls `attend_shared_on_cpu` or `attend_pack_on_cuda` with the queries, keys and values of a pack: several
documents, end to end in T rows. These functions prepare the calls of the kernels, which `flash.py` (CPU) and
`kernels.py` (CUDA) run. A call of the kernel on CUDA is a *launch*. It computes all documents of the pack, or some.

Where documents begin alike, the pack has their common prefix once (`features/prefixes` builds such packs). The
rows of a document behind its prefix are a *run*. A run attends to its prefix, and causally to itself. `kv_index` lists
the rows that are the keys of each run, run after run: first its prefix, then its own rows. In a pack without shared
prefixes `kv_index` is None, and each run is a whole document.

    documents P B and P C, prefix P       rows     P B C
                                          runs     P B, C          (the first document has no prefix before it)
                                          keys     P B, P C

    CPU     the flash kernel: each run attends to itself, then to its prefix, and both outputs are merged
    CUDA    FlashAttention-2 as built into torch, on the keys of all runs, copied end to end: one launch, or several
            launches that copy at most `COPIED_BYTES` each

The attention of transformers and ffpa-attn cannot look up shared keys, so their packs have every document whole. The
copies are not saved for backward. The gradients of a key are summed over all runs that read it, in at least fp32. With
`torch.use_deterministic_algorithms` torch sums them in one order.

With *chunks* of c tokens (Llama 4) a query attends only to keys of its own chunk. Chunks are counted from the first
token of the document.

Shapes: T rows, H query heads, G key/value heads, D head dimension.
    query (1, H, T, D), key (1, G, T, D), value (1, G, T, D_value) -> (1, H, T, D_value)
"""

from functools import partial
from itertools import pairwise
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from .dense import attend_dense, uses_dense
from .flash import KernelOptions, RowsAndKeys, flash_on_cpu
from .kernels import KernelLaunch, attend_on_cuda, limit_if_shorter
from .packed_forward import PackedForward, once_per_pack

# The most bytes that the copied keys and values of one launch on CUDA take, together with their gradients in backward.
# Only one layer at a time holds such copies.
COPIED_BYTES = 2**30


@once_per_pack  # all layers of a forward get the cached result
def runs_of(pack: PackedForward) -> list[RowsAndKeys]:
    """Return the runs of a pack with shared prefixes. The keys of a run are a slice of `kv_index`.

    Collators may add empty runs at the end of the boundaries, so that `cu_seq_lens_q` has the same shape in all packs.
    Empty runs are left out, so run i is between the boundaries i and i + 1. If the pack is on a device and has no
    `run_lengths`, the host waits for the device.

    Raises:
        ValueError: boundaries and `kv_index` contradict each other. This is checked on the CPU only.
    """
    assert pack.kv_index is not None
    on_cpu = pack.kv_index.device.type == "cpu"
    if on_cpu or pack.run_lengths is None:
        q_bounds = pack.cu_seq_lens_q.cpu().numpy()
        k_bounds = pack.cu_seq_lens_k.cpu().numpy()
    else:
        ends = pack.run_lengths.numpy().cumsum(axis=0)  # of rows and keys, (runs, 2)
        q_bounds, k_bounds = np.pad(ends, ((1, 0), (0, 0))).T
    if on_cpu:
        _check_kv_index(pack.kv_index.numpy(), q_bounds, k_bounds)
    return _runs_between(q_bounds, k_bounds)


def _runs_between(q_bounds: np.ndarray, k_bounds: np.ndarray) -> list[RowsAndKeys]:
    """Return the runs with these boundaries of rows and of keys, (runs + 1,) each. Runs without rows are left out."""
    spans = zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True)
    return [RowsAndKeys(slice(*rows), slice(*keys)) for rows, keys in spans if rows[0] < rows[1]]


def _check_kv_index(index: np.ndarray, q_bounds: np.ndarray, k_bounds: np.ndarray) -> None:
    """Refuse a `kv_index` unless the keys of each run are rows before the run, and then the rows of the run.

    Args:
        index: `kv_index`.
        q_bounds: where the rows of each run begin, (runs + 1,).
        k_bounds: where the keys of each run begin in `index`, (runs + 1,).

    Raises:
        ValueError: the keys of a run are other rows.
    """
    num_rows = np.diff(q_bounds)
    num_keys = np.diff(k_bounds)
    bounds_match = len(num_rows) == len(num_keys) and k_bounds[-1] == len(index)
    is_valid = bounds_match and (num_rows >= 0).all() and (num_rows <= num_keys).all()
    if is_valid:
        # For each key: the first row of its run, and whether the key is a row of the run
        first_row = np.repeat(q_bounds[:-1], num_keys)
        first_own_key = np.repeat(k_bounds[1:] - num_rows, num_keys)
        is_own_row = np.arange(len(index)) >= first_own_key
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
    """Compute causal attention of each run to its keys on the CPU, for packs with a `kv_index`: (1, H, T, D_value).

    Args:
        chunk: tokens of a chunk; None without chunks.
    """
    assert pack.kv_index is not None, "documents share no rows"
    runs = runs_of(pack)
    if chunk is not None:
        bounds = (pack.cu_seq_lens_q, pack.cu_seq_lens_k)
        longest = (pack.max_length_q, pack.max_length_k)
        whole = KernelLaunch(bounds, longest, queries=slice(None), keys=pack.kv_index)
        pieces = _cut_launch_at_chunks(whole, query.shape[2], chunk)
        q_bounds, k_bounds = (bounds.numpy() for bounds in pieces.cu_seq_lens)
        runs = _runs_between(q_bounds, k_bounds)
    return flash_on_cpu(query, key, value, runs, pack.kv_index, **options)


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
        options: the scale of the logits, the window and the sinks (`KernelOptions`).
    """
    num_rows = query.shape[2]
    launches = launches_of(pack, num_rows, most_copied_keys(query, key, value))
    scale = options["scale"]
    has_window = limit_if_shorter(options.get("window"), pack.max_length_k) is not None
    if chunk is None and not has_window and options.get("sinks") is None:
        # Plain causal attention. A pack that is one long document may run on cuDNN. `uses_dense` measures both kernels
        # once, and needs a function that runs the FlashAttention-2 kernel for this.
        attend_on_flash = partial(_attend_one_document, scale=scale)
        if uses_dense((query, key, value), pack, scale=scale, attend_on_flash=attend_on_flash):
            return attend_dense(query, key, value, scale=scale)
    if chunk is not None:
        launches = [_cut_launch_at_chunks(launch, num_rows, chunk) for launch in launches]
    return attend_on_cuda(query, key, value, launches, **options)


def _attend_one_document(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute causal attention of one document on the FlashAttention-2 kernels: (1, H, T, D_value)."""
    length = query.shape[2]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=query.device)
    all_rows = slice(None)
    launch = KernelLaunch((bounds, bounds), (length, length), queries=all_rows, keys=all_rows)
    return attend_on_cuda(query, key, value, [launch], scale=scale)


def most_copied_keys(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return how many keys may be copied for one launch, so that copies and gradients fit into `COPIED_BYTES`.

    Each key head is counted twice: for its copy and for its gradient. Where several query heads read one key head, the
    kernel first computes a gradient per query head, so the query heads are counted, too.
    """
    heads = 2 * key.shape[1] + (query.shape[1] if query.shape[1] > key.shape[1] else 0)
    bytes_per_number = 2  # half precision
    return COPIED_BYTES // (heads * (key.shape[-1] + value.shape[-1]) * bytes_per_number)


def launches_of(pack: PackedForward, num_rows: int, most_keys: int = 0) -> list[KernelLaunch]:
    """Return the launches of a pack.

    Args:
        num_rows: rows of the pack, T.
        most_keys: the most keys that one launch copies, where documents share prefixes. A run with more keys gets a
            launch by itself. Not read in other packs.

    Raises:
        ValueError: the longest document has more tokens than the pack has rows.
    """
    bounds = (pack.cu_seq_lens_q, pack.cu_seq_lens_k)
    longest = (pack.max_length_q, pack.max_length_k)
    # This check reads numbers on the host only. To read `cu_seq_lens` itself, the host would wait for the device. There
    # may be more documents than rows, because collators may add empty ones.
    if max(longest) > num_rows:
        raise ValueError(
            f"the boundaries describe {bounds[0].numel() - 1} documents of up to {max(longest)} tokens, and the pack "
            f"has {num_rows} tokens: the kernel would read beyond them. Pass the boundaries of this pack, as "
            "PackedDataCollator returns them."
        )
    if pack.launches:  # the collator has planned one for each class of document lengths
        return _launches_by_length(pack)
    all_rows = slice(None)
    if pack.kv_index is None:
        return [KernelLaunch(bounds, longest, queries=all_rows, keys=all_rows)]
    # To divide a pack the host must know the lengths of its runs. torch.compile would need a graph for each number of
    # launches, so compiled code does not divide it.
    can_be_divided = not torch.compiler.is_compiling() and pack.run_lengths is not None
    if not can_be_divided or len(pack.kv_index) <= most_keys:
        return [KernelLaunch(bounds, longest, queries=all_rows, keys=pack.kv_index)]
    return _launches_by_keys(pack, most_keys)


@once_per_pack
def _launches_by_length(pack: PackedForward) -> list[KernelLaunch]:
    """Return the launches that `pack.launches` lists, each for neighbouring documents of similar length."""
    assert pack.kv_index is None, "a launch by length reads the keys of its own rows, and none of prefixes"
    launches = []
    for first_document, stop_document, first_token, stop_token, longest in pack.launches:
        bounds = pack.cu_seq_lens_q[first_document : stop_document + 1] - first_token
        rows = slice(first_token, stop_token)
        launches.append(KernelLaunch((bounds, bounds), (longest, longest), queries=rows, keys=rows))
    return launches


@once_per_pack
def _launches_by_keys(pack: PackedForward, most_keys: int) -> list[KernelLaunch]:
    """Return launches of consecutive runs, each with at most `most_keys` keys, or with one run that has more keys."""
    assert pack.kv_index is not None
    # A run has the same number here as in the boundaries: collators put empty runs, which are left out, at the end.
    runs = runs_of(pack)
    launch_starts = [0]  # the first run of each launch
    for i, run in enumerate(runs):
        first_run = launch_starts[-1]
        num_keys = run.keys.stop - runs[first_run].keys.start
        if i > first_run and num_keys > most_keys:
            launch_starts.append(i)
    launches = []
    for first_run, stop_run in pairwise([*launch_starts, len(runs)]):
        launch_runs = runs[first_run:stop_run]
        rows = slice(launch_runs[0].rows.start, launch_runs[-1].rows.stop)
        keys = slice(launch_runs[0].keys.start, launch_runs[-1].keys.stop)
        # The boundaries of the same runs: empty runs, which `runs` lacks, are only at the end
        q_bounds = pack.cu_seq_lens_q[first_run : stop_run + 1] - rows.start
        k_bounds = pack.cu_seq_lens_k[first_run : stop_run + 1] - keys.start
        max_lengths = max(run.num_rows for run in launch_runs), max(run.num_keys for run in launch_runs)
        launches.append(KernelLaunch((q_bounds, k_bounds), max_lengths, queries=rows, keys=pack.kv_index[keys]))
    return launches


def _cut_launch_at_chunks(launch: KernelLaunch, num_rows: int, chunk: int) -> KernelLaunch:
    """Cut the runs of a launch into pieces, one for each chunk of their documents.

    It is done on the device, so that the host does not wait. The number of pieces depends on the lengths of the runs,
    which the host does not read. So there are as many pieces as the shapes allow, and the last ones are empty.

    The first piece of each run has no rows. Its keys are the keys of the prefix that are in chunks before the first
    row of the run, which no row attends to. With this piece the keys of all pieces still follow each other.

    Args:
        num_rows: the most rows that the launch may have.

    Returns:
        The launch with the boundaries of the pieces instead of the runs.

    >>> launch = KernelLaunch((torch.tensor([0, 4]), torch.tensor([0, 7])), (4, 7), slice(None), slice(None))
    >>> [bounds.tolist() for bounds in _cut_launch_at_chunks(launch, 4, 2).cu_seq_lens]
    [[0, 0, 1, 3, 4, 4], [0, 2, 4, 6, 7, 7]]
    """
    q_bounds, k_bounds = (bounds.long() for bounds in launch.cu_seq_lens)
    num_runs = len(q_bounds) - 1
    # 1. For each run: the number of keys before its rows, the chunk of its first row, and the number of its pieces
    num_keys = k_bounds.diff()
    num_earlier = num_keys - q_bounds.diff()
    first_chunk = num_earlier // chunk
    num_chunks = (num_keys + chunk - 1) // chunk
    num_pieces = 1 + num_chunks - first_chunk
    piece_ends = num_pieces.cumsum(0)  # the pieces up to the end of the run
    # 2. For each piece: its run, its number in the run, and its first key, counted in the document. A run of n rows has
    # rows in at most n // chunk + 2 chunks, and one piece without rows, so n // chunk + 3 pieces. One more entry holds
    # the end of the last piece.
    index = torch.arange(num_rows // chunk + 3 * num_runs + 1, device=piece_ends.device)
    run = torch.searchsorted(piece_ends, index, right=True).clamp(max=num_runs - 1)
    piece = index - (piece_ends - num_pieces)[run]
    first_key = torch.where(piece > 0, (first_chunk[run] + piece - 1) * chunk, 0)
    # 3. Where the rows and the keys of each piece begin. Surplus pieces begin at the end.
    first_row = q_bounds[run] + (first_key - num_earlier[run]).clamp(min=0)
    is_piece = index < piece_ends[-1]
    rows = torch.where(is_piece, first_row, q_bounds[-1]).to(torch.int32)
    keys = torch.where(is_piece, k_bounds[run] + first_key, k_bounds[-1]).to(torch.int32)
    # With shared prefixes, a piece without rows may have more keys than a chunk.
    has_prefixes = isinstance(launch.keys, Tensor)
    most_keys = launch.max_lengths[1] if has_prefixes else chunk
    return launch._replace(cu_seq_lens=(rows, keys), max_lengths=(min(chunk, launch.max_lengths[0]), most_keys))
