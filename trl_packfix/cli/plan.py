"""`trl-packfix plan`: compare values of max_length by what they cut and cost, before training."""

import argparse
import json
from typing import Any

from . import flags

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
    from ..training.images import check_settings
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
    for length in args.max_length or ():
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
            check_settings(config_to_plan, "images")
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


def _prefix_cells(prefixes: Any) -> list[str]:
    return [
        f"{prefixes.rows:.2f}",
        "-" if prefixes.families_per_step is None else f"{prefixes.families_per_step:,.1f}",
    ]


def _image_cells(report: Any) -> list[str]:
    too_long = report.ledger.dropped.get("overlong")
    parts = (report.images.language_imbalance, report.images.tower_imbalance)
    return [
        f"{report.images.per_pack:.1f}",
        f"{too_long.documents if too_long else 0:,}",
        *("-" if part is None else f"{part:.3f}" for part in parts),
    ]


def _shared_cells(shared: Any) -> list[str]:
    return [
        f"{shared.exchange_share:.1%}",
        f"{shared.time_over_bound:.3f}",
        f"{shared.largest_part:,}",
        shared.histogram(),
    ]


def _show(found: list[Any], reasons: list[str], args: argparse.Namespace) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    first = found[0].report
    print(f"{first.ledger.given.documents:,} documents, {first.ledger.given.tokens:,} tokens")
    print(f"lengths  {first.lengths.line()}")
    images = first.images
    if images is not None:
        print(f"images   {images.line()} (in the first line of the table)")
    shares = args.tokens_per_rank is not None
    size = f"{args.tokens_per_rank:,} tokens per rank" if shares else f"{flags.batch_size(args)} x max_length tokens"
    print(
        f"micro-batches of {size}, accumulation {args.accumulation}, balance "
        f"{args.balance!r}; imbalance: modelled time / modelled time if ranks never waited"
    )
    table = Table(box=SIMPLE, pad_edge=False)
    for name in (
        "max_length",
        "strategy",
        "ranks",
        "packs",
        "filled",
        "padded",
        "steps",
        "docs/step",
        "imbalance",
        "cut",
        "lost",
        "PFLOP",
        *(["computed", "families/step"] if args.share_prefixes != "off" else []),
        *(["images/pack", "too long", "language", "tower"] if images is not None else []),
        *(["exchange", "time/bound", "part", "micro-steps by degree"] if shares else []),
        *(["tokens/s", "hours"] if args.tflops else []),
    ):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for each in found:
        report, ledger = each.report, each.report.ledger
        dropped = sum(count.documents for count in ledger.dropped.values())
        table.add_row(
            f"{report.max_length:,}",
            report.strategy,
            f"{report.world_size:,}",
            "-" if report.num_packs is None else f"{report.num_packs:,}",
            "-" if report.efficiency is None else f"{report.efficiency:.1%}",
            f"{report.padding_efficiency:.1%}",
            f"{report.num_steps:,}",
            f"{report.documents_per_step:,.1f}",
            f"{report.imbalance:.3f}",
            f"{ledger.truncated.documents + ledger.split.documents + dropped:,}",
            f"{each.lost:.2%}",
            f"{each.flops / 1e15:,.3g}",
            *(_prefix_cells(report.prefixes) if args.share_prefixes != "off" else []),
            *([] if report.images is None else _image_cells(report)),
            *(_shared_cells(report.shared) if shares else []),
            *([f"{each.tokens_per_second:,.0f}", f"{each.hours:,.2g}"] if args.tflops else []),
        )
    console = Console()
    # A file or a pipe has no width: its lines must not be wrapped.
    (console if console.is_terminal else Console(width=200 if shares or images is not None else 160)).print(table)
    print(
        "filled: share of the packs; padded: the same of unpacked batches of this size; cut: documents truncated, "
        "split or\ndropped; lost: share of the trained tokens; PFLOP: 10^15 operations of one epoch"
    )
    if images is not None:
        print(
            'too long: documents dropped because an image does not fit, or by overlong="drop"; language, tower: '
            "imbalance of the\nlanguage model and of the vision tower alone"
        )
    if shares:
        print(
            "exchange: share of the time in the exchange between ranks that share a pack; time/bound: modelled time "
            "over a\nlower bound; part: tokens of the largest part of a pack on a rank; degree: ranks that share a pack"
        )
    if args.share_prefixes != "off":
        print("computed: share of the tokens of the documents; families: of documents that begin alike")
    print("\nRecommended: " + "\n  ".join(reasons))
