"""The packing strategies by name, and `plan_packs`, which plans from lengths alone.

A *strategy* is a way to choose which documents share a pack. `STRATEGIES` is the only list of their names: a new
strategy begins with its record here. `Packing` (`packing.py`) reads the record of the strategy that the config names.
The functions that plan are in `packs.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .packs import PackPlan, is_integer, plan_bfd, plan_stream, validate_lengths

Strategy = str  # a key of `STRATEGIES`


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """What a strategy does, and what follows from it for the settings and the rest of planning."""

    # (lengths, capacity, order, rng) -> plan with every document in one pack of at most `capacity` tokens. `order` is
    # the order in which documents are visited, a permutation of their numbers, shape (N,). `rng` draws the order of the
    # packs, so that the model is not trained on long documents first and on short ones last; it is None without
    # shuffling.
    # `plan` is None for a strategy that cuts blocks or keeps the steps of unpacked training: `Packing` plans it another
    # way.
    plan: Callable[..., PackPlan] | None = None
    # What happens to documents longer than `max_length`, if the setting `overlong` is not given
    overlong: Literal["truncate", "split"] = "truncate"
    packs_streams: bool = False  # it needs only a bounded buffer of documents, so it can pack an `IterableDataset`
    cuts_blocks: bool = False  # all documents are concatenated and cut every `max_length` tokens
    # Every optimizer step has the documents that it has if TRL trains with the same config, but without packing
    keeps_unpacked_steps: bool = False
    # What to do instead of `plan_packs`, if lengths alone are not enough; it is the end of an error message.
    alternative: str | None = None


_USE_THE_TRAINER = "use the trainer or packed_dataloader with packing_strategy={!r}"

STRATEGIES: dict[Strategy, StrategyTraits] = {
    "stream": StrategyTraits(plan=plan_stream, packs_streams=True),
    "bfd": StrategyTraits(plan=plan_bfd),
    "bfd_split": StrategyTraits(
        plan=plan_bfd,
        overlong="split",
        alternative="split the documents at max_length first and plan the pieces with strategy='bfd', or use the "
        "trainer",
    ),
    "wrapped": StrategyTraits(overlong="split", cuts_blocks=True, alternative=_USE_THE_TRAINER.format("wrapped")),
    "minibatch": StrategyTraits(keeps_unpacked_steps=True, alternative=_USE_THE_TRAINER.format("minibatch")),
}


def plan_packs(
    lengths: npt.ArrayLike, capacity: int, strategy: Strategy = "stream", seed: int = 0, epoch: int = 0
) -> PackPlan:
    """Plan the packs of one epoch: every document is in exactly one pack, and no pack exceeds the capacity.

    Args:
        lengths: tokens of each document, integers from 1 to `capacity`, shape (N,).
        capacity: most tokens a pack may hold.
        strategy: `stream` shuffles the documents and packs neighbours in the new order (see `plan_stream`); `bfd` (best
            fit, decreasing lengths) packs all documents at once (see `plan_bfd`). Packs of both are in random order.
        seed: non-negative integer from which the random order is drawn.
        epoch: non-negative integer; each epoch has another plan.

    Returns:
        The documents of each pack, by their index in `lengths`. Pack i is `order[offsets[i]:offsets[i + 1]]`.

    Raises:
        ValueError: lengths are not one-dimensional integers or do not fit, the strategy is unknown or cannot be planned
            from lengths alone, or `seed` or `epoch` is not a non-negative integer.

    >>> plan = plan_packs([300, 200, 500], capacity=512)
    >>> sorted(sorted(pack.tolist()) for pack in np.split(plan.order, plan.offsets[1:-1]))
    [[0, 1], [2]]
    """
    traits = STRATEGIES.get(strategy)
    if traits is None:
        from_lengths = [repr(name) for name, record in STRATEGIES.items() if record.alternative is None]
        in_trainer_only = [repr(name) for name, record in STRATEGIES.items() if record.alternative is not None]
        raise ValueError(
            f"strategy={strategy!r} was given. No such packing strategy exists. Set one of "
            f"{', '.join(from_lengths)} here, or also {', '.join(in_trainer_only)} in the trainer."
        )
    if traits.alternative is not None:
        raise ValueError(
            f"strategy={strategy!r} was given to plan_packs. It cannot be planned from lengths alone: "
            f"{traits.alternative}."
        )
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not is_integer(value) or value < 0:
            raise ValueError(
                f"{name}={value!r} was given. The random order is drawn from non-negative integers. Set {name} to 0 "
                "or more."
            )
    assert traits.plan is not None, "the strategy has no planner"
    lengths = validate_lengths(lengths, capacity)
    rng = np.random.default_rng([seed, epoch])
    return traits.plan(lengths, capacity, order=rng.permutation(len(lengths)), rng=rng)
