"""Sequence parallelism in the trainer: a check that the ranks of a group read the same packs."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ..data.stream import PackedStream
from ..layout import Part, layout_of

NUM_CHECKED_STEPS = 2  # optimizer steps after which ranks that read the same packs of a table are believed to go on so


class SamePackCheck(TrainerCallback):
    """Compares, in the first steps of a training, the packs that the ranks of a group have read.

    Parts of different packs have equal shapes, so nothing else would notice. It runs again after a restart. A stream is
    read by each rank anew, so its packs are compared in every step.
    """

    def __init__(self) -> None:
        self.steps_left = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        is_stream = isinstance(getattr(train_dataloader, "dataset", None), PackedStream)
        shares = args.world_size > 1 and args.tokens_per_rank is not None
        self.steps_left = (args.max_steps if is_stream else NUM_CHECKED_STEPS) if shares else 0

    def check(self, batches: list[dict[str, Any]]) -> None:
        """Compare the packs of one optimizer step. All ranks must call it.

        Raises:
            ValueError: the ranks of a group have different packs; all ranks raise it.
        """
        if not self.steps_left or not batches:
            return
        self.steps_left -= 1
        check_same_packs(batches)


def check_same_packs(batches: list[dict[str, Any]]) -> None:
    """Compare the packs of these micro-batches between the ranks of each group. All ranks must call it.

    All ranks compare those of all, because ranks that read different documents may also choose different degrees.

    Raises:
        ValueError: the ranks of a group have different packs.
    """
    own = torch.tensor([_pack_of(batch) for batch in batches], device=batches[0]["input_ids"].device)
    given = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(given, own)
    for packs in zip(*(each.tolist() for each in given), strict=True):  # of one micro-step, rank after rank
        degree = max(pack[0] for pack in packs)
        if degree == 1:
            continue
        for rank, pack in enumerate(packs):
            first = rank - rank % degree
            if pack != packs[first]:
                raise ValueError(
                    f"Rank {first} has read a part of a pack of {packs[first][1]} tokens, and rank {rank} a part of "
                    f"another pack, of {pack[1]} tokens. The {degree} ranks of a group hold parts of one pack, so they "
                    "would train on a mixture. Give all ranks the same dataset, tokenizer and settings; in a stream, "
                    "whatever is drawn at random needs a seed."
                )


def _pack_of(batch: dict[str, Any]) -> tuple[int, int, int]:
    """What is compared: degree, tokens, and a checksum of what ranks share."""
    layout = layout_of(batch)
    if isinstance(layout, Part):
        return layout.degree, layout.num_tokens, layout.checksum
    return 1, batch["input_ids"].shape[1], 0
