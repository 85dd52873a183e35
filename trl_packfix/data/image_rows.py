"""The documents of a dataset with images, from what was measured (`samples/images.py`), for planning and reading."""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ..planning.arrays import BoolArray, Int64Array
from ..samples.conversation import Conversation
from ..samples.processor import IMAGES_FROM, RowProcessor, images_of
from ..samples.row import ROW_COLUMN, TURN_COLUMN, PerTurnCounts
from ..samples.turns import TurnRule
from .reader import RowReader, TokenReader


class ImageRows(RowReader):
    """The documents of a dataset with images: `Rows` for planning, from what was measured.

    Args:
        dataset: raw rows; images are decoded when a row is read. Of a stream a list of rows, whose images are encoded.
        process: makes the document of a row, or of a turn.
        measures: from `measure`, one row per document.
        turns, rule: with one document per assistant turn, what was counted, and by which turns are chosen.
    """

    def __init__(
        self,
        dataset: Dataset | list[dict[str, Any]],
        process: RowProcessor,
        measures: Dataset,
        *,
        turns: PerTurnCounts | None = None,
        rule: TurnRule | None = None,
    ):
        self.turns = turns
        self._rule = rule
        self._dataset = dataset
        self._process = process
        self._table = measures
        self.compare = process.compare
        table = self._columns
        is_per_turn = ROW_COLUMN in measures.column_names
        self.conversations = table[ROW_COLUMN].to_numpy() if is_per_turn else None
        self._turns: Int64Array | None = table[TURN_COLUMN].to_numpy() if is_per_turn else None
        self.lengths = table["length"].to_numpy()
        self._trained: Int64Array = table["trained"].to_numpy()
        self._first_is_labelled: BoolArray = table["first_is_labelled"].to_numpy()
        self.image_stops = table["image_stop"].to_numpy()
        self.image_counts: Int64Array = table["image_count"].to_numpy()
        self.image_values: Int64Array = table["image_values"].to_numpy()
        self.image_squares: Int64Array = table["image_squares"].to_numpy()

    @property
    def _columns(self) -> pa.Table:
        return self._table.with_format("arrow")[:]

    def digests(self, rows: Int64Array) -> bytes:
        return b"".join(self._columns["digest"].take(rows).to_pylist())

    @cached_property
    def _image_spans(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The row, the first token and the stop of each image that is told apart, all of shape (S,), in order."""
        spans = self._columns["spans"].combine_chunks()
        first, stop = spans.flatten().to_numpy().reshape(-1, 2).T
        return np.repeat(np.arange(len(self)), spans.value_lengths().to_numpy() // 2), first, stop

    @property
    def comparison_reader(self) -> TokenReader:
        """The tokens of all rows, with the number of an image in place of its first placeholder: images by content."""
        tokens = self._columns["tokens"].combine_chunks()
        flat = tokens.flatten().to_numpy().copy()
        ends = np.cumsum(tokens.value_lengths().to_numpy(), dtype=np.int64)
        numbers: dict[bytes, int] = {}
        contents = self._columns["contents"].combine_chunks().flatten().to_pylist()
        row, first, _ = self._image_spans
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        flat[begins[row] + first] = [IMAGES_FROM + numbers.setdefault(content, len(numbers)) for content in contents]
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        return TokenReader(Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, flat)})))

    def cuts(self, row: int, max_length: int) -> list[int] | None:
        """Where the document of a row is cut into fragments of at most `max_length` tokens, from 0 to its length.

        An image, with the special tokens around it, is in one fragment; of those between two images each gets a half.
        All images are in one fragment where tiles of one are told apart. None if that has more tokens.
        """
        of_row, first, stop = self._image_spans
        place = slice(*np.searchsorted(of_row, [row, row + 1]))
        tokens, _ = self.tokens(row)
        is_special = np.isin(tokens, self._process.special_tokens)
        first = first[place]
        stop = stop[place]
        if len(first) != self.image_counts[row]:
            first = first[:1]
            stop = stop[-1:]
        images = []
        low = np.append(0, stop)[:-1]
        high = np.append(first, len(tokens))[1:]
        for start, behind, least, most in zip(first.tolist(), stop.tolist(), low.tolist(), high.tolist(), strict=True):
            before = start
            after = behind
            while before > least and is_special[before - 1]:
                before -= 1
            while after < most and is_special[after]:
                after += 1
            if before == least > 0:
                before = start - (start - least + 1) // 2
            if after == most < len(tokens):
                after = behind + (most - behind) // 2
            images.append((before, after))
        edges = [0]
        while edges[-1] < len(tokens):
            end = min(edges[-1] + max_length, len(tokens))
            end = min((start for start, behind in images if start < end < behind), default=end)
            if end <= edges[-1]:
                return None
            edges.append(end)
        return edges

    def of_images(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> dict[str, Int64Array]:
        """What `Documents` has of the images of each span, (N,). Those of a row are of one size in a part of it."""
        of_row, first, behind = self._image_spans
        size = int(self.lengths.max(initial=0)) + 1
        begins = of_row * size + first
        before, after, whole = (
            np.searchsorted(begins, places) for places in (row * size + start, row * size + stop, row * size)
        )
        num = after - before
        all_of_row = np.maximum(np.searchsorted(begins, (row + 1) * size) - whole, 1)
        has = num > 0
        share = num / all_of_row
        first, behind = (np.append(places, 0) for places in (first, behind))
        return {
            "image_values": np.rint(self.image_values[row] * share).astype(np.int64),
            "image_squares": np.rint(self.image_squares[row] * share).astype(np.int64),
            "image_count": np.rint(self.image_counts[row] * share).astype(np.int64),
            "image_start": np.where(has, first[np.minimum(before, len(first) - 1)] - start, 0),
            "image_stop": np.where(has, behind[after - 1] - start, 0),
        }

    def outside_images(self, rows: Int64Array, start: Int64Array, common: Int64Array) -> Int64Array:
        """How many tokens of these rows from `start` on are common if no run may begin inside an image, shape (N,)."""
        of_row, first, stop = self._image_spans
        if not len(of_row):
            return common
        size = int(self.lengths.max()) + 1
        last = start + common - 1
        place = np.searchsorted(of_row * size + first, rows * size + last) - 1  # the last that begins before
        is_inside = (place >= 0) & (of_row[place] == rows) & (last < stop[place]) & (first[place] >= start)
        return np.where(is_inside, first[place] + 1 - start, common)

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        is_whole = stop == self.lengths[row]
        counts = (start == 0) * self._first_is_labelled[row] + is_whole * self._trained[row]
        for i in np.flatnonzero((start > 1) | (stop > 1) & ~is_whole):
            counts[i] = self.tokens(row[i])[1][start[i] : stop[i]].sum()
        return counts

    def tokens(self, row: int) -> tuple[Int64Array, BoolArray]:
        """The tokens of a row's document, and which of them are labels."""
        measures = self._table.with_format("arrow")[int(row)]
        tokens, is_target = (measures[name][0].values for name in ("tokens", "is_target"))
        return tokens.to_numpy().astype(np.int64), is_target.to_numpy(zero_copy_only=False)

    def row(self, row: int) -> dict[str, Any]:
        """A row of the dataset; or of one of its turns, with the images up to this turn."""
        if self.conversations is None or self._turns is None or self._rule is None:
            return dict(self._dataset[row])
        given = self._dataset[int(self.conversations[row])]
        conversation = self._rule.select_turn(Conversation.from_row(given, images_of(given))).conversation
        return self._rule.row_of_turn(conversation, int(self._turns[row]), self._process.processor)

    def read(self, row: int, start: int, stop: int) -> dict[str, Any]:
        row, length = int(row), int(self.lengths[row])
        document = self._process(self.row(row))
        num_tokens = len(document["input_ids"])
        if num_tokens != length:
            raise ValueError(
                f"Row {row} of the dataset with images has {num_tokens} tokens, and it had {length} when it was "
                "measured before training. Packs are planned from these lengths, so they must not change. Leave the "
                "image files as they are during training, and use a processor without random augmentation."
            )
        return self._process.cut(document, start, stop)
