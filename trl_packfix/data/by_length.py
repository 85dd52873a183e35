"""Packs for flash kernels: documents from the longest to the shortest, and the launches that compute them.

The grid of FlashAttention-2 has blocks for the longest document in every document of a launch. In a pack with one long
document, or with documents that only pad, most of them have nothing to do. Documents of similar length in a launch of
their own have few such blocks, so they must be next to each other. The host knows the lengths here, not later.
Their order changes rounding only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import LAYOUT_KEY, layout_of
from .rank_share import RankShare

LENGTH_CLASSES = (
    384,
    4096,
)  # largest lengths, in tokens, of documents in the first and the second launch; then the rest
TILE_QUERIES = 128  # queries of a block, in the largest of the grids
MAX_LAUNCHES = 6  # in a layer: padding adds documents at the end of a pack
Launches = tuple[tuple[int, int, int, int, int], ...]


def plan_launches(bounds: npt.NDArray[np.integer[Any]], longest: int) -> Launches:
    """Launches for documents with these boundaries: (first document, last + 1, first token, last + 1, longest) of each.

    Documents without tokens are in none. () if one launch for all, with blocks for `longest` tokens in each document,
    has at most as many blocks without work as blocks with work, or if neighbours differ too much in length.

    >>> plan_launches(np.array([0, 5000, 5100, 5200, 5200]), longest=8192)
    ((0, 1, 0, 5000, 5000), (1, 3, 5000, 5200, 100))
    """
    lengths = np.diff(bounds)
    if len(lengths) * -(-longest // TILE_QUERIES) <= 2 * (-(-lengths // TILE_QUERIES)).sum():
        return ()
    kinds = np.where(lengths > 0, np.searchsorted(LENGTH_CLASSES, lengths), -1)
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(lengths)]
    by_class = tuple(
        (first, stop, int(bounds[first]), int(bounds[stop]), int(lengths[first:stop].max()))
        for first, stop in pairwise(edges)
        if kinds[first] >= 0
    )
    return by_class if len(by_class) <= MAX_LAUNCHES else ()


@dataclass
class ByLength:
    """Orders the documents of a pack by length before `collate`, and adds the launches to the layout of its batch."""

    collate: Callable[[Any], dict[str, Any]]

    def __call__(self, pack: list[dict[str, Any]]) -> dict[str, Any]:
        longest_first = sorted(pack, key=lambda document: -len(document["input_ids"]))
        batch = self.collate(RankShare.like(pack, longest_first))
        if by_class := plan_launches(batch["cu_seq_lens_q"].numpy(), batch["max_length_q"]):
            batch[LAYOUT_KEY] = replace(layout_of(batch), launches=by_class)
        return batch
