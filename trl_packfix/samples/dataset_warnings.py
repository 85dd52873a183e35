"""Warnings about chat templates and their rows, and the warnings of TRL that repeat for every row.

A template renders the fields of a message that it knows and leaves out the others without an error. Whether it leaves
one out is found by rendering rows with the field and without it.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from ..layout import IGNORE_INDEX
from .checks import columns_of, first_rows, row_holds, rows_holding, rows_with
from .conversation import NUM_SHOWN, ROLES, Conversation, Message, Tokenizer, plain_tokenizer, with_role
from .recipes import Recipe
from .row import ROW_COLUMN, read_integer_column
from .texts import forms_of_table, text_columns

logger = logging.getLogger(__name__)
trl_logger = logging.getLogger("trl.trainer.sft_trainer")

# A message may hold a thought under several names for several templates; transformers copies it to the others.
FIELDS = (("reasoning_content", "thinking", "reasoning"), ("tool_calls",))
NUM_DRAWN = 50  # rows to choose from, which differ in their shape
NUM_RENDERED = 10  # rows to render
NUM_COMPARED = 100  # conversations in which neighbouring turns are compared
NUM_LABELLED = 100  # rows in which the end of the last trained turn is looked for
KIND = 60  # characters in which warnings of one kind agree


def warn_of_renamed_roles(dataset: Dataset | IterableDataset, name: str) -> None:
    """Warn that roles of `conversations` of a table are renamed (`with_chat_roles`), with the number of rows."""
    is_table = isinstance(dataset, Dataset)
    num_rows = int(rows_with(dataset, "from", ("conversations",), values=ROLES).sum()) if is_table else 0
    if num_rows:
        logger.warning(
            "%d of %d rows of the %s dataset have the roles `human` or `gpt` in `conversations`. They are renamed to "
            "`user` and `assistant`, which chat templates know.",
            *(num_rows, len(dataset), name),
        )


def warn_if_prompt_is_unread(dataset: Dataset | IterableDataset, name: str, text_field: str) -> None:
    """Warn that a column `prompt` without a `completion` is not tokenised beside another text."""
    columns = columns_of(dataset)
    if "prompt" in columns and "completion" not in columns:
        if isinstance(dataset, Dataset):
            forms = [form for form, has in forms_of_table(dataset, text_field) if has.any()]
        else:
            forms = [text_columns(row, text_field) for row in first_rows(dataset)]
        read = " and ".join(f"`{column}`" for column in dict.fromkeys(column for form in forms for column in form))
        logger.warning(
            "The %s dataset has a column `prompt` and no `completion`. %s is tokenised, and `prompt` is not.",
            *(name, read),
        )


def warn_of_what_is_left_out(dataset: Dataset | IterableDataset, name: str, recipe: Recipe) -> None:
    """Warn of fields that the chat template leaves out, and of roles that it does not know, with the number of rows.

    A recipe that splits conversations renders a message at its turn.
    """
    tokenizer = recipe.tokenizer
    per_turn = recipe.splits
    for fields in FIELDS:
        rows, conversations, count = _holding(dataset, recipe, fields)
        holders = []
        for conversation in conversations:
            held = [i for i, message in enumerate(conversation.messages) if any(map(message.get, fields))]
            holders += [(conversation, i) for i in sorted({*held[:2], *held[-2:]})]
        left_out = [holder for holder in holders if _is_left_out(*holder, fields, tokenizer=tokenizer, alone=per_turn)]
        if left_out:
            names = " or ".join(f"`{field}`" for field in fields if row_holds(rows, field))
            if per_turn or any(_is_left_out(*holder, fields, tokenizer=tokenizer, alone=True) for holder in left_out):
                advice = "`chat_template_path` to a template that renders it, or write it into `content`"
            else:  # it is left out of earlier turns only
                advice = "`per_turn=True`, which trains each turn as it is rendered when it is the last"
            logger.warning(
                "%s of the %s dataset have %s in their messages, and the chat template leaves it out: %d of %d such "
                "messages in a sample are rendered as without it. The model never sees what is left out. Set %s.",
                *(count, name, names, len(left_out), len(holders), advice),
            )
    _, conversations, count = _holding(dataset, recipe, ("role",), values=ROLES)
    for conversation in conversations:
        renamed = [with_role(message, "role") for message in conversation.messages]
        texts = [_text_of_field(conversation, messages, tokenizer) for messages in (conversation.messages, renamed)]
        if None not in texts and texts[0] != texts[1]:
            logger.warning(
                "%s of the %s dataset have the roles `human` or `gpt`, and the chat template renders them otherwise "
                "than `user` and `assistant`. The model would be trained on turns that it never sees. Rename the "
                "roles, or set `chat_template_path` to a template that knows them.",
                *(count, name),
            )
            return


def _is_left_out(
    conversation: Conversation, i: int, fields: tuple[str, ...], *, tokenizer: Tokenizer, alone: bool
) -> bool:
    """Whether message `i` is rendered as without the fields, at its own turn or in the whole conversation."""
    messages = conversation.messages[: i + 1] if alone else conversation.messages
    without = {key: value for key, value in messages[i].items() if key not in fields}
    text = _text_of_field(conversation, messages, tokenizer)
    return text is not None and text == _text_of_field(
        conversation, [*messages[:i], without, *messages[i + 1 :]], tokenizer
    )


def _text_of_field(conversation: Conversation, messages: list[Message], tokenizer: Tokenizer) -> str | None:
    try:
        return conversation.text(messages, tokenizer)
    except Exception:  # a template raises what it wants; a bad row is named elsewhere
        return None


def _holding(
    dataset: Dataset | IterableDataset, recipe: Recipe, keys: tuple[str, ...], *, values: Collection[str] | None = None
) -> tuple[list[Mapping[str, Any]], list[Conversation], str]:
    """Some rows whose messages hold one of the keys, with one of the values if they are given; and how many rows do.

    Beside the rows, conversations of different shapes: of the roles in order, and which messages hold a key.
    """
    holding, of = rows_holding(dataset, keys, values)
    drawn = np.unique(np.linspace(0, len(holding) - 1, NUM_DRAWN).astype(int)) if len(holding) else ()
    rows = [holding[int(i)] for i in drawn]
    shapes: dict[object, Conversation] = {}
    for row in rows:
        try:
            conversation = Conversation.from_row(row)
            shape = tuple((message["role"], any(map(message.get, keys))) for message in conversation.messages)
        except Exception:
            continue  # a bad row, named elsewhere
        if recipe.chat_template is not None:
            conversation.arguments.setdefault("chat_template", recipe.chat_template)
        shapes.setdefault(shape, conversation)
    return rows, list(shapes.values())[:NUM_RENDERED], f"{len(holding)} of {of}"


def warn_if_turns_do_not_end(
    rows: Iterable[Mapping[str, Any]], name: str, tokenizer: Tokenizer, *, setting: str
) -> None:
    """Warn if a turn trained by this setting has no end-of-turn token: the template puts it before the next message."""
    trained = (row["labels"] for row in islice(rows, NUM_LABELLED) if max(row["labels"], default=-1) >= 0)
    end = next((end for labels in trained if (end := find_unended_turns(labels, tokenizer)) is not None), None)
    if end is not None:
        logger.warning(
            "`%s=True` was given, and the chat template renders assistant turns of the %s dataset without an "
            "end-of-turn token: one ends in %r. The model would not learn to stop. Set `chat_template_path` "
            "to a template that ends every turn, such as TRL's training template for this model.",
            *(setting, name, end),
        )


def find_unended_turns(labels: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The text at the end of a sample, if no special token ends its turn; else None. White space may follow it."""
    plain: Any = plain_tokenizer(tokenizer)
    added = plain.added_tokens_decoder  # also tokens such as </tool_call>, which end no turn
    special = {*(token for token in added if added[token].special), *plain.all_special_ids}
    trained = [label for label in labels if label != IGNORE_INDEX]
    for token in reversed(trained):
        if token in special:
            return None
        if plain.decode([token]).strip():
            break
    return str(plain.decode(trained)[-NUM_SHOWN:])


