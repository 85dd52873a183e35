"""Train the assistant's turns only of rows with images: a collator of TRL's that finds them with every template."""

from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
import transformers
import trl
from datasets import Dataset
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..compat import masks_images
from .conversation import Conversation
from .recipes import training_template
from .row import MaskCounts
from .turns import PARTS, TurnRule, parts


@dataclass
class AssistantCollator(DataCollatorForVisionLanguageModeling):
    """TRL's collator of rows with images, which trains the turns that the rule chooses, with every template.

    It renders the rows itself, and gives TRL's code the text in parts that are trained or not.
    """

    rule: TurnRule = field(default_factory=TurnRule)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.assistant_only_loss or "messages" not in examples[0]:
            return super().torch_call(examples)
        in_parts = replace(self, chat_template=PARTS)
        return DataCollatorForVisionLanguageModeling.torch_call(
            in_parts, [self._in_parts(example) for example in examples]
        )

    def _in_parts(self, example: dict[str, Any]) -> dict[str, Any]:
        images = [example["image"]] if "image" in example else example["images"]
        messages = prepare_multimodal_messages(example["messages"], images=images)
        chosen = self.rule.choose(Conversation(messages, 0, {"chat_template": self.chat_template}))
        template = self.chat_template or self.processor.chat_template
        text, spans = self.rule.spans(chosen, self.processor, template)
        first, *others = example["messages"]
        return example | {"messages": [first | {"parts": parts(text, spans)}, *others]}


def masking_collator(collate: Any, processing_class: Any, rule: TurnRule) -> Any:
    """TRL's collator of rows with images, with the mask of assistant turns.

    Raises:
        ValueError: the versions of TRL and transformers cannot train the answers of rows with images.
    """
    if not masks_images(collate):
        raise ValueError(
            f"`assistant_only_loss=True` was given with images, TRL {trl.__version__} and transformers "
            f"{transformers.__version__}. Versions before TRL 1.10 and transformers 5.18 do not find the assistant's "
            "turns behind images. Install later ones, or set `assistant_only_loss=False`."
        )
    values = {setting.name: getattr(collate, setting.name) for setting in fields(collate)}
    values |= {"assistant_only_loss": True, "chat_template": training_template(processing_class)}
    return AssistantCollator(**values, rule=rule)


def count_turns_of_images(dataset: Any, rule: TurnRule) -> MaskCounts | None:
    """The assistant turns of a table with images, whose rows are tokenised when they are read; None for a stream."""
    if not isinstance(dataset, Dataset) or "messages" not in dataset.column_names:
        return None
    counts = np.zeros(3, np.int64)
    for row in dataset.select_columns("messages"):
        try:
            counts += astuple(rule.choose(Conversation.from_row(row)).counts)
        except Exception:
            continue  # a bad row, named when it is processed
    return MaskCounts(*counts.tolist())
