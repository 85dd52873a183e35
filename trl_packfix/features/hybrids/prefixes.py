"""Run the scans of hybrid models on packs whose documents share prefixes, level by level.

`mixers.py` calls `run_levels` with a scan: a function that carries a state from token to token, as in Mamba or in a
gated delta net. A *row* of a pack is the place of one token. In a pack with shared prefixes the rows of the common
beginning of several documents are there once. The *run* of a document is the rows that no document before it has. The
scan of a run that goes on from a prefix must begin with the state after the prefix.

First the rows of the pack are cut into *pieces*, wherever documents begin to differ. The pieces form a forest: the
parent of a piece is the piece before it in its documents.

    documents  A B C,  A B D,  A E          pieces  A, B, C, D, E

    level 0    A
    level 1    A -> B,  A -> E
    level 2    B -> C,  B -> D

Then the levels are computed one after the other. The pieces of a level are the *sequences* of batches, padded with
zeros, which leave a state as it is. Each piece begins with the state after its parent. So each row of the pack is
computed once, and the number of calls grows with the depth of the forest. Gradients run back through the states.

A long conversation with one document per turn makes a deep forest. If it is deeper than `MAX_LEVELS`, a level has
*paths* of several consecutive pieces instead of pieces. Two paths of a level may begin with the same piece, as A -> B
and A -> E if levels 0 and 1 above are one level. The scan then runs on this piece once for each of them.

Such a pack is never divided between ranks: the convolutions of the model would have to read rows of several ranks.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...attention.packed_forward import PackedForward, once_per_pack
from ...attention.rows import group_by_length
from ...attention.runs import runs_of

# The most levels of a pack. Each level is at least one call of the scan, and a call takes some time however few its
# rows. So fewer levels need fewer calls, but scan more rows. Measured on the CPU for a conversation of 64 turns, one
# document per turn:
#
#     levels           rows scanned  calls  gated delta rule  Mamba-2
#     8                      24,563      8            0.60 s   0.85 s
#     64                      7,805     64            0.43 s   0.92 s
#     whole documents       126,760      2             5.4 s    3.5 s
#
# 8 and 64 levels are close on the CPU. On a GPU, calls with few rows cost relatively more, which speaks for few levels.
MAX_LEVELS = 8


class ScanCall(NamedTuple):
    """A scan over T tokens in one sequence: its tensors, and how to call it.

    Axis 1 of `values` and `keys` is tokens, axis 2 heads.

    Attributes:
        values: tensors with H heads, (1, T, H) or (1, T, H, D).
        keys: tensors with G heads, (1, T, G, ...). Each head is read by H / G neighbouring heads of `values`.
        parameters: tensors with one entry per head of `values`, or None.
        call: (values, keys, parameters, **options) -> (sequences, T, H, D), for any number of sequences and any T. With
            the option for final states, it returns a pair: this output, and the states after the last token of each
            sequence.
        boundaries: the option by which `call` takes the documents of a sequence, "cu_seqlens" or "seq_idx"; None if it
            takes none.
        state_options: the names of two options of `call`: the states with which the sequences begin (None: zeros), and
            whether to return the states at the end. None if `call` has no such options. A token that is zero in all
            tensors leaves a state as it is.
    """

    values: Sequence[Tensor]
    keys: Sequence[Tensor]
    parameters: Sequence[Tensor | None]
    call: Callable[..., Any]
    boundaries: str | None = None
    state_options: tuple[str, str] | None = None


class Piece(NamedTuple):
    """Consecutive rows of a pack that belong to one set of documents: a node of the forest.

    Attributes:
        start, stop: the rows.
        parent: the index of the piece before this one in its documents; -1 if documents begin with this one.
    """

    start: int
    stop: int
    parent: int


class TreeLevel(NamedTuple):
    """All paths of one level of the forest.

    Attributes:
        batches: for each call of the scan the rows of its paths in the pack, (paths, longest path). Padding has the
            index after the last row of the pack.
        parents: for each path of the level, in the order of the batches, the index of the path that ends before it,
            counted over all paths of the earlier levels. None at the first level.
    """

    batches: list[Tensor]
    parents: Tensor | None


def pieces_of(running: PackedForward) -> list[Piece]:
    """Return the pieces of a pack in the order of their rows."""
    assert running.kv_index is not None
    # For each run, the rows that it reads: those of its prefix, then its own. The rows of all runs are laid end to end.
    # For example, the first run has the rows 0, 1 and 2, and the second run has row 3 behind the prefix of the rows 0
    # and 1. Then `kv_index` is [0, 1, 2, 0, 1, 3]
    row_of_key = running.kv_index.tolist()
    runs = runs_of(running)  # of each run its own rows, and as `keys` the slice of `kv_index` that belongs to it
    # By the first row of each run, the last row of its prefix (of `num_earlier_keys` rows); -1 without a prefix
    last_of_prefix = {}
    for run in runs:
        last_key = run.keys.start + run.num_earlier_keys - 1
        last_of_prefix[run.rows.start] = row_of_key[last_key] if run.num_earlier_keys else -1
    # Pieces begin where runs begin, and behind the last row of each prefix.
    behind_prefixes = {row + 1 for row in last_of_prefix.values() if row >= 0}
    cuts = sorted({*last_of_prefix, *behind_prefixes, runs[-1].rows.stop})
    piece_by_last_row = {stop - 1: i for i, (_, stop) in enumerate(pairwise(cuts))}
    pieces = []
    for start, stop in pairwise(cuts):
        # The first piece of a run goes on from the prefix of the run, any other piece from the row before it
        previous_row = last_of_prefix.get(start, start - 1)
        # Without a prefix the row is -1, with which no piece ends
        pieces.append(Piece(start, stop, piece_by_last_row.get(previous_row, -1)))
    return pieces


@once_per_pack
def levels_of(running: PackedForward) -> tuple[list[TreeLevel], Tensor]:
    """Return the levels of a pack, and where each of its rows is in the outputs of all batches, laid end to end."""
    pieces = pieces_of(running)
    device = running.cu_seq_lens_q.device
    num_rows = pieces[-1].stop
    path_by_last_piece: dict[int, int] = {}  # paths are numbered in the order of calls
    places = torch.zeros(num_rows, dtype=torch.int64)
    levels = []
    batch_start = 0  # where the output of the next batch begins among all outputs
    for depth, paths in enumerate(_paths_by_level(pieces)):
        rows_of_paths = [torch.cat([torch.arange(pieces[i].start, pieces[i].stop) for i in path]) for path in paths]
        batches = []
        parents = []
        # Each batch is a list of indices of `paths`, and has no more rows and padding than the pack has rows
        for batch_paths in group_by_length([*map(len, rows_of_paths)], budget=num_rows):
            rows = pad_sequence([rows_of_paths[i] for i in batch_paths], batch_first=True, padding_value=num_rows)
            for line, i in enumerate(batch_paths):  # path i is sequence `line` of the batch
                # A piece on several paths has equal outputs in each of them. The output on the last path is used
                first_place = batch_start + line * rows.shape[1]
                places[rows_of_paths[i]] = torch.arange(first_place, first_place + len(rows_of_paths[i]))
                # The path begins with a piece whose parent is in an earlier level. All children of this parent are as
                # deep as the piece, and so in its level. So the parent has no child in its own level, and is the last
                # piece of a path there. At the first level no piece has a parent, and `parents` is not used
                parents.append(path_by_last_piece.get(pieces[paths[i][0]].parent, -1))
                path_by_last_piece[paths[i][-1]] = len(path_by_last_piece)
            batch_start += rows.numel()
            batches.append(rows.to(device))
        levels.append(TreeLevel(batches, torch.tensor(parents, device=device) if depth else None))
    return levels, places.to(device)


def _paths_by_level(pieces: list[Piece]) -> list[list[list[int]]]:
    """Return the paths of each level, a path as a list of the indices of its pieces.

    A path begins with a piece whose parent is in an earlier level, and ends with a piece that has no child in the
    level. Every path is one piece, unless the forest is deeper than `MAX_LEVELS`.

    >>> _paths_by_level([Piece(0, 5, -1), Piece(5, 9, 0), Piece(9, 12, 0)])
    [[[0]], [[1], [2]]]
    """
    depths: list[int] = []  # of each piece in the forest; parents come before their children
    for piece in pieces:
        depths.append(0 if piece.parent < 0 else depths[piece.parent] + 1)
    pieces_per_path = -(-(max(depths) + 1) // MAX_LEVELS)
    levels = [depth // pieces_per_path for depth in depths]
    has_child_in_level = {
        piece.parent for i, piece in enumerate(pieces) if piece.parent >= 0 and levels[piece.parent] == levels[i]
    }
    paths: list[list[list[int]]] = [[] for _ in range(max(levels) + 1)]
    for i in range(len(pieces)):
        if i not in has_child_in_level:
            path = [i]
            parent = pieces[i].parent
            while parent >= 0 and levels[parent] == levels[i]:
                path.insert(0, parent)
                parent = pieces[parent].parent
            paths[levels[i]].append(path)
    return paths


def run_levels(scan: ScanCall, running: PackedForward) -> Tensor:
    """Run a scan on a pack whose documents share prefixes: (1, T, H, D).

    Raises:
        ValueError: the scan cannot begin with the state after a prefix.
    """
    if scan.state_options is None:
        raise ValueError(
            f"A pack of {len(running.lengths)} runs whose documents share prefixes came to a scan that cannot begin "
            'with the state of a prefix. Its documents must be whole. Set `share_prefixes="off"`.'
        )
    levels, places = levels_of(running)
    # Behind the last row of the pack comes a row of zeros, which batches read as padding.
    padded = [torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], dim=1) for x in (*scan.values, *scan.keys)]
    num_values = len(scan.values)
    initial_option, final_option = scan.state_options
    outs: list[Tensor] = []
    final_states: list[Tensor] = []  # the states after the paths of each call so far
    for batches, parents in levels:
        initial_states = None if parents is None else torch.cat(final_states).index_select(0, parents)
        first_path = 0
        for rows in batches:
            inputs = [x[0].index_select(0, rows.flatten()).unflatten(0, rows.shape) for x in padded]
            initial = None if initial_states is None else initial_states[first_path : first_path + len(rows)]
            options = {initial_option: initial, final_option: True}
            out, final = scan.call(inputs[:num_values], inputs[num_values:], scan.parameters, **options)
            outs.append(out.flatten(0, 1))
            final_states.append(final)
            first_path += len(rows)
    return torch.cat(outs).index_select(0, places)[None]