def warn_if_nothing_is_stripped(samples: Dataset, name: str) -> None:
    """Warn if, in the first conversations, every sample is the beginning of the next: then `per_turn` gives nothing."""
    rows = read_integer_column(samples, ROW_COLUMN)
    rows = rows[: np.searchsorted(rows, NUM_COMPARED)]
    column = "input_ids" if "input_ids" in samples.column_names else "tokens"
    lists = samples.select_columns(column).select(range(len(rows))).with_format("arrow")[:][column]
    tokens = [each.values.to_numpy() for each in lists]
    neighbours = zip(rows[:-1], rows[1:], tokens[:-1], tokens[1:], strict=True)
    pairs = [(one, after) for row, other, one, after in neighbours if row == other and len(one) and len(after)]
    if pairs and all(np.array_equal(before, after[: len(before)]) for before, after in pairs):
        last = dict(zip(rows.tolist(), map(len, tokens), strict=True))  # of each conversation
        logger.warning(
            "`per_turn=True` was given, and the chat template renders each turn as the beginning of the next in all of "
            "the first %d conversations of the %s dataset. Their samples have %.1f times the tokens of the "
            "conversations and train the same answers. Set `per_turn=False` and `assistant_only_loss=True`, if all "
            "conversations are like this.",
            *(len(last), name, sum(map(len, tokens)) / sum(last.values())),
        )


class RepeatedMessages(logging.Filter):
    """While it is entered, the logger of TRL's trainer shows the first warning of each kind.

    TRL logs some warnings once for each text, and the text has the end of a prompt, which is another in every row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "RepeatedMessages":
        trl_logger.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        trl_logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage()[:KIND]
        self.counts[kind] += 1
        return self.counts[kind] == 1

    def say(self, name: str) -> None:
        """One line for each kind that was repeated, with the name of the dataset."""
        for kind, count in self.counts.items():
            if count > 1:
                text = "%d more warnings of TRL about the %s dataset begin with %r and are not shown."
                trl_logger.warning(text, count - 1, name, kind)
