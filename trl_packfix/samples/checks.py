"""Rows that are refused before any is tokenised: none, no text, no conversations, messages whose weight is not read."""

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from . import texts
from .conversation import Tokenizer
from .row import MAX_ROWS_NAMED
from .turns import TurnSettings

logger = logging.getLogger(__name__)

MESSAGES = ("messages", "conversations", "prompt", "completion")  # columns that may hold lists of messages
NUM_OF_STREAM = 4  # rows of a stream to look at
IMAGES = ("image", "images")  # columns of images, as TRL names them
PLACEHOLDER = "<image>"  # of an image in a text of LLaVA's
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


def without_format(dataset: Any) -> Any:
    """The dataset whose rows are Python objects, also if it was given `with_format` of pandas, Arrow or tensors.

    Another object is returned as it is, and so is a table with a transform; of a dictionary, each dataset is meant.
    """
    if isinstance(dataset, dict):
        return {name: without_format(each) for name, each in dataset.items()}
    is_formatted = isinstance(dataset, Dataset) and dataset.format["type"] not in (None, "custom")
    if isinstance(dataset, IterableDataset):
        is_formatted = dataset._formatting is not None  # there is no public accessor
    return dataset.with_format(None) if is_formatted else dataset


def first_rows(stream: IterableDataset) -> list[dict[str, Any]]:
    """The first rows of a stream, whose images are not decoded. Each may have columns of its own."""
    return list((stream.decode(False) if stream.features else stream).take(NUM_OF_STREAM))


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
    dataset: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, *, args: TurnSettings, is_formatted: bool = False
) -> None:
    """Refuse a dataset of which nothing can be tokenised or trained and, but for `bad_rows="drop"`, such rows.

    If a formatting function will make the text, text columns are not checked.
    """
    check_rows(dataset, name)
    names_rows = args.bad_rows == "raise"
    forms = [] if is_formatted else [*texts.forms_of_table(dataset, args.dataset_text_field)]
    if not forms and not is_formatted:
        typed_columns = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {typed_columns}. TRL tokenises `messages` "
            "(lists of `role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with "
            f"`completion`, or the text in `{args.dataset_text_field}`; the dataset has none of these. Rename or "
            "reshape a column, or set `dataset_text_field` to the column that holds the text."
        )
    bare = np.flatnonzero(~np.any([has for _, has in forms], axis=0))
    halves = bare[~texts.missing(dataset, "prompt")[bare]] if "prompt" in dataset.column_names else bare[:0]
    if len(halves) and forms and names_rows and "completion" not in dataset.column_names:
        raise ValueError(
            f"{len(halves)} of {len(dataset)} rows of the {name} dataset have a `prompt` and no `completion`; the "
            f"first are {halves[:MAX_ROWS_NAMED].tolist()}. TRL tokenises `prompt` with `completion`, and whether the "
            f"text in `{args.dataset_text_field}` has the prompt is not known. Rename the column of the answers to "
            "`completion`, or remove the column `prompt`."
        )
    if len(bare) and forms and names_rows:
        columns = dict.fromkeys(column for columns, _ in forms for column in columns)
        named = " and ".join(f"`{column}`" for column in columns if texts.missing(dataset, column)[bare].any())
        raise ValueError(
            f"{len(bare)} of {len(dataset)} rows of the {name} dataset hold None in {named}; the first are "
            f"{bare[:MAX_ROWS_NAMED].tolist()}. None cannot be tokenised. Remove these rows (`dataset.select`), or "
            "fill in the missing text."
        )
    num_plain = sum(int(has.sum()) for columns, has in forms if not texts.is_list(dataset, columns[0]))
    num_plain = len(dataset) if is_formatted else num_plain
    if tokenizer.eos_token is None and num_plain:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and {num_plain} of {len(dataset)} rows of "
            f"the {name} dataset are plain text. Every document must end with EOS, or the model never learns to stop. "
            "Set `eos_token` in the config, or `tokenizer.eos_token`."
        )
    if args.assistant_only_loss and names_rows and "messages" in dataset.column_names:
        has_others = np.any([has for (column, *_), has in forms if column in ("prompt", "conversations")], axis=0)
        silent = np.flatnonzero(~has_others & ~rows_with(dataset, "role", ("messages",), values=("assistant",)))
        if len(silent):
            raise ValueError(
                f"`assistant_only_loss=True` was given and {len(silent)} of {len(dataset)} rows of the {name} dataset "
                f"have no assistant message; the first are {silent[:MAX_ROWS_NAMED].tolist()}. Such a row has no token "
                "to train. Remove these rows (`dataset.select`), or set `assistant_only_loss=False`."
            )


