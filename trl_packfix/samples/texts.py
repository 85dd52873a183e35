"""Which columns of a row are tokenised.

TRL chooses them for a whole dataset by its first row. Here each row is looked at, because rows of several forms may be
in one dataset: tables that are joined give every row the columns of all, with None in those of the others.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, LargeList, List

PAIR = ("prompt", "completion")
MESSAGES = {"conversations": "from", "messages": "role"}  # columns of messages, and a key of these messages
# TRL reads any of these as a conversation, also if another column holds the text
TEXTS = (*PAIR, *MESSAGES, "chosen", "rejected")
Columns = tuple[str, ...]


class NoTextError(ValueError):
    """A row in which no column is tokenised."""


def text_columns(row: Mapping[str, Any], text_field: str) -> Columns:
    """The columns of a row that are tokenised, chosen in TRL's order of those that are not None; () if there are none.

    A prompt without a completion is not tokenised, nor is a text beside it, which may or may not have it.

    >>> text_columns({"prompt": "What?", "messages": [{"role": "user", "content": "What?"}]}, "text")
    ('messages',)
    >>> text_columns({"messages": None, "text": "Once upon a time"}, "text")
    ('text',)
    """
    if all(row.get(column) is not None for column in PAIR):
        return PAIR
    for column, key in MESSAGES.items():
        messages = row.get(column)
        # What an empty list should have held is not known: its row is bad
        if isinstance(messages, list) and (not messages or (isinstance(messages[0], dict) and key in messages[0])):
            return (column,)
    return (text_field,) if row.get("prompt") is None and row.get(text_field) is not None else ()


def with_one_text(row: Mapping[str, Any], text_field: str = "") -> dict[str, Any]:
    """The row without the texts that are not tokenised, and without arguments of the template that hold nothing.

    NoTextError: no column of the row is tokenised.
    """
    columns = text_columns(row, text_field)
    if not columns:
        is_half = row.get("prompt") is not None
        raise NoTextError("a prompt without a completion" if is_half else "no text to tokenise")
    unused = {*TEXTS, text_field} - {*columns}
    unused |= {name for name in ("tools", "chat_template_kwargs") if name in row and _is_empty(row[name])}
    return {name: row[name] for name in row if name not in unused}


def _is_empty(value: object) -> bool:
    """Whether an argument of the template is None, or a text without JSON, as LLaMA-Factory writes "no tools"."""
    return value is None or (isinstance(value, str) and not value.strip())


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether messages of the row are tokenised."""
    columns = text_columns(row, "")
    return bool(columns) and isinstance(row[columns[-1]], list)


def struct_columns(features: Features | None) -> dict[str, Any]:
    """Return the features of the columns of conversations that have dictionaries inside messages, tools or kwargs.

    Arrow gives every dictionary of such a column the keys of all others, with None as their value.
    """
    least = dict.fromkeys((*PAIR, *MESSAGES), 2) | dict.fromkeys(("tools", "chat_template_kwargs"), 1)
    columns = {name: features[name] for name in least if name in features} if features else {}
    return {name: feature for name, feature in columns.items() if _num_dicts(feature) >= least[name]}


def _num_dicts(feature: Any) -> int:
    """Count how many dictionaries stand in each other."""
    if isinstance(feature, dict):
        return 1 + max(map(_num_dicts, feature.values()), default=0)
    inner = _items_of(feature)
    return 0 if inner is None else _num_dicts(inner)


def _items_of(feature: Any) -> Any:
    """Return the feature of the items of a list, None of anything else, such as `Json`."""
    if isinstance(feature, List | LargeList):
        return feature.feature
    return feature[0] if isinstance(feature, list) and feature else None


def without_nulls(row: Mapping[str, Any], structs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a row without the keys that Arrow added in its `struct_columns`."""
    changed = {name: given_value(name, row[name], feature) for name, feature in structs.items() if name in row}
    return {**row, **changed}


def given_value(name: str, value: Any, feature: Any) -> Any:
    """Copy the value of one of the `struct_columns` without the keys that Arrow added to its dictionaries.

    The keys of a message itself are kept: transformers leaves out those that are None. A None in a column of the type
    `Json` was given, and is kept.
    """
    if name in ("tools", "chat_template_kwargs"):
        return _without_nulls(value, feature)
    if not isinstance(value, list):
        return value
    kinds = _items_of(feature)
    return [
        message and {key: _without_nulls(each, kinds.get(key)) for key, each in message.items()} for message in value
    ]


def _without_nulls(value: Any, feature: Any) -> Any:
    if isinstance(feature, dict) and isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}
        return {key: _without_nulls(item, feature.get(key)) for key, item in given.items()}
    if (inner := _items_of(feature)) is not None and isinstance(value, list):
        return [_without_nulls(item, inner) for item in value]
    return value


def forms_of_table(dataset: Dataset, text_field: str) -> Iterator[tuple[Columns, npt.NDArray[np.bool_]]]:
    """What `text_columns` may be in rows of a table, by its types, each with the rows that have it, shape (rows,)."""
    rest = np.ones(len(dataset), bool)
    kinds = {field.name: field.type for field in dataset.features.arrow_schema}
    forms: list[Columns] = [PAIR] if {*PAIR} <= {*kinds} else []
    forms += [(column,) for column, key in MESSAGES.items() if column in kinds and _holds_messages(kinds[column], key)]
    forms += [(text_field,)] if text_field in kinds and text_field != "prompt" else []
    for columns in forms:
        has = rest & ~np.any([missing(dataset, column) for column in columns], axis=0)
        if columns == (text_field,) and "prompt" in kinds:
            has &= missing(dataset, "prompt")
        yield columns, has
        rest &= ~has


def _holds_messages(kind: pa.DataType, key: str) -> bool:
    if isinstance(kind, pa.JsonType):
        return True
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    messages = kind.value_type
    has_key = pa.types.is_struct(messages) and messages.get_field_index(key) >= 0
    return has_key or isinstance(messages, pa.JsonType) or pa.types.is_null(messages)


def is_list(dataset: Dataset, column: str) -> bool:
    """Whether a column of a table holds lists: messages, if it is tokenised."""
    kind = dataset.features.arrow_schema.field(column).type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or isinstance(kind, pa.JsonType)


def missing(dataset: Dataset, column: str) -> npt.NDArray[np.bool_]:
    """Which rows of a table hold None in a column, shape (rows,)."""
    if not dataset.data.column(column).null_count:  # of all rows of the table, selected or not, without a copy
        return np.zeros(len(dataset), bool)
    values: pa.ChunkedArray = dataset.select_columns(column).with_format("arrow")[:][column]
    return np.array(values.is_null().to_numpy())
