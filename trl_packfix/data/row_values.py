"""Weight and source of each row: columns that the user names, read beside the tokens and added to batches.

A document has the weight and the source of its row, also if it is a fragment of a split row, or one of several
documents in a row with `seq_lengths`. In a batch they are two tensors with one entry per document, `WEIGHTS` (float32)
and `SOURCES` (int64, an index of the names). The trainer removes them before the model gets the batch. Batches of a
stream have names in place of these numbers, because several processes may read it; the trainer numbers them.
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
from .rank_share import RankShare

WEIGHTS = "document_weights"  # keys of documents and of batches
SOURCES = "document_sources"
DTYPES = {WEIGHTS: torch.float32, SOURCES: torch.int64}
_NAMES = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
MAX_SOURCES = 100  # each has two numbers in every log entry


@dataclass(frozen=True)
class RowValues:
    """Weights and sources of R rows."""

    weights: npt.NDArray[np.float32] | None = None  # (R,); None without a column of weights
    sources: npt.NDArray[np.int64] | None = None  # index in `names`, (R,); None without a column of sources
    names: tuple[str, ...] = ()  # of the sources, sorted
    column_values: tuple[Any, ...] = ()  # the value of the column for each name

    def select(self, rows: npt.NDArray[np.int64] | None) -> "RowValues":
        """Of these rows, in this order; None for all."""
        if rows is None:
            return self
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, weights=weights, sources=None if self.sources is None else self.sources[rows])

    def for_row(self, row: int) -> dict[str, Any]:
        """What the documents of a row get, by the key of the batch."""
        columns = {WEIGHTS: self.weights, SOURCES: self.sources}
        return {name: values[row] for name, values in columns.items() if values is not None}


def read_row_values(dataset: Dataset, weight_column: str | None, source_column: str | None, *, name: str) -> RowValues:
    """The weights and sources of all rows; `name` is that of the dataset, for messages."""
    weights = None if weight_column is None else read_weights(dataset, weight_column, name)
    if source_column is None:
        return RowValues(weights)
    return RowValues(weights, *read_sources(dataset, source_column, name))


def read_weights(dataset: Dataset, column: str, name: str) -> npt.NDArray[np.float32]:
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
    narrow = weights.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(narrow) & (narrow >= 0)))
    if len(bad):
        raise ValueError(
            f"`weight_column={column!r}` was given, and {len(bad)} of {len(weights)} rows of the {name} dataset have "
            f"no usable weight; the first are {bad[:MAX_ROWS_NAMED].tolist()}, and row {bad[0]} holds "
            f"{values[int(bad[0])].as_py()}. A negative weight would train away from its document, and NaN or infinity "
            "would spoil the whole step. Give every row a finite weight of 0 or more; 0 trains nothing of the row."
        )
    return narrow


def check_row_values(
    row: dict[str, Any], index: int, *, weight_column: str | None, source_column: str | None, name: str
) -> dict[str, Any]:
    """Refuse values of a row of a stream that is read by TRL's loader; a function for `map` that changes nothing."""
    weight = 0 if weight_column is None else row.get(weight_column)
    if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError(
            f"`weight_column={weight_column!r}` was given, and row {index} of the {name} stream holds {weight!r}. A "
            "weight multiplies a loss: a negative one would train away from the row, and NaN or infinity would spoil "
            "the whole step. Give every row a finite weight of 0 or more; 0 trains nothing of the row."
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
    """The last three fields of `RowValues`.

    >>> codes, names, values = read_sources(Dataset.from_dict({"from": ["web", "code", "web"]}), "from", "train")
    >>> codes.tolist(), names, values
    ([1, 0, 1], ('code', 'web'), ('code', 'web'))
    """
    values = _value_column(dataset, column, "source_column", name=name)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if not any(is_kind(kind) for is_kind in _NAMES):
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
    name_of = feature.int2str if isinstance(feature, ClassLabel) else str
    names = {value: name_of(value) for value in distinct.to_pylist()}
    order = sorted(names, key=names.__getitem__)
    codes = pc.index_in(values.combine_chunks(), value_set=pa.array(order, kind)).to_numpy().astype(np.int64)
    return codes, tuple(names[value] for value in order), tuple(order)


class StreamSources(dict[str, int]):
    """The sources of a stream that this rank has read, numbered as it met them; `[name]` numbers a new one."""

    def __missing__(self, name: str) -> int:
        if len(self) == MAX_SOURCES:
            raise ValueError(
                f"`source_column` was given, and in the train stream it has more than {MAX_SOURCES} different values "
                f"({name[:40]}, ...). Each source has its own loss in every log entry, and at most {MAX_SOURCES} are "
                "logged. Set `source_column` to a coarser column, or group rare values under one name."
            )
        self[name] = number = len(self)
        return number

    def number_sources(self, names: Sequence[str | None]) -> torch.Tensor:
        """The numbers of these sources, shape (N,); 0 for the padding and the dummy, which have none."""
        return torch.tensor([0 if name is None else self[name] for name in names], dtype=DTYPES[SOURCES])


def _value_column(dataset: Dataset, column: str, field: str, *, name: str) -> pa.ChunkedArray:
    if column not in dataset.column_names:
        raise ValueError(
            f"`{field}={column!r}` was given, and the {name} dataset has the columns {dataset.column_names}. Without "
            f"this column its rows have no such value. Set `{field}` to one of these columns, or leave it unset."
        )
    values: pa.ChunkedArray = dataset.select_columns(column).with_format("arrow")[:][column]
    return values


@dataclass
class RowValuesCollator:
    """Makes a batch with `collate`, and adds the weights and sources of its documents, shape (N,).

    A document without them, as the dummy of an empty rank, gets 0; so does the padding of a pack. Neither has a trained
    token.
    """

    collate: Callable[[Any], dict[str, Any]]
    keys: dict[str, str]  # key of the batch -> key of the documents
    index: Mapping[Any, int] | None = None  # of each source by its column value, if documents have this value
    names_sources: bool = False  # documents have names of sources, and so does the batch: strings, None in place of 0

    def __call__(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        taken = set(self.keys.values())
        tokens = ({key: v for key, v in document.items() if key not in taken} for document in documents)
        batch = self.collate(RankShare.like(documents, tokens))
        num = layout_of(batch).count
        for key, name in self.keys.items():
            if key == SOURCES and self.names_sources:
                names = [str(document[name]) if name in document else None for document in documents]
                batch[key] = names + [None] * (num - len(names))
                continue
            values = [document.get(name, 0) for document in documents]
            if key == SOURCES and self.index is not None:
                values = [self.index[document[name]] if name in document else 0 for document in documents]
            batch[key] = torch.tensor(values + [0] * (num - len(values)), dtype=DTYPES[key])
        return batch
