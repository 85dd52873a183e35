"""Rows with images: measured before training, and the collator that finds assistant turns in them.

Only what a processor makes of a row says how many tokens an image has, so it runs once for every row before training,
and the numbers that planning needs are cached, but no pixels. Images are decoded then, since a broken one must be found
before training. They are not processed where another of the same size was (`SizeProcessor`), except in every 16th row,
whose numbers are compared. A worker of the data loader later runs the processor again, and must get the same tokens.
"""

import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import transformers
import trl
from datasets import Dataset, Features, List, Value
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..compat import masks_images
from .conversation import Conversation
from .make_samples import columns_of_batch
from .processor import RowProcessor, images_of, with_images
from .recipes import Recipe, Row, samples_of_turns, training_template
from .row import (
    BAD_ROW_COLUMN,
    BOOKKEEPING_COLUMNS,
    MAX_ROWS_NAMED,
    AssistantTurnCounts,
    HashedMapFunction,
    Sample,
    bad_row_mask,
    hash_modules_of,
)
from .turns import PART_MARKERS, TurnRule, text_parts

logger = logging.getLogger(__name__)

CHECKED = 16  # of so many rows one is processed, to compare with what the sizes of its images give
# A column of each, and its value in a bad row. To sort documents by their beginnings: tokens, first and stop of each
# image one after the other, hashes of images.
KINDS: dict[str, tuple[object, object]] = {
    **dict.fromkeys(("length", "trained"), (Value("int64"), 0)),
    "first_is_labelled": (Value("bool"), False),
    **dict.fromkeys(("image_stop", "image_count", "image_values", "image_squares"), (Value("int64"), 0)),
    "tokens": (List(Value("uint32")), []),
    "is_target": (List(Value("bool")), []),
    "spans": (List(Value("int64")), []),
    "contents": (List(Value("binary")), []),
    "digest": (Value("binary"), b""),
    "differs": (Value("bool"), False),
}


def features_of(rule: TurnRule | None) -> Features:
    numbers = {} if rule is None else dict.fromkeys(BOOKKEEPING_COLUMNS, Value("int64"))
    return Features({name: kind for name, (kind, _) in KINDS.items()} | {BAD_ROW_COLUMN: Value("string")} | numbers)


@dataclass(frozen=True)
class ProcessedImages(Recipe):
    """What is measured of a row with images, or of each of its assistant turns that is trained.

    A conversation without such a turn is one sample, in which nothing is trained.
    """

    process: RowProcessor
    rule: TurnRule | None = None  # which turns are trained; None: a sample is a row
    every: int = 1  # the images of one in so many rows are processed; of the others, one of each size is
    bad: ClassVar[Mapping[str, object]] = {name: value for name, (_, value) in KINDS.items()}

    @property
    def setting(self) -> str:  # type: ignore[override]  # it is never set
        return "" if self.rule is None else "per_turn"

    def samples(self, row: Row, number: int) -> list[Sample]:
        rule = self.rule
        if rule is None:
            return [self._measure_rows(row, number)]

        def make(conversation: Conversation, turn: int) -> Sample:
            return self._measure_rows(rule.row_of_turn(conversation, turn, self.process.processor), number)

        return samples_of_turns(rule.select_turn(Conversation.from_row(row, images_of(row))), make, row)

    def _measure_rows(self, row: Row, number: int) -> Sample:
        # Reading the row decodes its images, so a missing or broken one is found here.
        row = with_images(row)
        by_size = None
        if self.every > 1:
            try:
                by_size = self.process.by_size.measured(row)
            except Exception:  # the processor itself then says what is wrong with the row
                by_size = None
        if by_size is not None and number % self.every:
            return Sample(by_size)
        numbers = self.process.measured(row)
        return Sample(numbers | {"differs": self.every > 1 and by_size != numbers})


def measure(
    dataset: Dataset,
    process: RowProcessor,
    name: str,
    *,
    num_proc: int | None,
    drops: bool,
    rule: TurnRule | None = None,
) -> Dataset:
    """Run the processor on every row and keep the numbers of `KINDS`; `datasets` caches them beside the data.

    With a rule, each assistant turn that is trained is a document, and `NUMBERS` note which. With `drops`, rows that
    cannot be processed get length 0 and their reason in `BAD_ROW_COLUMN`.
    """
    if dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has images and a transform (`Dataset.with_transform`), and "
            "packing is on. Packing must know the length of every document before training, and a transform may make "
            "another image at each reading. Materialise it with `Dataset.map`, or set `packing=False`."
        )

    def run(every: int) -> Dataset:
        return dataset.map(
            HashedMapFunction(columns_of_batch, users_code=hash_modules_of(process.processor)),
            with_indices=True,
            batched=True,
            batch_size=1,
            fn_kwargs={"recipe": ProcessedImages(process, rule, every)},
            remove_columns=dataset.column_names,
            features=features_of(rule),
            num_proc=num_proc,
            desc=f"Measuring {name} dataset",
        )

    every = CHECKED if process.depends_on_sizes else 1
    measures = run(every)
    differs = np.flatnonzero(measures["differs"])
    if len(differs):
        logger.warning(
            "%d of %d compared rows of the %s dataset have another length than the sizes of their images give; the "
            "first is row %d. The processor runs on every row instead, which takes longer.",
            *(len(differs), -(-len(measures) // CHECKED), name, differs[0]),
        )
        measures = run(1)
    bad = bad_row_mask(measures)
    if bad.any() and not drops:
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
    """TRL's collator of rows with images, which trains the turns that the rule chooses, with every template.

    It renders the rows itself, and gives TRL's code the text in parts that are trained or not.
    """

    rule: TurnRule = field(default_factory=TurnRule)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.assistant_only_loss or "messages" not in examples[0]:
            return super().torch_call(examples)
        in_parts = []
        for example in examples:
            images = [example["image"]] if "image" in example else example["images"]
            messages = prepare_multimodal_messages(example["messages"], images=images)
            chosen = self.rule.select_turn(Conversation(messages, 0, {"chat_template": self.chat_template}))
            text, spans = self.rule.spans(chosen, self.processor)
            first, *others = example["messages"]
            in_parts.append(example | {"messages": [first | {"parts": text_parts(text, spans)}, *others]})
        return DataCollatorForVisionLanguageModeling.torch_call(replace(self, chat_template=PART_MARKERS), in_parts)


def masking_collator(collate: DataCollatorForVisionLanguageModeling, rule: TurnRule) -> AssistantCollator:
    if not masks_images(collate):
        raise ValueError(
            f"`assistant_only_loss=True` was given with images, TRL {trl.__version__} and transformers "
            f"{transformers.__version__}. Versions before TRL 1.10 and transformers 5.18 do not find the assistant's "
            "turns behind images. Install later ones, or set `assistant_only_loss=False`."
        )
    values = {setting.name: getattr(collate, setting.name) for setting in fields(collate)}
    values |= {"assistant_only_loss": True, "chat_template": training_template(collate.processor)}
    return AssistantCollator(**values, rule=rule)


def count_turns_of_images(dataset: object, rule: TurnRule) -> AssistantTurnCounts | None:
    """The assistant turns of a table with images, whose rows are tokenised when they are read; None for a stream."""
    if not isinstance(dataset, Dataset) or "messages" not in dataset.column_names:
        return None
    counts = np.zeros(3, np.int64)
    for row in dataset.select_columns("messages"):
        try:
            counts += astuple(rule.select_turn(Conversation.from_row(row)).counts)
        except Exception:
            continue  # a bad row, named when it is processed
    return AssistantTurnCounts(*counts.tolist())
