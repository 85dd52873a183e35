"""A check that ranks read the same packs: those that share them, and those that divide the layers of the model."""

from typing import Any

import torch
from accelerate.utils import gather

from ..layout import layout_of
from .config import SFTConfig
from .loading import TrainingData

NUM_CHECKED_STEPS = 2  # optimizer steps after which ranks that read the same packs of a table are believed to go on so
COMPARED_KEYS = ("cu_seq_lens_q", "input_ids", "labels")  # of packs that ranks do not share


class SamePackCheck:
    """Compares, in the first steps of a training, the packs of ranks that must have read the same.

    Different packs may have equal shapes, so nothing else would notice. A stream is read by each rank anew, so its
    packs are compared in every step.
    """

    def __init__(self, data: TrainingData) -> None:
        self._data = data
        self.steps_left = 0

    def start(self, args: SFTConfig) -> None:
        """Called before training."""
        steps = NUM_CHECKED_STEPS if self._data.stream is None else args.max_steps
        self.steps_left = steps * self._data.ranks.may_share

    def check(self, batches: list[dict[str, Any]]) -> None:
        if not self.steps_left or not batches:
            return
        self.steps_left -= 1
        check_same_packs(batches, self._data.ranks.copies)


def check_same_packs(batches: list[dict[str, Any]], copies: int = 1) -> None:
    """Compare the packs of these micro-batches, of which `copies` neighbouring ranks have the same. All ranks call it.

    All compare those of all, because ranks that read different documents may also choose different degrees.
    """
    own = torch.stack([_pack_of(batch) for batch in batches])
    on_ranks = gather(own[None])  # (ranks, micro-steps, 3)
    for packs in on_ranks.transpose(0, 1).tolist():  # of one micro-step, rank after rank
        degree = max(pack[0] for pack in packs)
        size = max(degree, copies)
        if size == 1:
            continue
        for rank, pack in enumerate(packs):
            first = rank - rank % size
            if pack == packs[first]:
                continue
            part = ""
            reason = f"The {copies} ranks that divide the model sum their outputs as those of one pack"
            if degree > 1:
                part = "a part of "
                reason = f"The {degree} ranks of a group hold parts of one pack, so they would train on a mixture"
            raise ValueError(
                f"Rank {first} has read {part}a pack of {packs[first][1]} tokens, and rank {rank} {part}another pack, "
                f"of {pack[1]} tokens. {reason}. Give all ranks the same dataset, tokenizer and settings; in a stream, "
                "whatever is drawn at random needs a seed."
            )


def _pack_of(batch: dict[str, Any]) -> torch.Tensor:
    """What is compared, on the device: degree, tokens, and a checksum of what ranks must have in common."""
    layout = layout_of(batch)
    tokens = batch["input_ids"]
    if layout.degree > 1:
        return torch.tensor([layout.degree, layout.num_tokens, layout.checksum], device=tokens.device)
    checksum = tokens.new_zeros((), dtype=torch.int64)
    for tensor in (*(batch[name] for name in COMPARED_KEYS if name in batch), *layout.content()):
        values = tensor.flatten().long()
        odd = 2 * torch.arange(len(values), device=values.device) + 1
        checksum = 31 * checksum + (values * odd * odd).sum()  # wraps around, on all ranks alike
    return torch.stack([checksum.new_ones(()), checksum.new_tensor(tokens.numel()), checksum])
