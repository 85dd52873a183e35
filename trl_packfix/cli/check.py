"""`trl-packfix check`: test whether a document in a pack changes another, on this model and machine."""

import argparse
import json
from pathlib import Path
from typing import Any

from .flags import add_trust_flag


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="test on a model whether documents in a pack influence each other, and repair it if they do",
        description="Test a model as the trainer does before its first step. Exit code 0 if packed training of it is "
        "correct, repaired or not; 1 if it is not; 2 if the model could not be tested.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name on the hub, or a local path")
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="fetch no weights: test a tiny random model with this config except for its sizes",
    )
    add_trust_flag(parser)
    parser.add_argument("--max-length", type=int, default=1024, help="longest document of the run, in tokens")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA, else float32"
    )
    parser.add_argument("--attn-implementation", help="as in the model's own config, e.g. sdpa or flash_attention_2")
    parser.add_argument(
        "--on-leak",
        choices=("repair", "raise", "unpack"),
        default="repair",
        help="what to do about a leak, as in SFTConfig (default: repair)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    sweep = parser.add_argument_group("every model type of the installed transformers, as tiny random models")
    sweep.add_argument(
        "--all", action="store_true", help="judge every type: packed training against each document alone"
    )
    sweep.add_argument("--only", metavar="TYPES", help="judge these model types only, separated by commas")
    sweep.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="judge N types, some of each verdict in docs/compatibility.csv: only in a clone of the repository",
    )
    sweep.add_argument(
        "--output",
        metavar="DIR",
        help="write compatibility.md and compatibility.csv there; without --all, update the rows of these types",
    )
    sweep.add_argument("--workers", type=int, default=1, help="number of processes (default: 1)")
    sweep.add_argument("--time-limit", type=float, default=120, help="seconds per model type")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    given = [args.model, args.all, args.only, args.sample]
    if len(list(filter(None, given))) > 1:
        args.parser.error("more than one of MODEL, --all, --only, --sample was given")
    if args.all or args.only or args.sample:
        return _sweep(args)
    if not args.model:
        args.parser.error("none of MODEL, --all, --only, --sample was given")
    return _check(args)


def _check(args: argparse.Namespace) -> int:
    from .check_model import check_model

    result = check_model(
        args.model,
        args.config_only,
        args.max_length,
        args.dtype,
        args.attn_implementation,
        args.on_leak,
        args.trust_remote_code,
    )
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        result.show()
    return 0 if result.right else 1


def _sweep(args: argparse.Namespace) -> int:
    from ..survey import page as compatibility
    from ..survey.sweep import all_types, sweep

    if args.output and not args.all:
        remedy = f"Run `trl-packfix check --all --output {args.output}` first, or omit `--output`."
        _check_table(Path(args.output) / compatibility.TABLE, f"--output {args.output}", remedy)
    chosen = all_types()
    if args.only:
        chosen = compatibility.only(chosen, args.only.split(","))
    elif args.sample:
        remedy = "Run the command in a clone of the repository, or set `--only` or `--all` instead."
        _check_table(Path("docs", compatibility.TABLE), f"--sample {args.sample}", remedy)
        chosen = [(row.model_type, row.kind) for row in compatibility.sample(compatibility.read("docs"), args.sample)]
    rows = []
    for row in sweep(chosen, args.on_leak, args.workers, args.time_limit):
        rows.append(row)
        if not args.json:
            print(compatibility.line(row), flush=True)
    if args.json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        print(compatibility.summary(rows))
    if args.output:
        rows = compatibility.with_shared(args.output, rows)
        compatibility.write(rows if args.all else compatibility.replaced(args.output, rows), args.output)
    return 1 if any(row.false_negatives for row in rows) else 0


def _check_table(table: Path, flag: str, remedy: str) -> None:
    """Refuse a flag that reads a table of verdicts, before the sweep, if the table does not exist.

    Raises:
        ValueError: there is no such file.
    """
    if not table.is_file():
        raise ValueError(f"`{flag}` was given. It reads the verdicts in `{table}`, and there is no such file. {remedy}")
