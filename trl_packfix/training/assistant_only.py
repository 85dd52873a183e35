"""Train the assistant's turns only (`assistant_only_loss=True`), with every chat template, and count them.

TRL reads the `{% generation %}` markers of a template, and brings templates with markers for some models. It refuses
all others when the trainer is constructed. So TRL is constructed without the setting, and what it would do is done
here: tables and streams are tokenised with `AssistantMask`, rows with images go through a collator that marks turns.
"""

import logging
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import transformers
import trl
from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import get_dataset_column_names, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..compat import main_process_first, masks_images
from ..data.cache_files import Cached
from ..data.masks import PARTS, AssistantMask, MaskCounts, TurnRule, has_markers, parts
from ..data.reader import BAD_ROW
from ..data.turns import COLUMNS, Conversation
from .bad_rows import TOKENS, reason, refuse_or_name, refuse_row_of_stream, without_bad_rows
from .config import SFTConfig
from .messages import NUM_OF_STREAM, rows_with, say_if_turns_do_not_end

logger = logging.getLogger(__name__)

COUNTS = {name: f"packfix_{name}" for name in ("turns", "context", "earlier")}  # columns while counting
TRAIN_KEYS = ("weight", "train", "training")  # of messages: OpenAI's name, and those of axolotl


def has_conversations(dataset: Dataset | IterableDataset) -> bool:
    """Whether the rows of a dataset that is not tokenised are conversations."""
    columns = get_dataset_column_names(dataset)
    chat_columns = [column for column in ("messages", "conversations", "prompt", "completion") if column in columns]
    if (
        not chat_columns
        or "input_ids" in columns
        or (isinstance(dataset, Dataset) and dataset.format["type"] == "custom")
    ):
        return False  # tokenised; TRL refuses a transform
    row: dict[str, Any] = next(iter(dataset.select_columns(chat_columns)), {})
    return not any(isinstance(row.get(column), str) for column in chat_columns)  # a malformed row is found later


