"""How the documents of a run become packs, and what is the same in all of its epochs. numpy only.

`Packing` is made once from the config. Tables and streams, training, evaluation and forecasts plan by it; restarts
compare it; plans are cached by it. A new option of planning begins with a field here, named as in `SFTConfig`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .arrays import Int64Array
from .costs import LLAMA_7B, CostModel
from .degrees import schedule_groups
from .exact_fill import StreamPacker
from .families import Pieces, SharePrefixes
from .packs import PackPlan, plan_blocks
from .parallel import FILL, SequenceParallel, Speeds, possible_degrees, smallest_degree
from .schedule import Schedule, schedule_packs, schedule_steps
from .strategies import STRATEGIES, Strategy, StrategyTraits
from .units import Balance, Bins, Synchronisation, Units

ChangedSettings = dict[str, tuple[Any, Any]]
"""Settings that differ, with their values before and now."""

# What a field of `Packing` says about itself, beside `name`, that in `SFTConfig` if it is another. A field that says
# nothing decides everything: no restart may change it, and plans of other values are others.
OF_TABLES = {"restart": "tables"}  # streams do not use it
ADAPTED = {"restart": "adapted"}  # for other values, the rest of an epoch or of a pass is planned anew
PLACES = {"places": True}  # it decides where packs are trained, and not which packs the first epoch has
FREE = {"restart": "free"} | PLACES  # nor which documents an optimizer step has


@dataclass(frozen=True, kw_only=True)
class Packing:
    """All settings of planning. ValueError: what `possible_degrees` refuses."""

    max_length: int  # most tokens of a document
    strategy: Strategy = field(default="stream", metadata={"name": "packing_strategy"})
    overlong: Literal["truncate", "split", "drop", "raise"] = "truncate"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    seed: int = field(default=0, metadata=OF_TABLES)
    shuffle: bool = field(default=True, metadata=OF_TABLES)  # False keeps the order of the units
    drop_last: bool = field(default=False, metadata=OF_TABLES | PLACES | {"name": "dataloader_drop_last"})
    # Documents per micro-batch of the unpacked run
    batch_size: int = field(default=1, metadata=ADAPTED | {"name": "per_device_train_batch_size"})
    accumulation: int = field(default=1, metadata=ADAPTED | PLACES | {"name": "gradient_accumulation_steps"})
    world_size: int = field(default=1, metadata=ADAPTED | PLACES)
    tokens_per_rank: int | None = None  # with sequence parallelism, most tokens of a pack on one rank
    # "family" plans documents that begin alike as one; plans are the same for "off" and "pack"
    share_prefixes: SharePrefixes = field(default="off", metadata=OF_TABLES)
    buffer_size: int = 1000  # of a stream, most documents that wait for a pack
    balance: Balance = field(default="step", metadata=FREE)
    synchronisation: Synchronisation = field(default="micro", metadata=FREE)
    degrees: tuple[int, ...] = field(default=(), metadata=FREE)  # that may be chosen; given as (): all possible ones
    speeds: Speeds | None = field(default=None, metadata=FREE | {"name": "exchange_speeds"})
    cost_model: CostModel = field(default=LLAMA_7B, metadata=FREE)
    # Where the user computes the loss, which may be a mean over each micro-batch
    evens_targets: bool = field(default=False, metadata=FREE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", self.parallel.degrees)

    @property
    def traits(self) -> StrategyTraits:
        return STRATEGIES[self.strategy]

    @cached_property
    def parallel(self) -> SequenceParallel:
        """How ranks share packs; with one degree, 1, if `tokens_per_rank` is not set."""
        if self.tokens_per_rank is None:
            return SequenceParallel(tokens_per_rank=self.batch_size * self.max_length)
        sizes = self.max_length, self.tokens_per_rank
        possible = possible_degrees(*sizes, self.world_size, num_heads=self.cost_model.heads)
        return SequenceParallel(
            tokens_per_rank=self.tokens_per_rank,
            smallest=smallest_degree(*sizes),
            degrees=self.degrees or possible,
            fill=FILL,
            speeds=self.speeds or Speeds(),
        )

    @property
    def shares_families(self) -> bool:
        return self.share_prefixes == "family"

    @property
    def capacity(self) -> int:
        """Most tokens of a pack; with sequence parallelism, of one on the fewest ranks that hold any document."""
        return self.parallel.smallest * self.parallel.tokens_per_rank

    @property
    def planned_capacity(self) -> int:
        """Rows to which packs are planned. With sequence parallelism, some room is needed to deal them anew."""
        return max(int(self.parallel.fill * self.capacity), 1)

    @cached_property
    def bins(self) -> Bins:
        return Bins(**{each.name: getattr(self, each.name) for each in fields(Bins) if each.name != "degree"})

    @property
    def packs_per_step(self) -> int:
        """Packs of an optimizer step: one for each micro-step and group of the fewest ranks that hold any document."""
        return self.bins.num_slots // self.parallel.smallest

    def make_rng(self, *seed: int) -> np.random.Generator | None:
        """Draws what the epoch `seed` draws; None without shuffling."""
        return np.random.default_rng((self.seed, *seed)) if self.shuffle else None

    def plan(self, units: Units, epoch: int, block: Int64Array | None = None) -> PackPlan:
        """The packs of an epoch, for a strategy that cuts blocks with the `block` of each unit, shape (U,)."""
        rows = np.minimum(units.rows, self.planned_capacity)  # a longer unit is alone in its pack, which may be full
        if self.traits.plan is None:
            assert block is not None, "documents are not cut into blocks"
            return plan_blocks(block, rows, self.batch_size, capacity=self.planned_capacity, rng=self.make_rng(epoch))
        rng = self.make_rng(epoch)
        order = np.arange(len(rows)) if rng is None else units.visited(rng.permutation(len(rows)))
        return self.traits.plan(rows, self.planned_capacity, order=order, rng=rng)

    def pack_stream(
        self, lengths: Iterable[int], bytes_of: Callable[[int], int] | None = None, most_bytes: float = np.inf
    ) -> Iterator[list[int]]:
        """Packs of documents that arrive with these lengths, by their positions, see `StreamPacker`."""
        capacity = self.planned_capacity if len(self.degrees) > 1 else self.capacity  # dealt anew, or as they are
        arriving = (min(length, capacity) for length in lengths)  # a longer document is alone in its pack
        longest = min(self.max_length, capacity)
        return iter(StreamPacker(arriving, capacity, self.buffer_size, longest, bytes_of, most_bytes))

    def num_steps(self, num: int) -> int:
        """Optimizer steps of an epoch of so many packs; of a strategy that keeps steps, of so many documents."""
        per_step = self.unpacked_documents_per_step if self.traits.keeps_unpacked_steps else self.packs_per_step
        return num // per_step if self.drop_last else -(-num // per_step)

    @property
    def unpacked_documents_per_step(self) -> int:
        """Of the unpacked run."""
        return self.batch_size * self.bins.num_slots

    def unpacked_step_of_documents(self, order: Int64Array) -> Int64Array:
        """The step of each document in the unpacked run, which visits them in this order; -1: none; both shape (N,)."""
        reached = order[: self.num_steps(len(order)) * self.unpacked_documents_per_step]
        step = np.full(len(order), -1)
        step[reached] = np.arange(len(reached)) // self.unpacked_documents_per_step
        return step

    def schedule(self, plan: PackPlan, units: Units, num_steps: int) -> Schedule:
        """The packs in the bins of exactly `num_steps` optimizer steps."""
        if self.tokens_per_rank is None:
            return schedule_packs(plan, units, num_steps, bins=self.bins)
        return schedule_groups(plan, units, num_steps, bins=self.bins, parallel=self.parallel)

    def schedule_unpacked_steps(self, units: Units, order: Int64Array) -> Schedule:
        """Every step has the documents of the unpacked run, visited in this order. Units may be families of these."""
        steps = np.arange(self.num_steps(len(order)) + 1)
        if not isinstance(units, Pieces):
            bounds = np.minimum(steps * self.unpacked_documents_per_step, len(order))
            return schedule_steps(units, order, bounds, bins=self.bins)
        step = self.unpacked_step_of_documents(order)[units.order[units.offsets[:-1]]]
        by_step = np.argsort(step, kind="stable")
        return schedule_steps(units, by_step, np.searchsorted(step[by_step], steps), bins=self.bins)

    def settings(self, of: Literal["table", "stream"]) -> dict[str, Any]:
        """The settings that decide which documents an optimizer step has, by the names that a user sets."""
        ignored = ("free", "tables") if of == "stream" else ("free",)
        chosen = [setting for setting in fields(self) if setting.metadata.get("restart") not in ignored]
        return {CONFIG_NAMES[setting.name]: getattr(self, setting.name) for setting in chosen}

    def fingerprint(self, of: Literal["packs", "schedule"]) -> str:
        """Hash of all settings that decide the packs of the first epoch, or the schedule of any."""
        chosen = [setting.name for setting in fields(self) if of == "schedule" or "places" not in setting.metadata]
        values = {name: getattr(self, name) for name in chosen} | {"share_prefixes": self.shares_families}
        return hashlib.sha256(repr(values).encode()).hexdigest()


CONFIG_NAMES = {setting.name: setting.metadata.get("name", setting.name) for setting in fields(Packing)}
"""Of each field in `SFTConfig`."""
REPLANNED_SETTINGS = frozenset(
    CONFIG_NAMES[each.name] for each in fields(Packing) if each.metadata.get("restart") == "adapted"
)
"""Settings for other values of which the rest of an epoch, or of a pass, can be planned anew."""
DEFAULTS = {CONFIG_NAMES[each.name]: each.default for each in fields(Packing) if each.default is not MISSING}


def compare_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> ChangedSettings:
    """What differs of the settings `now`. Where an earlier version has not saved one, it had the default.

    >>> compare_settings({"max_length": 8, "batch_size": 2}, Packing(max_length=8, seed=1).settings("table"))
    {'seed': (0, 1), 'per_device_train_batch_size': (2, 1)}
    """
    before = DEFAULTS | {CONFIG_NAMES.get(name, name): value for name, value in before.items()}
    return {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}


def describe_changes(changed: ChangedSettings) -> str:
    """The differences in words.

    >>> describe_changes({"seed": (0, 1)})
    '`seed` was 0 and is 1'
    """
    return ", ".join(
        f"`{name}` was {_shorten(before)} and is {_shorten(now)}" for name, (before, now) in changed.items()
    )


def _shorten(value: object) -> str:
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else repr(value)  # a hash
