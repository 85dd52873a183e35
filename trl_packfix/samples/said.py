"""Warnings about chat templates and their rows, and the warnings of TRL that repeat for every row.

A template renders the fields of a message that it knows and leaves out the others without an error. Whether it leaves
one out is found by rendering rows with the field and without it.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import is_conversational_from_value

from ..layout import IGNORE_INDEX
from .checks import NUM_OF_STREAM, holds, rows_with
from .conversation import NUM_SHOWN, ROLES, Conversation, with_role

logger = logging.getLogger(__name__)

# A message may hold a thought under several names for several templates; transformers copies it to the others.
FIELDS = (("reasoning_content", "thinking", "reasoning"), ("tool_calls",))
NUM_DRAWN = 50  # rows to choose from, which differ in their shape
NUM_RENDERED = 10  # rows to render
NUM_COMPARED = 100  # conversations in which neighbouring turns are compared
NUM_LABELLED = 100  # rows in which the end of the last trained turn is looked for
KIND = 60  # characters in which warnings of one kind agree


def say_what_is_renamed(dataset: Dataset | IterableDataset, name: str) -> None:
    """Warn that roles of `conversations` of a table are renamed (`with_chat_roles`), with the number of rows."""
    if not isinstance(dataset, Dataset):
        return
    first: dict[str, Any] = next(iter(dataset), {})  # an empty dataset is refused
    if not first.get("conversations") or not is_conversational_from_value(first):
        return
    num_rows = int(rows_with(dataset, "from", values=ROLES).sum())
    if num_rows:
        logger.warning(
            "%d of %d rows of the %s dataset have the roles `human` or `gpt` in `conversations`. They are renamed to "
            "`user` and `assistant`, which chat templates know.",
            *(num_rows, len(dataset), name),
        )


def say_what_is_left_out(
    dataset: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    *,
    chat_template: str | None,
    per_turn: bool,
) -> None:
    """Warn of fields that the chat template leaves out, and of roles that it does not know, with the number of rows.

    Args:
        chat_template: the template that TRL uses instead of the tokenizer's own.
        per_turn: whether a message is rendered at its own turn, or in the whole conversation.
    """
    for fields in FIELDS:
        rows, count = _holding(dataset, fields)
        holders = [
            (conversation, i)
            for conversation in _conversations(rows, chat_template, fields)
            for i in _places(conversation, fields)
        ]
        left_out = [
            holder for holder in holders if _is_left_out(*holder, fields, tokenizer=tokenizer, per_turn=per_turn)
        ]
        if left_out:
            names = " or ".join(f"`{field}`" for field in fields if holds(rows, field))
            if per_turn or any(
                _is_left_out(*holder, fields, tokenizer=tokenizer, per_turn=True) for holder in left_out
            ):
                advice = "`chat_template_path` to a template that renders it, or write it into `content`"
            else:  # it is left out of earlier turns only
                advice = "`per_turn=True`, which trains each turn as it is rendered when it is the last"
            logger.warning(
                "%s of the %s dataset have %s in their messages, and the chat template leaves it out: %d of %d such "
                "messages in a sample are rendered as without it. The model never sees what is left out. Set %s.",
                *(count, name, names, len(left_out), len(holders), advice),
            )
    rows, count = _holding(dataset, ("role",), ROLES)
    for conversation in _conversations(rows, chat_template, ("role",)):
        messages = conversation.messages
        texts = [
            _text(conversation, variant, tokenizer) for variant in (messages, [with_role(m, "role") for m in messages])
        ]
        if None not in texts and texts[0] != texts[1]:
            logger.warning(
                "%s of the %s dataset have the roles `human` or `gpt`, and the chat template renders them otherwise "
                "than `user` and `assistant`. The model would be trained on turns that it never sees. Rename the "
                "roles, or set `chat_template_path` to a template that knows them.",
                *(count, name),
            )
            return


def say_if_turns_do_not_end(
    rows: Iterable[dict[str, Any]], name: str, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, *, setting: str
) -> None:
    """Warn if a trained turn has no end-of-turn token: the template puts it in front of the next message.

    Args:
        rows: tokenised.
        setting: the one by which assistant turns are trained.
    """
    trained = (row["labels"] for row in islice(rows, NUM_LABELLED) if max(row["labels"], default=-1) >= 0)
    end = next((end for labels in trained if (end := unended(labels, tokenizer)) is not None), None)
    if end is not None:
        logger.warning(
            "`%s=True` was given, and the chat template renders assistant turns of the %s dataset without an "
            "end-of-turn token: one ends in %r. The model would not learn to stop. Set `chat_template_path` "
            "to a template that ends every turn, such as TRL's training template for this model.",
            *(setting, name, end),
        )


def _places(conversation: Conversation, fields: tuple[str, ...]) -> list[int]:
    """The first and last messages that hold a field."""
    held = [i for i, message in enumerate(conversation.messages) if any(message.get(field) for field in fields)]
    return sorted({*held[:2], *held[-2:]})


def _is_left_out(
    conversation: Conversation, i: int, fields: tuple[str, ...], *, tokenizer: Any, per_turn: bool
) -> bool:
    """Whether message `i` is rendered as without the fields, at its own turn or in the whole conversation."""
    messages = conversation.messages[: i + 1] if per_turn else conversation.messages
    without = {key: value for key, value in messages[i].items() if key not in fields}
    text = _text(conversation, messages, tokenizer)  # None in a bad row, which is named elsewhere
    return text is not None and text == _text(conversation, [*messages[:i], without, *messages[i + 1 :]], tokenizer)


def _text(conversation: Conversation, messages: list[dict[str, Any]], tokenizer: Any) -> str | None:
    try:
        return conversation.text(messages, tokenizer)
    except Exception:  # a template raises what it wants
        return None


def _conversations(
    rows: Iterable[dict[str, Any]], chat_template: str | None, fields: tuple[str, ...]
) -> list[Conversation]:
    """Conversations of different shapes: of the roles in order, and which messages hold a field."""
    shapes: dict[Any, Conversation] = {}
    for row in rows:
        try:
            conversation = Conversation.from_row(row)
            shape = tuple((m["role"], any(m.get(field) for field in fields)) for m in conversation.messages)
        except Exception:
            continue  # a bad row, named elsewhere
        if chat_template is not None:
            conversation.arguments.setdefault("chat_template", chat_template)
        shapes.setdefault(shape, conversation)
    return list(shapes.values())[:NUM_RENDERED]


def _holding(
    dataset: Dataset | IterableDataset, keys: tuple[str, ...], values: Collection[str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Some rows whose messages hold one of the keys, with one of the values if they are given; and how many rows do."""
    if isinstance(dataset, IterableDataset):
        rows = list(dataset.take(NUM_OF_STREAM))
        holding = [row for row in rows if any(holds([row], key, values) for key in keys)]
        return holding, f"{len(holding)} of the first {len(rows)} rows"
    masks = [rows_with(dataset, key, values=values) for key in keys]
    places = np.flatnonzero(np.any(masks, axis=0))
    drawn = places[np.unique(np.linspace(0, len(places) - 1, NUM_DRAWN).astype(int))] if len(places) else places
    return list(dataset.select(drawn).with_format(None)), f"{len(places)} of {len(dataset)} rows"


