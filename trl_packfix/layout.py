"""Say which document each token of a batch belongs to: the `Layout` of a batch answers all questions about documents.

The collators (`data/`) make batches. The loss, its weights, the metrics, attention and the checks call
`layout_of(batch)` and the methods of the layout. So none of them depends on the feature that made the batch:

    layout              batch                                        where the layout comes from
    UnpackedLayout      padded: each line of (B, S) is a document    made by `layout_of` from the tokens
    PackedLayout        a pack: documents one after the other        made by `layout_of` from the boundaries
    SharedRowsLayout    a pack in which documents share rows         stored as `batch["layout"]`

A batch without the entry `"layout"` is a plain packed batch for other training loops and for other attention. A hook on
the model (`PackedForwardGuard` in `attention/forwards.py`) removes the entry before the model runs. Loaders of
accelerate move and pin the entry like a tensor, because a layout has the methods `to` and `pin_memory`.

Words:

    pack           the documents that pass through the model together, end to end in one sequence of T tokens
    row            one of the T places of a pack, as in the matrix of hidden states, (T, hidden). With `share_prefixes`
                   (`features/prefixes`) a common beginning of documents has its rows once, for all of them
    run            the rows at the end of a document that belong to no document before it in the pack
    part           the rows of a pack that one rank holds, where s ranks share the pack (`data/rank_share.py`). The
                   batch of a part always has the entry `"layout"`
    trained token  a token whose label is not -100
    target         a trained token of one document. Documents that share the token have one target each

Shapes: B documents of S tokens in a padded batch; T tokens and N documents in a pack, where padding counts as one
document.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy.typing as npt
import torch
from torch import Tensor

from .group import ALONE, Group

# The label of a token that is not trained, and the keys of a document of text; other modules import them from here.
from .planning.arrays import IGNORE_INDEX as IGNORE_INDEX
from .planning.arrays import TEXT_KEYS as TEXT_KEYS

LAYOUT_KEY = "layout"  # key of a stored layout in its batch


class ComparedContent(NamedTuple):
    """The content of a document that collators compare to find rows that documents share.

    An image is shared as a whole or not at all.
    """

    tokens: npt.NDArray[Any]  # numbers below 2**32 - 1, one for each token; equal numbers are equal content
    images: Sequence[tuple[int, int]] = ()  # first token of each image, and the token after its last


Compare = Callable[[Sequence[dict[str, Any]]], list[ComparedContent]]
"""A function that returns the content to compare of each document that it gets."""


@dataclass(frozen=True)
class Targets:
    """The targets of a batch: the trained tokens of each document, and the rows that predict them.

    The loss, its weights and the metrics, also those of each data source, are sums over targets. So none of them
    depends on which rows documents share.

    Attributes:
        documents: for each value that `select` returns, the document of the token that it is about, int64, in the shape
            of these values. If `positions` is None, rows whose next token is not trained have a value, too.
        trained: number of trained tokens of each document, (N,), in all parts of the pack.
        positions: for each of the M targets the row that predicts it, (M,), if rows may predict tokens of several
            documents. For example, if row 0 predicts a token of documents 0 and 1, and row 1 one of document 1,
            `positions` is [0, 0, 1] and `documents` is [0, 1, 1]. None if each row predicts the token of one document.
    """

    documents: Tensor
    trained: Tensor
    positions: Tensor | None = None

    def select(self, values: Tensor) -> Tensor:
        """Return the values of the targets, (M,), from one value per row; return `values` if `positions` is None.

        Callers give the value 0 at rows whose next token is not trained.
        """
        return values if self.positions is None else values.flatten()[self.positions]


@dataclass(frozen=True)
class Sizes:
    """How much is computed for a batch, to count tokens and FLOPs.

    In a part, `tokens`, `lengths` and `shared_tokens` describe the whole pack.

    Attributes:
        tokens: number of tokens of all documents with a trained token, (). In a padded batch it counts all documents,
            as TRL does.
        computed_rows: number of rows that this rank computes for these documents, ().
        lengths: tokens of each document, (N,); 0 for a document without a trained token.
        shared_tokens: tokens of each document that are computed for another document, (N,); 0 where `lengths` is 0.
    """

    tokens: Tensor
    computed_rows: Tensor
    lengths: Tensor
    shared_tokens: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(ABC):
    """Base class of the three layouts: the questions that every layout answers.

    Attributes:
        group: the s ranks that share the pack; a group of one rank if the batch is not a part.
        num_tokens: T of the whole pack, a multiple of s, if the batch is a part; else 0.
        checksum: a checksum of the whole pack, its tokens, labels and layout, if the batch is a part; else 0.
        launches: the launches of the flash kernel for this pack on CUDA. Each is for neighbouring documents: (first
            document, last document + 1, first token, last token + 1, tokens of the longest document). (): one launch of
            all documents. A launch wastes time on documents that are much shorter than its longest, so
            `data/by_length.py` plans launches of documents of similar length.
        is_packed: whether the batch is a pack, with document boundaries, or a part of one.
        shares_rows: whether a row may belong to several documents.
    """

    group: Group  # no default, because torch.compile cannot construct an object as the default of a dataclass field
    num_tokens: int = 0
    checksum: int = 0
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    is_packed: ClassVar[bool] = True
    shares_rows: ClassVar[bool] = False

    @property
    def weighs_rows(self) -> bool:
        """Whether the router loss must weigh rows by `row_counts`, and sum over the ranks that share the pack.

        The router loss balances the experts of a mixture-of-experts model. It is computed from means over rows.
        """
        return self.shares_rows or not self.group.is_alone

    @property
    @abstractmethod
    def document_count(self) -> int:
        """N, the number of documents, with padding except in `SharedRowsLayout`."""

    @abstractmethod
    def targets(self, mask: Tensor) -> Targets:
        """Return the targets that the rows of this rank predict.

        Args:
            mask: whether the next token of each row is trained: (B, S - 1) or (1, T - 1), because the last token has no
                next one, or (1, T / s) in a part, whose last token may have its next token in the next part.
        """

    @abstractmethod
    def row_counts(self, trained: Tensor) -> Tensor:
        """Return for each row of this rank the number of documents with a trained token that it belongs to.

        The means of the router loss count a row so many times, as if no documents shared it. Rows of padding count 0.

        Args:
            trained: number of trained tokens of each document, as in `Targets`.

        Returns:
            (B, S), (1, T), or (1, T / s) in a part. Bool if no documents share rows, so that numbers are 0 or 1.
        """

    @abstractmethod
    def sizes(self, trained: Tensor) -> Sizes:
        """Return how much is computed for the batch.

        Args:
            trained: number of trained tokens of each document, as in `Targets`.
        """

    @abstractmethod
    def predicting_rows(self, document: int) -> Tensor:
        """Return the rows that predict the tokens of a document, on the CPU.

        Call it only if every token of the batch is trained, and the batch is not a part. In a padded batch, rows are
        numbered over (B * S).
        """

    def attention_fields(self) -> dict[str, Any]:
        """Return the fields of `PackedForward` that attention needs beside the boundaries, by name."""
        return {
            "launches": self.launches,
            "group": self.group,
            "part_tokens": self.num_tokens // self.group.size,
        }

    def batch_to_count(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch in which code that counts labels, such as transformers', finds the targets of this rank."""
        return batch

    def cut_to_part(self, rows: slice, mask: Tensor) -> Self:
        """Return the layout of the part that one rank holds of this pack.

        Args:
            rows: the rows of the rank.
            mask: whether the next token of each row of the pack is trained, (1, T).
        """
        raise TypeError(f"{type(self).__name__} is not the layout of a pack.")

    def checksum_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that a checksum of the pack must contain beside its tokens, labels and boundaries."""
        return ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on another device. accelerate's loaders call it."""
        return self._map_tensors(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory, from which a copy to a GPU does not make the host wait. Loaders call it."""
        return self._map_tensors(lambda value: value.pin_memory())

    def _map_tensors(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `move` applied to every tensor, except in fields whose metadata say "on_host"."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if "on_host" not in entry.metadata}
        moved: dict[str, Any] = {name: move(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class UnpackedLayout(Layout):
    """The layout of a padded batch that is not packed: each of its B lines is a document.

    Attributes:
        tokens: any tensor with one entry per token, (B, S). Its values are not read.
        attention_mask: 0 at padding, (B, S); None if there is no padding.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    is_packed = False

    @property
    def document_count(self) -> int:
        return len(self.tokens)

    def targets(self, mask: Tensor) -> Targets:
        documents = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        return Targets(documents, _count_trained(documents, len(mask), mask))

    def row_counts(self, trained: Tensor) -> Tensor:
        return (trained > 0)[:, None].expand(self.tokens.shape)

    def sizes(self, trained: Tensor) -> Sizes:
        mask = torch.ones_like(self.tokens) if self.attention_mask is None else self.attention_mask
        num_tokens = mask.sum()
        lengths = mask.sum(-1) * (trained > 0)
        return Sizes(num_tokens, num_tokens, lengths, shared_tokens=torch.zeros_like(lengths))

    def predicting_rows(self, document: int) -> Tensor:
        length = self.tokens.shape[1]
        return torch.arange(document * length, (document + 1) * length - 1)


@dataclass(frozen=True, eq=False)
class PackedLayout(Layout):
    """The layout of a pack, or of a part of it, whose documents are one after the other and share no rows.

    Attributes:
        cu_seq_lens: boundaries of the documents in the whole pack, (N + 1,).
        seq_idx: the document of each row, (1, rows).
        next_documents: in a part the document of the token after each row, which may be in the next part, (1, rows);
            None in a whole pack.
        trained: in a part the number of trained tokens of each document in all parts, (N,); None in a whole pack.
    """

    cu_seq_lens: Tensor
    seq_idx: Tensor
    next_documents: Tensor | None = None
    trained: Tensor | None = None

    @property
    def document_count(self) -> int:
        return len(self.cu_seq_lens) - 1

    def targets(self, mask: Tensor) -> Targets:
        if self.next_documents is not None and self.trained is not None:  # in a part both are set
            return Targets(self.next_documents, self.trained)
        documents = self.seq_idx[:, 1:].long()
        return Targets(documents, _count_trained(documents, self.document_count, mask))

    def row_counts(self, trained: Tensor) -> Tensor:
        return (trained > 0)[self.seq_idx]

    def sizes(self, trained: Tensor) -> Sizes:
        lengths = self.cu_seq_lens.diff() * (trained > 0)
        computed_rows = self.row_counts(trained).sum()
        return Sizes(lengths.sum(), computed_rows, lengths, shared_tokens=torch.zeros_like(lengths))

    def predicting_rows(self, document: int) -> Tensor:
        start, stop = self.cu_seq_lens[document : document + 2].tolist()
        return torch.arange(start, stop - 1)

    def cut_to_part(self, rows: slice, mask: Tensor) -> Self:
        # First shift the documents by one token, then cut them, because the token after the last row of a part is in
        # the next part. No token comes after the last row of the pack, so any document will do for it.
        next_documents = torch.cat([self.seq_idx[:, 1:], self.seq_idx[:, -1:]], dim=1).long()
        return replace(
            self,
            seq_idx=self.seq_idx[:, rows].contiguous(),
            next_documents=next_documents[:, rows].contiguous(),
            trained=_count_trained(next_documents, self.document_count, mask),
        )


@dataclass(frozen=True, eq=False)
class SharedRowsLayout(Layout):
    """The layout of a pack, or of a part of it, in which documents share rows, as `features/prefixes` makes it.

    A document is named by its place in the list that was collated, 0 to N - 1. Here padding is no document. All tensors
    are int64. In a part, `target_rows`, `target_documents` and `num_documents` describe the rows of the part, and all
    other attributes describe the whole pack.

    Attributes:
        kv_index: the rows that are the keys of each run, run after run, (cu_seq_lens_k[-1],).
        target_rows: for each of the M targets, the number of the row that predicts it, plus 1, (M,). In a whole pack,
            this is the place of the target in `labels`, because models compare each row with the label of the next row.
        target_documents: the document of each target, (M,).
        num_documents: for each row, the number of documents with a trained token to which it belongs, (T,), or (T / s,)
            in a part.
        lengths: tokens of each document, (N,).
        shared: tokens of each document that are not in its run, because documents before it have them, (N,).
        trained: number of trained tokens of each document, (N,).
        run_lengths: number of rows and number of keys of each run, (runs, 2), on the host.
    """

    kv_index: Tensor
    target_rows: Tensor
    target_documents: Tensor
    num_documents: Tensor
    lengths: Tensor
    shared: Tensor
    trained: Tensor
    run_lengths: Tensor | None = field(default=None, metadata={"on_host": True})
    shares_rows = True

    @property
    def document_count(self) -> int:
        return len(self.lengths)

    def targets(self, mask: Tensor) -> Targets:
        return Targets(self.target_documents, self.trained, self.target_rows - 1)

    def row_counts(self, trained: Tensor) -> Tensor:
        return self.num_documents[None]

    def sizes(self, trained: Tensor) -> Sizes:
        is_trained = trained > 0
        lengths = self.lengths * is_trained
        computed_rows = (self.num_documents > 0).sum()
        return Sizes(lengths.sum(), computed_rows, lengths, shared_tokens=self.shared * is_trained)

    def attention_fields(self) -> dict[str, Any]:
        return super().attention_fields() | {"kv_index": self.kv_index, "run_lengths": self.run_lengths}

    def batch_to_count(self, batch: dict[str, Any]) -> dict[str, Any]:
        # Only the number of labels that are not -100 counts. So any tensor with one such entry for each target will do,
        # and no other entry of the batch is needed.
        return {"labels": self.target_documents, "shift_labels": self.target_documents}

    def predicting_rows(self, document: int) -> Tensor:
        return (self.target_rows[self.target_documents == document] - 1).cpu()

    def cut_to_part(self, rows: slice, mask: Tensor) -> Self:
        predicting_rows = self.target_rows - 1
        is_in_part = (predicting_rows >= rows.start) & (predicting_rows < rows.stop)
        return replace(
            self,
            target_rows=self.target_rows[is_in_part] - rows.start,
            target_documents=self.target_documents[is_in_part],
            num_documents=self.num_documents[rows].contiguous(),
        )

    def checksum_tensors(self) -> tuple[Tensor, ...]:
        return self.kv_index, self.target_rows, self.target_documents


def layout_of(batch: dict[str, Any]) -> Layout:
    """Return the layout of a batch: the stored one, or else one that is made from its boundaries or its tokens."""
    if LAYOUT_KEY in batch:
        return batch[LAYOUT_KEY]
    get: Callable[[str], Any] = batch.get
    if get("cu_seq_lens_q") is not None:
        return PackedLayout(get("cu_seq_lens_q"), get("seq_idx"), group=ALONE)
    tokens = get("labels") if "labels" in batch else get("input_ids")
    return UnpackedLayout(tokens, get("attention_mask"), group=ALONE)


def _count_trained(documents: Tensor, num_documents: int, mask: Tensor) -> Tensor:
    """Return the number of trained tokens of each document, (N,).

    Args:
        documents: the document of the next token of each row, int64.
        num_documents: N.
        mask: whether the next token of each row is trained, in the shape of `documents`.
    """
    # `bincount` would make the host wait for the GPU.
    counts = torch.zeros(num_documents, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(0, documents.flatten(), mask.flatten().long())
