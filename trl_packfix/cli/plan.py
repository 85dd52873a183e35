"""`trl-packfix plan`: compare values of max_length by what they cut and cost, before training."""

import argparse
import json
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from ..planning.strategies import STRATEGIES
from ..reporting.columns import COLUMNS, KEYS, Column
from . import flags, memory
from .flags import Subparsers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedConfig

    from ..training.config import SFTConfig
    from .configs import Configs
    from .forecast import Forecast

EXAMPLES = """\
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B --max-length 4096 8192 --world-size 8 64 512 --batch-size 1
  trl-packfix plan lengths.txt --strategy stream bfd_split wrapped --tflops 350 --json
  trl-packfix plan lengths.txt --max-length 131072 --tokens-per-rank 16384 --world-size 8 64
  trl-packfix plan --model Qwen/Qwen3-8B --gpus 8 --memory 80 --batch-size 1 --max-length 8192

The numbers are those that a training run with the same flags prints in its packing report. Exit code 0 if at most 1 %
of the trained tokens are lost at the recommended max_length; 1 if more are lost; 2 if planning failed."""


def add_parser(subparsers: Subparsers) -> None:
    parser = flags.add_command(
        subparsers,
        "plan",
        "[DATA ...]",
        epilog=flags.DATA + EXAMPLES,
        help="before training: efficiency, steps, imbalance and cut documents, by max_length, strategy and world size",
        description="Plan the packs of a dataset without training, and recommend a max_length. Needs no GPU and no "
        "weights.",
    )
    parser.add_argument(
        "--max-length",
        "--max_length",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="largest numbers of tokens of a document (default: that of the config file, else 1024, 2048, ... up to "
        "the longest)",
    )
    parser.add_argument(
        "--strategy",
        "--packing_strategy",
        "--packing-strategy",
        choices=[*STRATEGIES],
        nargs="+",
        help="which documents share a pack (default: that of the config file, else stream)",
    )
    parser.add_argument(
        "--world-size",
        "--gpus",
        type=int,
        nargs="+",
        metavar="RANKS",
        default=[1],
        help="data-parallel ranks, usually GPUs (default: 1)",
    )
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="name or folder, if it is not that of the model")
    parser.add_argument(
        "--synchronisation",
        choices=("micro", "step"),
        default="micro",
        help="ranks wait for each other after every micro-batch (ZeRO-2, ZeRO-3, FSDP; default) or after the step "
        "(DDP, ZeRO-1)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="N",
        help="operations per second that one GPU reaches in training, in 10^12 (usually about 40 %% of its peak). "
        "Adds modelled tokens per second and time. Without --model they are those of a Llama with 7B parameters",
    )
    memory.add_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    for name, values in (("world-size", args.world_size), ("tflops", [args.tflops] if args.tflops is not None else [])):
        if not all(0 < value < inf for value in values):
            raise ValueError(
                f"`--{name} {' '.join(map(str, values))}` was given. It must be above 0. Set positive numbers only."
            )
    from rich.console import Console

    from ..training.config import changed
    from .configs import read_run
    from .tokens import load_model_config

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has none, and its lines must not be wrapped
    first = {"max_length": args.max_length, "packing_strategy": args.strategy}
    given = read_run(args, *(f"--{name}={values[0]}" for name, values in first.items() if values))
    memory.check(args, given)
    lengths = args.max_length or ([given.training.max_length] if "max_length" in given.given else [])
    model_config = load_model_config(given)
    if given.names:
        return _plan(args, given, lengths, console=console, model_config=model_config)
    for length in lengths or [given.training.max_length]:
        config = changed(given.training, max_length=length)
        batch = config.per_device_train_batch_size
        rows, verdict = memory.predictions(args, config, batch, model=given.model, model_config=model_config)
        if args.json:
            print(json.dumps({"memory": rows}, indent=2))
        else:
            console.print(verdict)
            _show_memory(console, rows, args, config=config)
    return 0


