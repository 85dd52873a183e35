"""Say which document each row of a batch belongs to: the `Layout` of a batch answers all questions about documents.

The collators make batches. The loss, its weights, the metrics, attention and the checks call `layout_of(batch)` and its
methods, so that none of them depends on which feature made the batch:

    layout              batch                                                   stored in the batch as
    UnpackedLayout      unpacked: each row of the batch is a document           nothing, it is a view of the tokens
    PackedLayout        a pack: documents one after the other                   nothing, it is a view of the boundaries
    SharedRowsLayout    a pack in which documents share rows                    `batch["layout"]`

Because a view has no entry in the batch, other training loops and other attention see a plain packed batch. The guard
on the model (`attention/forwards.py`) removes an entry before the model runs. accelerate's loaders move an entry to the
device and pin it, as they do with tensors, because it has `to` and `pin_memory`.

Words: a *pack* is one row of T tokens with several documents. Its tokens are called its *rows*, as they are the rows of
the matrix of states, (T, hidden). With `share_prefixes` (`features/prefixes`) the rows of a common beginning
belong to several documents, and the rows that a document adds to the documents before it are its *run*. The *part* of a
rank is the rows that it has of a pack that several ranks share (`data/rank_share.py`); every part has an entry in its
batch. A *trained token* is one whose label is not -100, and a *target* is a pair of a document and a trained token.

B rows of an unpacked batch, T tokens of a pack, N documents (padding counts as one), s ranks that share a pack.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy.typing as npt
import torch
from torch import Tensor

from .group import ALONE, Group
from .planning.arrays import IGNORE_INDEX as IGNORE_INDEX
from .planning.arrays import TEXT_KEYS as TEXT_KEYS

LAYOUT_KEY = "layout"  # name of the entry of a batch


class ComparedContent(NamedTuple):
    """The content of a document by which shared rows are found. An image is shared as a whole or not at all."""

    tokens: npt.NDArray[Any]  # numbers below 2**32 - 1, one for each token; equal numbers are equal content
    images: Sequence[tuple[int, int]] = ()  # first token of each image, and the token after its last


Compare = Callable[[Sequence[dict[str, Any]]], list[ComparedContent]]
"""Gives what is compared of each of some documents."""


@dataclass(frozen=True)
class Targets:
    """The targets of a batch: the trained tokens of each document, and the rows that predict them.

    The loss, its weights, the metrics and the sources are sums over targets. So none of them depends on which rows
    documents share.

    Attributes:
        documents: the document of each value that `select` returns.
        trained: number of trained tokens of each document, (N,), in all parts of the pack.
        positions: for each of the M targets the row that predicts it, (M,). None if each row predicts a token of one
            document; values of rows whose token is not trained are then 0.
    """

    documents: Tensor
    trained: Tensor
    positions: Tensor | None = None

    def select(self, values: Tensor) -> Tensor:
        """Return the values of the targets, (M,), from the values of all rows; all values if `positions` is None."""
        return values if self.positions is None else values.flatten()[self.positions]


@dataclass(frozen=True)
class Sizes:
    """How much is computed for a batch. `tokens`, `lengths` and `saved` are of the whole pack, also in a part."""

    tokens: Tensor  # number of tokens of all trained documents, or of all documents of an unpacked batch, ()
    computed: Tensor  # number of rows of trained documents that this rank computes, ()
    lengths: Tensor  # tokens of each document, 0 if it has no trained token, (N,)
    saved: Tensor  # tokens of each document that are computed for another document, which shares them, (N,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(ABC):
    """Base class of the three layouts: the questions that every layout answers.

    Attributes:
        group: the s ranks that share the pack.
        num_tokens: in a part T, the number of rows of the whole pack, a multiple of s; else 0.
        checksum: in a part the checksum of tokens, labels and layout of the whole pack; else 0.
        launches: calls of the attention kernel for this pack on CUDA, as `data/by_length.py` plans them.
        is_packed: whether the batch is one row with document boundaries.
        shares_rows: whether a row may belong to several documents.
    """

    group: Group  # no default, because torch does not compile a default that is an object
    num_tokens: int = 0
    checksum: int = 0
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    is_packed: ClassVar[bool] = True
    shares_rows: ClassVar[bool] = False

    @property
    def weighs_rows(self) -> bool:
        """Whether the router statistic must weigh rows, because some count several times, or not at all."""
        return self.shares_rows or not self.group.is_alone

    @property
    @abstractmethod
    def document_count(self) -> int:
        """N, the number of documents, padding included."""

    @abstractmethod
    def targets(self, mask: Tensor) -> Targets:
        """Return the targets of this rank.

        Args:
            mask: True at rows behind which the token is trained, (B, T - 1), or (1, T / s) in a part.
        """

    @abstractmethod
    def row_counts(self, trained: Tensor) -> Tensor:
        """Return for how many documents each row of this rank counts in the router statistic, (B, rows).

        It is 0 for padding, and for documents without a trained token.

        Args:
            trained: number of trained tokens of each document, as in `Targets`.
        """

    @abstractmethod
    def sizes(self, trained: Tensor) -> Sizes:
        """Return how much is computed for the batch.

        Args:
            trained: number of trained tokens of each document, as in `Targets`.
        """

    @abstractmethod
    def predicting(self, document: int) -> Tensor:
        """Return the rows that predict the tokens of a document, on the CPU.

        The batch must be a whole pack in which every token is trained.
        """

    def attention(self) -> dict[str, Any]:
        """Return the fields of `PackedForward` that attention needs beside the boundaries."""
        return {
            "launches": self.launches,
            "group": self.group,
            "part_tokens": self.num_tokens // self.group.size,
        }

    def labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with one label per target of this rank, for code that counts labels, such as transformers."""
        return batch

    def cut(self, rows: slice, mask: Tensor) -> Self:
        """Return the layout of some rows of this pack, for the rank that has them.

        Args:
            rows: the rows of the rank.
            mask: True at rows behind which the token is trained, (1, T).
        """
        raise TypeError(f"{type(self).__name__} is not the layout of a pack.")

    def content(self) -> tuple[Tensor, ...]:
        """Return tensors that may differ between two packs with equal tokens, labels and boundaries, for a checksum."""
        return ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on another device. accelerate's loaders call it."""
        return self._map_tensors(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory. Loaders call it: the host waits for copies to a GPU from other memory."""
        return self._map_tensors(lambda value: value.pin_memory())

    def _map_tensors(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with every tensor moved, except tensors of fields that are marked to be on the host."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if "on_host" not in entry.metadata}
        moved: dict[str, Any] = {name: move(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class UnpackedLayout(Layout):
    """The layout of an unpacked batch: each of the B rows is a document."""

    tokens: Tensor  # any tensor with one entry per token, (B, T); its values are not read
    attention_mask: Tensor | None  # 0 at padding, (B, T); None if there is no padding
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
        lengths = mask.sum(-1) * (trained > 0)
        return Sizes(mask.sum(), mask.sum(), lengths, torch.zeros_like(lengths))

    def predicting(self, document: int) -> Tensor:
        length = self.tokens.shape[1]
        return torch.arange(document * length, (document + 1) * length - 1)


@dataclass(frozen=True, eq=False)
class PackedLayout(Layout):
    """The layout of a pack, or of a part of it, whose documents are one after the other and share no rows.

    Attributes:
        cu_seq_lens: boundaries of the documents in the whole pack, (N + 1,).
        seq_idx: the document of each row, (1, rows).
        following: in a part the document of the token after each row, which may be in the next part, (1, rows); None
            in a whole pack.
        trained: in a part the number of trained tokens of each document in all parts, (N,); None in a whole pack.
    """

    cu_seq_lens: Tensor
    seq_idx: Tensor
    following: Tensor | None = None
    trained: Tensor | None = None

    @property
    def document_count(self) -> int:
        return len(self.cu_seq_lens) - 1

    def targets(self, mask: Tensor) -> Targets:
        if self.following is not None and self.trained is not None:
            return Targets(self.following, self.trained)
        documents = self.seq_idx[:, 1:].long()
        return Targets(documents, _count_trained(documents, self.document_count, mask))

    def row_counts(self, trained: Tensor) -> Tensor:
        return (trained > 0)[self.seq_idx]

    def sizes(self, trained: Tensor) -> Sizes:
        lengths = self.cu_seq_lens.diff() * (trained > 0)
        return Sizes(lengths.sum(), self.row_counts(trained).sum(), lengths, torch.zeros_like(lengths))

    def predicting(self, document: int) -> Tensor:
        start, stop = self.cu_seq_lens[document : document + 2].tolist()
        return torch.arange(start, stop - 1)

    def cut(self, rows: slice, mask: Tensor) -> Self:
        following = torch.cat([self.seq_idx[:, 1:], self.seq_idx[:, -1:]], dim=1).long()
        return replace(
            self,
            seq_idx=self.seq_idx[:, rows].contiguous(),
            following=following[:, rows].contiguous(),
            trained=_count_trained(following, self.document_count, mask),
        )


@dataclass(frozen=True, eq=False)
class SharedRowsLayout(Layout):
    """The layout of a pack, or of a part of it, in which N documents share some of R rows.

    A document is named by its place in the batch that was collated, 0 to N - 1. Padding belongs to no document. All
    tensors are int64. In a part, the targets and `num_documents` describe its own rows, and all other attributes
    describe the whole pack.

    Attributes:
        kv_index: the rows that are the keys of each run, run after run, (cu_seq_lens_k[-1],).
        target_rows: for each of the M targets the row after the one that predicts it, (M,). In a whole pack, `labels`
            has the target's label in this row.
        target_documents: the document of each target, (M,).
        num_documents: for each row, the number of documents with a trained token to which it belongs, (R,).
        lengths: tokens of each document, (N,).
        shared: rows that each document shares with the document that was sorted before it, (N,).
        trained: number of trained tokens of each document, (N,).
        run_lengths: numbers of rows and keys of each run, (runs, 2), on the host.
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
        return Sizes(lengths.sum(), (self.num_documents > 0).sum(), lengths, self.shared * is_trained)

    def attention(self) -> dict[str, Any]:
        return super().attention() | {"kv_index": self.kv_index, "run_lengths": self.run_lengths}

    def labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"labels": self.target_documents, "shift_labels": self.target_documents}

    def predicting(self, document: int) -> Tensor:
        return (self.target_rows[self.target_documents == document] - 1).cpu()

    def cut(self, rows: slice, mask: Tensor) -> Self:
        predicting = self.target_rows - 1
        is_in_part = (predicting >= rows.start) & (predicting < rows.stop)
        return replace(
            self,
            target_rows=self.target_rows[is_in_part] - rows.start,
            target_documents=self.target_documents[is_in_part],
            num_documents=self.num_documents[rows].contiguous(),
        )

    def content(self) -> tuple[Tensor, ...]:
        return self.kv_index, self.target_rows, self.target_documents


def layout_of(batch: dict[str, Any]) -> Layout:
    """Return the layout of a batch: its entry if it has one, else a view of its boundaries or of its rows."""
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
        documents: the document of the token after each row.
        num_documents: N.
        mask: True at rows behind which the token is trained.
    """
    # `bincount` would make the host wait for the GPU.
    counts = torch.zeros(num_documents, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(0, documents.flatten(), mask.flatten().long())
