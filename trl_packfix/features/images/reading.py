"""How the trainer reads datasets with images: `ImageReading`, in place of the `TextReading` of `training/reading.py`.

The command line measures rows with images by the same functions, without a trainer.

Words: a *document* is one training example as the model reads it, with its images; to *measure* a row is to run the
processor on it once, so that the number of its tokens and images is known; the *vision tower* is the part of the model
that reads images.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset, Features, Image, IterableDataset, concatenate_datasets
from torch import Tensor, nn
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ...attention.models import base_model
from ...compat import DDP, main_process_first, set_pad_token_by_text
from ...data.model_costs import vision_tower, with_tower
from ...data.reader import RowReader
from ...data.stream_reader import refuse_empty
from ...planning.costs import CostModel
from ...samples.checks import check_conversations, columns_of, has_images
from ...samples.conversation import plain_tokenizer
from ...samples.dataset_warnings import warn_if_nothing_is_stripped, warn_if_turns_do_not_end
from ...samples.make_samples import count_turns
from ...samples.turns import TurnRule
from ...training.config import SFTConfig
from ...training.preparation import check_and_set_up
from ...training.reading import TextReading
from ...training.trainer_view import TrainerView
from .collator import PackedImages, PaddedImageCollator, RopeIndex
from .examples import ImageExamples
from .measures import masking_collator, measure
from .processor import RowProcessor, sequence_sizes
from .rows import ImageRows
from .stream import StreamImages


class ImageReading(TextReading):
    """Reads the datasets of a run with images. `TextReading` says what each of its methods and attributes is for.

    It is constructed before an engine such as DeepSpeed wraps the model, and takes the processor from TRL's collator.
    """

    is_text_only = False  # documents hold more than tokens

    def __init__(self, trainer: TrainerView):
        super().__init__(trainer)
        self.process = row_processor(trainer.data_collator, self.args.per_turn)
        # Finds common beginnings for `share_prefixes`: it returns the tokens of documents, in which a number stands for
        # the content of each image
        self.compare = self.process.compare
        inner = base_model(trainer.model)
        model_class = type(inner.base_model)  # the class below the LM head, which has the method for M-RoPE positions
        rope_index = RopeIndex(model_class, inner.config) if hasattr(model_class, "get_rope_index") else None
        self.examples = ImageExamples(self.process, trainer.data_collator.dataset_text_field, rope_index)
        self.feature = self.examples  # makes the documents with images on which the model is tested before training
        # An empty module has no parameters, so the tower does not count as trained if it is not known
        self.tower = vision_tower(inner) or nn.Module()

    def make_reader(self, dataset: Dataset, name: str) -> RowReader:
        """Return the reader of a table. A table without images that is tokenised is read as text."""
        if self._is_tokens(dataset):
            return super().make_reader(dataset, name)
        return measure_rows(dataset, self.process, name, args=self.args)

    def _is_tokens(self, dataset: Dataset | IterableDataset) -> bool:
        """Return whether a dataset is tokenised and has no images."""
        return "input_ids" in columns_of(dataset) and not has_images(dataset)

    def can_read(self, dataset: Dataset) -> bool:
        """Return True: `make_reader` reads every table."""
        return True

    def stream_rows(self, vocab_size: int | None = None) -> StreamImages:
        """Return the object that makes documents of the rows of a stream."""
        rule = TurnRule.from_args(self.args) if self.args.per_turn else None
        return StreamImages(
            self.process, self.args.dataset_text_field, rule, drops_bad_rows=self.args.bad_rows == "drop"
        )

    def first_stream_row(self, dataset: IterableDataset) -> str:
        """Return a hash of the first row of a stream, by which ranks see whether they read the same one."""
        stream, rows = self.stream_rows().open_stream(dataset)  # `rows` is the `StreamImages` for this stream
        # Arrow adds keys with null to the dictionaries of a row, to give all dictionaries of a column the same keys.
        # `structs` would take them out again. A hash does not need that, because all ranks have the same nulls
        rows = replace(rows, structs={})
        return hashlib.sha256(repr(rows.encode_row(next(iter(stream)))).encode()).hexdigest()

    def read_whole_stream(self, dataset: IterableDataset) -> Dataset:
        """Read a whole finite stream into a table in memory, with its images as they are stored in files."""
        if self._is_tokens(dataset):
            return super().read_whole_stream(dataset)
        stream, stream_rows = self.stream_rows().open_stream(dataset)
        value_columns = (self.args.weight_column, self.args.source_column)
        texts_and_values = []
        images = []
        for row in stream:
            encoded = stream_rows.encode_row(row)
            images.append([{"path": image.path, "bytes": image.data} for image in encoded.pop("images")])
            texts_and_values.append(encoded | {name: row[name] for name in value_columns if name and name in row})
        if not images:
            refuse_empty()
        image_table = Dataset.from_dict({"images": images}, Features({"images": [Image(mode=stream_rows.mode)]}))
        return concatenate_datasets([Dataset.from_list(texts_and_values), image_table], axis=1)

    def document_costs(self, costs: CostModel) -> CostModel:
        """Add the costs (FLOPs) of images in the vision tower to the costs of tokens."""
        model = base_model(self._trainer.model)
        is_trained = any(parameter.requires_grad for parameter in self.tower.parameters())
        return with_tower(costs, model.config, type(model), is_trained=is_trained)

    def tower_flops(self, inputs: dict[str, Any], costs: CostModel, dtype: torch.dtype) -> Tensor:
        """Return the FLOPs of a forward of the vision tower on a batch, a scalar of this dtype."""
        sizes = sequence_sizes(inputs).to(dtype)  # number of pixel values of each image or tile
        # The matrices cost FLOPs for each value, and attention for each pair of values of one image or tile
        return costs.tower(sizes, sizes**2).sum()

    def pack_content(self) -> PackedImages:
        """Return the object that adds images to the batch of a pack.

        If ranks would wait for a rank whose pack has no image, such a pack gets a placeholder image.
        """
        accelerator = self._trainer.accelerator
        # `DDP` lists the names of accelerate for training with DDP. Only DDP that looks for unused parameters lets a
        # rank skip the vision tower
        may_skip_tower = accelerator.distributed_type in DDP and self.args.ddp_find_unused_parameters
        needs_image = accelerator.num_processes > 1 and not may_skip_tower
        return replace(self.examples.images, placeholder=self.examples.placeholder() if needs_image else None)

    def can_replace(self, collate: Callable[..., Any]) -> bool:
        """Return True: `padded_collator` can take the place of any collator, because it does not call that collator."""
        return True

    def padded_collator(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collator of padded batches, which does not call `collate`."""
        return PaddedImageCollator(self.examples.layout, self._trainer._tokenizer.pad_token_id)

    def check_padded(self, reader: RowReader) -> None:
        """Refuse padded evaluation in which a rank may skip the vision tower while others gather its parameters.

        A rank skips the vision tower in a batch without an image. Under ZeRO-3 and FSDP the other ranks would wait for
        it.
        """
        accelerator = self._trainer.accelerator
        is_sharded = accelerator.distributed_type == DistributedType.FSDP or (
            accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.deepspeed_plugin.zero_stage == 3
        )
        if not is_sharded or accelerator.num_processes == 1:
            return
        stops = reader.image_stops  # for each row the token behind its last image, 0 without an image
        # A table of text has no stops. Nothing is wrong either if all rows have an image, or if none has
        if stops is None or stops.all() or not stops.any():
            return
        raise ValueError(
            f"{(stops == 0).sum()} of {len(stops)} rows of an evaluation set have no image, and it is evaluated in "
            f"padded batches on {accelerator.num_processes} ranks with sharded parameters (ZeRO-3 or FSDP). A rank "
            "without an image would not call the vision tower, and the others would wait for it. Set "
            "`eval_packing=True` without `compute_metrics` and evaluate during training, or evaluate rows with and "
            "without images as two sets."
        )

    def select_alike_on_ranks(self, documents: list[Any], sum_over_ranks: Callable[[Any], float]) -> list[Any]:
        """Return the documents with images if every rank has one, and otherwise the documents without images.

        A document without images does not run the vision tower, and ranks that run the tower would wait forever. The
        check of the first step (`training/first_step.py`) makes its packs of the returned documents only.
        """
        has_images = self.examples.images.has_images
        with_images = [document for document in documents if has_images(document)]
        without_images = [document for document in documents if not has_images(document)]
        num_ranks_with_images = sum_over_ranks(bool(with_images))
        all_have_images = num_ranks_with_images == self._trainer.accelerator.num_processes
        return with_images if all_have_images else without_images


