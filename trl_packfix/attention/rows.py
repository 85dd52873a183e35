"""The documents of a pack as rows of right-padded batches, and back: indices only, no model.

Later padding cannot reach earlier tokens of a causal module, so each row is what its document is alone. Documents of
similar length share a batch. A shorter row is filled with its own last token, never with another document's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Axes(NamedTuple):
    """Which axes of a tensor count tokens, and which one counts rows, in a batch of one row.

    Attributes:
        tokens: the axes that count tokens; two for a mask (T, T).
        batch: the axis that grows with rows, None if none does. It may hold more than one entry per row (alibi's
            batch x heads), and may be the token axis itself (tokens of all rows one after the other).
    """

    tokens: tuple[int, ...]
    batch: int | None


def group_by_length(lengths: list[int], budget: float) -> list[list[int]]:
    """Documents in groups of similar length, longest first, of no more than `budget` padded tokens each."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@dataclass(frozen=True)
class Group:
    """Documents that share a right-padded batch of B rows of L tokens.

    Attributes:
        longest: L.
        starts, lengths: of each document in the pack, in tokens.
        source: the token of the pack that each place of the batch holds, (B * L,).
    """

    longest: int
    starts: list[int]
    lengths: list[int]
    source: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def split(self, packed: Tensor, axes: Axes) -> Tensor:
        """A tensor of the packed row as one of the batch: (1, T, ...) -> (B, L, ...), wherever these axes are."""
        if len(axes.tokens) == 2:
            return self._split_mask(packed, axes)
        (axis,) = axes.tokens
        if axes.batch is None:  # shared by all rows: what the longest document sees
            return packed.narrow(axis, self.starts[0], self.longest)
        rows = packed.index_select(axis, self.source)
        if axes.batch == axis:
            return rows
        rows = rows.unflatten(axis, (self.num_rows, self.longest)).movedim(axis, axes.batch)
        return rows.flatten(axes.batch, axes.batch + 1)

    def _split_mask(self, packed: Tensor, axes: Axes) -> Tensor:
        if axes.batch is None:
            return _block(packed, axes, self.starts[0], self.longest)
        # Beyond its own block a row continues as the longest document's: masked where a token would look at padding.
        rows = []
        for start, length in zip(self.starts, self.lengths, strict=True):
            row = _block(packed, axes, self.starts[0], self.longest).clone()
            _block(row, axes, 0, length).copy_(_block(packed, axes, start, length))
            rows.append(row)
        return torch.cat(rows, dim=axes.batch)


def _block(mask: Tensor, axes: Axes, start: int, length: int) -> Tensor:
    for axis in axes.tokens:
        mask = mask.narrow(axis, start, length)
    return mask


class DocumentRows:
    """The documents of one pack in groups.

    Args:
        lengths: tokens of each document.
        device: where the tensors are.
        budget: most padded tokens of a group; 0 makes every document a group of its own, infinity one group of all.
    """

    def __init__(self, lengths: list[int], device: torch.device, budget: float):
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.num_tokens = starts[-1]
        self.groups: list[Group] = []
        place = torch.empty(self.num_tokens, dtype=torch.int64)  # of each token in the batches laid end to end
        shared = torch.empty(self.num_tokens, dtype=torch.int64)  # its place where a batch is one row for all its rows
        end = shared_end = 0
        for members in group_by_length(lengths, budget):
            longest = lengths[members[0]]
            steps = torch.arange(longest)
            source = [starts[i] + steps.clamp(max=lengths[i] - 1) for i in members]
            own = [starts[i] for i in members], [lengths[i] for i in members]
            self.groups.append(Group(longest, *own, torch.cat(source).to(device)))
            for row, i in enumerate(members):
                place[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + end + row * longest
                shared[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + shared_end
            end += len(members) * longest
            shared_end += longest
        self._place, self._shared = place.to(device), shared.to(device)

    @property
    def num_padded(self) -> int:
        """Tokens of all batches, padding included."""
        return sum(group.num_rows * group.longest for group in self.groups)

    def join(self, batches: list[Tensor], axes: Axes) -> Tensor:
        """The tensors of all groups as one of the packed row, padding left out: the inverse of `Group.split`."""
        (axis,) = axes.tokens
        if axes.batch is None:  # the same for all rows of a group
            return torch.cat(batches, dim=axis).index_select(axis, self._shared)
        ends = []
        for group, rows in zip(self.groups, batches, strict=True):
            if axes.batch != axis:
                rows = rows.unflatten(axes.batch, (group.num_rows, -1))
                # Whichever comes first, rows go right before their tokens, which brings both to `axis`.
                rows = rows.movedim(axes.batch, axis).flatten(axis, axis + 1)
            ends.append(rows)
        return torch.cat(ends, dim=axis).index_select(axis, self._place)
