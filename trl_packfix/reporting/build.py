"""Make the report of a run: count what packing did with the documents."""

from dataclasses import replace

import numpy as np

from ..data.epochs import EpochPlanner
from ..data.reader import Rows
from ..data.stream import PackedStream
from ..data.stream_state import StreamCounts
from ..planning.degrees import modelled_time
from ..planning.parallel import SequenceParallel
from ..planning.schedule import Schedule, imbalance
from ..planning.units import Units
from ..samples.row import TurnCounts
from .report import PackingReport
from .report_numbers import Groups, ImageNumbers, SharedPacks
from .sample import length_histogram, plan_sample
from .savings import planned_savings

NUM_DRAWN = 100_000  # documents drawn to estimate the efficiency of padded batches


def make_report(
    planner: EpochPlanner,
    overlong: str,
    reader: Rows,
    *,
    unpacked_counts_first: bool = False,
    turns: TurnCounts | None = None,
) -> PackingReport:
    """The report of a run that trains with this planner on documents of this table.

    Args:
        unpacked_counts_first: whether TRL's unpacked training counts the first label of each row in the divisor of the
            loss of this model.
        turns: how conversations became the rows of the table, with `per_turn`.
    """
    documents, lengths = planner.documents, planner.documents.lengths
    schedule = planner.schedule(0)
    units, bins = planner.units(), planner.packing
    order, offsets = units.of(schedule.order, schedule.offsets)
    of_units = replace(schedule, order=order, offsets=offsets)  # what is balanced
    plan = planner.first_plan
    packed_rows = reader.seq_lengths()
    lengths_given = reader.lengths if packed_rows is None else packed_rows[1]
    not_reached = np.ones(len(documents), dtype=bool)
    not_reached[schedule.order] = False
    shared = (
        None
        if planner.packing.parallel is None
        else _shared_packs(planner, planner.packing.parallel, units, schedule=of_units)
    )
    # Ranks that share packs wait for each other in every layer.
    synchronisation = "micro" if shared else bins.synchronisation
    trained = int(documents.trained.sum())
    divisor = trained
    if unpacked_counts_first:
        divisor += int(reader.first_is_labelled(documents.row, documents.start).sum())
    return PackingReport(
        strategy=planner.packing.strategy,
        overlong=overlong,
        max_length=planner.packing.max_length,
        batch_size=planner.packing.batch_size,
        accumulation=bins.accumulation,
        world_size=bins.world_size,
        capacity=bins.capacity,
        num_rows=len(reader),
        num_documents=len(documents),
        num_tokens=int(lengths.sum()),
        num_trained_tokens=trained,
        unpacked_loss=trained / divisor,
        num_packs=plan.num_packs if plan else None,
        lower_bound=plan.lower_bound if plan else None,
        efficiency=plan.efficiency if plan else None,
        padding_efficiency=_padding_efficiency(lengths, planner.packing.batch_size),
        num_steps=planner.num_steps,
        documents_per_step=(len(documents) - schedule.num_skipped) / planner.num_steps,
        documents_not_reached=schedule.num_skipped,
        tokens_not_reached=int(lengths[not_reached].sum()),
        trained_tokens_not_reached=int(documents.trained[not_reached].sum()),
        most_documents=int(np.diff(schedule.offsets).max()),
        imbalance=imbalance(of_units, units.costs(), synchronisation),
        prefixes=planned_savings(planner),
        shared=shared,
        images=_packed_images(planner, reader),
        turns=turns,
        ledger=documents.ledger,
        lengths=length_histogram(lengths_given),
        sample=plan_sample(planner, reader),
    )


