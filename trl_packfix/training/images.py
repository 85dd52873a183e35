"""Images in packs, for the trainer: what is refused before work starts, and what the trainer is made of."""

from dataclasses import replace
from typing import Any

from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..attention.models import base_model
from ..compat import DDP, main_process_first
from ..data.image_collator import ImageExamples, PackedImages, PaddedImageCollator, RopeIndex
from ..data.image_rows import IMAGES, ImageRows, RowProcessor, has_images, measure
from ..data.reader import TokenReader
from .config import SFTConfig


def packs_images(args: SFTConfig, train_dataset: Any) -> bool:
    """Whether packs will have images: packing is on and the training set has a column of them."""
    return (args.packing or args.padding_free) and has_images(train_dataset)


def check_before_loading(args: SFTConfig, train_dataset: Any, processing_class: Any) -> None:
    """Refuse what images in packs do not support, before the model is loaded.

    Raises:
        ValueError: a stream, a setting that was tested on text only, a tokenizer in the place of a processor, a policy
            that cuts documents anywhere.
    """
    name = next(name for name in IMAGES if name in train_dataset.column_names)
    if not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"The dataset has the column `{name}`, is an `IterableDataset`, and packing is on. The length of a "
            "document with images is known only after its images are processed, which happens once before training, "
            "and a stream is read only once. Load the dataset without streaming, or set `packing=False` and "
            "`padding_free=False`."
        )
    check_settings(args, name)
    if isinstance(processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            f"The dataset has the column `{name}` and `processing_class={type(processing_class).__name__}` was given. "
            "It is a tokenizer, which makes no pixels, so the images would be ignored. Give the processor of the "
            "model (`AutoProcessor.from_pretrained`), or leave `processing_class` unset."
        )
    if processing_class is not None and not isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"The dataset has the column `{name}` and `processing_class={type(processing_class).__name__}` was given. "
            "Images are made into tokens by a processor of transformers. Give the processor of the model "
            "(`AutoProcessor.from_pretrained`), or leave `processing_class` unset."
        )


def check_settings(args: SFTConfig, column: str) -> None:
    """Refuse settings that images in packs do not support.

    Raises:
        ValueError: sequence parallelism, constant shapes, families of documents, a policy that cuts documents anywhere.
    """
    for setting in ("tokens_per_rank", "pad_documents_to_multiple_of"):
        if (value := getattr(args, setting)) is not None:
            raise ValueError(
                f"`{setting}={value!r}` was given, and the dataset has the column `{column}`. With images in packs it "
                f"is not supported: it was tested on text alone. Leave `{setting}` unset, or remove the column of "
                "images."
            )
    if args.share_prefixes == "family":
        raise ValueError(
            f'`share_prefixes="family"` was given, and the dataset has the column `{column}`. Documents that begin '
            "alike are found by sorting all of them, and all images have the same placeholder tokens, so every image "
            'would have to be processed before training. Set `share_prefixes="pack"`, which shares among the documents '
            "of a pack."
        )
    if args.effective_overlong == "split":
        raise ValueError(
            f"`packing_strategy={args.packing_strategy!r}` and `overlong={args.overlong!r}` were given with the column "
            f"`{column}`. Long documents would be split, and a fragment may begin inside an image. Set "
            '`packing_strategy="stream"` or "bfd", and `overlong` to "truncate" (after the last image, else the '
            'document is dropped), "drop" or "raise".'
        )


class ImageData:
    """What packing needs of the images of a run.

    Args:
        collate: TRL's collator of the run.
        model: with or without PEFT, not wrapped by an engine yet.
    """

    def __init__(self, collate: DataCollatorForVisionLanguageModeling, model: nn.Module):
        self.process = RowProcessor(collate)
        inner = base_model(model)
        kind = type(inner.base_model)
        rope_index = RopeIndex(kind, inner.config) if hasattr(kind, "get_rope_index") else None
        self.examples = ImageExamples(self.process, collate.dataset_text_field, rope_index)

    def rows(self, dataset: Dataset, name: str, args: SFTConfig, marks: bool) -> ImageRows:
        """The documents of a dataset. The main process measures them, the others read the cache.

        Args:
            marks: with `bad_rows="drop"`, bad rows stay as documents without tokens, so that they are counted.
                Without it, they are refused.
        """
        with main_process_first():
            measures = measure(
                dataset, self.process, name, args.dataset_num_proc, drops=marks and args.bad_rows == "drop"
            )
        return ImageRows(dataset, self.process, measures)

    def of_packs(self, args: SFTConfig, accelerator: Any) -> PackedImages:
        """What packs have of images: also a placeholder, if ranks would wait for each other in a pack without one."""
        needs_image = accelerator.num_processes > 1 and not (
            accelerator.distributed_type in DDP and args.ddp_find_unused_parameters
        )
        return replace(self.examples.images, placeholder=self.examples.placeholder() if needs_image else None)

    def padded_collator(self, pad_token_id: int) -> PaddedImageCollator:
        """The collator of padded evaluation."""
        return PaddedImageCollator(self.examples.layout, pad_token_id)


def check_padded_images(accelerator: Any, reader: ImageRows | TokenReader) -> None:
    """Refuse padded evaluation in which a rank may have no image while ranks gather parameters together.

    Raises:
        ValueError: parameters are sharded, and some rows have images and others none.
    """
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
