"""Cut the batch of a pack into the parts that the ranks of a group hold, for sequence parallelism.

A group is s neighbouring ranks that share one pack of T tokens. The rank with the number i in its group holds the
tokens from i * T / s to (i + 1) * T / s, its part. A document may begin in one part and end in another part. The
*layout* of a batch (`layout.py`) says which tokens of the pack are whose.

Every rank of a group reads all documents of the pack, as a `RankShare`, and makes the whole batch (`PackCollator` in
`loaders.py`). Then it calls `cut_part`. In the model, the ranks of a group exchange what attention needs of the other
parts (`attention/exchange.py`).
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..group import ALONE, Group
from ..layout import LAYOUT_KEY, layout_of
from ..planning.schedule import Schedule
from .collator import IGNORE_INDEX

PER_TOKEN = ("input_ids", "labels", "position_ids", "seq_idx")  # entries of a batch with one value per token, (1, T)


class RankShare(list[Any]):
    """List of the documents of a pack, or of their indices, and the group of ranks that shares the pack.

    Args:
        documents: all documents of the pack, or their indices.
        group: the ranks that share the pack, and which of them this rank is. By default the rank is alone.
    """

    def __init__(self, documents: Iterable[Any], group: Group = ALONE):
        super().__init__(documents)
        self.group = group

    @classmethod
    def like(cls, pack: list[Any], documents: Iterable[Any]) -> "RankShare":
        """Return `documents` for the same rank and group as `pack`. A plain list belongs to one rank."""
        return cls(documents, pack.group) if isinstance(pack, RankShare) else cls(documents)

    @classmethod
    def of_schedule(cls, schedule: Schedule, rank: int) -> Iterator["RankShare"]:
        """Yield the document indices of each micro-batch of one rank, with the group that shares the micro-batch."""
        for indices, degree in zip(schedule.micro_batches(rank), schedule.degrees.tolist(), strict=True):
            yield cls(indices.tolist(), Group(degree, rank % degree))  # ranks that share a pack are neighbours


def cut_part(
    batch: dict[str, Any],
    group: Group,
    *,
    labels_only: bool = False,
    checksum_tensors: Callable[[dict[str, Any]], Sequence[Tensor]] | None = None,
) -> dict[str, Any]:
    """Cut the part of a rank out of the batch of a pack.

    Args:
        batch: the batch of the whole pack, with T tokens. T is a multiple of s, the size of the group.
        group: the ranks that share the pack. If this rank is alone, the batch is returned unchanged.
        labels_only: cut the labels only. Used for packs with images: the model puts the images among the tokens, and
            only then, inside the model, each rank cuts out its part of the tokens.
        checksum_tensors: returns tensors of the batch to hash, beside its tokens and boundaries, such as images.

    Returns:
        The batch with these changes: `input_ids`, `labels`, `position_ids` and `seq_idx` have the shape
        (1, T / s). `shift_labels`, of the same shape, is the label of the next token, which may lie in the next
        part. `layout` says where the part lies, and holds a checksum, by which the ranks find out whether they have
        made the same pack. The boundaries `cu_seq_lens_q/k` and `max_length_q/k` still describe the whole pack.

    >>> from trl_packfix import PackedDataCollator
    >>> whole = PackedDataCollator(pad_to_multiple_of=2)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> part = cut_part(whole, Group(size=2, rank=0))  # the layout counts the trained tokens of 5 6 7, 8 9 and padding
    >>> part["input_ids"].tolist(), part["shift_labels"].tolist(), part["layout"].trained.tolist()
    ([[5, 6, 7]], [[6, 7, -100]], [2, 1, 0])
    """
    if group.is_alone:
        return batch
    labels = batch["labels"]
    layout = layout_of(batch)
    num_tokens = labels.shape[1]
    rows = group.rows(num_tokens)  # the slice of the tokens that are the part of this rank
    # Labels are shifted before the cut, because the label of the last token of a part lies in the next part
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    checksum = 0
    tensors = [batch["cu_seq_lens_q"], batch["input_ids"], labels, *layout.checksum_tensors()]
    if checksum_tensors is not None:
        tensors += checksum_tensors(batch)
    for tensor in tensors:
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    names = ("labels",) if labels_only else PER_TOKEN
    cut_entries = {name: batch[name][:, rows].contiguous() for name in names}
    cut_entries["shift_labels"] = shifted[:, rows].contiguous()
    # The layout counts the trained tokens of each document in all parts. So it gets, for each token of the whole pack,
    # whether its next token is trained, shape (1, T)
    part_layout = layout.cut_to_part(rows, shifted != IGNORE_INDEX)
    cut_entries[LAYOUT_KEY] = replace(part_layout, group=group, num_tokens=num_tokens, checksum=checksum)
    return batch | cut_entries