def _plan(
    args: argparse.Namespace,
    given: "Configs",
    lengths: list[int],
    *,
    console: "Console",
    model_config: "PreTrainedConfig | None",
) -> int:
    from rich.console import Console
    from rich.progress import track

    from ..planning.parallel import possible_degrees
    from ..reporting.report import MAX_LOST_SHARE
    from .forecast import candidate_lengths, forecasts, recommend
    from .tokens import check_images, make_costs, read_documents

    text_config = None if model_config is None else model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    for length in lengths:
        if positions is not None and length > positions:
            raise ValueError(
                f"`--max-length {length}` was given and {given.model.model_name_or_path} has {positions} positions. "
                f"Training refuses documents longer than that. Set `--max-length` to {positions} or less."
            )
    strategies = args.strategy or [given.training.packing_strategy]
    _configs(given, lengths or candidate_lengths(1, positions), strategies)  # checks them before it tokenises
    reader = read_documents(given, args.tokenizer)
    cost_model = make_costs(model_config, reader)
    longest, most = int(reader.lengths.max(initial=1)), [] if positions is None else [positions]
    if (size := given.training.tokens_per_rank) is not None:  # what every number of ranks can train
        ranks = args.world_size
        most += [size * possible_degrees(1, size, num, num_heads=cost_model.heads)[-1] for num in ranks]
    configs = _configs(given, lengths or candidate_lengths(longest, min(most, default=None)), strategies)
    for config in configs:
        check_images(config, reader)
    found = forecasts(
        reader,
        configs,
        args.world_size,
        cost_model=cost_model,
        synchronisation=args.synchronisation,
        tflops=args.tflops,
    )
    what, total = f"planning {len(reader):,} rows", len(configs) * len(args.world_size)
    plans = list(track(found, what, total, console=Console(stderr=True), transient=True))
    pick, reasons = recommend(plans)
    needed, verdict = list[dict[str, Any]](), "On how many GPUs it fits: give `--model` and `--memory GIB`."
    best = next(config for config in configs if config.max_length == pick.report.max_length)
    if args.memory is not None:
        documents = max((plan.report.most_documents or 1 for plan in plans), default=1)
        needed, verdict = memory.predictions(args, best, documents, model=given.model, model_config=model_config)
    if args.json:
        result = {"plans": [plan.to_dict() for plan in plans], "max_length": best.max_length, "reasons": reasons}
        print(json.dumps(result | ({"memory": needed} if needed else {}), indent=2))
    else:
        console.print("Recommended: " + "\n  ".join([*reasons[:2], verdict, *reasons[2:]]) + "\n")
        _show(console, plans, best)
        if needed:
            _show_memory(console, needed, args, config=best)
    return 0 if pick.lost <= MAX_LOST_SHARE else 1


def _configs(given: "Configs", lengths: "Sequence[int]", strategies: "Sequence[str]") -> "list[SFTConfig]":
    from ..training.config import changed

    pairs = product(lengths, strategies)
    return [changed(given.training, max_length=length, packing_strategy=strategy) for length, strategy in pairs]


def _show_memory(
    console: "Console", rows: list[dict[str, Any]], args: argparse.Namespace, *, config: "SFTConfig"
) -> None:
    for gpus in args.world_size:
        console.print(f"\npeak with {rows[0]['tokens']:,} tokens in a micro-batch, on {gpus} GPU(s)")
        of_number = [row for row in rows if row["gpus"] == gpus]
        cells = {column: [column.cell(column.value(row)) for row in of_number] for column in memory.COLUMNS}
        for table in _tables(cells, console, keys=memory.KEYS):
            console.print(table, "")
    console.print(memory.notes(rows, args, config))


FORECAST = (  # of a `Forecast`, behind the columns of its report
    Column("PFLOP", lambda forecast: forecast.flops / 1e15, ",.3g", legend="10^15 operations of one epoch"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("time", "time", text="", legend="of one epoch"),
)


def _show(console: "Console", plans: "list[Forecast]", config: "SFTConfig") -> None:
    first = plans[0].report
    console.print(f"{first.ledger.given.documents:,} documents, {first.ledger.given.tokens:,} tokens")
    assert first.lengths is not None  # of a table
    console.print(f"lengths  {first.lengths.line()}")
    if first.images is not None:
        console.print(f"images   {first.images.line()} (in the first line of the table)")
    size = f"{config.per_device_train_batch_size} x max_length tokens"
    if config.tokens_per_rank is not None:
        size = f"{config.tokens_per_rank:,} tokens per rank"
    steps = f"accumulation {config.gradient_accumulation_steps}, balance {config.balance!r}"
    console.print(f"micro-batches of {size}, {steps}")
    values = {column: [column.value(plan.report) for plan in plans] for column in (*KEYS, *COLUMNS) if column.heading}
    values |= {column: [column.value(plan) for plan in plans] for column in FORECAST}
    known = {column: found for column, found in values.items() if any(value is not None for value in found)}
    for table in _tables({column: [*map(column.cell, found)] for column, found in known.items()}, console, keys=KEYS):
        console.print("", table)
    console.print("\n" + "; ".join(f"{column.heading}: {column.legend}" for column in known if column.legend))


def _tables(cells: dict[Column, list[str]], console: "Console", *, keys: tuple[Column, ...]) -> "list[Table]":
    """The columns as one table, or as several with the same keys below each other if one is wider than the console."""
    from rich.box import SIMPLE
    from rich.table import Table

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
