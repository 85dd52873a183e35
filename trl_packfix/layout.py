"""Which document each row of a batch belongs to: one value that attention, the loss, the log and the checks ask.

No caller asks which feature made a batch. It takes the layout of the batch, `layout_of(batch)`, and asks it.

    layout  is the layout of                                                    in the batch
    Rows    an unpacked batch: each row is a document                           nothing, it is a view
    Whole   a pack: documents one after the other                               nothing, it is a view of the boundaries
    Runs    a pack in which documents share rows (`data/prefix_collator.py`)    `batch["layout"]`

Of ranks that share a pack, each has the layout of its rows, a *part* (`data/parts.py`), in `batch["layout"]`.

A view has no entry in the batch, so other training loops and other attention see a plain packed batch. The guard on the
model (`attention/forwards.py`) removes the entry before the model runs. accelerate's loaders move it to the device and
pin it, as they do with tensors, because it has `to` and `pin_memory`.

B rows of a batch, T tokens of a pack, N documents (padding counts as one), s ranks that share a pack.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy.typing as npt
import torch
from torch import Tensor

LAYOUT = "layout"  # the entry of a batch
IGNORE_INDEX = -100  # label of a token that is not trained
READ = frozenset(("input_ids", "labels"))  # of a document, without images and values of rows


class Compared(NamedTuple):
    """What is compared of a document to find rows that it shares, and which of its tokens are images.

    Attributes:
        tokens: numbers below 2**32 - 1 that are compared in place of the tokens, (n,).
        images: first token of each image, and the one after its last. The tokens of an image are shared all or not at
            all.
    """

    tokens: npt.NDArray[Any]
    images: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Targets:
    """The trained tokens of each document, and where the model predicts them.

    The loss, its weights, the metrics and the sources are sums over targets. So none of them depends on which rows
    documents share.

    Attributes:
        documents: the document of each value that `of` returns.
        trained: number of trained tokens of each document, (N,). In a part it counts those of the whole pack.
        positions: the place of each of the M targets among the positions, (M,). None if each position is the target of
            one document; a mask then says whether it is trained.
    """

    documents: Tensor
    trained: Tensor
    positions: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """The values of the targets, (M,), from those of all positions: (B, T - 1), or (1, T / s) of a part.

        Without `positions` it returns the values as they are. They are 0 where nothing is trained.
        """
        return values if self.positions is None else values.flatten()[self.positions]


@dataclass(frozen=True)
class Sizes:
    """What is computed for a batch.

    Attributes:
        tokens: of all documents, (). In a part those of the whole pack.
        computed: rows of documents that this rank computes, ().
        lengths: tokens of each document that is trained, else 0, (N,). In a part those of the whole pack.
        saved: tokens of each document that are computed for another document, (N,); None if there are none.
    """

    tokens: Tensor
    computed: Tensor
    lengths: Tensor
    saved: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(ABC):
    """The questions that every layout answers.

    Attributes:
        degree: s, the number of ranks that share the pack.
        index: which of these ranks this one is, 0 to s - 1.
        num_tokens: of a part T, a multiple of s.
        checksum: of a part that of the tokens, the labels and the layout of the whole pack.
        launches: what attention on CUDA computes in a launch each (`data/by_length.py`), on the host.
        is_packed: whether the batch is a pack, one row with boundaries.
        shares_rows: whether one row may hold tokens of several documents.
    """

    degree: int = 1
    index: int = 0
    num_tokens: int = 0
    checksum: int = 0
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    is_packed: ClassVar[bool] = True
    shares_rows: ClassVar[bool] = False

    @property
    def is_first(self) -> bool:
        """Whether this rank counts what the ranks that share a pack have only once, such as its documents."""
        return self.index == 0

    @property
    def weighs_rows(self) -> bool:
        """Whether the router statistic must count rows, because some count several times or not at all."""
        return self.shares_rows or self.degree > 1

    @property
    @abstractmethod
    def count(self) -> int:
        """N."""

    @abstractmethod
    def targets(self, mask: Tensor) -> Targets:
        """The targets; `mask` is True where the next token is trained, (B, T - 1), or (1, T / s) of a part."""

    @abstractmethod
    def row_counts(self, trained: Tensor) -> Tensor:
        """How many documents each row of this rank counts for in the router statistic, (B, rows); 0 for padding.

        `trained` is that of the targets.
        """

    @abstractmethod
    def sizes(self, trained: Tensor) -> Sizes:
        """What is computed; `trained` is that of the targets."""

    @abstractmethod
    def predicting(self, document: int) -> Tensor:
        """The rows that predict the tokens of a document, on the CPU, where every token of a whole pack is trained."""

    def attention(self) -> dict[str, Any]:
        """The fields of `PackedForward` that attention needs beside the boundaries."""
        given: dict[str, Any] = {"launches": self.launches} if self.launches else {}
        if self.degree > 1:
            given |= {"degree": self.degree, "index": self.index, "part_tokens": self.num_tokens // self.degree}
        return given

    def labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch for code that counts labels, such as transformers: it has one label per target of this rank."""
        return batch

    def cut(self, rows: slice, mask: Tensor) -> Self:
        """The layout of some rows of a whole pack; `mask` is True where the token after each row is trained, (1, T)."""
        raise TypeError(f"{type(self).__name__} is not the layout of a pack.")

    def content(self) -> tuple[Tensor, ...]:
        """What may differ between two packs with equal tokens, labels and boundaries, for a checksum."""
        return ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same on another device. accelerate's loaders call it."""
        return self._moved(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in pinned memory. Loaders call it; from other memory the host would wait for the copy to a GPU."""
        return self._moved(lambda value: value.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        moved: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor) and "on_host" not in entry.metadata:
                moved[entry.name] = move(value)
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Rows(Layout):
    """Each of the B rows is a document.

    Attributes:
        tokens: any tensor with one entry per token, (B, T).
        attention_mask: 0 where a row is padded, (B, T), or None.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    is_packed = False

    @property
    def count(self) -> int:
        return len(self.tokens)

    def targets(self, mask: Tensor) -> Targets:
        documents = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        return Targets(documents, _trained(documents, len(mask), mask))

    def row_counts(self, trained: Tensor) -> Tensor:
        return (trained > 0)[:, None].expand(self.tokens.shape)

    def sizes(self, trained: Tensor) -> Sizes:
        mask = torch.ones_like(self.tokens) if self.attention_mask is None else self.attention_mask
        return Sizes(mask.sum(), mask.sum(), mask.sum(-1) * (trained > 0))

    def predicting(self, document: int) -> Tensor:
        length = self.tokens.shape[1]
        return torch.arange(document * length, (document + 1) * length - 1)


@dataclass(frozen=True, eq=False)
class Whole(Layout):
    """Documents one after the other, none of them sharing a row.

    Attributes:
        cu_seq_lens: boundaries of the documents in the whole pack, (N + 1,).
        seq_idx: document of each row, (1, rows).
        following: document of the token after each row, (1, rows). Only of a part: it may lie in the next part.
        trained: number of trained tokens of each document, (N,). Only of a part: they may lie in other parts.
    """

    cu_seq_lens: Tensor
    seq_idx: Tensor
    following: Tensor | None = None
    trained: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.cu_seq_lens) - 1

    def targets(self, mask: Tensor) -> Targets:
        if self.following is not None and self.trained is not None:
            return Targets(self.following, self.trained)
        documents = self.seq_idx[:, 1:].long()
        return Targets(documents, _trained(documents, self.count, mask))

    def row_counts(self, trained: Tensor) -> Tensor:
        return (trained > 0)[self.seq_idx]

    def sizes(self, trained: Tensor) -> Sizes:
        lengths = self.cu_seq_lens.diff() * (trained > 0)
        return Sizes(lengths.sum(), self.row_counts(trained).sum(), lengths)

    def predicting(self, document: int) -> Tensor:
        start, stop = self.cu_seq_lens[document : document + 2].tolist()
        return torch.arange(start, stop - 1)

    def cut(self, rows: slice, mask: Tensor) -> Self:
        following = torch.cat([self.seq_idx[:, 1:], self.seq_idx[:, -1:]], dim=1).long()
        own, trained = following[:, rows].contiguous(), _trained(following, self.count, mask)
        return replace(self, seq_idx=self.seq_idx[:, rows].contiguous(), following=own, trained=trained)


