"""Rows that cannot be tokenised: found by running TRL's own preparation on single rows, and refused or dropped.

By default a table goes through TRL's maps unchanged, and rows are tried one by one only after a map has failed. With
`bad_rows="drop"`, and for streams always, TRL's functions run inside one map. For a row that fails, this map returns no
tokens and writes the reason to the column `BAD_ROW`.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from trl.data_utils import get_dataset_column_names

from ..compat import main_process_first
from ..data.cache_files import Cached
from ..data.masks import UnknownTurnError
from ..data.reader import BAD_ROW, bad_rows
from .config import SFTConfig
from .repeats import Repeats

logger = logging.getLogger(__name__)

NUM_SHOWN = 10  # bad rows named in a message
NUM_TRIED = 1000  # rows of a stream to try before it is refused for having no good row
CHATML = ("role", "content")
TOKENS = {"input_ids": [Value("int32")], "labels": [Value("int64")], BAD_ROW: Value("string")}


@dataclass(frozen=True)
class Step:
    """A `map` of TRL's preparation: a function of one row, its keyword arguments, and the columns that it removes."""

    function: Callable[..., dict[str, Any]]
    kwargs: dict[str, Any]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Preparation:
    """Replaces a stream while TRL prepares it: `map` records a step, and iterating applies all steps to each row.

    Iterating yields the rows that can be prepared. TRL reads the first of them to choose its steps.

    Raises:
        ValueError: on iteration, no row can be prepared.
    """

    rows: Iterable[dict[str, Any]]
    name: str
    text_field: str
    steps: tuple[Step, ...] = ()
    column_names = None  # unknown before a row is read, as for a stream

    def map(
        self,
        function: Callable[..., dict[str, Any]],
        fn_kwargs: dict[str, Any] | None = None,
        remove_columns: str | list[str] | None = None,
        batched: bool = False,
    ) -> "Preparation":
        assert not batched, "TRL maps rows one by one"
        removed = (remove_columns,) if isinstance(remove_columns, str) else tuple(remove_columns or ())
        steps = (*self.steps, Step(function, fn_kwargs or {}, removed))
        return Preparation(self.rows, self.name, self.text_field, steps)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        problems: list[tuple[int, str]] = []
        number, num_good = -1, 0
        for number, row in enumerate(self.rows):
            try:
                sample = _applied(self.steps, row)
            except Exception as error:
                problems.append((number, reason(row, error, self.text_field)))
            else:
                num_good += 1
                yield sample
        if not num_good:
            refuse(self.name, problems[:NUM_SHOWN], len(problems), total=number + 1)


def prepared(
    dataset: Dataset | IterableDataset,
    name: str,
    args: SFTConfig,
    *,
    prepare: Callable[..., Any],
    marks: bool,
) -> Dataset | IterableDataset:
    """Prepare a dataset as TRL does, and refuse or drop the rows that cannot be tokenised.

    Args:
        prepare: TRL's `_prepare_dataset` as a function of a dataset, `args` and `is_formatted`. The last is False if
            the user's formatting function has already been applied to the rows.
        marks: with `bad_rows="drop"`, keep bad rows in place, without tokens and with the reason in the column
            `BAD_ROW`, instead of removing them.

    Raises:
        ValueError: with `bad_rows="raise"`, rows cannot be tokenised; with "drop", no row can.
    """
    drops = args.bad_rows == "drop"
    if "input_ids" in get_dataset_column_names(dataset):
        return prepare(dataset, args)
    if isinstance(dataset, IterableDataset):
        return prepare(_stream_with_tokens(dataset, name, args, prepare=prepare, marks=marks), args, is_formatted=False)
    if drops:
        with main_process_first():
            dataset = _with_tokens(dataset, name, args, prepare=prepare, tokens_only=marks)
        refuse_or_name(dataset, name, drops)
        return prepare(dataset if marks else without_bad_rows(dataset), args, is_formatted=False)
    try:
        return prepare(dataset, args)
    except Exception as error:
        failure = error
    if dataset.format["type"] != "custom":  # TRL refuses transforms itself
        refuse_or_name(_with_tokens(dataset, name, args, prepare=prepare, tokens_only=True), name, drops)
    raise failure  # no single row was the cause


