"""Warnings about trained turns, and the warnings of TRL that repeat for every row."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset

from ..layout import IGNORE_INDEX
from .conversation import NUM_SHOWN, Tokenizer, plain_tokenizer
from .row import ROW_COLUMN, read_integer_column

logger = logging.getLogger(__name__)
trl_logger = logging.getLogger("trl.trainer.sft_trainer")

NUM_COMPARED = 100  # conversations in which neighbouring turns are compared
NUM_LABELLED = 100  # rows in which the end of the last trained turn is looked for
KIND = 60  # characters in which warnings of one kind agree


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
