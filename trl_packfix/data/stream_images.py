"""Read documents with images from a stream. They wait for their pack with encoded images.

Packing needs the number of tokens of each document, and thousands of documents may wait for a pack. Decoded and
processed images would need too much memory. So each row passes through three stages:

1. `StreamImages` measures the row when it is read, as a row of a table is measured (`image_rows.py`): how many tokens
   it has, and where its images are. `StreamReader` (`stream_reader.py`) calls it.
2. The document waits in `PackedStream` (`stream.py`) with the row itself: text, and images as they are stored in files.
3. `ProcessedPacks`, the dataset of the last data loader, decodes the images of a micro-batch and runs the processor. It
   must give the same tokens as in the first stage.
"""

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Image, IterableDataset

from ..planning.packing import Packing
from ..samples.checks import IMAGES
from ..samples.conversation import COLUMNS
from ..samples.images import CHECKED, ProcessedImages, features_of
from ..samples.make_samples import columns_of_batch
from ..samples.processor import EncodedImage, RowProcessor, images_of
from ..samples.row import BAD_ROW_COLUMN, ROW_COLUMN
from ..samples.turns import TurnRule
from .collator import IGNORE_INDEX
from .documents import Documents, make_documents
from .image_rows import ImageRows
from .rank_share import RankShare

logger = logging.getLogger(__name__)

ENCODED = "encoded"  # key under which a waiting document holds its `EncodedRow`


