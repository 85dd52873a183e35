"""Sequence parallelism: the exchanges between the ranks that share a pack.

Several neighbouring ranks may share a pack. They are a *group*, their number s is the *degree*, and each rank holds a
*part* of the pack, T / s of its tokens. Most modules of a model work on one token at a time and need only the part.
Modules that mix tokens need more, and call this module:

    attention (`varlen.py`) and scans   exchange tokens for heads (all-to-all) before they compute: each rank then holds
                                        all T tokens of some heads, and uses the boundaries of the whole pack.
                                        Afterwards they exchange heads for tokens
    short convolutions                  get the last tokens of the previous rank
    vision towers (`image_parts.py`)    exchange what they computed for different images

Scans and convolutions are in the mixers of hybrid models (`features/hybrids/`).

This is DeepSpeed-Ulysses (arXiv 2309.14509). The number of heads need not divide by the degree: rank j of a group
computes the query heads H * j // s to H * (j + 1) // s. It gets the key and value heads that these queries read, so
that there may be fewer key heads than ranks.

Shapes: T tokens of the pack, s degree, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..group import Group


class HeadExchange:
    """The exchanges before and after one attention call, for tensors of H query heads and G key/value heads.

    Attributes:
        heads: the query heads that this rank computes.
    """

    def __init__(self, num_heads: int, num_key_heads: int, group: Group):
        self.group = group
        self._ranges = head_ranges(num_heads, num_key_heads, group.size)
        self._queries_per_key = num_heads // num_key_heads
        self.heads, self._key_heads = self._ranges[group.rank]

    def to_heads(self, queries: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        """Exchange tokens for heads.

        Args:
            queries: tensors with one head per query head, (1, H, T / s, ...).
            keys: tensors with one head per key head, such as keys and values, (1, G, T / s, ...). All tensors have one
                dtype.

        Returns:
            The tensors of `queries`, then of `keys`, with all tokens, (1, heads of this rank, T, ...). Those of `keys`
            have the heads that the query heads of this rank read. If these query heads share key heads unevenly, a key
            head is repeated for each query head that reads it.
        """
        if self.group.is_alone:
            return [*queries, *keys]
        # 1. Split each tensor into the heads of each rank, and send them all in one exchange.
        query_ranges, key_ranges = zip(*self._ranges, strict=True)
        split_tensors = [_split_heads(x, query_ranges) for x in queries] + [_split_heads(x, key_ranges) for x in keys]
        tensors_by_rank = list(zip(*split_tensors, strict=True))
        send = [sum(x.numel() for x in tensors) for tensors in tensors_by_rank]
        flat = torch.cat([x.reshape(-1) for tensors in tensors_by_rank for x in tensors])

        # 2. Every rank sends equally many numbers for the heads of this rank.
        states = [*queries, *keys]
        num_query_heads = _num_heads_in_range(self.heads)
        num_key_heads = _num_heads_in_range(self._key_heads)
        num_heads = [num_query_heads] * len(queries) + [num_key_heads] * len(keys)
        sizes = [count * x.shape[2:].numel() for count, x in zip(num_heads, states, strict=True)]
        num_ranks = self.group.size
        received = exchange_pieces(flat, send, [sum(sizes)] * num_ranks, self.group).view(num_ranks, -1)

        # 3. Join the tokens of all ranks.
        all_tokens = [
            numbers.reshape(num_ranks, count, *x.shape[2:]).transpose(0, 1).flatten(1, 2)[None]
            for numbers, count, x in zip(received.split(sizes, dim=1), num_heads, states, strict=True)
        ]

        # 4. Kernels need equally many query heads per key head. Repeat key heads if there are not.
        key_head_of_query = [head // self._queries_per_key for head in range(self.heads.start, self.heads.stop)]
        if len({key_head_of_query.count(head) for head in key_head_of_query}) > 1:
            # A slice and not an index of heads: to copy an index to a GPU the host would wait, in every layer.
            first_head = self.heads.start - self._key_heads.start * self._queries_per_key
            one_per_query = slice(first_head, first_head + len(key_head_of_query))
            all_tokens[len(queries) :] = [
                x.repeat_interleave(self._queries_per_key, dim=1)[:, one_per_query] for x in all_tokens[len(queries) :]
            ]
        return all_tokens

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange heads for tokens: (1, heads of this rank, T, D) -> (1, T / s, H, D)."""
        if self.group.is_alone:
            return out.transpose(1, 2)
        num_heads = out.shape[1]
        num_ranks = self.group.size
        num_tokens = out.shape[2] // num_ranks
        dim = out.shape[3]
        receive = [_num_heads_in_range(heads) * num_tokens * dim for heads, _ in self._ranges]
        flat = out.transpose(1, 2).reshape(-1)
        received = exchange_pieces(flat, [num_heads * num_tokens * dim] * num_ranks, receive, self.group)
        return torch.cat([numbers.view(1, num_tokens, -1, dim) for numbers in received.split(receive)], dim=2)