def _stream_with_tokens(
    dataset: IterableDataset, name: str, args: SFTConfig, *, prepare: Callable[..., Any], marks: bool
) -> IterableDataset:
    drops = args.bad_rows == "drop"
    steps = _recorded(dataset.take(NUM_TRIED), name, args, prepare=prepare)
    removed = _removed(get_dataset_column_names(dataset), steps)
    kwargs = {"steps": steps, "text_field": args.dataset_text_field, "name": name, "drops": drops}
    kwargs["repeats"] = Repeats()
    dataset = dataset.map(_tokens_of_stream, with_indices=True, fn_kwargs=kwargs, remove_columns=removed)
    return without_bad_rows(dataset) if drops and not marks else dataset


def refuse_or_name(dataset: Dataset, name: str, drops: bool) -> None:
    """Refuse bad rows or, with `drops`, name them in a warning as long as other rows remain.

    Raises:
        ValueError: with the bad rows, and the reason of the first.
    """
    bad = _bad_rows(dataset)
    if not len(bad):
        return
    first = _first(dataset, bad)
    if not drops or len(bad) == len(dataset):
        refuse(name, first, len(bad), total=len(dataset))
    logger.warning(
        "%d of %d rows of the %s dataset cannot be tokenised and are dropped; the first are %s. Row %d: %s.",
        *(len(bad), len(dataset), name, [row for row, _ in first], *first[0]),
    )


