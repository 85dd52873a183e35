"""The settings by which documents become packs, and what follows from these settings alone. numpy only.

`Packing` is made once from the `SFTConfig` (`training/planner.py`) and never changes. The planner of a table
(`data/epochs.py`), the packed stream (`data/stream.py`), evaluation and the dry runs of the command line call its
methods. A restart compares its settings with the settings in the checkpoint. Cached plans are found by its fingerprint.

A table goes through two methods:

    units  -- plan -->  packs  -- schedule -->  slots of optimizer steps

A strategy that keeps the optimizer steps of unpacked training (`minibatch`) goes from units to slots at once, by
`schedule_unpacked_steps`. A stream has no plan of an epoch: `pack_stream` yields packs while documents arrive, and each
optimizer step is scheduled by itself.

Words: a *document* is one training example. A *unit* is what planning packs as one thing: a document, or documents that
a feature packs together because they begin alike. A *pack* is a set of documents that pass through the model together;
its *capacity* is the largest number of rows that it may hold. A *row* (here never a row of the dataset) is a token of a
pack; where documents share it as their common prefix, it is one row. A *slot* is the place of one pack: one micro-batch
of one optimizer step on one rank. `Bins` describes the slots of a step. With sequence parallelism a *group* of
neighbouring ranks shares a pack, which takes a slot of each rank; the number of ranks in a group is its *degree*. The
*unpacked run* is the training that TRL would do with the same config and without packing.

A new option of planning begins with a field of `Packing`, named as in `SFTConfig`. Letters: N documents, U units.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..feature import FIELDS, Feature, features_of
from .arrays import Int64Array
from .costs import LLAMA_7B, CostModel
from .degrees import schedule_groups
from .exact_fill import StreamPacker
from .packs import PackPlan, plan_blocks
from .parallel import FILL, SequenceParallel, Speeds, possible_degrees, smallest_degree
from .schedule import Schedule, schedule_packs, schedule_steps
from .strategies import STRATEGIES, Strategy, StrategyTraits
from .units import Balance, Bins, Synchronisation, Units

ChangedSettings = dict[str, tuple[Any, Any]]
"""Settings that differ: config name -> (value before, value now)."""
Overlong = Literal["truncate", "split", "drop", "raise"]
"""Values of `overlong`: what happens to a document of more than `max_length` tokens."""
TruncationMode = Literal["keep_start", "keep_end"]
"""Values of `truncation_mode`: which tokens of a truncated document remain."""
SharePrefixes = Literal["off", "pack", "family"]
"""Values of `share_prefixes`."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """All settings of planning.

    What restarts and caches do about a field is below the class, in sets of names. A field in none of them is treated
    most strictly: a restart refuses another value of it, and a cached plan is found only for the same value.

    Raises:
        ValueError: `tokens_per_rank` is set, and no possible group of ranks can hold a document of `max_length`.
    """

    max_length: int  # most tokens of a document
    # How the documents of a pack are chosen, a key of `STRATEGIES` (`strategies.py`). "stream" is a strategy for tables
    # and for streams: it fills packs from a bounded buffer of documents
    strategy: Strategy = "stream"
    overlong: Overlong = "truncate"
    truncation_mode: TruncationMode = "keep_start"

    # The order of a table, and whether its last, incomplete step is dropped. A stream has its own order.
    seed: int = 0
    shuffle: bool = True  # False visits the units in the order of the table
    drop_last: bool = False

    # The size of an optimizer step. If it changes, a restart can plan the documents that are not trained yet anew.
    # `batch_size` counts the documents in a micro-batch of the unpacked run. Without `tokens_per_rank`, the capacity of
    # a pack is `batch_size * max_length`.
    batch_size: int = 1
    accumulation: int = 1
    world_size: int = 1

    # What may share a pack
    tokens_per_rank: int | None = None  # most rows of a pack on one rank; None without sequence parallelism
    # "family" plans documents that begin alike as one unit. "pack" shares the prefixes only of documents that are in
    # one pack anyway, so it has the same plans as "off".
    share_prefixes: SharePrefixes = "off"
    buffer_size: int = 1000  # most documents of a stream that wait for a pack

    # How a step is dealt to slots. None of these settings (`DEALING`) moves a document to another step. With
    # `balance="step"` the documents of a step are dealt so that ranks finish together, and with "none" they are not.
    # Ranks wait for each other after every micro-batch (`synchronisation="micro"`) or only after a step ("step").
    balance: Balance = "step"
    synchronisation: Synchronisation = "micro"
    degrees: tuple[int, ...] = ()  # the degrees that a step may use. If given as (), it becomes all possible ones
    # How fast devices compute and exchange tokens, to choose degrees; None for the speeds of an H100
    speeds: Speeds | None = None
    cost_model: CostModel = LLAMA_7B
    # True balances trained tokens, and not costs, over the packs of a step, because the user's own loss may be a mean
    # per micro-batch
    evens_targets: bool = False

    def __post_init__(self) -> None:
        """Replace `degrees=()` by all possible degrees, which `parallel` finds."""
        # `object.__setattr__`, because the dataclass is frozen. `parallel` is cached, and has these degrees already
        object.__setattr__(self, "degrees", self.parallel.degrees)

    # Sizes

    @property
    def traits(self) -> StrategyTraits:
        """What the strategy does."""
        return STRATEGIES[self.strategy]

    @cached_property
    def parallel(self) -> SequenceParallel:
        """How ranks share packs. Without `tokens_per_rank` the only degree is 1: each rank has packs of its own."""
        if self.tokens_per_rank is None:
            return SequenceParallel(tokens_per_rank=self.batch_size * self.max_length)
        # This is called even if `degrees` is set, because it refuses a `max_length` for which no group is large enough.
        # A degree cannot exceed the number of attention heads, which the cost model knows.
        all_degrees = possible_degrees(
            self.max_length, self.tokens_per_rank, self.world_size, num_heads=self.cost_model.heads
        )
        return SequenceParallel(
            tokens_per_rank=self.tokens_per_rank,
            smallest=smallest_degree(self.max_length, self.tokens_per_rank),
            degrees=self.degrees or all_degrees,
            fill=FILL,  # the share of the capacity to which packs are planned, a little below 1 (`planned_capacity`)
            speeds=self.speeds or Speeds(),
        )

    @cached_property
    def feature(self) -> Feature:
        """The feature that the fields switch on, such as shared prefixes; a plain `Feature` changes nothing.

        Planning calls its methods where a run with the feature differs (`trl_packfix/feature.py`).
        """
        return features_of(self)

    @property
    def capacity(self) -> int:
        """The most rows of a pack; with sequence parallelism, of a pack on the smallest group for `max_length`."""
        return self.parallel.smallest * self.parallel.tokens_per_rank

    @property
    def planned_capacity(self) -> int:
        """The most rows of a pack in a plan.

        With sequence parallelism it is a little below `capacity`, because units are later dealt to groups of other
        sizes, and full packs could hardly be dealt another way.
        """
        return max(int(self.parallel.fill * self.capacity), 1)

    @cached_property
    def bins(self) -> Bins:
        """The slots of an optimizer step, and how units are dealt to them."""
        return Bins(
            capacity=self.capacity,
            accumulation=self.accumulation,
            world_size=self.world_size,
            balance=self.balance,
            synchronisation=self.synchronisation,
            drop_last=self.drop_last,
            evens_targets=self.evens_targets,
            batch_size=self.batch_size,
        )

    @property
    def packs_per_step(self) -> int:
        """The number of packs in an optimizer step: one for each micro-batch of each smallest group of ranks."""
        return self.bins.num_slots // self.parallel.smallest

    @property
    def unpacked_documents_per_step(self) -> int:
        """The number of documents in an optimizer step of the unpacked run."""
        return self.batch_size * self.bins.num_slots

    def num_steps(self, num_packs_or_documents: int) -> int:
        """Return the number of optimizer steps of an epoch.

        Args:
            num_packs_or_documents: the number of packs in the epoch. For a strategy that keeps the steps of the
                unpacked run, the number of documents.
        """
        keeps_steps = self.traits.keeps_unpacked_steps
        per_step = self.unpacked_documents_per_step if keeps_steps else self.packs_per_step
        num_full, remainder = divmod(num_packs_or_documents, per_step)
        return num_full + (remainder > 0 and not self.drop_last)

    # From units to packs

    def make_rng(self, *key: int) -> np.random.Generator | None:
        """Return a generator that draws the same numbers for the same key and seed; None without shuffling."""
        if not self.shuffle:
            return None
        # numpy takes no negative numbers. A negative seed, which torch takes, becomes a number of 64 bits, as in torch
        return np.random.default_rng((self.seed if self.seed >= 0 else self.seed + 2**64, *key))

    def plan(self, units: Units, epoch: int, block: Int64Array | None = None) -> PackPlan:
        """Plan the packs of an epoch.

        Args:
            units: U units.
            epoch: number of the epoch, from which the random order is drawn.
            block: the number of the block of each unit, shape (U,), for a strategy that cuts blocks. All documents are
                concatenated, and a block is a piece of `max_length` tokens of the result.
        """
        # A unit with more rows than the planned capacity still fits into the capacity. It is counted as having exactly
        # the planned capacity, so it gets a pack of its own.
        rows = np.minimum(units.rows, self.planned_capacity)
        rng = self.make_rng(epoch)
        if self.traits.plan is None:  # the strategy cuts blocks, and a pack has `batch_size` of them
            assert block is not None, "documents are not cut into blocks"
            return plan_blocks(block, rows, self.batch_size, capacity=self.planned_capacity, rng=rng)
        # `visiting_order` may change the random order. If the table has a document twice, this keeps the two apart, so
        # that they are not in one optimizer step.
        order = np.arange(len(rows)) if rng is None else units.visiting_order(rng.permutation(len(rows)))
        return self.traits.plan(rows, self.planned_capacity, order=order, rng=rng)

    def pack_stream(
        self, lengths: Iterable[int], bytes_of: Callable[[int], int] | None = None, most_bytes: float = np.inf
    ) -> Iterator[list[int]]:
        """Yield packs while documents arrive, see `StreamPacker`.

        Args:
            lengths: tokens of each document, in the order of arrival.
            bytes_of: position of a document -> bytes of memory that it takes while it waits.
            most_bytes: if the waiting documents take so many bytes, no more are read until some of them are in a pack.

        Returns:
            The positions of the documents in each pack.
        """
        # With several degrees the documents of a step are dealt anew to groups of other sizes, which needs some room.
        # With one degree the packs are trained as they are, and may be full.
        capacity = self.planned_capacity if len(self.degrees) > 1 else self.capacity
        # As in `plan`, a longer document is counted as `capacity`, and gets a pack of its own. Only the planned
        # capacity can be below `max_length`.
        shortened = (min(length, capacity) for length in lengths)
        longest = min(self.max_length, capacity)
        return iter(StreamPacker(shortened, capacity, self.buffer_size, longest, bytes_of, most_bytes))

    # From packs to optimizer steps

    def schedule(self, plan: PackPlan, units: Units, num_steps: int) -> Schedule:
        """Deal the packs to the slots of exactly `num_steps` optimizer steps."""
        if self.tokens_per_rank is None:
            return schedule_packs(plan, units, num_steps, bins=self.bins)
        return schedule_groups(plan, units, num_steps, bins=self.bins, parallel=self.parallel)

    def unpacked_step_of_documents(self, order: Int64Array) -> Int64Array:
        """Return the optimizer step of each document, by its number, in the unpacked run, shape (N,).

        A document of an incomplete last step that is left out (`drop_last`) has step -1. TRL would train its whole
        micro-batches.

        Args:
            order: document numbers in the order in which the unpacked run visits them, shape (N,).
        """
        num_reached = self.num_steps(len(order)) * self.unpacked_documents_per_step
        reached = order[:num_reached]
        step = np.full(len(order), -1)
        step[reached] = np.arange(len(reached)) // self.unpacked_documents_per_step
        return step

    def schedule_unpacked_steps(self, units: Units, order: Int64Array) -> Schedule:
        """Deal units to slots so that every optimizer step has its documents of the unpacked run.

        Args:
            units: the N documents, or units of documents that have the same step.
            order: document numbers in the order in which the unpacked run visits them, shape (N,).
        """
        step_of_documents = self.unpacked_step_of_documents(order)
        # `bounds` says where the units of each step begin and end. Units of step -1 are behind the last step, so they
        # get no slot.
        units_by_step, bounds = units.sort_by_step(order, step_of_documents, self.num_steps(len(order)))
        return schedule_steps(units, units_by_step, bounds, bins=self.bins)

    # What restarts and caches compare

    def settings(self, source: Literal["table", "stream"]) -> dict[str, Any]:
        """Return the settings that decide which documents an optimizer step has, by their names in the config.

        Args:
            source: what the run trains on; a stream does not use all settings.
        """
        unused = DEALING if source == "table" else DEALING | ONLY_OF_TABLES
        return {config_name: getattr(self, name) for name, config_name in CONFIG_NAMES.items() if name not in unused}

    def fingerprint(self, result: Literal["packs", "schedule"]) -> str:
        """Return the SHA-256, in hexadecimal, of all settings that decide a result of planning.

        Args:
            result: "packs" for the packs of the first epoch, "schedule" for the schedule of any epoch.
        """
        unused = NOT_OF_PACKS if result == "packs" else frozenset()
        values = {name: getattr(self, name) for name in CONFIG_NAMES if name not in unused}
        # Of the setting of a feature, one thing matters for packs, and so for schedules: whether several documents are
        # one unit with this value (`regrouping` has these values). So a plan made with `share_prefixes="off"` is also
        # valid for "pack", but not for "family".
        for name, feature_field in FIELDS.items():
            values[name] = getattr(self, name) in feature_field.regrouping
        return hashlib.sha256(repr(values).encode()).hexdigest()


CONFIG_NAMES = {setting.name: setting.name for setting in fields(Packing)} | {
    "strategy": "packing_strategy",
    "drop_last": "dataloader_drop_last",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "speeds": "exchange_speeds",
}
"""The name in `SFTConfig` of each field of `Packing`, in the order of the fields."""

# What does a restart do if a field has another value than in the checkpoint? For a field that neither `DEALING` nor
# `REPLANNED_SETTINGS` names it refuses, because it cannot know which documents of the epoch were trained. Only if a
# field of a feature changes (`FIELDS`) does it compare the documents of the steps first (`training/table_source.py`).

DEALING = frozenset(("balance", "synchronisation", "degrees", "speeds", "cost_model", "evens_targets"))
"""Fields that only say how a step is dealt to slots. A restart ignores changes, as all steps keep their documents."""

REPLANNED_SETTINGS = frozenset(("per_device_train_batch_size", "gradient_accumulation_steps", "world_size"))
"""Config names of the settings that a restart may change: it plans the rest of an epoch or of a stream's pass anew."""

