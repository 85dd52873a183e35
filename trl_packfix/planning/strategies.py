"""The packing strategies. This is the only list of their names: a new one begins with its record here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .arrays import Int64Array
from .packs import PackPlan, checked_lengths, is_integer, plan_bfd, plan_stream

Strategy = str  # a key of `STRATEGIES`


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """What a strategy does, and what follows from it."""

    # (lengths, capacity, order, rng) -> packs of at most `capacity` tokens with every document once. `order` is the one
    # in which documents are visited, a permutation, shape (N,). `rng` draws everything else; None without shuffling.
    # With `rng`, packs are in an order that does not depend on the lengths of their documents.
    # Only what cuts blocks or keeps steps is planned elsewhere, and has none.
    plan: Callable[..., PackPlan] | None = None
    overlong: Literal["truncate", "split"] = "truncate"  # where `overlong` is unset
    packs_streams: bool = False  # it needs no document beyond a bounded buffer, so it packs an `IterableDataset`
    cuts_blocks: bool = False  # all documents are concatenated and cut every `max_length` tokens
    keeps_unpacked_steps: bool = False  # every optimizer step has the documents of the unpacked run
    instead: str | None = None  # what to do instead of `plan_packs`, where lengths alone are not enough to plan it


def _plan_bfd(lengths: Int64Array, capacity: int, *, order: Int64Array, rng: np.random.Generator | None) -> PackPlan:
    return plan_bfd(lengths, capacity, rng)


_USE_THE_TRAINER = "use the trainer or packed_dataloader with packing_strategy={!r}"

STRATEGIES: dict[Strategy, StrategyTraits] = {
    "stream": StrategyTraits(
        plan=lambda lengths, capacity, *, order, rng: plan_stream(lengths, order, capacity, rng=rng),
        packs_streams=True,
    ),
    "bfd": StrategyTraits(plan=_plan_bfd),
    "bfd_split": StrategyTraits(
        plan=_plan_bfd,
        overlong="split",
        instead="split the documents at max_length first and plan the pieces with strategy='bfd', or use the trainer",
    ),
    "wrapped": StrategyTraits(overlong="split", cuts_blocks=True, instead=_USE_THE_TRAINER.format("wrapped")),
    "minibatch": StrategyTraits(keeps_unpacked_steps=True, instead=_USE_THE_TRAINER.format("minibatch")),
}


def plan_packs(
    lengths: npt.ArrayLike, capacity: int, strategy: Strategy = "stream", seed: int = 0, epoch: int = 0
) -> PackPlan:
    """Packs for one epoch: every document in exactly one pack, no pack over `capacity`.

    Args:
        lengths: tokens of each document, integers from 1 to `capacity`, shape (N,).
        capacity: most tokens a pack may hold.
        strategy: `stream` packs neighbours in a random order of the documents (see `plan_stream`); `bfd` packs the
            whole set at once (see `plan_bfd`). Packs come in random order.
        seed, epoch: non-negative integers; another epoch gives another plan.

    Raises:
        ValueError: for lengths that are not one-dimensional integers or do not fit, and for unknown strategies.

    >>> plan = plan_packs([300, 200, 500], capacity=512)
    >>> sorted(sorted(pack.tolist()) for pack in np.split(plan.order, plan.offsets[1:-1]))
    [[0, 1], [2]]
    """
    traits = STRATEGIES.get(strategy)
    if traits is None:
        here = [repr(name) for name, record in STRATEGIES.items() if record.instead is None]
        elsewhere = [repr(name) for name, record in STRATEGIES.items() if record.instead is not None]
        raise ValueError(
            f"strategy={strategy!r} was given. No such packing strategy exists. Set one of {', '.join(here)} here, or "
            f"also {', '.join(elsewhere)} in the trainer."
        )
    if traits.instead is not None:
        raise ValueError(
            f"strategy={strategy!r} was given to plan_packs. It cannot be planned from lengths alone: {traits.instead}."
        )
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not is_integer(value) or value < 0:
            raise ValueError(
                f"{name}={value!r} was given. The random order is drawn from non-negative integers. Set {name} to 0 "
                "or more."
            )
    assert traits.plan is not None  # else lengths are not enough
    lengths = checked_lengths(lengths, capacity)
    rng = np.random.default_rng([seed, epoch])
    return traits.plan(lengths, capacity, order=rng.permutation(len(lengths)), rng=rng)
