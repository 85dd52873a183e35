"""Read the weight and the source of each row, and add them to batches.

The user may name two columns of the dataset: `weight_column` with a number by which the loss of a row is multiplied,
and `source_column` with the name of the data set that a row comes from, whose loss is logged separately. A document has
the weight and the source of its row. If a long row is split into several documents, or is a pack of several documents
already (`seq_lengths`), each of these has the row's values.

`read_row_values` reads both columns of a table. `DocumentDataset` (`loaders.py`) adds the values of its row to each
document, and `RowValuesCollator` makes two tensors of them, with one entry for each document of the batch: `WEIGHTS`
(float32) and `SOURCES` (int64, the number of the source). The trainer removes them before the model gets the batch.

Several processes may read a stream, so its sources cannot be numbered when they are read. Batches of a stream have the
names of the sources in place of numbers, and the trainer numbers them (`StreamSources`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset

from ..layout import layout_of
from ..samples.row import MAX_ROWS_NAMED
from ..samples.texts import arrow_column
from .rank_share import RankShare

# Keys of documents and of batches
WEIGHTS = "document_weights"
SOURCES = "document_sources"
DTYPES = {WEIGHTS: torch.float32, SOURCES: torch.int64}
MAX_WEIGHT = torch.finfo(DTYPES[WEIGHTS]).max  # larger weights become infinite in a batch
# Types of a column of sources
_SOURCE_TYPES = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
MAX_SOURCES = 100  # each source adds two numbers to every log entry


@dataclass(frozen=True)
class RowValues:
    """Weights and sources of R rows."""

    weights: npt.NDArray[np.float32] | None = None  # shape (R,); None without a column of weights
    sources: npt.NDArray[np.int64] | None = None  # indices in `names`, shape (R,); None without a column of sources
    names: tuple[str, ...] = ()  # names of the sources, sorted; a source is numbered by its place here
    column_values: tuple[Any, ...] = ()  # for each name the value in the column, such as a class number

    def select(self, rows: npt.NDArray[np.int64] | None) -> "RowValues":
        """Return the values of some rows, in the given order, or of all rows for None."""
        if rows is None:
            return self
        weights = None if self.weights is None else self.weights[rows]
        sources = None if self.sources is None else self.sources[rows]
        return replace(self, weights=weights, sources=sources)

    def for_row(self, row: int) -> dict[str, Any]:
        """Return the entries that the documents of a row get: its weight and the number of its source, if there are."""
        columns = {WEIGHTS: self.weights, SOURCES: self.sources}
        return {name: values[row] for name, values in columns.items() if values is not None}


def read_row_values(dataset: Dataset, weight_column: str | None, source_column: str | None, *, name: str) -> RowValues:
    """Read the weights and the sources of all rows.

    Args:
        dataset: the rows.
        weight_column: column of the weights, or None.
        source_column: column of the sources, or None.
        name: name of the dataset, for messages.

    Raises:
        ValueError: a column is missing or has the wrong type, or a row has no usable weight or source.
    """
    weights = None if weight_column is None else read_weights(dataset, weight_column, name)
    if source_column is None:
        return RowValues(weights)
    return RowValues(weights, *read_sources(dataset, source_column, name))


def read_weights(dataset: Dataset, column: str, name: str) -> npt.NDArray[np.float32]:
    """Return the weights of all R rows, shape (R,).

    Raises:
        ValueError: the column is missing or does not hold numbers, or a weight is negative, infinite or missing.
    """
    values = _value_column(dataset, column, "weight_column", name=name)
    kind = values.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        first = values[0].as_py() if len(values) else None
        raise ValueError(
            f"`weight_column={column!r}` was given, and in the {name} dataset this column has type {kind} (row 0 holds "
            f"{str(first)[:40]!r}). A weight multiplies a loss, so it is a number. Convert the column to floats "
            "(`dataset.cast_column`), or leave `weight_column` unset."
        )
    weights = pc.fill_null(values.cast(pa.float64()), float("nan")).to_numpy()
    weights_float32 = weights.astype(np.float32)
    is_usable = np.isfinite(weights_float32) & (weights_float32 >= 0)
    bad = np.flatnonzero(~is_usable)
    if len(bad):
        raise ValueError(
            f"`weight_column={column!r}` was given, and {len(bad)} of {len(weights)} rows of the {name} dataset have "
            f"no usable weight; the first are {bad[:MAX_ROWS_NAMED].tolist()}, and row {bad[0]} holds "
            f"{values[int(bad[0])].as_py()}. A negative weight would train away from its document, and NaN or infinity "
            "would spoil the whole step. Give every row a finite weight of 0 or more; 0 trains nothing of the row."
        )
    return weights_float32


def check_row_values(
    row: dict[str, Any], index: int, *, weight_column: str | None, source_column: str | None, name: str
) -> dict[str, Any]:
    """Check the weight and the source of a row of a stream, as a function for `IterableDataset.map`.

    It is used for streams that TRL's loader reads, without packing.

    Args:
        row: the columns of the row.
        index: number of the row, for messages.
        weight_column: column of the weights, or None.
        source_column: column of the sources, or None.
        name: name of the dataset, for messages.

    Returns:
        An empty dictionary, so that `map` changes no column.

    Raises:
        ValueError: the weight or the source is missing or has the wrong type.
    """
    # Without a column, check a value that passes
    weight = 0 if weight_column is None else row.get(weight_column)
    # As in a table, a boolean is no number
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(
            f"`weight_column={weight_column!r}` was given, and row {index} of the {name} stream holds {weight!r}. A "
            "weight multiplies a loss, so it is a number; a negative one would train away from the row, and NaN or "
            "infinity would spoil the whole step. Give every row a finite weight of 0 or more; 0 trains nothing of the "
            "row."
        )
    source = "" if source_column is None else row.get(source_column)
    if not isinstance(source, str | int):
        raise ValueError(
            f"`source_column={source_column!r}` was given, and row {index} of the {name} stream holds {source!r}. A "
            "source is a name that many rows share: a string, a whole number or a boolean. Give every row such a name, "
            "or set `source_column` to another column."
        )
    return {}


def read_sources(
    dataset: Dataset, column: str, name: str
) -> tuple[npt.NDArray[np.int64], tuple[str, ...], tuple[Any, ...]]:
    """Return the sources of all R rows as the last three fields of `RowValues`.

    Returns:
        The number of the source of each row, shape (R,); the sorted names of the sources; and the value that the column
        has for each name.

    Raises:
        ValueError: the column is missing or has the wrong type, a row has no source, or there are too many sources.

    >>> codes, names, values = read_sources(Dataset.from_dict({"from": ["web", "code", "web"]}), "from", "train")
    >>> codes.tolist(), names, values
    ([1, 0, 1], ('code', 'web'), ('code', 'web'))
    """
    values = _value_column(dataset, column, "source_column", name=name)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if not any(is_type(kind) for is_type in _SOURCE_TYPES):
        raise ValueError(
            f"`source_column={column!r}` was given, and in the {name} dataset this column has type {kind}. A source is "
            "a name that many rows share. Set `source_column` to a column of strings or whole numbers, or leave it "
            "unset."
        )
    missing = np.flatnonzero(values.is_null().to_numpy())
    if len(missing):
        raise ValueError(
            f"`source_column={column!r}` was given, and {len(missing)} of {len(values)} rows of the {name} dataset "
            f"hold None there; the first are {missing[:MAX_ROWS_NAMED].tolist()}. Their loss would belong to no "
            'source. Fill in a name, such as "other", or remove the rows.'
        )
    distinct = pc.unique(values)
    if len(distinct) > MAX_SOURCES:
        examples = ", ".join(str(value) for value in distinct[:MAX_ROWS_NAMED].to_pylist())
        raise ValueError(
            f"`source_column={column!r}` was given, and in the {name} dataset it has {len(distinct)} different values "
            f"({examples[:200]}, ...). Each source has its own loss in every log entry, and at most {MAX_SOURCES} are "
            "logged. Set `source_column` to a coarser column, or group rare values under one name."
        )
    feature = dataset.features[column]
    name_of_value = feature.int2str if isinstance(feature, ClassLabel) else str
    names = {value: name_of_value(value) for value in distinct.to_pylist()}
    order = sorted(names, key=names.__getitem__)
    codes = pc.index_in(values.combine_chunks(), value_set=pa.array(order, kind)).to_numpy().astype(np.int64)
    return codes, tuple(names[value] for value in order), tuple(order)


class StreamSources(dict[str, int]):
    """Numbers of the sources of a stream, by name. Looking up a new name gives it the next number.

    Each rank numbers the sources in the order in which it reads them.

    Raises:
        ValueError: there are too many sources.
    """

    def __missing__(self, name: str) -> int:
        if len(self) == MAX_SOURCES:
            raise ValueError(
                f"`source_column` was given, and in the train stream it has more than {MAX_SOURCES} different values "
                f"({name[:40]}, ...). Each source has its own loss in every log entry, and at most {MAX_SOURCES} are "
                "logged. Set `source_column` to a coarser column, or group rare values under one name."
            )
        number = len(self)
        self[name] = number
        return number

    def number_sources(self, names: Sequence[str | None]) -> torch.Tensor:
        """Return the numbers of N sources, shape (N,). None stands for padding or a dummy document, and becomes 0."""
        return torch.tensor([0 if name is None else self[name] for name in names], dtype=DTYPES[SOURCES])


def _value_column(dataset: Dataset, column: str, field: str, *, name: str) -> pa.ChunkedArray:
    """Return a column of the dataset `name` that the user has named in the setting `field`.

    Raises:
        ValueError: the dataset has no such column.
    """
    if column not in dataset.column_names:
        raise ValueError(
            f"`{field}={column!r}` was given, and the {name} dataset has the columns {dataset.column_names}. Without "
            f"this column its rows have no such value. Set `{field}` to one of these columns, or leave it unset."
        )
    return arrow_column(dataset, column)


@dataclass
class RowValuesCollator:
    """Makes a batch with another collator, and adds the weights and sources of its N documents, shape (N,).

    The dummy document of a rank that has no document in a micro-batch, and the padding of a pack, have neither. Their
    weight and their source are 0, which changes nothing because they have no trained token.
    """

    collate: Callable[[Any], dict[str, Any]]  # the other collator
    # The entries to add (`WEIGHTS`, `SOURCES`), each with the key under which documents hold its value
    keys: dict[str, str]
    # For unpacked rows, which hold the value of the source column: the number of each value. None for packed documents
    # of a table, which hold the number already
    source_numbers: Mapping[Any, int] | None = None
    # For a stream: documents hold names of sources, and the batch gets a list of names, with None in place of 0
    names_sources: bool = False

    def __call__(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        value_keys = set(self.keys.values())
        without_values = (
            {key: value for key, value in document.items() if key not in value_keys} for document in documents
        )
        # If ranks share a pack, the collator cuts the batch to the part of this rank. So the new list gets the group of
        # ranks that `documents` has
        batch = self.collate(RankShare.like(documents, without_values))
        # The collator may put padding behind the documents, which the layout counts as a document. It has no values.
        # Neither has a dummy document, but it is one of `documents`
        num_padding = layout_of(batch).document_count - len(documents)
        for key, document_key in self.keys.items():
            values = [document.get(document_key) for document in documents] + [None] * num_padding
            if key == SOURCES and self.names_sources:
                batch[key] = [None if value is None else str(value) for value in values]
                continue
            if key == SOURCES and self.source_numbers is not None:
                values = [None if value is None else self.source_numbers[value] for value in values]
            batch[key] = torch.tensor([0 if value is None else value for value in values], dtype=DTYPES[key])
        return batch