def unended(labels: Sequence[int], tokenizer: Any) -> str | None:
    """The text at the end of a sample, if no special token ends its turn; else None. White space may follow the token.

    Args:
        tokenizer: a tokenizer, or a processor that has one.
    """
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    added = tokenizer.added_tokens_decoder  # also tokens such as </tool_call>, which end no turn
    special = {*(token for token in added if added[token].special), *tokenizer.all_special_ids}
    trained = [label for label in labels if label != IGNORE_INDEX]
    for token in reversed(trained):
        if token in special:
            return None
        if tokenizer.decode([token]).strip():
            break
    return tokenizer.decode(trained)[-NUM_SHOWN:]


def say_if_nothing_is_stripped(
    name: str, conversations: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, grows: npt.NDArray[np.int64]
) -> None:
    """Warn if, in the first conversations, every sample is the beginning of the next: then `per_turn` gives nothing.

    Args:
        conversations: of each sample the number of its conversation, (N,).
        lengths: of each sample its tokens, (N,).
        grows: of each sample whether the one before it of the same conversation is its beginning, (N,).
    """
    num = int(np.searchsorted(conversations, NUM_COMPARED))
    conversations, lengths, grows = conversations[:num], lengths[:num], grows[:num]
    same = (conversations[1:] == conversations[:-1]) & (lengths[1:] > 0) & (lengths[:-1] > 0)
    if same.any() and grows[1:][same].all():
        last = np.append(conversations[1:] != conversations[:-1], True)
        logger.warning(
            "`per_turn=True` was given, and the chat template renders each turn as the beginning of the next in all of "
            "the first %d conversations of the %s dataset. Their samples have %.1f times the tokens of the "
            "conversations and train the same answers. Set `per_turn=False` and `assistant_only_loss=True`, if all "
            "conversations are like this.",
            *(len(np.unique(conversations)), name, lengths.sum() / lengths[last].sum()),
        )


class Repeats(logging.Filter):
    """While it is entered, the logger of TRL's trainer shows the first warning of each kind.

    TRL logs some warnings once for each text, and the text has the end of a prompt, which is another in every row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Repeats":
        _logger().addFilter(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _logger().removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage()[:KIND]
        self.counts[kind] += 1
        return self.counts[kind] == 1

    def say(self, name: str) -> None:
        """One line for each kind that was repeated.

        Args:
            name: of the dataset.
        """
        for kind, count in self.counts.items():
            if count > 1:
                _logger().warning(
                    "%d more warnings of TRL about the %s dataset begin with %r and are not shown.",
                    count - 1,
                    name,
                    kind,
                )


def _logger() -> logging.Logger:
    return logging.getLogger("trl.trainer.sft_trainer")
