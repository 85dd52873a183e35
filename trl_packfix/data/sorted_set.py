"""Packs of an evaluation set whose documents share prefixes: documents that begin alike meet in one pack.

`eval_loss` does not depend on the order of documents. So the whole set is sorted by its tokens, and cut into packs of
as many rows as the capacity allows. Nothing is drawn, and every evaluation has the same packs.
"""

from dataclasses import dataclass

import numpy as np

from ..planning.degrees import schedule_in_order
from ..planning.schedule import Schedule
from .documents import Documents


@dataclass(frozen=True)
class SortedSet:
    """The only schedule of such a set, for a sampler in place of an `EpochPlanner`; a rank has one pack per step.

    Attributes:
        whole: the schedule.
        tokens_per_rank: with sequence parallelism, most rows of a pack on one rank.
        degrees: with sequence parallelism, how many ranks share a pack, ascending.
    """

    whole: Schedule
    tokens_per_rank: int | None = None
    degrees: tuple[int, ...] | None = None

    @property
    def num_steps(self) -> int:
        return self.whole.num_steps

    @property
    def accumulation(self) -> int:
        return self.whole.accumulation

    def schedule(self, epoch: int) -> Schedule:
        return self.whole


def plan_sorted(
    documents: Documents, tokens_per_rank: int, world_size: int, degrees: tuple[int, ...] = ()
) -> SortedSet:
    """Pack documents in the order of their tokens.

    Args:
        documents: sorted by their tokens.
        tokens_per_rank: most rows of a pack on one rank.
        degrees: with sequence parallelism, how many ranks may share a pack, ascending; the largest group holds the
            longest document.
    """
    assert documents.tokens is not None, "documents are not sorted by their tokens"
    whole = schedule_in_order(documents.tokens, documents.lengths, tokens_per_rank, world_size, degrees)
    if whole.degrees is None:
        return SortedSet(whole)
    return SortedSet(whole, tokens_per_rank, tuple(np.unique(whole.degrees).tolist()))
