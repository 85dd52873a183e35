"""Measure rows with images before training, and make documents in which only assistant turns are trained.

The processor alone knows how many tokens an image becomes. So `measure` runs it on every row before training, and
caches tokens, labels and the numbers that planning needs (`KINDS`), but no pixels. During training, a worker of the
data loader runs the processor again (`processor.py`), and must get the same tokens.

Every image is decoded before training, so that a broken image is found. To save time, only one image of each size is
processed (`RowProcessor.by_size`). Every 16th row is also processed *in full*, with its own pixels. If its numbers
differ, all rows are measured again, in full.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import transformers
import trl
from datasets import Dataset, Features, List, Value
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ...compat import can_train_answers_only
from ...samples.conversation import Conversation, images_of
from ...samples.make_samples import TOKEN_FEATURES, columns_of_batch
from ...samples.recipes import Recipe, Row, samples_of_turns, training_template
from ...samples.row import (
    BAD_ROW_COLUMN,
    BOOKKEEPING_COLUMNS,
    MAX_ROWS_NAMED,
    ROW_COLUMN,
    AssistantTurnCounts,
    HashedMapFunction,
    Sample,
    bad_row_mask,
    hash_modules_of,
    read_integer_column,
)
from ...samples.texts import struct_columns
from ...samples.turns import PART_MARKERS, TurnRule, text_parts
from .processor import RowProcessor, with_images

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 16
"""One row of so many is processed in full, and compared with the numbers that the sizes of its images give."""

# The columns that measured rows have beside those of tokenised rows (`TOKEN_FEATURES`): the type of each, and its value
# in a bad row. `RowProcessor.measure_row` makes the values of a row:
#
#     image_stop     the token behind the last image; 0 without an image
#     image_count    number of images
#     image_values   count of the numbers in `pixel_values`, without padding. The vision tower reads them in sequences;
#                    an image or a tile of an image is a sequence
#     image_squares  the count of each sequence, squared, and summed; for the cost of attention in the vision tower
#     spans          first token of each image and the token behind it, one after the other
#     contents       a hash of the pixels of each image, by which documents with equal beginnings are found
#     digest         a hash of the row, by which a cache sees that it has changed
#     differs        whether the row was measured in both ways with different results
KINDS: dict[str, tuple[object, object]] = {
    **dict.fromkeys(("image_stop", "image_count", "image_values", "image_squares"), (Value("int64"), 0)),
    "spans": (List(Value("int64")), []),
    "contents": (List(Value("binary")), []),
    "digest": (Value("binary"), b""),
    "differs": (Value("bool"), False),
}


def features_of(rule: TurnRule | None) -> Features:
    """Return the types of the columns of measured rows; with a rule, rows are turns, and have `BOOKKEEPING_COLUMNS`."""
    numbers = {} if rule is None else dict.fromkeys(BOOKKEEPING_COLUMNS, Value("int64"))
    return Features(TOKEN_FEATURES | {name: kind for name, (kind, _) in KINDS.items()} | numbers)


@dataclass(frozen=True)
class ProcessedImages(Recipe):
    """The recipe that measures a row with images or, with a rule, each of its trained assistant turns.

    With a rule, a conversation without a trained turn becomes one sample, in which no token is trained.
    """

    process: RowProcessor
    rule: TurnRule | None = None  # decides which turns are trained; None if a sample is a row
    check_interval: int = 1  # one row of so many is processed in full, and all others by the sizes of their images
    # The values of a row that cannot be processed. `measure_row` returns tokens and labels of other rows as lists, too
    bad: ClassVar[Mapping[str, object]] = {"input_ids": [], "labels": []} | {
        name: value for name, (_, value) in KINDS.items()
    }

    @property
    def setting(self) -> str:  # type: ignore[override]  # a property, because it depends on the rule
        """The setting of the user that divides rows into these samples; "" if a sample is a row."""
        return "" if self.rule is None else "per_turn"

    def samples(self, row: Row, row_index: int) -> list[Sample]:
        """Return the measures of a row or, with a rule, of each of its trained turns."""
        rule = self.rule
        if rule is None:
            return [self._measure_document(row, row_index)]

        def measure_turn(conversation: Conversation, turn: int) -> Sample:
            """Measure the document of one turn; turn -1 stands for a conversation without a trained turn."""
            return self._measure_document(rule.row_of_turn(conversation, turn, self.process.processor), row_index)

        selection = rule.select_turns(Conversation.from_row(row, images_of(row)))
        return samples_of_turns(selection, measure_turn, row)

    def _measure_document(self, row: Row, row_index: int) -> Sample:
        """Measure one document: in full in every `check_interval`-th row, otherwise by the sizes of its images.

        Args:
            row: the row of the dataset, or the row of one of its turns.
            row_index: the index of the row in the dataset.
        """
        # Reading the row decodes its images, so a missing or broken image raises an error here
        row = with_images(row)
        by_size = None
        if self.check_interval > 1:
            with suppress(Exception):  # processing the row in full raises the error that the user should read
                by_size = self.process.by_size.measure_row(row)
            if by_size is not None and row_index % self.check_interval:
                return Sample(by_size)
        in_full = self.process.measure_row(row)
        # If only the measuring by size has failed, the numbers differ, too, and all rows are measured in full
        return Sample(in_full | {"differs": self.check_interval > 1 and by_size != in_full})


def measure(
    dataset: Dataset,
    process: RowProcessor,
    name: str,
    *,
    num_proc: int | None,
    drops: bool,
    rule: TurnRule | None = None,
) -> Dataset:
    """Run the processor on every row, and return a table of tokens, labels and `KINDS`, which `datasets` caches.

    Args:
        dataset: A table of rows with images.
        process: The processor of one row.
        name: The dataset's name in messages.
        num_proc: Number of processes; None for the calling process.
        drops: Whether the caller drops bad rows. They are then in the result, with length 0 and their reason in
            `BAD_ROW_COLUMN`. Otherwise they are refused, by their numbers; with a rule `count_turns` does this.
        rule: If it is given, each trained assistant turn is a document, and `BOOKKEEPING_COLUMNS` have its row, its
            index, and counts of turns.

    Raises:
        ValueError: If the dataset has a transform, or if rows are bad and not dropped.
    """
    if dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has images and a transform (`Dataset.with_transform`), and "
            "packing is on. Packing must know the length of every document before training, and a transform may make "
            "another image at each reading. Materialise it with `Dataset.map`, or set `packing=False`."
        )

    def measure_rows(check_interval: int) -> Dataset:
        """Measure all rows, or return the cached table if rows, processor and the code of both are the same."""
        return dataset.map(
            # The code of a processor of the user's is part of what the cache is found by
            HashedMapFunction(columns_of_batch, users_code=hash_modules_of(process.processor)),
            with_indices=True,
            batched=True,
            batch_size=1,  # batches, because a row may become several; of one row, because images need much memory
            fn_kwargs={
                "recipe": ProcessedImages(process, rule, check_interval),
                # Columns with dictionaries inside dictionaries. Keys that Arrow has added to them are removed
                "structs": struct_columns(dataset.features),
            },
            remove_columns=dataset.column_names,
            features=features_of(rule),
            num_proc=num_proc,
            desc=f"Measuring {name} dataset",
        )

    # A processor that is not part of transformers may choose shapes by what an image shows, so it runs on every row
    check_interval = CHECK_INTERVAL if process.shapes_depend_on_size else 1
    measures = measure_rows(check_interval)
    differs = np.flatnonzero(measures["differs"])
    if len(differs):
        rows = np.arange(len(measures)) if rule is None else read_integer_column(measures, ROW_COLUMN)
        num_compared = int((rows % CHECK_INTERVAL == 0).sum())  # with a rule, all turns of every 16th row
        logger.warning(
            "%d of %d compared rows of the %s dataset have another length than the sizes of their images give; the "
            "first is row %d. The processor runs on every row instead, which takes longer.",
            len(differs),
            num_compared,
            name,
            rows[differs[0]],
        )
        measures = measure_rows(1)
    bad = bad_row_mask(measures)
    if bad.any() and not drops:
        assert rule is None, "rows are turns, so their numbers are not those of the dataset"
        first = np.flatnonzero(bad)[:MAX_ROWS_NAMED]
        raise ValueError(
            f"{bad.sum()} of {len(measures)} rows of the {name} dataset with images cannot be processed; the first "
            f"are {first.tolist()}. Row {first[0]}: {measures[int(first[0])][BAD_ROW_COLUMN]}. Every image must be "
            "found and decoded, and every placeholder in the text needs exactly one image. Correct or remove these "
            'rows (`dataset.select`), or set `bad_rows="drop"`, which drops and counts them.'
        )
    return measures


@dataclass
class AssistantCollator(DataCollatorForVisionLanguageModeling):
    """TRL's collator of rows with images, which trains the assistant turns that a rule selects.

    TRL's collator finds assistant turns only in templates with `{% generation %}` markers. This collator works with
    every template: it renders the rows itself, divides the text into trained and other parts, and calls TRL's code with
    `PART_MARKERS`, a template that joins the parts with these markers.
    """

    rule: TurnRule = field(default_factory=TurnRule)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of rows, in which only the selected turns are trained."""
        if not self.assistant_only_loss or "messages" not in examples[0]:
            return super().torch_call(examples)
        examples_in_parts = []
        for example in examples:
            images = [example["image"]] if "image" in example else example["images"]
            messages = prepare_multimodal_messages(example["messages"], images=images)
            # No message is a prompt, in which assistant turns would not be trained
            conversation = Conversation(messages, num_prompt=0, arguments={"chat_template": self.chat_template})
            selection = self.rule.select_turns(conversation)
            # The rendered text, and the spans of its characters that are trained
            text, spans = self.rule.spans(selection, self.processor)
            # The template reads the parts from the first message.
            first_message, *later_messages = example["messages"]
            first_message = first_message | {"parts": text_parts(text, spans)}
            examples_in_parts.append(example | {"messages": [first_message, *later_messages]})
        collate_parts = replace(self, chat_template=PART_MARKERS)
        return DataCollatorForVisionLanguageModeling.torch_call(collate_parts, examples_in_parts)


