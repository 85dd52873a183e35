"""Mixers of hybrid models where documents share prefixes: scans level by level, and the rows before each run.

The rows of a pack are cut where documents part. The pieces are the nodes of a forest: the parent of a piece ends with
the row before it in its documents. All pieces of one level are computed together, as rows of a batch that zeros pad,
which leave a state as it is. So the number of levels is the depth of the forest, and each row is computed once. In a
forest deeper than `MAX_LEVELS`, such as that of a long conversation with one sample per turn, a level has paths of
several pieces. Then the scan (and nothing else) runs again on the first pieces of paths that have them in common.
Gradients run through the states. Ranks do not share such a pack: a convolution would read rows of several other parts.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .packed_forward import PackedForward, once_per_pack
from .rows import group_by_length
from .runs import runs_of

# Most levels of a pack; each is at least one call of the scan, whose kernels take some time however few the rows.
# With one sample per turn of 64 turns, 8 levels scan 24,563 rows in 8 calls, 64 levels 7,805 in 64, and whole documents
# 126,760 in 2: 0.60, 0.43 and 5.4 CPU seconds of the gated delta rule, 0.85, 0.92 and 3.5 of Mamba-2. On a GPU a call
# of few rows leaves it idle, so fewer calls weigh more.
MAX_LEVELS = 8


class ScanCall(NamedTuple):
    """One call of a scan on T tokens of one row; all tensors have tokens in axis 1 and heads in axis 2.

    Attributes:
        values: tensors of H heads, (1, T, H) or (1, T, H, D).
        keys: tensors of G heads, each read by H / G neighbouring heads of values.
        parameters: one entry per head of values, or None.
        call: (values, keys, parameters, **options) -> (rows, T, H, D), and with states those after it.
        boundaries: name of the argument of boundaries, if the kernel takes one.
        states: names of the arguments with which rows begin with given states (None: zeros) and return theirs, if the
            kernel takes them. Zeros in all tensors leave a state as it is.
    """

    values: Sequence[Tensor]
    keys: Sequence[Tensor]
    parameters: Sequence[Tensor | None]
    call: Callable[..., Any]
    boundaries: str | None = None
    states: tuple[str, str] | None = None


class TreeLevel(NamedTuple):
    """All paths of one level.

    Attributes:
        batches: the calls of this level: of each place its row in the pack, or the number of rows for padding, (paths,
            longest).
        parents: for each path, in the order of the batches, the number of the path before it among all paths of the
            levels before, or -1. None at the first level.
    """

    batches: list[Tensor]
    parents: Tensor | None


def pieces_of(running: PackedForward) -> list[tuple[int, int, int]]:
    """The start, the stop and the number of the parent of each piece, or -1; in the order of rows."""
    assert running.kv_index is not None
    index = running.kv_index.tolist()
    runs = runs_of(running)
    # the last row of the same documents before each run
    before = {run.rows.start: index[run.keys.start + run.before - 1] if run.before else -1 for run in runs}
    cuts = sorted({*before, *(row + 1 for row in before.values() if row >= 0), runs[-1].rows.stop})
    ends = {stop - 1: number for number, (_, stop) in enumerate(pairwise(cuts))}  # by its last row, the piece
    return [(start, stop, ends.get(before.get(start, start - 1), -1)) for start, stop in pairwise(cuts)]


@once_per_pack
def levels_of(running: PackedForward) -> tuple[list[TreeLevel], Tensor]:
    """The levels of a pack, and where each row is in the outputs of all batches, laid end to end."""
    pieces = pieces_of(running)
    device = running.cu_seq_lens_q.device
    num_rows = pieces[-1][1]
    number: dict[int, int] = {}  # of each path by its last piece, in the order of calls
    place = torch.zeros(num_rows, dtype=torch.int64)
    levels = []
    end = 0
    for depth, paths in enumerate(_paths_of_level(pieces)):
        lengths = [sum(pieces[i][1] - pieces[i][0] for i in path) for path in paths]
        batches = []
        parents = []
        for group in group_by_length(lengths, num_rows):
            longest = lengths[group[0]]
            rows = torch.full((len(group), longest), num_rows)
            for line, path in enumerate(paths[i] for i in group):
                first = 0
                for start, stop, _ in (pieces[i] for i in path):
                    rows[line, first : first + stop - start] = torch.arange(start, stop)
                    place[start:stop] = torch.arange(stop - start) + end + line * longest + first
                    first += stop - start
                parents.append(number.get(pieces[path[0]][2], -1))
                number[path[-1]] = len(number)
            end += rows.numel()
            batches.append(rows.to(device))
        levels.append(TreeLevel(batches, torch.tensor(parents, device=device) if depth else None))
    return levels, place.to(device)


def _paths_of_level(pieces: list[tuple[int, int, int]]) -> list[list[list[int]]]:
    """The pieces of each level, as paths from the first piece of the level to one after which none of it comes.

    A level has one piece of each path, or as many as keep the levels of a deep forest at `MAX_LEVELS`.

    >>> [len(paths) for paths in _paths_of_level([(0, 5, -1), (5, 9, 0), (9, 12, 0)])]
    [1, 2]
    """
    depths: list[int] = []
    for _, _, parent in pieces:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    pieces_per_level = -(-(max(depths) + 1) // MAX_LEVELS)
    level = [depth // pieces_per_level for depth in depths]
    goes_on = {parent for i, (_, _, parent) in enumerate(pieces) if parent >= 0 and level[parent] == level[i]}
    paths: list[list[list[int]]] = [[] for _ in range(level[depths.index(max(depths))] + 1)]
    for i in range(len(pieces)):
        if i not in goes_on:
            path = [i]
            while (parent := pieces[path[0]][2]) >= 0 and level[parent] == level[i]:
                path.insert(0, parent)
            paths[level[i]].append(path)
    return paths


def run_levels(scan: ScanCall, running: PackedForward) -> Tensor:
    """Run a scan on a pack whose documents share prefixes: (1, T, H, D)."""
    if scan.states is None:
        raise ValueError(
            f"A pack of {len(running.lengths)} runs whose documents share prefixes came to a scan that cannot begin "
            'with the state of a prefix. Its documents must be whole. Set `share_prefixes="off"`.'
        )
    levels, place = levels_of(running)
    # a row of zeros behind, which batches read as padding
    padded = [torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], dim=1) for x in (*scan.values, *scan.keys)]
    num_values, (given, returned) = len(scan.values), scan.states
    outs: list[Tensor] = []
    states: list[Tensor] = []  # after all paths of the levels before
    for batches, parents in levels:
        starts = None if parents is None else torch.cat(states).index_select(0, parents)
        done = 0
        for rows in batches:
            inputs = [x[0].index_select(0, rows.flatten()).unflatten(0, rows.shape) for x in padded]
            more = {given: None if starts is None else starts[done : done + len(rows)], returned: True}
            out, end = scan.call(inputs[:num_values], inputs[num_values:], scan.parameters, **more)
            outs.append(out.flatten(0, 1))
            states.append(end)
            done += len(rows)
    return torch.cat(outs).index_select(0, place)[None]
