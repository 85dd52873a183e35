"""Define what all modules of `samples` share: samples, reasons why rows are bad, and counts of turns.

A recipe (`recipes.py`) makes one or several `Sample`s of a row of the user's dataset. A sample has tokens and labels,
or the reason why there are none: then the row, or the turn, is bad. `make_samples.py` writes samples as columns,
counts them in `PerTurnCounts` or `AssistantTurnCounts`, and raises or drops the bad ones. `HashedMapFunction` and the
hashes at the end of the module decide when `datasets` may reuse samples from its cache.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from operator import add
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset

from ..version import installed_version
from .texts import NoTextError, arrow_column, text_columns

BAD_ROW_COLUMN = "packfix_bad_row"  # column: the reason why a row has no tokens; empty if it has tokens
# Columns that samples have until their turns are counted: index of the row, index of the turn, and `turns`, `context`
# and `earlier` of `AssistantTurnCounts`
ROW_COLUMN = "packfix_row"
TURN_COLUMN = "packfix_turn"
BOOKKEEPING_COLUMNS = [ROW_COLUMN, TURN_COLUMN, "packfix_turns", "packfix_context", "packfix_earlier"]
MAX_ROWS_NAMED = 10  # a message, or a finding of the report on the data, names at most this many rows


def reads_completion_mask(completion_only_loss: bool | None, columns: Collection[str]) -> bool:
    """Return whether TRL reads the column `completion_mask` of rows that are tokenised and have no `labels`.

    It does if `completion_only_loss` is True or, if that is None, in rows with a `prompt` and a `completion`.
    """
    return {"prompt", "completion"} <= {*columns} if completion_only_loss is None else completion_only_loss


@dataclass(frozen=True)
class PerTurnCounts:
    """Counts of the conversations of a table, and of the samples that `per_turn` made of their turns."""

    conversations: int  # rows of the table
    samples: int  # assistant turns that became a sample
    without_turn: int  # conversations without an assistant turn: each is one document without a trained token
    bad: int  # turns, or whole conversations, that cannot be rendered and are dropped (`bad_rows="drop"`)
    left_out: int = 0  # assistant turns that are not trained (`message_train_key`, `assistant_turns`)

    def __add__(self, other: "PerTurnCounts") -> "PerTurnCounts":
        """Return the counts of two tables together."""
        return PerTurnCounts(*map(add, astuple(self), astuple(other)))

    def line(self) -> str:
        """Return the counts as text for the user, behind "Conversations of the ... dataset: ".

        >>> PerTurnCounts(conversations=1200, samples=14054, without_turn=3, bad=0).line()
        '1,200, one document for each of their 14,054 assistant turns; 3 without an assistant turn'
        """
        exceptions = {
            "without an assistant turn": self.without_turn,
            "turns are not trained (their weight is 0, or not the last)": self.left_out,
            "turns cannot be rendered and are dropped": self.bad,
        }
        text = f"{self.conversations:,}, one document for each of their {self.samples:,} assistant turns"
        return "; ".join([text, *(f"{count:,} {name}" for name, count in exceptions.items() if count)])


@dataclass(frozen=True)
class AssistantTurnCounts:
    """Counts of assistant turns, and of the turns that are not trained."""

    turns: int = 0  # all assistant turns, without turns in the prompt of a row
    context: int = 0  # turns that are not trained because their weight is 0
    earlier: int = 0  # further turns that are not trained because they are not the last (`assistant_turns="last"`)


@dataclass(frozen=True)
class TrainedSummary:
    """Which tokens the loss of a training run is computed on, in words."""

    rule: str  # the rule in words, with the setting that chose it
    key: str | None = None  # key of messages whose value 0 excludes a turn from training (`message_train_key`)
    counts: AssistantTurnCounts | None = None  # assistant turns of a table, if `assistant_only_loss` is set

    def line(self, num_trained: int, num_tokens: int) -> str:
        """Return the rule and the counts as one line for the user, with the percentage of trained tokens.

        >>> counts = AssistantTurnCounts(turns=9, context=1, earlier=0)
        >>> summary = TrainedSummary(rule="assistant turns (`assistant_only_loss`)", key="weight", counts=counts)
        >>> summary.line(num_trained=3, num_tokens=12)
        '25.0 %: assistant turns (`assistant_only_loss`), 8 of 9; not trained: 1 with `weight` 0'
        """
        text = f"{num_trained / num_tokens * 100:.1f} %: {self.rule}" if num_tokens else self.rule
        counts = self.counts
        if counts is None:
            return text
        text += f", {counts.turns - counts.context - counts.earlier:,} of {counts.turns:,}"
        not_trained = []
        if counts.context:
            not_trained.append(f"{counts.context:,} with `{self.key}` 0")
        if counts.earlier:
            not_trained.append(f'{counts.earlier:,} before the last (`assistant_turns="last"`)')
        return text + (f"; not trained: {', '.join(not_trained)}" if not_trained else "")


@dataclass(frozen=True)
class Sample:
    """The columns that a recipe made of a row or of one of its turns, or the reason why it could make none."""

    columns: Mapping[str, object]  # tokens, labels, and what was measured of a row with images; empty if bad
    turn: int = -1  # index of the trained message, if the sample trains one turn; else -1
    # Turns of the row. It is zero in all samples of the row but the first, so that sums over samples count a row once
    counts: AssistantTurnCounts = AssistantTurnCounts()
    reason: str = ""  # why the row or the turn is bad; empty if it is good

    @classmethod
    def from_tokens(
        cls, tokens: list[int], labels: list[int], counts: AssistantTurnCounts = AssistantTurnCounts()
    ) -> "Sample":
        """Make a sample of T token ids and T labels."""
        # Arrays, because lists of Python's integers would need many times the memory
        columns = {"input_ids": np.array(tokens, np.int32), "labels": np.array(labels, np.int64)}
        return cls(columns, counts=counts)


class UnknownTurnError(ValueError):
    """An error of a row whose trained tokens cannot be determined."""


def raise_bad_rows(name: str, first: list[tuple[int, str]], count: int, *, total: int) -> NoReturn:
    """Refuse a dataset for its bad rows.

    Args:
        name: The dataset's name in the message.
        first: Index and reason of the first bad rows. All are named, and the message has the reason of the first.
        count: Number of bad rows.
        total: Number of all rows.

    Raises:
        ValueError: Always.
    """
    row, reason = first[0]
    if count == total:
        remedy = "Give rows of the form that it needs, or set `chat_template_path` to a template that takes these."
    else:
        remedy = (
            "Correct or remove these rows (`dataset.select`), set `chat_template_path` to a template that takes them, "
            'or set `bad_rows="drop"`, which drops and counts them as long as other rows remain.'
        )
    raise ValueError(
        f"{count} of {total} rows of the {name} dataset cannot be tokenised; the first are "
        f"{[number for number, _ in first]}. Row {row}: {reason}. Every row must go through the chat template and the "
        f"tokenizer. {remedy}"
    )


def explain_bad_row(row: Mapping[str, object], error: Exception, text_field: str = "") -> str:
    """Explain why a row cannot be tokenised.

    Args:
        row: The columns of the row by name.
        error: The error that a recipe raised for this row.
        text_field: Name of the column of plain text, if the recipe reads one.

    Returns:
        The first missing or malformed field of the row, if one is found, and the error in one line.
    """
    if isinstance(error, UnknownTurnError):
        return str(error)
    fault = next(_find_faults(row, text_field), None)
    if isinstance(error, NoTextError):
        return fault or str(error)
    text = next(iter(str(error).splitlines()), "").rstrip(". ")
    return (f"{fault}; " if fault else "") + f"{type(error).__name__}: {shorten(text, 300, placeholder=' ...')}"


def _find_faults(row: Mapping[str, object], text_field: str) -> Iterator[str]:
    """Yield a description of each missing or malformed field of a row, by the forms in TRL's documentation."""

    def describe_type(value: object) -> str:
        return "None" if value is None else f"of type {type(value).__name__}"

    columns = ("messages", "conversations", "prompt", "completion", text_field)
    # The columns that TRL would tokenise in this row; all, if there is none
    tokenised_columns = text_columns(row, text_field) or columns
    for column in columns:
        if column not in row or column not in tokenised_columns:
            continue
        value = row[column]
        if isinstance(value, str) and column not in ("messages", "conversations"):
            continue  # a prompt, a completion and the plain text may be text
        if not isinstance(value, list) or column == text_field:  # a list is no plain text
            yield f"`{column}` is {describe_type(value)}"
        elif not value:
            yield f"`{column}` is an empty list"
        else:
            role_key = "from" if column == "conversations" else "role"
            content_key = "value" if column == "conversations" else "content"
            for i, message in enumerate(value):
                if not isinstance(message, dict):
                    yield f"`{column}[{i}]` is {describe_type(message)}"
                    continue
                # TRL renames the keys of `conversations` in place, so they may be renamed already
                role = message.get(role_key, message.get("role"))
                content = message.get(content_key, message.get("content"))
                if not isinstance(role, str):
                    yield f"`{column}[{i}]` has no `{role_key}`"
                elif content is None:
                    yield f"`{column}[{i}]` ({role}) has no `{content_key}`"
                elif not isinstance(content, str | list):
                    yield f"`{column}[{i}]` ({role}) has a `{content_key}` that is {describe_type(content)}"
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            json.loads(tools)
        except ValueError:
            yield "`tools` is a text that is not JSON"


