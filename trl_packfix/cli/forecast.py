"""`trl-packfix plan`: forecast training for several settings, recommend a `max_length`, and print tables.

`show_plan` runs the command, in this order:

    1. Read the settings of the run, and the documents of DATA (`dry_run.py`).
    2. For each max_length, strategy and number of ranks, plan the packs of the first epoch, and count what they cost: a
       `Forecast`.
    3. Recommend one max_length.
    4. With `--memory`, predict the memory of a GPU (`memory.py`).
    5. Print all of it as tables or as JSON.

Without DATA only the memory is predicted. A *pack* is the documents that pass through the model together in one
micro-batch, and `max_length` the most tokens of a document.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..feature import find_folder
from ..planning.parallel import possible_degrees
from ..planning.units import Balance
from ..reporting.build import make_report
from ..reporting.columns import COLUMNS, KEY_COLUMNS, Column
from ..reporting.numbers import MAX_LOST_SHARE
from ..reporting.report import PackingReport
from ..training.planner import documents_of
from ..training.planning_settings import PlanningSettings
from ..wording import count_of
from .dry_run import DryRun, planner_for, read_run_with_configs, read_run_without_model

if TYPE_CHECKING:  # these import TRL, which takes seconds, and a plan of lengths needs none of them
    from ..training.config import SFTConfig
    from .configs import RunConfigs
    from .memory import PredictedMemory

FORWARD_AND_BACKWARD = 3  # FLOPs of a forward and a backward pass, as a multiple of the FLOPs of a forward pass


@dataclass(frozen=True)
class Forecast:
    """What training with one choice of settings is expected to do in an epoch.

    Attributes:
        report: the packing report of the run.
        flops: modelled FLOPs of forward and backward, on all ranks together.
        tokens_per_second: on all ranks together; None if the speed of a device is not given.
        hours: of the epoch; None if the speed of a device is not given.
    """

    report: PackingReport
    flops: float
    tokens_per_second: float | None = None
    hours: float | None = None

    @property
    def lost(self) -> float:
        """The share of trained tokens that are cut or dropped."""
        return self.report.lost_trained_share or 0.0

    @property
    def time(self) -> str | None:
        """The hours as text, in a fitting unit; None if they are not known.

        >>> [Forecast(None, 0, 0, hours).time for hours in (0.00053, 0.25, 130)]
        ['1.9 s', '15 min', '130.0 h']
        """
        if self.hours is None or self.hours >= 1:
            return None if self.hours is None else f"{self.hours:,.1f} h"
        minutes = self.hours * 60
        return f"{minutes:.2g} min" if minutes >= 1 else f"{minutes * 60:.2g} s"

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values: the fields of the report, and beside them the other fields."""
        forecast = {name: getattr(self, name) for name in ("flops", "tokens_per_second", "hours")}
        return self.report.to_dict() | forecast | {"lost_trained_share": self.lost}


def candidate_lengths(longest: int, positions: int | None = None) -> list[int]:
    """Return values of `max_length` to compare: powers of two from 1,024 to the first that holds the longest document.

    Args:
        longest: tokens of the longest document.
        positions: the most positions of the model, which no value exceeds; None: no limit.

    >>> candidate_lengths(5000)
    [1024, 2048, 4096, 8192]
    """
    limit = sys.maxsize if positions is None else positions
    lengths = [min(1024, limit)]
    while lengths[-1] < min(longest, limit):
        lengths.append(min(2 * lengths[-1], limit))
    return lengths


def make_forecasts(
    args: argparse.Namespace, dry_run: DryRun, compared: "Sequence[SFTConfig | PlanningSettings]"
) -> Iterator[Forecast]:
    """Yield one forecast for each of the compared settings and each number of ranks, in their order.

    No time is predicted without `--tflops`, the 10^12 operations per second that one device reaches in training.
    """
    reader = dry_run.reader
    cost_model = dry_run.cost_model
    for config in compared:
        documents = documents_of(reader, config)
        for world_size in args.world_size:
            planner = planner_for(
                documents, config, world_size, cost_model=cost_model, synchronisation=args.synchronisation
            )
            report = make_report(planner, reader, with_packs=False)
            # `make_report` reads no token, so it knows what shared prefixes save only if documents are planned in
            # families. `estimate_savings` may read tokens to find documents that begin alike. It also says what sharing
            # would save in a run that shares no prefixes
            folder = find_folder("prefixes")
            if folder is not None:
                report = replace(report, prefixes=folder.estimate_savings(planner, reader))
            # FLOPs of a forward pass of each document, (N,), if it shares no prefix
            costs = cost_model(documents.lengths) + planner.image_costs
            # The share of these FLOPs that this run computes: 1, or less with `share_prefixes`, because common prefixes
            # are then computed once
            computed_share = 1.0 if report.prefixes is None else report.prefixes.flops
            assert computed_share is not None, "`estimate_savings` computes the share"
            assert report.imbalance is not None, "only streams have no imbalance"
            # Documents that the epoch does not reach cost nothing, as in the imbalance
            trained_documents = planner.schedule(0).order
            flops = float(costs[trained_documents].sum()) * FORWARD_AND_BACKWARD * computed_share
            if args.tflops is None:
                yield Forecast(report, flops)
                continue
            seconds = flops / (args.tflops * 1e12 * world_size)  # if no rank waited or communicated
            seconds *= report.imbalance  # modelled time over the time in which no rank waits
            # Ranks that share packs spend a share of the time on exchanging parts of them. The seconds so far are the
            # rest of the time
            seconds /= 1 - (report.rank_section.exchange_share or 0)
            tokens = report.num_tokens - report.tokens_not_reached  # without documents that the epoch leaves out
            yield Forecast(report, flops, tokens / seconds, seconds / 3600)


