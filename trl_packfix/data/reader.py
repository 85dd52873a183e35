"""Read tokens of a tokenised dataset as numpy views. This is the only module that touches token storage.

A row of a `datasets.Dataset` is a slice of an Arrow buffer. The reader holds the buffers and the offsets of the rows in
them. Reading a span is then one numpy slice, without a copy and without Python lists.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, IterableDataset
from numpy.lib.stride_tricks import sliding_window_view

from ..planning.arrays import END_TOKEN_KEY, BoolArray, Int64Array
from ..samples.row import BAD_ROW_COLUMN, PerTurnCounts, bad_row_mask
from .collator import IGNORE_INDEX, MASK_COLUMNS
from .prefix_collator import Compare

# A mask may be boolean. The type of a column without values is null.
_HOLDS_INTEGERS = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)


class RowReader(ABC):
    """R tokenised rows: what documents, plans, batches and reports need of a table. Arrays have the shape (R,)."""

    lengths: Int64Array  # tokens
    image_stops: Int64Array | None = None  # index after the last token of an image, 0 without; None if there are none
    image_counts: Int64Array | None = None  # None if no row has images
    compare: Compare | None = None  # what is compared of documents to find common beginnings; None: their tokens
    conversations: Int64Array | None = None  # if documents are turns of rows with images, the row of the dataset
    turns: PerTurnCounts | None = None
    _table: Dataset

    def __len__(self) -> int:
        return len(self._table)

    @property
    def fingerprint(self) -> str:
        """The fingerprint that `datasets` gives these rows and columns: equal for the same data in any process."""
        return self._table._fingerprint  # there is no public accessor

    @property
    def files(self) -> list[Path]:
        """The Arrow files that the table is mapped from; [] for a table in memory."""
        return [Path(file["filename"]) for file in self._table.cache_files]

    def bad_rows(self) -> BoolArray:
        """Which rows could not be tokenised."""
        return bad_row_mask(self._table)

    def digests(self, rows: Int64Array) -> bytes | None:
        """Hashes of the documents of these rows; None if the tokens are at hand."""
        return None

    def of_images(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> dict[str, Int64Array]:
        """Of the images of each span what `Documents` has, by its attribute; {} if no row has images."""
        return {}

    def cuts(self, row: int, max_length: int) -> list[int] | None:
        """Where the document of a row with images is cut into fragments; None if it cannot be."""
        return None

    def seq_lengths(self) -> tuple[Int64Array, Int64Array] | None:
        """If the rows are packs already: documents per row, shape (R,), and the lengths of all documents in order."""
        return None

    @abstractmethod
    def read(self, row: int, start: int, stop: int) -> dict[str, Any]:
        """One span as `input_ids` and `labels`, shape (stop - start,)."""

    @abstractmethod
    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Labels of each span that are not -100, shape (N,)."""

    def count_trained(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Trained tokens of each document, shape (N,): its first token is never a target."""
        return self.count_labels(row, np.minimum(start + 1, stop), stop)


def mask_columns(dataset: Dataset) -> list[str]:
    """The columns of 0 and 1 that mark the trained tokens, used if there are no `labels`."""
    return [name for name in MASK_COLUMNS if name in dataset.column_names]


def without_ignored_mask(dataset: Dataset, completion_only_loss: bool | None) -> Dataset:
    """Without a `completion_mask` that TRL would not read. As in TRL, None is True with prompt and completion."""
    if completion_only_loss is None:
        completion_only_loss = {"prompt", "completion"} <= {*dataset.column_names}
    is_ignored = "completion_mask" in dataset.column_names and not completion_only_loss
    return dataset.remove_columns("completion_mask") if is_ignored else dataset


class _ListColumn:
    """One list column: the flat values of each Arrow chunk, and the offsets of the chunk's rows in them.

    Opening it copies nothing, and its time does not depend on the number of rows. Only a dataset with selected rows
    needs memory: 8 bytes per row.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, indices: Int64Array | None):
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not (is_list and any(holds(kind.value_type) for holds in _HOLDS_INTEGERS)):
            raise ValueError(
                f"Column `{name}` has type {kind}. Packing reads integers, so every row must be a list of them. "
                f"Give `{name}` as lists of token ids (of 0 and 1 for a mask), or leave the column out."
            )
        self.values: list[np.ndarray] = []
        self.offsets: list[np.ndarray] = []
        self.begins = [0]  # first row of each chunk, and the number of rows
        self.indices = indices
        if pa.types.is_fixed_size_list(kind):
            column = column.cast(pa.large_list(kind.value_type))  # adds offsets
        for chunk in column.chunks:
            values = chunk.values
            if pa.types.is_null(values.type) and not len(values):
                values = values.cast(pa.int64())  # all rows are empty, so the type is null
            if pa.types.is_boolean(values.type):
                values = values.cast(pa.int8())  # a mask: Arrow stores eight booleans in a byte, numpy one
            if chunk.null_count or values.null_count:
                raise ValueError(
                    f"Column `{name}` holds {chunk.null_count} missing rows and {values.null_count} missing values in "
                    f"{len(chunk)} rows. Packing reads every row as a list of integers without gaps. Remove these "
                    "rows, or write integers."
                )
            self.values.append(values.to_numpy(zero_copy_only=True))
            self.offsets.append(chunk.offsets.to_numpy())
            self.begins.append(self.begins[-1] + len(chunk))

    @cached_property
    def lengths(self) -> Int64Array:
        lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, self.offsets)])
        return lengths if self.indices is None else lengths[self.indices]

    def read(self, row: int, start: int, stop: int) -> np.ndarray:
        if self.indices is not None:
            row = self.indices.item(row)
        number = bisect_right(self.begins, row) - 1
        base = self.offsets[number].item(row - self.begins[number])
        return self.values[number][base + start : base + stop]

    def by_chunk(self, rows: Int64Array) -> Iterator[tuple[np.ndarray, Int64Array, np.ndarray]]:
        """For each chunk that has some of `rows`: its values, the indices of these `rows`, and their offsets in it."""
        rows = rows if self.indices is None else self.indices[rows]
        number = np.searchsorted(self.begins, rows, side="right") - 1
        order = np.argsort(number, kind="stable")
        bounds = np.searchsorted(number[order], np.arange(len(self.values) + 1))
        for i, values in enumerate(self.values):
            chosen = order[bounds[i] : bounds[i + 1]]
            if len(chosen):
                yield values, chosen, self.offsets[i][rows[chosen] - self.begins[i]].astype(np.int64)