def read_table(dataset: Dataset, processor: Any, args: SFTConfig) -> ImageRows:
    """Measure the rows of a table with images as the trainer does, but without a trainer, and return their reader."""
    check_and_set_up(dataset, processor, args)
    completion_only = args.completion_only_loss
    if completion_only is None:
        # Like TRL, train only the completions of a dataset of prompts and completions
        completion_only = {"prompt", "completion"} <= {*dataset.column_names}
    collate = DataCollatorForVisionLanguageModeling(
        processor=processor, completion_only_loss=completion_only, dataset_text_field=args.dataset_text_field
    )
    if args.assistant_only_loss:
        collate = masking_collator(collate, TurnRule.from_args(args))
    return measure_rows(dataset, row_processor(collate, args.per_turn), "train", args=args)


def row_processor(collate: DataCollatorForVisionLanguageModeling, per_turn: bool) -> RowProcessor:
    """Return the processor that makes a document of a row with images.

    Args:
        collate: TRL's collator, with the processor of the model.
        per_turn: whether each turn becomes a document, whose loss is on the answer only.
    """
    set_pad_token_by_text(plain_tokenizer(collate.processor))
    if per_turn:
        # The collator gets each turn as a prompt and a completion, of which only the completion is trained. The dataset
        # has a column of messages, for which TRL has set `completion_only_loss` to False
        collate = replace(collate, completion_only_loss=True)
    return RowProcessor(collate)


