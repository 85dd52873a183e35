"""Forecast training for several lengths, strategies and world sizes, and recommend a `max_length`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import Rows
from ..planning.costs import CostModel
from ..planning.packing import Synchronisation
from ..reporting.build import make_report
from ..reporting.report import MAX_LOST_SHARE, PackingReport
from ..reporting.savings import estimated_savings
from ..training.config import SFTConfig
from ..training.planner import documents_of, make_planner

FORWARD_AND_BACKWARD = 3  # times the FLOPs of a forward pass
MOST_MICRO_BATCHES = 2**20  # of a step; larger than any cluster, and a plan of it needs 0.1 GB


@dataclass(frozen=True)
class Forecast:
    """The report of a run with these documents and settings, and the modelled compute of an epoch on all ranks."""

    report: PackingReport
    flops: float  # forward and backward
    tokens_per_second: float | None = None  # this and the hours are not known without a speed
    hours: float | None = None

    @property
    def lost(self) -> float:
        return self.report.lost_trained_share or 0.0

    @property
    def time(self) -> str | None:
        """
        >>> [Forecast(None, 0, 0, hours).time for hours in (0.00053, 0.25, 130)]
        ['1.9 s', '15 min', '130.0 h']
        """
        if self.hours is None or self.hours >= 1:
            return None if self.hours is None else f"{self.hours:,.1f} h"
        minutes = self.hours * 60
        return f"{minutes:.2g} min" if minutes >= 1 else f"{minutes * 60:.2g} s"

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("flops", "tokens_per_second", "hours")}
        return self.report.to_dict() | found | {"lost_trained_share": self.lost}


def candidate_lengths(longest: int, positions: int | None = None) -> list[int]:
    """Powers of two from 1,024 to the first that holds the longest document, limited by the model's positions.

    >>> candidate_lengths(5000)
    [1024, 2048, 4096, 8192]
    """
    lengths = [1024 if positions is None else min(1024, positions)]
    while lengths[-1] < longest and (positions is None or 2 * lengths[-1] <= positions):
        lengths.append(2 * lengths[-1])
    return lengths


def forecasts(
    reader: Rows,
    configs: Sequence[SFTConfig],
    world_sizes: Sequence[int],
    *,
    cost_model: CostModel,
    synchronisation: Synchronisation = "micro",
    tflops: float | None = None,
) -> Iterator[Forecast]:
    """One forecast per config and world size, in their order; `tflops` are what one device reaches in training."""
    for config in configs:
        documents = documents_of(reader, config)
        for world_size in world_sizes:
            planner = planner_for(documents, config, world_size, cost_model=cost_model, synchronisation=synchronisation)
            report = make_report(planner, reader)
            if not planner.packing.shares_families:  # of families the report knows it from the plan
                report = replace(report, prefixes=estimated_savings(planner, reader))
            # only of the documents that the epoch reaches, like the imbalance
            costs = cost_model(documents.lengths) + planner.image_costs
            computed = 1.0 if report.prefixes is None else report.prefixes.flops
            assert computed is not None and report.imbalance is not None, "the estimate and tables have them"
            flops = float(costs[planner.schedule(0).order].sum()) * FORWARD_AND_BACKWARD * computed
            if tflops is None:
                yield Forecast(report, flops)
                continue
            seconds = flops / (tflops * 1e12 * world_size) * report.imbalance
            if report.shared is not None:
                seconds /= 1 - (report.shared.exchange_share or 0)
            tokens = report.num_tokens - report.tokens_not_reached
            yield Forecast(report, flops, tokens / seconds, seconds / 3600)


def planner_for(documents: Documents, config: SFTConfig, world_size: int, **settings: Any) -> EpochPlanner:
    """The planner of a run with this config; `settings` are those of `make_planner`."""
    num = world_size * config.gradient_accumulation_steps
    if num > MOST_MICRO_BATCHES:
        raise ValueError(
            f"`--world-size {world_size}` and `--accumulation {config.gradient_accumulation_steps}` were given. A plan "
            f"has a place for each of the {num:,} micro-batches of a step, at most {MOST_MICRO_BATCHES:,}. Set "
            "them to what you will train with."
        )
    return make_planner(config, documents, world_size=world_size, **settings)


def recommend(forecasts: Sequence[Forecast]) -> tuple[Forecast, list[str]]:
    """The smallest `max_length` that loses at most 1 % of the trained tokens, else the one that loses the fewest; why.

    Strategies that split lose almost no token at any length, but a fragment does not see the earlier fragments that it
    may refer to. So lengths are compared with the first given strategy that does not split. One that splits is used
    only if all given strategies split.
    """
    whole = [forecast for forecast in forecasts if forecast.report.overlong != "split"] or list(forecasts)
    first = whole[0].report
    group = (first.strategy, first.world_size)
    rows = [forecast for forecast in whole if (forecast.report.strategy, forecast.report.world_size) == group]
    rows.sort(key=lambda forecast: forecast.report.max_length)
    pick = next((row for row in rows if row.lost <= MAX_LOST_SHARE), min(rows, key=lambda row: row.lost))
    report = pick.report
    same = (first.strategy, report.max_length)
    alike = [run for run in whole if (run.report.strategy, run.report.max_length) == same]
    loss = "loses no trained token"
    if split := report.ledger.split.documents:
        loss = f"splits {split:,} documents, whose later parts do not see the earlier ones"
    elif pick.lost:
        loss = f"loses {pick.lost:.2%} of the trained tokens, documents cut or dropped: {report.num_cut:,}"
    if pick.lost > MAX_LOST_SHARE:
        loss += f". None of these lengths loses at most {MAX_LOST_SHARE:.0%}: try a longer one"
    how_long = _how_long(sorted(alike, key=lambda run: run.report.world_size))
    reasons = [f"max_length {report.max_length:,} {loss}.", how_long]
    size = f"micro-batches of {report.capacity:,} tokens (batch size {report.batch_size} x {report.max_length:,})"
    lower = "the batch size before max_length"
    if (shared := report.shared) is not None:
        size = f"parts of {shared.tokens_per_rank:,} tokens on each rank, and groups of up to {shared.smallest_degree}"
        size, lower = f"{size} ranks for the longest documents", "tokens_per_rank"
    reasons.append(f"It needs memory for {size}: if that is too much, lower {lower}.")
    place = rows.index(pick)
    for word, others in (("shorter", rows[:place][-1:]), ("longer", rows[place + 1 :][:1])):
        reasons += [
            f"The next {word}, {other.report.max_length:,}, loses {other.lost:.2%} and computes "
            f"{other.flops / pick.flops:.2f} times as much per epoch."
            for other in others
        ]
    reasons += [f"Common prefixes: {text}." for label, text in report.lines() if label == "common prefixes"]
    return pick, reasons


def _how_long(runs: list[Forecast]) -> str:
    """The time of an epoch on each number of ranks, in ascending order, and what waiting adds on the largest."""
    text = f"An epoch is {runs[0].flops / 1e15:,.3g} PFLOP; how long that takes, `--tflops` says"
    if runs[0].time is not None:
        times = (f"{run.time} on {run.report.world_size:,} rank{'s'[: run.report.world_size > 1]}" for run in runs)
        text = f"An epoch takes {', '.join(times)}"
    widest = runs[-1].report
    if widest.world_size > 1:
        exchange = "" if widest.shared is None else f", and {widest.shared.exchange_share:.1%} of it is the exchange"
        waiting = f"waiting for each other adds {(widest.imbalance or 1) - 1:.1%}"
        text += f"; on {widest.world_size:,} ranks {waiting}{exchange}"
    return f"{text}."
