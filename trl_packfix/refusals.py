"""What packing refuses wherever it is asked for: in the config, in the trainer and in `packed_dataloader`."""

from collections.abc import Iterable
from typing import Any

from datasets import Dataset

from .documents import Overlong
from .prepared import prepared_token_range
from .reader import TokenReader

IMPLIED_OVERLONG: dict[str, Overlong] = {
    "stream": "truncate",
    "bfd": "truncate",
    "bfd_split": "split",
    "wrapped": "split",
    "minibatch": "truncate",
}


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


def check_overlong(name: str, strategy: str, overlong: Overlong | None) -> None:
    """Refuse a policy for long documents that contradicts the strategy, which is called `name` where it is set."""
    if IMPLIED_OVERLONG[strategy] == "split" and overlong not in (None, "split"):
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
