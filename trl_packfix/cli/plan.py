"""`trl-packfix plan`: compare values of max_length by what they cut and cost, before training."""

import argparse
from math import inf

from ..planning.strategies import STRATEGIES
from . import flags
from .flags import Subparsers

EXAMPLES = """\
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B
  trl-packfix plan chats.jsonl --model Qwen/Qwen3-0.6B \\
      --max-length 4096 8192 --world-size 8 64 512 --batch-size 1
  trl-packfix plan lengths.txt --strategy stream bfd_split wrapped \\
      --tflops 350 --json
  trl-packfix plan lengths.txt --max-length 131072 --tokens-per-rank 16384 \\
      --world-size 8 64
  trl-packfix plan --model Qwen/Qwen3-8B --gpus 8 --memory 80 --batch-size 1 \\
      --max-length 8192

The numbers are those that a training run with the same flags prints in its packing report. Exit code 0 if at most 1 %
of the trained tokens are lost at the recommended max_length; 1 if more are lost; 2 if planning failed."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `plan` and its flags."""
    parser = flags.add_command(
        subparsers,
        "plan",
        usage="[DATA ...]",
        epilog=flags.DATA_HELP + EXAMPLES,
        help="before training: efficiency, steps, imbalance and cut documents, by max_length, strategy and world size",
        description="Plan the packs of a dataset without training, and recommend a max_length. Needs no GPU and no "
        "weights.",
    )
    # In `train` these two flags set a field of the config, and take one value. Here they take several. All spellings
    # are declared, because a flag that this parser does not know goes to the parser of the config
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
    flags.add_world_size(parser, nargs="+", default=[1])  # `--world-size`, or `--gpus`
    flags.add_tokenizer(parser)
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
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU. Adds the predicted peak for full training and LoRA under DDP, ZeRO-2 and ZeRO-3, and "
        "the largest max_length that fits; needs --model, and no DATA",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help='with --memory: gradient_checkpointing_kwargs={"offload": true}; what checkpointing saves is on the host',
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Refuse wrong numbers and missing files before heavy libraries are imported, and run `forecast.show_plan`.

    Return the exit code.
    """
    tflops = [] if args.tflops is None else [args.tflops]
    for name, values in (("world-size", args.world_size), ("tflops", tflops)):
        if not all(0 < value < inf for value in values):
            raise ValueError(
                f"`--{name} {' '.join(map(str, values))}` was given. It must be above 0. Set positive numbers only."
            )
    from .sources import check_paths

    # The words that the parser of this command does not know (`cli/__init__.py`): DATA, and the flags of a run
    check_paths(args.unparsed_words)
    from .forecast import show_plan

    return show_plan(args)
