"""Make the report of a run: count what packing does with the documents.

In come the planner and the reader of a table, or a packed stream (`data/`). Out goes a `PackingReport` (`report.py`),
for the trainer (`training/loading.py`), its callbacks and the command line.

A *document* is one training example, and a *unit* is what planning packs as one thing: a document, or a family of
documents that begin alike. A *feature*, such as shared prefixes, is a part of the package that a run may use. A
*section* of a report is an object with numbers on one topic, or None where the topic does not apply. The *unpacked run*
is the training that TRL would do with the same settings and without packing.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..data.epochs import EpochPlanner
from ..data.reader import RowReader
from ..planning.schedule import Schedule, imbalance, rank_costs
from ..planning.units import Units
from ..version import libraries_newer_than_tested
from .numbers import PlanSample
from .packs import first_packs
from .report import PackingReport
from .sections import LengthHistogram, SharedPacks

if TYPE_CHECKING:  # it needs torch, without which `trl-packfix plan` makes reports
    from ..data.stream import PackedStream, StreamCounts

NUM_DRAWN = 100_000  # documents that are drawn to estimate the efficiency of padded batches
NUM_FILLS = 20  # bins of the histogram of the fill of micro-batches
NUM_MICRO_STEPS = 8  # micro-steps of which the report has the costs
COPIED_SETTINGS = ("strategy", "overlong", "max_length", "batch_size", "accumulation", "world_size", "capacity")


def make_report(
    planner: EpochPlanner, reader: RowReader, *, trl_counts_first_labels: bool = False, with_packs: bool = True
) -> PackingReport:
    """Make the report of a table.

    Args:
        planner: the planner of the table.
        reader: the reader of its rows.
        trl_counts_first_labels: whether TRL divides the loss of the unpacked run by the number of all labels. For some
            models it counts the first label of a row, too, although no token before predicts it.
        with_packs: whether the report has the first packs, which `plot` draws.
    """
    packing = planner.packing
    documents = planner.documents
    lengths = documents.lengths
    schedule = planner.schedule(0)  # the documents of each micro-batch of the first epoch
    units = planner.units()
    plan = planner.first_plan  # None for a strategy that keeps the steps of the unpacked run
    # Costs are known for units, and the schedule is made of documents, so it is made of units here. `offsets` divides
    # `order` into slots, one for each micro-batch and rank
    order, offsets = units.from_documents(schedule.order, schedule.offsets)
    unit_schedule = replace(schedule, order=order, offsets=offsets)
    shared = SharedPacks.of_table(planner, unit_schedule)  # None if every rank has packs of its own
    # Ranks that share packs wait for each other in every layer, whatever the setting. So their imbalance is computed
    # with "micro", which means that ranks wait for each other after every micro-batch
    synchronisation = packing.synchronisation if shared is None else "micro"
    uncut_lengths = reader.lengths
    packed_before = reader.seq_lengths()  # None, except for a table whose rows are packs
    if packed_before is not None:
        _, uncut_lengths = packed_before  # (number of documents of each row, their lengths)
    not_reached = np.ones(len(documents), dtype=bool)
    not_reached[schedule.order] = False
    step_costs = rank_costs(unit_schedule, units.costs())  # FLOPs, (steps, micro-batches of a step, ranks)
    costs = step_costs.reshape(-1, packing.world_size)[:NUM_MICRO_STEPS].tolist()  # (micro-steps, ranks)
    sample = None
    if with_packs:
        # A report is saved and published, so it has the lengths of the documents in packs, and not their tokens
        packs = [pack.without_tokens() for pack in first_packs(planner, reader)]
        sample = PlanSample(packs, costs, _count_fills(unit_schedule, units, planner))
    num_trained = int(documents.trained.sum())
    unpacked_divisor = num_trained
    if trl_counts_first_labels:
        # The labels of the first tokens that are not -100
        unpacked_divisor += int(reader.count_labels(documents.row, documents.start, documents.start + 1).sum())
    return PackingReport(
        **{name: getattr(packing, name) for name in COPIED_SETTINGS},
        num_rows=len(reader),
        num_documents=len(documents),
        num_tokens=int(lengths.sum()),
        num_trained_tokens=num_trained,
        # Unpacked loss / packed loss. Both divide the same sum, by counts of tokens that may differ
        unpacked_loss=num_trained / unpacked_divisor,
        num_packs=plan.num_packs if plan else None,
        lower_bound=plan.lower_bound if plan else None,  # number of packs that every plan needs at least
        efficiency=plan.efficiency if plan else None,
        padding_efficiency=_padding_efficiency(lengths, packing.batch_size),
        num_steps=planner.num_steps,
        documents_per_step=len(schedule.order) / planner.num_steps,
        documents_not_reached=int(not_reached.sum()),
        tokens_not_reached=int(lengths[not_reached].sum()),
        trained_tokens_not_reached=int(documents.trained[not_reached].sum()),
        most_documents=int(np.diff(schedule.offsets).max()),
        imbalance=imbalance(unit_schedule, units.costs(), synchronisation),
        prefixes=packing.feature.report_section(planner),  # None without shared prefixes
        shared=shared,
        images=reader.report_section(planner),  # None without images
        turns=reader.turns,  # None if rows are not divided into turns
        ledger=documents.ledger,  # what was cut or dropped
        newer_libraries=libraries_newer_than_tested(),
        lengths=LengthHistogram.from_lengths(uncut_lengths),
        sample=sample,
    )


def make_stream_report(
    stream: "PackedStream",
    max_steps: int,
    counts: "StreamCounts | None" = None,
    *,
    micro_steps: dict[int, int] | None = None,
) -> PackingReport:
    """Make the report of a stream.

    Args:
        stream: the packed stream.
        max_steps: optimizer steps of the run.
        counts: what all ranks have read so far; None before training.
        micro_steps: number of ranks that share a pack -> number of micro-steps so far, with sequence parallelism.
    """
    from ..data.stream import StreamCounts

    counts = counts or StreamCounts()
    packing = stream.packing
    return PackingReport(
        **{name: getattr(packing, name) for name in COPIED_SETTINGS},
        num_documents=counts.documents,
        num_tokens=counts.tokens,
        num_trained_tokens=counts.trained_tokens,
        num_packs=counts.packs,
        efficiency=counts.tokens / (counts.packs * packing.capacity) if counts.packs else None,
        num_steps=max_steps,
        shared=SharedPacks.of_stream(stream, micro_steps or {}),
        images=stream.rows.report_section(stream, counts),  # None without images
        ledger=counts.ledger,
        newer_libraries=libraries_newer_than_tested(),
    )


def _count_fills(schedule: Schedule, units: Units, planner: EpochPlanner) -> list[int]:
    """Count the micro-batches in each of `NUM_FILLS` equal ranges of fill, from empty to full.

    Args:
        schedule: the schedule of units.
        units: the units.
        planner: the planner of the table, whose settings have the most tokens of a rank.
    """
    degrees = schedule.degrees[:, None]  # number of ranks that share each pack
    # `rows` of a unit: its tokens, of which a token that several documents share counts once
    pack_tokens = schedule.slot_sums(units.rows)  # tokens of the pack in each slot, (micro-steps, ranks)
    # `tokens_per_rank` is the capacity of a pack, if ranks do not share packs
    fills = pack_tokens / (planner.packing.parallel.tokens_per_rank * degrees)
    # (micro-steps, ranks): only the slot of the first rank of a group has its pack
    is_first_of_group = np.arange(schedule.world_size) % degrees == 0
    bins = (NUM_FILLS * fills[is_first_of_group]).astype(int).clip(max=NUM_FILLS - 1)
    return np.bincount(bins, minlength=NUM_FILLS).tolist()


def _padding_efficiency(lengths: np.ndarray, batch_size: int) -> float:
    """Estimate the share of real tokens in padded batches of documents in random order, from one random draw.

    Args:
        lengths: tokens of each document, shape (N,).
        batch_size: documents of a batch.

    >>> _padding_efficiency(np.full(5, 7), batch_size=2)  # the last batch has one document, and no padding
    1.0
    """
    drawn = np.random.default_rng(0).choice(lengths, min(len(lengths), NUM_DRAWN), replace=False)
    longest = np.maximum.reduceat(drawn, np.arange(0, len(drawn), batch_size))
    num_missing = -len(drawn) % batch_size  # documents that are missing in the last batch
    num_padded = int(longest.sum()) * batch_size - int(longest[-1]) * num_missing
    return int(drawn.sum()) / num_padded
