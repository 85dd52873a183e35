"""How the trainer reads datasets, with images or without: the one place that knows whether a run has images.

`loading.py` constructs `TextData` or its subclass `ImageData`, once for a run, and calls the same methods of either: to
read a table or a stream as documents, to collate documents into packs and padded batches, and to know what they cost.
`preparation.py` measures rows with images without a trainer.

Words: a *document* is one training example as the model reads it, with its images; to *measure* a row is to run the
processor on it once, so that the number of its tokens and images is known; the *vision tower* is the part of the model
that reads images.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset, Features, Image, IterableDataset, concatenate_datasets
from torch import nn
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..attention.models import base_model
from ..compat import DDP, main_process_first, set_pad_token_by_text
from ..data.image_collator import NO_IMAGES, PackedImages, PaddedImageCollator, RopeIndex
from ..data.image_examples import ImageExamples
from ..data.image_rows import ImageRows
from ..data.loaders import PaddedCollator
from ..data.model_costs import vision_tower, with_tower
from ..data.reader import RowReader, TokenReader
from ..data.stream_images import StreamImages
from ..data.stream_reader import StreamTokens, read_whole, refuse_empty
from ..layout import Compare
from ..planning.costs import CostModel
from ..samples.checks import check_conversations, columns_of, has_images
from ..samples.conversation import plain_tokenizer
from ..samples.dataset_warnings import warn_if_nothing_is_stripped, warn_if_turns_do_not_end
from ..samples.images import measure
from ..samples.make_samples import count_turns
from ..samples.processor import RowProcessor
from ..samples.row import read_integer_column
from ..samples.turns import TurnRule
from .config import SFTConfig
from .trainer_view import TrainerPart, TrainerView


class TextData(TrainerPart):
    """Reads the datasets of a run without images, and has the methods that `ImageData` overrides.

    Attributes:
        examples: makes rows with images into inputs of the model; None without images.
        tower: the vision tower; an empty module without images.
        compare: returns the content of images that `PrefixCollator` compares; None without images.
    """

    examples: ImageExamples | None = None
    tower = nn.Module()
    compare: Compare | None = None

    def read(self, dataset: Dataset, name: str) -> RowReader:
        """Return the reader of a table. Rows with images and text are measured first."""
        return TokenReader(dataset)

    def of_stream(self, vocab_size: int | None) -> StreamTokens | StreamImages:
        """Return the object that makes documents of the rows of a stream."""
        return StreamTokens(vocab_size)

    def first_of_stream(self, dataset: IterableDataset) -> Any:
        """Return the tokens of the first row of a stream; with images, a hash of the row as it is stored."""
        return np.asarray(next(iter(dataset))["input_ids"]).tolist()

    def table(self, dataset: IterableDataset) -> Dataset:
        """Read a whole finite stream into a table in memory, with the columns that the trainer reads.

        Images stay encoded, as files are.
        """
        return read_whole(dataset, self.args.weight_column, self.args.source_column)

    def costs(self, costs: CostModel) -> CostModel:
        """Return the costs of documents: `costs`, the costs of their text, and the costs of their images."""
        return costs

    def of_packs(self) -> PackedImages:
        """Return how the images of a pack are collated.

        If ranks would wait for a rank whose pack has no image, such a pack gets a placeholder image.
        """
        return NO_IMAGES

    def padded(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collator of padded batches, which calls TRL's collator `collate` where there are no images."""
        return PaddedCollator(collate)


