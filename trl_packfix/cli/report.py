"""`trl-packfix report`: make one page of what a run has saved, and print the first table of the page.

`reporting/page.py` reads the files of the run and makes the page. Its first table is the short form of the report: what
was trained, the tokens lost, the checks that passed, and the speed. A missing or broken file raises a ValueError, which
`cli/__init__.py` prints and turns into exit code 2.
"""

import argparse
import json
from pathlib import Path

from .flags import HelpFormatter, Subparsers

PAGE = "packing_report.html"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `report` and its flags."""
    parser = subparsers.add_parser(
        "report",
        help="after training: one page of what was trained, lost and proved, and how fast, with pictures",
        description="Make one page of HTML from the files that training has saved: what was trained, lost and proved, "
        "how fast, and pictures. It is one file, and needs no network. Reads no model and no data.",
        epilog="  trl-packfix report output\n  trl-packfix report output/checkpoint-500 --output page.html\n\n"
        "Training saves these files unless packing_report is false. Exit code 0, or 2 if they are missing or cannot be "
        "read.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="the output_dir of the run, or one of its checkpoints")
    parser.add_argument("--output", metavar="FILE", help=f"where the page is written (default: {PAGE} in OUTPUT_DIR)")
    parser.add_argument("--json", action="store_true", help="print the short form as JSON")
    parser.set_defaults(run_command=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Write the page, print its first table or, with `--json`, the same as JSON, and return 0."""
    from ..reporting.page import NO_PICTURES, draws_pictures, make_page, read_run, summarise
    from ..reporting.report import show_lines

    folder = Path(args.folder)
    saved = read_run(folder)
    output = Path(args.output) if args.output else folder / PAGE
    output.write_text(make_page(saved, f"Packed training: {folder.resolve().name}"), encoding="utf-8")
    # The first table, as pairs (label, text), from the packing report and the log of the trainer
    summary = summarise(saved.numbers, saved.lines, saved.log)
    if args.json:
        print(json.dumps(dict(summary) | {"page": str(output)}, indent=2))
        return 0
    show_lines("Packed training", [*summary, ("page", str(output))])
    if not draws_pictures():  # matplotlib is not installed
        print(NO_PICTURES)
    return 0
