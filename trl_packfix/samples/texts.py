"""Choose which columns of a row are tokenised, and remove what Arrow added to a row.

TRL chooses the columns of a whole dataset by its first row. The functions here choose them for each row, because one
dataset may have rows of several forms: if tables are concatenated, every row gets the columns of all tables, and None
in the columns that its own table does not have. The recipes (`recipes.py`), the checks (`checks.py`) and the proof of
the data (`data_proof.py`) call them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, LargeList, List

PAIR = ("prompt", "completion")
MESSAGES = {"conversations": "from", "messages": "role"}  # columns of messages, and the key of a message's role
# Columns in which TRL looks for a conversation, so `with_one_text` removes those that `text_columns` does not choose
TEXTS = (*PAIR, *MESSAGES, "chosen", "rejected")
Columns = tuple[str, ...]  # names of columns that are tokenised together


class NoTextError(ValueError):
    """An error of a row in which no column can be tokenised."""


def text_columns(row: Mapping[str, Any], text_field: str) -> Columns:
    """Return the columns of a row that are tokenised: the first in TRL's order that are not None; () if there are none.

    The order is prompt with completion, `conversations`, `messages`, and the column `text_field` of plain text.
    A prompt without a completion is not tokenised. The column `text_field` of the row is not tokenised then either,
    because its text may or may not repeat the prompt.

    >>> text_columns({"prompt": "What?", "messages": [{"role": "user", "content": "What?"}]}, "text")
    ('messages',)
    >>> text_columns({"messages": None, "text": "Once upon a time"}, "text")
    ('text',)
    """
    if all(row.get(column) is not None for column in PAIR):
        return PAIR
    for column, key in MESSAGES.items():
        messages = row.get(column)
        # An empty list is chosen too: tokenising it fails, so the row is bad, and no other column replaces it
        if isinstance(messages, list) and (not messages or (isinstance(messages[0], dict) and key in messages[0])):
            return (column,)
    return (text_field,) if row.get("prompt") is None and row.get(text_field) is not None else ()


def with_one_text(row: Mapping[str, Any], text_field: str = "") -> dict[str, Any]:
    """Return the row without texts that are not tokenised, and without empty arguments of the chat template.

    A row may have texts in several columns, of which `text_columns` chooses those that are tokenised.

    Raises:
        NoTextError: If no column of the row can be tokenised.
    """
    columns = text_columns(row, text_field)
    if not columns:
        is_half = row.get("prompt") is not None
        raise NoTextError("a prompt without a completion" if is_half else "no text to tokenise")
    unused = {*TEXTS, text_field} - {*columns}
    unused |= {name for name in ("tools", "chat_template_kwargs") if name in row and _is_empty(row[name])}
    return {name: row[name] for name in row if name not in unused}


def _is_empty(value: object) -> bool:
    """Return whether an argument of the template is None or white space, which LLaMA-Factory writes for "no tools"."""
    return value is None or (isinstance(value, str) and not value.strip())


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Return whether the tokenised columns of a row are lists of messages."""
    columns = text_columns(row, text_field="")  # a column of plain text is no conversation
    return bool(columns) and isinstance(row[columns[-1]], list)  # of a pair, the completion


def struct_columns(features: Features | None) -> dict[str, Any]:
    """Return the features of the columns that have dictionaries inside messages, tools or template arguments.

    Arrow stores all dictionaries of a column with the same keys. A key that a dictionary did not have gets the value
    None, and `without_nulls` removes these keys.
    """
    # For each column how deep dictionaries must be nested. A message is itself a dictionary, whose nulls transformers
    # removes, so only columns with dictionaries inside messages are returned
    min_depth = dict.fromkeys((*PAIR, *MESSAGES), 2) | dict.fromkeys(("tools", "chat_template_kwargs"), 1)
    columns = {name: features[name] for name in min_depth if name in features} if features else {}
    return {name: feature for name, feature in columns.items() if _num_dicts(feature) >= min_depth[name]}


def _num_dicts(feature: Any) -> int:
    """Return the depth of nested dictionaries in a feature; lists do not count."""
    if isinstance(feature, dict):
        return 1 + max(map(_num_dicts, feature.values()), default=0)
    return _num_dicts(feature.feature) if isinstance(feature, List | LargeList) else 0