def recommend(forecasts: Sequence[Forecast], positions: int | None) -> tuple[Forecast, list[str]]:
    """Choose the smallest `max_length` that loses at most 1 % of the trained tokens.

    If no length does, choose the length that loses the fewest tokens.

    Strategies that split documents lose almost no token at any length, but a fragment does not see the earlier
    fragments that it may refer to. So lengths are compared with the first strategy that does not split. A strategy that
    splits is used only if all strategies split.

    Args:
        positions: the most tokens of a document that the model can read; None if it is not known.

    Returns:
        The forecast of the chosen length, and the reasons as sentences.
    """
    # 1. Compare the lengths with one strategy on one number of ranks.
    without_splits = [forecast for forecast in forecasts if forecast.report.overlong != "split"]
    candidates = without_splits or list(forecasts)
    strategy = candidates[0].report.strategy
    world_size = candidates[0].report.world_size
    by_length = [
        forecast
        for forecast in candidates
        if forecast.report.strategy == strategy and forecast.report.world_size == world_size
    ]
    by_length.sort(key=lambda forecast: forecast.report.max_length)
    fewest_lost = min(by_length, key=lambda forecast: forecast.lost)
    pick = next((forecast for forecast in by_length if forecast.lost <= MAX_LOST_SHARE), fewest_lost)
    report = pick.report

    # 2. Say what the chosen length loses, how long an epoch takes, and what it needs.
    loss = "loses no trained token"
    num_split = report.ledger.split.documents
    if num_split:
        loss = f"splits {count_of(num_split, 'document')}, whose later parts do not see the earlier ones"
    elif pick.lost:
        loss = f"loses {pick.lost:.2%} of the trained tokens, documents cut or dropped: {report.num_cut:,}"
    if pick.lost > MAX_LOST_SHARE:
        longer = "try a longer one"
        if report.max_length == positions:
            longer = f"the model has no more than {positions:,} positions, so split long documents (`--overlong split`)"
        loss += f". None of these lengths loses at most {MAX_LOST_SHARE:.0%}: {longer}"
    by_ranks = [
        forecast
        for forecast in candidates
        if forecast.report.strategy == strategy and forecast.report.max_length == report.max_length
    ]
    by_ranks.sort(key=lambda forecast: forecast.report.world_size)
    reasons = [
        f"max_length {report.max_length:,} {loss}.",
        _describe_time(by_ranks),
        f"It needs memory for {report.rank_section.memory_text(report.max_length)}.",
    ]

    # 3. Compare it with the next lengths.
    index = by_length.index(pick)
    for comparative, other_index in (("shorter", index - 1), ("longer", index + 1)):
        if 0 <= other_index < len(by_length):
            other = by_length[other_index]
            reasons.append(
                f"The next {comparative}, {other.report.max_length:,}, loses {other.lost:.2%} and computes "
                f"{other.flops / pick.flops:.2f} times as much per epoch."
            )
    prefixes_text = dict(report.lines()).get("common prefixes")  # a report has this line only with shared prefixes
    if prefixes_text is not None:
        reasons.append(f"Common prefixes: {prefixes_text}.")
    return pick, reasons


def _describe_time(forecasts: list[Forecast]) -> str:
    """Return a sentence on the time of an epoch.

    Args:
        forecasts: of one length and strategy, in ascending order of ranks.
    """
    text = f"An epoch is {forecasts[0].flops / 1e15:,.3g} PFLOP; how long that takes, `--tflops` says"
    if forecasts[0].time is not None:
        times = []
        for forecast in forecasts:
            times.append(f"{forecast.time} on {count_of(forecast.report.world_size, 'rank')}")
        text = f"An epoch takes {', '.join(times)}"
    widest = forecasts[-1].report
    if widest.world_size > 1:
        waiting = f"waiting for each other adds {(widest.imbalance or 1) - 1:.1%}"
        text += f"; on {widest.world_size:,} ranks {waiting}{widest.rank_section.exchange_text}"
    return f"{text}."


