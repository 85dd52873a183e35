"""Settings and datasets that packing refuses: used by the config, the trainer, `packed_dataloader` and streams."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from ..planning.strategies import STRATEGIES, Strategy
from .cache import prepared_token_range
from .reader import TokenReader, mask_columns
from .spans import Overlong

NUM_SHOWN = 10  # rows that a message names


def check_choice(name: str, value: Any, choices: Iterable[str | None]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"`{name}={value!r}` was given. There is no such choice. Set one of {known}.")


def check_count(name: str, value: int) -> None:
    """Refuse fewer than one of what there must be."""
    if value < 1:
        raise ValueError(
            f"`{name}={value}` was given. It is a count, and with fewer than one no batch can be made. Set `{name}` to "
            "1 or more."
        )


def check_max_length(max_length: int | None, batch_size: int) -> None:
    """Refuse a length that gives a pack no capacity, or a document no target."""
    if max_length is None:
        raise ValueError(
            f"`max_length=None` was given with packing. The capacity of a pack is the batch size ({batch_size}) times "
            "`max_length`, so packing needs a length. Set `max_length` to the most tokens that a document may have."
        )
    if max_length < 2:
        raise ValueError(
            f"`max_length={max_length}` was given. A document needs two tokens, one to predict from and one to "
            "predict. Set `max_length` to 2 or more."
        )


def check_overlong(name: str, strategy: Strategy, overlong: Overlong | None) -> None:
    """Refuse a policy for long documents that contradicts the strategy, which is called `name` where it is set."""
    if STRATEGIES[strategy].overlong == "split" and overlong not in (None, "split"):
        raise ValueError(
            f"`{name}={strategy!r}` was given with `overlong={overlong!r}`. This strategy splits long documents, so "
            f'nothing is left to cut or refuse. Set `{name}="stream"` or "bfd", or leave `overlong` unset.'
        )


def check_not_padded(dataset: Dataset, name: str) -> None:
    """Refuse rows with zeros in their `attention_mask`."""
    if "attention_mask" not in dataset.column_names:
        return
    mask = TokenReader(dataset.select_columns("attention_mask"), "attention_mask")
    row = mask.first_row_outside(1, 2) if prepared_token_range(mask) != (1, 1) else None
    if row is not None:
        raise ValueError(
            f"Row {row} of the {name} dataset is padded: its `attention_mask` has zeros. Packing needs no padding, "
            "and padding inside a document would be trained and attended to. Tokenise with `padding=False`, or "
            "cut the padding off and remove the `attention_mask` column."
        )


# Datasets


def check_rows(dataset: Dataset | IterableDataset | None, name: str) -> None:
    """Refuse a dataset without rows, of which TRL reads the first."""
    if isinstance(dataset, IterableDataset) and next(iter(dataset), None) is None:
        raise ValueError(
            f"The {name} dataset is an `IterableDataset` of 0 rows. There is nothing to train or evaluate. Check the "
            "files, the split and the filters that it comes from, and that its generator makes new rows each time it "
            "is called."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(
            f"The {name} dataset has 0 rows and the columns {dataset.column_names}. There is nothing to train or "
            "evaluate. Check the file, the split and the filters that it comes from."
        )


def check_raw_dataset(dataset: Dataset, name: str, tokenizer: Any, args: Any, is_formatted: bool = False) -> None:
    """What can be refused in a dataset that is not tokenised yet; `is_formatted`: a function will make its text.

    With `bad_rows="drop"` single rows are not looked at.

    Raises:
        ValueError: no rows, nothing to tokenise, or missing values there; plain text and no EOS token;
            `assistant_only_loss` and rows without an assistant message.
    """
    check_rows(dataset, name)
    columns = dataset.column_names
    if not is_formatted and dataset.format["type"] != "custom":  # TRL refuses transforms, and a look would run them
        _check_text(dataset, name, args)
    conversational = "messages" in columns or "conversations" in columns
    if not conversational and tokenizer.eos_token is None and not _is_conversational_prompt(dataset):
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and the {name} dataset of {len(dataset)} "
            "rows is plain text. Every document must end with EOS, or the model never learns to stop. Set "
            "`eos_token` in the config, or `tokenizer.eos_token`."
        )
    if args.assistant_only_loss and args.bad_rows == "raise" and "messages" in columns:
        silent = _rows_without_assistant(dataset)
        if len(silent):
            raise ValueError(
                f"`assistant_only_loss=True` was given and {len(silent)} of {len(dataset)} rows of the {name} dataset "
                f"have no assistant message; the first are {silent[:NUM_SHOWN].tolist()}. Such a row has nothing to "
                "train on. Remove these rows (`dataset.select`), or set `assistant_only_loss=False`."
            )


def _check_text(dataset: Dataset, name: str, args: Any) -> None:
    """Refuse a dataset in which TRL would find nothing to tokenise, and stop with an error of Python's."""
    text_field = args.dataset_text_field
    columns = _text_columns(dataset, text_field)
    if not columns:
        found = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {found}. TRL tokenises `messages` (lists of "
            "`role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with `completion`, or the "
            f"text in `{text_field}`, and none of them is there. Rename or reshape a column, or set "
            "`dataset_text_field` to the one that holds the text."
        )
    for column in columns if args.bad_rows == "raise" else ():
        if dataset.data.column(column).null_count:  # of all rows of the table, selected or not, without a copy
            values = dataset.select_columns(column).with_format("arrow")[:][column]
            missing = np.flatnonzero(values.is_null().to_numpy())
            if len(missing):
                raise ValueError(
                    f"{len(missing)} of {len(dataset)} rows of the {name} dataset hold None in `{column}`; the first "
                    f"are {missing[:NUM_SHOWN].tolist()}. There is nothing to tokenise in them. Remove these rows "
                    "(`dataset.select`), or write what is missing."
                )


