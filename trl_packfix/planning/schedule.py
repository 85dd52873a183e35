"""Which pack goes to which optimizer step, micro-batch and rank.

A schedule has a fixed number of slots, (steps, accumulation, world_size), and every document is in exactly one of
them. The number of steps is fixed for the whole run, because the Trainer reads it once. Schedules are pure functions of
lengths, settings, seed and epoch: all ranks compute the same one without communication. The data-parallel rank and size
are arguments, never read from the environment.

Letters: S steps, G micro-batches per step (gradient accumulation), W ranks, N documents.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from .arrays import Float64Array, Int64Array
from .balance import balance_packs, even_targets, least_loaded
from .packs import PackPlan, plan_bfd
from .units import Bins, Synchronisation, Units

NO_DOCUMENTS = -1
"""Id of the dummy document, two tokens and none trained, of a rank that has no document in a micro-batch."""


@dataclass(frozen=True)
class Schedule:
    """Documents of every slot of one epoch.

    Ranks that share a pack are neighbours. The slot of the first one holds the documents of its group, and the slots of
    the others are empty.
    """

    order: Int64Array  # document indices, slot after slot, shape (N,)
    # Slot (step * G + micro) * W + rank holds `order[offsets[slot]:offsets[slot + 1]]`, shape (S*G*W + 1,)
    offsets: Int64Array
    accumulation: int
    world_size: int
    num_skipped: int = 0  # documents that the epoch does not reach (`dataloader_drop_last`): `EpochPlanner` counts them
    # Ranks that share a pack in each micro-step, shape (S*G,); given as (): each has its own pack
    degrees: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not len(self.degrees):
            object.__setattr__(self, "degrees", np.ones((len(self.offsets) - 1) // self.world_size, np.int64))

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // (self.accumulation * self.world_size)

    def micro_batches(self, rank: int) -> Iterator[Int64Array]:
        """Document indices of each micro-batch of one rank, in training order; `[EMPTY]` where it has none.

        With sequence parallelism they are those of the whole pack, of which the rank holds a part: see `parts_of_rank`.
        """
        for micro_step, (_, index) in enumerate(self.parts_of_rank(rank)):
            slot = micro_step * self.world_size + rank - index
            documents = self.order[self.offsets[slot] : self.offsets[slot + 1]]
            yield documents if len(documents) else np.array([NO_DOCUMENTS])

    def parts_of_rank(self, rank: int) -> Iterator[tuple[int, int]]:
        """Degree and index of the part that a rank holds of its pack, for each micro-batch; (1, 0): all of it."""
        return ((degree, rank % degree) for degree in self.degrees.tolist())

    def slot_sums(self, values: Int64Array | Float64Array) -> Float64Array:
        """Sums of `values`, by number of a document, over the documents of every slot, shape (S*G, W)."""
        total = np.concatenate([[0.0], np.cumsum(values[self.order])])
        return np.diff(total[self.offsets]).reshape(-1, self.world_size)

    def step_documents(self, step: int) -> Int64Array:
        """Document indices of one optimizer step over all its micro-batches and ranks."""
        slots = self.accumulation * self.world_size
        return self.order[self.offsets[step * slots] : self.offsets[(step + 1) * slots]]


def rank_costs(schedule: Schedule, costs: Float64Array) -> Float64Array:
    """Modelled cost of every micro-batch, shape (S, G, W), of the `costs` of units by number.

    Ranks that share a pack have even shares of its cost.
    """
    degrees = schedule.degrees[:, None]
    ranks = np.arange(schedule.world_size)
    packs = np.take_along_axis(schedule.slot_sums(costs), ranks - ranks % degrees, axis=1) / degrees
    return packs.reshape(-1, schedule.accumulation, schedule.world_size)


def imbalance(schedule: Schedule, costs: Float64Array, synchronisation: Synchronisation) -> float:
    """Sum over micro-steps of the largest rank cost / sum of the mean rank cost; 1.0 is perfect.

    Where ranks wait only at the end of a step, the sums are over steps and rank costs are those of whole steps.

    >>> schedule = Schedule(np.arange(4), np.array([0, 1, 2, 3, 4]), accumulation=2, world_size=2)
    >>> imbalance(schedule, np.array([4.0, 2.0, 1.0, 3.0]), "micro")
    1.4
    """
    if schedule.world_size == 1:
        return 1.0
    packs = rank_costs(schedule, costs)
    if synchronisation == "step":
        packs = packs.sum(axis=1)
    return float(packs.max(axis=-1).sum() / packs.mean(axis=-1).sum())


def schedule_packs(plan: PackPlan, units: Units, num_steps: int, *, bins: Bins) -> Schedule:
    """Packs in visiting order -> slots of exactly `num_steps` optimizer steps.

    Where a step has fewer packs than slots, its largest packs are split between slots; where it has fewer documents
    than slots, the remaining slots stay empty. Nothing is duplicated and, unless `drop_last` is set, nothing left out.

    >>> from .costs import LLAMA_7B
    >>> plan = PackPlan(np.array([0, 1, 2]), np.array([0, 2, 3]), np.array([3, 2, 4]), capacity=5)
    >>> schedule = schedule_packs(plan, Units(plan.lengths, LLAMA_7B), 1, bins=Bins(capacity=5, world_size=2))
    >>> [[batch.tolist() for batch in schedule.micro_batches(rank)] for rank in range(2)]
    [[[0, 1]], [[2]]]
    """
    steps = packs_of_steps(plan, units.rows, num_steps, bins=bins)
    if bins.evens_targets:
        steps = (even_targets(step, units, len(step), capacity=bins.capacity) for step in steps)
    elif bins.balance == "step":
        steps = (balance_packs(step, units, bins) for step in steps)
    none = np.zeros(0, np.int64)
    return _make_schedule((step + [none] * (bins.num_slots - len(step)) for step in steps), bins)


def packs_of_steps(plan: PackPlan, rows: Int64Array, num_steps: int, *, bins: Bins) -> Iterator[list[Int64Array]]:
    """Yield the packs of each optimizer step, at most `num_slots`. With `drop_last`, no step has the last packs."""
    slots = bins.num_slots
    packs = [plan.order[a:b] for a, b in pairwise(plan.offsets)]
    assert bins.drop_last or len(packs) <= num_steps * slots, "more packs than slots"
    packs = packs[: num_steps * slots]
    if len(packs) <= (num_steps - 1) * slots:
        # Fewer packs than in the plan that fixed the number of steps: spread them, or the last steps would be empty.
        packs = split_up_to(packs, rows, num_steps)
        bounds = np.arange(num_steps + 1) * len(packs) // num_steps
    else:
        bounds = np.minimum(np.arange(num_steps + 1) * slots, len(packs))
    return (split_up_to(packs[first:last], rows, slots) for first, last in pairwise(bounds))


def schedule_steps(units: Units, order: Int64Array, bounds: Int64Array, *, bins: Bins) -> Schedule:
    """Step i has the units `order[bounds[i]:bounds[i + 1]]`.

    They fill as few micro-batches as the capacity allows, evenly over ranks. The Trainer runs all G micro-batches of a
    step, so each of the others gets one short document. This is the online minibatch packing of arXiv 2407.09105.
    Where trained tokens are evened out, the units fill as many micro-batches as the unpacked run does.

    A step of S slots has at most S * B documents for some B, each of at most `capacity / B` tokens, or pieces of them
    (`families.py`). In a piece, each document but the first adds at most half of that, so k documents have at most
    (k + 1) / 2 * capacity / B rows.

    >>> from .costs import LLAMA_7B
    >>> units, bins = Units(np.array([4, 1, 2, 3]), LLAMA_7B), Bins(capacity=8, accumulation=2)
    >>> schedule = schedule_steps(units, np.array([3, 2, 1, 0]), np.array([0, 4]), bins=bins)
    >>> [batch.tolist() for batch in schedule.micro_batches(0)]  # 10 tokens: two packs of at most 8
    [[0, 1], [3, 2]]
    """
    if bins.num_slots == 1:  # no choice to make
        return Schedule(order[: bounds[-1]], bounds, bins.accumulation, bins.world_size)

    def slots(members: Int64Array) -> list[Int64Array]:
        packs = _few_packs(members, units.rows, bins)
        if bins.evens_targets:
            num_filled = min(-(-len(members) // bins.batch_size), bins.num_slots)
            packs = even_targets(packs, units, num_filled, capacity=bins.capacity)
            return packs + [members[:0]] * (bins.num_slots - len(packs))
        if bins.balance == "step":
            packs = balance_packs(packs, units, replace(bins, accumulation=len(packs) // bins.world_size))
        return _fill_empty_packs(packs, units.rows, bins.num_slots)

    steps = (slots(order[first:last]) for first, last in pairwise(bounds.tolist()))
    return _make_schedule(steps, bins)


def _few_packs(documents: Int64Array, lengths: Int64Array, bins: Bins) -> list[Int64Array]:
    """As few packs as best-fit decreasing needs, rounded up to a multiple of the ranks; even tokens where they fit."""
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    plan = plan_bfd(lengths[longest_first], bins.capacity, None)
    # Every closed pack of m documents or pieces holds at least B documents. The next one, no longer than any of them,
    # did not fit, so they have more than m / (m + 1) * capacity rows and 2 m B / (m + 1) - m >= B - 1 documents if
    # m < B. If m >= B, they are B documents anyway.
    assert plan.num_packs <= bins.num_slots
    num = -(-plan.num_packs // bins.world_size) * bins.world_size
    rows = lengths[longest_first]
    packs = least_loaded(rows, rows, num, capacity=bins.capacity)
    if packs is None:
        packs = [*np.split(plan.order, plan.offsets[1:-1]), *[plan.order[:0]] * (num - plan.num_packs)]
    return [longest_first[pack] for pack in packs]


def _fill_empty_packs(packs: list[Int64Array], lengths: Int64Array, num: int) -> list[Int64Array]:
    """`num` packs, since the Trainer runs them all: an empty one gets the shortest document of a pack with several."""
    spread = [*(pack.tolist() for pack in packs), *([] for _ in range(num - len(packs)))]
    # of documents of one length those of all packs in turn
    units = [(int(lengths[unit]), place, i, unit) for i, pack in enumerate(spread) for place, unit in enumerate(pack)]
    shortest_first = (unit for unit in sorted(units) if len(spread[unit[2]]) > 1)
    for empty, (*_, i, unit) in zip([pack for pack in spread if not pack], shortest_first, strict=False):
        empty.append(unit)
        spread[i].remove(unit)
    return [np.array(pack, dtype=np.int64) for pack in spread]


def split_up_to(packs: list[Int64Array], lengths: Int64Array, num: int) -> list[Int64Array]:
    """Halve the packs with the most tokens until there are `num`, or no pack has two documents.

    A pack of one long document is never halved, so halves hold short ones. They are spread over the epoch, as packs
    are: each takes the place of its pack, and of packs with as many tokens not the first is halved, but that with the
    smallest number of a document at its beginning.

    >>> packs = [np.array([3]), np.array([1, 0, 2]), np.array([4, 5])]
    >>> [pack.tolist() for pack in split_up_to(packs, np.array([2, 3, 1, 9, 3, 2]), 4)]
    [[3], [1], [0, 2], [4, 5]]
    """
    if len(packs) >= num:
        return packs

    def entry(i: int) -> tuple[int, int, int]:
        return -int(lengths[packs[i]].sum()), int(packs[i][0]), i

    heap = [entry(i) for i, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    packs, place = list(packs), list(range(len(packs)))
    while len(packs) < num and heap:
        *_, i = heapq.heappop(heap)
        longest_first = packs[i][np.argsort(-lengths[packs[i]], kind="stable")]
        rows = lengths[longest_first]
        halves = least_loaded(rows, rows, 2, capacity=int(rows.sum()))
        assert halves is not None
        packs[i] = longest_first[halves[0]]
        packs.append(longest_first[halves[1]])
        place.append(place[i])
        for half in (i, len(packs) - 1):
            if len(packs[half]) > 1:
                heapq.heappush(heap, entry(half))
    return [packs[i] for i in sorted(range(len(packs)), key=place.__getitem__)]


def _make_schedule(steps: Iterable[list[Int64Array]], bins: Bins) -> Schedule:
    """The slots of all steps, one after the other. Of each step two arrays are kept: those of its slots take more."""
    orders = [np.zeros(0, np.int64)]
    sizes = [np.zeros(1, np.int64)]
    for slots in steps:
        orders.append(np.concatenate(slots))
        sizes.append(np.array([len(slot) for slot in slots], np.int64))
    offsets = np.concatenate(sizes)
    np.cumsum(offsets, out=offsets)
    return Schedule(np.concatenate(orders), offsets, bins.accumulation, bins.world_size)
