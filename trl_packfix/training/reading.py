"""How the trainer reads datasets and collates documents: the interface, and runs whose rows are text.

`loading.py` constructs a `TextReading` once for a run, or the subclass of a feature whose rows hold more than text
(`features/images`). It calls the same methods of either: to read a table or a stream as documents, to collate documents
into packs and padded batches, and to know what they cost. `reading_class` is the one place that decides which.

A *document* is one training example as the model reads it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..data.loaders import TEXT_CONTENT, PackContent, PaddedCollator
from ..data.reader import RowReader, TokenReader
from ..data.stream_reader import StreamRows, read_whole
from ..feature import PLAIN, Feature
from ..layout import Compare
from ..planning.costs import CostModel
from ..samples.image_support import image_support
from .config import SFTConfig
from .trainer_view import TrainerPart


class TextReading(TrainerPart):
    """Reads the datasets of a run whose rows are text. The classes of features override its methods.

    `TrainerPart` gives it the trainer, as `self._trainer`, and its config, as `self.args`.

    Attributes:
        is_text_only: whether documents hold only text. Their tokens are then stored, documents of one length can be the
            rows of one batch, and TRL's constructor accepts `packing=True` with them.
        feature: the `Feature` (`feature.py`) by which packs of these rows differ from packs of text. For images it
            chooses the probe that tests, on documents with images, that documents in packs do not influence each other.
            `PLAIN` changes nothing.
        tower: the part of the model that reads no text; an empty module if there is none.
        compare: a function by which `share_prefixes` finds common beginnings. It takes documents, and returns a
            `ComparedContent` (`layout.py`) of each: a number for each token, equal where the content is equal, and the
            places of images. None compares the token ids.
    """

    is_text_only = True
    feature: Feature = PLAIN
    tower = nn.Module()
    compare: Compare | None = None

    # Datasets

    def make_reader(self, dataset: Dataset, name: str) -> RowReader:
        """Return the reader of a table. `name` is "train" or "evaluation"; only the reader of images needs it."""
        return TokenReader(dataset)

    def can_read(self, dataset: Dataset) -> bool:
        """Return whether `make_reader` can read a table: TRL has tokenised it."""
        return "input_ids" in dataset.column_names

    def stream_rows(self, vocab_size: int | None) -> StreamRows:
        """Return the object that makes documents of the rows of a stream.

        It refuses token ids from `vocab_size` on; None does not check them.
        """
        return StreamRows(vocab_size)

    def first_stream_row(self, dataset: IterableDataset) -> Any:
        """Return the tokens of the first row of a stream, by which ranks check that they read the same stream.

        Subclasses may return something else that tells rows apart.
        """
        return np.asarray(next(iter(dataset))["input_ids"]).tolist()

    def read_whole_stream(self, dataset: IterableDataset) -> Dataset:
        """Read a whole finite stream into a table in memory, with the columns that the trainer reads."""
        return read_whole(dataset, self.args.weight_column, self.args.source_column)

    # Batches

    def pack_content(self) -> PackContent:
        """Return the object that adds to a pack what it holds beside tokens: nothing for text."""
        return TEXT_CONTENT

    def can_replace(self, collate: Callable[..., Any]) -> bool:
        """Return whether `padded_collator` can replace a collator: it is TRL's own, and not the user's.

        A subclass of TRL's is the user's: it may read other columns of the rows, or change the batch.
        """
        return type(collate) is DataCollatorForLanguageModeling

    def padded_collator(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collator of padded batches, which may call TRL's collator `collate`."""
        return PaddedCollator(collate)

    def check_padded(self, reader: RowReader) -> None:
        """Raise an error if a table cannot be evaluated in padded batches. Text always can."""

    def select_alike_on_ranks(self, documents: list[Any], sum_over_ranks: Callable[[Any], float]) -> list[Any]:
        """Return the documents on which all ranks run the same parts of the model. All ranks must call it.

        Text runs the same parts everywhere. A document with images also runs a vision tower, in which ranks may wait
        for each other, so a subclass leaves such documents out unless every rank has one.

        Args:
            documents: candidates on this rank.
            sum_over_ranks: returns the sum of a number over all ranks.
        """
        return documents

    # Costs

    def document_costs(self, costs: CostModel) -> CostModel:
        """Return the model of what documents cost, from that of their tokens: the same for text; images cost more."""
        return costs

    def tower_flops(self, inputs: dict[str, Any], costs: CostModel, dtype: torch.dtype) -> Tensor | float:
        """Return the FLOPs of a forward of the tower on a batch."""
        return 0.0


def reading_class(args: SFTConfig, dataset: object) -> type[TextReading]:
    """Return the class that reads the rows of a run.

    Without packing it is `TextReading`, also for rows with images: TRL makes their batches then.

    Raises:
        ValueError: the rows have images, and the folder of the feature is missing.
    """
    class_for_images: type[TextReading] | None = None
    if args.packing:
        class_for_images = image_support().reading_class(dataset)  # None for rows without images
    return class_for_images or TextReading
