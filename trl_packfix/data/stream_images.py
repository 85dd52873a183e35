"""Documents with images of a stream: measured when they are read, encoded while they wait, processed when they are due.

Packing needs the length of a document, and thousands of images may wait for a pack. So a row is measured as one of a
table is (`image_rows`), and its document waits with the encoded images. Whoever makes the batch of its pack decodes
them and runs the processor, and must get the same tokens.
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

ENCODED = "encoded"  # key of a waiting document


@dataclass(frozen=True)
class EncodedRow:
    text: str  # of the row, all but the images: JSON
    images: tuple[EncodedImage, ...]  # of the row
    start: int  # the part of the row's tokens that the document has
    stop: int
    counts: tuple[int, int, int]  # images in it; numbers and squares of them, that the vision tower reads

    @property
    def num_bytes(self) -> int:
        return len(self.text) + sum(len(image.data or b"") for image in self.images)


TOKENS_ALONE = EncodedRow("", (), 0, 0, (0, 0, 0))
"""Of a document without `ENCODED`."""


@dataclass
class StreamImages:
    """How the rows of a stream with images become documents."""

    process: RowProcessor
    text_field: str = "text"  # the column of plain text
    rule: TurnRule | None = None  # makes a document of each assistant turn; None: a row is one
    drops: bool = False  # rows that cannot be processed
    mode: str | None = None  # to which the feature of the images converts them
    # Rows that are read together: the first is processed, and compared with what the sizes of images give
    chunk: ClassVar[int] = CHECKED
    _every: int = field(init=False, default=CHECKED)

    def __post_init__(self) -> None:
        self._every = CHECKED if self.process.depends_on_sizes else 1

    def open_stream(self, dataset: IterableDataset) -> tuple[IterableDataset, "StreamImages"]:
        """The stream with its images encoded as they are stored, and how its rows become documents.

        Without features the dataset gives what it was made of, so its images may be decoded still.
        """
        dataset = dataset.with_format(None)
        mode = None
        if dataset.features is None:
            return dataset, replace(self, mode=None)
        for name in IMAGES:
            feature = dataset.features.get(name)
            while feature is not None and not isinstance(feature, Image):  # of a list
                feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
            mode = mode if feature is None else feature.mode
        return dataset.decode(False), replace(self, mode=mode)

    def read(
        self, batch: dict[str, list[Any]], table: Dataset, packing: Packing
    ) -> tuple[list[dict[str, Any]], Documents, np.ndarray | None]:
        """The documents of a batch of rows; their spans; and the row of each if documents are turns.

        Raises:
            ValueError: rows cannot be processed, and `drops` is False; what `make_documents` refuses.
        """
        rows = [self.encode_row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        columns = self._measure_rows(rows)
        if self._every > 1 and any(columns["differs"]):
            logger.warning(
                "A row of the stream has another length than the sizes of its images give. The processor runs on every "
                "image from here on, which takes longer."
            )
            self._every = 1
            columns = self._measure_rows(rows)
        bad = [i for i, reason in enumerate(columns[BAD_ROW_COLUMN]) if reason]
        if bad and not self.drops:
            row = bad[0] if self.rule is None else columns[ROW_COLUMN][bad[0]]
            raise ValueError(
                f"Row {row} of the train stream with images cannot be processed: {columns[BAD_ROW_COLUMN][bad[0]]}. "
                "Every image must be found and decoded, and every placeholder in the text needs exactly one image. "
                'Correct or filter out this row, or set `bad_rows="drop"`, which drops and counts such rows.'
            )
        measures = Dataset(pa.table(columns, schema=features_of(self.rule).arrow_schema), fingerprint="chunk")
        reader = ImageRows(rows, self.process, measures, rule=self.rule)
        spans = make_documents(reader, packing.max_length, packing.overlong, may_be_empty=True)
        columns_of_spans = ("row", "start", "stop", "image_count", "image_values", "image_squares")
        documents = []
        for row, start, stop, *counts in zip(
            *(getattr(spans, name).tolist() for name in columns_of_spans), strict=True
        ):
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
        """The columns of a row that are read, its images encoded."""
        known = {name: row[name] for name in (*COLUMNS, self.text_field) if name in row}
        return known | {"images": [EncodedImage.of(image, self.mode) for image in images_of(row)]}

    def _measure_rows(self, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        return columns_of_batch(batch, [*range(len(rows))], ProcessedImages(self.process, self.rule, self._every))


@dataclass
class ProcessedPacks(torch.utils.data.Dataset[Any]):
    """Micro-batches of waiting documents, by themselves in place of an index, with their images processed."""

    process: RowProcessor | None  # None: no document has images

    def __getitems__(self, micro_batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        documents = []
        for document in micro_batch:
            if encoded := document.get(ENCODED):
                assert self.process is not None
                whole = self.process(json.loads(encoded.text) | {"images": list(encoded.images)})
                processed = self.process.cut(whole, encoded.start, encoded.stop)
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