@dataclass(frozen=True, eq=False)
class Runs(Layout):
    """N documents in R rows, some of which belong to several documents (`data/prefix_collator.py`).

    A document is given by its place in the batch that was collated, 0 to N - 1. Padding belongs to none. In a part the
    targets and `num_documents` are those of its own rows, and everything else is that of the whole pack.

    Attributes:
        kv_index: rows that are the keys of each run, run after run, int64, shape (cu_seq_lens_k[-1],).
        target_rows: for each trained token of each document the row behind the one that predicts it, int64, shape (M,).
            In a whole pack its label is there in `labels`.
        target_documents: the document of each of them, int64, shape (M,).
        num_documents: documents with a trained token that each row belongs to, int64, shape (R,).
        lengths: tokens of each document, int64, shape (N,).
        shared: rows that each document has from the one sorted before it, int64, shape (N,).
        trained: number of trained tokens of each document, int64, shape (N,).
        run_lengths: rows and keys of each run, int64, shape (runs, 2). It stays on the host, where attention needs it.
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
    def count(self) -> int:
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
        is_own = (predicting >= rows.start) & (predicting < rows.stop)
        return replace(
            self,
            target_rows=self.target_rows[is_own] - rows.start,
            target_documents=self.target_documents[is_own],
            num_documents=self.num_documents[rows].contiguous(),
        )

    def content(self) -> tuple[Tensor, ...]:
        return self.kv_index, self.target_rows, self.target_documents


def layout_of(batch: dict[str, Any]) -> Layout:
    """The layout of a batch: its entry, else a view of the boundaries, else one document per row.

    >>> from trl_packfix import PackedDataCollator
    >>> batch = PackedDataCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> layout_of(batch).targets(batch["labels"][:, 1:] != -100).trained.tolist()
    [2, 1]
    """
    if LAYOUT in batch:
        return batch[LAYOUT]
    get: Callable[[str], Any] = batch.get
    if get("cu_seq_lens_q") is not None:
        return Whole(get("cu_seq_lens_q"), get("seq_idx"))
    return Rows(get("labels") if "labels" in batch else get("input_ids"), get("attention_mask"))


def _trained(documents: Tensor, num_documents: int, mask: Tensor) -> Tensor:
    """How many positions of each document the mask marks, (N,)."""
    # `bincount` would make the host wait for a GPU
    counts = torch.zeros(num_documents, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(0, documents.flatten(), mask.flatten().long())
