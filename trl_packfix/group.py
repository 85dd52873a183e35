"""The ranks that share a pack. Usually a rank has its own packs; with sequence parallelism several ranks share one.

If the config sets `tokens_per_rank`, the most tokens of a pack that one rank holds, several neighbouring ranks may
share a pack. They are a *group*, its size s is the *degree*, and each rank holds a *part* of the pack, T / s of its T
tokens. Every batch and every packed forward has a `Group`. A rank that shares its pack with no other rank is *alone*,
in a group of size 1, for which no operation here communicates.

`planning/degrees.py` chooses the degree for each set of micro-batches that the ranks compute at the same time. A
`Group` is two numbers, and is stored with documents (`data/rank_share.py`), batches (`layout.py`) and forwards
(`attention/packed_forward.py`). It finds the process group of torch, over which its ranks communicate, by its size.
`make_groups` makes these process groups once for each degree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .wording import count_of

Number = TypeVar("Number", Tensor, float)


class MadeGroup(NamedTuple):
    """A process group that was made for one degree. It is useless once `dist.group.WORLD` is another object."""

    world: Any  # the process group of all ranks, when this group was made
    timeout: timedelta | None  # how long its ranks wait for each other; None for torch's default
    process_group: Any  # the process group of this rank and of the ranks with which it shares packs


_process_groups: dict[int, MadeGroup] = {}  # by degree


@dataclass(frozen=True)
class Group:
    """The ranks that share a pack, as one of them sees the group. By default a rank is alone.

    Attributes:
        size: the degree, s.
        rank: the number of this rank in the group, from 0.
    """

    size: int = 1
    rank: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether this rank shares the pack with no other rank."""
        return self.size == 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank counts for the whole group what all its ranks have, such as the documents of the pack."""
        return self.rank == 0

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks of this group. Only for groups of two or more ranks.

        Raises:
            RuntimeError: `make_groups` has not made it.
        """
        process_group = _find_process_group(self.size)
        if process_group is None:
            raise RuntimeError(
                f"A part of a pack on {self.size} ranks was given, and there is no process group of {self.size} ranks. "
                "Attention cannot exchange tokens without one. Train with `SFTTrainer`, which makes the groups."
            )
        return process_group

    def rows(self, num_rows: int) -> slice:
        """Return which rows of the hidden states of a pack, (num_rows, hidden), are the part of this rank.

        `num_rows`, the number of tokens of the pack, is a multiple of the size.

        >>> Group(size=2, rank=1).rows(6), Group().rows(6)
        (slice(3, 6, None), slice(0, 6, None))
        """
        assert num_rows % self.size == 0, "the collator pads a pack to a multiple of the degree"
        return slice(self.rank * num_rows // self.size, (self.rank + 1) * num_rows // self.size)

    def count_once(self, value: Number) -> Number:
        """Return `value` on the first rank of the group and 0 on the others, so that a sum over ranks has it once."""
        return value * self.is_leader

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks of the group, in place, and return the sum. All of these ranks must call it."""
        if not self.is_alone:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks of the group concatenated along `dim`.

        All ranks of the group must call it, with parts of equal shapes.
        """
        if self.is_alone:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=dim)


ALONE = Group()


def make_groups(degrees: Iterable[int], timeout: timedelta | None = None) -> None:
    """Make the process groups of these degrees, unless they exist. Ranks 0-3 and ranks 4-7 are groups of degree 4.

    All ranks must call this function with equal arguments, before the first exchange. A group with another timeout than
    `timeout` is made anew; None accepts a group with any timeout.

    Raises:
        ValueError: the number of ranks does not divide by a degree.
    """
    for degree in sorted(set(degrees)):
        has_group = _find_process_group(degree) is not None
        if degree == 1 or (has_group and timeout in (None, _process_groups[degree].timeout)):
            continue
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size % degree:
            raise ValueError(
                f"Groups of {degree} ranks were requested, and the run has {count_of(world_size, 'rank')}. Every rank "
                "needs a group of this degree. Set a degree that divides the number of ranks, or launch more ranks."
            )
        first_rank = dist.get_rank() // degree * degree
        ranks = list(range(first_rank, first_rank + degree))
        try:
            # Each rank makes its own group only. It would be slow to make all groups on every rank: 512 ranks, for
            # instance, have 511 groups of the degrees 2, 4, ..., 512.
            process_group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        except NotImplementedError:
            # A backend of torch, torchcomms (TORCH_DISTRIBUTED_USE_TORCHCOMMS=1), cannot do this: with it all ranks
            # have to make all groups of the degree.
            first_ranks = range(0, world_size, degree)
            process_groups = [dist.new_group([*range(rank, rank + degree)], timeout=timeout) for rank in first_ranks]
            process_group = process_groups[first_rank // degree]
        _process_groups[degree] = MadeGroup(dist.group.WORLD, timeout, process_group)


def _find_process_group(degree: int) -> Any:
    """Return the process group of a degree; None if it was not made, or was made for an earlier set of ranks."""
    made_group = _process_groups.get(degree)
    if made_group is None or made_group.world is not dist.group.WORLD:  # WORLD is None without a process group
        return None
    return made_group.process_group