def _text_columns(dataset: Dataset, text_field: str) -> list[str]:
    """The columns that TRL tokenises, chosen as it does; [] if there are none."""
    columns = dataset.column_names
    if "prompt" in columns:
        return ["prompt", "completion"] if "completion" in columns else []
    for column, key in (("conversations", "from"), ("messages", "role")):
        if column in columns:
            first = dataset.select_columns(column).with_format(None)[0][column]
            # An empty first row does not say what the others hold, and None is refused by its number.
            if not first or (isinstance(first, list) and isinstance(first[0], dict) and key in first[0]):
                return [column]
    return [text_field] if text_field in columns else []


def _is_conversational_prompt(dataset: Dataset) -> bool:
    feature = dataset.features.get("prompt")
    return feature is not None and getattr(feature, "dtype", None) != "string"


def _rows_without_assistant(dataset: Dataset) -> np.ndarray:
    """Rows in which no message has the role "assistant", from Arrow: no row becomes a Python object."""
    column = dataset.select_columns("messages").with_format("arrow")[:]["messages"]
    has_assistant: list[np.ndarray] = []
    for chunk in column.chunks:
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
            return np.zeros(0, np.int64)  # not the layout of messages: TRL will say so
        messages = chunk.flatten()
        if not pa.types.is_struct(messages.type) or messages.type.get_field_index("role") < 0:
            return np.zeros(0, np.int64)
        role = pc.fill_null(pc.equal(pc.struct_field(messages, "role"), "assistant"), False)
        parents = pc.list_parent_indices(chunk).to_numpy()
        has_assistant.append(
            np.bincount(parents, weights=role.to_numpy(zero_copy_only=False), minlength=len(chunk)) > 0
        )
    return np.flatnonzero(~np.concatenate(has_assistant)) if has_assistant else np.zeros(0, np.int64)


def check_tokenised(dataset: Dataset, name: str, vocab_size: int | None, packing: bool) -> None:
    """What can be refused in a dataset that the user tokenised, where it is packed and where it is not."""
    if packing:
        check_tokens(dataset, name, vocab_size)
    else:
        _check_not_packed(dataset, name)


def check_tokens(dataset: Dataset, name: str, vocab_size: int | None) -> None:
    """What packing refuses in tokenised rows.

    Raises:
        ValueError: labels of another length, padding under an `attention_mask`, ids outside the vocabulary.
    """
    masks = mask_columns(dataset)
    reader = TokenReader(dataset.remove_columns(masks) if len(masks) > 1 else dataset)  # TRL makes labels of both
    check_not_padded(dataset, name)
    if vocab_size is None:
        return
    low, high = prepared_token_range(reader)
    if low < 0 or high >= vocab_size:
        row = reader.first_row_outside(0, vocab_size)
        if row is not None:
            raise ValueError(
                f"Row {row} of the {name} dataset has token ids from {low} to {high}, and the model has {vocab_size} "
                "embeddings. An id outside them cannot be looked up. Tokenise with the tokenizer of this model, or "
                "resize its embeddings."
            )


def _check_not_packed(dataset: Dataset, name: str) -> None:
    """Refuse rows that are packs already (`seq_lengths`): without packing their boundaries are lost."""
    if "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has `seq_lengths`, so its rows are packs, and packing is off "
            "for it. A padded batch has no boundaries, and the documents of a row would see each other. Set "
            "`packing=True` (and `eval_packing`), or remove the column."
        )
