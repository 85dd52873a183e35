"""`trl-packfix check`: test whether a document in a pack changes another, on this model and machine."""

import argparse
import json
from typing import Any

from .flags import add_trust_flag


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="test on a model whether documents in a pack influence each other, and repair it if they do",
        description="Test a model as the trainer does before its first step. Exit code 0 if packed training of it is "
        "correct, repaired or not; 1 if it is not; 2 if the model could not be tested.",
    )
    parser.add_argument("model", metavar="MODEL", help="name on the hub, or a local path")
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


def run(args: argparse.Namespace) -> int:
    from ..data.dataset_checks import check_max_length
    from .check_model import check_model

    check_max_length(args.max_length, 1)
    result = check_model(
        args.model,
        args.config_only,
        args.max_length,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        on_leak=args.on_leak,
        trust_remote_code=args.trust_remote_code,
    )
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        result.show()
    return 0 if result.right else 1