def head_ranges(num_heads: int, num_key_heads: int, degree: int) -> list[tuple[slice, slice]]:
    """Return for each rank of a group the query heads that it computes, and the key heads that they read.

    Raises:
        ValueError: there are fewer heads than ranks.

    >>> head_ranges(6, 3, 4)[1]
    (slice(1, 3, None), slice(0, 2, None))
    """
    if num_heads < degree:
        raise ValueError(
            f"A layer with {num_heads} head(s) got a part of a pack on {degree} ranks. Each rank computes at least "
            f"one head. Set `tokens_per_rank` so that a document needs at most {num_heads} rank(s)."
        )
    queries_per_key = num_heads // num_key_heads
    bounds = [num_heads * j // degree for j in range(degree + 1)]
    return [
        (slice(start, stop), slice(start // queries_per_key, -(-stop // queries_per_key)))
        for start, stop in pairwise(bounds)
    ]


def _num_heads_in_range(heads: slice) -> int:
    """Return the number of heads in a range."""
    return heads.stop - heads.start


def _split_heads(states: Tensor, ranges: tuple[slice, ...]) -> Iterable[Tensor]:
    """Return the heads of each range from (1, heads, T / s, D), without the first axis."""
    if all(heads.stop == next_heads.start for heads, next_heads in pairwise(ranges)):
        # `split` and not slices: the backward of each slice would allocate a gradient of all heads.
        return states[0].split([_num_heads_in_range(heads) for heads in ranges])
    # Ranges overlap where several ranks read one key head.
    return [states[0, heads] for heads in ranges]


def exchange_halo(rows: Tensor, width: int, group: Group) -> Tensor:
    """Return the last `width` rows of the previous rank in the group: (1, T / s, C) -> (1, width, C).

    The first rank gets the rows of the last rank, and a rank that is alone gets zeros. Neither reads them, because
    a pack begins with a document.

    Raises:
        ValueError: the part has fewer rows than `width`.
    """
    if group.is_alone:
        return rows.new_zeros(1, width, rows.shape[2])
    if rows.shape[1] < width:
        raise ValueError(
            f"A part of {rows.shape[1]} token(s) came to a convolution that reads {width} tokens before each. They "
            "would come from more than one rank. Raise `tokens_per_rank`."
        )
    send = [0] * group.size
    receive = [0] * group.size
    send[(group.rank + 1) % group.size] = receive[group.rank - 1] = width * rows.shape[2]
    return exchange_pieces(rows[:, -width:].reshape(-1), send, receive, group).view(1, width, -1)


class _AllToAll(torch.autograd.Function):
    """An all-to-all exchange of pieces of a flat tensor. Backward sends the gradients back.

    `send` and `receive` hold per rank of the group how many numbers this rank sends to it and receives from it.
    """

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


def exchange_pieces(flat: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Exchange the pieces of a flat tensor between the ranks of a group, which are several.

    Args:
        flat: the pieces for all ranks, end to end, (sum(send),).
        send: how many numbers this rank sends to each rank.
        receive: how many numbers it receives from each rank.

    Returns:
        The pieces from all ranks, end to end, (sum(receive),). Their gradients are sent back to the ranks.
    """
    return _AllToAll.apply(flat, send, receive, group.process_group)