def check_messages(args: SFTConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse datasets without conversations, and messages whose weight would not be read, before the model is loaded.

    Raises:
        ValueError: `assistant_only_loss` and rows that are no conversations; messages with a weight of 0 in rows of
            which every message is trained.
    """
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *eval_sets.items()]:
        if not isinstance(dataset, Dataset | IterableDataset):
            continue
        if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
            continue  # refused by TRL
        if next(iter(dataset.take(1)), None) is None:
            continue  # refused by others
        if args.assistant_only_loss and name == "train":  # as in TRL, which evaluates every token of a text
            _check_conversational(dataset, name)
        own = args.message_train_key
        for key in [] if own is None else dict.fromkeys((own, *TRAIN_KEYS)):
            is_read = args.assistant_only_loss or args.per_turn
            if not (is_read and key == own):
                _check_unread(dataset, name, args, key=key)


def _check_conversational(dataset: Dataset | IterableDataset, name: str) -> None:
    if not has_conversations(dataset):
        raise ValueError(
            f"`assistant_only_loss=True` was given, and the {name} dataset has the columns "
            f"{get_dataset_column_names(dataset)}. Its rows are no conversations, so they have no assistant turns. "
            "Give `messages` (or `conversations`), or `prompt` and `completion` as lists of messages; or set "
            "`assistant_only_loss=False`."
        )


def _check_unread(dataset: Dataset | IterableDataset, name: str, args: SFTConfig, *, key: str) -> None:
    """Refuse messages that a key leaves out of training if the key is not read."""
    columns = get_dataset_column_names(dataset)
    trained = [column for column in ("completion", "messages", "conversations") if column in columns]  # no prompt
    if not trained or "input_ids" in columns:
        return
    if isinstance(dataset, Dataset):
        rows: Any = dataset.select(np.flatnonzero(rows_with(dataset, key, trained)))
        rows = rows.select_columns(trained).with_format(None)
    else:
        rows = dataset.select_columns(trained).take(NUM_OF_STREAM)
    read = args.message_train_key if key != args.message_train_key else None
    count = sum(
        any(_is_untrained(message, key) and read not in message for column in trained for message in row[column] or ())
        for row in rows
    )
    if count:
        of = f"{len(dataset)} rows" if isinstance(dataset, Dataset) else f"the first {NUM_OF_STREAM} rows"
        if key != args.message_train_key:
            cause = f"`message_train_key={args.message_train_key!r}` reads another key"
            remedy = f"`message_train_key={key!r}`"
        else:
            cause = "`assistant_only_loss=False` trains every message"
            remedy = "`assistant_only_loss=True`, which trains the assistant's messages without them"
        raise ValueError(
            f"{count} of {of} of the {name} dataset have messages with `{key}` 0, and {cause}, so they would be "
            f"trained. Set {remedy}, or `message_train_key=None` if the key means something else."
        )


def _is_untrained(message: Any, key: str) -> bool:
    weight = message.get(key) if isinstance(message, dict) else None
    return isinstance(weight, int | float) and weight == 0


def what_is_trained(args: SFTConfig, dataset: Any) -> str:
    """The rule by which tokens of a training set are trained, and the setting that chose it."""
    is_table = isinstance(dataset, Dataset | IterableDataset)
    columns = get_dataset_column_names(dataset) if is_table else []
    if args.per_turn:
        return "each assistant turn after its prompt (`per_turn`)"
    if args.assistant_only_loss:
        return "assistant turns (`assistant_only_loss`)"
    if "labels" in columns or {"completion_mask", "assistant_masks"} & {*columns}:
        return "the labels of the rows"
    if "prompt" in columns and "completion" in columns and args.completion_only_loss is not False:
        return "completions (`completion_only_loss`)"
    if is_table and has_conversations(dataset):
        return "every token of all messages; `assistant_only_loss=True` trains those of the assistant"
    return "every token"


def training_template(processing_class: Any) -> str | None:
    """TRL's template with markers for this tokenizer; None if its own has markers, or if TRL has none for it."""
    if has_markers(processing_class.chat_template):
        return None
    try:
        return get_training_chat_template(processing_class)
    except ValueError:  # TRL knows no template like this one: its turns are found one by one
        return None


def mask_turns(
    dataset: Dataset | IterableDataset,
    name: str,
    args: SFTConfig,
    *,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    mask: AssistantMask,
    marks: bool,
    is_training_set: bool,
) -> tuple[Dataset | IterableDataset, MaskCounts | None]:
    """Tokenised rows with the labels of assistant turns and their other columns; and the counts of a table.

    Args:
        name: of the dataset, for messages.
        marks: with `bad_rows="drop"`, keep rows that cannot be rendered as rows without tokens, with the reason in the
            column `BAD_ROW`, so that they are counted.
        is_training_set: whether to say that turns do not end, and which are not trained.

    Raises:
        ValueError: rows cannot be rendered (`bad_rows="raise"`), or none can.
    """
    columns = get_dataset_column_names(dataset)
    others = [column for column in columns if column not in COLUMNS]
    kwargs: dict[str, Any] = {"tokenizer": processing_class, "mask": mask}
    drops = args.bad_rows == "drop"
    removed = [column for column in columns if column not in others]
    if isinstance(dataset, IterableDataset):
        kwargs |= {"name": name, "drops": drops}
        dataset = dataset.map(_row_of_stream, with_indices=True, fn_kwargs=kwargs, remove_columns=removed)
        dataset = without_bad_rows(dataset) if drops and not marks else dataset
        if is_training_set:
            say_if_turns_do_not_end(dataset.take(NUM_OF_STREAM), name, processing_class, setting="assistant_only_loss")
        return dataset, None
    if dataset.format["type"] == "custom":
        return dataset, None  # TRL refuses a transform
    numbers = {column: Value("int64") for column in COUNTS.values()}
    with main_process_first():
        tokenised = dataset.map(
            Cached(_row),
            fn_kwargs=kwargs,
            remove_columns=removed,
            features=Features({column: dataset.features[column] for column in others} | TOKENS | numbers),
            num_proc=args.dataset_num_proc,
            desc=f"Tokenizing {name} dataset",
        )
    refuse_or_name(tokenised, name, drops)
    counts = MaskCounts(*(int(np.sum(tokenised.with_format("numpy")[column])) for column in COUNTS.values()))
    tokenised = tokenised.remove_columns(list(numbers))
    if is_training_set:
        say_if_turns_do_not_end(tokenised, name, processing_class, setting="assistant_only_loss")
    return (tokenised if marks and drops else without_bad_rows(tokenised)), counts


def _row(row: Any, tokenizer: Any, mask: AssistantMask) -> dict[str, Any]:
    row = dict(row)
    try:
        sample, counts = mask.sample(row, tokenizer)
    except Exception as error:
        return {"input_ids": [], "labels": [], BAD_ROW: reason(row, error, text_field="")} | _columns(
            MaskCounts(0, 0, 0)
        )
    return sample | {BAD_ROW: ""} | _columns(counts)


def _columns(counts: MaskCounts) -> dict[str, int]:
    return {COUNTS[name]: count for name, count in asdict(counts).items()}


def _row_of_stream(row: Any, index: int, name: str, *, drops: bool, **kwargs: Any) -> dict[str, Any]:
    sample = {key: value for key, value in _row(row, **kwargs).items() if key not in COUNTS.values()}
    if drops:
        return sample
    if why := sample.pop(BAD_ROW):
        refuse_row_of_stream(name, index, why)
    return sample


# Rows with images


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
        mask = AssistantMask(self.rule, self.chat_template)
        chosen = self.rule.choose(Conversation(messages, 0, {"chat_template": self.chat_template}))
        text, spans = mask.spans(chosen, self.processor, self.chat_template or self.processor.chat_template)
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


def count_turns(dataset: Any, rule: TurnRule) -> MaskCounts | None:
    """The assistant turns of a table with images, whose rows are tokenised when they are read; None for a stream."""
    if not isinstance(dataset, Dataset) or "messages" not in dataset.column_names:
        return None
    counts = np.zeros(3, np.int64)
    for row in dataset.select_columns("messages"):
        try:
            counts += list(asdict(rule.choose(Conversation.from_row(row)).counts).values())
        except Exception:
            continue  # a bad row, named when it is processed
    return MaskCounts(*counts.tolist())