def without_nulls(row: Mapping[str, Any], structs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a row without the keys that Arrow added in its `struct_columns`."""
    changed = {name: given_value(name, row[name], feature) for name, feature in structs.items() if name in row}
    return {**row, **changed}


def given_value(name: str, value: Any, feature: Any) -> Any:
    """Copy the value of one of the `struct_columns` without the keys that Arrow added to its dictionaries.

    Keys of a message itself remain, because transformers removes those that are None. In a column of the type `Json`,
    whose feature has no dictionaries, a None remains, because only the user can have written it.

    Args:
        name: Name of the column.
        value: Value of the column in one row.
        feature: Feature of the column.
    """
    if name in ("tools", "chat_template_kwargs"):
        return _without_nulls(value, feature)
    if not isinstance(value, list):
        return value
    return [
        # A message may be None
        message and {key: _without_nulls(element, feature.feature.get(key)) for key, element in message.items()}
        for message in value
    ]


def _without_nulls(value: Any, feature: Any) -> Any:
    """Copy nested lists and dictionaries without the keys whose value is None."""
    if isinstance(feature, dict) and isinstance(value, dict):
        items = {key: element for key, element in value.items() if element is not None}
        return {key: _without_nulls(element, feature.get(key)) for key, element in items.items()}
    if isinstance(feature, List | LargeList) and isinstance(value, list):
        return [_without_nulls(element, feature.feature) for element in value]
    return value


def forms_of_table(dataset: Dataset, text_field: str) -> Iterator[tuple[Columns, npt.NDArray[np.bool_]]]:
    """Yield the columns that `text_columns` may choose in a table, judged by the types of its columns.

    Yields:
        The columns, and for each row whether they are chosen in it, shape (rows,). A row has at most one choice.
    """
    is_unassigned = np.ones(len(dataset), bool)
    types = {field.name: field.type for field in dataset.features.arrow_schema}
    # The possible choices, in the order of `text_columns`
    forms: list[Columns] = [PAIR] if {*PAIR} <= {*types} else []
    forms += [(column,) for column, key in MESSAGES.items() if column in types and _holds_messages(types[column], key)]
    # `text_columns` never chooses a prompt alone
    forms += [(text_field,)] if text_field in types and text_field != "prompt" else []
    for columns in forms:
        is_chosen = is_unassigned & ~np.any([missing(dataset, column) for column in columns], axis=0)
        if columns == (text_field,) and "prompt" in types:
            is_chosen &= missing(dataset, "prompt")
        yield columns, is_chosen
        is_unassigned &= ~is_chosen


def _holds_messages(column_type: pa.DataType, key: str) -> bool:
    """Return whether a column of a type of Arrow may hold lists of messages with this key."""
    if isinstance(column_type, pa.JsonType):
        return True
    if not (pa.types.is_list(column_type) or pa.types.is_large_list(column_type)):
        return False
    messages = column_type.value_type
    has_key = pa.types.is_struct(messages) and messages.get_field_index(key) >= 0
    return has_key or isinstance(messages, pa.JsonType) or pa.types.is_null(messages)


def is_list(dataset: Dataset, column: str) -> bool:
    """Return whether a column may hold lists: its type is a list or `Json`. In a tokenised column they are messages."""
    column_type = dataset.features.arrow_schema.field(column).type
    return pa.types.is_list(column_type) or pa.types.is_large_list(column_type) or isinstance(column_type, pa.JsonType)


def missing(dataset: Dataset, column: str) -> npt.NDArray[np.bool_]:
    """Return for each row of a table whether it holds None in a column, shape (rows,)."""
    # Arrow's count needs no copy of the column. It includes rows that `Dataset.select` has left out, so it may be too
    # high
    if not dataset.data.column(column).null_count:
        return np.zeros(len(dataset), bool)
    return np.array(arrow_column(dataset, column).is_null().to_numpy())


def arrow_column(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """Return a column of the rows that a table has selected, as Arrow stores it: nothing is decoded."""
    values: pa.ChunkedArray = dataset.select_columns(column).with_format("arrow")[:][column]
    return values
