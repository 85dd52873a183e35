"""What a recipe makes of a row, or why it makes nothing of it; and the counts of the rows of a table."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset

from .texts import NoTextError, text_columns

BAD_ROW_COLUMN = "packfix_bad_row"  # column: the reason why a row has no tokens; empty if it has tokens
# Columns while turns are counted: the number of the row, and attributes of `Sample` and `AssistantTurnCounts`
BOOKKEEPING_COLUMNS = ROW_COLUMN, TURN_COLUMN, *_ = [
    f"packfix_{name}" for name in ("row", "turn", "turns", "context", "earlier")
]
MAX_ROWS_NAMED = 10  # rows that a message names


@dataclass(frozen=True)
class PerTurnCounts:
    """What became of the conversations of a table, with `per_turn`."""

    conversations: int  # rows given
    samples: int  # assistant turns that became a sample
    without_turn: int  # conversations without an assistant turn: each is one document without a trained token
    bad: int  # turns, or whole conversations, that cannot be rendered and are dropped (`bad_rows="drop"`)
    left_out: int = 0  # assistant turns that are not trained (`message_train_key`, `assistant_turns`)

    def line(self) -> str:
        """
        >>> PerTurnCounts(1200, 14054, 3, 0).line()
        '1,200, one document for each of their 14,054 assistant turns; 3 without an assistant turn'
        """
        others = {
            "without an assistant turn": self.without_turn,
            "turns are not trained (their weight is 0, or not the last)": self.left_out,
            "turns cannot be rendered and are dropped": self.bad,
        }
        text = f"{self.conversations:,}, one document for each of their {self.samples:,} assistant turns"
        return "; ".join([text, *(f"{count:,} {what}" for what, count in others.items() if count)])


@dataclass(frozen=True)
class AssistantTurnCounts:
    """Assistant turns, and those of them that are not trained."""

    turns: int = 0  # those of a prompt left out
    context: int = 0  # with a weight of 0
    earlier: int = 0  # others that are not the last, with `assistant_turns="last"`


@dataclass(frozen=True)
class TrainedSummary:
    """What the loss of a run is computed on."""

    rule: str  # in words, with the setting that chose it
    key: str | None = None  # of messages, by which turns are left out
    counts: AssistantTurnCounts | None = None  # assistant turns of a table, with `assistant_only_loss`

    def line(self, num_trained: int, num_tokens: int) -> str:
        """
        >>> counts = AssistantTurnCounts(turns=9, context=1, earlier=0)
        >>> TrainedSummary("assistant turns (`assistant_only_loss`)", "weight", counts).line(3, 12)
        '25.0 %: assistant turns (`assistant_only_loss`), 8 of 9; not trained: 1 with `weight` 0'
        """
        text = f"{num_trained / num_tokens * 100:.1f} %: {self.rule}" if num_tokens else self.rule
        counts = self.counts
        if counts is None:
            return text
        left = [f"{counts.context:,} with `{self.key}` 0"] if counts.context else []
        left += [f'{counts.earlier:,} before the last (`assistant_turns="last"`)'] if counts.earlier else []
        text += f", {counts.turns - counts.context - counts.earlier:,} of {counts.turns:,}"
        return text + (f"; not trained: {', '.join(left)}" if left else "")


@dataclass(frozen=True)
class Sample:
    """What is made of a row, or of one of its turns; or the reason why nothing could be made."""

    columns: Mapping[str, object]  # tokens and labels; of a row with images what was measured
    turn: int = -1  # index of the message that is trained, of a sample of one turn
    counts: AssistantTurnCounts = AssistantTurnCounts()  # the assistant turns of the row, in the first of its samples
    reason: str = ""  # then there are no columns

    @classmethod
    def of(cls, tokens: list[int], labels: list[int], counts: AssistantTurnCounts = AssistantTurnCounts()) -> "Sample":
        # Arrays, because lists of Python's integers would need many times the memory
        columns = {"input_ids": np.array(tokens, np.int32), "labels": np.array(labels, np.int64)}
        return cls(columns, counts=counts)


class UnknownTurnError(ValueError):
    """A row of which it is not known which tokens are to be trained."""


def raise_bad_rows(name: str, first: list[tuple[int, str]], count: int, *, total: int) -> NoReturn:
    """Raise a ValueError that names the `first` of `count` bad rows, with the reason of the first."""
    row, why = first[0]
    if count == total:
        remedy = "Give rows of the form that it needs, or set `chat_template_path` to a template that takes these."
    else:
        remedy = (
            "Correct or remove these rows (`dataset.select`), set `chat_template_path` to a template that takes them, "
            'or set `bad_rows="drop"`, which drops and counts them as long as other rows remain.'
        )
    raise ValueError(
        f"{count} of {total} rows of the {name} dataset cannot be tokenised; the first are "
        f"{[number for number, _ in first]}. Row {row}: {why}. Every row must go through the chat template and the "
        f"tokenizer. {remedy}"
    )


def explain_bad_row(row: Mapping[str, object], error: Exception, text_field: str = "") -> str:
    """Why a row cannot be tokenised: the missing or malformed field, if one is found, and the error."""
    if isinstance(error, UnknownTurnError):
        return str(error)
    gap = next(_find_gaps(row, text_field), None)
    if isinstance(error, NoTextError):
        return gap or str(error)
    text = next(iter(str(error).splitlines()), "").rstrip(". ")
    return (f"{gap}; " if gap else "") + f"{type(error).__name__}: {shorten(text, 300, placeholder=' ...')}"


def _find_gaps(row: Mapping[str, object], text_field: str) -> Iterator[str]:
    """The fields of a row that do not have the form in TRL's documentation."""

    def kind(value: object) -> str:
        return "None" if value is None else f"of type {type(value).__name__}"

    columns = ("messages", "conversations", "prompt", "completion", text_field)
    read = text_columns(row, text_field) or columns
    for column in (column for column in columns if column in row and column in read):
        value = row[column]
        if isinstance(value, str) and column not in ("messages", "conversations"):
            continue
        if not isinstance(value, list) or column == text_field:
            yield f"`{column}` is {kind(value)}"
        elif not value:
            yield f"`{column}` is an empty list"
        else:
            # TRL renames the keys of `conversations` in place
            names = ("from", "value") if column == "conversations" else ("role", "content")
            for i, message in enumerate(value):
                if not isinstance(message, dict):
                    yield f"`{column}[{i}]` is {kind(message)}"
                    continue
                role = message.get(names[0], message.get("role"))
                content = message.get(names[1], message.get("content"))
                if not isinstance(role, str):
                    yield f"`{column}[{i}]` has no `{names[0]}`"
                elif content is None:
                    yield f"`{column}[{i}]` ({role}) has no `{names[1]}`"
                elif not isinstance(content, str | list):
                    yield f"`{column}[{i}]` ({role}) has a `{names[1]}` that is {kind(content)}"
    if isinstance(tools := row.get("tools"), str):
        try:
            json.loads(tools)
        except ValueError:
            yield "`tools` is a text that is not JSON"


