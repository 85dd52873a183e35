"""Which document each row of a batch belongs to: one value that attention, the loss, the log and the checks ask.

No caller asks which feature made a batch. It takes the layout of the batch, `layout_of(batch)`, and asks it.

    layout  is the layout of                                                    in the batch
    Rows    an unpacked batch: each row is a document                           nothing, it is a view
    Whole   a pack: documents one after the other                               nothing, it is a view of the boundaries
    Runs    a pack in which documents share rows (`data/prefix_collator.py`)    `batch["layout"]`

Of ranks that share a pack, each has the layout of its rows, a *part* (`data/rank_share.py`), in `batch["layout"]`.

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

LAYOUT_KEY = "layout"  # the entry of a batch
IGNORE_INDEX = -100  # label of a token that is not trained
TEXT_KEYS = frozenset(("input_ids", "labels"))  # of a document, without images and values of rows


class ComparedContent(NamedTuple):
    """What is compared of a document to find rows that it shares. An image is shared as a whole or not at all."""

    tokens: npt.NDArray[Any]  # numbers below 2**32 - 1, one for each token
    images: Sequence[tuple[int, int]] = ()  # first token of each image, and the one after its last


@dataclass(frozen=True)
class Targets:
    """The trained tokens of each document, and where the model predicts them.

    The loss, its weights, the metrics and the sources are sums over targets. So none of them depends on which rows
    documents share.
    """

    documents: Tensor  # the document of each value that `select` returns
    trained: Tensor  # number of trained tokens of each document, (N,), also of those in other parts
    # The place of each of the M targets among the positions, (M,). None if each position is the target of one document;
    # a mask then says whether it is trained
    positions: Tensor | None = None

    def select(self, values: Tensor) -> Tensor:
        """The values of the targets, (M,), from those of all positions, which are 0 where nothing is trained."""
        return values if self.positions is None else values.flatten()[self.positions]


@dataclass(frozen=True)
class Sizes:
    """What is computed for a batch; tokens are those of the whole pack, also in a part."""

    tokens: Tensor  # of all documents, ()
    computed: Tensor  # rows of documents that this rank computes, ()
    lengths: Tensor  # tokens of each document that is trained, else 0, (N,)
    saved: Tensor  # tokens of each document that are computed for another document, (N,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(ABC):
    """The questions that every layout answers."""

    degree: int = 1  # s, the number of ranks that share the pack
    index: int = 0  # which of these ranks this one is
    num_tokens: int = 0  # of a part T, a multiple of s
    checksum: int = 0  # of a part that of the tokens, the labels and the layout of the whole pack
    launches: tuple[tuple[int, int, int, int, int], ...] = ()  # of attention on CUDA (`data/by_length.py`)
    is_packed: ClassVar[bool] = True  # one row with boundaries
    shares_rows: ClassVar[bool] = False  # whether one row may hold tokens of several documents

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
        part = {"degree": self.degree, "index": self.index, "part_tokens": self.num_tokens // self.degree}
        return {"launches": self.launches, **part}

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
        """The same on another device; accelerate's loaders call it."""
        return self._map_tensors(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in pinned memory. Loaders call it; from other memory the host would wait for the copy to a GPU."""
        return self._map_tensors(lambda value: value.pin_memory())

    def _map_tensors(self, move: Callable[[Tensor], Tensor]) -> Self:
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self) if "on_host" not in entry.metadata}
        moved: dict[str, Any] = {name: move(value) for name, value in entries.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class UnpackedLayout(Layout):
    """Each of the B rows is a document."""

    tokens: Tensor  # any tensor with one entry per token, (B, T)
    attention_mask: Tensor | None  # 0 where a row is padded, (B, T)
    is_packed = False

    @property
    def count(self) -> int:
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
    """Documents one after the other, none of them sharing a row."""

    cu_seq_lens: Tensor  # boundaries of the documents in the whole pack, (N + 1,)
    seq_idx: Tensor  # document of each row, (1, rows)
    following: Tensor | None = None  # of a part, the document of the token after each row, which may be in the next
    trained: Tensor | None = None  # of a part, the number of trained tokens of each document in all parts, (N,)

    @property
    def count(self) -> int:
        return len(self.cu_seq_lens) - 1

    def targets(self, mask: Tensor) -> Targets:
        if self.following is not None and self.trained is not None:
            return Targets(self.following, self.trained)
        documents = self.seq_idx[:, 1:].long()
        return Targets(documents, _count_trained(documents, self.count, mask))

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
        own = following[:, rows].contiguous()
        trained = _count_trained(following, self.count, mask)
        return replace(self, seq_idx=self.seq_idx[:, rows].contiguous(), following=own, trained=trained)


@dataclass(frozen=True, eq=False)
class SharedRowsLayout(Layout):
    """N documents in R rows, some of which belong to several documents (`data/prefix_collator.py`).

    A document is given by its place in the batch that was collated, 0 to N - 1. Padding belongs to none. In a part the
    targets and `num_documents` are those of its own rows, and everything else is that of the whole pack. All are int64.
    """

    kv_index: Tensor  # rows that are the keys of each run, run after run, (cu_seq_lens_k[-1],)
    # For each trained token of each document the row behind the one that predicts it, (M,). In a whole pack its label
    # is there in `labels`
    target_rows: Tensor
    target_documents: Tensor  # the document of each of them, (M,)
    num_documents: Tensor  # documents with a trained token that each row belongs to, (R,)
    lengths: Tensor  # tokens of each document, (N,)
    shared: Tensor  # rows that each document has from the one sorted before it, (N,)
    trained: Tensor  # number of trained tokens of each document, (N,)
    run_lengths: Tensor | None = field(default=None, metadata={"on_host": True})  # rows and keys of each run, (runs, 2)
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
    """The layout of a batch: its entry, else a view of the boundaries, else one document per row."""
    if LAYOUT_KEY in batch:
        return batch[LAYOUT_KEY]
    get: Callable[[str], Any] = batch.get
    if get("cu_seq_lens_q") is not None:
        return PackedLayout(get("cu_seq_lens_q"), get("seq_idx"))
    return UnpackedLayout(get("labels") if "labels" in batch else get("input_ids"), get("attention_mask"))


def _count_trained(documents: Tensor, num_documents: int, mask: Tensor) -> Tensor:
    """How many positions of each document the mask marks, (N,)."""
    # `bincount` would make the host wait for a GPU
    counts = torch.zeros(num_documents, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(0, documents.flatten(), mask.flatten().long())
