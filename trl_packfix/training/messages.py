"""Messages that a chat template does not render as they are meant: roles of ShareGPT, fields that it leaves out.

TRL converts `conversations` with `from` and `value` to `role` and `content`, and keeps the names of the roles. Most
chat templates know `user` and `assistant`, and write `human` and `gpt` into the text. Here they are renamed with the
keys.

A template renders the fields of a message that it knows and leaves out the others without an error. Whether it leaves
one out is found by rendering rows with the field and without it.
"""

import json
import logging
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import get_dataset_column_names, is_conversational_from_value

from ..compat import main_process_first
from ..data.turns import Conversation, unended

logger = logging.getLogger(__name__)

ROLES = {"human": "user", "gpt": "assistant"}
# A message may hold a thought under several names for several templates; transformers copies it to the others.
FIELDS = (("reasoning_content", "thinking", "reasoning"), ("tool_calls",))
COLUMNS = ("messages", "conversations", "prompt", "completion")
NUM_OF_STREAM = 4  # rows of a stream to look at
NUM_DRAWN = 50  # rows to choose from, which differ in their shape
NUM_RENDERED = 10  # rows to render
NUM_LABELLED = 100  # rows in which the end of the last trained turn is looked for


def with_chat_roles(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """Rename the roles of `conversations` with `from` and `value`: `human` to `user`, `gpt` to `assistant`.

    Args:
        name: of the dataset, for the warning with the number of rows.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        return dataset  # TRL refuses a transform
    first: dict[str, Any] = next(iter(dataset), {})  # an empty dataset is refused later
    if not first.get("conversations") or not is_conversational_from_value(first):
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.map(_renamed)
    num_rows = int(rows_with(dataset, "from", values=ROLES).sum())
    if not num_rows:
        return dataset
    logger.warning(
        "%d of %d rows of the %s dataset have the roles `human` or `gpt` in `conversations`. They are renamed to "
        "`user` and `assistant`, which chat templates know.",
        *(num_rows, len(dataset), name),
    )
    with main_process_first():
        return dataset.map(_renamed, features=dataset.features, desc=f"Renaming roles of {name} dataset")


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["conversations"]
    if not isinstance(messages, list):
        return {}  # a bad row, named later
    return {"conversations": [_with_role(m, "from") if isinstance(m, dict) else m for m in messages]}


def _with_role(message: dict[str, Any], key: str) -> dict[str, Any]:
    role = message.get(key)
    return message | {key: ROLES[role]} if isinstance(role, str) and role in ROLES else message


def say_what_is_left_out(
    dataset: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    *,
    chat_template: str | None,
    per_turn: bool,
) -> None:
    """Warn of fields that the chat template leaves out, and of roles that it does not know, with the number of rows.

    Args:
        chat_template: the template that TRL uses instead of the tokenizer's own.
        per_turn: whether a message is rendered at its own turn, or in the whole conversation.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        return  # TRL refuses a transform
    for fields in FIELDS:
        rows, count = _holding(dataset, fields)
        holders = [
            (conversation, i)
            for conversation in _conversations(rows, chat_template, fields)
            for i in _places(conversation, fields)
        ]
        left_out = [
            holder for holder in holders if _is_left_out(*holder, fields, tokenizer=tokenizer, per_turn=per_turn)
        ]
        if left_out:
            names = " or ".join(f"`{field}`" for field in fields if _held(rows, field))
            if per_turn or any(
                _is_left_out(*holder, fields, tokenizer=tokenizer, per_turn=True) for holder in left_out
            ):
                advice = "`chat_template_path` to a template that renders it, or write it into `content`"
            else:  # it is left out of earlier turns only
                advice = "`per_turn=True`, which trains each turn as it is rendered when it is the last"
            logger.warning(
                "%s of the %s dataset have %s in their messages, and the chat template leaves it out: %d of %d such "
                "messages in a sample are rendered as without it. The model never sees what is left out. Set %s.",
                *(count, name, names, len(left_out), len(holders), advice),
            )
    rows, count = _holding(dataset, ("role",), ROLES)
    for conversation in _conversations(rows, chat_template, ("role",)):
        messages = conversation.messages
        texts = [
            _text(conversation, variant, tokenizer) for variant in (messages, [_with_role(m, "role") for m in messages])
        ]
        if None not in texts and texts[0] != texts[1]:
            logger.warning(
                "%s of the %s dataset have the roles `human` or `gpt`, and the chat template renders them otherwise "
                "than `user` and `assistant`. The model would be trained on turns that it never sees. Rename the "
                "roles, or set `chat_template_path` to a template that knows them.",
                *(count, name),
            )
            return


def say_if_turns_do_not_end(
    rows: Iterable[dict[str, Any]], name: str, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, *, setting: str
) -> None:
    """Warn if a trained turn has no end-of-turn token: the template puts it in front of the next message.

    Args:
        rows: tokenised.
        setting: the one by which assistant turns are trained.
    """
    trained = (row["labels"] for row in islice(rows, NUM_LABELLED) if max(row["labels"], default=-1) >= 0)
    end = next((end for labels in trained if (end := unended(labels, tokenizer)) is not None), None)
    if end is not None:
        logger.warning(
            "`%s=True` was given, and the chat template renders assistant turns of the %s dataset without an "
            "end-of-turn token: one ends in %r. The model would not learn to stop. Set `chat_template_path` "
            "to a template that ends every turn, such as TRL's training template for this model.",
            *(setting, name, end),
        )


def _places(conversation: Conversation, fields: tuple[str, ...]) -> list[int]:
    """The first and last messages that hold a field."""
    held = [i for i, message in enumerate(conversation.messages) if any(message.get(field) for field in fields)]
    return sorted({*held[:2], *held[-2:]})


def _is_left_out(
    conversation: Conversation, i: int, fields: tuple[str, ...], *, tokenizer: Any, per_turn: bool
) -> bool:
    """Whether message `i` is rendered as without the fields, at its own turn or in the whole conversation."""
    messages = conversation.messages[: i + 1] if per_turn else conversation.messages
    without = {key: value for key, value in messages[i].items() if key not in fields}
    text = _text(conversation, messages, tokenizer)  # None in a bad row, which is named elsewhere
    return text is not None and text == _text(conversation, [*messages[:i], without, *messages[i + 1 :]], tokenizer)


def _text(conversation: Conversation, messages: list[dict[str, Any]], tokenizer: Any) -> str | None:
    try:
        return conversation.text(messages, tokenizer)
    except Exception:  # a template raises what it wants
        return None


def _conversations(
    rows: Iterable[dict[str, Any]], chat_template: str | None, fields: tuple[str, ...]
) -> list[Conversation]:
    """Conversations of different shapes: of the roles in order, and which messages hold a field."""
    shapes: dict[Any, Conversation] = {}
    for row in rows:
        try:
            conversation = Conversation.from_row(row)
            shape = tuple((m["role"], any(m.get(field) for field in fields)) for m in conversation.messages)
        except Exception:
            continue  # a bad row, named elsewhere
        if chat_template is not None:
            conversation.arguments.setdefault("chat_template", chat_template)
        shapes.setdefault(shape, conversation)
    return list(shapes.values())[:NUM_RENDERED]


def _holding(
    dataset: Dataset | IterableDataset, keys: tuple[str, ...], values: Collection[str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Some rows whose messages hold one of the keys, with one of the values if they are given; and how many rows do."""
    if isinstance(dataset, IterableDataset):
        rows = list(dataset.take(NUM_OF_STREAM))
        holding = [row for row in rows if any(_held([row], key, values) for key in keys)]
        return holding, f"{len(holding)} of the first {len(rows)} rows"
    masks = [rows_with(dataset, key, values=values) for key in keys]
    places = np.flatnonzero(np.any(masks, axis=0))
    drawn = places[np.unique(np.linspace(0, len(places) - 1, NUM_DRAWN).astype(int))] if len(places) else places
    return list(dataset.select(drawn).with_format(None)), f"{len(places)} of {len(dataset)} rows"


def _held(rows: Iterable[dict[str, Any]], key: str, values: Collection[str] | None = None) -> bool:
    """Whether a message of these rows holds the key, with one of the values if they are given."""
    lists = (row[column] for row in rows for column in COLUMNS if isinstance(row.get(column), list))
    contents = (message.get(key) for messages in lists for message in messages if isinstance(message, dict))
    return any(value in values if values is not None else value for value in contents)


def rows_with(
    dataset: Dataset, key: str, columns: Collection[str] = COLUMNS, *, values: Collection[str] | None = None
) -> np.ndarray:
    """Whether a message of each row holds a key, and one of the values if they are given. Shape (rows,), in Arrow."""
    has = np.zeros(len(dataset), bool)
    for column in set(columns).intersection(get_dataset_column_names(dataset)):
        start = 0
        for chunk in dataset.select_columns(column).with_format("arrow")[:][column].chunks:
            if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
                rows = pc.list_parent_indices(chunk).to_numpy()[_messages_with(chunk.flatten(), key, values)]
                has[start + rows] = True
            start += len(chunk)
    return has


def _messages_with(messages: pa.Array, key: str, values: Collection[str] | None) -> np.ndarray:
    """Whether each message holds the key, and one of the values if they are given. Shape (messages,)."""
    if pa.types.is_struct(messages.type) and messages.type.get_field_index(key) >= 0:
        return np.array(_holds(pc.struct_field(messages, key), values))
    has = np.zeros(len(messages), bool)
    if isinstance(messages.type, pa.JsonType):  # messages of different forms
        text = messages.storage
        names = "|".join([key] if values is None else values)
        for i in np.flatnonzero(pc.fill_null(pc.match_substring_regex(text, f'"({names})"'), False)):
            message = json.loads(text[i].as_py())
            has[i] = isinstance(message, dict) and _held([{"messages": [message]}], key, values)
    return has


def _holds(contents: pa.Array, values: Collection[str] | None) -> pa.Array:
    kind = contents.type
    if values is not None:
        holds = (
            pc.is_in(contents, pa.array(values, kind)) if pa.types.is_string(kind) else pa.repeat(False, len(contents))
        )
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        holds = pc.greater(pc.binary_length(contents), 0)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        holds = pc.greater(pc.list_value_length(contents), 0)
    else:
        holds = contents.is_valid()
    return pc.fill_null(holds, False)
