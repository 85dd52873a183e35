"""Rows that are refused before any is tokenised: none, no text, no conversations, messages whose weight is not read."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .row import NUM_SHOWN
from .turns import Settings

MESSAGES = ("messages", "conversations", "prompt", "completion")  # columns that may hold lists of messages
NUM_OF_STREAM = 4  # rows of a stream to look at
IMAGES = ("image", "images")  # columns of images, as TRL names them
TRAIN_KEYS = ("weight", "train", "training")  # of messages: OpenAI's name, and those of axolotl


def has_images(dataset: object) -> bool:
    return any(name in IMAGES for name in columns_of(dataset))


def columns_of(dataset: object) -> list[str]:
    """The columns of a dataset, of a stream without features those of its first row; none of another object."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return []
    return [*(dataset.column_names or next(iter(dataset), {}))]


def has_transform(dataset: object) -> bool:
    """Whether reading the rows of a table runs a function of the user; TRL refuses to prepare such a table."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def check_rows(dataset: object, name: str) -> None:
    """Refuse a dataset without rows; TRL reads the first row."""
    if isinstance(dataset, IterableDataset) and next(iter(dataset), None) is None:
        raise ValueError(
            f"The {name} dataset is an `IterableDataset` of 0 rows, so there is nothing to train or evaluate. Check "
            "the files, the split and the filters, and that the generator yields rows each time it is called."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(
            f"The {name} dataset has 0 rows and the columns {dataset.column_names}, so there is nothing to train or "
            "evaluate. Check the file, the split and the filters."
        )


def check_raw_dataset(
    dataset: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, *, args: Settings, is_formatted: bool = False
) -> None:
    """Refuse a dataset of which nothing can be tokenised or trained and, but for `bad_rows="drop"`, such rows.

    If a formatting function will make the text, text columns are not checked.
    """
    check_rows(dataset, name)
    columns, names_rows = dataset.column_names, args.bad_rows == "raise"
    texts = [] if is_formatted else _text_columns(dataset, args.dataset_text_field)
    if not texts and not is_formatted:
        typed_columns = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {typed_columns}. TRL tokenises `messages` "
            "(lists of `role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with "
            f"`completion`, or the text in `{args.dataset_text_field}`; the dataset has none of these. Rename or "
            "reshape a column, or set `dataset_text_field` to the column that holds the text."
        )
    for column in texts if names_rows else ():
        if dataset.data.column(column).null_count:  # counts all rows of the table, selected or not, without a copy
            values = dataset.select_columns(column).with_format("arrow")[:][column]
            missing = np.flatnonzero(values.is_null().to_numpy())
            if len(missing):
                raise ValueError(
                    f"{len(missing)} of {len(dataset)} rows of the {name} dataset hold None in `{column}`; the first "
                    f"are {missing[:NUM_SHOWN].tolist()}. None cannot be tokenised. Remove these rows "
                    "(`dataset.select`), or fill in the missing text."
                )
    is_chat = "prompt" in columns and getattr(dataset.features["prompt"], "dtype", None) != "string"
    if tokenizer.eos_token is None and not is_chat and not {"messages", "conversations"} & {*columns}:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and the {name} dataset of {len(dataset)} "
            "rows is plain text. Every document must end with EOS, or the model never learns to stop. Set "
            "`eos_token` in the config, or `tokenizer.eos_token`."
        )
    if args.assistant_only_loss and names_rows and "messages" in columns:
        silent = np.flatnonzero(~rows_with(dataset, "role", ("messages",), values=("assistant",)))
        if len(silent):
            raise ValueError(
                f"`assistant_only_loss=True` was given and {len(silent)} of {len(dataset)} rows of the {name} dataset "
                f"have no assistant message; the first are {silent[:NUM_SHOWN].tolist()}. Such a row has no token to "
                "train. Remove these rows (`dataset.select`), or set `assistant_only_loss=False`."
            )


def _text_columns(dataset: Dataset, text_field: str) -> list[str]:
    """The columns that TRL tokenises, chosen as TRL does; [] if there are none."""
    columns = dataset.column_names
    if "prompt" in columns:
        return ["prompt", "completion"] if "completion" in columns else []
    for column, key in (("conversations", "from"), ("messages", "role")):
        if column in columns:
            first = dataset.select_columns(column).with_format(None)[0][column]
            # An empty first row tells nothing about the others. A row that is None is refused later, with its number.
            if not first or (isinstance(first, list) and isinstance(first[0], dict) and key in first[0]):
                return [column]
    return [text_field] if text_field in columns else []


def has_conversations(dataset: Any) -> bool:
    """Whether the rows of a dataset that is not tokenised are conversations. A malformed row is found later."""
    columns = columns_of(dataset)
    texts = ["prompt", "completion"] if "prompt" in columns else ["messages", "conversations"]
    present = [column for column in texts if column in columns]
    if present in ([], ["prompt"]) or "input_ids" in columns or has_transform(dataset):
        return False  # TRL refuses a transform
    row: dict[str, object] = next(iter(dataset.select_columns(present)), {})
    return not any(isinstance(value, str) for value in row.values())


def check_conversations(dataset: Dataset | IterableDataset, name: str, setting: str = "per_turn") -> None:
    """Refuse a dataset that has no conversations, whose assistant turns this setting trains."""
    columns = columns_of(dataset)
    if setting == "per_turn" and "input_ids" in columns:
        raise ValueError(
            f"`per_turn=True` was given, and the {name} dataset has the columns {columns}: it is tokenised. Where the "
            "turns of a conversation are is not known from tokens. Give the conversations themselves; or set "
            "`per_turn=False`, if `trl-packfix prepare --per-turn` has already made one row of each turn."
        )
    if not has_transform(dataset) and not has_conversations(dataset):
        raise ValueError(
            f"`{setting}=True` was given, and the {name} dataset has the columns {columns}. Its rows are no "
            "conversations, so they have no assistant turns. Give `messages` (or `conversations`), or `prompt` and "
            f"`completion` as lists of messages; or set `{setting}=False`."
        )


def check_turns(args: Settings, train_dataset: object, eval_dataset: object, *, is_formatted: bool) -> None:
    """Refuse datasets without conversations, and messages whose weight would not be read, before a model is loaded."""
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *eval_sets.items()]:
        if not isinstance(dataset, Dataset | IterableDataset):
            continue
        if args.per_turn:
            check_rows(dataset, name)
            check_conversations(dataset, name)
        if is_formatted or has_transform(dataset) or next(iter(dataset.take(1)), None) is None:
            continue  # a dataset without rows is refused by others
        if args.assistant_only_loss and name == "train":  # as in TRL, which evaluates every token of a text
            check_conversations(dataset, name, "assistant_only_loss")
        own, is_read = args.message_train_key, args.assistant_only_loss or args.per_turn
        for key in [] if own is None else dict.fromkeys((own, *TRAIN_KEYS)):
            if not (is_read and key == own):
                _check_unread(dataset, name, key=key, own=own)


def _check_unread(dataset: Dataset | IterableDataset, name: str, *, key: str, own: str | None) -> None:
    """Refuse messages that a key leaves out of training if the key is not read: another one is, or none."""
    columns = columns_of(dataset)
    trained = [column for column in ("completion", "messages", "conversations") if column in columns]  # no prompt
    if not trained or "input_ids" in columns:
        return
    count, (rows, of) = 0, rows_holding(dataset.select_columns(trained), (key,))
    for row in rows:
        messages = [m for column in trained for m in row[column] or () if isinstance(m, dict)]
        count += any(m.get(key) == 0 and (key == own or own not in m) for m in messages)
    if count:
        cause, remedy = f"`message_train_key={own!r}` reads another key", f"`message_train_key={key!r}`"
        if key == own:
            cause = "`assistant_only_loss=False` trains every message"
            remedy = "`assistant_only_loss=True`, which trains the assistant's messages without them"
        raise ValueError(
            f"{count} of {of} of the {name} dataset have messages with `{key}` 0, and {cause}, so they would be "
            f"trained. Set {remedy}, or `message_train_key=None` if the key means something else."
        )


def what_is_trained(args: Settings, dataset: object) -> str:
    """The rule by which tokens of a training set are trained, and the setting that chose it."""
    columns = columns_of(dataset)
    if args.per_turn:
        return "each assistant turn after its prompt (`per_turn`)"
    if args.assistant_only_loss:
        return "assistant turns (`assistant_only_loss`)"
    if {"labels", "completion_mask", "assistant_masks"} & {*columns}:
        return "the labels of the rows"
    if "prompt" in columns and "completion" in columns and args.completion_only_loss is not False:
        return "completions (`completion_only_loss`)"
    if has_conversations(dataset):
        return "every token; `assistant_only_loss=True` trains those of the assistant"
    return "every token"


def holds(rows: Iterable[Mapping[str, Any]], key: str, values: Collection[str] | None = None) -> bool:
    """Whether a message of these rows holds the key, with one of the values if they are given."""
    lists = (row[column] for row in rows for column in MESSAGES if isinstance(row.get(column), list))
    contents = (message.get(key) for messages in lists for message in messages if isinstance(message, dict))
    return any(value in values if values is not None else value not in (None, "", []) for value in contents)


def rows_holding(
    dataset: Dataset | IterableDataset, keys: Collection[str], values: Collection[str] | None = None
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The rows that hold one of the keys, and how many were looked at; of a stream, the first."""
    if isinstance(dataset, IterableDataset):
        first = list(dataset.take(NUM_OF_STREAM))
        rows = [row for row in first if any(holds([row], key, values) for key in keys)]
        return rows, f"the first {len(first)} rows"
    places = np.flatnonzero(np.any([rows_with(dataset, key, values=values) for key in keys], axis=0))
    return dataset.select(places).with_format(None), f"{len(dataset)} rows"