class TokenReader(RowReader):
    """Read spans (row, start, stop) of a tokenised `datasets.Dataset` with R rows.

    Columns: `input_ids` (or `column` in its place), optionally `labels`, optionally `seq_lengths` (rows that are packs
    already). Missing `labels` are computed while reading and never stored. They are the tokens; with a
    `completion_mask` or `assistant_masks`, only the tokens under a 1. Selected and shuffled datasets are read through
    their indices. Memory-mapped datasets stay on disk. A pickled reader holds the path, not the tokens.

    Raises:
        ValueError: no `input_ids`, a column of the wrong type, labels or a mask of another length, both masks and no
            labels, a dataset with a transform, a stream.
    """

    def __init__(self, dataset: Dataset, column: str = "input_ids"):
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "An `IterableDataset` was given where a table is read. All lengths are needed before the first "
                "document is read, and the lengths of a stream are not known. Load it without streaming, or give it "
                'to `SFTTrainer` with `packing_strategy="stream"`.'
            )
        if dataset.format["type"] == "custom":
            raise ValueError(
                f"The dataset of {len(dataset)} rows has a transform (`Dataset.with_transform`). Packing must know the "
                "length of every document before training, and a transform makes rows only when they are read. "
                "Materialise it with `Dataset.map`, or set `packing=False`."
            )
        if column not in dataset.column_names:
            raise ValueError(
                f"The dataset has the columns {dataset.column_names} and no `input_ids`. Packing works on tokenised "
                "rows. Do not set `skip_prepare_dataset`, or provide `input_ids` (and `labels`) yourself."
            )
        targets = ["labels"] if "labels" in dataset.column_names else mask_columns(dataset)
        if len(targets) > 1:
            raise ValueError(
                f"The dataset has the columns {targets} and no `labels`. A token is trained where both masks are 1, "
                "but only one mask can be read. Add `labels` (-100 where a token is not trained), or leave "
                "`skip_prepare_dataset` unset so that they are built."
            )
        names = [column, *targets, *(name for name in ("seq_lengths", BAD_ROW_COLUMN) if name in dataset.column_names)]
        self._table = dataset.select_columns(names)
        self._open()
        if self._targets is None:
            return
        wrong = np.flatnonzero(self._targets.lengths != self._tokens.lengths)
        if len(wrong):
            row = wrong[0]
            name = targets[0]
            what, one, value = ("labels", "label", "-100") if self._has_labels else ("a mask", "entry", "0")
            raise ValueError(
                f"{len(wrong)} rows have {what} of another length than their tokens; the first is row {row} with "
                f"{self._tokens.lengths[row]} `input_ids` and {self._targets.lengths[row]} `{name}`. Each token needs "
                f"exactly one {one}. Give `{name}` the length of `input_ids`, with {value} where a token is not "
                "trained."
            )

    def _open(self) -> None:
        # A selected or shuffled dataset has the whole table and the indices of its rows; there is no public accessor.
        mapping = self._table._indices
        indices = None if mapping is None else mapping.column(0).to_numpy()
        names = [name for name in self._table.column_names if name != BAD_ROW_COLUMN]
        columns = {name: _ListColumn(name, self._table.data.column(name), indices) for name in names}
        self._tokens = columns[self._table.column_names[0]]
        self._has_labels = "labels" in columns
        # labels or a mask; None if all tokens are trained
        self._targets = next((columns[name] for name in ("labels", *MASK_COLUMNS) if name in columns), None)
        self._seq_lengths = columns.get("seq_lengths")

    def __getstate__(self) -> dict[str, Any]:
        return {"_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = state["_table"]
        self._open()

    @property
    def lengths(self) -> Int64Array:  # type: ignore[override]
        return self._tokens.lengths

    def seq_lengths(self) -> tuple[Int64Array, Int64Array] | None:
        if self._seq_lengths is None:
            return None
        per_row = self._seq_lengths.lengths
        parts = [self._seq_lengths.read(row, 0, num) for row, num in enumerate(per_row)]
        return per_row, np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)

    def read(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Both are views of the dataset's own memory, except labels that are computed from a mask."""
        tokens = self._tokens.read(row, start, stop)
        if self._targets is None:
            return {"input_ids": tokens, "labels": tokens}
        targets = self._targets.read(row, start, stop)
        if not self._has_labels:
            targets = np.where(targets != 0, tokens, np.int64(IGNORE_INDEX))
        return {"input_ids": tokens, "labels": targets}

    def read_block(self, row: Int64Array, start: Int64Array, stop: Int64Array, *, width: int) -> npt.NDArray[np.uint32]:
        """The first `width` tokens of each span, big-endian, shape (N, width); 2**32 - 1 behind the end of a span.

        `start` may be at or behind `stop`.
        """
        block = np.full((len(row), width), END_TOKEN_KEY, dtype=">u4")
        size = np.clip(stop - start, 0, width)
        wanted = np.flatnonzero(size)
        for values, spans, base in self._tokens.by_chunk(row[wanted]):
            spans, first = wanted[spans], base + start[wanted[spans]]
            whole = first + width <= len(values)
            if whole.any():
                block[spans[whole]] = sliding_window_view(values, width)[first[whole]]
            for i, at in zip(spans[~whole].tolist(), first[~whole].tolist(), strict=True):
                tokens = values[at : at + width]
                block[i, : len(tokens)] = tokens
        for i in np.flatnonzero((size > 0) & (size < width)).tolist():
            block[i, size[i] :] = END_TOKEN_KEY
        return block

    def read_evenly(self, row: Int64Array, start: Int64Array, stop: Int64Array, *, num: int) -> npt.NDArray[np.int64]:
        """`num` evenly spaced tokens of each span, from its first to its last, little-endian, shape (N, num).

        No span may be empty. Of shorter ones tokens are repeated.
        """
        tokens = np.empty((len(row), num), dtype="<i8")
        steps = (stop - start - 1)[:, None] * np.arange(num) // (num - 1)
        for values, spans, base in self._tokens.by_chunk(row):
            tokens[spans] = values[(base + start[spans])[:, None] + steps[spans]]
        return tokens

    def labels_are_tokens(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> BoolArray:
        """Whether each label of a span is -100 or its own token, shape (N,); with the memory of `count_labels`."""
        are_tokens = np.ones(len(row), dtype=bool)
        if not self._has_labels:
            return are_tokens
        assert self._targets is not None
        if self._targets.begins != self._tokens.begins:  # chunks of other rows: span by span
            for i, span in enumerate(zip(row.tolist(), start.tolist(), stop.tolist(), strict=True)):
                read = self.read(*span)
                are_tokens[i] = ((read["labels"] == IGNORE_INDEX) | (read["labels"] == read["input_ids"])).all()
            return are_tokens
        chunks = zip(self._tokens.by_chunk(row), self._targets.by_chunk(row), strict=True)
        for (tokens, spans, base), (labels, _, labels_base) in chunks:
            first = base + start[spans]
            last = base + stop[spans]
            low = int(first.min())
            high = int(last.max())
            # Rows have as many labels as tokens, so all rows of a chunk are as far apart in the two columns.
            shift = int(labels_base[0] - base[0])
            chunk_labels = labels[low + shift : high + shift]
            wrong = (chunk_labels != IGNORE_INDEX) & (chunk_labels != tokens[low:high])
            are_tokens[spans] = _count_marked(wrong, first - low, last - low) == 0
        return are_tokens

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """In one pass, chunk by chunk, with 4 bytes of memory per token of the largest chunk."""
        if self._targets is None:
            return stop - start
        counts = np.zeros(len(row), dtype=np.int64)
        for values, spans, base in self._targets.by_chunk(row):
            first = base + start[spans]
            last = base + stop[spans]
            low = first.min()
            is_label = values[low : last.max()] != (IGNORE_INDEX if self._has_labels else 0)
            counts[spans] = _count_marked(is_label, first - low, last - low)
        return counts

    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token id of all rows. Reads every token."""
        values = [chunk for chunk in self._tokens.values if len(chunk)]
        lowest = min((int(chunk.min()) for chunk in values), default=0)
        return lowest, max((int(chunk.max()) for chunk in values), default=0)

    def first_row_outside(self, low: int, high: int) -> int | None:
        """First row with a token id outside [low, high), or None."""
        for row, length in enumerate(self._tokens.lengths):
            tokens = self._tokens.read(row, 0, length)
            if length and (tokens.min() < low or tokens.max() >= high):
                return row
        return None


def _count_marked(marks: BoolArray, first: Int64Array, stop: Int64Array) -> npt.NDArray[Any]:
    """How many of `marks[first[i]:stop[i]]` are True, shape (N,)."""
    sums: npt.NDArray[Any] = np.zeros(len(marks) + 1, dtype=np.int32 if len(marks) < 2**31 else np.int64)
    np.cumsum(marks, out=sums[1:])
    return sums[stop] - sums[first]
