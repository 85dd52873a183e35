"""Exchange tensors between the ranks that share a pack, for sequence parallelism.

Several neighbouring ranks may share a pack. They are a *group*, their number s is the *degree*, and each rank holds a
*part* of the pack, T / s of its tokens. Most modules of a model work on one token at a time and need only the part.
Modules that mix tokens need more, and call the functions here:

    attention (`varlen.py`) and scans   exchange tokens for heads (all-to-all) before they compute: each rank then holds
                                        all T tokens of some heads, and uses the boundaries of the whole pack.
                                        Afterwards they exchange heads for tokens
    short convolutions                  get the last tokens of the previous rank
    vision towers (`features/images`)   exchange what they computed for different images

Scans and convolutions are in the mixers of hybrid models (`features/hybrids/`).

This is DeepSpeed-Ulysses (arXiv 2309.14509), and H may be any number from s on: rank j of a group computes the query
heads from H * j // s to H * (j + 1) // s - 1. It gets the key and value heads that these queries read, so
there may be fewer key heads than ranks. For example, with H = 6, G = 3 and s = 4 rank 1 computes the query heads 1 and
2, and gets the key heads 0 and 1.

Shapes: T tokens of the pack, s degree, H query heads, G key/value heads, D head dimension.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..group import Group
from ..wording import count_of


class HeadExchange:
    """The exchanges before and after one attention call, for tensors of H query heads and G key/value heads.

    Args:
        num_heads: H.
        num_key_heads: G, which divides H.
        group: the ranks that share the pack.

    Attributes:
        heads: the query heads that this rank computes.
    """

    def __init__(self, num_heads: int, num_key_heads: int, group: Group):
        self.group = group
        self._ranges = head_ranges(num_heads, num_key_heads, group.size)
        self._queries_per_key = num_heads // num_key_heads
        self.heads, _ = self._ranges[group.rank]

    def to_heads(self, queries: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        """Exchange tokens for heads.

        Args:
            queries: tensors of H heads, (1, H, T / s, ...): the queries of attention, or the values of a scan.
            keys: tensors of G heads, (1, G, T / s, ...), such as keys and values. All tensors have one dtype.

        Returns:
            The tensors of `queries`, then of `keys`, with all tokens, (1, heads of this rank, T, ...). The tensors of
            `keys` have the key heads that the query heads of this rank read. If different numbers of these query heads
            read them, key heads are repeated, so that each query head has its own. For example, with H = 9, G = 3 and
            s = 2 rank 1 computes the query heads 4 to 8, and gets the key heads 1, 1, 2, 2, 2.
        """
        if self.group.is_alone:  # no other rank shares the pack
            return [*queries, *keys]
        # 1. Split each tensor into the heads of each rank, and send them all in one exchange: the heads of all tensors
        #    for rank 0, then for rank 1, and so on.
        tensors = [*queries, *keys]
        query_ranges, key_ranges = zip(*self._ranges, strict=True)  # by rank
        ranges_by_tensor = [query_ranges] * len(queries) + [key_ranges] * len(keys)
        split_tensors = [_split_heads(x, ranges) for x, ranges in zip(tensors, ranges_by_tensor, strict=True)]
        tensors_by_rank = list(zip(*split_tensors, strict=True))
        send_counts = [sum(x.numel() for x in to_rank) for to_rank in tensors_by_rank]
        flat = torch.cat([x.reshape(-1) for to_rank in tensors_by_rank for x in to_rank])

        # 2. Receive the heads of this rank. Every rank has equally many tokens, so it sends equally many numbers.
        num_heads = [_num_heads_in_range(ranges[self.group.rank]) for ranges in ranges_by_tensor]
        sizes = [count * x.shape[2:].numel() for count, x in zip(num_heads, tensors, strict=True)]
        num_ranks = self.group.size
        received = exchange_pieces(flat, send_counts, [sum(sizes)] * num_ranks, self.group).view(num_ranks, -1)

        # 3. For each tensor, put the tokens of all ranks one after the other: (ranks, heads, T / s) -> (1, heads, T).
        all_tokens = []
        for numbers, count, x in zip(received.split(sizes, dim=1), num_heads, tensors, strict=True):
            by_rank = numbers.reshape(num_ranks, count, *x.shape[2:])
            all_tokens.append(by_rank.transpose(0, 1).flatten(1, 2)[None])

        # 4. Kernels need the same number of query heads for each key head. If the numbers differ, repeat key heads.
        num_readers = Counter(head // self._queries_per_key for head in range(self.heads.start, self.heads.stop))
        if len(set(num_readers.values())) > 1:
            # Repeat each key head for all query heads that read it, also for those of other ranks. Then take the ones
            # for the query heads of this rank. In the example of the docstring, the key heads 1 and 2 become 1, 1, 1,
            # 2, 2, 2, for the query heads 3 to 8, and the slice leaves out the first, because another rank computes the
            # query head 3. With an index in place of a slice, the host would wait for the GPU in every layer.
            first_head = self.heads.start % self._queries_per_key
            one_per_query = slice(first_head, first_head + _num_heads_in_range(self.heads))
            num_queries = len(queries)
            all_tokens[num_queries:] = [
                x.repeat_interleave(self._queries_per_key, dim=1)[:, one_per_query] for x in all_tokens[num_queries:]
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
        send_counts = [num_heads * num_tokens * dim] * num_ranks
        receive_counts = [_num_heads_in_range(heads) * num_tokens * dim for heads, _ in self._ranges]
        received = exchange_pieces(out.transpose(1, 2).reshape(-1), send_counts, receive_counts, self.group)
        return torch.cat([numbers.view(1, num_tokens, -1, dim) for numbers in received.split(receive_counts)], dim=2)


def head_ranges(num_heads: int, num_key_heads: int, degree: int) -> list[tuple[slice, slice]]:
    """Return for each rank of a group the query heads that it computes, and the key heads that they read.

    Raises:
        ValueError: there are fewer heads than ranks.

    >>> head_ranges(6, 3, 4)[1]
    (slice(1, 3, None), slice(0, 2, None))
    """
    if num_heads < degree:
        raise ValueError(
            f"A layer with {count_of(num_heads, 'head')} got a part of a pack on {degree} ranks. Each rank computes at "
            f"least one head. Set `tokens_per_rank` so that a document needs at most {count_of(num_heads, 'rank')}."
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
    """Return a tensor (heads in the range, T / s, ...) for each range of heads of `states`, (1, heads, T / s, ...)."""
    if all(heads.stop == next_heads.start for heads, next_heads in pairwise(ranges)):
        # `split` and not slices: the backward of each slice would allocate a gradient of all heads.
        return states[0].split([_num_heads_in_range(heads) for heads in ranges])
    # Ranges overlap where several ranks read one key head.
    return [states[0, heads] for heads in ranges]


def exchange_halo(rows: Tensor, width: int, group: Group) -> Tensor:
    """Return the last `width` rows of the previous rank in the group: (1, T / s, C) -> (1, width, C).

    The first rank gets the rows of the last rank, and a rank that has the pack for itself gets zeros. On both the part
    begins where the pack begins, so a document there has no earlier rows, and the caller must ignore what it gets.

    Raises:
        ValueError: the part has fewer rows than `width`.
    """
    if group.is_alone or width == 0:
        return rows.new_zeros(1, width, rows.shape[2])
    if rows.shape[1] < width:
        raise ValueError(
            f"A part of {count_of(rows.shape[1], 'token')} came to a convolution that reads {width} tokens before "
            "each. They would come from more than one rank. Raise `tokens_per_rank`."
        )
    num_numbers = width * rows.shape[2]
    send_counts = [0] * group.size
    send_counts[(group.rank + 1) % group.size] = num_numbers
    receive_counts = [0] * group.size
    receive_counts[group.rank - 1] = num_numbers
    return exchange_pieces(rows[:, -width:].reshape(-1), send_counts, receive_counts, group).view(1, width, -1)


class _AllToAll(torch.autograd.Function):
    """An all-to-all exchange of pieces of a flat tensor, as in `exchange_pieces`. Backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send_counts = send_counts
        ctx.receive_counts = receive_counts
        ctx.group = group
        out = flat.new_empty(sum(receive_counts))
        dist.all_to_all_single(out, flat.contiguous(), receive_counts, send_counts, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_flat = grad.new_empty(sum(ctx.send_counts))
        dist.all_to_all_single(grad_flat, grad.contiguous(), ctx.send_counts, ctx.receive_counts, group=ctx.group)
        return grad_flat, None, None, None


def exchange_pieces(flat: Tensor, send_counts: list[int], receive_counts: list[int], group: Group) -> Tensor:
    """Exchange the pieces of a flat tensor between the ranks of a group of two or more ranks.

    Args:
        flat: the pieces for all ranks of the group, end to end, (sum(send_counts),).
        send_counts: how many numbers this rank sends to each rank.
        receive_counts: how many numbers this rank receives from each rank.

    Returns:
        The pieces from all ranks, end to end, (sum(receive_counts),). Their gradients are sent back to the ranks.
    """
    return _AllToAll.apply(flat, send_counts, receive_counts, group.process_group)
