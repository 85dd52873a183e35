"""`trl-packfix plan`: compare values of max_length by what they cut and cost, before training."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from . import flags

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXAMPLES = """\
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B --max-length 4096 8192 --world-size 8 64 512 --batch-size 1
  trl-packfix plan lengths.txt --strategy stream bfd_split wrapped --tflops 350 --json
  trl-packfix plan lengths.txt --max-length 131072 --tokens-per-rank 16384 --world-size 8 64

The numbers are those that a training run with the same flags prints in its packing report. Exit code 0 if at most 1 %
of the trained tokens are lost at the recommended max_length; 1 if more are lost; 2 if planning failed."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="before training: efficiency, steps, imbalance and cut documents, by max_length, strategy and world size",
        description="Plan the packs of a dataset without training, and recommend a max_length. Needs no GPU and no "
        "weights.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_document_flags(parser)
    flags.add_packing_flags(parser, several=True)
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
        "Adds modelled tokens per second and hours. Without --model they are those of a Llama with 7B parameters",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    for name, values in (("world-size", args.world_size), ("tflops", [args.tflops] if args.tflops is not None else [])):
        if any(value <= 0 for value in values):
            raise ValueError(
                f"`--{name} {' '.join(map(str, values))}` was given. It must be above 0. Set positive numbers only."
            )
    from rich.console import Console
    from rich.progress import Progress

    from ..planning.degrees import possible_degrees
    from ..reporting.report import MAX_LOST_SHARE
    from ..training.choices import Given
    from ..training.features import refuse
    from .forecast import candidate_lengths, forecasts, recommend
    from .sources import open_tables

    config = flags.load_model_config(args)
    positions = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    for length in args.max_length or ():
        if positions is not None and length > positions:
            raise ValueError(
                f"`--max-length {length}` was given and {args.model} has {positions} positions. Training refuses "
                f"documents longer than that. Set `--max-length` to {positions} or less."
            )
    for length in args.max_length or candidate_lengths(1, positions):
        for strategy in args.strategy:
            flags.packing_config(args, length, strategy)  # to check the settings before tokenising
    reader = open_tables(args.data, args.tokenizer or args.model, flags.tokenisation(args), args.split, args.name)
    flags.check_has_tokens(args, reader)
    model = flags.load_cost_model(args, reader)
    most = positions
    if args.tokens_per_rank is not None:  # longer documents need more ranks than there are
        most = min(
            possible_degrees(1, args.tokens_per_rank, ranks, model.heads)[-1] * args.tokens_per_rank
            for ranks in args.world_size
        )
        most = most if positions is None else min(most, positions)
    lengths = args.max_length or candidate_lengths(int(reader.lengths.max(initial=1)), most)
    configs = [flags.packing_config(args, length, strategy) for length in lengths for strategy in args.strategy]
    if reader.image_counts is not None:
        for config_to_plan in configs:
            refuse(Given(args=config_to_plan, columns=("images",)))
    found = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"planning {len(reader):,} rows", total=len(configs) * len(args.world_size))
        for each in forecasts(reader, configs, args.world_size, model, args.synchronisation, args.tflops):
            found.append(each)
            progress.advance(task)
    advice = recommend(found)
    if args.json:
        plans = [each.to_dict() for each in found]
        print(json.dumps({"plans": plans, "max_length": advice.max_length, "reasons": advice.reasons}, indent=2))
    else:
        _show(found, advice.reasons, args)
    return 0 if advice.lost <= MAX_LOST_SHARE else 1


KEYS = ("max_length", "strategy", "ranks")  # they begin every table
DEGREES = "micro-steps by degree"  # the only cells with spaces: they may be wrapped


