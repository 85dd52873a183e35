"""Images in packs, for the trainer: what is refused before work starts, and what the trainer is made of."""

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
from ..data.prefix_collator import Compare
from ..data.reader import RowReader, TokenReader
from ..data.stream_images import StreamImages
from ..data.stream_reader import StreamTokens, read_whole, refuse_empty
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


class NoImages(TrainerPart):
    """How the rows of a run are read, where packs have no images."""

    examples: ImageExamples | None = None
    tower = nn.Module()  # the vision tower
    compare: Compare | None = None  # see `PrefixCollator`

    def read(self, dataset: Dataset, name: str) -> RowReader:
        """The rows of a table: tokens, or images and text, which are measured once."""
        return TokenReader(dataset)

    def of_stream(self, vocab_size: int | None) -> StreamTokens | StreamImages:
        """How the rows of a stream become documents."""
        return StreamTokens(vocab_size)

    def first_of_stream(self, dataset: IterableDataset) -> Any:
        """The first row, or a hash of it with its images as they are stored."""
        return np.asarray(next(iter(dataset))["input_ids"]).tolist()

    def table(self, dataset: IterableDataset) -> Dataset:
        """All rows of a finite stream, as a table in memory with the columns that are read, and encoded images."""
        return read_whole(dataset, self.args.weight_column, self.args.source_column)

    def costs(self, costs: CostModel) -> CostModel:
        """Costs of text, with those of images."""
        return costs

    def of_packs(self) -> PackedImages:
        """What packs have of images: also a placeholder, if ranks would wait for each other in a pack without one."""
        return NO_IMAGES

    def padded(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a padded batch of documents; `collate` is TRL's collator."""
        return PaddedCollator(collate)


class ImageData(NoImages):
    """The same with images: of TRL's collator, and a model that no engine wraps yet."""

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
        return "input_ids" in columns_of(dataset) and not has_images(dataset)

    def of_stream(self, vocab_size: int | None = None) -> StreamImages:
        rule = TurnRule.of(self.args) if self.args.per_turn else None
        return StreamImages(self.process, self.args.dataset_text_field, rule, drops=self.args.bad_rows == "drop")

    def first_of_stream(self, dataset: IterableDataset) -> str:
        rows, reading = self.of_stream().open_stream(dataset)
        return hashlib.sha256(repr(reading.encode_row(next(iter(rows)))).encode()).hexdigest()

    def table(self, dataset: IterableDataset) -> Dataset:
        if self._is_tokens(dataset):
            return super().table(dataset)
        rows, reading = self.of_stream().open_stream(dataset)
        values = self.args.weight_column, self.args.source_column
        others = []
        images = []
        for row in rows:
            encoded = reading.encode_row(row)
            images.append([{"path": image.path, "bytes": image.data} for image in encoded.pop("images")])
            others.append(encoded | {name: row[name] for name in values if name and name in row})
        if not others:
            refuse_empty()
        pictures = Dataset.from_dict({"images": images}, Features({"images": [Image(mode=reading.mode)]}))
        return concatenate_datasets([Dataset.from_list(others), pictures], axis=1)

    def costs(self, costs: CostModel) -> CostModel:
        model = base_model(self._trainer.model)
        is_trained = any(parameter.requires_grad for parameter in self.tower.parameters())
        return with_tower(costs, model.config, type(model), is_trained=is_trained)

    def of_packs(self) -> PackedImages:
        accelerator = self._trainer.accelerator
        needs_image = accelerator.num_processes > 1 and not (
            accelerator.distributed_type in DDP and self.args.ddp_find_unused_parameters
        )
        return replace(self.examples.images, placeholder=self.examples.placeholder() if needs_image else None)

    def padded(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        return PaddedImageCollator(self.examples.layout, self._trainer._tokenizer.pad_token_id)


def row_processor(collate: DataCollatorForVisionLanguageModeling, per_turn: bool) -> RowProcessor:
    """What makes a document of a row with images; with `per_turn` of the prompt and the answer of a turn."""
    set_pad_token_by_text(plain_tokenizer(collate.processor))
    # TRL chooses by the columns of the dataset, in which turns are not prompts and completions
    return RowProcessor(replace(collate, completion_only_loss=True) if per_turn else collate)


def measure_rows(dataset: Dataset, process: RowProcessor, name: str, *, args: SFTConfig, marks: bool) -> ImageRows:
    """The documents of a dataset. The main process measures them, the others read the cache.

    `marks`: with `bad_rows="drop"`, bad rows stay as documents without tokens, so that they are counted.
    """
    drops = marks and args.bad_rows == "drop"
    rule = TurnRule.of(args) if args.per_turn else None
    if rule is not None:
        check_conversations(dataset, name)
    with main_process_first():
        settings: dict[str, Any] = {"num_proc": args.dataset_num_proc, "rule": rule}
        measures = measure(dataset, process, name, drops=drops or rule is not None, **settings)
    if rule is None:
        return ImageRows(dataset, process, measures)
    counts = count_turns(dataset, measures, name, args=args, is_split=True, drops=drops)
    reader = ImageRows(dataset, process, measures, turns=counts, rule=rule)
    if marks:
        trained = np.flatnonzero(read_integer_column(measures, "trained"))[:1].tolist()
        first = [reader.read(row, 0, int(reader.lengths[row])) for row in trained]
        warn_if_turns_do_not_end(first, name, process.processor, setting="per_turn")
        warn_if_nothing_is_stripped(measures, name)
    return reader


def check_padded_images(accelerator: Accelerator, reader: RowReader) -> None:
    """Refuse padded evaluation in which a rank may have no image while ranks gather parameters together."""
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (
        accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.deepspeed_plugin.zero_stage == 3
    )
    stops = reader.image_stops
    if not is_sharded or accelerator.num_processes == 1 or stops is None or stops.all() or not stops.any():
        return
    raise ValueError(
        f"{(stops == 0).sum()} of {len(stops)} rows of an evaluation set have no image, and it is evaluated in padded "
        f"batches on {accelerator.num_processes} ranks with sharded parameters (ZeRO-3 or FSDP). A rank without an "
        "image would not call the vision tower, and the others would wait for it. Set `eval_packing=True` without "
        "`compute_metrics` and evaluate during training, or evaluate rows with and without images as two sets."
    )
