"""Choose documents of a run for the comparison of the first step, and hold the result of the comparison.

The comparison (`first_step.py`) trains a few documents packed and unpacked, before the first optimizer step. This
module chooses three of the first documents of a run, which are likely to show an error, and shortens them. The result
is a `StepComparison`: a line for the report, the measured gaps, and the problem that was found.

Words: A document is a dictionary of the values of one sample (`input_ids`, `labels`, images, weight, source). A
*trained token* is a token with a label; the model predicts it at the position before, so the first token of a document
is never trained. *Packed* documents stand in one row, *unpacked* each document is a row of its own. With sequence
parallelism, a *group* of neighbouring ranks shares each pack.
"""

from dataclasses import dataclass
from itertools import takewhile
from math import inf, isnan
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.collator import PackedDataCollator
from ..data.loaders import dummy_document
from ..data.row_values import SOURCES, WEIGHTS
from ..isolation.check_step import document_length
from ..isolation.isolation_report import PackingLeakError
from ..layout import IGNORE_INDEX, TEXT_KEYS, layout_of

NUM_CANDIDATES = 32  # documents that are read, of which `NUM_DOCUMENTS` are chosen
NUM_DOCUMENTS = 3
NUM_HALF_TOKENS = 16  # a shortened text has 16 tokens of its beginning, and 16 around its first trained token
# A document of at most this many tokens is preferred. A document with images is not shortened, so it may have more
MOST_TOKENS = 512

# Keys of a batch without images: the keys that the collator makes, and the keys of row values
TEXT_BATCH_KEYS = {*PackedDataCollator()([{"input_ids": [0]}]), WEIGHTS, SOURCES}

Document = dict[str, Any]


@dataclass(frozen=True)
class StepComparison:
    """The result of the comparison of the first step, packed and unpacked.

    Attributes:
        text: the line of the report.
        loss_gap: relative difference of the losses; None if they were not compared.
        gradient_gap: largest relative difference of the gradients of a parameter; None if they were not compared.
        problem: what differs by more than rounding, in words; None if there is no such difference.
    """

    text: str
    loss_gap: float | None = None
    gradient_gap: float | None = None
    problem: str | None = None

    def metrics(self) -> dict[str, float]:
        """Return the measured gaps by their metric names, for a logger."""
        values = {"first_step/loss_gap": self.loss_gap, "first_step/gradient_gap": self.gradient_gap}
        return {name: value for name, value in values.items() if value is not None}

    def raise_if_different(self) -> None:
        """Raise `PackingLeakError` if packed and unpacked training differ by more than rounding."""
        if self.problem is not None:
            raise PackingLeakError(
                f"A few documents of the run were trained packed and unpacked before the first step: {self.problem}. "
                "So packs would train otherwise than rows, by more than rounding. For example, a module takes a mean "
                "over a batch, or a hook takes a pack for one document. Set `packing=False`, and please report it with "
                "this message."
            )


def choose_documents(documents: list[Document]) -> list[Document]:
    """Choose `NUM_DOCUMENTS` of the given documents, and shorten them.

    Each given document has a trained token. If too few are given, some are chosen several times. First come the two
    documents with the longest common beginning, which `share_prefixes` computes once. Then come documents with images,
    and then texts, each the shortest first.
    """
    # For an empty list, a dummy: a document without a trained token
    shortened = [_shorten(document) for document in documents] or [dummy_document(0)]
    short_enough = [document for document in shortened if document_length(document) <= MOST_TOKENS]
    candidates = short_enough or [min(shortened, key=document_length)]
    # In the order of their tokens, the documents with the longest common beginning are neighbours
    ordered = sorted(candidates, key=lambda document: np.asarray(document["input_ids"]).tolist())
    first = max(range(len(ordered)), key=lambda i: _num_common_tokens(ordered[i : i + 2]))
    similar = ordered[first : first + 2]
    different = ordered[:first] + ordered[first + 2 :]
    different.sort(key=lambda document: (is_text(document), document_length(document)))
    return ((similar + different) * NUM_DOCUMENTS)[:NUM_DOCUMENTS]


def _num_common_tokens(documents: list[Document]) -> int:
    """Return the number of tokens with which two documents both begin; 0 for a list of one document."""
    if len(documents) == 1:
        return 0
    first, second = (document["input_ids"] for document in documents)
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def is_text(document: Document) -> bool:
    """Return whether a document has no images, only text and perhaps a weight."""
    return document.keys() <= TEXT_KEYS | {WEIGHTS}  # `TEXT_KEYS`: `input_ids` and `labels`


def _shorten(document: Document) -> Document:
    """Return a document without its source and, if it is a text, with at most 2 x `NUM_HALF_TOKENS` tokens.

    A shortened text has the first tokens of the document, and the tokens around its first trained token. The last token
    of the document, mostly an end token, is removed if at least two tokens are trained: a model must also separate
    documents that have no end token.
    """
    document = {name: value for name, value in document.items() if name != SOURCES}
    if not is_text(document):
        return document
    # The positions that predict a trained token
    positions = np.flatnonzero(np.asarray(document["labels"])[1:] != IGNORE_INDEX)
    second_half = max(NUM_HALF_TOKENS, int(positions[0]) - NUM_HALF_TOKENS // 2)
    indices = np.r_[0:NUM_HALF_TOKENS, second_half : second_half + NUM_HALF_TOKENS]
    removes_last = len(positions) > 1
    indices = indices[indices < document_length(document) - removes_last]
    return document | {name: np.asarray(document[name])[indices] for name in TEXT_KEYS}


def to_int64(values: npt.ArrayLike) -> Tensor:
    """Return a copy of the values as an int64 tensor. Values of a table are read-only, so they must be copied."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def is_plain(batch: dict[str, Any]) -> bool:
    """Return whether a batch is a whole pack of texts in which documents share no prefix."""
    layout = layout_of(batch)
    names_of_tensors = {name for name, value in batch.items() if isinstance(value, Tensor)}
    is_text_batch = names_of_tensors <= TEXT_BATCH_KEYS
    # `weighs_rows`: documents share tokens, or the batch is a part of a pack
    return is_text_batch and layout.is_packed and not layout.weighs_rows


def longest_of(batch: dict[str, Any]) -> Tensor:
    """Return the tokens, (n,), of the longest document of a pack, on the CPU.

    Documents without a trained token are padding, and are not considered. If the pack has no others, the first one is
    returned.
    """
    bounds = batch["cu_seq_lens_q"]
    # The number of trained tokens before each position. The labels of a pack are -100 at the first token of a document
    num_trained_before = F.pad((batch["labels"][0] != IGNORE_INDEX).cumsum(0), (1, 0))
    is_trained = num_trained_before[bounds].diff() > 0
    longest = (bounds.diff() * is_trained).argmax()
    # Both numbers in one transfer, because the host waits for the device in each
    start, stop = bounds[torch.stack([longest, longest + 1])].tolist()
    return batch["input_ids"][0, start:stop].cpu()


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors relative to the spread of `expected`; infinity if it is not a number.

    The spread is measured around the mean, because the states of an untrained model are nearly equal.
    """
    spread = (expected - expected.mean()).norm().clamp(min=torch.finfo(expected.dtype).tiny)
    gap = float((actual - expected).norm() / spread)
    return inf if isnan(gap) else gap
