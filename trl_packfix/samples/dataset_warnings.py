"""Warn if trained turns do not end, or if `per_turn` only repeats tokens, and show repeated warnings of TRL once.

With `per_turn` each assistant turn of a conversation is a sample, with its history, as generation sees it.
`make_samples.py` calls these functions with the samples that it made: rows with `input_ids` and `labels`. A token is
trained if its label is not -100.
"""

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
from .texts import arrow_column

logger = logging.getLogger(__name__)
trl_logger = logging.getLogger("trl.trainer.sft_trainer")

NUM_COMPARED = 100  # neighbouring turns are compared in this many conversations
NUM_ENDS = 100  # the end of the last trained turn is looked for in this many rows
KIND_LENGTH = 60  # warnings that agree in this many first characters are of one kind


def warn_if_turns_do_not_end(
    rows: Iterable[Mapping[str, Any]], name: str, tokenizer: Tokenizer, *, setting: str
) -> None:
    """Warn if trained turns have no end-of-turn token, so that the model would not learn to stop.

    Some templates write this token before the next message and not after the turn.

    Args:
        rows: Samples, of which the first `NUM_ENDS` are read.
        name: The dataset's name in the message.
        tokenizer: The tokenizer, or the processor of a model with images.
        setting: The config field that trains assistant turns only.
    """
    trained = (row["labels"] for row in islice(rows, NUM_ENDS) if max(row["labels"], default=-1) >= 0)
    ends = (find_end_without_token(labels, tokenizer) for labels in trained)
    end = next((end for end in ends if end is not None), None)
    if end is not None:
        logger.warning(
            "`%s=True` was given, and the chat template renders assistant turns of the %s dataset without an "
            "end-of-turn token: one ends in %r. The model would not learn to stop. Set `chat_template_path` "
            "to a template that ends every turn, such as TRL's training template for this model.",
            setting,
            name,
            end,
        )


def find_end_without_token(labels: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """Return the last characters of a sample's trained text if no special token ends it; None if one does.

    White space may follow the special token.
    """
    plain: Any = plain_tokenizer(tokenizer)
    # An added token may end a turn only if it is special, which </tool_call>, for example, is not
    added = plain.added_tokens_decoder
    special = {*(token for token in added if added[token].special), *plain.all_special_ids}
    trained = [label for label in labels if label != IGNORE_INDEX]
    for token in reversed(trained):
        if token in special:
            return None
        if plain.decode([token]).strip():
            break
    return str(plain.decode(trained)[-NUM_SHOWN:])


def warn_if_nothing_is_stripped(samples: Dataset, name: str) -> None:
    """Warn if, in the first conversations, each sample is the beginning of the next sample.

    Then the template strips nothing from earlier turns, and `per_turn` only makes the data longer.
    """
    rows = read_integer_column(samples, ROW_COLUMN)  # for each sample the index of its conversation, in rising order
    rows = rows[: np.searchsorted(rows, NUM_COMPARED)]  # samples of the rows 0 to 99
    lists = arrow_column(samples.select(range(len(rows))), "input_ids")
    tokens = [token_list.values.to_numpy() for token_list in lists]
    neighbours = zip(rows[:-1], rows[1:], tokens[:-1], tokens[1:], strict=True)
    pairs = [
        (before, after)
        for row_before, row_after, before, after in neighbours
        if row_before == row_after and len(before) and len(after)
    ]
    if pairs and all(np.array_equal(before, after[: len(before)]) for before, after in pairs):
        # The last sample of a conversation is the longest: later samples replace earlier ones in the dictionary
        length_of_row = dict(zip(rows.tolist(), map(len, tokens), strict=True))
        logger.warning(
            "`per_turn=True` was given, and the chat template renders each turn as the beginning of the next in all of "
            "the first %d conversations of the %s dataset. Their samples have %.1f times the tokens of the "
            "conversations and train the same answers. Set `per_turn=False` and `assistant_only_loss=True`, if all "
            "conversations are like this.",
            len(length_of_row),
            name,
            sum(map(len, tokens)) / sum(length_of_row.values()),
        )


class RepeatedMessages(logging.Filter):
    """A context manager in which the logger of TRL's trainer shows only the first warning of each kind.

    TRL logs some warnings for every row, with the end of the row's prompt in the text. So they differ, and Python's own
    filter of equal warnings would not help.
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
        """Return whether a message, of any level, is the first of its kind, and count it."""
        kind = record.getMessage()[:KIND_LENGTH]
        self.counts[kind] += 1
        return self.counts[kind] == 1

    def say(self, name: str) -> None:
        """Log for each kind how many warnings were not shown, with the name of the dataset."""
        for kind, count in self.counts.items():
            if count > 1:
                text = "%d more warnings of TRL about the %s dataset begin with %r and are not shown."
                trl_logger.warning(text, count - 1, name, kind)
