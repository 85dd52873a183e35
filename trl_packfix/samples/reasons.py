"""Rows that cannot be tokenised: why, and how they are refused."""

from collections.abc import Mapping
from typing import Any, NoReturn

from .row import UnknownTurnError

CHATML = ("role", "content")


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


def reason(row: Mapping[str, Any], error: Exception, text_field: str) -> str:
    """Why a row cannot be tokenised: the missing or malformed field, if one is found, and the error."""
    if isinstance(error, UnknownTurnError):
        return str(error)
    text = next(iter(str(error).splitlines()), "")[:200].rstrip(". ")
    gap = _gap(row, text_field)
    return (f"{gap}; " if gap else "") + f"{type(error).__name__}: {text}"


def _gap(row: Mapping[str, Any], text_field: str) -> str | None:
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
