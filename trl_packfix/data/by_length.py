"""Sort the documents of a pack by length, and plan the launches of the flash kernel that compute its attention.

A launch of FlashAttention-2 computes the attention of several documents. It starts as many blocks of threads for every
document as the longest document of the launch needs. In a pack with one long document, or with documents that are only
padding, most of the blocks have nothing to do. So documents of similar length are put next to each other, and each
class of lengths gets a launch of its own.

`ByLength` wraps the collator of the trainer, because the host knows the lengths there. Later they are on the GPU, and
reading them would wait for it. The attention reads the launches from the layout of the batch (`attention/varlen.py`).
The order of documents in a pack changes the results by rounding only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import LAYOUT_KEY, layout_of
from .rank_share import RankShare

# Largest number of tokens of a document in the first and in the second class of lengths. Longer documents are the third
LENGTH_CLASSES = (384, 4096)
TILE_QUERIES = 128  # largest number of queries that one block of threads computes
# Most launches in one layer. A pack may need more launches than there are classes, because its documents are sorted by
# length, but padding adds documents of any length behind them
MAX_LAUNCHES = 6
# For each launch (first document, last document + 1, first token, last token + 1, tokens of its longest document)
Launches = tuple[tuple[int, int, int, int, int], ...]


def plan_launches(bounds: npt.NDArray[np.integer[Any]], longest: int) -> Launches:
    """Divide the documents of a pack into launches of the flash kernel.

    Args:
        bounds: first token of each of N documents, followed by the number of tokens, shape (N + 1,).
        longest: the value of `max_length_q` in the batch. It is at least the number of tokens of the longest document,
            and more where packs of different documents must have equal shapes. A single launch of all documents would
            start blocks for `longest` tokens in each document.

    Returns:
        The launches. Documents without tokens are in no launch. The tuple is empty if a single launch is used: at least
        half of its blocks have work, or neighbours differ in length so often that there would be too many launches.

    >>> plan_launches(np.array([0, 5000, 5100, 5200, 5200]), longest=8192)
    ((0, 1, 0, 5000, 5000), (1, 3, 5000, 5200, 100))
    """
    lengths = np.diff(bounds)
    # Divisions by `TILE_QUERIES` are rounded up
    num_blocks = len(lengths) * -(-longest // TILE_QUERIES)
    num_blocks_with_work = (-(-lengths // TILE_QUERIES)).sum()
    if num_blocks <= 2 * num_blocks_with_work:
        return ()
    # A launch is a sequence of documents of one class; -1 is the class of documents without tokens
    classes = np.where(lengths > 0, np.searchsorted(LENGTH_CLASSES, lengths), -1)
    edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(lengths)]
    launches = tuple(
        (first, stop, int(bounds[first]), int(bounds[stop]), int(lengths[first:stop].max()))
        for first, stop in pairwise(edges)
        if classes[first] >= 0
    )
    return launches if len(launches) <= MAX_LAUNCHES else ()


@dataclass
class ByLength:
    """Collator that sorts the documents of a pack by length for another collator, and adds the launches to the layout.

    The longest document comes first.
    """

    collate: Callable[[Any], dict[str, Any]]  # the other collator

    def __call__(self, pack: list[dict[str, Any]]) -> dict[str, Any]:
        longest_first = sorted(pack, key=lambda document: -len(document["input_ids"]))
        # A pack may be a `RankShare`, a list with the group of ranks that share the pack. `like` keeps this group
        batch = self.collate(RankShare.like(pack, longest_first))
        layout = layout_of(batch)  # made from the boundaries if the batch has none
        if layout.shares_rows:
            # The boundaries are those of runs, which also read keys of their prefixes. `attention/runs.py` plans the
            # launches of such a pack, by the number of keys
            return batch
        launches = plan_launches(batch["cu_seq_lens_q"].numpy(), batch["max_length_q"])
        if launches:
            batch[LAYOUT_KEY] = replace(layout, launches=launches)
        return batch
