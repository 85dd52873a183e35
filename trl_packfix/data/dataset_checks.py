"""Check settings and datasets for packing: used by the config, the trainer, `packed_dataloader` and streams."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from ..planning.strategies import STRATEGIES, Strategy
from .cache import cached_token_range
from .reader import TokenReader, mask_columns
from .spans import Overlong

NUM_SHOWN = 10  # rows that a message names


def check_choice(name: str, value: Any, choices: Iterable[str | None]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"`{name}={value!r}` was given. There is no such choice. Set one of {known}.")


def check_count(name: str, value: int) -> None:
    """Refuse a count below 1."""
    if value < 1:
        raise ValueError(
            f"`{name}={value}` was given. It is a count, and a batch cannot be made with fewer than one. Set `{name}` "
            "to 1 or more."
        )


def check_max_length(max_length: int | None, batch_size: int) -> None:
    """Refuse a missing length, which leaves the capacity undefined, and one too short for a target."""
    if max_length is None:
        raise ValueError(
            f"`max_length=None` was given with packing. The capacity of a pack is the batch size ({batch_size}) times "
            "`max_length`, so packing needs a length. Set `max_length` to the largest number of tokens of a document."
        )
    if max_length < 2:
        raise ValueError(
            f"`max_length={max_length}` was given. A document needs two tokens: the first predicts the second. Set "
            "`max_length` to 2 or more."
        )


def check_overlong(name: str, strategy: Strategy, overlong: Overlong | None) -> None:
    """Refuse a policy for long documents that contradicts the strategy. `name` is the argument that sets the latter."""
    if STRATEGIES[strategy].overlong == "split" and overlong not in (None, "split"):
        raise ValueError(
            f"`{name}={strategy!r}` was given with `overlong={overlong!r}`. This strategy splits long documents, so "
            f'no document is too long. Set `{name}="stream"` or "bfd", or leave `overlong` unset.'
        )


def check_not_padded(dataset: Dataset, name: str) -> None:
    """Refuse rows with zeros in their `attention_mask`."""
    if "attention_mask" not in dataset.column_names:
        return
    mask = TokenReader(dataset.select_columns("attention_mask"), "attention_mask")
    row = mask.first_row_outside(1, 2) if cached_token_range(mask) != (1, 1) else None
    if row is not None:
        raise ValueError(
            f"Row {row} of the {name} dataset is padded: its `attention_mask` has zeros. In a pack this padding would "
            "be trained and attended to. Tokenise with `padding=False`, or cut the padding off and remove the "
            "`attention_mask` column."
        )


# Datasets


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
    # Datasets with a transform are skipped: reading them would run it, and TRL refuses them.
    if not is_formatted and dataset.format["type"] != "custom":
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


def _rows_without_assistant(dataset: Dataset) -> np.ndarray:
    """Rows in which no message has the role "assistant", computed in Arrow without Python objects."""
    column = dataset.select_columns("messages").with_format("arrow")[:]["messages"]
    has_assistant: list[np.ndarray] = []
    for chunk in column.chunks:
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
            return np.zeros(0, np.int64)  # not the layout of messages: TRL raises an error
        messages = chunk.flatten()
        if not pa.types.is_struct(messages.type) or messages.type.get_field_index("role") < 0:
            return np.zeros(0, np.int64)
        role = pc.fill_null(pc.equal(pc.struct_field(messages, "role"), "assistant"), False)
        parents = pc.list_parent_indices(chunk).to_numpy()
        has_assistant.append(
            np.bincount(parents, weights=role.to_numpy(zero_copy_only=False), minlength=len(chunk)) > 0
        )
    return np.flatnonzero(~np.concatenate(has_assistant)) if has_assistant else np.zeros(0, np.int64)


def check_tokenised(dataset: Dataset, name: str, vocab_size: int | None, *, packing: bool) -> None:
    """Check a dataset that the user tokenised, for packed or unpacked use."""
    if packing:
        check_tokens(dataset, name, vocab_size)
    else:
        _check_not_packed(dataset, name)


def check_tokens(dataset: Dataset, name: str, vocab_size: int | None) -> None:
    """Check tokenised rows for packing.

    Raises:
        ValueError: labels of another length, padding under an `attention_mask`, ids outside the vocabulary.
    """
    masks = mask_columns(dataset)
    # With two masks TRL computes labels from both, so they are no error here.
    reader = TokenReader(dataset.remove_columns(masks) if len(masks) > 1 else dataset)
    check_not_padded(dataset, name)
    if vocab_size is None:
        return
    low, high = cached_token_range(reader)
    if low < 0 or high >= vocab_size:
        row = reader.first_row_outside(0, vocab_size)
        if row is not None:
            raise ValueError(
                f"Row {row} of the {name} dataset has token ids from {low} to {high}, and the model has {vocab_size} "
                f"embeddings. Ids must be from 0 to {vocab_size - 1}. Tokenise with the tokenizer of this model, or "
                "resize its embeddings."
            )


def _check_not_packed(dataset: Dataset, name: str) -> None:
    """Refuse rows that are packs already (`seq_lengths`), because a padded batch would lose their boundaries."""
    if "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has `seq_lengths`, so its rows are packs, but packing is off "
            "for it. A padded batch has no boundaries, so the documents of a row would see each other. Set "
            "`packing=True` (and `eval_packing`), or remove the column."
        )
