"""Read documents with images, as `data/reader.py` reads documents of tokens alone.

Only the processor of the model knows how many tokens an image has. So every row is processed once before training, and
its measures are stored in a table (`measures.py`): tokens, labels, places of images, hashes, but no pixels. `ImageRows`
answers the questions of planning from the measures (`data/documents.py`). For a batch it runs the processor on the row
again.

Words:
    placeholder  a token that stands for a part of an image.
    image span   the tokens of one image. If a processor does not return the images of a row one by one, they count as
                 one image with one span.
    values       the numbers in a processed image (pixels), which the vision tower reads. The *squares* of a row are the
                 sum over its images of the squared number of values, by which the cost of attention grows.
    turn         one answer of the assistant in a conversation. With `per_turn` each turn makes a document.
    row          a row of the table of measures: a row of the dataset or, with `per_turn`, a turn. A *span* is the range
                 of its tokens that a document has: all of them, or a fragment of a long row.
"""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ...data.reader import RowReader, TokenReader
from ...planning.arrays import Int64Array
from ...samples.conversation import Conversation, images_of
from ...samples.row import ROW_COLUMN, TURN_COLUMN, PerTurnCounts
from ...samples.texts import struct_columns, without_nulls
from ...samples.turns import TurnRule
from .processor import IMAGES_FROM, RowProcessor
from .report import ImageNumbers


