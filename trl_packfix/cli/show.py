"""`trl-packfix show`: print or draw the first packs as the model will see them."""

import argparse
import json
from pathlib import Path

from . import flags
from .flags import Subparsers

EXAMPLES = """\
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --max-length 4096 --batch-size 1
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --packs 1 --documents 3 --tokens 200
  trl-packfix show chats.jsonl --model Qwen/Qwen3-0.6B --world-size 8 --plot packs.png

The packs are those of the first optimizer steps of a training run with the same flags. Exit code 0, or 2 if planning
failed."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `show` and its flags."""
    parser = flags.add_command(
        subparsers,
        "show",
        "DATA ...",
        epilog=flags.DATA_HELP + EXAMPLES,
        help="the first packs: documents, trained tokens, boundaries, position ids; --plot draws them",
        description="Show the contents of packed batches, token by token.",
    )
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="name or folder, if it is not that of the model")
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
        help="also draw a picture: .png, .svg or .pdf, or packs.png in a folder (needs matplotlib)",
    )
    parser.add_argument("--json", action="store_true", help="print the packs as JSON, with all documents and tokens")


def run(args: argparse.Namespace) -> int:
    """Plan the packs, print the first ones, and draw a picture with `--plot`. Return 0."""
    for name in ("packs", "documents", "tokens", "world_size"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"`{flag} {getattr(args, name)}` was given. It counts from 1. Set it to 1 or more.")
    from .sources import check_paths

    check_paths(args.more_flags)
    from rich.console import Console

    from ..reporting.build import make_report
    from ..reporting.packs import LEGEND, first_packs, pack_text
    from ..training.planner import documents_of
    from .configs import read_run
    from .data import check_parts, with_omissions
    from .forecast import planner_for
    from .lengths import LengthRows
    from .tokens import load_model_config, load_tokenizer, make_costs, read_documents

    # 1. Plan the packs.
    configs = read_run(args)
    config = configs.training
    reader = read_documents(configs, args.tokenizer)
    costs = make_costs(load_model_config(configs), reader)
    planner = planner_for(documents_of(reader, config), config, args.world_size, cost_model=costs)

    # 2. Draw the picture.
    picture = None
    if args.plot:
        picture = Path(args.plot)
        if picture.is_dir():
            picture = picture / "packs.png"
        elif not picture.suffix:
            picture = picture.with_suffix(".png")  # matplotlib would add it too, but the path is printed below
        try:
            make_report(planner, reader).plot(picture)
        except ImportError as error:
            raise ValueError(
                f"`--plot {args.plot}` was given and matplotlib is not installed. The picture is drawn with it. Run "
                "`pip install matplotlib`."
            ) from error

    # 3. Print the first packs.
    tokenizer_name = args.tokenizer or configs.model.model_name_or_path
    tokenizer = load_tokenizer(tokenizer_name, config.trust_remote_code) if tokenizer_name else None
    packs = first_packs(planner, reader, args.packs)
    if isinstance(reader, LengthRows):
        packs = [pack.without_tokens() for pack in packs]
    packs = with_omissions(packs, configs, model=tokenizer_name, reader=reader)
    if args.json:
        pack_values = [pack.to_dict(tokenizer) for pack in packs]
        result = pack_values if picture is None else {"plot": str(picture), "packs": pack_values}
        print(json.dumps(result, indent=2))
        return 0
    console = Console(highlight=False)
    print(LEGEND)
    for pack in packs:
        text = pack_text(pack, tokenizer, num_documents=args.documents, num_tokens=args.tokens)
        if console.is_terminal:
            console.print(text)
        else:
            print(text.plain)  # lines are not wrapped, because a file has no width

    # 4. Print in how many rows the chat template leaves out texts.
    if tokenizer_name and not isinstance(reader, LengthRows):
        for report in check_parts(configs, tokenizer_name):
            if not report.complete:
                print(f"Not as it was given: {report}")
    if picture is not None:
        print(f"Drawn: {picture}")
    return 0
