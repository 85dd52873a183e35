"""Rows that are refused before any is tokenised: none, no text, no conversations, messages whose weight is not read."""

import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from trl.data_utils import get_dataset_column_names

from .row import NUM_SHOWN

MESSAGES = ("messages", "conversations", "prompt", "completion")  # columns that may hold lists of messages
NUM_OF_STREAM = 4  # rows of a stream to look at
IMAGES = ("image", "images")  # columns of images, as TRL names them
TRAIN_KEYS = ("weight", "train", "training")  # of messages: OpenAI's name, and those of axolotl


def has_images(dataset: Any) -> bool:
    """Whether a dataset has a column of images, as TRL names them."""
    return any(name in IMAGES for name in columns_of(dataset))


def columns_of(dataset: Any) -> Collection[str]:
    """The columns of a dataset; of a stream without features those of its first row."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return ()
    columns: Collection[str] = dataset.column_names or next(iter(dataset), {})
    return columns


def has_transform(dataset: Any) -> bool:
    """Whether reading the rows of a table runs a function of the user; TRL refuses to prepare such a table."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def check_rows(dataset: Dataset | IterableDataset | None, name: str) -> None:
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


def check_raw_dataset(dataset: Dataset, name: str, tokenizer: Any, *, args: Any, is_formatted: bool = False) -> None:
    """Check a dataset that is not tokenised yet.

    Args:
        is_formatted: a formatting function will make the text, so the text columns are not checked.

    With `bad_rows="drop"` single rows are not checked.

    Raises:
        ValueError: no rows, nothing to tokenise, or missing values in the text; plain text and no EOS token;
            `assistant_only_loss` and rows without an assistant message.
    """
    check_rows(dataset, name)
    columns = dataset.column_names
    if not is_formatted:
        _check_text(dataset, name, args)
    conversational = "messages" in columns or "conversations" in columns
    if not conversational and tokenizer.eos_token is None and not _is_conversational_prompt(dataset):
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and the {name} dataset of {len(dataset)} "
            "rows is plain text. Every document must end with EOS, or the model never learns to stop. Set "
            "`eos_token` in the config, or `tokenizer.eos_token`."
        )
    if args.assistant_only_loss and args.bad_rows == "raise" and "messages" in columns:
        silent = np.flatnonzero(~rows_with(dataset, "role", ("messages",), values=("assistant",)))
        if len(silent):
            raise ValueError(
                f"`assistant_only_loss=True` was given and {len(silent)} of {len(dataset)} rows of the {name} dataset "
                f"have no assistant message; the first are {silent[:NUM_SHOWN].tolist()}. Such a row has no token to "
                "train. Remove these rows (`dataset.select`), or set `assistant_only_loss=False`."
            )


def _check_text(dataset: Dataset, name: str, args: Any) -> None:
    """Refuse a dataset without text: TRL would stop with a Python error that does not name the cause."""
    text_field = args.dataset_text_field
    columns = _text_columns(dataset, text_field)
    if not columns:
        typed_columns = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {typed_columns}. TRL tokenises `messages` "
            "(lists of `role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with "
            f"`completion`, or the text in `{text_field}`; the dataset has none of these. Rename or reshape a column, "
            "or set `dataset_text_field` to the column that holds the text."
        )
    for column in columns if args.bad_rows == "raise" else ():
        if dataset.data.column(column).null_count:  # counts all rows of the table, selected or not, without a copy
            values = dataset.select_columns(column).with_format("arrow")[:][column]
            missing = np.flatnonzero(values.is_null().to_numpy())
            if len(missing):
                raise ValueError(
                    f"{len(missing)} of {len(dataset)} rows of the {name} dataset hold None in `{column}`; the first "
                    f"are {missing[:NUM_SHOWN].tolist()}. None cannot be tokenised. Remove these rows "
                    "(`dataset.select`), or fill in the missing text."
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


def _is_conversational_prompt(dataset: Dataset) -> bool:
    feature = dataset.features.get("prompt")
    return feature is not None and getattr(feature, "dtype", None) != "string"


def has_conversations(dataset: Dataset | IterableDataset) -> bool:
    """Whether the rows of a dataset that is not tokenised are conversations."""
    columns = get_dataset_column_names(dataset)
    chat_columns = [column for column in MESSAGES if column in columns]
    if not chat_columns or "input_ids" in columns or has_transform(dataset):
        return False  # tokenised; TRL refuses a transform
    row: dict[str, Any] = next(iter(dataset.select_columns(chat_columns)), {})
    return not any(isinstance(row.get(column), str) for column in chat_columns)  # a malformed row is found later


def check_conversations(dataset: Dataset | IterableDataset, name: str) -> None:
    """Refuse a dataset that has no conversations to be split at assistant turns.

    Raises:
        ValueError: tokenised rows, or rows that hold no messages.
    """
    beginning = f"`per_turn=True` was given, and the {name} dataset has the columns"
    columns = get_dataset_column_names(dataset)
    if "input_ids" in columns:
        raise ValueError(
            f"{beginning} {columns}: it is tokenised. Where the turns of a conversation are is not known from tokens. "
            "Give the conversations themselves; or set `per_turn=False`, if `trl-packfix prepare --per-turn` has "
            "already made one row of each turn."
        )
    if has_transform(dataset):
        return  # TRL refuses a transform
    texts = ["prompt", "completion"] if "prompt" in columns else ["messages", "conversations"]
    present = [column for column in texts if column in columns]
    row = next(iter(dataset.select_columns(present))) if present else {}
    # A malformed row is found later, with its number.
    if (
        not present
        or ("prompt" in columns and len(present) < 2)
        or any(isinstance(row[column], str) for column in present)
    ):
        raise ValueError(
            f"{beginning} {columns}. Its rows are no conversations, so they have no turns. Give `messages` (or "
            "`conversations`), or `prompt` and `completion` as lists of messages; or set `per_turn=False`."
        )


def check_has_no_images(dataset: Dataset | IterableDataset, name: str) -> None:
    """Refuse rows with images whose turns are to be split beside a training set without.

    Raises:
        ValueError: there is a column of images.
    """
    if has_images(dataset):
        raise ValueError(
            f"`per_turn=True` was given, and the {name} dataset has the columns {get_dataset_column_names(dataset)}, "
            "with images, and the training set has none. Its turns would become tokens without their images. Give the "
            "training set an empty column `images`, or remove the column here."
        )


def check_turns(args: Any, train_dataset: Any, eval_dataset: Any, *, is_formatted: bool) -> None:
    """Refuse datasets without conversations, and messages whose weight would not be read, before the model is loaded.

    Args:
        is_formatted: a formatting function makes texts of the rows.

    Raises:
        ValueError: `per_turn` or `assistant_only_loss` and rows that are no conversations; messages with a weight of 0
            in rows of which every message is trained.
    """
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *eval_sets.items()]:
        if args.per_turn and dataset is not None:
            check_rows(dataset, name)
            check_conversations(dataset, name)
        if is_formatted or not isinstance(dataset, Dataset | IterableDataset) or has_transform(dataset):
            continue  # TRL refuses a transform
        if next(iter(dataset.take(1)), None) is None:
            continue  # refused by others
        # as in TRL, which evaluates every token of a text
        if args.assistant_only_loss and name == "train" and not has_conversations(dataset):
            raise ValueError(
                f"`assistant_only_loss=True` was given, and the {name} dataset has the columns "
                f"{get_dataset_column_names(dataset)}. Its rows are no conversations, so they have no assistant turns. "
                "Give `messages` (or `conversations`), or `prompt` and `completion` as lists of messages; or set "
                "`assistant_only_loss=False`."
            )
        own, is_read = args.message_train_key, args.assistant_only_loss or args.per_turn
        for key in [] if own is None else dict.fromkeys((own, *TRAIN_KEYS)):
            if not (is_read and key == own):
                _check_unread(dataset, name, args, key=key)