def read_integer_column(samples: Dataset, name: str) -> npt.NDArray[np.int64]:
    """Return a column of integers as an array, shape (samples,)."""
    numbers: npt.NDArray[np.int64] = arrow_column(samples, name).to_numpy()
    return numbers


def sum_turn_counts(samples: Dataset) -> AssistantTurnCounts:
    """Return the sums of the columns `packfix_turns`, `packfix_context` and `packfix_earlier` over all samples."""
    return AssistantTurnCounts(*(int(read_integer_column(samples, name).sum()) for name in BOOKKEEPING_COLUMNS[2:]))


def bad_row_mask(dataset: Dataset) -> npt.NDArray[np.bool_]:
    """Return for each of R rows whether it is bad, which means that `BAD_ROW_COLUMN` has a reason, shape (R,).

    Without this column no row is bad.
    """
    if BAD_ROW_COLUMN not in dataset.column_names:
        return np.zeros(len(dataset), dtype=bool)
    is_bad = pc.not_equal(arrow_column(dataset, BAD_ROW_COLUMN), "")
    return pc.fill_null(is_bad, False).to_numpy()  # null: rows that were joined without the column


# Libraries whose code decides what is cached: tokens, lengths of images, random orders of documents
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
    # torchvision may be missing: it is needed for some images only
    installed = [f"{name} {installed_version(name)}" for name in _LIBRARIES]
    return hashlib.sha256("\n".join(installed).encode()).hexdigest()


# Computed at import: the source files may change during the run
PREPARATION_SOURCE_HASH = f"{hash_sources(Path(__file__).parents[1])} {_hash_versions()}"


def hash_modules_of(*objects: object) -> str:
    """Hash the files of the modules that define these functions, classes or objects of the user.

    `datasets` hashes a function or class of a module by its name. Without this hash, rows in the cache would be reused
    after the user has changed the code that makes them. Definitions in the script itself (`__main__`) are omitted,
    because `datasets` hashes their code.
    """
    digest = hashlib.sha256()
    for users_object in objects:
        while isinstance(users_object, partial):
            users_object = users_object.func
        module = sys.modules.get(getattr(users_object, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if file is not None and users_object.__module__ != "__main__":
            with suppress(OSError):  # a module in a zip archive has no file
                digest.update(Path(file).read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class HashedMapFunction:
    """A function for `Dataset.map` whose cached result is reused only while the code is unchanged.

    `datasets` hashes a function of a module by its name, but an object by its attributes. So the hashes of the code are
    attributes here.
    """

    function: Callable[..., Any]
    code: str = PREPARATION_SOURCE_HASH
    users_code: str = ""  # hash of the user's modules that the function calls, see `hash_modules_of`

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.function(*args, **kwargs)