def _packed_images(planner: EpochPlanner, reader: Rows) -> ImageNumbers | None:
    """The images of the first epoch; None for rows without."""
    counts = planner.documents.image_count
    if counts is None:
        return None
    schedule, costs = planner.schedule(0), planner.image_costs
    language = planner.packing.cost_model(planner.documents.lengths)
    total = np.concatenate([[0], np.cumsum(counts[schedule.order])])
    packs = np.diff(total[schedule.offsets])[np.diff(schedule.offsets) > 0]
    images = ImageNumbers(int(counts.sum()), int((counts > 0).sum()), float(packs.mean()), int(packs.max()))
    if costs is None or not costs.any():
        return images
    share = costs.sum() / (costs.sum() + language.sum())
    return replace(
        images,
        tower_share=float(share),
        tower_imbalance=imbalance(schedule, costs, planner.packing.synchronisation),
        language_imbalance=imbalance(schedule, language, planner.packing.synchronisation),
    )


def _shared_packs(
    planner: EpochPlanner, parallel: SequenceParallel, units: Units, *, schedule: Schedule
) -> SharedPacks:
    """What sequence parallelism does in the first epoch, of which this is the schedule of units."""
    assert schedule.degrees is not None
    time = modelled_time(schedule, units, parallel)
    total = np.concatenate([[0], np.cumsum(units.rows[schedule.order])])
    packs = np.diff(total[schedule.offsets]).reshape(-1, planner.packing.world_size)
    degrees, counts = np.unique(schedule.degrees, return_counts=True)
    return SharedPacks(
        tokens_per_rank=parallel.tokens_per_rank,
        smallest_degree=parallel.smallest,
        micro_steps=dict(zip(degrees.tolist(), counts.tolist(), strict=True)),
        exchange_share=float(time.exchange.sum() / time.seconds.sum()),
        largest_part=int((-(-packs // schedule.degrees[:, None])).max()),
    )


def make_stream_report(
    stream: PackedStream,
    max_steps: int,
    counts: StreamCounts | None = None,
    *,
    micro_steps: dict[int, int] | None = None,
) -> PackingReport:
    """The report of a run on a stream; `counts` are the totals of all ranks, `micro_steps` numbers by degree."""
    counts, groups = counts or StreamCounts(), None
    if stream.packing.parallel is not None:
        groups = Groups(stream.packing.parallel.tokens_per_rank, stream.packing.parallel.smallest, micro_steps or {})
    images = None
    if stream.images is not None:
        flops = counts.tower_flops + counts.language_flops
        images = ImageNumbers(
            counts.images,
            counts.with_images,
            counts.images / max(counts.packs, 1),
            counts.most_images,
            tower_share=counts.tower_flops / flops if counts.tower_flops else None,
            most_waiting=(stream.packing.buffer_size, stream.most_bytes),
        )
    return PackingReport(
        strategy="stream",
        overlong=stream.packing.overlong,
        max_length=stream.packing.max_length,
        batch_size=stream.packing.batch_size,
        accumulation=stream.packing.accumulation,
        world_size=stream.packing.world_size,
        capacity=stream.packing.capacity,
        num_rows=None,
        num_documents=counts.documents,
        num_tokens=counts.tokens,
        num_trained_tokens=counts.trained_tokens,
        num_packs=counts.packs,
        lower_bound=None,
        efficiency=counts.tokens / (counts.packs * stream.packing.capacity) if counts.packs else None,
        padding_efficiency=None,
        num_steps=max_steps,
        documents_per_step=None,
        documents_not_reached=0,
        groups=groups,
        images=images,
        ledger=counts.ledger,
    )


def _padding_efficiency(lengths: np.ndarray, batch_size: int) -> float:
    """Share of real tokens in padded batches of documents in random order, estimated from one random draw.

    >>> _padding_efficiency(np.full(5, 7), batch_size=2)  # the last batch has one document, and no padding
    1.0
    """
    drawn = np.random.default_rng(0).choice(lengths, min(len(lengths), NUM_DRAWN), replace=False)
    longest = np.maximum.reduceat(drawn, np.arange(0, len(drawn), batch_size))
    missing = -len(drawn) % batch_size  # documents of the last batch
    return int(drawn.sum()) / (int(longest.sum()) * batch_size - int(longest[-1]) * missing)