ONLY_OF_TABLES = frozenset(("seed", "shuffle", "drop_last", "share_prefixes"))
"""Fields that change nothing for a stream, so a restart of a stream does not compare them."""

# For which values of a field is a cached plan valid? If the field is not in this set, only for the value that it had.

NOT_OF_PACKS = DEALING | {"drop_last", "accumulation", "world_size"}
"""Fields that decide only where packs are trained, and not which packs the first epoch has.

A cached plan is valid for every value of them. Only the plan of the first epoch is cached: later epochs are planned
with another random order.
"""

DEFAULT_SETTINGS = {
    CONFIG_NAMES[setting.name]: setting.default for setting in fields(Packing) if setting.default is not MISSING
}
"""The default of each field of `Packing` that has one, by its name in the config."""


def compare_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> ChangedSettings:
    """Return the settings of `now` that had another value before.

    Args:
        before: saved settings, by their names in the config or in `Packing`. A setting that is missing, because an
            earlier version did not save it, had its default value.
        now: the settings of this run, by their names in the config, and other values to compare.

    >>> compare_settings({"max_length": 8, "batch_size": 2}, Packing(max_length=8, seed=1).settings("table"))
    {'seed': (0, 1), 'per_device_train_batch_size': (2, 1)}
    """
    saved = DEFAULT_SETTINGS | {CONFIG_NAMES.get(name, name): value for name, value in before.items()}
    return {name: (saved.get(name), value) for name, value in now.items() if saved.get(name) != value}


def describe_changes(changed: ChangedSettings) -> str:
    """Return the changes in words.

    >>> describe_changes({"seed": (0, 1)})
    '`seed` was 0 and is 1'
    """
    return ", ".join(
        f"`{name}` was {_shorten_hash(before)} and is {_shorten_hash(now)}" for name, (before, now) in changed.items()
    )


def _shorten_hash(value: object) -> str:
    """Return the first digits of a SHA-256 in hexadecimal, and any other value as Python writes it.

    The fingerprint of the documents, which a restart compares like a setting, is such a hash.
    """
    if isinstance(value, str) and len(value) == 64:
        return f"{value[:8]}..."
    return repr(value)
