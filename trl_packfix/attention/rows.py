"""Convert the documents of a pack to rows of right-padded batches, and back. Indices only, no model.

In a causal module padding at the end cannot change earlier tokens, so each row gives the result of its document alone.
Documents of similar length share a batch. A shorter row is padded with its own last token, never with tokens of another
document.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class TensorAxes(NamedTuple):
    """Which axes of a tensor index tokens, and which one indexes rows, in a batch of one row.

    Attributes:
        tokens: the token axes; two for a mask (T, T).
        batch: the axis that grows with the number of rows; None if there is none. It may have more than one entry per
            row (alibi's batch x heads). It may be the token axis itself (tokens of all rows one after the other).
    """

    tokens: tuple[int, ...]
    batch: int | None


def group_by_length(lengths: list[int], budget: float, pads: bool = True) -> list[list[int]]:
    """Indices of documents in groups by length, longest first, with at most `budget` padded tokens per group.

    A document longer than the budget is a group by itself. With `pads=False` those of a group have one length.

    >>> group_by_length([3, 9, 4, 2], budget=12)
    [[1], [2, 0, 3]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= budget and (pads or lengths[i] == longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@dataclass(frozen=True)
class PaddedBatch:
    """Documents that share a right-padded batch of B rows of L tokens.

    Attributes:
        longest: L.
        starts, lengths: start in the pack and length of each document, in tokens.
        source: for each position of the batch the index of its token in the pack, (B * L,).
    """

    longest: int
    starts: list[int]
    lengths: list[int]
    source: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def split(self, packed: Tensor, axes: TensorAxes) -> Tensor:
        """Convert a tensor of the packed row to one of the batch: (1, T, ...) -> (B, L, ...), in any order of axes."""
        if len(axes.tokens) == 2:
            longest = _block_of_batch(packed, axes, self.starts[0], length=self.longest)
            if axes.batch is None:
                return longest
            # Outside its own block a row has the mask of the longest document, which hides padding from earlier tokens
            rows = [longest.clone() for _ in self.starts]
            for row, start, length in zip(rows, self.starts, self.lengths, strict=True):
                _block_of_batch(row, axes, 0, length=length).copy_(_block_of_batch(packed, axes, start, length=length))
            return torch.cat(rows, dim=axes.batch)
        (axis,) = axes.tokens
        if axes.batch is None:  # shared by all rows: the part of the longest document
            return packed.narrow(axis, self.starts[0], self.longest)
        tokens = packed.index_select(axis, self.source)
        if axes.batch == axis:
            return tokens
        tokens = tokens.unflatten(axis, (self.num_rows, self.longest)).movedim(axis, axes.batch)
        return tokens.flatten(axes.batch, axes.batch + 1)


def _block_of_batch(mask: Tensor, axes: TensorAxes, start: int, *, length: int) -> Tensor:
    for axis in axes.tokens:
        mask = mask.narrow(axis, start, length)
    return mask


class DocumentRows:
    """The documents of one pack, in groups that share a padded batch.

    Args:
        budget: maximum of padded tokens per group. 0: one group per document; infinity: one group for all.
        padding: tokens of padding behind the longest row of each group.
        pads: False groups documents of one length only.
    """

    def __init__(self, lengths: list[int], device: torch.device, budget: float, *, padding: int = 0, pads: bool = True):
        starts = [0, *accumulate(lengths)]
        self.num_tokens = starts[-1]
        self.groups: list[PaddedBatch] = []
        place = torch.empty(self.num_tokens, dtype=torch.int64)  # of each token, in the batches laid end to end
        shared = torch.empty(self.num_tokens, dtype=torch.int64)  # the same where all rows of a batch share one
        end = shared_end = 0
        for members in group_by_length(lengths, budget, pads):
            longest = lengths[members[0]] + padding
            steps = torch.arange(longest)
            source = [starts[i] + steps.clamp(max=lengths[i] - 1) for i in members]
            spans = [starts[i] for i in members], [lengths[i] for i in members]
            self.groups.append(PaddedBatch(longest, *spans, torch.cat(source).to(device)))
            for row, i in enumerate(members):
                place[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + end + row * longest
                shared[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + shared_end
            end += len(members) * longest
            shared_end += longest
        self._place, self._shared = place.to(device), shared.to(device)

    def join(self, batches: list[Tensor], axes: TensorAxes) -> Tensor:
        """Join the tensors of all batches to one of the packed row, without padding; the inverse of `split`."""
        (axis,) = axes.tokens
        if axes.batch is None:  # the same for all rows of a group
            return torch.cat(batches, dim=axis).index_select(axis, self._shared)
        ends = []
        for group, rows in zip(self.groups, batches, strict=True):
            if axes.batch != axis:
                rows = rows.unflatten(axes.batch, (group.num_rows, -1))
                # Move rows right before their tokens; this puts both at `axis`, whichever came first.
                rows = rows.movedim(axes.batch, axis).flatten(axis, axis + 1)
            ends.append(rows)
        return torch.cat(ends, dim=axis).index_select(axis, self._place)
