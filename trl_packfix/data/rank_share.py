"""Cut a packed batch into the parts that the ranks of a group hold: sequence parallelism.

A group is `degree` neighbouring ranks that share one pack of T tokens. The member with index i holds tokens i * T / s
to (i + 1) * T / s, where s is the degree. Parts do not follow documents: a document may begin in one part and end in
another. Labels are shifted before the cut, because the label of a part's last token lies in the next part.
"""

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..layout import LAYOUT_KEY, layout_of
from .collator import IGNORE_INDEX

# Entries of a packed batch with one value per token, (1, T). The boundaries stay those of the whole pack.
PER_TOKEN = ("input_ids", "labels", "position_ids", "seq_idx")
SAMPLING_STEP = 16  # of so many numbers of an image one enters the checksum


class RankShare(list[Any]):
    """The documents of a pack, or their indices, of which a rank holds a part: that of a `member` of `degree` ranks.

    Each rank of a group reads the whole pack. A group may be one rank.
    """

    def __init__(self, documents: Iterable[Any], degree: int = 1, member: int = 0):
        super().__init__(documents)
        self.degree = degree
        self.member = member

    @classmethod
    def like(cls, pack: list[Any], documents: Iterable[Any]) -> "RankShare":
        """`documents` for the ranks that share `pack`; a plain list is for one rank."""
        return cls(documents, pack.degree, pack.member) if isinstance(pack, RankShare) else cls(documents)


def cut_part(batch: dict[str, Any], degree: int, index: int, *, has_images: bool = False) -> dict[str, Any]:
    """The part of a packed batch of T tokens that the member `index` of a group of `degree` ranks holds.

    `input_ids`, `labels`, `position_ids` and `seq_idx` become (1, T / degree). `shift_labels` of the same shape is
    added: the label of the next token, which may lie in the next part. `cu_seq_lens_q/k` and `max_length_q/k` stay
    those of the whole pack. "layout" holds the rest. With degree 1 the batch is returned as it is.

    An image may lie in several parts. So with `has_images` only the labels are cut here, and what enters the decoder of
    the model is cut there (`attention/image_parts.py`).

    >>> from trl_packfix import PackedDataCollator
    >>> whole = PackedDataCollator(pad_to_multiple_of=2)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> part = cut_part(whole, degree=2, index=0)
    >>> part["input_ids"].tolist(), part["shift_labels"].tolist(), part["layout"].trained.tolist()
    ([[5, 6, 7]], [[6, 7, -100]], [2, 1, 0])
    """
    if degree == 1:
        return batch
    labels = batch["labels"]
    layout = layout_of(batch)
    num_tokens = labels.shape[1]
    assert num_tokens % degree == 0, "collated with padding to a multiple of the degree"
    rows = slice(index * num_tokens // degree, (index + 1) * num_tokens // degree)
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    checksum = 0
    for tensor in (batch["cu_seq_lens_q"], batch["input_ids"], labels, *layout.content()):
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    if "pixel_values" in batch:
        checksum = zlib.crc32(batch["pixel_values"].flatten()[::SAMPLING_STEP].contiguous().numpy().data, checksum)
    names = ("labels",) if has_images else PER_TOKEN
    part = {name: batch[name][:, rows].contiguous() for name in names}
    part["shift_labels"] = shifted[:, rows].contiguous()
    own = layout.cut(rows, shifted != IGNORE_INDEX)
    part[LAYOUT_KEY] = replace(own, degree=degree, index=index, num_tokens=num_tokens, checksum=checksum)
    return batch | part
