"""The parts of a report that only some runs have, and the lengths: how each is counted, and its line."""

from dataclasses import dataclass, replace

import numpy as np

from ..data.epochs import EpochPlanner
from ..data.stream import PackedStream
from ..data.stream_state import StreamCounts
from ..planning.arrays import Int64Array
from ..planning.degrees import modelled_time
from ..planning.parallel import SequenceParallel
from ..planning.schedule import Schedule, imbalance

NUM_BINS = 24
SHADES = " .:-=+*#%@"  # ASCII, for any terminal and log file


@dataclass(frozen=True)
class SharedPacks:
    """The ranks that share packs: in the first epoch of a table, modelled, or in the steps of a stream so far.

    Attributes:
        tokens_per_rank: most tokens of a pack on one rank.
        smallest_degree: ranks that a document of `max_length` needs.
        micro_steps: number of micro-steps by degree.
        exchange_share: share of the time in the exchange between the ranks of a group; None for a stream.
        largest_part: tokens of the largest part of a pack on one rank; None for a stream.
    """

    tokens_per_rank: int
    smallest_degree: int
    micro_steps: dict[int, int]
    exchange_share: float | None = None
    largest_part: int | None = None

    @classmethod
    def of_table(cls, planner: EpochPlanner, parallel: SequenceParallel, schedule: Schedule) -> "SharedPacks":
        """Of the first epoch, whose units have this schedule."""
        units = planner.units()
        time = modelled_time(schedule, units, parallel)
        total = np.concatenate([[0], np.cumsum(units.rows[schedule.order])])
        packs = np.diff(total[schedule.offsets]).reshape(-1, planner.packing.world_size)
        degrees, counts = np.unique(schedule.degrees, return_counts=True)
        return cls(
            tokens_per_rank=parallel.tokens_per_rank,
            smallest_degree=parallel.smallest,
            micro_steps=dict(zip(degrees.tolist(), counts.tolist(), strict=True)),
            exchange_share=float(time.exchange.sum() / time.seconds.sum()),
            largest_part=int((-(-packs // schedule.degrees[:, None])).max()),
        )

    @classmethod
    def of_stream(cls, parallel: SequenceParallel, micro_steps: dict[int, int]) -> "SharedPacks":
        return cls(parallel.tokens_per_rank, parallel.smallest, micro_steps)

    @property
    def histogram(self) -> str:
        """Micro-steps by degree.

        >>> SharedPacks(16384, 8, {1: 30, 8: 10}).histogram
        '1: 30, 8: 10'
        """
        return ", ".join(f"{degree}: {count:,}" for degree, count in sorted(self.micro_steps.items()))

    def line(self) -> str:
        largest = "" if self.largest_part is None else f"; the largest part of a rank has {self.largest_part:,} tokens"
        return f"micro-steps by degree (ranks that share a pack): {self.histogram}{largest}"


@dataclass(frozen=True)
class ImageNumbers:
    """The images of the documents, and what they cost in the first epoch, modelled.

    Attributes:
        num_images, num_documents: images, and documents with any.
        per_pack, most: images in a pack, mean and largest number.
        tower_share: share of the vision tower in the FLOPs; None if its cost is not known.
        tower_imbalance, language_imbalance: imbalance of the vision tower and of the language model, each by itself.
            Ranks are balanced by the sum of both.
        most_waiting: of a stream, documents and bytes after which no other document is read; None for a table.
    """

    num_images: int
    num_documents: int
    per_pack: float
    most: int
    tower_share: float | None = None
    tower_imbalance: float | None = None
    language_imbalance: float | None = None
    most_waiting: tuple[int, int] | None = None

    @classmethod
    def of_table(cls, planner: EpochPlanner) -> "ImageNumbers | None":
        """Of the first epoch; None for rows without."""
        counts = planner.documents.image_count
        if counts is None:
            return None
        schedule, costs = planner.schedule(0), planner.image_costs
        total = np.concatenate([[0], np.cumsum(counts[schedule.order])])
        packs = np.diff(total[schedule.offsets])[np.diff(schedule.offsets) > 0]
        images = cls(int(counts.sum()), int((counts > 0).sum()), float(packs.mean()), int(packs.max()))
        if costs is None or not costs.any():
            return images
        language, synchronisation = (
            planner.packing.cost_model(planner.documents.lengths),
            planner.packing.synchronisation,
        )
        return replace(
            images,
            tower_share=float(costs.sum() / (costs.sum() + language.sum())),
            tower_imbalance=imbalance(schedule, costs, synchronisation),
            language_imbalance=imbalance(schedule, language, synchronisation),
        )

    @classmethod
    def of_stream(cls, stream: PackedStream, counts: StreamCounts) -> "ImageNumbers | None":
        """Of the packs so far; None for rows without."""
        if stream.images is None:
            return None
        flops = counts.tower_flops + counts.language_flops
        return cls(
            counts.images,
            counts.with_images,
            counts.images / max(counts.packs, 1),
            counts.most_images,
            tower_share=counts.tower_flops / flops if counts.tower_flops else None,
            most_waiting=(stream.packing.buffer_size, stream.most_bytes),
        )

    def line(self) -> str:
        tower = "cost not known, so not balanced"
        if self.tower_share is not None:
            tower = f"{self.tower_share:.1%} of the modelled FLOPs"
        text = (
            f"{self.num_images:,} in {self.num_documents:,} documents; {self.per_pack:.1f} in a pack, at most "
            f"{self.most:,}; vision tower: {tower}"
        )
        if self.most_waiting is None:
            return text
        documents, size = self.most_waiting
        waiting = f"at most {documents:,} documents, or {size / 2**20:,.0f} MiB of encoded images, wait on a rank"
        return f"{text}; {waiting}" if self.num_images else waiting

    def imbalances(self) -> str:
        """What the line of imbalance adds."""
        if self.tower_imbalance is None:
            return ""
        return (
            f"; of the language model alone {self.language_imbalance:.3f}, of the vision tower alone "
            f"{self.tower_imbalance:.3f}"
        )


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

    @classmethod
    def of(cls, lengths: Int64Array) -> "LengthHistogram":
        """Of lengths in tokens, shape (N,), at least one above 0. Empty documents are not counted.

        It needs 8 bytes of memory per token of the longest document.
        """
        per_length = np.bincount(lengths)
        per_length[0] = 0
        up_to = np.cumsum(per_length)
        at = [int(np.searchsorted(up_to, rank)) for rank in np.ceil(np.array([0, 0.5, 0.99]) * up_to[-1]).clip(min=1)]
        (shortest, median, p99), longest = at, len(per_length) - 1
        edges = np.unique(np.rint(np.geomspace(shortest, longest + 1, NUM_BINS + 1)).astype(np.int64))
        counts = np.add.reduceat(per_length, edges[:-1])
        return cls(edges.tolist(), counts.tolist(), shortest, median, p99, longest)

    def line(self) -> str:
        """One line of text, the height of each bin as a shade.

        >>> LengthHistogram.of(np.array([1, 2, 2, 4])).line()
        '1 [+@ +] 4; half have at most 2, 99 % at most 4'
        """
        # ceil: a bin with any document is never blank
        heights = [-(-count * (len(SHADES) - 1) // max(self.counts)) for count in self.counts]
        bars = "".join(SHADES[height] for height in heights)
        return (
            f"{self.shortest:,} [{bars}] {self.longest:,}; half have at most {self.median:,}, 99 % at most {self.p99:,}"
        )
