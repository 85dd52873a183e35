"""What the commands share about flags: short names, help texts, suggestions for misspelt names, and named settings."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from shutil import get_terminal_size
from textwrap import fill, wrap
from typing import Any, TypeAlias

HELP_WIDTH = 80  # characters of a line of `--help`
# Short flag -> long flag, of the field of a config. `train` takes only the long flags, as `trl sft` does
SHORT_FLAGS = {
    "--model": "--model_name_or_path",
    "--split": "--dataset_train_split",
    "--name": "--dataset_config",
    "--text-field": "--dataset_text_field",
    "--num-proc": "--dataset_num_proc",
    "--strategy": "--packing_strategy",
    "--batch-size": "--per_device_train_batch_size",
    "--accumulation": "--gradient_accumulation_steps",
}
BOOLEAN_TEXTS = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")  # what argparse takes for a switch

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FIELDS_HELP = f"""\
Every flag and file of `trl-packfix train` is taken, with dashes or underscores; its --help says what they do. Short:
{", ".join(f"{flag} for {field}" for flag, field in SHORT_FLAGS.items())}.

"""
DATA_HELP = f"""\
DATA is one or several files (.jsonl, .json, .parquet, .csv), folders written by `prepare` or `save_to_disk`, or names
on the hub, joined to one table; or files of lengths in tokens: .txt with one number per line, .npy, .json with a list,
.csv with a column `length`. By default it is that of the config file.

{FIELDS_HELP}Tokens are decided by --model, --assistant-only-loss, --completion-only-loss, --per-turn,
--assistant-turns, --message-train-key, --train-empty-thinking, --eos-token, --chat-template-path, --text-field,
--bad-rows; packs by --max-length, --strategy, --batch-size, --accumulation, --overlong, --balance, --seed,
--tokens-per-rank, --exchange-speeds, --share-prefixes.

"""


class HelpFormatter(argparse.HelpFormatter):
    """A formatter for 80 columns. It fills paragraphs, and keeps lines that begin with a space, such as examples."""

    def __init__(self, prog: str, **settings: Any):
        width = min(HELP_WIDTH, get_terminal_size().columns) - 1
        super().__init__(prog, **({"max_help_position": 28, "width": width} | settings))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = []
        for paragraph in text.strip("\n").split("\n\n"):
            for is_example, group in groupby(paragraph.split("\n"), lambda line: line.startswith(" ")):
                lines = list(group)
                filled = "\n".join(lines) if is_example else fill(" ".join(lines), width, break_on_hyphens=False)
                blocks.append(filled + "\n")
            blocks[-1] += "\n"
        return "".join(blocks).rstrip() + "\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Name a flag once, though it may be written with dashes and with underscores."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        # Show each flag in the spelling that the command declares first. A later entry of a dictionary replaces an
        # earlier one, so the names are read from the last to the first, and then put in order again
        spellings = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
        names = ", ".join(reversed(spellings.values()))
        return names if action.nargs == 0 else f"{names} {self._format_args(action, action.dest.upper())}"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and action.option_strings:
            # argparse would repeat the name of the flag, or list its choices, which `_expand_help` writes into the help
            return lambda count: ("VALUE",) * count
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        if action.metavar is None and action.choices is not None and action.option_strings:
            text += f". One of {', '.join(map(str, action.choices))}"
        return text


class CommandParser(argparse.ArgumentParser):
    """A parser whose message about an unknown command or choice suggests a similar one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            names = [str(choice) for choice in choices]
            suggestion = did_you_mean([str(value)], names, cutoff=0.6)
            raise argparse.ArgumentError(action, f"there is no {value!r}{suggestion}. Choose from {', '.join(names)}")


def add_command(subparsers: Subparsers, name: str, usage: str, *, epilog: str, **texts: Any) -> argparse.ArgumentParser:
    """Add a command that reads the config of a run, and return its parser.

    The parser knows the flags of the command and `--config`. It leaves the flags of the run to `configs.parse_configs`.

    Args:
        usage: the words and the flags of its own that the command needs, for the first line of its help.
        texts: further arguments of argparse, such as `help` and `description`.
    """
    parser = subparsers.add_parser(
        name,
        usage=f"trl-packfix {name} {usage} [--config FILE] [--FLAG ...]",
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # `--packing`, a flag of a run, is also the beginning of `--packing_strategy` of `plan`
        **texts,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml", help="config file of a training run"
    )
    return parser


def add_world_size(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Add the flag for the number of ranks; `settings` are further arguments of argparse."""
    text = "data-parallel ranks, usually GPUs (default: 1)"
    parser.add_argument("--world-size", "--gpus", type=int, metavar="RANKS", help=text, **settings)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the tokenizer."""
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="name or folder, if it is not that of the model")


def complete_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Replace short flags by the flags of fields, and give switches without a value the value `true`.

    Otherwise argparse would take the DATA behind a switch for its value.
    """
    # For a boolean field the parser has the constant True, which a flag gets if no value follows it
    switches = [name for action in parser._actions if action.const is True for name in action.option_strings]
    completed = []
    for word, next_word in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        lacks_value = name in switches and not equals and next_word.lower() not in BOOLEAN_TEXTS
        completed.append(SHORT_FLAGS.get(name, name) + ("=true" if lacks_value else equals + value))
    return completed


def did_you_mean(names: Iterable[str], known: Iterable[str], cutoff: float = 0.75) -> str:
    """Return a text for a message that suggests known names similar to `names`; "" if there are none.

    Args:
        cutoff: the similarity from which a name is suggested, from 0 (any name) to 1 (an equal name).

    >>> did_you_mean(["--learning_rat", "--x"], ["--learning_rate", "--seed"])
    ' (did you mean `--learning_rate`?)'
    """
    known = list(known)
    similar = dict.fromkeys(match for name in names for match in get_close_matches(name, known, n=1, cutoff=cutoff))
    return f" (did you mean {', '.join(f'`{name}`' for name in similar)}?)" if similar else ""


@contextmanager
def setting_named(setting: str, advice: str) -> Iterator[None]:
    """Turn errors within this context into a ValueError that names the setting whose value cannot be loaded.

    Most messages of transformers name only the hub.

    Args:
        advice: what to give in place of the value, as the end of a sentence.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`{setting}` was given. It cannot be loaded: {reason}. Give {advice}.") from error


MODEL_HELP = (
    "the name of a model on the hub or a folder with one, and `--trust-remote-code` if it has code that you trust"
)
