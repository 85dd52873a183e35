"""Sections of a report: ranks that share packs, and lengths. Each computes its numbers and returns its lines.

`build.py` makes the sections from the planner of a table or from a stream, and `PackingReport` (`report.py`) holds
them. `lines.py` asks each section for its lines. A section that a run does not have is None. For ranks there are two
sections with the same attributes and methods: `SharedPacks` if ranks share packs, else `OwnPacks`.

With sequence parallelism, several ranks share a pack, and each of them holds a *part* of it; the number of these ranks
is the *degree*, chosen for each *micro-step* (the micro-batches with the same index on all ranks). In each layer these
ranks *exchange* parts, so that attention sees the whole pack.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..data.epochs import EpochPlanner
from ..planning.arrays import Int64Array
from ..planning.degrees import modelled_time
from ..planning.schedule import Schedule

if TYPE_CHECKING:  # it needs torch, without which `trl-packfix plan` makes reports
    from ..data.stream import PackedStream

NUM_BINS = 24  # of the histogram of lengths
SHADES = " .:-=+*#%@"  # from no documents to most; ASCII, for any terminal and log file
Lines = Iterator[tuple[str, str]]  # (label, text) of each line


@dataclass(frozen=True)
class OwnPacks:
    """What a report says if every rank has packs of its own.

    Attributes:
        capacity: most tokens of a pack, `batch_size` x `max_length`.
        batch_size: documents of a micro-batch in the unpacked run.
    """

    capacity: int
    batch_size: int

    # As in `SharedPacks`
    smallest_degree = 1
    exchange_share = 0.0
    exchange_text = ""
    # A packed step has more documents than an unpacked one, so a line of the report (`lines.py`) advises other
    # settings: 'learning_rate x 1.4, settings in steps / 2.0'. This text is the end of that line. It names a strategy
    # with which no setting has to change, because its steps have the documents of unpacked steps. "" if there is none.
    alternative_text = '; or packing_strategy="minibatch"'
    step_size_settings = "gradient_accumulation_steps or per_device_train_batch_size"  # they give a step more documents

    def capacity_text(self, max_length: int) -> str:
        """Return how many tokens a micro-batch may have."""
        return f"{self.capacity:,} tokens (batch size {self.batch_size} x max_length {max_length:,})"

    def per_rank_text(self) -> str:
        """Return how many tokens of a micro-batch a rank may hold."""
        return f"{self.batch_size} x max_length tokens"

    def memory_text(self, max_length: int) -> str:
        """Return what a rank needs memory for, and what to set if that is too much."""
        size = f"{self.capacity:,} tokens (batch size {self.batch_size} x {max_length:,})"
        return f"micro-batches of {size}: if that is too much, lower the batch size before max_length"

    def axis_label(self) -> str:
        """Return the label of the axis along which packs are drawn."""
        return f"tokens (capacity {self.capacity:,})"

    def lines(self, world_size: int, imbalance: float, image_imbalances: str) -> Lines:
        """Yield a line on the imbalance of several ranks.

        Args:
            world_size: number of ranks.
            imbalance: modelled time of the first epoch / modelled time if ranks never waited.
            image_imbalances: end of the line, about the vision tower and the language model; "" without images.
        """
        if world_size > 1:
            yield "imbalance", f"{imbalance:.3f} modelled (1 is perfect){image_imbalances}"


@dataclass(frozen=True)
class SharedPacks:
    """How ranks share packs: in the first epoch of a table, or in the steps of a stream so far."""

    tokens_per_rank: int  # most tokens of a pack on one rank
    smallest_degree: int  # number of ranks that a document of `max_length` needs
    micro_steps: dict[int, int]  # degree -> number of micro-steps
    exchange_share: float | None = None  # time of the exchange between ranks / whole time, modelled; None for a stream
    largest_part: int | None = None  # most tokens of a pack on one rank in the epoch; None for a stream

    # As in `OwnPacks`. The strategy `minibatch` is no alternative here: it makes packs for single ranks.
    alternative_text = ""
    step_size_settings = "gradient_accumulation_steps"

    @classmethod
    def of_table(cls, planner: EpochPlanner, schedule: Schedule) -> "SharedPacks | None":
        """Count the first epoch of a table; None without sequence parallelism.

        Args:
            planner: the planner of the table.
            schedule: the first epoch in units: documents, or families of documents that begin alike and are packed as
                one. Each of its slots, one for each micro-batch and rank, holds the units of a pack.
        """
        if planner.packing.tokens_per_rank is None:
            return None
        units = planner.units()
        parallel = planner.packing.parallel  # the degrees that may be chosen, and the speeds of devices and links
        seconds, exchange = modelled_time(schedule, units, parallel)  # of each micro-step
        # `rows` of a unit: its tokens, of which a token that several documents share counts once
        pack_tokens = schedule.slot_sums(units.rows)  # tokens of the pack in each slot, (micro-steps, ranks)
        degrees, counts = np.unique(schedule.degrees, return_counts=True)
        return cls(
            tokens_per_rank=parallel.tokens_per_rank,
            smallest_degree=parallel.smallest,
            micro_steps=dict(zip(degrees.tolist(), counts.tolist(), strict=True)),
            exchange_share=float(exchange.sum() / seconds.sum()),
            # A pack is counted in the slot of its first rank, and its ranks hold equal parts, rounded up
            largest_part=int((-(-pack_tokens // schedule.degrees[:, None])).max()),
        )

    @classmethod
    def of_stream(cls, stream: "PackedStream", micro_steps: dict[int, int]) -> "SharedPacks | None":
        """Make the section of a stream; None without sequence parallelism.

        Args:
            stream: the packed stream.
            micro_steps: degree -> number of micro-steps so far.
        """
        tokens_per_rank = stream.packing.tokens_per_rank
        if tokens_per_rank is None:
            return None
        smallest_degree = stream.packing.parallel.smallest
        return cls(tokens_per_rank=tokens_per_rank, smallest_degree=smallest_degree, micro_steps=micro_steps)

    @property
    def histogram(self) -> str:
        """The number of micro-steps of each degree, as text.

        >>> SharedPacks(tokens_per_rank=16384, smallest_degree=8, micro_steps={1: 30, 8: 10}).histogram
        '1: 30, 8: 10'
        """
        return ", ".join(f"{degree}: {count:,}" for degree, count in sorted(self.micro_steps.items()))

    def line(self) -> str:
        """Return the text of the line on degrees."""
        largest = "" if self.largest_part is None else f"; the largest part of a rank has {self.largest_part:,} tokens"
        return f"micro-steps by degree (ranks that share a pack): {self.histogram}{largest}"

    def capacity_text(self, max_length: int) -> str:
        """Return how many tokens a rank may hold, and how many ranks the longest documents need."""
        return (
            f"{self.tokens_per_rank:,} tokens at most on each rank (tokens_per_rank); a document of max_length "
            f"{max_length:,} needs {self.smallest_degree} ranks"
        )

    @property
    def exchange_text(self) -> str:
        """The share of the modelled time that is the exchange, as the end of a sentence about this time.

        Only a table has this share, so it is not read for a stream. The same holds for `lines`.
        """
        return f", and {self.exchange_share:.1%} of it is the exchange"

    def per_rank_text(self) -> str:
        """Return how many tokens of a pack a rank may hold."""
        return f"{self.tokens_per_rank:,} tokens per rank"

    def memory_text(self, max_length: int) -> str:
        """Return what a rank needs memory for, and what to set if that is too much."""
        groups = f"groups of up to {self.smallest_degree} ranks for the longest documents"
        size = f"{self.tokens_per_rank:,} tokens on each rank"
        return f"parts of {size}, and {groups}: if that is too much, lower tokens_per_rank"

    def axis_label(self) -> str:
        """Return the label of the axis along which packs are drawn."""
        return f"tokens ({self.tokens_per_rank:,} per rank; thick lines end the part of a rank)"

    def lines(self, world_size: int, imbalance: float, image_imbalances: str) -> Lines:
        """Yield the lines on degrees and modelled time; the arguments are those of `OwnPacks.lines`."""
        yield "sequence parallelism", self.line()
        imbalances = f"imbalance {imbalance:.3f}{image_imbalances}"
        yield "modelled time", f"{self.exchange_share:.1%} of it in the exchange, {imbalances}"


@dataclass(frozen=True)
class LengthHistogram:
    """The lengths of the documents, in tokens, before they are cut.

    `counts[i]` documents have at least `edges[i]` and less than `edges[i + 1]` tokens; `p99` is the 99th percentile.
    """

    edges: list[int]
    counts: list[int]
    shortest: int
    median: int
    p99: int
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Int64Array) -> "LengthHistogram":
        """Count documents by length, without empty ones. This takes 8 bytes of memory per token of the longest one.

        Args:
            lengths: tokens of each document, of which at least one is not empty.
        """
        per_length = np.bincount(lengths)
        per_length[0] = 0
        num_up_to = np.cumsum(per_length)  # documents of at most so many tokens
        places = np.ceil(np.array([0, 0.5, 0.99]) * num_up_to[-1]).clip(min=1)  # in the sorted lengths, from 1
        shortest, median, p99 = np.searchsorted(num_up_to, places).tolist()
        longest = len(per_length) - 1
        edges = np.unique(np.rint(np.geomspace(shortest, longest + 1, NUM_BINS + 1)).astype(np.int64))
        counts = np.add.reduceat(per_length, edges[:-1])
        return cls(
            edges=edges.tolist(), counts=counts.tolist(), shortest=shortest, median=median, p99=p99, longest=longest
        )

    def line(self) -> str:
        """Return the histogram as text: a character for each bin, the darker the more documents.

        >>> LengthHistogram.from_lengths(np.array([1, 2, 2, 4])).line()
        '1 [+@ +] 4; half have at most 2, 99 % at most 4'
        """
        # Heights are rounded up, so that a bin with documents is never blank.
        heights = [-(-count * (len(SHADES) - 1) // max(self.counts)) for count in self.counts]
        bars = "".join(SHADES[height] for height in heights)
        return (
            f"{self.shortest:,} [{bars}] {self.longest:,}; half have at most {self.median:,}, 99 % at most {self.p99:,}"
        )
