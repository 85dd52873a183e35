"""Forecasts of training for several lengths, strategies and world sizes; the recommended `max_length`; their tables."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import RowReader
from ..planning.costs import CostModel
from ..planning.parallel import possible_degrees
from ..planning.units import Synchronisation
from ..reporting.build import make_report
from ..reporting.columns import COLUMNS, KEY_COLUMNS, Column
from ..reporting.report import MAX_LOST_SHARE, PackingReport
from ..reporting.savings import estimated_savings
from ..training.choices import RunSettings
from ..training.config import SFTConfig, with_settings
from ..training.features import refuse_conflicts
from ..training.planner import documents_of, make_planner
from . import memory
from .configs import RunConfigs, read_run
from .tokens import load_model_config, make_costs, read_documents

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


def make_forecasts(
    reader: RowReader,
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
            assert computed is not None, "the estimate and tables have them"
            assert report.imbalance is not None, "the estimate and tables have them"
            flops = float(costs[planner.schedule(0).order].sum()) * FORWARD_AND_BACKWARD * computed
            if tflops is None:
                yield Forecast(report, flops)
                continue
            seconds = flops / (tflops * 1e12 * world_size) * report.imbalance
            seconds /= 1 - (report.groups.exchange_share or 0)
            tokens = report.num_tokens - report.tokens_not_reached
            yield Forecast(report, flops, tokens / seconds, seconds / 3600)


def planner_for(documents: Documents, config: SFTConfig, world_size: int, **settings: Any) -> EpochPlanner:
    """The planner of a run with this config; `settings` are those of `make_planner`."""
    if documents.image_count is not None:
        refuse_conflicts(RunSettings(args=config, columns=("images",)))
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
    reasons.append(f"It needs memory for {report.groups.memory_text(report)}.")
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
        waiting = f"waiting for each other adds {(widest.imbalance or 1) - 1:.1%}"
        text += f"; on {widest.world_size:,} ranks {waiting}{widest.groups.exchange_text}"
    return f"{text}."


def show_plan(args: argparse.Namespace) -> int:
    """Print what `plan` finds. Returns 1 if more than 1 % of the trained tokens are lost."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has none, and its lines must not be wrapped
    first = {"max_length": args.max_length, "packing_strategy": args.strategy}
    given = read_run(args, *(f"--{name}={values[0]}" for name, values in first.items() if values))
    memory.check_memory_flags(args, given)
    lengths = args.max_length or ([given.training.max_length] if "max_length" in given.given else [])
    if given.names:
        return _plan_lengths(args, given, lengths, console=console)
    model_config = load_model_config(given)
    for length in lengths or [given.training.max_length]:
        config = with_settings(given.training, max_length=length)
        batch = config.per_device_train_batch_size
        needed = memory.predict_memory(args, config, batch, model=given.model, model_config=model_config)
        if args.json:
            print(json.dumps({"memory": needed.rows}, indent=2))
        else:
            console.print(needed.verdict)
            _show_memory(console, needed, args.world_size)
    return 0


def _plan_lengths(args: argparse.Namespace, given: RunConfigs, lengths: list[int], *, console: Console) -> int:
    model_config = load_model_config(given)
    text_config = None if model_config is None else model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    for length in lengths:
        if positions is not None and length > positions:
            raise ValueError(
                f"`--max-length {length}` was given and {given.model.model_name_or_path} has {positions} positions. "
                f"Training refuses documents longer than that. Set `--max-length` to {positions} or less."
            )

    def configs_of(lengths: Sequence[int]) -> list[SFTConfig]:
        pairs = product(lengths, args.strategy or [given.training.packing_strategy])
        return [
            with_settings(given.training, max_length=length, packing_strategy=strategy) for length, strategy in pairs
        ]

    configs_of(lengths or candidate_lengths(1, positions))  # checks them before it tokenises
    reader = read_documents(given, args.tokenizer)
    cost_model = make_costs(model_config, reader)
    longest = int(reader.lengths.max(initial=1))
    most = [] if positions is None else [positions]
    if (size := given.training.tokens_per_rank) is not None:  # what every number of ranks can train
        ranks = args.world_size
        most += [size * possible_degrees(1, size, num, num_heads=cost_model.heads)[-1] for num in ranks]
    configs = configs_of(lengths or candidate_lengths(longest, min(most, default=None)))
    found = make_forecasts(
        reader,
        configs,
        args.world_size,
        cost_model=cost_model,
        synchronisation=args.synchronisation,
        tflops=args.tflops,
    )
    what = f"planning {len(reader):,} rows"
    total = len(configs) * len(args.world_size)
    plans = list(track(found, what, total, console=Console(stderr=True), transient=True))
    pick, reasons = recommend(plans)
    needed = memory.PredictedMemory([], "On how many GPUs it fits: give `--model` and `--memory GIB`.", "")
    best = next(config for config in configs if config.max_length == pick.report.max_length)
    if args.memory is not None:
        documents = max((plan.report.most_documents or 1 for plan in plans), default=1)
        needed = memory.predict_memory(args, best, documents, model=given.model, model_config=model_config)
    if args.json:
        result = {"plans": [plan.to_dict() for plan in plans], "max_length": best.max_length, "reasons": reasons}
        print(json.dumps(result | ({"memory": needed.rows} if needed.rows else {}), indent=2))
    else:
        console.print("Recommended: " + "\n  ".join([*reasons[:2], needed.verdict, *reasons[2:]]) + "\n")
        _show_forecasts(console, plans, best)
        if needed.rows:
            _show_memory(console, needed, args.world_size)
    return 0 if pick.lost <= MAX_LOST_SHARE else 1