def read_integer_column(samples: Dataset, name: str) -> npt.NDArray[np.int64]:
    """A column of numbers, shape (samples,)."""
    numbers: npt.NDArray[np.int64] = samples.select_columns(name).with_format("arrow")[:][name].to_numpy()
    return numbers


def mask_counts(samples: Dataset) -> AssistantTurnCounts:
    return AssistantTurnCounts(*(int(read_integer_column(samples, name).sum()) for name in BOOKKEEPING_COLUMNS[2:]))


def bad_row_mask(dataset: Dataset) -> npt.NDArray[np.bool_]:
    """Which rows have a reason in the column `BAD_ROW_COLUMN`, shape (R,); none if the dataset has no such column."""
    if BAD_ROW_COLUMN not in dataset.column_names:
        return np.zeros(len(dataset), dtype=bool)
    reasons = dataset.select_columns(BAD_ROW_COLUMN).with_format("arrow")[:][BAD_ROW_COLUMN]
    return pc.fill_null(pc.not_equal(reasons, ""), False).to_numpy()


# Libraries whose code decides what is cached: tokens, lengths of images, random orders
_LIBRARIES = ("datasets", "jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers", "trl")


def hash_sources(package: Path) -> str:
    """Hash the names and the content of all Python files in the folder of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _hash_versions() -> str:
    """Hash the installed versions of the libraries whose code decides what is cached."""
    installed = []
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):  # torchvision is needed for some images only
            installed.append(f"{name} {version(name)}")
    return hashlib.sha256("\n".join(installed).encode()).hexdigest()


# Computed at import: the source files may change during the run
PREPARATION_SOURCE_HASH = f"{hash_sources(Path(__file__).parents[1])} {_hash_versions()}"


def hash_modules_of(*users: object) -> str:
    """Hash the files of the modules that define these functions, classes or objects of the user.

    `datasets` hashes what a module defines by its name, so code that was changed would find the rows of the code before
    it. Definitions of the script itself (`__main__`) are left out: `datasets` hashes their code.
    """
    digest = hashlib.sha256()
    for user in users:
        while isinstance(user, partial):
            user = user.func
        module = sys.modules.get(getattr(user, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if file is not None and user.__module__ != "__main__":
            with suppress(OSError):  # a module in an archive
                digest.update(Path(file).read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class HashedMapFunction:
    """A function for `Dataset.map`, whose result `datasets` finds again only with the same code.

    `datasets` hashes a function of a module by its name, but an object by its attributes.
    """

    function: Callable[..., Any]
    code: str = PREPARATION_SOURCE_HASH
    users_code: str = ""  # of what the function calls, see `hash_modules_of`

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.function(*args, **kwargs)
