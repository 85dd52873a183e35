"""Read tokens and labels of a tokenised dataset as numpy views. No other module touches the Arrow buffers of tokens.

TRL tokenises the dataset to a table with `input_ids`, and often with `labels` or a mask of the trained tokens.
`TokenReader` reads this table. `documents.py` asks it for the lengths of the rows and their numbers of labels, and
`DocumentDataset` (`loaders.py`) reads the tokens of a batch. A table with images has another reader, `ImageRows`
(`features/images/rows.py`), with the same methods.

A row of a `datasets.Dataset` is a slice of an Arrow buffer. The reader holds the buffers, and the offsets of the rows
in them. Reading a span is then one numpy slice, without a copy and without Python lists.

Words:
    span    the tokens from `start` to `stop` of one row. A document is a span; several documents may be in one row.
    label   the token that is trained at a position, or -100 (`IGNORE_INDEX`). Here a label is not shifted: the label of
            a position is the token of this position.
    turn    an answer of the assistant in a conversation, with the messages before it. With `per_turn` each turn is a
            row of the table, so that a conversation, a row of the dataset, becomes several rows of the table.
    chunk   one of the buffers that hold a column. Each chunk holds consecutive rows of the table.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, IterableDataset
from numpy.lib.stride_tricks import sliding_window_view

from ..planning.arrays import END_TOKEN_KEY, IGNORE_INDEX, MASK_COLUMNS, BoolArray, Int64Array, restarts
from ..samples.row import BAD_ROW_COLUMN, PerTurnCounts, bad_row_mask, reads_completion_mask
from ..wording import count_of

if TYPE_CHECKING:
    from ..layout import Compare

# A mask may be boolean. The type of a column without values is null.
_HOLDS_INTEGERS = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)


class RowReader(ABC):
    """Base class of the readers of R tokenised rows.

    Arrays of the attributes have the shape (R,). A method for several spans takes the arrays `row`, `start` and `stop`
    of shape (N,), with one entry for each span.
    """

    lengths: Int64Array  # number of tokens of each row
    # The token behind the last image of each row; 0 in a row without images. None if the table has no images: its rows
    # can be split at any token. Rows of a table with images are split where `find_cuts` says
    image_stops: Int64Array | None = None
    image_counts: Int64Array | None = None  # number of images of each row
    # A function that returns the content of documents, so that the collator finds common beginnings of the documents of
    # a batch. None if it compares their tokens. (For planning, `comparison_reader` returns the content of all rows)
    compare: "Compare | None" = None
    # For each row, which then is a turn, the row in the dataset that has its conversation. None if rows are no turns,
    # and for text: only a reader of images divides conversations, and others are divided before the table is made
    conversations: Int64Array | None = None
    turns: PerTurnCounts | None = None  # counts of the turns. None if rows are not divided into turns
    _table: Dataset  # the table that is read; it has R rows

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
        """Return which rows could not be tokenised, shape (R,)."""
        return bad_row_mask(self._table)

    def digests(self, rows: Int64Array) -> bytes | None:
        """Return a hash of the tokens and images of each row, in one string of bytes; None if rows hold tokens only."""
        return None

    def image_arrays(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> dict[str, Int64Array]:
        """Return the arrays of `Documents` that describe the images of each span, by their name; {} without images."""
        return {}

    def find_cuts(self, row: int, max_length: int) -> list[int] | None:
        """Return the places where a row is cut into fragments of at most `max_length` tokens, without cutting an image.

        It is called only for a reader of rows with images (`image_stops`).

        Returns:
            The places, from 0 to the number of tokens of the row. None if an image is too long for a fragment.
        """
        return None

    def report_section(self, planner: Any) -> Any:
        """Return the `ContentSection` of a report on the images of an `EpochPlanner`; None if rows hold tokens only."""
        return None

    @property
    def comparison_reader(self) -> "TokenReader":
        """The reader of the numbers by which documents are sorted to find common beginnings.

        It has the rows of this reader. Equal numbers mean equal content: a number is a token, or stands for an image.
        """
        raise NotImplementedError

    def shorten_common_beginnings(self, rows: Int64Array, start: Int64Array, common: Int64Array) -> Int64Array:
        """Shorten the common beginnings that end inside an image.

        Args:
            rows: the row of each document, shape (N,).
            start: the first token of each document in its row, shape (N,).
            common: number of tokens that each document has in common with the document before it, shape (N,).

        Returns:
            The number of common tokens, at most `common`, shape (N,).
        """
        return common

    def seq_lengths(self) -> tuple[Int64Array, Int64Array] | None:
        """Return the documents of each row, if the rows are packs already.

        Returns:
            The number of documents of each row, shape (R,), and the lengths of all documents in order. None if each row
            is one document.
        """
        return None

    @abstractmethod
    def read(self, row: int, start: int, stop: int) -> dict[str, Any]:
        """Return the `input_ids` and the `labels` of one span, both of shape (stop - start,)."""

    @abstractmethod
    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Return the number of labels of each span that are not -100, shape (N,)."""

    def count_trained(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Return the number of trained tokens of each document, shape (N,).

        A trained token has a label that is not -100, and is not the first token of its document.
        """
        return self.count_labels(row, np.minimum(start + 1, stop), stop)


def mask_columns(dataset: Dataset) -> list[str]:
    """Return the columns of 0 and 1 that mark the trained tokens. They are used if there are no `labels`."""
    return [name for name in MASK_COLUMNS if name in dataset.column_names]


def without_ignored_mask(dataset: Dataset, completion_only_loss: bool | None) -> Dataset:
    """Remove a `completion_mask` that TRL would not read.

    `reads_completion_mask` says when TRL reads it. TRL always reads `assistant_masks`.
    """
    columns = dataset.column_names
    is_ignored = "completion_mask" in columns and not reads_completion_mask(completion_only_loss, columns)
    return dataset.remove_columns("completion_mask") if is_ignored else dataset


class _ListColumn:
    """A column of lists of integers: for each Arrow chunk its flat values, and the offsets of its rows in them.

    Opening a column copies nothing, and the time does not depend on the number of rows. `lengths` takes 8 bytes per row
    once it is asked for, and the indices of a dataset with selected rows take as much.

    Args:
        name: the name of the column, for messages.
        column: the column of the whole table.
        indices: the rows of the table that the dataset has, in its order, or None for all rows of the table.
        may_lack_rows: whether a row of the dataset may be missing. It is then read as an empty list.

    Raises:
        ValueError: the column does not hold lists of integers, or a row of the dataset holds missing values.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, indices: Int64Array | None, *, may_lack_rows: bool = False):
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not (is_list and any(holds(kind.value_type) for holds in _HOLDS_INTEGERS)):
            raise ValueError(
                f"Column `{name}` has type {kind}. Packing reads integers, so every row must be a list of them. "
                f"Give `{name}` as lists of token ids (of 0 and 1 for a mask), or leave the column out."
            )
        self.values: list[np.ndarray] = []
        self.offsets: list[np.ndarray] = []
        self.first_rows = [0]  # first row of each chunk, followed by the number of rows of the table
        self.indices = indices
        if pa.types.is_fixed_size_list(kind):
            column = column.cast(pa.large_list(kind.value_type))  # adds offsets
        for chunk in column.chunks:
            values = chunk.values
            if pa.types.is_null(values.type) and not len(values):
                values = values.cast(pa.int64())  # all rows are empty; a missing value is refused below
            if pa.types.is_boolean(values.type):
                values = values.cast(pa.int8())  # a mask: Arrow stores eight booleans in a byte, and numpy stores one
            if chunk.null_count or values.null_count:
                if not may_lack_rows:
                    self._refuse_missing(name, chunk)
                values = values.fill_null(0)  # they are in rows that the dataset does not select
            self.values.append(values.to_numpy(zero_copy_only=True))
            self.offsets.append(chunk.offsets.to_numpy())
            self.first_rows.append(self.first_rows[-1] + len(chunk))

    def _refuse_missing(self, name: str, chunk: pa.ListArray) -> None:
        """Refuse missing rows and values in those rows of the next chunk that the dataset has."""
        rows = np.arange(len(chunk))
        if self.indices is not None:
            in_chunk = self.indices - self.first_rows[-1]
            rows = in_chunk[(in_chunk >= 0) & (in_chunk < len(chunk))]
        num_rows = chunk.is_null().to_numpy(zero_copy_only=False)[rows].sum()
        is_missing = chunk.values.is_null().to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        num_values = _count_marked(is_missing, offsets[:-1][rows], offsets[1:][rows]).sum()
        if num_rows or num_values:
            raise ValueError(
                f"Column `{name}` holds {num_rows} missing rows and {num_values} missing values in "
                f"{len(rows)} rows. Packing reads every row as a list of integers without gaps. Remove these "
                "rows, or write integers."
            )

    @cached_property
    def lengths(self) -> Int64Array:
        """Number of values of each row of the dataset."""
        lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, self.offsets)])
        return lengths if self.indices is None else lengths[self.indices]

    def read(self, row: int, start: int, stop: int) -> np.ndarray:
        """Return the values from `start` to `stop` of a row of the dataset, as a view."""
        if self.indices is not None:
            row = self.indices.item(row)
        chunk = bisect_right(self.first_rows, row) - 1
        offset = self.offsets[chunk].item(row - self.first_rows[chunk])
        return self.values[chunk][offset + start : offset + stop]

    def by_chunk(self, rows: Int64Array) -> Iterator[tuple[np.ndarray, Int64Array, np.ndarray]]:
        """Yield rows of the dataset chunk by chunk.

        Yields:
            For each chunk that holds n of the rows, n > 0: all values of the chunk; where these n rows stand in `rows`,
            shape (n,); and where they begin in the values, shape (n,).
        """
        rows = rows if self.indices is None else self.indices[rows]
        chunk_of_row = np.searchsorted(self.first_rows, rows, side="right") - 1
        order = np.argsort(chunk_of_row, kind="stable")
        bounds = np.searchsorted(chunk_of_row[order], np.arange(len(self.values) + 1))
        for chunk, values in enumerate(self.values):
            places = order[bounds[chunk] : bounds[chunk + 1]]
            if len(places):
                offsets = self.offsets[chunk][rows[places] - self.first_rows[chunk]]
                yield values, places, offsets.astype(np.int64)