def _show_memory(console: Console, needed: memory.PredictedMemory, world_sizes: Sequence[int]) -> None:
    for gpus in world_sizes:
        console.print(f"\npeak with {needed.rows[0]['tokens']:,} tokens in a micro-batch, on {gpus} GPU(s)")
        of_number = [row for row in needed.rows if row["gpus"] == gpus]
        cells = {column: [column.cell(column.value(row)) for row in of_number] for column in memory.COLUMNS}
        for table in _make_tables(cells, console, keys=memory.KEYS):
            console.print(table, "")
    console.print(needed.notes)


FORECAST = (  # of a `Forecast`, behind the columns of its report
    Column("PFLOP", lambda forecast: forecast.flops / 1e15, ",.3g", legend="10^15 operations of one epoch"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("time", "time", text="", legend="of one epoch"),
)


def _show_forecasts(console: Console, plans: list[Forecast], config: SFTConfig) -> None:
    first = plans[0].report
    console.print(f"{first.ledger.given.documents:,} documents, {first.ledger.given.tokens:,} tokens")
    assert first.lengths is not None  # of a table
    console.print(f"lengths  {first.lengths.line()}")
    if first.images is not None:
        console.print(f"images   {first.images.line()} (in the first line of the table)")
    steps = f"accumulation {first.accumulation}, balance {config.balance!r}"
    console.print(f"micro-batches of {first.groups.per_rank_text(first)}, {steps}")
    values = {
        column: [column.value(plan.report) for plan in plans] for column in (*KEY_COLUMNS, *COLUMNS) if column.heading
    }
    values |= {column: [column.value(plan) for plan in plans] for column in FORECAST}
    known = {column: found for column, found in values.items() if any(value is not None for value in found)}
    for table in _make_tables(
        {column: [*map(column.cell, found)] for column, found in known.items()}, console, keys=KEY_COLUMNS
    ):
        console.print("", table)
    console.print("\n" + "; ".join(f"{column.heading}: {column.legend}" for column in known if column.legend))


def _make_tables(cells: dict[Column, list[str]], console: Console, *, keys: tuple[Column, ...]) -> list[Table]:
    """The columns as one table, or as several with the same keys below each other if one is wider than the console."""

    def table(columns: list[Column]) -> Table:
        rich_table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            justify: Literal["left", "right"] = "left" if column.text == "" and column in keys else "right"
            widest = None if column.wraps else max(map(len, cells[column]), default=0)
            rich_table.add_column(column.heading, justify=justify, min_width=widest, overflow="fold")
        for row in zip(*(cells[column] for column in columns), strict=True):
            rich_table.add_row(*row)
        return rich_table

    unlimited = console.options.update_width(10_000)
    parts = [[*keys]]
    for column in [column for column in cells if column not in keys]:
        wider = [*parts[-1], column]
        if len(wider) > len(keys) + 1 and console.measure(table(wider), options=unlimited).maximum > console.width:
            parts.append([*keys, column])
        else:
            parts[-1] = wider
    return [table(columns) for columns in parts]