class ImageData(TextData):
    """Reads the datasets of a run with images.

    It is constructed before an engine wraps the model, and takes the processor from TRL's collator.
    """

    examples: ImageExamples

    def __init__(self, trainer: TrainerView):
        super().__init__(trainer)
        self.process = row_processor(trainer.data_collator, self.args.per_turn)
        self.compare = self.process.compare
        inner = base_model(trainer.model)
        kind = type(inner.base_model)
        rope_index = RopeIndex(kind, inner.config) if hasattr(kind, "get_rope_index") else None
        self.examples = ImageExamples(self.process, trainer.data_collator.dataset_text_field, rope_index)
        self.tower = vision_tower(inner) or nn.Module()

    def read(self, dataset: Dataset, name: str) -> RowReader:
        if self._is_tokens(dataset):
            return super().read(dataset, name)
        return measure_rows(dataset, self.process, name, args=self.args, marks=name == "train")

    def _is_tokens(self, dataset: Dataset | IterableDataset) -> bool:
        """Return whether a dataset is tokenised and has no images."""
        return "input_ids" in columns_of(dataset) and not has_images(dataset)

    def of_stream(self, vocab_size: int | None = None) -> StreamImages:
        rule = TurnRule.from_args(self.args) if self.args.per_turn else None
        return StreamImages(self.process, self.args.dataset_text_field, rule, drops=self.args.bad_rows == "drop")

    def first_of_stream(self, dataset: IterableDataset) -> str:
        rows, reading = self.of_stream().open_stream(dataset)
        return hashlib.sha256(repr(reading.encode_row(next(iter(rows)))).encode()).hexdigest()

    def table(self, dataset: IterableDataset) -> Dataset:
        if self._is_tokens(dataset):
            return super().table(dataset)
        rows, reading = self.of_stream().open_stream(dataset)
        value_columns = (self.args.weight_column, self.args.source_column)
        texts_and_values = []
        images = []
        for row in rows:
            encoded = reading.encode_row(row)
            images.append([{"path": image.path, "bytes": image.data} for image in encoded.pop("images")])
            texts_and_values.append(encoded | {name: row[name] for name in value_columns if name and name in row})
        if not images:
            refuse_empty()
        image_table = Dataset.from_dict({"images": images}, Features({"images": [Image(mode=reading.mode)]}))
        return concatenate_datasets([Dataset.from_list(texts_and_values), image_table], axis=1)

    def costs(self, costs: CostModel) -> CostModel:
        model = base_model(self._trainer.model)
        is_trained = any(parameter.requires_grad for parameter in self.tower.parameters())
        return with_tower(costs, model.config, type(model), is_trained=is_trained)

    def of_packs(self) -> PackedImages:
        accelerator = self._trainer.accelerator
        # Only DDP that looks for unused parameters lets a rank skip the vision tower
        may_skip_tower = accelerator.distributed_type in DDP and self.args.ddp_find_unused_parameters
        needs_image = accelerator.num_processes > 1 and not may_skip_tower
        return replace(self.examples.images, placeholder=self.examples.placeholder() if needs_image else None)

    def padded(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        return PaddedImageCollator(self.examples.layout, self._trainer._tokenizer.pad_token_id)


def row_processor(collate: DataCollatorForVisionLanguageModeling, per_turn: bool) -> RowProcessor:
    """Return the processor that makes a document of a row with images.

    Args:
        collate: TRL's collator, with the processor of the model.
        per_turn: whether each turn becomes a document, whose loss is on the answer only.
    """
    set_pad_token_by_text(plain_tokenizer(collate.processor))
    if per_turn:
        # TRL has set the loss by the columns of the dataset. A turn becomes a prompt and a completion only later.
        collate = replace(collate, completion_only_loss=True)
    return RowProcessor(collate)


def measure_rows(dataset: Dataset, process: RowProcessor, name: str, *, args: SFTConfig, marks: bool) -> ImageRows:
    """Measure the rows of a dataset, on the main process first: all other processes read its cache.

    Args:
        dataset: rows with images.
        process: makes a document of a row.
        name: how messages name the dataset.
        args: the config of the run.
        marks: whether, with `bad_rows="drop"`, bad rows stay as documents without tokens, so that they are counted.

    Returns:
        The reader of the documents; with `per_turn`, each turn is a document.
    """
    drops = marks and args.bad_rows == "drop"
    rule = TurnRule.from_args(args) if args.per_turn else None
    if rule is not None:
        check_conversations(dataset, name)
    with main_process_first():
        drops_rows = drops or rule is not None
        measures = measure(dataset, process, name, drops=drops_rows, num_proc=args.dataset_num_proc, rule=rule)
    if rule is None:
        return ImageRows(dataset, process, measures)
    counts = count_turns(dataset, measures, name, args=args, is_split=True, drops=drops)
    reader = ImageRows(dataset, process, measures, turns=counts, rule=rule)
    if marks:
        # Warnings look at the first row that trains a token
        first_rows = np.flatnonzero(read_integer_column(measures, "trained"))[:1].tolist()
        first_documents = [reader.read(row, 0, int(reader.lengths[row])) for row in first_rows]
        warn_if_turns_do_not_end(first_documents, name, process.processor, setting="per_turn")
        warn_if_nothing_is_stripped(measures, name)
    return reader


def check_padded_images(accelerator: Accelerator, reader: RowReader) -> None:
    """Refuse padded evaluation in which a rank may skip the vision tower while other ranks gather its parameters.

    A rank skips the vision tower in a batch without an image. Under ZeRO-3 and FSDP the other ranks would wait for it.
    """
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (
        accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.deepspeed_plugin.zero_stage == 3
    )
    if not is_sharded or accelerator.num_processes == 1:
        return
    stops = reader.image_stops  # of each row the index after the last token of an image, 0 without an image
    if stops is None or stops.all() or not stops.any():  # all rows have an image, or none has one
        return
    raise ValueError(
        f"{(stops == 0).sum()} of {len(stops)} rows of an evaluation set have no image, and it is evaluated in padded "
        f"batches on {accelerator.num_processes} ranks with sharded parameters (ZeRO-3 or FSDP). A rank without an "
        "image would not call the vision tower, and the others would wait for it. Set `eval_packing=True` without "
        "`compute_metrics` and evaluate during training, or evaluate rows with and without images as two sets."
    )
