"""Sequence parallelism: attention and recurrent mixers over a pack of which each rank of a group holds a part.

Before attention, or a scan (`mixers.py`), the ranks of a group exchange tokens for heads (all-to-all): each then holds
all T tokens of some of the heads, and computes them with the boundaries of the whole pack. After it they exchange heads
for tokens. A short convolution gets the last tokens of the part before. Everything else in a model works on one token
at a time and sees its own part only. This is DeepSpeed-Ulysses (arXiv 2309.14509).

Heads need not divide by the degree s: the member with index j computes the query heads H * j // s to H * (j + 1) // s.
It gets the key and value heads that these queries read, so that there may be fewer of them than ranks.

T tokens of the pack, s degree, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# By degree: the group of all ranks when the group was made, and the group of this rank
_groups: dict[int, tuple[Any, Any]] = {}


def make_groups(degrees: Iterable[int], timeout: timedelta | None = None) -> None:
    """Make the process groups of these degrees: aligned neighbours, such as ranks 0-3 and 4-7 for degree 4.

    All ranks must call it with the same degrees, before the first exchange. Groups that exist are kept.
    """
    for degree in sorted(set(degrees)):
        if degree == 1 or _find_group(degree) is not None:
            continue
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size % degree:
            raise ValueError(
                f"Groups of {degree} ranks were requested and there are {world_size} rank(s). Every rank needs a group "
                "of this degree. Set a degree that divides the number of ranks, or launch more ranks."
            )
        first = dist.get_rank() // degree * degree
        ranks = list(range(first, first + degree))
        try:
            # Each rank makes its own group only: with 512 ranks there are 511 groups of all degrees
            group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        except NotImplementedError:  # TORCH_DISTRIBUTED_USE_TORCHCOMMS=1: all ranks make all groups of the degree
            starts = range(0, world_size, degree)
            groups = [dist.new_group([*range(start, start + degree)], timeout=timeout) for start in starts]
            group = groups[first // degree]
        _groups[degree] = (dist.group.WORLD, group)


def group_of(degree: int) -> dist.ProcessGroup:
    """The process group of this rank."""
    group = _find_group(degree)
    if group is None:
        raise RuntimeError(
            f"A part of a pack on {degree} ranks was given, and there is no process group of {degree} ranks. Attention "
            "cannot exchange tokens without one. Train with `SFTTrainer`, which makes the groups."
        )
    return group


def _find_group(degree: int) -> Any:
    world, group = _groups.get(degree, (None, None))
    return group if world is not None and dist.is_initialized() and world is dist.group.WORLD else None


class HeadExchange:
    """The exchanges before and after one attention call, for tensors of H query heads and G key/value heads."""

    def __init__(self, num_heads: int, num_key_heads: int, degree: int):
        self.group = group_of(degree)
        self.degree, index = degree, dist.get_rank(self.group)
        self._ranges = head_ranges(num_heads, num_key_heads, degree)
        self._queries_per_key = num_heads // num_key_heads
        self.heads, self._key_heads = self._ranges[index]

    def to_heads(self, queries: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        """Exchange tokens for heads: (1, H or G, T / s, ...) -> (1, own heads, T, ...), in this order.

        Keys and values (`keys`) come with the heads that the own queries read. If a group of queries that share a key
        head is cut by the end of a range, they are repeated, one head per query head. All have the same dtype.
        """
        ranges = list(zip(*self._ranges, strict=True))
        heads = [0] * len(queries) + [1] * len(keys)  # which of the two ranges each tensor has
        states = [*queries, *keys]
        pieces = list(zip(*(_split_heads(x, ranges[i]) for x, i in zip(states, heads, strict=True)), strict=True))
        send = [sum(x.numel() for x in piece) for piece in pieces]
        num_heads = [_num_heads_in_range((self.heads, self._key_heads)[i]) for i in heads]
        sizes = [count * x.shape[2:].numel() for count, x in zip(num_heads, states, strict=True)]
        flat = torch.cat([x.reshape(-1) for piece in pieces for x in piece])
        got = _AllToAll.apply(flat, send, [sum(sizes)] * self.degree, self.group).view(self.degree, -1)
        all_tokens = [
            part.reshape(self.degree, count, *x.shape[2:]).transpose(0, 1).flatten(1, 2)[None]
            for part, count, x in zip(got.split(sizes, dim=1), num_heads, states, strict=True)
        ]
        reads = [head // self._queries_per_key for head in range(self.heads.start, self.heads.stop)]
        if len({reads.count(head) for head in reads}) > 1:
            # Not by an index of `reads`: to copy it to a GPU the host would wait, in every layer
            first = self.heads.start - self._key_heads.start * self._queries_per_key
            one_each = slice(first, first + len(reads))
            all_tokens[len(queries) :] = [
                x.repeat_interleave(self._queries_per_key, dim=1)[:, one_each] for x in all_tokens[len(queries) :]
            ]
        return all_tokens

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange heads for tokens: (1, own heads, T, D) -> (1, T / s, H, D)."""
        heads = out.shape[1]
        num_tokens = out.shape[2] // self.degree
        dim = out.shape[3]
        receive = [_num_heads_in_range(queries) * num_tokens * dim for queries, _ in self._ranges]
        flat = out.transpose(1, 2).reshape(-1)
        got = _AllToAll.apply(flat, [heads * num_tokens * dim] * self.degree, receive, self.group)
        return torch.cat([part.view(1, num_tokens, -1, dim) for part in got.split(receive)], dim=2)


