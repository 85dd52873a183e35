"""`trl-packfix check`: test whether a document in a pack changes another, or whether a dataset loses something.

Functions import heavy libraries only when they run, so that `--help` is fast.
"""

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from . import flags
from .flags import Subparsers

if TYPE_CHECKING:
    from .configs import RunConfigs

EXAMPLES = """\
  trl-packfix check Qwen/Qwen3-0.6B --max-length 8192 --dtype bfloat16
  trl-packfix check tiiuae/falcon-7b --config-only
  trl-packfix check Qwen/Qwen3-0.6B --dataset chats.jsonl \\
      --assistant-only-loss

The flags that matter are `max_length` (the longest document of the run; 1,024 by default), `dtype` (by default bfloat16
on CUDA, else float32), `attn_implementation`, `model_init_kwargs`, `enforce_flash_attention`, `on_leak`,
`share_prefixes`, `tokens_per_rank` and `trust_remote_code`. The line `attention` names the tested attention: that of
`--attn_implementation`, or without this flag the one that training would choose. Packs that ranks share
(`tokens_per_rank`) are not tested, because ranks are needed for it. Exit code 0 if packed training with it is correct,
repaired or not; 1 if it is not, or if training refuses one of these settings on this model; 2 if the model could not be
tested.

The verdict is one of isolated (documents in packs do not influence each other), repaired (they do not, after a repair),
unpacked (documents train as padded rows), leaks (they influence each other), wrong (a document differs from itself
alone) and fails (the model does not run on packs).

With --dataset the data are tested instead: is everything that their rows give in the tokens, once, with the chat
template of MODEL or of --chat-template-path. Exit code 1 if something is left out, repeated or trained wrongly."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `check` and its flags."""
    parser = flags.add_command(
        subparsers,
        "check",
        usage="MODEL",
        epilog=flags.FIELDS_HELP + EXAMPLES,
        help="test on a model whether documents in a pack influence each other, and repair it if they do",
        description="Test a model as the trainer does before its first step. MODEL is a name on the hub or a folder; "
        "by default it is that of the config file.",
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="fetch no weights: test a tiny random model with this config except for its sizes",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        metavar="DATA",
        help="test these data instead: files, folders or names on the hub, with the tokenizer of MODEL",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Check the model and print the result. Return 0 if training on packs is correct, else 1."""
    from ..reporting.report import show_lines
    from .check_model import check_model
    from .configs import read_run

    configs = read_run(args)
    # The positional arguments name the model. In other commands they name datasets
    names = configs.positionals or [name for name in [configs.model.model_name_or_path] if name]
    if len(names) != 1:
        raise ValueError(
            f"`check` was given with {len(names)} models. It tests one. Give its name on the hub or its folder, or set "
            "`model_name_or_path` in the config file."
        )
    if args.dataset:
        of_model = configs._replace(model=replace(configs.model, model_name_or_path=names[0]))
        return _check_data(of_model, names[0], args.dataset, as_json=args.json)
    result = check_model(names[0], configs, config_only=args.config_only)
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_lines("Isolation check", [*result.lines()])
    return 0 if result.is_right else 1


def _check_data(configs: "RunConfigs", model: str, datasets: list[str], *, as_json: bool) -> int:
    """Test these datasets, not those of the config file, and print a report of each. Return 0 if all are complete."""
    from .omissions import report_tables

    configs.script.dataset_name = datasets
    configs.mixture.datasets = []
    reports = list(report_tables(configs, model))
    tested = {report.name for report in reports}
    tokenised = next((name for name in datasets if name not in tested), None)
    if tokenised is not None:
        raise ValueError(
            f"`--dataset {tokenised}` was given, and it is tokenised. What its rows had before is not known from "
            "tokens, so it cannot be tested. Give the data as they were before."
        )
    if as_json:
        print(json.dumps([asdict(report) | {"complete": report.complete} for report in reports], indent=2))
    else:
        print(*reports, sep="\n")
    return 0 if all(report.complete for report in reports) else 1
