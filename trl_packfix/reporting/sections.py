"""The parts of a report that only some runs have, and the lengths: how each is counted, and its line."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..data.epochs import EpochPlanner
from ..data.stream import PackedStream, StreamCounts
from ..planning.arrays import Int64Array
from ..planning.degrees import modelled_time
from ..planning.schedule import Schedule, imbalance

NUM_BINS = 24
SHADES = " .:-=+*#%@"  # ASCII, for any terminal and log file
Lines = Iterator[tuple[str, str]]  # label and text


@dataclass(frozen=True)
class OwnPacks:
    """What a report says of ranks that share no pack.

    Attributes:
        capacity: most tokens of a pack, `batch_size` x `max_length`.
    """

    capacity: int
    batch_size: int

    smallest_degree = 1
    exchange_share = 0.0
    exchange = ""
    instead = '; or packing_strategy="minibatch"'  # of other settings than those of the unpacked run
    enlarges_steps = "gradient_accumulation_steps or per_device_train_batch_size"

    def size(self, max_length: int) -> str:
        return f"{self.capacity:,} tokens (batch size {self.batch_size} x max_length {max_length:,})"

    def per_rank_text(self) -> str:
        return f"{self.batch_size} x max_length tokens"

    def needs(self, max_length: int) -> str:
        of = f"{self.capacity:,} tokens (batch size {self.batch_size} x {max_length:,})"
        return f"micro-batches of {of}: if that is too much, lower the batch size before max_length"

    def axis(self) -> str:
        return f"tokens (capacity {self.capacity:,})"

    def lines(self, world_size: int, imbalance: float, of_images: str) -> Lines:
        if world_size > 1:
            yield "imbalance", f"{imbalance:.3f} modelled (1 is perfect){of_images}"


@dataclass(frozen=True)
class SharedPacks:
    """The ranks that share packs: in the first epoch of a table, modelled, or in the steps of a stream so far."""

    tokens_per_rank: int
    smallest_degree: int  # ranks that a document of `max_length` needs
    micro_steps: dict[int, int]  # number by degree
    exchange_share: float | None = None  # of the time; this and the next are not known for a stream
    largest_part: int | None = None  # tokens of a pack on one rank

    instead = ""  # `minibatch` plans by documents, so ranks cannot share its packs
    enlarges_steps = "gradient_accumulation_steps"

    @classmethod
    def of_table(cls, planner: EpochPlanner, schedule: Schedule) -> "SharedPacks | None":
        """Of the first epoch, whose units have this schedule; None without sequence parallelism."""
        if planner.packing.tokens_per_rank is None:
            return None
        units = planner.units()
        parallel = planner.packing.parallel
        seconds, exchange = modelled_time(schedule, units, parallel)
        packs = schedule.slot_sums(units.rows)
        degrees, counts = np.unique(schedule.degrees, return_counts=True)
        return cls(
            tokens_per_rank=parallel.tokens_per_rank,
            smallest_degree=parallel.smallest,
            micro_steps=dict(zip(degrees.tolist(), counts.tolist(), strict=True)),
            exchange_share=float(exchange.sum() / seconds.sum()),
            largest_part=int((-(-packs // schedule.degrees[:, None])).max()),
        )

    @classmethod
    def of_stream(cls, stream: PackedStream, micro_steps: dict[int, int]) -> "SharedPacks | None":
        """Of so many micro-steps by degree; None without sequence parallelism."""
        tokens_per_rank = stream.packing.tokens_per_rank
        return None if tokens_per_rank is None else cls(tokens_per_rank, stream.packing.parallel.smallest, micro_steps)

    @property
    def histogram(self) -> str:
        """
        >>> SharedPacks(16384, 8, {1: 30, 8: 10}).histogram
        '1: 30, 8: 10'
        """
        return ", ".join(f"{degree}: {count:,}" for degree, count in sorted(self.micro_steps.items()))

    def line(self) -> str:
        largest = "" if self.largest_part is None else f"; the largest part of a rank has {self.largest_part:,} tokens"
        return f"micro-steps by degree (ranks that share a pack): {self.histogram}{largest}"

    def size(self, max_length: int) -> str:
        return (
            f"{self.tokens_per_rank:,} tokens at most on each rank (tokens_per_rank); a document of max_length "
            f"{max_length:,} needs {self.smallest_degree} ranks"
        )

    @property
    def exchange(self) -> str:
        return f", and {self.exchange_share:.1%} of it is the exchange"

    def per_rank_text(self) -> str:
        return f"{self.tokens_per_rank:,} tokens per rank"

    def needs(self, max_length: int) -> str:
        groups = f"groups of up to {self.smallest_degree} ranks for the longest documents"
        size = f"{self.tokens_per_rank:,} tokens on each rank"
        return f"parts of {size}, and {groups}: if that is too much, lower tokens_per_rank"

    def axis(self) -> str:
        return f"tokens ({self.tokens_per_rank:,} per rank; thick lines end the part of a rank)"

    def lines(self, world_size: int, imbalance: float, of_images: str) -> Lines:
        yield "sequence parallelism", self.line()
        yield "modelled time", f"{self.exchange_share:.1%} of it in the exchange, imbalance {imbalance:.3f}"


@dataclass(frozen=True)
class ImageNumbers:
    """The images of the documents, and what they cost in the first epoch, modelled."""

    num_images: int
    num_documents: int  # with any
    per_pack: float  # mean
    most: int  # in a pack
    tower_share: float | None = None  # of the vision tower in the FLOPs; None if its cost is not known
    tower_imbalance: float | None = None  # of the tower by itself; ranks are balanced by its sum with the model
    language_imbalance: float | None = None
    most_waiting: tuple[int, int] | None = None  # of a stream: documents and bytes after which no other is read

    @classmethod
    def of_table(cls, planner: EpochPlanner) -> "ImageNumbers | None":
        """Of the first epoch; None for rows without."""
        counts = planner.documents.image_count
        if counts is None:
            return None
        schedule = planner.schedule(0)
        costs = planner.image_costs
        packs = schedule.slot_sums(counts).ravel()[np.diff(schedule.offsets) > 0]
        images = cls(int(counts.sum()), int((counts > 0).sum()), float(packs.mean()), int(packs.max()))
        if not costs.any():
            return images
        packing, language = planner.packing, planner.packing.cost_model(planner.documents.lengths)
        return replace(
            images,
            tower_share=float(costs.sum() / (costs.sum() + language.sum())),
            tower_imbalance=imbalance(schedule, costs, packing.synchronisation),
            language_imbalance=imbalance(schedule, language, packing.synchronisation),
        )

    @classmethod
    def of_stream(cls, stream: PackedStream, counts: StreamCounts) -> "ImageNumbers | None":
        """Of the packs so far; None for rows without."""
        if stream.rows.process is None:
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

    @property
    def imbalances(self) -> str:
        """Those of the two models, behind the imbalance of their sum; "" if the cost of the tower is not known."""
        if self.tower_imbalance is None:
            return ""
        tower = f"of the vision tower alone {self.tower_imbalance:.3f}"
        return f"; of the language model alone {self.language_imbalance:.3f}, {tower}"

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


@dataclass(frozen=True)
class LengthHistogram:
    """Documents by length in tokens, before they are cut: `counts[i]` from `edges[i]` to below `edges[i + 1]`."""

    edges: list[int]
    counts: list[int]
    shortest: int
    median: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lengths: Int64Array) -> "LengthHistogram":
        """At least one length is above 0; empty documents are not counted. Takes 8 bytes per token of the longest."""
        per_length = np.bincount(lengths)
        per_length[0] = 0
        up_to = np.cumsum(per_length)
        at = [int(np.searchsorted(up_to, rank)) for rank in np.ceil(np.array([0, 0.5, 0.99]) * up_to[-1]).clip(min=1)]
        (shortest, median, p99), longest = at, len(per_length) - 1
        edges = np.unique(np.rint(np.geomspace(shortest, longest + 1, NUM_BINS + 1)).astype(np.int64))
        counts = np.add.reduceat(per_length, edges[:-1])
        return cls(edges.tolist(), counts.tolist(), shortest, median, p99, longest)

    def line(self) -> str:
        """
        >>> LengthHistogram.of(np.array([1, 2, 2, 4])).line()
        '1 [+@ +] 4; half have at most 2, 99 % at most 4'
        """
        # ceil: a bin with any document is never blank
        heights = [-(-count * (len(SHADES) - 1) // max(self.counts)) for count in self.counts]
        bars = "".join(SHADES[height] for height in heights)
        return (
            f"{self.shortest:,} [{bars}] {self.longest:,}; half have at most {self.median:,}, 99 % at most {self.p99:,}"
        )
