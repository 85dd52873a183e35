"""Sequence parallelism in the trainer: process groups, the proof of each degree, and a check of the packs."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ..attention.exchange import group_of, make_groups
from ..layout import Part, layout_of

if TYPE_CHECKING:
    from ..data.epochs import EpochPlanner
    from ..data.sorted_set import SortedSet
    from ..isolation.report import IsolationReport

NUM_CHECKED_STEPS = 2  # optimizer steps after which ranks that read the same packs are believed to go on so


def prove_degrees(trainer: Any, planner: "EpochPlanner | SortedSet") -> "list[IsolationReport]":
    """Make the process groups of all degrees that a planner uses, and prove isolation at each. All ranks must call it.

    Groups and proofs that exist are kept.

    Raises:
        PackingLeakError: the model cannot be trained on parts of a pack.
    """
    degrees = [degree for degree in planner.degrees or () if degree > 1]
    make_groups(degrees, trainer.args.ddp_timeout_delta)
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        return [trainer.packed_model.prove_degree(trainer.model_wrapped, degree) for degree in degrees]


class SamePackCheck(TrainerCallback):
    """Compares, in the first steps of a training, the packs that the ranks of a group have read.

    Parts of different packs have equal shapes, so nothing else would notice. It runs again after a restart.
    """

    def __init__(self) -> None:
        self.steps_left = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_left = NUM_CHECKED_STEPS

    def check(self, batches: list[dict[str, Any]]) -> None:
        """Compare the packs of one optimizer step. All ranks must call it.

        Raises:
            ValueError: the ranks of a group have different packs.
        """
        if not self.steps_left:
            return
        self.steps_left -= 1
        for batch in batches:
            if isinstance(part := layout_of(batch), Part):
                check_same_pack(part, batch["input_ids"].device)


def check_same_pack(part: Part, device: torch.device) -> None:
    """Compare the pack of this part with those of the other ranks of the group, which must all call this.

    Raises:
        ValueError: they have different packs.
    """
    group = group_of(part.degree)
    own = torch.tensor([part.checksum, part.num_tokens], device=device)
    given = [torch.empty_like(own) for _ in range(part.degree)]
    dist.all_gather(given, own, group=group)
    packs = [each.tolist() for each in given]
    ranks = dist.get_process_group_ranks(group)
    others = [rank for rank, pack in zip(ranks, packs, strict=True) if pack != packs[0]]
    if others:
        raise ValueError(
            f"Rank {ranks[0]} has read a part of a pack of {packs[0][1]} tokens, and rank {others[0]} a part of "
            f"another pack, of {packs[ranks.index(others[0])][1]} tokens. The {part.degree} ranks of a group hold "
            "parts of one pack, so they would train on a mixture. Give all ranks the same dataset, tokenizer and "
            "settings."
        )
