"""The rows of a padded batch as the documents of one pack, and where each of their tokens is.

    input_ids   A B C D .     attention_mask 1 1 1 1 0     cells 0 1 2 3
                A B C E F                    1 1 1 1 1           5 6 7 8 9

    the pack    A B C D | C E F     rows 0 1 2 3, 0 1 4 5 6: the row of the pack that holds each of these tokens

B rows of S tokens, padding included; N tokens without it; T rows of the pack.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from .prefix_collator import PrefixCollator


class RowsOfBatch(NamedTuple):
    pack: dict[str, Any]  # without labels
    rows: Tensor  # of the pack that hold each token, int64, (N,)
    cells: Tensor  # the place of each token in the padded batch, row after row, int64, (N,)
    shape: tuple[int, int]  # B and S
    longest: int  # tokens of the longest row, without padding
    is_left_padded: bool  # whether a row begins with padding

    @property
    def num_computed(self) -> int:
        return self.pack["input_ids"].shape[1]

    def to(self, device: torch.device) -> "RowsOfBatch":
        """The same on another device. On CUDA through pinned memory, so that the host does not wait."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor | Layout) or device.type == "cpu":
                return value
            value = value.pin_memory() if device.type == "cuda" else value
            return value.to(device, non_blocking=True)

        pack = {name: moved(value) for name, value in self.pack.items()}
        if self.pack["cu_seq_lens_k"] is self.pack["cu_seq_lens_q"]:  # one tensor: attention compares their identity
            pack["cu_seq_lens_k"] = pack["cu_seq_lens_q"]
        return self._replace(pack=pack, rows=moved(self.rows), cells=moved(self.cells))


def pack_rows(input_ids: Tensor, attention_mask: Tensor, collate: PrefixCollator) -> RowsOfBatch | None:
    """The rows of a padded batch as the documents of one pack, on the device of the batch.

    Rows may be padded on either side; a row without tokens is no document. None if no row has a token, or if one has
    padding between tokens: its positions are not those of a document. The host waits for the device once.

    >>> ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 4]])
    >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    >>> batch = pack_rows(ids, mask, PrefixCollator(min_shared=1, keeps_last_rows=True))
    >>> batch.pack["input_ids"].tolist(), batch.rows.tolist()
    ([[5, 6, 7, 8, 7, 9, 4]], [0, 1, 2, 3, 0, 1, 4, 5, 6])
    """
    assert collate.keeps_last_rows
    tokens, mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()
    is_token = mask != 0
    starts = np.diff(is_token, axis=1, prepend=False) & is_token
    if not is_token.any() or (starts.sum(1) > 1).any():
        return None
    documents = [ids[own] for ids, own in zip(tokens, is_token, strict=True) if own.any()]
    pack, _, rows = collate.collate_with_rows([{"input_ids": ids} for ids in documents])
    del pack["labels"]
    batch = RowsOfBatch(
        pack,
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.flatnonzero(is_token)),
        (is_token.shape[0], is_token.shape[1]),
        int(is_token.sum(1).max()),
        bool(starts[:, 1:].any()),
    )
    return batch.to(input_ids.device)