class TokenReader(RowReader):
    """Reads spans (row, start, stop) of a tokenised `datasets.Dataset` with R rows.

    If the dataset has no `labels`, they are computed while reading and never stored. The label of each token is then
    the token itself. If the dataset has a `completion_mask` or `assistant_masks`, the label is -100 where the mask is
    0.

    Selected and shuffled datasets are read through their indices. Memory-mapped datasets stay on disk. A pickled reader
    holds the path of the dataset, not the tokens.

    Args:
        dataset: the rows, with the columns `input_ids` and, optionally, `labels` or a mask of the trained tokens. With
            `seq_lengths`, the lengths of the documents in each row, the rows are packs already.
        column: the column to read in place of `input_ids`. `dataset_checks.py` reads `attention_mask` and
            `position_ids`.

    Raises:
        ValueError: the dataset is a stream, has a transform, has no `input_ids`, or has both masks and no labels; a
            column has the wrong type; the labels or the mask of a row are not as long as its tokens.
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
        label_names = ["labels"] if "labels" in dataset.column_names else mask_columns(dataset)
        if len(label_names) > 1:
            raise ValueError(
                f"The dataset has the columns {label_names} and no `labels`. A token is trained where both masks are "
                "1, but only one mask can be read. Add `labels` (-100 where a token is not trained), or leave "
                "`skip_prepare_dataset` unset so that they are built."
            )
        further_names = [name for name in ("seq_lengths", BAD_ROW_COLUMN) if name in dataset.column_names]
        names = [column, *label_names, *further_names]
        self._table = dataset.select_columns(names)
        self._open()
        if self._label_source is None:
            return
        wrong_rows = np.flatnonzero(self._label_source.lengths != self._tokens.lengths)
        if len(wrong_rows):
            row = wrong_rows[0]
            name = label_names[0]
            plural, singular, value = ("labels", "label", "-100") if self._has_labels else ("a mask", "entry", "0")
            verb = "has" if len(wrong_rows) == 1 else "have"
            raise ValueError(
                f"{count_of(len(wrong_rows), 'row')} {verb} {plural} of another length than the tokens; the first is "
                f"row {row} with {self._tokens.lengths[row]} `input_ids` and {self._label_source.lengths[row]} "
                f"`{name}`. Each token needs exactly one {singular}. Give `{name}` the length of `input_ids`, with "
                f"{value} where a token is not trained."
            )

    def _open(self) -> None:
        """Find the buffers of the columns of `_table`, whose first column holds the tokens."""
        # A selected or shuffled dataset has the whole table and the indices of its rows; there is no public accessor.
        mapping = self._table._indices
        indices = None if mapping is None else mapping.column(0).to_numpy()
        names = [name for name in self._table.column_names if name != BAD_ROW_COLUMN]
        columns = {
            # A row without positions is one document
            name: _ListColumn(name, self._table.data.column(name), indices, may_lack_rows=name == "position_ids")
            for name in names
        }
        self._tokens = columns[self._table.column_names[0]]
        self._has_labels = "labels" in columns
        # The column from which labels are made: the labels, or a mask. None if all tokens are trained
        self._label_source = next((columns[name] for name in ("labels", *MASK_COLUMNS) if name in columns), None)
        self._seq_lengths = columns.get("seq_lengths")

    def __getstate__(self) -> dict[str, Any]:
        return {"_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = state["_table"]
        self._open()

    @property
    def comparison_reader(self) -> "TokenReader":
        """This reader itself, because documents are compared by their tokens."""
        return self

    @property
    def lengths(self) -> Int64Array:  # type: ignore[override]
        """Number of tokens of each row."""
        return self._tokens.lengths

    def seq_lengths(self) -> tuple[Int64Array, Int64Array] | None:
        """Return the documents of each row, from the column `seq_lengths`, see `RowReader`."""
        if self._seq_lengths is None:
            return None
        documents_per_row = self._seq_lengths.lengths  # number of values of the column in each row
        lengths_of_rows = [self._seq_lengths.read(row, 0, num) for row, num in enumerate(documents_per_row)]
        lengths = np.concatenate([np.zeros(0, np.int64), *lengths_of_rows])
        return documents_per_row, lengths.astype(np.int64, copy=False)

    def read(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the `input_ids` and the `labels` of one span, both of shape (stop - start,).

        They are views of the memory of the dataset, except for labels that are computed from a mask. If every token is
        trained, `labels` is the same array as `input_ids`.
        """
        tokens = self._tokens.read(row, start, stop)
        if self._label_source is None:
            return {"input_ids": tokens, "labels": tokens}
        labels_or_mask = self._label_source.read(row, start, stop)
        if self._has_labels:
            return {"input_ids": tokens, "labels": labels_or_mask}
        return {"input_ids": tokens, "labels": np.where(labels_or_mask != 0, tokens, np.int64(IGNORE_INDEX))}

    def read_first_tokens(
        self, row: Int64Array, start: Int64Array, stop: Int64Array, *, width: int
    ) -> npt.NDArray[np.uint32]:
        """Return the first `width` tokens of each span, from which `features/prefixes/tokens.py` sorts documents.

        Args:
            start: first token of each span. It may be at or behind `stop`.
            width: number of tokens to return for each span.

        Returns:
            Tokens, shape (N, width), with 2**32 - 1 (`END_TOKEN_KEY`) behind the end of a span. They are big-endian, so
            that rows of this array can be sorted by their bytes.
        """
        first_tokens = np.empty((len(row), width), dtype=">u4")
        num_tokens = stop - start
        not_empty = np.flatnonzero(num_tokens > 0)
        for values, places, offset in self._tokens.by_chunk(row[not_empty]):
            # First copy `width` tokens for each span, also if the span is shorter. `first` is where the span begins in
            # `values`, which may end before it has `width` tokens
            spans = not_empty[places]
            first = offset + start[spans]
            has_width = first + width <= len(values)
            if has_width.any():  # otherwise the chunk may be shorter than `width`, which `sliding_window_view` refuses
                first_tokens[spans[has_width]] = sliding_window_view(values, width)[first[has_width]]
            for i, first_token in zip(spans[~has_width].tolist(), first[~has_width].tolist(), strict=True):
                tokens = values[first_token : first_token + width]
                first_tokens[i, : len(tokens)] = tokens
        # Then overwrite the tokens behind the end of a span
        first_tokens[np.arange(width) >= num_tokens[:, None]] = END_TOKEN_KEY
        return first_tokens

    def read_spaced_tokens(
        self, row: Int64Array, start: Int64Array, stop: Int64Array, *, num: int
    ) -> npt.NDArray[np.int64]:
        """Return `num` evenly spaced tokens of each span, from its first token to its last token, to be hashed.

        No span may be empty, and `num` is at least 2. In a span of fewer than `num` tokens, tokens are repeated.

        Returns:
            Tokens, shape (N, num). They are little-endian, so that hashes are equal on all machines.
        """
        tokens = np.empty((len(row), num), dtype="<i8")
        steps = (stop - start - 1)[:, None] * np.arange(num) // (num - 1)
        for values, spans, offset in self._tokens.by_chunk(row):
            tokens[spans] = values[(offset + start[spans])[:, None] + steps[spans]]
        return tokens

    def labels_are_tokens(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> BoolArray:
        """Return whether every label of a span is -100 or its own token, shape (N,).

        Labels are read chunk by chunk, with 4 bytes of memory per token of the largest chunk.
        """
        are_tokens = np.ones(len(row), dtype=bool)
        if not self._has_labels:
            return are_tokens
        assert self._label_source is not None

        def compare_one_by_one(spans: Int64Array) -> None:
            for i in spans.tolist():
                columns = self.read(int(row[i]), int(start[i]), int(stop[i]))
                is_ignored = columns["labels"] == IGNORE_INDEX
                are_tokens[i] = (is_ignored | (columns["labels"] == columns["input_ids"])).all()

        if self._label_source.first_rows != self._tokens.first_rows:
            # The chunks of the two columns hold different rows
            compare_one_by_one(np.arange(len(row)))
            return are_tokens
        chunks = zip(self._tokens.by_chunk(row), self._label_source.by_chunk(row), strict=True)
        for (tokens, spans, token_offset), (labels, _, label_offset) in chunks:
            # Each row has as many labels as tokens, and rows follow each other in both columns. So all rows of a chunk
            # have one `shift`: the label of the token `tokens[i]` is `labels[i + shift]`
            shift = int(label_offset[0] - token_offset[0])
            if (label_offset - token_offset != shift).any():
                # Between them lies a row with another number of labels, which the dataset leaves out (`filter`)
                compare_one_by_one(spans)
                continue
            first = token_offset + start[spans]
            last = token_offset + stop[spans]
            low = int(first.min())
            high = int(last.max())
            chunk_labels = labels[low + shift : high + shift]
            is_wrong = (chunk_labels != IGNORE_INDEX) & (chunk_labels != tokens[low:high])
            are_tokens[spans] = _count_marked(is_wrong, first - low, last - low) == 0
        return are_tokens

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Return the number of labels of each span that are not -100, shape (N,).

        Labels are read once, chunk by chunk, with 4 bytes of memory per token of the largest chunk.
        """
        if self._label_source is None:
            return stop - start
        untrained_value = IGNORE_INDEX if self._has_labels else 0
        counts = np.zeros(len(row), dtype=np.int64)
        for values, spans, offset in self._label_source.by_chunk(row):
            first = offset + start[spans]
            last = offset + stop[spans]
            low = first.min()
            is_label = values[low : last.max()] != untrained_value
            counts[spans] = _count_marked(is_label, first - low, last - low)
        return counts

    def token_range(self) -> tuple[int, int]:
        """Return the smallest and the largest token id of all rows. Every token is read."""
        return _range_of(self._tokens.values)

    def label_range(self) -> tuple[int, int]:
        """Return the smallest and the largest label of all rows that is not -100. Every label is read.

        (0, 0) is returned if there is none, and if the rows have no labels of their own.
        """
        if self._label_source is None or not self._has_labels:
            return 0, 0
        return _range_of(values[values != IGNORE_INDEX] for values in self._label_source.values)

    def first_row_outside(self, low: int, high: int, *, of_labels: bool = False) -> int | None:
        """Return the first row with a token id, or a label, outside [low, high), or None if there is no such row.

        The label -100 is never outside.
        """
        column = self._label_source if of_labels else self._tokens
        assert column is not None, "the rows have no labels"
        for row, length in enumerate(column.lengths):
            values = column.read(row, 0, length)
            values = values[values != IGNORE_INDEX] if of_labels else values
            if len(values) and (values.min() < low or values.max() >= high):
                return row
        return None

    def first_row_with_restart(self) -> int | None:
        """Return the first row with a 0 behind its first value, or None. The column that is read holds positions."""
        # First look at the whole table, which is fast. The dataset may not select the row that is found there
        num_restarts = 0
        for values, offsets in zip(self._tokens.values, self._tokens.offsets, strict=True):
            is_zero = values == 0
            first_of_rows = offsets[:-1][np.diff(offsets) > 0]  # an empty row has no first value
            num_restarts += int(is_zero.sum()) - int(is_zero[first_of_rows].sum())
        if not num_restarts:
            return None
        rows = enumerate(self._tokens.lengths)
        return next((row for row, length in rows if restarts(self._tokens.read(row, 0, length))), None)


def _range_of(chunks: Iterable[np.ndarray]) -> tuple[int, int]:
    """Return the smallest and the largest value of all chunks, or (0, 0) if there is none."""
    ranges = [(int(values.min()), int(values.max())) for values in chunks if len(values)]
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)


def _count_marked(marks: BoolArray, first: Int64Array, stop: Int64Array) -> npt.NDArray[Any]:
    """Return how many of `marks[first[i]:stop[i]]` are True, shape (N,)."""
    sums: npt.NDArray[Any] = np.zeros(len(marks) + 1, dtype=np.int32 if len(marks) < 2**31 else np.int64)
    np.cumsum(marks, out=sums[1:])
    return sums[stop] - sums[first]
