"""Forecast training: packing reports for several lengths, strategies and world sizes.

A forecast is the `PackingReport` of a run with the same documents and settings, with the same numbers, and a modelled
time. `recommend` picks a `max_length`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import Rows, TokenReader
from ..data.spans import make_documents
from ..data.token_order import token_order
from ..planning.costs import CostModel
from ..planning.packing import Synchronisation
from ..planning.strategies import STRATEGIES
from ..reporting.build import make_report
from ..reporting.lines import prefixes_text
from ..reporting.report import MAX_LOST_SHARE, PackingReport
from ..reporting.savings import estimated_savings
from ..training.config import SFTConfig
from ..training.planner import make_planner

FORWARD_AND_BACKWARD = 3  # times the FLOPs of a forward pass
MOST_MICRO_BATCHES = 2**20  # of a step; larger than any cluster, and a plan of it needs 0.1 GB


@dataclass(frozen=True)
class Forecast:
    """A report, and the modelled compute of its epoch.

    Attributes:
        flops: of one epoch, forward and backward, over all ranks.
        tokens_per_second: over all ranks; None if no speed was given.
        hours: of one epoch; None if no speed was given.
    """

    report: PackingReport
    flops: float
    tokens_per_second: float | None
    hours: float | None

    @property
    def lost(self) -> float:
        """Share of the trained tokens that are not trained."""
        return self.report.lost_trained_share or 0.0

    @property
    def time(self) -> str | None:
        """Of one epoch, in seconds, minutes or hours.

        >>> [Forecast(None, 0, None, hours).time for hours in (0.00053, 0.25, 130)]
        ['1.9 s', '15 min', '130.0 h']
        """
        if self.hours is None or self.hours >= 1:
            return None if self.hours is None else f"{self.hours:,.1f} h"
        minutes = self.hours * 60
        return f"{minutes:.2g} min" if minutes >= 1 else f"{minutes * 60:.2g} s"

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict() | {
            "flops": self.flops,
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "lost_trained_share": self.lost,
        }


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
    """One forecast per config and world size, in their order.

    Args:
        reader: the documents.
        configs: configs with packing on, for length, batch size, strategy and seed.
        world_sizes: numbers of data-parallel ranks.
        synchronisation: when ranks wait for each other: after every micro-batch ("micro": with TRL's loss, ZeRO-2,
            ZeRO-3 and FSDP) or after the step.
        tflops: operations per second that one device reaches in training, in 10^12: measured, not its peak.
    """
    documents: Documents | None = None
    made_for: dict[str, Any] | None = None
    for config, world_size in product(configs, world_sizes):
        policy = _policy(config)
        if documents is None or policy != made_for:
            documents, made_for = _documents(reader, config), policy
        planner = planner_for(
            reader,
            config,
            world_size,
            cost_model=cost_model,
            synchronisation=synchronisation,
            documents=documents,
        )
        report = make_report(planner, reader)
        if not planner.packing.shares_families:  # of families the report knows it from the plan
            report = replace(report, prefixes=estimated_savings(planner, reader))
        # only of the documents that the epoch reaches, like the imbalance
        costs = cost_model(documents.lengths) + (0 if planner.image_costs is None else planner.image_costs)
        flops = float(costs[planner.schedule(0).order].sum())
        computed = 1.0 if report.prefixes is None else report.prefixes.flops
        assert computed is not None, "the estimate has it"
        flops *= FORWARD_AND_BACKWARD * computed
        if tflops is None:
            yield Forecast(report, flops, None, None)
            continue
        assert report.imbalance is not None  # only reports of streams have none
        seconds = flops / (tflops * 1e12 * world_size) * report.imbalance
        if report.shared is not None:
            seconds /= 1 - (report.shared.exchange_share or 0)
        yield Forecast(report, flops, (report.num_tokens - report.tokens_not_reached) / seconds, seconds / 3600)


def planner_for(
    reader: Rows,
    config: SFTConfig,
    world_size: int,
    *,
    cost_model: CostModel,
    synchronisation: Synchronisation = "micro",
    documents: Documents | None = None,
) -> EpochPlanner:
    """The planner of a training run with this config on `world_size` ranks; `documents` are those of the reader.

    Raises:
        ValueError: a step of more micro-batches than can be planned in memory.
    """
    num = world_size * config.gradient_accumulation_steps
    if num > MOST_MICRO_BATCHES:
        raise ValueError(
            f"`--world-size {world_size}` and `--accumulation {config.gradient_accumulation_steps}` were given. A plan "
            f"has a place for each of the {num:,} micro-batches of a step, at most {MOST_MICRO_BATCHES:,}. Set "
            "them to what you will train with."
        )
    return make_planner(
        config,
        _documents(reader, config) if documents is None else documents,
        cost_model,
        world_size=world_size,
        synchronisation=synchronisation,
        batch_size=config.per_device_train_batch_size,
    )


def _documents(reader: Rows, config: SFTConfig) -> Documents:
    documents = make_documents(reader, **_policy(config))
    if config.share_prefixes != "family":
        return documents
    assert isinstance(reader, TokenReader), "lengths are refused before"
    return replace(documents, tokens=token_order(reader, documents))


def _policy(config: SFTConfig) -> dict[str, Any]:
    """The settings that decide where documents are cut: the arguments of `make_documents`."""
    assert config.max_length is not None  # `SFTConfig` refuses packing without it
    return {
        "max_length": config.max_length,
        "overlong": config.effective_overlong,
        "truncation_mode": config.truncation_mode,
        "wrapped": STRATEGIES[config.packing_strategy].cuts_blocks,
    }


@dataclass(frozen=True)
class Recommendation:
    """A `max_length`, the share of trained tokens lost with it, and the reasons as sentences."""

    max_length: int
    lost: float
    reasons: list[str]


def recommend(forecasts: Sequence[Forecast]) -> Recommendation:
    """The smallest `max_length` that loses at most 1 % of the trained tokens, else the one that loses the fewest.

    Strategies that split lose almost no token at any length, but a fragment does not see the earlier fragments that it
    may refer to. So lengths are compared with the first given strategy that does not split. One that splits is used
    only if all given strategies split.
    """
    whole = [forecast for forecast in forecasts if forecast.report.overlong != "split"] or list(forecasts)
    first = whole[0].report
    group = (first.strategy, first.world_size)
    rows = [forecast for forecast in whole if (forecast.report.strategy, forecast.report.world_size) == group]
    rows.sort(key=lambda forecast: forecast.report.max_length)
    enough = [i for i, forecast in enumerate(rows) if forecast.lost <= MAX_LOST_SHARE]
    chosen = enough[0] if enough else min(range(len(rows)), key=lambda i: (rows[i].lost, i))
    pick = rows[chosen]
    reasons = [_what_is_lost(pick, bool(enough)), _how_long(pick, whole)]
    report = pick.report
    if report.shared is None:
        reasons.append(
            f"It needs memory for micro-batches of {report.capacity:,} tokens (batch size {report.batch_size} x "
            f"{report.max_length:,}): if that is too much, lower the batch size before max_length."
        )
    else:
        reasons.append(
            f"It needs memory for parts of {report.shared.tokens_per_rank:,} tokens on each rank, and groups of up to "
            f"{report.shared.smallest_degree} ranks for the longest documents: if that is too much, lower "
            "tokens_per_rank."
        )
    for other, word in ((chosen - 1, "shorter"), (chosen + 1, "longer")):
        if 0 <= other < len(rows):
            neighbour = rows[other]
            reasons.append(
                f"The next {word}, {neighbour.report.max_length:,}, loses {neighbour.lost:.2%} and computes "
                f"{neighbour.flops / pick.flops:.2f} times as much per epoch."
            )
    if (text := prefixes_text(report)) is not None:
        reasons.append(f"Common prefixes: {text}.")
    return Recommendation(report.max_length, pick.lost, reasons)


def _how_long(pick: Forecast, plans: Sequence[Forecast]) -> str:
    """The time of an epoch on each number of ranks, and what waiting adds on the largest."""
    key = (pick.report.max_length, pick.report.strategy)
    runs = sorted(
        (plan for plan in plans if (plan.report.max_length, plan.report.strategy) == key),
        key=lambda plan: plan.report.world_size,
    )
    text = f"An epoch is {pick.flops / 1e15:,.3g} PFLOP; how long that takes, `--tflops` says"
    if pick.hours is not None:
        times = (f"{run.time} on {run.report.world_size:,} rank{'s'[: run.report.world_size > 1]}" for run in runs)
        text = f"An epoch takes {', '.join(times)}"
    widest = runs[-1].report
    if widest.world_size > 1 and widest.imbalance is not None:
        exchange = "" if widest.shared is None else f", and {widest.shared.exchange_share:.1%} of it is the exchange"
        text += f"; on {widest.world_size:,} ranks waiting for each other adds {widest.imbalance - 1:.1%}{exchange}"
    return f"{text}."


def _what_is_lost(pick: Forecast, is_enough: bool) -> str:
    ledger = pick.report.ledger
    start = f"max_length {pick.report.max_length:,}"
    if ledger.split.documents:
        text = f"{start} splits {ledger.split.documents:,} documents, whose later parts do not see the earlier ones"
    elif pick.lost:
        cut = ledger.truncated.documents + sum(count.documents for count in ledger.dropped.values())
        text = f"{start} loses {pick.lost:.2%} of the trained tokens, documents cut or dropped: {cut:,}"
    else:
        text = f"{start} loses no trained token"
    return text + (
        "." if is_enough else f". None of these lengths loses at most {MAX_LOST_SHARE:.0%}: try a longer one."
    )