def without_bad_rows(dataset: Any) -> Any:
    """The rows that have tokens, of a table or a stream, without the column `BAD_ROW`."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_is_good).remove_columns(BAD_ROW)
    bad = _bad_rows(dataset)
    if len(bad):
        dataset = dataset.select(np.setdiff1d(np.arange(len(dataset)), bad))
    return dataset.remove_columns(BAD_ROW) if BAD_ROW in dataset.column_names else dataset


def _bad_rows(dataset: Dataset) -> np.ndarray:
    bad = bad_rows(dataset)
    return np.zeros(0, np.int64) if bad is None else np.flatnonzero(bad)


def _first(dataset: Dataset, bad: np.ndarray) -> list[tuple[int, str]]:
    """Row number and reason of the first bad rows."""
    reasons = dataset.select(bad[:NUM_SHOWN]).with_format(None)[BAD_ROW]
    return list(zip(bad[:NUM_SHOWN].tolist(), reasons, strict=True))


def _with_tokens(
    dataset: Dataset, name: str, args: SFTConfig, *, prepare: Callable[..., Any], tokens_only: bool
) -> Dataset:
    steps = _recorded(dataset, name, args, prepare=prepare)
    removed = dataset.column_names if tokens_only else _removed(dataset.column_names, steps)
    removed = [column for column in removed if column not in (args.weight_column, args.source_column)]
    others = {column: feature for column, feature in dataset.features.items() if column not in removed}
    return dataset.map(
        Cached(_tokens),
        fn_kwargs={"steps": steps, "text_field": args.dataset_text_field},
        remove_columns=removed,
        features=Features(others | TOKENS),
        num_proc=args.dataset_num_proc,
        desc=f"Tokenizing {name} dataset",
    )


def _recorded(rows: Any, name: str, args: SFTConfig, *, prepare: Callable[..., Any]) -> tuple[Step, ...]:
    """The steps from a row to `input_ids` and `labels`."""
    args = copy.copy(args)
    args.max_length, args.shuffle_dataset = None, False
    return prepare(Preparation(rows, name, args.dataset_text_field), args).steps


def _removed(columns: list[str], steps: tuple[Step, ...]) -> list[str]:
    """The columns that TRL removes. (It renames keys inside `conversations`, which changes the type of that column.)"""
    return [column for column in columns if any(column in step.removed for step in steps)]


def _applied(steps: tuple[Step, ...], row: dict[str, Any]) -> dict[str, Any]:
    for step in steps:
        sample = step.function(dict(row), **step.kwargs)
        row = {name: value for name, value in row.items() if name not in step.removed} | sample
    return row


def _tokens(row: Any, steps: tuple[Step, ...], text_field: str) -> dict[str, Any]:
    row = dict(row)
    try:
        sample = _applied(steps, row)
    except Exception as error:
        return {"input_ids": [], "labels": [], BAD_ROW: reason(row, error, text_field)}
    return {"input_ids": sample["input_ids"], "labels": sample["labels"], BAD_ROW: ""}


def _tokens_of_stream(
    row: dict[str, Any],
    index: int,
    steps: tuple[Step, ...],
    *,
    text_field: str,
    name: str,
    drops: bool,
    repeats: Repeats,
) -> dict[str, Any]:
    with repeats:
        sample = _tokens(row, steps, text_field)
    if drops:
        return sample
    why = sample.pop(BAD_ROW)
    if why:
        refuse_row_of_stream(name, index, why)
    return sample


def _is_good(row: dict[str, Any]) -> bool:
    return not row[BAD_ROW]


def refuse_row_of_stream(name: str, index: int, why: str) -> NoReturn:
    """Raise a ValueError that names a row of a stream, and why it cannot be tokenised."""
    raise ValueError(
        f"Row {index} of the {name} stream cannot be tokenised: {why}. Every row must go through the chat "
        "template and the tokenizer. Filter such rows out, set `chat_template_path` to a template that takes them, "
        'or set `bad_rows="drop"`.'
    )


def refuse(name: str, first: list[tuple[int, str]], count: int, *, total: int) -> NoReturn:
    """Raise a ValueError that names the `first` of `count` bad rows, with the reason of the first."""
    row, why = first[0]
    raise ValueError(
        f"{count} of {total} rows of the {name} dataset cannot be tokenised; the first are "
        f"{[number for number, _ in first]}. Row {row}: {why}. Every row must go through the chat template and the "
        "tokenizer. Correct or remove these rows (`dataset.select`), set `chat_template_path` to a template that takes "
        'them, or set `bad_rows="drop"`, which drops and counts them as long as other rows remain.'
    )


def reason(row: dict[str, Any], error: Exception, text_field: str) -> str:
    """Why a row cannot be tokenised: the missing or malformed field, if one is found, and the error."""
    if isinstance(error, UnknownTurnError):
        return str(error)
    text = next(iter(str(error).splitlines()), "")[:200].rstrip(". ")
    gap = _gap(row, text_field)
    return (f"{gap}; " if gap else "") + f"{type(error).__name__}: {text}"


def _gap(row: dict[str, Any], text_field: str) -> str | None:
    """The first field of a row that does not have the form in TRL's documentation."""
    columns = ("messages", "conversations", "prompt", "completion", text_field)
    gaps = (_gap_of_column(column, row[column], text_field) for column in columns if column in row)
    return next((gap for gap in gaps if gap is not None), None)


def _gap_of_column(column: str, value: Any, text_field: str) -> str | None:
    if isinstance(value, str) and column not in ("messages", "conversations"):
        return None
    if not isinstance(value, list) or column == text_field:
        return f"`{column}` is {_kind(value)}"
    if not value:
        return f"`{column}` is an empty list"
    names = ("from", "value") if column == "conversations" else CHATML
    gaps = (_gap_of_message(f"`{column}[{i}]`", message, names) for i, message in enumerate(value))
    return next((gap for gap in gaps if gap is not None), None)


def _gap_of_message(place: str, message: Any, names: tuple[str, str]) -> str | None:
    if not isinstance(message, dict):
        return f"{place} is {_kind(message)}"
    # TRL renames the keys of `conversations` in place.
    role, content = (message.get(name, message.get(new)) for name, new in zip(names, CHATML, strict=True))
    if not isinstance(role, str):
        return f"{place} has no `{names[0]}`"
    if content is None:
        return f"{place} ({role}) has no `{names[1]}`"
    if not isinstance(content, str | list):
        return f"{place} ({role}) has a `{names[1]}` that is {_kind(content)}"
    return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
