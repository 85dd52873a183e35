"""Rows that are refused before any is tokenised: none, no text, no conversations, messages whose weight is not read."""

import logging
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from . import texts
from .conversation import Tokenizer
from .row import MAX_ROWS_NAMED
from .turns import TurnSettings

logger = logging.getLogger(__name__)

NUM_OF_STREAM = 4  # rows of a stream to look at
IMAGES = ("image", "images")  # columns of images, as TRL names them
PLACEHOLDER = "<image>"  # of an image in a text of LLaVA's


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


def check_texts_with_images(dataset: object, name: str, *, per_turn: bool) -> None:
    """Refuse rows with images whose texts TRL's collator cannot read."""
    if not isinstance(dataset, Dataset) or not has_images(dataset) or has_transform(dataset):
        return
    forms = [(columns, has) for columns, has in texts.forms_of_table(dataset, "") if has.any()]
    if not per_turn and any(columns == ("conversations",) for columns, _ in forms):
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has images and `conversations`. The collator of images reads "
            "`messages` with `role` and `content`. Convert the rows: "
            '`dataset.map(trl.maybe_convert_to_chatml, remove_columns="conversations")`.'
        )


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