def masking_collator(collate: DataCollatorForVisionLanguageModeling, rule: TurnRule) -> AssistantCollator:
    """Return a collator with the settings of TRL's collator that trains the assistant turns of a rule.

    Raises:
        ValueError: If the installed versions of TRL and transformers cannot find turns behind images.
    """
    if not can_train_answers_only(collate):
        raise ValueError(
            f"`assistant_only_loss=True` was given with images, TRL {trl.__version__} and transformers "
            f"{transformers.__version__}. Versions before TRL 1.10 and transformers 5.18 do not find the assistant's "
            "turns behind images. Install later ones, or set `assistant_only_loss=False`."
        )
    values = {setting.name: getattr(collate, setting.name) for setting in fields(collate)}
    values |= {"assistant_only_loss": True, "chat_template": training_template(collate.processor)}
    return AssistantCollator(**values, rule=rule)


def count_turns_of_images(dataset: object, rule: TurnRule) -> AssistantTurnCounts | None:
    """Count the assistant turns of a table with images, before its rows are tokenised.

    None is returned for a stream, and for a table without the column `messages`.
    """
    if not isinstance(dataset, Dataset) or "messages" not in dataset.column_names:
        return None
    counts = np.zeros(3, np.int64)  # the fields of `AssistantTurnCounts`
    for row in dataset.select_columns("messages"):
        try:
            counts += astuple(rule.select_turns(Conversation.from_row(row)).counts)
        except Exception:
            continue  # the row is bad, and is refused when it is processed
    return AssistantTurnCounts(*counts.tolist())
