"""Rows that cannot be tokenised: why, and how they are refused."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

from .row import UnknownTurnError


def refuse(name: str, first: list[tuple[int, str]], count: int, *, total: int) -> NoReturn:
    """Raise a ValueError that names the `first` of `count` bad rows, with the reason of the first."""
    row, why = first[0]
    raise ValueError(
        f"{count} of {total} rows of the {name} dataset cannot be tokenised; the first are "
        f"{[number for number, _ in first]}. Row {row}: {why}. Every row must go through the chat template and the "
        "tokenizer. Correct or remove these rows (`dataset.select`), set `chat_template_path` to a template that takes "
        'them, or set `bad_rows="drop"`, which drops and counts them as long as other rows remain.'
    )


def reason(row: Mapping[str, object], error: Exception, text_field: str = "") -> str:
    """Why a row cannot be tokenised: the missing or malformed field, if one is found, and the error."""
    if isinstance(error, UnknownTurnError):
        return str(error)
    text = next(iter(str(error).splitlines()), "")[:200].rstrip(". ")
    gap = next(_gaps(row, text_field), None)
    return (f"{gap}; " if gap else "") + f"{type(error).__name__}: {text}"


def _gaps(row: Mapping[str, object], text_field: str) -> Iterator[str]:
    """The fields of a row that do not have the form in TRL's documentation."""

    def kind(value: object) -> str:
        return "None" if value is None else f"of type {type(value).__name__}"

    columns = ("messages", "conversations", "prompt", "completion", text_field)
    for column in (column for column in columns if column in row):
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
