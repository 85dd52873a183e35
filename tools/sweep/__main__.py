"""`make sweep`: judge packed training on model types of the installed transformers, as tiny random models.

PYTHONPATH=tools python -m sweep --all --output docs   # every type, about six minutes
PYTHONPATH=tools python -m sweep --only llama,mamba
"""

import argparse
import json
import sys

from . import page as compatibility
from . import zoo
from .model_types import sweep


def main(words: list[str]) -> int:
    """Return exit code 0 if no type leaks silently, 1 if one does."""
    parser = argparse.ArgumentParser(prog="python -m sweep", description="Judge packed training on model types.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every type: packed training against each document alone")
    which.add_argument("--only", metavar="TYPES", help="these model types only, separated by commas")
    parser.add_argument(
        "--on-leak", choices=("repair", "raise", "unpack"), default="repair", help="as in SFTConfig (default: repair)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="write compatibility.md and compatibility.csv there; without --all, update the rows of these types",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds per model type")
    args = parser.parse_args(words)

    chosen = zoo.all_types()
    names = args.only.split(",") if args.only else []
    if unknown := {*names} - {name for name, _ in chosen}:
        parser.error(f"the installed transformers has no causal or image-text model type of {sorted(unknown)}")
    chosen = [task for task in chosen if not names or task[0] in names]
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
        rows = compatibility.kept(args.output, rows)
        compatibility.write(rows if args.all else compatibility.replaced(args.output, rows), args.output)
    return 1 if any(row.false_negatives for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
