"""The packing strategies. This is the only list of their names: a new one begins with its record here."""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["stream", "bfd", "bfd_split", "wrapped", "minibatch"]


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """What follows from a strategy.

    Attributes:
        overlong: what happens to documents longer than `max_length` where `overlong` is unset.
        packs_streams: it needs no document beyond a bounded buffer, so it packs an `IterableDataset`.
        cuts_blocks: all documents are concatenated and cut every `max_length` tokens.
        keeps_steps: every optimizer step has the documents of the unpacked run.
        instead: what to do instead of `plan_packs`, where lengths alone are not enough to plan it.
    """

    overlong: Literal["truncate", "split"] = "truncate"
    packs_streams: bool = False
    cuts_blocks: bool = False
    keeps_steps: bool = False
    instead: str | None = None


def _use_the_trainer(strategy: Strategy) -> str:
    return f"use the trainer or packed_dataloader with packing_strategy={strategy!r}"


STRATEGIES: dict[Strategy, StrategyTraits] = {
    "stream": StrategyTraits(packs_streams=True),
    "bfd": StrategyTraits(),
    "bfd_split": StrategyTraits(
        overlong="split",
        instead="split the documents at max_length first and plan the pieces with strategy='bfd', or use the trainer",
    ),
    "wrapped": StrategyTraits(overlong="split", cuts_blocks=True, instead=_use_the_trainer("wrapped")),
    "minibatch": StrategyTraits(keeps_steps=True, instead=_use_the_trainer("minibatch")),
}
