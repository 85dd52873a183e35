"""Check settings and datasets before packing.

The config, the trainer, `packed_dataloader` (`loaders.py`) and streams (`stream_reader.py`) call these functions. Each
returns nothing if its arguments are good. Otherwise it raises a `ValueError` that says what was given, why it cannot
work, and what to set.
"""

from collections.abc import Iterable
from typing import Any, Literal

from datasets import Dataset

from ..planning.arrays import IGNORE_INDEX
from ..planning.packing import Overlong
from ..planning.packs import is_integer
from ..planning.strategies import STRATEGIES, Strategy
from .cache import cached_label_range, cached_token_range
from .reader import TokenReader, mask_columns

MAX_VOCABULARY = 2**24  # the largest vocabularies have 2**18 to 2**20 tokens


def check_choice(name: str, value: Any, choices: Iterable[str | None]) -> None:
    """Refuse a value of the setting `name` that is not one of the choices."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"`{name}={value!r}` was given. There is no such choice. Set one of {known}.")


def check_count(name: str, value: int) -> None:
    """Refuse a count that is no whole number, or below 1."""
    if not is_integer(value):
        raise ValueError(
            f"`{name}={value!r}` was given. It is a count, so it must be a whole number. Set `{name}` to an integer of "
            "1 or more."
        )
    if value < 1:
        raise ValueError(
            f"`{name}={value}` was given. It is a count, and a batch cannot be made with fewer than one. Set `{name}` "
            "to 1 or more."
        )


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank outside [0, world_size)."""
    check_count("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"`rank={rank}` was given with `world_size={world_size}`. Ranks count from 0 to {world_size - 1}, so there "
            "are no documents for this one. Set `rank` to the data-parallel rank of this process."
        )


def check_max_length(max_length: int | None, batch_size: int) -> None:
    """Refuse a `max_length` that is missing or no whole number, and documents of fewer than two tokens."""
    if max_length is None:
        raise ValueError(
            f"`max_length=None` was given with packing. The capacity of a pack is the batch size ({batch_size}) times "
            "`max_length`, so packing needs a length. Set `max_length` to the largest number of tokens of a document."
        )
    if not is_integer(max_length):
        raise ValueError(
            f"`max_length={max_length!r}` was given. It counts tokens, so it is a whole number. Set `max_length` to an "
            "integer of 2 or more."
        )
    if max_length < 2:
        raise ValueError(
            f"`max_length={max_length}` was given. A document needs two tokens: the first predicts the second. Set "
            "`max_length` to 2 or more."
        )


def check_overlong(name: str, strategy: Strategy, overlong: Overlong | None) -> None:
    """Refuse a setting `overlong` that contradicts the strategy. `name` is the setting that has set the strategy."""
    if STRATEGIES[strategy].overlong == "split" and overlong not in (None, "split"):
        raise ValueError(
            f"`{name}={strategy!r}` was given with `overlong={overlong!r}`. This strategy splits long documents, so "
            f'no document is too long. Set `{name}="stream"` or "bfd", or leave `overlong` unset.'
        )


def check_not_padded(dataset: Dataset, name: str) -> None:
    """Refuse a dataset with a 0 in an `attention_mask`. `name` is the name of the dataset in the message."""
    if "attention_mask" not in dataset.column_names:
        return
    # Read the mask like a column of tokens, in which every token should be 1
    mask = TokenReader(dataset.select_columns("attention_mask"), "attention_mask")
    # The range of values may be in the cache. It is of the whole table, also of rows that the dataset does not select.
    # If it is not from 1 to 1, look for the first selected row with a value below 1, or of 2 or more
    row = mask.first_row_outside(1, 2) if cached_token_range(mask) != (1, 1) else None
    if row is not None:
        raise ValueError(
            f"Row {row} of the {name} dataset is padded: its `attention_mask` has zeros. In a pack this padding would "
            "be trained and attended to. Tokenise with `padding=False`, or cut the padding off and remove the "
            "`attention_mask` column."
        )


def check_boundaries(dataset: Dataset, name: str) -> None:
    """Refuse rows that were packed elsewhere and tell it by `position_ids` alone, which are not read."""
    column = dataset.features.get("position_ids")
    if getattr(getattr(column, "feature", None), "dtype", "") not in ("int32", "int64"):
        return  # there are none, or positions in several dimensions
    if "seq_lengths" not in dataset.column_names:
        positions = TokenReader(dataset.select_columns("position_ids"), "position_ids")
        refuse_restart(positions.first_row_with_restart(), name)


