"""Sample a plan for display: a histogram of the lengths of all documents, and the first packs. numpy only.

The report prints the histogram. The pictures show the histogram and the packs.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ..data.collator import IGNORE_INDEX
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.prefix_collator import PrefixCollator
from ..data.reader import Rows
from ..planning.arrays import Int64Array
from ..planning.schedule import rank_costs

NUM_BINS = 24
NUM_PACKS = 8
NUM_MICRO_STEPS = 8
SHADES = " .:-=+*#%@"  # ASCII, for any terminal and log file


@dataclass(frozen=True)
class LengthHistogram:
    """Documents by length in tokens, before documents are cut.

    Attributes:
        edges: bin i holds lengths from `edges[i]` up to, but not including, `edges[i + 1]`; evenly spaced on a
            logarithmic scale.
        counts: documents in each bin, one fewer than edges.
        median, p99: tokens that half and 99 % of the documents do not exceed.
    """

    edges: list[int]
    counts: list[int]
    shortest: int
    median: int
    p99: int
    longest: int

    def line(self) -> str:
        """One line of text, the height of each bin as a shade.

        >>> length_histogram(np.array([1, 2, 2, 4])).line()
        '1 [+@ +] 4; half have at most 2, 99 % at most 4'
        """
        # ceil: a bin with any document is never blank
        heights = [-(-count * (len(SHADES) - 1) // max(self.counts)) for count in self.counts]
        bars = "".join(SHADES[height] for height in heights)
        return (
            f"{self.shortest:,} [{bars}] {self.longest:,}; half have at most {self.median:,}, 99 % at most {self.p99:,}"
        )


def length_histogram(lengths: Int64Array) -> LengthHistogram:
    """Bins of even width on a logarithmic scale; lengths in tokens, shape (N,), at least one above 0.

    Empty documents are not counted. It needs 8 bytes of memory per token of the longest document.
    """
    per_length = np.bincount(lengths)
    per_length[0] = 0
    up_to = np.cumsum(per_length)
    at = [int(np.searchsorted(up_to, rank)) for rank in np.ceil(np.array([0, 0.5, 0.99]) * up_to[-1]).clip(min=1)]
    (shortest, median, p99), longest = at, len(per_length) - 1
    edges = np.unique(np.rint(np.geomspace(shortest, longest + 1, NUM_BINS + 1)).astype(np.int64))
    counts = np.add.reduceat(per_length, edges[:-1])
    return LengthHistogram(edges.tolist(), counts.tolist(), shortest, median, p99, longest)


@dataclass(frozen=True)
class PackSample:
    """The documents of one micro-batch, in order. With shared prefixes they are sorted by their tokens.

    Attributes:
        step, micro, rank: its optimizer step, its micro-batch in this step, its data-parallel rank.
        degree: ranks that share it, from `rank` on.
        documents: indices of the documents in the planner.
        rows: table row of each document.
        lengths: tokens of each document.
        trained: for each document, the runs of trained tokens as (first, one after the last) from its start.
        shared: tokens of each document whose rows are those of the document before it; empty if nothing is shared.
    """

    step: int
    micro: int
    rank: int
    documents: list[int]
    rows: list[int]
    lengths: list[int]
    trained: list[list[tuple[int, int]]]
    degree: int = 1
    shared: list[int] = field(default_factory=list)

    @property
    def runs(self) -> list[int]:
        """Rows of each document that no document before it has."""
        return [n - s for n, s in zip(self.lengths, self.shared or [0] * len(self.lengths), strict=True)]

    def paths(self) -> list[list[tuple[int, int]]]:
        """For each document the rows that it sees, as (first, one after the last) of stretches; the last is its run.

        >>> PackSample(0, 0, 0, [0, 1], [0, 1], [4, 5], [[], []], shared=[0, 2]).paths()
        [[(0, 4)], [(0, 2), (4, 7)]]
        """
        paths: list[list[tuple[int, int]]] = []
        start = 0
        for run, length in zip(self.runs, self.lengths, strict=True):
            left, path = length - run, []
            for first, end in paths[-1] if left else ():
                if left > 0:
                    path.append((first, min(end, first + left)))
                    left -= end - first
            paths.append([*path, (start, start + run)])
            start += run
        return paths

    def place(self, accumulation: int, world_size: int) -> str:
        """Step, and micro-batch and rank if there are several: "step 3", "step 3.1, rank 2", "step 3.1, ranks 4-7"."""
        micro = f".{self.micro}" if accumulation > 1 else ""
        rank = f", rank {self.rank}" if world_size > 1 else ""
        if self.degree > 1:
            rank = f", ranks {self.rank}-{self.rank + self.degree - 1}"
        return f"step {self.step}{micro}{rank}"

    def parts(self, num_rows: int | None = None) -> list[tuple[int, int]]:
        """First row, and one after the last, of the part of each rank; the last may hold padding, too.

        Args:
            num_rows: of the pack, if known. Else all rows that documents do not share, also if they are not computed.

        >>> PackSample(0, 0, 4, [7], [7], [10], [[]], degree=4).parts()
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        """
        total = sum(self.runs) if num_rows is None else num_rows
        size = -(-total // self.degree)
        return [(min(i * size, total), min((i + 1) * size, total)) for i in range(self.degree)]


@dataclass(frozen=True)
class PlanSample:
    """The beginning of the first epoch.

    Attributes:
        packs: some micro-batches of the first optimizer steps, from the first rank and micro-batch to the last.
        costs: modelled FLOPs of each of the first micro-steps and each rank.
    """

    packs: list[PackSample]
    costs: list[list[float]]


def plan_sample(planner: EpochPlanner, reader: Rows, num_packs: int = NUM_PACKS) -> PlanSample:
    """`num_packs` micro-batches that hold a document, and the costs of the first micro-steps.

    If a step has more micro-batches than that, they are evenly spaced over the first step, because within a step the
    most expensive packs come first.
    """
    documents, schedule = planner.documents, planner.schedule(0)
    accumulation, world_size = planner.packing.accumulation, planner.packing.world_size
    filled = np.flatnonzero(np.diff(schedule.offsets))
    of_step = accumulation * world_size
    if schedule.degrees is not None:  # the first rank of each group has its documents
        of_step = int(np.searchsorted(filled, of_step))
    filled = filled[: max(num_packs, of_step)]
    filled = filled[np.arange(min(num_packs, len(filled))) * len(filled) // min(num_packs, len(filled))]
    packs = [schedule.order[schedule.offsets[slot] : schedule.offsets[slot + 1]] for slot in filled]
    shared: list[list[int]] = [[] for _ in packs]
    if planner.packing.share_prefixes != "off":
        packs, shared = _sorted_packs(packs, documents, reader)
    offsets = schedule.offsets[: -(-NUM_MICRO_STEPS // accumulation) * accumulation * world_size + 1]
    degrees = None if schedule.degrees is None else schedule.degrees[: (len(offsets) - 1) // world_size]
    first = replace(schedule, order=schedule.order[: offsets[-1]], offsets=offsets, degrees=degrees)
    costs = rank_costs(first, planner.units().costs_of_documents())
    return PlanSample(
        [
            PackSample(
                int(slot) // world_size // accumulation,
                int(slot) // world_size % accumulation,
                int(slot) % world_size,
                pack.tolist(),
                documents.row[pack].tolist(),
                documents.lengths[pack].tolist(),
                [_trained_runs(reader, documents.row[i], documents.start[i], stop=documents.stop[i]) for i in pack],
                1 if schedule.degrees is None else int(schedule.degrees[slot // world_size]),
                common,
            )
            for slot, pack, common in zip(filled, packs, shared, strict=True)
        ],
        costs.reshape(-1, world_size)[:NUM_MICRO_STEPS].tolist(),
    )


def _sorted_packs(
    packs: list[Int64Array], documents: Documents, reader: Rows
) -> tuple[list[Int64Array], list[list[int]]]:
    """The packs as the collator sorts them, and what each document shares with the one before it."""
    sorted_packs, shared = [], []
    for pack in packs:
        read = [reader.read(documents.row[i], documents.start[i], documents.stop[i]) for i in pack]
        order, common = PrefixCollator(compare=reader.compare).order(read)
        sorted_packs.append(pack[order] if any(common) else pack)
        shared.append(common if any(common) else [])
    return sorted_packs, shared


def _trained_runs(reader: Rows, row: int, start: int, *, stop: int) -> list[tuple[int, int]]:
    trained = reader.read(row, start, stop)["labels"] != IGNORE_INDEX
    trained[0] = False  # the first token of a document is never a target
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