def show_plan(args: argparse.Namespace) -> int:
    """Run `plan` and print its result. Return 1 if more than 1 % of the trained tokens are lost, else 0."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has no width, and its lines must not be wrapped
    dry_run = read_run_without_model(args)  # None if the config classes of TRL have to read the run
    if dry_run is not None:
        settings = dry_run.settings
        assert isinstance(settings, PlanningSettings)
        lengths = args.max_length or candidate_lengths(int(dry_run.reader.lengths.max(initial=1)))
        choices = product(lengths, args.strategy or [settings.packing_strategy])
        compared = [replace(settings, max_length=length, packing_strategy=strategy) for length, strategy in choices]
        return _compare_forecasts(args, dry_run, compared, console=console)

    from . import memory
    from .configs import read_run

    # `plan` takes several values of these two flags, and a run takes one. So the run is read with the first of each.
    flags = {"max_length": args.max_length, "packing_strategy": args.strategy}
    configs = read_run(args, *(f"--{name}={values[0]}" for name, values in flags.items() if values))
    memory.check_memory_flags(args, configs)
    lengths = args.max_length or ([configs.training.max_length] if "max_length" in configs.names_set else [])
    if configs.names:  # the files, folders and datasets of DATA or of the config file
        return _plan_run(args, configs, lengths, console=console)
    # Without DATA only the memory is predicted.
    num_documents = configs.training.per_device_train_batch_size
    predictions = [
        memory.predict_memory(args, configs, num_documents, max_length=length)
        for length in lengths or [configs.training.max_length]
    ]
    if args.json:
        print(json.dumps({"memory": [row for predicted in predictions for row in predicted.rows]}, indent=2))
        return 0
    for predicted in predictions:
        console.print(predicted.verdict)
        _show_memory(console, predicted, args.world_size)
    return 0


def _plan_run(args: argparse.Namespace, configs: "RunConfigs", lengths: list[int], *, console: Console) -> int:
    """Forecast training on the documents of a run, recommend a length, and print both; return the exit code.

    Args:
        lengths: the values of `max_length` to compare; []: candidates by the longest document.
    """
    from ..training.config import with_settings
    from .tokens import load_model_config

    # 1. Check the settings before documents are tokenised, which takes long.
    model_config = load_model_config(configs)
    text_config = None if model_config is None else model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    for length in lengths:
        if positions is not None and length > positions:
            raise ValueError(
                f"`--max-length {length}` was given and {configs.model.model_name_or_path} has {positions} positions. "
                f"Training refuses documents longer than that. Set `--max-length` to {positions} or less."
            )

    def settings_of_lengths(lengths: Sequence[int]) -> "list[SFTConfig]":
        """Return the settings of the run with each length and strategy; refuse those that contradict each other."""
        pairs = product(lengths, args.strategy or [configs.training.packing_strategy])
        return [
            with_settings(configs.training, max_length=length, packing_strategy=strategy) for length, strategy in pairs
        ]

    # The result is not used: settings that contradict each other are refused here
    settings_of_lengths(lengths or candidate_lengths(1, positions))

    # 2. Read the documents, and compare the lengths on them.
    dry_run = read_run_with_configs(configs, model_config, args.tokenizer)
    longest = int(dry_run.reader.lengths.max(initial=1))
    limits = [] if positions is None else [positions]  # of `max_length`
    tokens_per_rank = configs.training.tokens_per_rank  # most tokens of a pack on one rank, if ranks share packs
    if tokens_per_rank is not None:
        # Each number of ranks must be able to train a document of `max_length`.
        for world_size in args.world_size:
            # A degree is a number of ranks that share a pack. A document of one token fits on every degree, so these
            # are all degrees of this number of ranks, in ascending order
            degrees = possible_degrees(1, tokens_per_rank, world_size, num_heads=dry_run.cost_model.heads)
            limits.append(tokens_per_rank * degrees[-1])
    compared = settings_of_lengths(lengths or candidate_lengths(longest, min(limits, default=None)))
    return _compare_forecasts(args, dry_run, compared, positions=positions, console=console)


def _compare_forecasts(
    args: argparse.Namespace,
    dry_run: DryRun,
    compared: "Sequence[SFTConfig | PlanningSettings]",
    *,
    console: Console,
    positions: int | None = None,
) -> int:
    """Forecast training with each of the settings, recommend a length, and print both; return the exit code.

    Args:
        compared: the settings of the run with each `max_length` and each strategy.
        positions: the most tokens of a document that the model can read; None if it is not known.
    """
    # 1. Forecast training.
    forecasts = make_forecasts(args, dry_run, compared)
    description = f"planning {len(dry_run.reader):,} rows"
    total = len(compared) * len(args.world_size)
    plans = list(track(forecasts, description, total, console=Console(stderr=True), transient=True))

    # 2. Recommend a length, and predict the memory that it needs.
    pick, reasons = recommend(plans, positions)
    best_length = pick.report.max_length
    predicted = None
    memory_text = "On how many GPUs it fits: give `--model` and `--memory GIB`."
    if args.memory is not None:
        from . import memory

        assert dry_run.configs is not None, "`plan --memory` reads all configs"
        most_documents = max((plan.report.most_documents or 1 for plan in plans), default=1)
        predicted = memory.predict_memory(args, dry_run.configs, most_documents, max_length=best_length)
        memory_text = predicted.verdict

    # 3. Print the result.
    if args.json:
        result = {"plans": [plan.to_dict() for plan in plans], "max_length": best_length, "reasons": reasons}
        if predicted is not None:
            result["memory"] = predicted.rows
        print(json.dumps(result, indent=2))
    else:
        console.print("Recommended: " + "\n  ".join([*reasons[:2], memory_text, *reasons[2:]]) + "\n")
        _show_forecasts(console, plans, compared[0].balance)  # `balance` is the same in all of them
        if predicted is not None:
            _show_memory(console, predicted, args.world_size)
    return 0 if pick.lost <= MAX_LOST_SHARE else 1


def _show_memory(console: Console, predicted: "PredictedMemory", world_sizes: Sequence[int]) -> None:
    """Print a table of the predicted memory for each number of GPUs."""
    from . import memory

    for gpus in world_sizes:
        console.print(
            f"\npeak with {predicted.rows[0]['tokens']:,} tokens in a micro-batch, on {count_of(gpus, 'GPU')}"
        )
        rows = [row for row in predicted.rows if row["gpus"] == gpus]
        cells = {column: [column.cell(column.value(row)) for row in rows] for column in memory.COLUMNS}
        for table in _make_tables(cells, console, keys=memory.KEYS):
            console.print(table, "")
    console.print(predicted.notes)


# The columns of a `Forecast`, behind the columns of its report
FORECAST_COLUMNS = (
    Column("PFLOP", lambda forecast: forecast.flops / 1e15, ",.3g", legend="10^15 operations of one epoch"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("time", "time", text="", legend="of one epoch"),
)


def _show_forecasts(console: Console, plans: list[Forecast], balance: Balance) -> None:
    """Print the lengths of the documents, and a table with a row for each forecast."""
    first = plans[0].report
    console.print(f"{first.ledger.given.documents:,} documents, {first.ledger.given.tokens:,} tokens")
    assert first.lengths is not None  # only streams have no lengths
    console.print(f"lengths  {first.lengths.line()}")
    if first.images is not None:
        console.print(f"images   {first.images.line()} (in the first line of the table)")
    steps = f"accumulation {first.accumulation}, balance {balance!r}"
    console.print(f"micro-batches of {first.rank_section.per_rank_text()}, {steps}")
    values = {
        column: [column.value(plan.report) for plan in plans] for column in (*KEY_COLUMNS, *COLUMNS) if column.heading
    }
    values |= {column: [column.value(plan) for plan in plans] for column in FORECAST_COLUMNS}
    # A column without any value is not shown.
    cells = {
        column: [column.cell(value) for value in column_values]
        for column, column_values in values.items()
        if any(value is not None for value in column_values)
    }
    for table in _make_tables(cells, console, keys=KEY_COLUMNS):
        console.print("", table)
    console.print("\n" + "; ".join(f"{column.heading}: {column.legend}" for column in cells if column.legend))


def _make_tables(cells: dict[Column, list[str]], console: Console, *, keys: tuple[Column, ...]) -> list[Table]:
    """Return the columns as one table, or as several tables if one would be wider than the console.

    Args:
        cells: by column, the text of each row.
        keys: the columns that every table begins with.
    """

    def table(columns: list[Column]) -> Table:
        rich_table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            is_text = column.text == ""  # the format of the cells; a column of numbers has one
            justify: Literal["left", "right"] = "left" if is_text and column in keys else "right"
            widest = None if column.wraps else max(map(len, cells[column]), default=0)
            rich_table.add_column(column.heading, justify=justify, min_width=widest, overflow="fold")
        for row in zip(*(cells[column] for column in columns), strict=True):
            rich_table.add_row(*row)
        return rich_table

    unlimited = console.options.update_width(10_000)
    columns_by_table = [[*keys]]
    for column in [column for column in cells if column not in keys]:
        wider = [*columns_by_table[-1], column]
        # Every table has at least one column that is not a key.
        if len(wider) > len(keys) + 1 and console.measure(table(wider), options=unlimited).maximum > console.width:
            columns_by_table.append([*keys, column])
        else:
            columns_by_table[-1] = wider
    return [table(columns) for columns in columns_by_table]
