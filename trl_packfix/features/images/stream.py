"""Read documents with images from a stream. They wait for their pack with encoded images.

Packing needs the number of tokens of each document, and thousands of documents may wait for a pack. Decoded and
processed images would need too much memory. So each row passes through three stages:

1. `StreamImages` measures the row when it is read, as a row of a table is measured (`rows.py`): how many tokens
   it has, and where its images are. `StreamReader` (`data/stream_reader.py`) calls it.
2. The document waits in `PackedStream` (`data/stream.py`) with the row itself: text, and images as they are stored in
   files.
3. When the batch of its pack is made, `StreamImages.finish` decodes the images of a document and runs the processor. It
   must give the same tokens as in the first stage.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Image, IterableDataset

from ...data.documents import Documents, make_documents
from ...data.stream_reader import StreamRows
from ...planning.packing import Packing
from ...samples.checks import IMAGES, undecoded_stream
from ...samples.conversation import COLUMNS, images_of
from ...samples.make_samples import columns_of_batch
from ...samples.row import BAD_ROW_COLUMN, ROW_COLUMN
from ...samples.texts import struct_columns, without_nulls
from ...samples.turns import TurnRule
from .measures import CHECK_INTERVAL, ProcessedImages, features_of
from .processor import EncodedImage, RowProcessor
from .report import ImageNumbers
from .rows import ImageRows

logger = logging.getLogger(__name__)

ENCODED = "encoded"  # key under which a waiting document holds its `EncodedRow`


@dataclass(frozen=True)
class EncodedRow:
    """The row of which a waiting document is made, and the document's place in it."""

    text: str  # all columns of the row except the images, as JSON
    images: tuple[EncodedImage, ...]  # all images of the row
    start: int  # first token of the document in the row
    stop: int  # the token behind the last token of the document in the row
    # `image_count`, `image_values` and `image_squares` of the document, see `KINDS` in `measures.py`
    counts: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Size of the row in memory."""
        return len(self.text) + sum(len(image.data or b"") for image in self.images)


@dataclass
class StreamImages(StreamRows):
    """Makes documents of the rows of a stream with images."""

    process: RowProcessor
    text_field: str = "text"  # column of plain text
    rule: TurnRule | None = None  # makes a document of each assistant turn; None makes a document of each row
    drops_bad_rows: bool = False  # whether rows that cannot be processed are dropped; otherwise they raise an error
    mode: str | None = None  # mode of PIL to which the dataset converts images; None leaves them as they are
    # Features of the columns whose dictionaries have keys that Arrow added, which are removed (`struct_columns`)
    structs: Mapping[str, Any] = field(default_factory=dict)
    chunk: ClassVar[int] = CHECK_INTERVAL
    finishes: ClassVar[bool] = True
    # One row of so many is processed in full when it is measured, all others by the sizes of their images. 1 processes
    # every row in full
    _check_interval: int = field(init=False, default=CHECK_INTERVAL)

    def __post_init__(self) -> None:
        self._check_interval = CHECK_INTERVAL if self.process.shapes_depend_on_size else 1

    @property
    def processor_settings(self) -> str:  # type: ignore[override]
        """The settings of the image processor, which a restart compares."""
        return self.process.settings.decode()

    def open_stream(self, dataset: IterableDataset) -> tuple[IterableDataset, "StreamImages"]:
        """Return the stream with images as they are stored in files, and the object that makes documents of its rows.

        A dataset without features cannot leave images encoded. Its images are as its generator yields them.
        """
        dataset = dataset.with_format(None)
        if dataset.features is None:
            return dataset, replace(self, mode=None, structs={})
        mode = None
        for name in IMAGES:  # the columns `images` and `image`, of which a stream has one
            feature = dataset.features.get(name)
            # The feature of a column of lists contains the feature of an image
            while feature is not None and not isinstance(feature, Image):
                feature = getattr(feature, "feature", None)
            mode = mode if feature is None else feature.mode
        return undecoded_stream(dataset), replace(self, mode=mode, structs=struct_columns(dataset.features))

    def read(
        self, batch: dict[str, list[Any]], table: Dataset, packing: Packing
    ) -> tuple[list[dict[str, Any]], Documents, np.ndarray | None]:
        """Measure some rows, cut them to documents, and return these with their encoded images, see `StreamRows`."""
        # First measure the rows. `measures` has a value per row in each column, with `rule` a value per turn
        rows = [self.encode_row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        measures = self._measure_rows(rows)
        # `differs`: the row was measured in full and by the sizes of its images, with different results
        if any(measures["differs"]):
            logger.warning(
                "A row of the stream has another length than the sizes of its images give. The processor runs on every "
                "image from here on, which takes longer."
            )
            self._check_interval = 1
            measures = self._measure_rows(rows)
        bad_rows = [i for i, reason in enumerate(measures[BAD_ROW_COLUMN]) if reason]
        if bad_rows and not self.drops_bad_rows:
            first = bad_rows[0]
            row = first if self.rule is None else measures[ROW_COLUMN][first]
            raise ValueError(
                f"Row {row} of the train stream with images cannot be processed: {measures[BAD_ROW_COLUMN][first]}. "
                "Every image must be found and decoded, and every placeholder in the text needs exactly one image. "
                'Correct or filter out this row, or set `bad_rows="drop"`, which drops and counts such rows.'
            )
        # Then cut the rows to documents
        columns = pa.table(measures, schema=features_of(self.rule).arrow_schema)
        # With a fixed fingerprint, so that `datasets` computes no hash of the table
        table_of_measures = Dataset(columns, fingerprint="chunk")
        reader = ImageRows(rows, self.process, table_of_measures, rule=self.rule)
        spans = make_documents(reader, packing.max_length, packing.overlong, may_be_empty=True)
        # Finally make each document with its tokens and its encoded row
        span_fields = ("row", "start", "stop", "image_count", "image_values", "image_squares")
        span_columns = [getattr(spans, name).tolist() for name in span_fields]
        documents = []
        for row, start, stop, *counts in zip(*span_columns, strict=True):
            encoded_row = reader.row(row)
            images = tuple(images_of(encoded_row))
            text = json.dumps({name: value for name, value in encoded_row.items() if name not in IMAGES})
            tokens = {name: values.astype(np.int32) for name, values in reader.measured.read(row, start, stop).items()}
            documents.append(tokens | {ENCODED: EncodedRow(text, images, start, stop, tuple(counts))})
        return documents, spans, reader.conversations

    def encode_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that become documents, with its images encoded."""
        text_columns = {name: row[name] for name in (*COLUMNS, self.text_field) if name in row}
        text_columns = without_nulls(text_columns, self.structs)
        return text_columns | {"images": [EncodedImage.encode(image, self.mode) for image in images_of(row)]}

    def _measure_rows(self, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the measures of some rows by column, with one value for each row or, with `rule`, for each turn.

        The columns are `input_ids`, `labels`, `KINDS` of `measures.py` (such as `differs`), the reason of a bad row in
        `BAD_ROW_COLUMN`, and with `rule` the index of the row in `ROW_COLUMN` and further numbers.
        """
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        process = ProcessedImages(self.process, self.rule, self._check_interval)
        return columns_of_batch(batch, [*range(len(rows))], process)

    def finish(self, document: dict[str, Any]) -> dict[str, Any]:
        """Process the images of a document, and return the document with the outputs for them.

        Raises:
            ValueError: the document has other tokens than when it was read.
        """
        encoded = document.get(ENCODED)
        if encoded is None:  # the dummy document of two untrained tokens, for a rank without documents
            return document
        row = self.process(json.loads(encoded.text) | {"images": list(encoded.images)})
        processed = self.process.cut(row, encoded.start, encoded.stop)
        if not np.array_equal(processed["input_ids"], document["input_ids"]):
            raise ValueError(
                f"A document of the stream with {len(encoded.images)} images has {len(processed['input_ids'])} tokens, "
                f"and it had {len(document['input_ids'])}, or others, when it was read. Packs are made of these "
                "lengths, so they must not change. Leave the image files as they are during training, use a processor "
                "without random augmentation, or load the dataset without streaming."
            )
        values = {name: value for name, value in document.items() if name not in (ENCODED, *processed)}
        return values | processed

    def num_bytes(self, document: dict[str, Any]) -> int:
        """Return the size of the row that a waiting document holds."""
        encoded = document.get(ENCODED)
        return 0 if encoded is None else encoded.num_bytes

    def count_images(self, documents: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the three `counts` of the `EncodedRow` of each document, shape (N, 3)."""
        no_images = (0, 0, 0)  # for dummy documents
        return np.array([document[ENCODED].counts if ENCODED in document else no_images for document in documents])

    def report_section(self, stream: Any, counts: Any) -> ImageNumbers:
        """Return the section of a report on the images of a stream so far."""
        return ImageNumbers.of_stream(stream, counts)

    def encode(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the rows of documents for a saved state. An image that several documents have is saved once.

        Returns:
            The row of each document; and `images`: the numbers of the images of each document, and the path, the mode,
            the size in bytes (-1 without data) and the data of each image.
        """
        if not documents:
            return {}
        rows = [document[ENCODED] for document in documents]
        encoded_rows = [(row.text, row.start, row.stop, row.counts) for row in rows]
        # Images are told apart by identity, because comparing them would compare their bytes
        image_of_id = {id(image): image for row in rows for image in row.images}
        number_of_id = {key: number for number, key in enumerate(image_of_id)}
        images = image_of_id.values()
        data = b"".join(image.data or b"" for image in images)
        saved_images = {
            "numbers": [[number_of_id[id(image)] for image in row.images] for row in rows],
            "paths": [image.path for image in images],
            "modes": [image.mode for image in images],
            "sizes": [-1 if image.data is None else len(image.data) for image in images],
            "data": torch.from_numpy(np.frombuffer(data, np.uint8).copy()),
        }
        return {ENCODED: encoded_rows, "images": saved_images}

    def decode(self, state: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the encoded rows of documents, from the entries that `encode` has made for a saved state."""
        if ENCODED not in state:  # no document was waiting
            return {}
        saved_images = state["images"]
        images = []
        data = saved_images["data"].numpy().tobytes()
        first_byte = 0
        for path, mode, size in zip(saved_images["paths"], saved_images["modes"], saved_images["sizes"], strict=True):
            image_data = None if size < 0 else data[first_byte : first_byte + size]
            images.append(EncodedImage(path, image_data, mode))
            first_byte += max(size, 0)
        encoded_rows = [
            EncodedRow(text, tuple(images[number] for number in numbers), start, stop, tuple(counts))
            for (text, start, stop, counts), numbers in zip(state[ENCODED], saved_images["numbers"], strict=True)
        ]
        return {ENCODED: encoded_rows}