def measure_rows(dataset: Dataset, process: RowProcessor, name: str, *, args: SFTConfig) -> ImageRows:
    """Measure the rows of a dataset, on the main process first: all other processes read its cache.

    Args:
        dataset: rows with images.
        process: makes a document of a row.
        name: "train" or "evaluation". With `bad_rows="drop"`, bad rows of the training set become documents without
            tokens, which are later dropped and counted. With `per_turn`, warnings are logged for the training set if
            turns do not end, or if the chat template strips nothing from earlier turns.
        args: the config of the run.

    Returns:
        The reader of the documents; with `per_turn`, each turn is a document.
    """
    is_training_set = name == "train"
    drops = is_training_set and args.bad_rows == "drop"
    rule = TurnRule.from_args(args) if args.per_turn else None
    if rule is not None:
        check_conversations(dataset, name)
    with main_process_first():
        keeps_bad_rows = drops or rule is not None  # with a rule, `count_turns` refuses them below
        measures = measure(dataset, process, name, drops=keeps_bad_rows, num_proc=args.dataset_num_proc, rule=rule)
    if rule is None:
        return ImageRows(dataset, process, measures)
    counts = count_turns(dataset, measures, name, args=args, is_split=True, drops=drops)
    if is_training_set:
        warn_if_turns_do_not_end(measures, name, process.processor, setting="per_turn")
        warn_if_nothing_is_stripped(measures, name)
    return ImageRows(dataset, process, measures, turns=counts, rule=rule)