def rows_with(
    dataset: Dataset, key: str, columns: Collection[str] = MESSAGES, *, values: Collection[str] | None = None
) -> npt.NDArray[np.bool_]:
    """The same for each row, shape (rows,), in Arrow."""
    has = np.zeros(len(dataset), bool)
    for column in set(columns).intersection(dataset.column_names):
        start = 0
        for chunk in dataset.select_columns(column).with_format("arrow")[:][column].chunks:
            if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
                rows = pc.list_parent_indices(chunk).to_numpy()[_messages_with(chunk.flatten(), key, values)]
                has[start + rows] = True
            start += len(chunk)
    return has


def _messages_with(messages: pa.Array, key: str, values: Collection[str] | None) -> npt.NDArray[np.bool_]:
    """The same for each message, shape (messages,)."""
    has = np.zeros(len(messages), bool)
    if isinstance(messages.type, pa.JsonType):  # messages of different forms
        text = messages.storage
        names = "|".join([key] if values is None else values)
        for i in np.flatnonzero(pc.fill_null(pc.match_substring_regex(text, f'"({names})"'), False)):
            has[i] = holds([{"messages": [json.loads(text[i].as_py())]}], key, values)
    if not pa.types.is_struct(messages.type) or messages.type.get_field_index(key) < 0:
        return has
    contents = pc.struct_field(messages, key)
    kind = contents.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        held = pc.not_equal(contents, "") if values is None else pc.is_in(contents, pa.array(values, kind))
    elif values is not None:
        return has
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        held = pc.greater(pc.list_value_length(contents), 0)
    else:
        held = contents.is_valid()
    return np.array(pc.fill_null(held, False))
