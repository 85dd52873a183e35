"""Convert the documents of a pack to rows of right-padded batches, and back.

A pack is one row of documents, end to end. Modules that cannot be given its boundaries run on rows instead, one
document per row: modules that would mix documents (`isolation/repair.py`), recurrent scans such as Mamba's
(`features/hybrids/`), and attention where no flash kernel runs (`kernels.py`). In a causal module, padding at the end
cannot change earlier tokens, so each row gives the result of its document alone.

`DocumentRows` groups documents of similar length into batches. `PaddedBatch.split` converts a tensor of the pack to a
tensor of a batch, and `DocumentRows.join` converts the results of all batches to a tensor of the pack. Both only move
values by indices. A shorter row is padded with its own last token, never with tokens of another document.

Shapes: T tokens of the pack; B rows of L tokens in a batch.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class TensorAxes(NamedTuple):
    """Which axes of a tensor index tokens, and which axis indexes the rows of a batch.

    Hidden states (rows, tokens, hidden), for instance, have the token axis 1 and the batch axis 0.

    Attributes:
        tokens: the token axes: one, or two for a mask (T, T).
        batch: the axis that grows with the number of rows; None if no axis does, as in rotary embeddings that all rows
            share. An axis of rows x heads, which alibi has, is a batch axis, too. If one axis has the tokens of all
            rows one after the other, as in router logits (rows x tokens, experts), it is both the token axis and the
            batch axis.
    """

    tokens: tuple[int, ...]
    batch: int | None


def group_by_length(lengths: list[int], budget: float, mixes_lengths: bool = True) -> list[list[int]]:
    """Group documents of similar length, with at most `budget` tokens per group, padding included.

    Args:
        lengths: tokens of each document.
        budget: the most tokens of a group, padding included. A document with more tokens is a group by itself.
        mixes_lengths: whether documents of different lengths may share a group.

    Returns:
        For each group the indices of its documents, the longest first.

    >>> group_by_length([3, 9, 4, 2], budget=12)
    [[1], [2, 0, 3]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            longest = lengths[groups[-1][0]]
            fits = (len(groups[-1]) + 1) * longest <= budget
            if fits and (mixes_lengths or lengths[i] == longest):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


@dataclass(frozen=True)
class PaddedBatch:
    """A right-padded batch of documents: B rows of L tokens, the longest document first.

    Attributes:
        longest: L, the tokens of the longest document, plus the argument `padding` of `DocumentRows`.
        starts: where each document begins in the pack.
        lengths: the number of tokens of each document.
        source: for each place of the batch, row after row, the index of its token in the pack, (B * L,).
    """

    longest: int
    starts: list[int]
    lengths: list[int]
    source: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def split(self, packed: Tensor, axes: TensorAxes) -> Tensor:
        """Convert a tensor of the pack to a tensor of this batch: (1, T, ...) -> (B, L, ...), for any order of axes."""
        if len(axes.tokens) == 2:
            return self._split_mask(packed, axes)
        (axis,) = axes.tokens
        if axes.batch is None:
            # All rows share the tensor, so it gets the tokens of the longest document. Such tensors are split only for
            # repaired modules, where `padding` is 0, and so `longest` is the length of this document.
            return packed.narrow(axis, self.starts[0], self.longest)
        tokens = packed.index_select(axis, self.source)
        if axes.batch == axis:
            return tokens
        # Divide the token axis into rows and tokens, and join the axis of rows with the batch axis. For example,
        # queries (1, heads, T, D) become (1, heads, B * L, D), then (1, heads, B, L, D), (B, 1, heads, L, D), (B,
        # heads, L, D).
        tokens = tokens.unflatten(axis, (self.num_rows, self.longest)).movedim(axis, axes.batch)
        return tokens.flatten(axes.batch, axes.batch + 1)

    def _split_mask(self, packed: Tensor, axes: TensorAxes) -> Tensor:
        """Convert a mask of the pack to a mask of this batch: (1, T, T) -> (B, L, L), for any order of axes."""
        mask_of_longest = _document_block(packed, axes, self.starts[0], length=self.longest)
        if axes.batch is None:
            return mask_of_longest
        # Copy the mask of each document over the mask of the longest one. Outside of the document, a shorter row keeps
        # the mask of the longest document. A causal mask hides later tokens, here the padding, from the document.
        rows = [mask_of_longest.clone() for _ in self.starts]
        for row, start, length in zip(rows, self.starts, self.lengths, strict=True):
            _document_block(row, axes, 0, length=length).copy_(_document_block(packed, axes, start, length=length))
        return torch.cat(rows, dim=axes.batch)


def _document_block(mask: Tensor, axes: TensorAxes, start: int, *, length: int) -> Tensor:
    """Return a view of a mask, cut on both token axes to the `length` tokens of one document from `start` on."""
    for axis in axes.tokens:
        mask = mask.narrow(axis, start, length)
    return mask


class DocumentRows:
    """The documents of one pack as rows of padded batches.

    Args:
        lengths: tokens of each document.
        budget: the most tokens of a batch, padding included. 0: one document per batch; infinity: one batch for all
            documents.
        padding: tokens of padding behind the longest document of each batch, which are not in the budget. Some models
            need a mask of padding, and transformers drops a mask that hides nothing (`isolation/unpacking.py`).
        mixes_lengths: whether documents of different lengths may share a batch.

    Attributes:
        padded_batches: the batches. A document is a row of one of them.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device,
        budget: float,
        *,
        padding: int = 0,
        mixes_lengths: bool = True,
    ):
        starts = [0, *accumulate(lengths)]
        num_tokens = starts[-1]
        self.padded_batches: list[PaddedBatch] = []
        # The place of each token of the pack in the tensors of all batches, laid end to end: `places` for tensors with
        # B rows per batch, `shared_places` for tensors with one row per batch, which all its documents share.
        places = torch.empty(num_tokens, dtype=torch.int64)
        shared_places = torch.empty(num_tokens, dtype=torch.int64)
        batch_start = 0
        shared_start = 0
        for documents in group_by_length(lengths, budget, mixes_lengths):
            longest = lengths[documents[0]] + padding
            batch_starts = [starts[i] for i in documents]
            batch_lengths = [lengths[i] for i in documents]
            # Behind its end, a row repeats its last token.
            steps = torch.arange(longest)
            source = torch.cat([starts[i] + steps.clamp(max=lengths[i] - 1) for i in documents])
            self.padded_batches.append(PaddedBatch(longest, batch_starts, batch_lengths, source.to(device)))
            for row, i in enumerate(documents):
                places[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + batch_start + row * longest
                shared_places[starts[i] : starts[i + 1]] = torch.arange(lengths[i]) + shared_start
            batch_start += len(documents) * longest
            shared_start += longest
        self._places = places.to(device)
        self._shared_places = shared_places.to(device)

    def join(self, outputs: list[Tensor], axes: TensorAxes) -> Tensor:
        """Join tensors of all batches to one tensor of the pack, without padding; the inverse of `split`.

        Args:
            outputs: a tensor for each batch.
        """
        (axis,) = axes.tokens
        if axes.batch is None:  # all rows of a batch share its tensor
            return torch.cat(outputs, dim=axis).index_select(axis, self._shared_places)
        flat_outputs = []
        for batch, output in zip(self.padded_batches, outputs, strict=True):
            if axes.batch != axis:
                output = output.unflatten(axes.batch, (batch.num_rows, -1))
                # Move the axis of rows right before the axis of tokens, and join both to one axis.
                output = output.movedim(axes.batch, axis).flatten(axis, axis + 1)
            flat_outputs.append(output)
        return torch.cat(flat_outputs, dim=axis).index_select(axis, self._places)