@dataclass(frozen=True)
class EncodedRow:
    """The row of which a waiting document is made, and the document's place in it."""

    text: str  # all columns of the row except the images, as JSON
    images: tuple[EncodedImage, ...]  # all images of the row
    start: int  # first token of the document in the row
    stop: int  # the token behind the last token of the document in the row
    # Number of images in the document, number of their values that the vision tower reads, and sum of squares of the
    # number of values of each image
    counts: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Size of the row in memory."""
        return len(self.text) + sum(len(image.data or b"") for image in self.images)


TOKENS_ALONE = EncodedRow("", (), 0, 0, (0, 0, 0))
"""Stands for the row of a document without images, which has no `ENCODED`."""


@dataclass
class StreamImages:
    """Makes documents of rows that have images. For rows with tokens, `StreamTokens` has the same methods."""

    process: RowProcessor
    text_field: str = "text"  # column of plain text
    rule: TurnRule | None = None  # makes a document of each assistant turn; None makes a document of each row
    drops: bool = False  # whether rows that cannot be processed are dropped; otherwise they raise an error
    mode: str | None = None  # colour mode to which the dataset converts images
    chunk: ClassVar[int] = CHECKED  # number of rows that are read together
    # One of so many rows is processed when it is measured. The measures of the other rows follow from the sizes of
    # their images. 1 processes every row
    _check_interval: int = field(init=False, default=CHECKED)

    def __post_init__(self) -> None:
        self._check_interval = CHECKED if self.process.depends_on_sizes else 1

    def open_stream(self, dataset: IterableDataset) -> tuple[IterableDataset, "StreamImages"]:
        """Return the stream with images as they are stored in files, and the object that makes documents of its rows.

        A dataset without features cannot leave images encoded. Its images are as its generator yields them.
        """
        dataset = dataset.with_format(None)
        mode = None
        if dataset.features is None:
            return dataset, replace(self, mode=None)
        for name in IMAGES:
            feature = dataset.features.get(name)
            # The feature of a column of lists contains the feature of an image
            while feature is not None and not isinstance(feature, Image):
                feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
            mode = mode if feature is None else feature.mode
        return dataset.decode(False), replace(self, mode=mode)

    def read(
        self, batch: dict[str, list[Any]], table: Dataset, packing: Packing
    ) -> tuple[list[dict[str, Any]], Documents, np.ndarray | None]:
        """Make the documents of some rows.

        Args:
            batch: the columns of the rows.
            table: the columns of tokens. They are not needed here.
            packing: the settings that decide how documents are cut.

        Returns:
            The documents; their spans in the measured rows; and the row of the batch that each measured row was made
            of, if a measured row is a turn, else None.

        Raises:
            ValueError: a row cannot be processed, and `drops` is False; or `make_documents` refuses the rows.
        """
        # First measure the rows
        rows = [self.encode_row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        measures = self._measure_rows(rows)
        if self._check_interval > 1 and any(measures["differs"]):
            logger.warning(
                "A row of the stream has another length than the sizes of its images give. The processor runs on every "
                "image from here on, which takes longer."
            )
            self._check_interval = 1
            measures = self._measure_rows(rows)
        bad_rows = [i for i, reason in enumerate(measures[BAD_ROW_COLUMN]) if reason]
        if bad_rows and not self.drops:
            first = bad_rows[0]
            row = first if self.rule is None else measures[ROW_COLUMN][first]
            raise ValueError(
                f"Row {row} of the train stream with images cannot be processed: {measures[BAD_ROW_COLUMN][first]}. "
                "Every image must be found and decoded, and every placeholder in the text needs exactly one image. "
                'Correct or filter out this row, or set `bad_rows="drop"`, which drops and counts such rows.'
            )
        # Then cut the rows to documents
        table_of_measures = Dataset(pa.table(measures, schema=features_of(self.rule).arrow_schema), fingerprint="chunk")
        reader = ImageRows(rows, self.process, table_of_measures, rule=self.rule)
        spans = make_documents(reader, packing.max_length, packing.overlong, may_be_empty=True)
        # Finally make each document with its tokens and its encoded row
        span_fields = ("row", "start", "stop", "image_count", "image_values", "image_squares")
        span_columns = [getattr(spans, name).tolist() for name in span_fields]
        documents = []
        for row, start, stop, *counts in zip(*span_columns, strict=True):
            tokens, is_target = reader.tokens(row)
            columns = reader.row(row)
            images = tuple(images_of(columns))
            text = json.dumps({name: value for name, value in columns.items() if name not in IMAGES})
            documents.append(
                {
                    "input_ids": tokens[start:stop].astype(np.int32),
                    "labels": np.where(is_target, tokens, IGNORE_INDEX)[start:stop].astype(np.int32),
                    ENCODED: EncodedRow(text, images, start, stop, tuple(counts)),
                }
            )
        return documents, spans, reader.conversations

    def encode_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that become documents, with its images encoded."""
        text_columns = {name: row[name] for name in (*COLUMNS, self.text_field) if name in row}
        return text_columns | {"images": [EncodedImage.encode(image, self.mode) for image in images_of(row)]}

    def _measure_rows(self, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the measures of some rows by column, with one value for each document."""
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        process = ProcessedImages(self.process, self.rule, self._check_interval)
        return columns_of_batch(batch, [*range(len(rows))], process)


@dataclass
class ProcessedPacks(torch.utils.data.Dataset[Any]):
    """Dataset of a data loader that processes the images of waiting documents.

    Its "indices" are the waiting documents themselves. The sampler of the loader is a `PackedStream`.
    """

    process: RowProcessor | None  # None if no document has images

    def __getitems__(self, micro_batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the documents of a micro-batch, with their images processed.

        Raises:
            ValueError: a document has other tokens than when it was read.
        """
        documents = []
        for document in micro_batch:
            if encoded := document.get(ENCODED):
                assert self.process is not None
                row = self.process(json.loads(encoded.text) | {"images": list(encoded.images)})
                processed = self.process.cut(row, encoded.start, encoded.stop)
                if not np.array_equal(processed["input_ids"], document["input_ids"]):
                    raise ValueError(
                        f"A document of the stream with {len(encoded.images)} images has "
                        f"{len(processed['input_ids'])} tokens, and it had {len(document['input_ids'])}, or others, "
                        "when it was read. Packs are made of these lengths, so they must not change. Leave the image "
                        "files as they are during training, use a processor without random augmentation, or load the "
                        "dataset without streaming."
                    )
                values = {name: value for name, value in document.items() if name not in (ENCODED, *processed)}
                document = values | processed
            documents.append(document)
        return RankShare.like(micro_batch, documents)
