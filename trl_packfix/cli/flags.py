"""Names of flags: the short ones, unknown and misspelt ones, and those whose value cannot be loaded."""

import argparse
import re
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

from ..training.foreign_keys import hints, other_defaults

SHORT = {
    "--model": "--model_name_or_path",
    "--split": "--dataset_train_split",
    "--name": "--dataset_config",
    "--text-field": "--dataset_text_field",
    "--num-proc": "--dataset_num_proc",
    "--strategy": "--packing_strategy",
    "--batch-size": "--per_device_train_batch_size",
    "--accumulation": "--gradient_accumulation_steps",
}
"""Flag -> that of the field of a config, for commands that do not train."""

# Files of packages in which each flag of a run is named, and those of them that declare the fields of its configs
SOURCES = {"trl_packfix": "training/config.py", "trl": "**/*.py", "transformers": "*.py", "accelerate": "commands/*.py"}
DECLARING = """trl_packfix/training/config.py transformers/training_args.py trl/scripts/utils.py
trl/trainer/base_config.py trl/trainer/sft_config.py trl/trainer/model_config.py""".split()

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FIELDS = f"""\
Every flag and file of `trl-packfix train` is taken, with dashes or underscores; its --help says what they do. Short:
{fill(", ".join(f"{flag} for {field}" for flag, field in SHORT.items()), 119, break_on_hyphens=False)}.

"""
DATA = f"""\
DATA is one or several files (.jsonl, .json, .parquet, .csv), folders written by `prepare` or `save_to_disk`, or names
on the hub, joined to one table; or files of lengths in tokens: .txt with one number per line, .npy, .json with a list,
.csv with a column `length`. By default it is that of the config file.

{FIELDS}Tokens are decided by --model, --assistant-only-loss, --completion-only-loss, --per-turn, --assistant-turns,
--message-train-key, --train-empty-thinking, --eos-token, --chat-template-path, --text-field, --bad-rows;
packs by --max-length, --strategy, --batch-size, --accumulation, --overlong, --balance, --seed, --tokens-per-rank,
--exchange-speeds, --share-prefixes.

"""


def add_command(subparsers: Subparsers, name: str, usage: str, *, epilog: str, **texts: Any) -> argparse.ArgumentParser:
    """A command that takes the flags of a run beside its own."""
    parser = subparsers.add_parser(
        name,
        usage=f"trl-packfix {name} {usage} [--config FILE.yaml] [--FLAG VALUE ...]",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `--packing` is a flag of a run, and the beginning of one of `plan`
        **texts,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml", help="config file of a training run"
    )
    return parser


def add_world_size(parser: argparse.ArgumentParser, **settings: Any) -> None:
    text = "data-parallel ranks, usually GPUs (default: 1)"
    parser.add_argument("--world-size", "--gpus", type=int, metavar="RANKS", help=text, **settings)


def did_you_mean(names: Iterable[str], known: Iterable[str]) -> str:
    """
    >>> did_you_mean(["--learning_rat", "--x"], ["--learning_rate", "--seed"])
    ' (did you mean `--learning_rate`?)'
    """
    known = list(known)
    alike = dict.fromkeys(match for name in names for match in get_close_matches(name, known, n=1, cutoff=0.75))
    return f" (did you mean {', '.join(f'`{name}`' for name in alike)}?)" if alike else ""


def refuse_unknown(wrong: list[str], known: Iterable[str], given: Set[str]) -> None:
    """Refuse names that are no fields, with what keys of other trainers are called here; `given` are all names."""
    if wrong:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in wrong)} was given, as a flag or in the config file"
            f"{did_you_mean([name for name in wrong if not hints([name])], known)}. No field of SFTConfig, "
            f"ModelConfig, ScriptArguments or the dataset mixture has this name, so it would be ignored.{hints(wrong)}"
            f"{other_defaults(given)} Correct or remove it; `trl-packfix train --help` lists all flags."
        )


def read_sources() -> tuple[str, set[str]]:
    """The source of what flags are made of, and the names of the fields that it declares."""
    specs = [(find_spec(package), glob) for package, glob in SOURCES.items()]
    files = [file for spec, glob in specs if spec and spec.origin for file in Path(spec.origin).parent.glob(glob)]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    declaring = "\n".join(text for file, text in texts.items() if any(map(file.match, DECLARING)))
    return "\n".join(texts.values()), {*re.findall(r"^    (\w+): ", declaring, re.MULTILINE)}


def refuse_unknown_flags(args: argparse.Namespace) -> None:
    """Refuse flags that no source names, before slow libraries are imported; `configs.parse` refuses the others."""
    short = SHORT if "config" in args else {}
    words = [short.get(word.partition("=")[0], word) for word in args.more_flags]
    flags = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    if not flags or getattr(args, "config", []):  # the message depends on the keys of the file
        return
    source, fields = read_sources()
    bare = {flag: flag.replace("-", "_").removeprefix("no_") for flag in flags}
    unknown = [flag for flag in flags if bare[flag] not in fields]
    if not re.search(rf"\b({'|'.join(re.escape(bare[flag]) for flag in unknown)})\b", source):
        given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
        refuse_unknown(unknown, [*fields, *vars(args)], given)


@contextmanager
def named(setting: str, what: str) -> Iterator[None]:
    """Name the setting whose value cannot be loaded, and what to give: most messages of transformers name the hub."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`{setting}` was given. It cannot be loaded: {reason}. Give {what}.") from error


MODEL = "the name of a model on the hub or a folder with one, and `--trust-remote-code` if it has code that you trust"