def check_chat_template(dataset: Dataset | IterableDataset, name: str, tokenizer: Tokenizer) -> None:
    """Refuse conversations if no chat template makes a text of them."""
    own = type(tokenizer).apply_chat_template
    needs_template = own in (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    if tokenizer.chat_template is not None or not needs_template or "chat_template_kwargs" in columns_of(dataset):
        return
    if has_conversations(dataset):
        raise ValueError(
            f"The {name} dataset has conversations (columns {columns_of(dataset)}), and the tokenizer "
            f"({type(tokenizer).__name__}) has no chat template, as that of a base model. Without one, messages do not "
            "become text. Set `chat_template_path` to a `.jinja` file or to a model whose template is to be trained, "
            "for example the instruct version of this model."
        )


def check_texts_with_images(dataset: object, name: str, processor: object, *, per_turn: bool) -> None:
    """Refuse rows with images whose texts TRL's collator cannot read; warn of `<image>` that stays a text."""
    if not isinstance(dataset, Dataset) or not has_images(dataset) or has_transform(dataset):
        return
    forms = [(columns, has) for columns, has in texts.forms_of_table(dataset, "") if has.any()]
    if not per_turn and any(columns == ("conversations",) for columns, _ in forms):
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has images and `conversations`. The collator of images reads "
            "`messages` with `role` and `content`. Convert the rows: "
            '`dataset.map(trl.maybe_convert_to_chatml, remove_columns="conversations")`.'
        )
    columns = [column for form, _ in forms for column in form]
    num_rows = int(np.any([_with_text(dataset, column, PLACEHOLDER) for column in columns], axis=0).sum())
    if not num_rows:
        return
    count = f"{num_rows} of {len(dataset)} rows of the {name} dataset with images"
    cause = (
        f"have messages whose `content` is a text with `{PLACEHOLDER}`, as LLaVA writes it. TRL puts a placeholder for "
        "each image before the text of the first user message"
    )
    remedy = (
        f"Remove `{PLACEHOLDER}` from the texts, or write `content` as a list of parts with "
        '`{"type": "image"}` where the image belongs'
    )
    if getattr(processor, "image_token", None) == PLACEHOLDER:
        raise ValueError(f"{count} {cause}, so the processor would look for more images than there are. {remedy}.")
    logger.warning(f"{count} {cause}, and `{PLACEHOLDER}` would be trained as a text. {remedy}.")


def _with_text(dataset: Dataset, column: str, text: str) -> npt.NDArray[np.bool_]:
    """Which rows have a message in this column whose `content` is a text with this one, shape (rows,)."""
    has = np.zeros(len(dataset), bool)
    start = 0
    for chunk in dataset.select_columns(column).with_format("arrow")[:][column].chunks:
        messages = chunk.flatten() if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) else chunk
        for key in ("content", "value"):
            if not pa.types.is_struct(messages.type) or messages.type.get_field_index(key) < 0:
                continue
            contents = pc.struct_field(messages, key)
            if pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type):
                found = pc.fill_null(pc.match_substring(contents, text), False)
                has[start + pc.list_parent_indices(chunk).filter(found).to_numpy()] = True
        start += len(chunk)
    return has


def has_conversations(dataset: Any) -> bool:
    """Whether rows of a dataset that is not tokenised, of a stream one of the first, are conversations."""
    if "input_ids" in columns_of(dataset) or has_transform(dataset):
        return False  # TRL refuses a transform
    if isinstance(dataset, Dataset):
        forms = texts.forms_of_table(dataset, "")
        return any(texts.is_list(dataset, columns[-1]) and has.any() for columns, has in forms)
    return isinstance(dataset, IterableDataset) and any(map(texts.is_conversation, first_rows(dataset)))


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


def check_turns(args: TurnSettings, train_dataset: object, eval_dataset: object, *, is_formatted: bool) -> None:
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
        own = args.message_train_key
        is_read = args.assistant_only_loss or args.per_turn
        for key in [] if own is None else dict.fromkeys((own, *TRAIN_KEYS)):
            if not (is_read and key == own):
                _check_unread(dataset, name, key=key, own=own)


def _check_unread(dataset: Dataset | IterableDataset, name: str, *, key: str, own: str | None) -> None:
    """Refuse messages that a key leaves out of training if the key is not read: another one is, or none."""
    trained = ("completion", "messages", "conversations")  # no prompt
    if "input_ids" in columns_of(dataset):
        return
    if isinstance(dataset, Dataset):  # without images, which would be decoded
        present = [column for column in trained if column in dataset.column_names]
        if not present:
            return
        dataset = dataset.select_columns(present)
    count, (rows, of) = 0, rows_holding(dataset, (key,))
    for row in rows:
        messages = [m for column in trained for m in row.get(column) or () if isinstance(m, dict)]
        count += any(m.get(key) == 0 and (key == own or own not in m) for m in messages)
    if count:
        cause = f"`message_train_key={own!r}` reads another key"
        remedy = f"`message_train_key={key!r}`"
        if key == own:
            cause = "`assistant_only_loss=False` trains every message"
            remedy = "`assistant_only_loss=True`, which trains the assistant's messages without them"
        raise ValueError(
            f"{count} of {of} of the {name} dataset have messages with `{key}` 0, and {cause}, so they would be "
            f"trained. Set {remedy}, or `message_train_key=None` if the key means something else."
        )


def what_is_trained(args: TurnSettings, dataset: object) -> str:
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


def row_holds(rows: Iterable[Mapping[str, Any]], key: str, values: Collection[str] | None = None) -> bool:
    """Whether a message of these rows holds the key, with one of the values if they are given."""
    lists = (row[column] for row in rows for column in MESSAGES if isinstance(row.get(column), list))
    contents = (message.get(key) for messages in lists for message in messages if isinstance(message, dict))
    return any(value in values if values is not None else value not in (None, "", []) for value in contents)


def rows_holding(
    dataset: Dataset | IterableDataset, keys: Collection[str], values: Collection[str] | None = None
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The rows that hold one of the keys, and how many were looked at; of a stream, the first."""
    if isinstance(dataset, IterableDataset):
        first = first_rows(dataset)
        rows = [row for row in first if any(row_holds([row], key, values) for key in keys)]
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
            has[i] = row_holds([{"messages": [json.loads(text[i].as_py())]}], key, values)
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
