"""Read a run of `plan` or `show` on lengths or on tokens that sets few things, within a second.

The config classes of TRL, with which `configs.py` reads and checks every other run, take seconds to import. A run that
this module does not read has to be read there.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
from datasets import Dataset

from ..data.dataset_checks import check_id_range
from ..data.documents import Overlong
from ..data.reader import RowReader, TokenReader
from ..planning.strategies import STRATEGIES
from ..planning.units import Balance
from ..training.plain_settings import PlainSettings
from .flags import SHORT_FLAGS
from .lengths import LengthRows, read_lengths
from .sources import check_path, in_utf8, load_local

TOKEN_COLUMNS = {"input_ids", "labels", "seq_lengths"}  # the columns of a table that `prepare` writes
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
CHOICES = {"packing_strategy": [*STRATEGIES], "overlong": get_args(Overlong), "balance": get_args(Balance)}


@dataclass(frozen=True)
class PlainRun:
    """A run of `plan` or `show` without a model: its settings, its rows, and whether `max_length` was given."""

    settings: PlainSettings
    rows: RowReader
    has_max_length: bool


def read_plain_run(args: argparse.Namespace) -> PlainRun | None:
    """Return the run of a command; None if it has to be read with the config classes of TRL.

    That is a run with a config file, a model, or other data than files of lengths or one table of tokens; with flags
    that are not a number or a choice of planning; and with values that are refused, because the messages come from
    there.

    Args:
        args: the parsed flags of the command. Its `more_flags` are the flags of the run.
    """
    if args.config or args.tokenizer or getattr(args, "memory", None) is not None or getattr(args, "offload", False):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("data", nargs="*")
    for name in ("max_length", "seed", *COUNTS):
        parser.add_argument(*_spellings(name), dest=name, type=int)
    for name, choices in CHOICES.items():
        parser.add_argument(*_spellings(name), dest=name, choices=choices)
    try:
        flags, unknown = parser.parse_known_args(args.more_flags)
    except argparse.ArgumentError:
        return None
    given = {name: value for name, value in vars(flags).items() if name != "data" and value is not None}
    settings = replace(PlainSettings(), **given)
    # `plan` has these two flags, and compares several values
    compared = {"max_length": getattr(args, "max_length", None), "packing_strategy": getattr(args, "strategy", None)}
    each = [values or [getattr(settings, name)] for name, values in compared.items()]
    if unknown or not flags.data or not all(_is_plain(settings, *pair) for pair in product(*each)):
        return None
    rows = _read_rows(flags.data)
    if rows is None:
        return None
    for name in flags.data:
        print(f"Reading {name}", file=sys.stderr)
    return PlainRun(settings, rows, "max_length" in given)


def _read_rows(names: Sequence[str]) -> RowReader | None:
    """Return the rows of files of lengths, or of one table of tokens without other columns; None for other data."""
    lengths = []
    for name in names:
        with in_utf8(name):
            lengths_in_file = read_lengths(Path(name))
        if lengths_in_file is not None:
            lengths.append(lengths_in_file)
    if len(lengths) == len(names):
        return LengthRows(np.concatenate(lengths))
    if len(names) > 1:
        return None
    check_path(names[0])
    table = load_local(names[0])
    if not isinstance(table, Dataset) or not {"input_ids"} <= {*table.column_names} <= TOKEN_COLUMNS:
        return None
    check_id_range(table)
    return TokenReader(table)


def _spellings(field: str) -> list[str]:
    """Return the flags that set a field: with underscores, with dashes, and the short one if there is one."""
    flag = f"--{field}"
    short_flags = [short for short, long in SHORT_FLAGS.items() if long == flag]
    return list(dict.fromkeys([flag, flag.replace("_", "-"), *short_flags]))


def _is_plain(settings: PlainSettings, max_length: int, strategy: str) -> bool:
    """Return whether `SFTConfig` accepts these settings with this length and strategy."""
    has_counts = all(getattr(settings, name) >= 1 for name in COUNTS)
    has_policy = STRATEGIES[strategy].overlong != "split" or settings.overlong in (None, "split")
    return has_counts and has_policy and max_length >= 2 and settings.seed >= 0
