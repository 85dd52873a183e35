"""Documents that begin alike, and the rows that a trainer computes of them."""

import numpy as np
from datasets import Dataset

from trl_packfix.layout import LAYOUT_KEY, SharedRowsLayout


def forest(num: int = 40, seed: int = 0) -> Dataset:
    """Return tokenised documents of 24 to 90 tokens: a beginning, three families with stems of their own, and the rest.

    Some documents train tokens that others only read, some train all; two are the same, one begins another, and one has
    no relatives. Each has a weight and a source.
    """
    rng = np.random.default_rng(seed)
    system = rng.integers(4, 260, 20)
    stems = [np.concatenate([system, rng.integers(4, 260, n)]) for n in (0, 15, 30)]
    rows = []
    for i in range(num):
        tokens = np.concatenate([stems[i % 3], rng.integers(4, 260, rng.integers(4, 41))])
        if i % 10 == 4:
            tokens = np.array(rows[i - 3]["input_ids"])  # the same document once more
        elif i % 10 == 7:
            tokens = np.array(rows[i - 3]["input_ids"][:-3])  # the beginning of another
        elif i % 10 == 9:
            tokens = rng.integers(4, 260, 40)
        first = (1, len(tokens) // 2, 8, len(tokens) - 4)[i % 4]
        rows.append(
            {
                "input_ids": tokens.tolist(),
                "labels": [-100] * first + tokens[first:].tolist(),
                "share": (0.5, 1.0, 0.0, 3.0, 2.0)[i % 5],
                "source": ("a", "b", "c")[i % 7 % 3],
            }
        )
    return Dataset.from_list(rows)


def shared_prefixes(batches: list[dict]) -> list[SharedRowsLayout]:
    """Return the layouts of the batches that share prefixes."""
    return [batch[LAYOUT_KEY] for batch in batches if LAYOUT_KEY in batch]
