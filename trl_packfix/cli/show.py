"""`trl-packfix show`: print or draw the first packs as the model will see them."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from . import flags
from .flags import Subparsers

if TYPE_CHECKING:
    from .configs import RunConfigs

EXAMPLES = """\
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --max-length 4096 \\
      --batch-size 1
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --packs 1 \\
      --documents 3 --tokens 200
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --world-size 8 \\
      --plot packs.png

The packs are those of the first optimizer steps of a training run with the same flags. Exit code 0, or 2 if planning
failed."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `show` and its flags."""
    parser = flags.add_command(
        subparsers,
        "show",
        usage="DATA ...",
        epilog=flags.DATA_HELP + EXAMPLES,
        help="the first packs: documents, trained tokens, boundaries, position ids; --plot draws them",
        description="Show the contents of packed batches, token by token.",
    )
    flags.add_tokenizer(parser)
    flags.add_world_size(parser, default=1)
    group = parser.add_argument_group("output")
    group.add_argument("--packs", type=int, default=2, metavar="N", help="number of packs (default: 2)")
    group.add_argument(
        "--documents", type=int, default=8, metavar="N", help="at most N documents per pack (default: 8)"
    )
    group.add_argument(
        "--tokens", type=int, default=60, metavar="N", help="at most N tokens per document (default: 60)"
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw a picture: .png, .svg or .pdf, or packs.png in a folder; as text without matplotlib",
    )
    parser.add_argument("--json", action="store_true", help="print the packs as JSON, with all documents and tokens")
    parser.set_defaults(run_command=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Plan the packs, print the first ones, and draw a picture with `--plot`. Return 0."""
    for name in ("packs", "documents", "tokens", "world_size"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"`{flag} {getattr(args, name)}` was given. It counts from 1. Set it to 1 or more.")
    draws_file = bool(args.plot) and find_spec("matplotlib") is not None
    if args.plot and not draws_file:
        missing = f"`--plot {args.plot}` was given and matplotlib is not installed"
        if args.json:
            raise ValueError(
                f"{missing}. The picture is drawn with it. Run `pip install matplotlib`, or omit `--json` for a "
                "drawing as text."
            )
        print(f"{missing} (`pip install matplotlib`). So the plan is drawn as text.", file=sys.stderr)
    from .sources import check_paths

    check_paths(args.unparsed_words)  # DATA, and the flags of the run
    # Imported only after these checks, because the modules import libraries that take seconds
    from rich.console import Console

    from ..reporting.build import make_report
    from ..reporting.packs import LEGEND, first_packs, pack_text
    from ..reporting.terminal_picture import draw_plan
    from ..training.planner import documents_of
    from .dry_run import planner_for, read_dry_run
    from .lengths import LengthRows

    dry_run = read_dry_run(args)  # settings, rows and costs, as a training run would plan its packs from them
    reader = dry_run.reader
    configs = dry_run.configs  # None for lengths or tokens that are planned without a model and a tokenizer
    documents = documents_of(reader, dry_run.settings)
    planner = planner_for(documents, dry_run.settings, args.world_size, cost_model=dry_run.cost_model)
    packs = first_packs(planner, reader, args.packs)
    has_tokens = not isinstance(reader, LengthRows)  # else only the lengths of documents are known
    if not has_tokens:
        packs = [pack.without_tokens() for pack in packs]
    tokenizer = None
    tokenizer_name = args.tokenizer or (configs and configs.model.model_name_or_path)
    if configs is not None and tokenizer_name:
        from .omissions import with_omissions
        from .tokens import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_name, configs)
        # Mark in the documents where the chat template leaves out a text of the row
        packs = with_omissions(packs, configs, model=tokenizer_name, reader=reader)
    picture = None
    if draws_file:
        picture = _picture_path(args.plot)
        make_report(planner, reader).plot(picture)
    if args.json:
        pack_values = [pack.to_dict(tokenizer) for pack in packs]
        result = pack_values if picture is None else {"plot": str(picture), "packs": pack_values}
        print(json.dumps(result, indent=2))
        return 0
    console = Console(highlight=False)
    texts = [pack_text(pack, tokenizer, num_documents=args.documents, num_tokens=args.tokens) for pack in packs]
    if args.plot and picture is None:
        texts.append(draw_plan(make_report(planner, reader), console.width))
    print(LEGEND)
    for text in texts:
        if console.is_terminal:
            console.print(text)
        else:
            print(text.plain)  # lines are not wrapped, because a file has no width
    if configs is not None and tokenizer_name and has_tokens:
        _print_data_findings(configs, tokenizer_name)
    if picture is not None:
        print(f"Drawn: {picture}")
    return 0


def _picture_path(plot: str) -> Path:
    """Return the file of the picture from the value of `--plot`: a file with or without a suffix, or a folder."""
    path = Path(plot)
    if path.is_dir():
        return path / "packs.png"
    return path if path.suffix else path.with_suffix(".png")  # matplotlib would add it too, but the path is printed


def _print_data_findings(configs: "RunConfigs", tokenizer: str) -> None:
    """Print the report on each table of a run that has a warning or an error, such as texts that are left out."""
    from .omissions import report_tables

    for report in report_tables(configs, tokenizer):
        if not report.complete:  # `complete`: no finding is a warning or an error
            print(f"Not as it was given: {report}")
