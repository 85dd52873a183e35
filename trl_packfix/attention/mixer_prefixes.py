"""Scans of hybrid models where documents share prefixes: level by level, each from the state of its parent.

The rows of a pack are cut where documents part. The pieces are the nodes of a forest: the parent of a piece ends with
the row before it in its documents. All pieces of one level are computed together, as rows of a batch that zeros pad,
which leave a state as it is. So the number of calls is the depth of the forest, and each row is computed once.
Gradients run through the states.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rows import group_by_length

if TYPE_CHECKING:
    from .forwards import PackedForward
    from .mixers import Scan


@dataclass(frozen=True)
class Batch:
    """Pieces of one level that share a call.

    Attributes:
        source: for each place of the batch its row in the pack, or the number of rows for padding, (pieces, longest).
    """

    source: Tensor


@dataclass(frozen=True)
class Level:
    """All pieces of one level.

    Attributes:
        batches: the calls of this level.
        parents: for each piece, in the order of the batches, the number of its parent among all pieces before. None at
            the first level.
    """

    batches: list[Batch]
    parents: Tensor | None


@dataclass(frozen=True)
class Levels:
    """The pieces of a pack, and where each row is in the outputs of all batches, laid end to end."""

    levels: list[Level]
    place: Tensor


def pieces_of(running: "PackedForward") -> list[tuple[int, int, int]]:
    """The start, the stop and the number of the parent of each piece, or -1; in the order of rows."""
    assert running.shared is not None and running.kv_index is not None
    index, runs = running.kv_index.tolist(), running.shared.runs
    # the last row of the same documents before each run
    before = {run.rows.start: index[run.keys.start + run.before - 1] if run.before else -1 for run in runs}
    cuts = sorted({*before, *(row + 1 for row in before.values() if row >= 0), runs[-1].rows.stop})
    ends = {stop - 1: number for number, (_, stop) in enumerate(pairwise(cuts))}  # by its last row, the piece
    return [(start, stop, ends.get(before.get(start, start - 1), -1)) for start, stop in pairwise(cuts)]


def levels_of(running: "PackedForward") -> Levels:
    """The levels of a pack; once per pack."""
    if "levels" in running.derived:
        return running.derived["levels"]
    pieces, device = pieces_of(running), running.cu_seq_lens_q.device
    num_rows = pieces[-1][1]
    depths: list[int] = []
    for _, _, parent in pieces:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    number: dict[int, int] = {}  # of each piece, in the order of calls
    place = torch.zeros(num_rows, dtype=torch.int64)
    levels, end = [], 0
    for depth in range(max(depths) + 1):
        own = [i for i in range(len(pieces)) if depths[i] == depth]
        groups = group_by_length([pieces[i][1] - pieces[i][0] for i in own], num_rows)
        batches, parents = [], []
        for group in groups:
            members = [own[i] for i in group]
            longest = pieces[members[0]][1] - pieces[members[0]][0]
            source = torch.full((len(members), longest), num_rows)
            for row, i in enumerate(members):
                start, stop, parent = pieces[i]
                source[row, : stop - start] = torch.arange(start, stop)
                place[start:stop] = torch.arange(stop - start) + end + row * longest
                parents.append(number.get(parent, -1))
            end += source.numel()
            batches.append(Batch(source.to(device)))
        for i in (own[each] for group in groups for each in group):
            number[i] = len(number)
        levels.append(Level(batches, torch.tensor(parents, device=device) if depth else None))
    running.derived["levels"] = Levels(levels, place.to(device))
    return running.derived["levels"]


def run_levels(scan: "Scan", running: "PackedForward") -> Tensor:
    """Run a scan on a pack whose documents share prefixes: (1, T, H, D).

    Raises:
        ValueError: the scan cannot begin with a state.
    """
    if scan.from_states is None or running.degree > 1:
        why = "cannot begin with the state of a prefix" if scan.from_states is None else "runs on several ranks"
        raise ValueError(
            f"A pack of {len(running.lengths)} runs whose documents share prefixes came to a scan that {why}. Its "
            'documents must be whole. Set `share_prefixes="off"`.'
        )
    found = levels_of(running)
    padded = [torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], dim=1) for x in (*scan.values, *scan.keys)]
    num_values = len(scan.values)
    outs: list[Tensor] = []
    states: Tensor | None = None
    for level in found.levels:
        starts = None if level.parents is None or states is None else states.index_select(0, level.parents)
        ends, done = [], 0
        for batch in level.batches:
            rows = [x[0].index_select(0, batch.source.flatten()).unflatten(0, batch.source.shape) for x in padded]
            start = None if starts is None else starts[done : done + len(batch.source)]
            out, end = scan.from_states(rows[:num_values], rows[num_values:], scan.parameters, start)
            outs.append(out.flatten(0, 1))
            ends.append(end)
            done += len(batch.source)
        states = torch.cat(ends if states is None else [states, *ends])
    return torch.cat(outs).index_select(0, found.place)[None]
