"""Cut a packed batch into the parts that the ranks of a group hold: sequence parallelism.

A group is `degree` neighbouring ranks that share one pack of T tokens. The member with index i holds tokens i * T / s
to (i + 1) * T / s, where s is the degree. Parts do not follow documents: a document may begin in one part and end in
another. Labels are shifted before the cut, because the label of a part's last token lies in the next part.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .collator import IGNORE_INDEX

# Entries of a packed batch with one value per token, (1, T). The boundaries stay those of the whole pack.
PER_TOKEN = ("input_ids", "labels", "position_ids", "seq_idx")


@dataclass(frozen=True)
class PackPart:
    """Which part of a pack a batch holds, and what the loss must know of the rest.

    Attributes:
        degree: s, the number of ranks that share the pack, at least 2.
        index: of this rank in its group, 0 to s - 1.
        num_tokens: T, tokens of the whole pack, a multiple of s.
        next_document: the document of the token after each token of this part, (1, T / s).
        trained: trained tokens of each document of the whole pack, (N,).
        checksum: of the tokens, labels and boundaries of the whole pack; equal on all members of the group.
    """

    degree: int
    index: int
    num_tokens: int
    next_document: Tensor
    trained: Tensor
    checksum: int

    @property
    def is_first(self) -> bool:
        """Whether this rank counts what a group must count once, such as documents."""
        return self.index == 0

    def to(self, device: Any, non_blocking: bool = False) -> "PackPart":
        """The same with its tensors on another device; accelerate's loaders call it, as for a tensor."""
        moved = (x.to(device, non_blocking=non_blocking) for x in (self.next_document, self.trained))
        next_document, trained = moved
        return replace(self, next_document=next_document, trained=trained)

    def pin_memory(self) -> "PackPart":
        """The same in pinned memory; loaders call it. From other memory the host would wait for the copy to a GPU."""
        return replace(self, next_document=self.next_document.pin_memory(), trained=self.trained.pin_memory())


@dataclass(frozen=True)
class PartOf:
    """A pack of which a rank holds a part: its documents, the ranks that share it, and which of the parts it is.

    The sampler yields document indices, and the dataset reads them: each rank of a group reads the whole pack.
    """

    documents: list[Any]
    degree: int
    index: int


def cut_part(batch: dict[str, Any], degree: int, index: int) -> dict[str, Any]:
    """The part of a packed batch of T tokens that the member `index` of a group of `degree` ranks holds.

    `input_ids`, `labels`, `position_ids` and `seq_idx` become (1, T / degree). `shift_labels` of the same shape is
    added: the label of the next token, which may lie in the next part. `cu_seq_lens_q/k` and `max_length_q/k` stay
    those of the whole pack. "pack_part" holds the rest (`PackPart`). With degree 1 the batch is returned as it is.

    Raises:
        ValueError: T is not a multiple of `degree`.

    >>> from trl_packfix import PackedDataCollator
    >>> whole = PackedDataCollator(pad_to_multiple_of=2)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> part = cut_part(whole, degree=2, index=0)
    >>> part["input_ids"].tolist(), part["shift_labels"].tolist(), part["pack_part"].trained.tolist()
    ([[5, 6, 7]], [[6, 7, -100]], [2, 1, 0])
    """
    if degree == 1:
        return batch
    labels, seq_idx = batch["labels"], batch["seq_idx"]
    num_tokens = labels.shape[1]
    if num_tokens % degree:
        raise ValueError(
            f"A pack of {num_tokens} tokens was given to cut into {degree} parts. All parts have the same number of "
            f"tokens, and {num_tokens} is not a multiple of {degree}. Collate with `pad_to_multiple_of={degree}`."
        )
    part = slice(index * num_tokens // degree, (index + 1) * num_tokens // degree)
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    following = torch.cat([seq_idx[:, 1:], seq_idx[:, -1:]], dim=1).long()
    trained = torch.zeros(len(batch["cu_seq_lens_q"]) - 1, dtype=torch.long)
    trained.scatter_add_(0, following.flatten(), (shifted != IGNORE_INDEX).flatten().long())
    checksum = 0
    for tensor in (batch["cu_seq_lens_q"], batch["input_ids"], labels):
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    cut = {name: batch[name][:, part].contiguous() for name in PER_TOKEN}
    cut["shift_labels"] = shifted[:, part].contiguous()
    cut["pack_part"] = PackPart(degree, index, num_tokens, following[:, part].contiguous(), trained, checksum)
    return batch | cut