def head_ranges(num_heads: int, num_key_heads: int, degree: int) -> list[tuple[slice, slice]]:
    """For each member of a group, the query heads that it computes and the key heads that they read.

    >>> head_ranges(6, 3, 4)[1]
    (slice(1, 3, None), slice(0, 2, None))
    """
    if num_heads < degree:
        raise ValueError(
            f"A layer with {num_heads} head(s) got a part of a pack on {degree} ranks. Each rank computes at least "
            f"one head. Set `tokens_per_rank` so that a document needs at most {num_heads} rank(s)."
        )
    per_key = num_heads // num_key_heads
    bounds = [num_heads * j // degree for j in range(degree + 1)]
    return [(slice(start, stop), slice(start // per_key, -(-stop // per_key))) for start, stop in pairwise(bounds)]


def _num_heads_in_range(heads: slice) -> int:
    return heads.stop - heads.start


def _split_heads(states: Tensor, ranges: tuple[slice, ...]) -> Iterable[Tensor]:
    """The heads of each range of (1, heads, T / s, D)."""
    if all(one.stop == other.start for one, other in pairwise(ranges)):
        # split, not slices: the backward of each slice would allocate a gradient of all heads
        return states[0].split([_num_heads_in_range(heads) for heads in ranges])
    return [states[0, heads] for heads in ranges]  # several members read the same key head


def exchange_halo(rows: Tensor, width: int, degree: int) -> Tensor:
    """The last `width` rows of the part before this one: (1, T / s, C) -> (1, width, C).

    The first part gets those of the last one, and a whole pack zeros; neither reads them.
    """
    if degree == 1:
        return rows.new_zeros(1, width, rows.shape[2])
    if rows.shape[1] < width:
        raise ValueError(
            f"A part of {rows.shape[1]} token(s) came to a convolution that reads {width} tokens before each. They "
            "would come from more than one rank. Raise `tokens_per_rank`."
        )
    group = group_of(degree)
    index = dist.get_rank(group)
    send = [0] * degree
    receive = [0] * degree
    send[(index + 1) % degree] = receive[index - 1] = width * rows.shape[2]
    return _AllToAll.apply(rows[:, -width:].reshape(-1), send, receive, group).view(1, width, -1)


class _AllToAll(torch.autograd.Function):
    """all-to-all of pieces of a flat tensor, `send` and `receive` numbers per member; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        out = flat.new_empty(sum(receive))
        dist.all_to_all_single(out, flat.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = grad.new_empty(sum(ctx.send))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


exchange_pieces = _AllToAll.apply  # (flat, send, receive, group)
