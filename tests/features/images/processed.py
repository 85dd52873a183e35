"""Rows with images, processed for the tiny models of `sweep.image_families`."""

from typing import Any

from datasets import Dataset
from support.vision import build_model, build_processor
from sweep.image_families import make_examples
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packfix.features.images.examples import ImageExamples
from trl_packfix.features.images.measures import measure
from trl_packfix.features.images.processor import RowProcessor
from trl_packfix.features.images.rows import ImageRows


def processor_of(family: str, **settings: Any) -> RowProcessor:
    return RowProcessor(DataCollatorForVisionLanguageModeling(build_processor(family), **settings))


def measured(family: str, dataset: Dataset, **settings: Any) -> ImageRows:
    """Return the rows with images, measured by the processor of a family."""
    process = processor_of(family, **settings)
    return ImageRows(dataset, process, measure(dataset, process, "train", num_proc=None, drops=False))


def documents_of(table: ImageRows) -> list[dict[str, Any]]:
    """Return each row as one document, as the model reads it."""
    return [table.read(row, 0, length) for row, length in enumerate(table.lengths)]


def examples_of(family: str) -> ImageExamples:
    return make_examples(family, build_model(family))
