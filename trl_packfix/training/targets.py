"""The targets of a batch: each trained token of each document, and where the model predicts it.

A position of `labels[:, 1:]` is the target of one document, or with shared prefixes of all documents that share it. All
sums of the loss, of its weights, of the metrics and of the sources are sums over targets, so none of them depends on
what is shared.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.forwards import PACK_PART, PREFIXES


@dataclass(frozen=True)
class Targets:
    """What the loss must know of the N documents of a batch.

    Attributes:
        documents: the document of each value that `of` returns.
        trained: trained tokens of each document, shape (N,). Of a part of a pack: of the whole pack.
        positions: with shared prefixes, the position of each of the M targets in `labels[:, 1:]`, shape (M,). Otherwise
            None: each position belongs to one document, and a mask says whether it is trained.
    """

    documents: Tensor
    trained: Tensor
    positions: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """The value of each target, (M,), from those of all positions, (B, T - 1).

        Without shared prefixes the values themselves. They are zero where nothing is trained.
        """
        return values if self.positions is None else values.flatten()[self.positions]


def targets_of(label_mask: Tensor, inputs: dict[str, Any]) -> Targets:
    """The targets of a batch.

    Args:
        label_mask: True where the next token is trained, (B, T - 1), or (1, T / s) of a part of a pack. Without
            boundaries each row is a document.
    """
    if (part := inputs.get(PACK_PART)) is not None:
        return Targets(part.next_document, part.trained)
    if (shared := inputs.get(PREFIXES)) is not None:
        documents = shared.target_documents
        return Targets(documents, _counts(documents, len(shared.lengths)), shared.target_rows - 1)
    if "cu_seq_lens_q" in inputs:
        documents = inputs["seq_idx"][:, 1:].long()
        num_documents = len(inputs["cu_seq_lens_q"]) - 1
    else:
        num_documents = len(label_mask)
        documents = torch.arange(num_documents, device=label_mask.device)[:, None].expand(label_mask.shape)
    return Targets(documents, _counts(documents, num_documents, label_mask))


def _counts(documents: Tensor, num_documents: int, mask: Tensor | None = None) -> Tensor:
    # `bincount` would make the host wait for a GPU
    ones = torch.ones_like(documents) if mask is None else mask.long()
    counts = torch.zeros(num_documents, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(0, documents.flatten(), ones.flatten())
