"""Check datasets before they are tokenised, and refuse those that cannot be trained as the config says.

Checks read the columns and types of a dataset of the user, or its first rows. They do not render rows. A function whose
name begins with `check_` raises a ValueError that says what to change, or returns nothing. A table is a
`datasets.Dataset`, a stream an `IterableDataset`. `texts.py` decides which columns of a row are tokenised.
"""

import logging
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Json, LargeList, List
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from . import texts
from .conversation import Tokenizer
from .row import MAX_ROWS_NAMED, reads_completion_mask
from .turns import TurnSettings, trains_only_completions

logger = logging.getLogger(__name__)

NUM_CHECKED_OF_STREAM = 4  # rows at the beginning of a stream that are read
IMAGES = ("image", "images")  # columns of images, as TRL names them
PLACEHOLDER = "<image>"  # stands for an image in texts of datasets in LLaVA's format


def has_images(dataset: object) -> bool:
    """Return whether a dataset has a column of images."""
    return any(name in IMAGES for name in columns_of(dataset))


def columns_of(dataset: object) -> list[str]:
    """Return the names of the columns of a dataset; [] for an object that is not a dataset.

    If a stream does not know its columns, the columns of its first row are returned.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        return []
    return [*(dataset.column_names or next(iter(dataset), {}))]


def has_transform(dataset: object) -> bool:
    """Return whether a table has a transform: a function of the user that runs when rows are read.

    TRL refuses to prepare a table with a transform.
    """
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def without_format(dataset: Any) -> Any:
    """Return a dataset whose rows are Python objects, also if the user set the format of pandas, Arrow or tensors.

    In a dictionary of datasets, the format of each dataset is removed. A table with a transform, and an object that is
    not a dataset, are returned as they are.
    """
    if isinstance(dataset, dict):
        return {name: without_format(value) for name, value in dataset.items()}
    has_format = isinstance(dataset, Dataset) and dataset.format["type"] not in (None, "custom")
    if isinstance(dataset, IterableDataset):
        has_format = dataset._formatting is not None  # there is no public accessor
    return dataset.with_format(None) if has_format else dataset


def first_rows(stream: IterableDataset) -> list[dict[str, Any]]:
    """Return the first rows of a stream without decoding their images. Rows may differ in their columns."""
    return list(undecoded_stream(stream).take(NUM_CHECKED_OF_STREAM))


def undecoded_stream(stream: IterableDataset) -> IterableDataset:
    """Return a stream whose images, sounds and videos are not decoded; its JSON is.

    Without known types of its columns, a stream is returned as it is: it has no encoded images.
    """
    if not stream.features:
        return stream
    # `decode` leaves JSON as text, too
    features = Features({name: undecoded_feature(feature) for name, feature in stream.features.items()})
    return stream.decode(False).cast(features)


def undecoded_feature(feature: Any) -> Any:
    """Return a feature whose images, sounds and videos are not decoded."""
    if isinstance(feature, dict):
        return {key: undecoded_feature(value) for key, value in feature.items()}
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=undecoded_feature(feature.feature))
    if hasattr(feature, "decode") and not isinstance(feature, Json):
        return replace(feature, decode=False)
    return feature


def check_rows(dataset: object, name: str) -> None:
    """Refuse a dataset without rows, because TRL reads the first row."""
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
    dataset: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, *, args: TurnSettings, is_formatted: bool
) -> None:
    """Refuse a table without text to tokenise and, with `bad_rows="raise"`, a table that has rows without text.

    Args:
        dataset: A table that is not tokenised.
        name: The dataset's name in messages.
        tokenizer: The tokenizer, which needs an EOS token if rows are plain text.
        args: The config of the trainer.
        is_formatted: Whether a formatting function of the user makes the text. Text columns are not checked then.
    """
    check_rows(dataset, name)
    num_plain = len(dataset) if is_formatted else _check_forms(dataset, name, args)
    if tokenizer.eos_token is None and num_plain:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and {num_plain} of {len(dataset)} rows of "
            f"the {name} dataset are plain text. Every document must end with EOS, or the model never learns to stop. "
            "Set `eos_token` in the config, or `tokenizer.eos_token`."
        )


def _check_forms(dataset: Dataset, name: str, args: TurnSettings) -> int:
    """Return how many rows of a table are plain text. Refuse a table or rows without text, see `check_raw_dataset`."""
    # For example [(("messages",), [True, False]), (("text",), [False, True])] for a table of two rows: columns that are
    # tokenised together, and for each row whether they are its text
    forms = [*texts.forms_of_table(dataset, args.dataset_text_field)]
    if not forms:
        typed_columns = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {typed_columns}. TRL tokenises `messages` "
            "(lists of `role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with "
            f"`completion`, or the text in `{args.dataset_text_field}`; the dataset has none of these. Rename or "
            "reshape a column, or set `dataset_text_field` to the column that holds the text."
        )
    without_text = np.flatnonzero(~np.any([is_chosen for _, is_chosen in forms], axis=0))
    refuses_rows = args.bad_rows == "raise"
    if refuses_rows and "prompt" in dataset.column_names and "completion" not in dataset.column_names:
        only_prompt = without_text[~texts.missing(dataset, "prompt")[without_text]]
        if len(only_prompt):
            raise ValueError(
                f"{len(only_prompt)} of {len(dataset)} rows of the {name} dataset have a `prompt` and no "
                f"`completion`; the first are {only_prompt[:MAX_ROWS_NAMED].tolist()}. TRL tokenises `prompt` with "
                f"`completion`, and whether the text in `{args.dataset_text_field}` has the prompt is not known. "
                "Rename the column of the answers to `completion`, or remove the column `prompt`."
            )
    if refuses_rows and len(without_text):
        columns = dict.fromkeys(column for columns, _ in forms for column in columns)
        empty_columns = [column for column in columns if texts.missing(dataset, column)[without_text].any()]
        column_names = " and ".join(f"`{column}`" for column in empty_columns)
        raise ValueError(
            f"{len(without_text)} of {len(dataset)} rows of the {name} dataset hold None in {column_names}; the first "
            f"are {without_text[:MAX_ROWS_NAMED].tolist()}. None cannot be tokenised. Remove these rows "
            "(`dataset.select`), or fill in the missing text."
        )
    # A prompt and its completion are both plain text, or both lists
    return sum(int(is_chosen.sum()) for columns, is_chosen in forms if not texts.is_list(dataset, columns[0]))


def check_chat_template(dataset: Dataset | IterableDataset, name: str, tokenizer: Tokenizer) -> None:
    """Refuse conversations if neither the tokenizer nor the rows have a chat template to render them."""
    # A class with a method of its own, such as Mistral's tokenizer, renders conversations without a template
    method = type(tokenizer).apply_chat_template
    needs_template = method in (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    # `chat_template_kwargs` of a row may hold a template
    if tokenizer.chat_template is not None or not needs_template or "chat_template_kwargs" in columns_of(dataset):
        return
    if has_conversations(dataset):
        raise ValueError(
            f"The {name} dataset has conversations (columns {columns_of(dataset)}), and the tokenizer "
            f"({type(tokenizer).__name__}) has no chat template, as that of a base model. Without one, messages do not "
            "become text. Set `chat_template_path` to a `.jinja` file or to a model whose template is to be trained, "
            "for example the instruct version of this model."
        )


def has_conversations(dataset: Any) -> bool:
    """Return whether any row of a table, or any of the first rows of a stream, is a conversation to tokenise.

    A dataset that is tokenised already has no conversations.
    """
    if "input_ids" in columns_of(dataset) or has_transform(dataset):
        return False  # TRL refuses a transform
    if isinstance(dataset, Dataset):
        forms = texts.forms_of_table(dataset, text_field="")  # plain text is no conversation
        return any(texts.is_list(dataset, columns[-1]) and is_chosen.any() for columns, is_chosen in forms)
    return isinstance(dataset, IterableDataset) and any(map(texts.is_conversation, first_rows(dataset)))


def check_conversations(dataset: Dataset | IterableDataset, name: str, setting: str = "per_turn") -> None:
    """Refuse a dataset without conversations, because the setting trains the assistant turns of conversations."""
    columns = columns_of(dataset)
    if setting == "per_turn" and "input_ids" in columns:
        raise ValueError(
            f"`per_turn=True` was given, and the {name} dataset has the columns {columns}: it is tokenised. Where the "
            "turns of a conversation are is not known from tokens. Give the conversations themselves; or set "
            "`per_turn=False`, if `trl-packfix prepare --per-turn` has already made one row of each turn."
        )
    if not has_transform(dataset) and not has_conversations(dataset):  # TRL refuses a transform with its own message
        raise ValueError(
            f"`{setting}=True` was given, and the {name} dataset has the columns {columns}. Its rows are no "
            "conversations, so they have no assistant turns. Give `messages` (or `conversations`), or `prompt` and "
            f"`completion` as lists of messages; or set `{setting}=False`."
        )


def check_turns(args: TurnSettings, train_dataset: object, eval_dataset: object, *, is_formatted: bool) -> None:
    """Refuse datasets without conversations, before a model is loaded, if the config trains assistant turns."""
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *eval_sets.items()]:
        if not isinstance(dataset, Dataset | IterableDataset):
            continue
        if args.per_turn:
            check_rows(dataset, name)
            check_conversations(dataset, name)
        # There is nothing to check here if a function of the user makes the text of the rows, and if there are no rows:
        # then `check_raw_dataset` refuses the table
        if is_formatted or has_transform(dataset) or next(iter(dataset.take(1)), None) is None:
            continue
        # TRL accepts an evaluation set of plain text, and evaluates all its tokens
        if args.assistant_only_loss and name == "train":
            check_conversations(dataset, name, "assistant_only_loss")


def what_is_trained(args: TurnSettings, dataset: object) -> str:
    """Return in words which tokens of a training set are trained, and the setting that chose this rule."""
    columns = columns_of(dataset)
    if args.per_turn:
        return "each assistant turn after its prompt (`per_turn`)"
    if args.assistant_only_loss:
        return "assistant turns (`assistant_only_loss`)"
    has_mask = "completion_mask" in columns
    reads_mask = has_mask and reads_completion_mask(args.completion_only_loss, columns)
    if {"labels", "assistant_masks"} & {*columns} or reads_mask:
        return "the labels of the rows"
    if "prompt" in columns and "completion" in columns and trains_only_completions(args):
        return "completions (`completion_only_loss`)"
    rule = "every token"
    if has_mask:
        rule += ", because `completion_mask` is read with `completion_only_loss=True`"
    elif lacks_completions(args, dataset):
        rule += ", because no row has a `prompt` and a `completion`"
    if has_conversations(dataset):
        rule += "; `assistant_only_loss=True` trains those of the assistant"
    return rule


def lacks_completions(args: TurnSettings, dataset: object) -> bool:
    """Return whether `completion_only_loss` is True, and no row of a table has a completion, labels or a mask."""
    columns = {*columns_of(dataset)}
    has_labels = not columns.isdisjoint(("labels", "completion_mask", "assistant_masks"))
    is_text_table = isinstance(dataset, Dataset) and not has_images(dataset)
    has_completions = {"prompt", "completion"} <= columns
    return bool(args.completion_only_loss) and is_text_table and not has_labels and not has_completions


def warn_if_all_is_trained(args: TurnSettings, dataset: object) -> None:
    """Warn if every token of a training set is trained although a setting or a column says otherwise, as in TRL."""
    if args.per_turn or args.assistant_only_loss:
        return
    columns = columns_of(dataset)
    if lacks_completions(args, dataset):
        warnings.warn(
            f"`completion_only_loss=True` was given, and the train dataset has the columns {columns}. No row has a "
            "`prompt` and a `completion`, so every token is trained, as in TRL. Split the rows into these two columns; "
            "for conversations set `assistant_only_loss=True`.",
            stacklevel=4,
        )
    is_masked = {"input_ids", "completion_mask"} <= {*columns} and {"labels", "assistant_masks"}.isdisjoint(columns)
    if is_masked and args.completion_only_loss is None and not reads_completion_mask(None, columns):
        warnings.warn(
            "The train dataset has a column `completion_mask`, which is not read, and no `labels`. TRL reads it only "
            "with `completion_only_loss=True`, so every token is trained. Set `completion_only_loss=True`, or False to "
            "train every token on purpose.",
            stacklevel=4,
        )
