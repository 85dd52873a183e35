"""Warnings that TRL repeats for every row: the first is shown, the others are counted."""

import logging
from collections import Counter
from typing import Any

KIND = 60  # characters in which warnings of one kind agree


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