def _check_unread(dataset: Dataset | IterableDataset, name: str, args: Any, *, key: str) -> None:
    """Refuse messages that a key leaves out of training if the key is not read."""
    columns = get_dataset_column_names(dataset)
    trained = [column for column in ("completion", "messages", "conversations") if column in columns]  # no prompt
    if not trained or "input_ids" in columns:
        return
    if isinstance(dataset, Dataset):
        rows: Any = dataset.select(np.flatnonzero(rows_with(dataset, key, trained)))
        rows = rows.select_columns(trained).with_format(None)
    else:
        rows = dataset.select_columns(trained).take(NUM_OF_STREAM)
    read = args.message_train_key if key != args.message_train_key else None
    count = sum(
        any(_is_untrained(message, key) and read not in message for column in trained for message in row[column] or ())
        for row in rows
    )
    if count:
        of = f"{len(dataset)} rows" if isinstance(dataset, Dataset) else f"the first {NUM_OF_STREAM} rows"
        if key != args.message_train_key:
            cause = f"`message_train_key={args.message_train_key!r}` reads another key"
            remedy = f"`message_train_key={key!r}`"
        else:
            cause = "`assistant_only_loss=False` trains every message"
            remedy = "`assistant_only_loss=True`, which trains the assistant's messages without them"
        raise ValueError(
            f"{count} of {of} of the {name} dataset have messages with `{key}` 0, and {cause}, so they would be "
            f"trained. Set {remedy}, or `message_train_key=None` if the key means something else."
        )


def _is_untrained(message: Any, key: str) -> bool:
    weight = message.get(key) if isinstance(message, dict) else None
    return isinstance(weight, int | float) and weight == 0


def what_is_trained(args: Any, dataset: Any) -> str:
    """The rule by which tokens of a training set are trained, and the setting that chose it."""
    is_table = isinstance(dataset, Dataset | IterableDataset)
    columns = get_dataset_column_names(dataset) if is_table else []
    if args.per_turn:
        return "each assistant turn after its prompt (`per_turn`)"
    if args.assistant_only_loss:
        return "assistant turns (`assistant_only_loss`)"
    if "labels" in columns or {"completion_mask", "assistant_masks"} & {*columns}:
        return "the labels of the rows"
    if "prompt" in columns and "completion" in columns and args.completion_only_loss is not False:
        return "completions (`completion_only_loss`)"
    if is_table and has_conversations(dataset):
        return "every token of all messages; `assistant_only_loss=True` trains those of the assistant"
    return "every token"


def holds(rows: Iterable[dict[str, Any]], key: str, values: Collection[str] | None = None) -> bool:
    """Whether a message of these rows holds the key, with one of the values if they are given."""
    lists = (row[column] for row in rows for column in MESSAGES if isinstance(row.get(column), list))
    contents = (message.get(key) for messages in lists for message in messages if isinstance(message, dict))
    return any(value in values if values is not None else value for value in contents)


def rows_with(
    dataset: Dataset, key: str, columns: Collection[str] = MESSAGES, *, values: Collection[str] | None = None
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
            has[i] = isinstance(message, dict) and holds([{"messages": [message]}], key, values)
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