def refuse_restart(row: int | None, name: str) -> None:
    """Refuse the row of a dataset whose `position_ids` begin again; None is no row."""
    if row is not None:
        raise ValueError(
            f"Row {row} of the {name} dataset has `position_ids` that begin again with 0, so it holds several "
            "documents. Only `seq_lengths` says where documents begin, so they would see each other. Give the lengths "
            "of the documents of each row as `seq_lengths`, or remove the column if a row is one document."
        )


def check_tokenised(dataset: Dataset, name: str, vocab_size: int | None, *, packing: bool) -> None:
    """Refuse a dataset that the user has tokenised if it cannot be used with packing, or without packing.

    Args:
        dataset: the tokenised rows.
        name: name of the dataset, for messages.
        vocab_size: number of embeddings of the model, or None if it is not known.
        packing: whether the dataset is packed. Otherwise rows that are packs already are refused.
    """
    if packing:
        check_tokens(dataset, name, vocab_size)
    elif "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has `seq_lengths`, so its rows are packs, but packing is off "
            "for it. A padded batch has no boundaries, so the documents of a row would see each other. Set "
            "`packing=True` (and `eval_packing`), or remove the column."
        )


def check_tokens(dataset: Dataset, name: str, vocab_size: int | None) -> None:
    """Refuse padding, rows packed elsewhere, ids outside the vocabulary, and labels that do not fit the tokens.

    Args:
        dataset: the tokenised rows.
        name: name of the dataset, for messages.
        vocab_size: number of embeddings of the model, or None to accept all token ids.
    """
    masks = mask_columns(dataset)
    # A `TokenReader` refuses labels that are not as long as the tokens. It also refuses a dataset with two masks of
    # trained tokens. Here two masks are no error, because TRL computes the labels from both
    reader = TokenReader(dataset.remove_columns(masks) if len(masks) > 1 else dataset)
    check_not_padded(dataset, name)
    check_boundaries(dataset, name)
    if vocab_size is None:
        return
    outside = _first_ids_outside(reader, vocab_size)
    if outside is not None:
        row, low, high = outside
        raise ValueError(
            f"Row {row} of the {name} dataset has token ids from {low} to {high}, and the model has {vocab_size} "
            f"embeddings. Ids must be from 0 to {vocab_size - 1}. Tokenise with the tokenizer of this model, or "
            "resize its embeddings."
        )
    if "labels" not in dataset.column_names:
        return
    outside = _first_ids_outside(reader, vocab_size, column="labels")
    if outside is not None:
        row, low, high = outside
        raise ValueError(
            f"Row {row} of the {name} dataset has labels from {low} to {high}, and the model has {vocab_size} "
            "embeddings. A label is the id of a token, and TRL trains any other number as another token. Set "
            "labels that are not trained to -100, and the others to the ids of their tokens."
        )


def check_id_range(dataset: Dataset) -> None:
    """Refuse token ids that no vocabulary has: below 0, or `MAX_VOCABULARY` and above."""
    outside = _first_ids_outside(TokenReader(dataset.select_columns("input_ids")), MAX_VOCABULARY)
    if outside is not None:
        row, low, high = outside
        raise ValueError(
            f"Row {row} of the dataset of {len(dataset)} rows has token ids from {low} to {high}. Ids are rows of the "
            f"embedding of a model, so they begin with 0, and no vocabulary has {MAX_VOCABULARY:,} of them. Correct "
            "the column `input_ids`; with `--model` ids are compared with those of its tokenizer."
        )


def _first_ids_outside(
    reader: TokenReader, vocab_size: int, *, column: Literal["input_ids", "labels"] = "input_ids"
) -> tuple[int, int, int] | None:
    """Return the first row with a value outside [0, vocab_size), with its smallest and its largest value.

    The label -100 is not counted.
    """
    of_labels = column == "labels"
    # The range is of the whole table, so the values outside may be in rows that the dataset does not select. Then `row`
    # is None
    low, high = cached_label_range(reader) if of_labels else cached_token_range(reader)
    row = reader.first_row_outside(0, vocab_size, of_labels=of_labels) if low < 0 or high >= vocab_size else None
    if row is None:
        return None
    values = reader.read(row, 0, int(reader.lengths[row]))[column]
    if of_labels:
        values = values[values != IGNORE_INDEX]
    return row, int(values.min()), int(values.max())