class ImageRows(RowReader):
    """Reader of R rows with images. Lengths and labels come from the measures, pixels from the processor.

    Args:
        dataset: the rows as the user gave them. Images are decoded when a row is read. For a stream it is a list of
            rows with encoded images.
        process: makes the document of a row or of a turn.
        measures: the table of measures, with R rows.
        turns: counts of the conversations, and of the turns that became rows, if each row is a turn; for the report.
        rule: which turns become rows; None if each row of the dataset is one row.
    """

    image_stops: Int64Array  # the token behind the last image of each row, 0 without an image, (R,)

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
        # Rows of a stream come without the keys that Arrow added
        self._structs = {} if isinstance(dataset, list) else struct_columns(dataset.features)
        self._process = process
        self._table = measures
        # What the collator compares to find common beginnings of the documents of a batch: their tokens, with a number
        # for the content of each image. (`comparison_reader` does the same for planning, on the whole table)
        self.compare = process.compare
        columns = self._columns

        def column(name: str) -> Any:
            return columns[name].to_numpy()

        is_per_turn = ROW_COLUMN in measures.column_names
        self.conversations = column(ROW_COLUMN) if is_per_turn else None
        self._turns: Int64Array | None = column(TURN_COLUMN) if is_per_turn else None
        self.measured = TokenReader(measures)  # reads the tokens and labels of the measures
        self.lengths = self.measured.lengths
        self.image_stops = column("image_stop")
        self.image_counts: Int64Array = column("image_count")
        self.image_values: Int64Array = column("image_values")
        self.image_squares: Int64Array = column("image_squares")

    @property
    def _columns(self) -> pa.Table:
        """The measures as Arrow columns."""
        return self._table.with_format("arrow")[:]

    def digests(self, rows: Int64Array) -> bytes:
        """Return the digests of rows, one behind the other: hashes of their tokens, labels and pixels."""
        return b"".join(self._columns["digest"].take(rows).to_pylist())

    @cached_property
    def _image_spans(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The image spans of all rows, in order: row, first token and stop of each span, three arrays of shape (S,)."""
        spans = self._columns["spans"].combine_chunks()
        first, stop = spans.flatten().to_numpy().reshape(-1, 2).T
        return np.repeat(np.arange(len(self)), spans.value_lengths().to_numpy() // 2), first, stop

    def _images_before(self, row: Int64Array, token: Int64Array | int) -> Int64Array:
        """Return for some tokens, each of a row, how many images of the table begin before it, shape (N,)."""
        row_of_span, first, _ = self._image_spans
        # Token t of row r gets the number r * stride + t, and these numbers rise from row to row
        stride = int(self.lengths.max(initial=0)) + 1
        return np.searchsorted(row_of_span * stride + first, row * stride + token)

    @property
    def comparison_reader(self) -> TokenReader:
        """A reader of the tokens of all rows, in which the first token of each image is a number for its content.

        So two documents have equal tokens only if their images are equal, too. The numbers begin behind all token ids.
        """
        flat_tokens = self._columns["input_ids"].combine_chunks().flatten().to_numpy().astype(np.uint32)
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])  # of the rows in `flat_tokens`, (R + 1,)
        # Hashes of the contents of all images, one for each entry of `_image_spans`
        contents = self._columns["contents"].combine_chunks().flatten().to_pylist()
        numbers: dict[bytes, int] = {}
        content_numbers = [IMAGES_FROM + numbers.setdefault(content, len(numbers)) for content in contents]
        row, first, _ = self._image_spans
        flat_tokens[offsets[row] + first] = content_numbers
        return TokenReader(Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, flat_tokens)})))

    def find_cuts(self, row: int, max_length: int) -> list[int] | None:
        """Return the places where a row is cut into fragments of at most `max_length` tokens.

        No fragment begins or ends inside an image or among the special tokens around it. Special tokens between two
        images are divided evenly between the two. If the processor returns several spans for one image (its tiles), all
        images of the row stay in one fragment.

        Returns:
            The places, from 0 to the number of tokens of the row. None if an image does not fit into a fragment.
        """
        # First find the range of tokens around each image in which the row is not cut
        row_of_span, first, stop = self._image_spans
        first_span, stop_span = np.searchsorted(row_of_span, [row, row + 1])
        spans_of_row = slice(first_span, stop_span)
        tokens = self.measured.read(row, 0, int(self.lengths[row]))["input_ids"]
        is_special = np.isin(tokens, self._process.special_tokens)
        first = first[spans_of_row]
        stop = stop[spans_of_row]
        if len(first) != self.image_counts[row]:
            # It is not known which spans are one image. So no cut is made from the first span to the last span
            first = first[:1]
            stop = stop[-1:]
        stop_before = np.append(0, stop)[:-1].tolist()  # where the image before ends
        first_behind = np.append(first, len(tokens))[1:].tolist()  # where the next image begins
        uncut_ranges = []
        for image_first, image_stop, lowest, highest in zip(
            first.tolist(), stop.tolist(), stop_before, first_behind, strict=True
        ):
            range_start = image_first
            range_stop = image_stop
            while range_start > lowest and is_special[range_start - 1]:
                range_start -= 1
            while range_stop < highest and is_special[range_stop]:
                range_stop += 1
            # If there are only special tokens between two images, each image gets a half of them; of an odd number, the
            # second image gets one more
            if range_start == lowest > 0:
                range_start = image_first - (image_first - lowest + 1) // 2
            if range_stop == highest < len(tokens):
                range_stop = image_stop + (highest - image_stop) // 2
            uncut_ranges.append((range_start, range_stop))
        # Then make each fragment as long as possible
        edges = [0]
        while edges[-1] < len(tokens):
            edge = min(edges[-1] + max_length, len(tokens))
            # Inside the range of an image, cut before the range
            edge = min((low for low, high in uncut_ranges if low < edge < high), default=edge)
            if edge <= edges[-1]:
                return None
            edges.append(edge)
        return edges

    def report_section(self, planner: Any) -> ImageNumbers:
        """Return the section on the images of a table, for the report on the plan of an `EpochPlanner`."""
        return ImageNumbers.of_table(planner)

    def image_arrays(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> dict[str, Int64Array]:
        """Return the arrays of `Documents` that describe the images of each span, of shape (N,), by attribute.

        If a span has only some of the images of its row, the values, squares and number of images are estimated as if
        all images of the row had one size.
        """
        _, first, image_stop = self._image_spans
        first_inside = self._images_before(row, start)  # the first image of each span, if it has one
        stop_inside = self._images_before(row, stop)
        num_inside = stop_inside - first_inside
        num_in_row = self._images_before(row + 1, 0) - self._images_before(row, 0)
        share_inside = num_inside / np.maximum(num_in_row, 1)
        has_images = num_inside > 0
        # Append an entry, because a span without images may read behind the last image. What it reads is not used
        first = np.append(first, 0)
        image_stop = np.append(image_stop, 0)
        return {
            "image_values": np.rint(self.image_values[row] * share_inside).astype(np.int64),
            "image_squares": np.rint(self.image_squares[row] * share_inside).astype(np.int64),
            "image_count": np.rint(self.image_counts[row] * share_inside).astype(np.int64),
            "image_start": np.where(has_images, first[first_inside] - start, 0),
            "image_stop": np.where(has_images, image_stop[stop_inside - 1] - start, 0),
        }

    def shorten_common_beginnings(self, rows: Int64Array, start: Int64Array, common: Int64Array) -> Int64Array:
        """Shorten common beginnings of documents that would end inside an image.

        Args:
            rows: the row of each document, shape (N,).
            start: the first token of each document in its row, shape (N,).
            common: number of tokens that each document has in common with the document before it, shape (N,).

        Returns:
            The number of common tokens, at most `common`, shape (N,).
        """
        # A pack has the common beginning of two documents once. Of the second document it has the other tokens, and the
        # last common token again, because this token predicts another token in each document. So the last common token
        # must not be inside an image, behind its first token. For example, an image is the tokens 5 to 8, and 7 tokens
        # are common, 0 to 6. Then the pack would have the second document from token 6 on, inside the image. If only 6
        # tokens are called common, it has the document from token 5 on, with the whole image
        row_of_span, first, stop = self._image_spans
        if not len(row_of_span):
            return common
        last_common = start + common - 1
        image = self._images_before(rows, last_common) - 1  # the last one that begins before this token; -1 for none
        is_in_document = (image >= 0) & (row_of_span[image] == rows) & (first[image] >= start)
        is_inside = is_in_document & (last_common < stop[image])
        return np.where(is_inside, first[image] + 1 - start, common)

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        """Return the number of labels of each span that are not -100, shape (N,)."""
        return self.measured.count_labels(row, start, stop)

    def row(self, row: int) -> dict[str, Any]:
        """Return the columns of a document, unprocessed: a row of the dataset, or a turn with the images up to it."""
        if self.conversations is None or self._turns is None or self._rule is None:  # all three, or none of them
            return self._dataset_row(row)
        dataset_row = self._dataset_row(int(self.conversations[row]))
        conversation = self._rule.select_turns(Conversation.from_row(dataset_row, images_of(dataset_row))).conversation
        return self._rule.row_of_turn(conversation, int(self._turns[row]), self._process.processor)

    def _dataset_row(self, row: int) -> dict[str, Any]:
        """Return a row of the dataset, without the keys that Arrow added to its dictionaries."""
        return without_nulls(self._dataset[row], self._structs)

    def read(self, row: int, start: int, stop: int) -> dict[str, Any]:
        """Process a row, and return the `input_ids`, the `labels` and the outputs for the images of one span.

        Raises:
            ValueError: the row has another number of tokens than when it was measured.
        """
        row = int(row)
        length = int(self.lengths[row])
        document = self._process(self.row(row))
        num_tokens = len(document["input_ids"])
        if num_tokens != length:
            raise ValueError(
                f"Row {row} of the dataset with images has {num_tokens} tokens, and it had {length} when it was "
                "measured before training. Packs are planned from these lengths, so they must not change. Leave the "
                "image files as they are during training, and use a processor without random augmentation."
            )
        return self._process.cut(document, start, stop)