def _cells(each: Any, args: argparse.Namespace) -> dict[str, str]:
    """One row of the table by column."""
    report, ledger = each.report, each.report.ledger
    dropped = sum(count.documents for count in ledger.dropped.values())
    cells = {
        "max_length": f"{report.max_length:,}",
        "strategy": report.strategy,
        "ranks": f"{report.world_size:,}",
        "packs": "-" if report.num_packs is None else f"{report.num_packs:,}",
        "filled": "-" if report.efficiency is None else f"{report.efficiency:.1%}",
        "padded": f"{report.padding_efficiency:.1%}",
        "steps": f"{report.num_steps:,}",
        "docs/step": f"{report.documents_per_step:,.1f}",
        "imbalance": f"{report.imbalance:.3f}",
        "cut": f"{ledger.truncated.documents + ledger.split.documents + dropped:,}",
        "lost": f"{each.lost:.2%}",
        "PFLOP": f"{each.flops / 1e15:,.3g}",
    }
    if args.share_prefixes != "off":
        families = report.prefixes.families_per_step
        cells["computed"] = f"{report.prefixes.rows:.2f}"
        cells["families/step"] = "-" if families is None else f"{families:,.1f}"
    if report.images is not None:
        too_long = ledger.dropped.get("overlong")
        cells["images/pack"] = f"{report.images.per_pack:.1f}"
        cells["too long"] = f"{too_long.documents if too_long else 0:,}"
        for name, part in (("language", report.images.language_imbalance), ("tower", report.images.tower_imbalance)):
            cells[name] = "-" if part is None else f"{part:.3f}"
    if report.shared is not None:
        cells["exchange"] = f"{report.shared.exchange_share:.1%}"
        cells["time/bound"] = f"{report.shared.time_over_bound:.3f}"
        cells["part"] = f"{report.shared.largest_part:,}"
        cells[DEGREES] = report.shared.histogram()
    if args.tflops:
        cells["tokens/s"] = f"{each.tokens_per_second:,.0f}"
        cells["hours"] = f"{each.hours:,.2g}"
    return cells


def _tables(rows: "list[dict[str, str]]", console: "Console") -> "list[Table]":
    """The rows as one table, or as several below each other if one would be wider than the console."""
    from rich.box import SIMPLE
    from rich.table import Table

    def table(names: list[str]) -> Table:
        made = Table(box=SIMPLE, pad_edge=False)
        for name in names:
            made.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=name != DEGREES)
        for row in rows:
            made.add_row(*(row[name] for name in names))
        return made

    unlimited = console.options.update_width(10_000)
    parts = [[*KEYS]]
    for name in rows[0]:
        if name not in KEYS:
            wider = [*parts[-1], name]
            if len(wider) > len(KEYS) + 1 and console.measure(table(wider), options=unlimited).maximum > console.width:
                parts.append([*KEYS, name])
            else:
                parts[-1] = wider
    return [table(names) for names in parts]


def _show(found: list[Any], reasons: list[str], args: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width, and its lines must not be wrapped
        console = Console(width=10_000)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    first = found[0].report
    say(f"{first.ledger.given.documents:,} documents, {first.ledger.given.tokens:,} tokens")
    say(f"lengths  {first.lengths.line()}")
    images = first.images
    if images is not None:
        say(f"images   {images.line()} (in the first line of the table)")
    shares = args.tokens_per_rank is not None
    size = f"{args.tokens_per_rank:,} tokens per rank" if shares else f"{flags.batch_size(args)} x max_length tokens"
    say(
        f"micro-batches of {size}, accumulation {args.accumulation}, balance "
        f"{args.balance!r}; imbalance: modelled time / modelled time if ranks never waited"
    )
    for table in _tables([_cells(each, args) for each in found], console):
        console.print(table)
    say(
        "filled: share of the packs; padded: the same of unpacked batches of this size; cut: documents truncated, "
        "split or dropped; lost: share of the trained tokens; PFLOP: 10^15 operations of one epoch"
    )
    if images is not None:
        say(
            'too long: documents dropped because an image does not fit, or by overlong="drop"; language, tower: '
            "imbalance of the language model and of the vision tower alone"
        )
    if shares:
        say(
            "exchange: share of the time in the exchange between ranks that share a pack; time/bound: modelled time "
            "over a lower bound; part: tokens of the largest part of a pack on a rank; degree: ranks that share a pack"
        )
    if args.share_prefixes != "off":
        say("computed: share of the tokens of the documents; families: of documents that begin alike")
    say("\nRecommended: " + "\n  ".join(reasons))
