"""Deal packs to optimizer steps, micro-batches and ranks: a schedule.

`Packing` calls this module with the packs of `packs.py`, or, for a strategy that keeps the steps of unpacked training,
with the units of each step. A *unit* is what planning packs: a document, or documents with a common prefix that are
planned as one. Its *rows* are its tokens, shared ones counted once. Where ranks share packs, `degrees.py` makes the
schedule instead. `data/epochs.py` replaces the units of the schedule by documents, and the loader of each rank reads
its micro-batches from it.

A *slot* is one micro-batch of one optimizer step on one rank, and holds at most one pack. A *micro-step* is the
micro-batches that all ranks compute at the same time. A schedule has (steps, accumulation, world_size) slots, and every
document is in exactly one of them; only with `drop_last` the last documents of an epoch are in none. The number of
steps is the same in all epochs, because the Trainer reads it only once. A schedule is a pure function of lengths,
settings, seed and epoch, so all ranks compute the same one without communication. The data-parallel rank and world size
are arguments, and are never read from the environment.

Letters: S steps, G micro-batches per step (gradient accumulation), W ranks, N documents, U units.
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
"""Number that stands for the dummy document of a rank without documents in a micro-batch: two tokens, none trained."""


@dataclass(frozen=True)
class Schedule:
    """The documents, or units, of every slot of one epoch.

    Ranks that share a pack are neighbours. The slot of the first rank of such a group holds the documents of the pack,
    and the slots of its other ranks are empty.
    """

    # Numbers of the documents or units, slot after slot, shape (N,) or (U,), or fewer: `dataloader_drop_last` may leave
    # some out
    order: Int64Array
    # Slot (step * G + micro_batch) * W + rank holds `order[offsets[slot]:offsets[slot + 1]]`, shape (S*G*W + 1,)
    offsets: Int64Array
    accumulation: int  # G
    world_size: int  # W
    # Number of ranks that share a pack in each micro-step, shape (S*G,). Left empty, it becomes 1 everywhere.
    degrees: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        """Replace empty `degrees` by a degree of 1 in each micro-step."""
        if not len(self.degrees):
            object.__setattr__(self, "degrees", np.ones((len(self.offsets) - 1) // self.world_size, np.int64))

    @property
    def num_steps(self) -> int:
        """S, the number of optimizer steps."""
        return (len(self.offsets) - 1) // (self.accumulation * self.world_size)

    def micro_batches(self, rank: int) -> Iterator[Int64Array]:
        """Yield the document numbers of each micro-batch of one rank, in training order.

        A micro-batch without documents is `[NO_DOCUMENTS]`. With sequence parallelism, a micro-batch has all documents
        of its pack, and the ranks that share the pack have equal micro-batches.
        """
        for micro_step, degree in enumerate(self.degrees.tolist()):
            slot = micro_step * self.world_size + rank - rank % degree  # the slot of the first rank of the group
            documents = self.order[self.offsets[slot] : self.offsets[slot + 1]]
            yield documents if len(documents) else np.array([NO_DOCUMENTS])

    def slot_sums(self, values: Int64Array | Float64Array) -> Float64Array:
        """Return the sum of values over the documents of each slot, shape (S*G, W).

        Args:
            values: the value of each document or unit, by its number.
        """
        total = np.concatenate([[0.0], np.cumsum(values[self.order])])
        return np.diff(total[self.offsets]).reshape(-1, self.world_size)

    def step_documents(self, step: int) -> Int64Array:
        """Return the document numbers of one optimizer step, of all its micro-batches and ranks."""
        num_slots = self.accumulation * self.world_size
        return self.order[self.offsets[step * num_slots] : self.offsets[(step + 1) * num_slots]]


def rank_costs(schedule: Schedule, costs: Float64Array) -> Float64Array:
    """Return the FLOPs that the cost model expects for each micro-batch on each rank, shape (S, G, W).

    Ranks that share a pack have even shares of its cost.

    Args:
        schedule: a schedule of units.
        costs: FLOPs of each unit, by its number: the sum over the ranks that share the unit.
    """
    degrees = schedule.degrees[:, None]
    ranks = np.arange(schedule.world_size)
    first_ranks = ranks - ranks % degrees  # the first rank of the group of each rank, which has the documents
    slot_costs = np.take_along_axis(schedule.slot_sums(costs), first_ranks, axis=1) / degrees
    return slot_costs.reshape(-1, schedule.accumulation, schedule.world_size)


def imbalance(schedule: Schedule, costs: Float64Array, synchronisation: Synchronisation) -> float:
    """Return (sum over micro-steps of the largest cost of a rank) / (sum of the mean cost of the ranks).

    1.0 is perfect. With synchronisation "step", ranks wait only at the end of a step, so the sums are over steps, and a
    rank has the cost of all its micro-batches.

    >>> schedule = Schedule(np.arange(4), np.array([0, 1, 2, 3, 4]), accumulation=2, world_size=2)
    >>> imbalance(schedule, np.array([4.0, 2.0, 1.0, 3.0]), "micro")
    1.4
    """
    if schedule.world_size == 1:
        return 1.0
    costs_of_ranks = rank_costs(schedule, costs)
    if synchronisation == "step":
        costs_of_ranks = costs_of_ranks.sum(axis=1)
    return float(costs_of_ranks.max(axis=-1).sum() / costs_of_ranks.mean(axis=-1).sum())


def schedule_packs(plan: PackPlan, units: Units, num_steps: int, *, bins: Bins) -> Schedule:
    """Put the packs of a plan, in their order, into the slots of exactly `num_steps` optimizer steps.

    If a step has fewer packs than slots, its largest packs are split. If it has fewer units than slots, some slots stay
    empty. Every unit is in one slot, except for the last units if `bins.drop_last` is set.

    Args:
        plan: packs of units.
        units: the units of the plan.
        num_steps: number of optimizer steps.
        bins: the slots of a step, and how units are dealt to them. With `bins.evens_targets`, packs get about equal
            numbers of targets, which are trained tokens.

    >>> from .costs import LLAMA_7B
    >>> lengths = np.array([3, 2, 4])
    >>> plan = PackPlan(order=np.array([0, 1, 2]), offsets=np.array([0, 2, 3]), lengths=lengths, capacity=5)
    >>> bins = Bins(capacity=5, world_size=2)
    >>> schedule = schedule_packs(plan, Units(lengths, LLAMA_7B), num_steps=1, bins=bins)
    >>> [[batch.tolist() for batch in schedule.micro_batches(rank)] for rank in range(2)]
    [[[0, 1]], [[2]]]
    """
    steps = packs_of_steps(plan, units.rows, num_steps, bins=bins)
    if bins.evens_targets:  # the loss may be a mean per micro-batch, so packs get about equal numbers of targets
        steps = (even_targets(step, units, num_packs=len(step), bins=bins) for step in steps)
    elif bins.balance == "step":  # the ranks of a step should finish together
        steps = (balance_packs(step, units, bins) for step in steps)
    return _make_schedule(steps, bins)


def packs_of_steps(plan: PackPlan, rows: Int64Array, num_steps: int, *, bins: Bins) -> Iterator[list[Int64Array]]:
    """Return an iterator over the packs of each optimizer step, at most as many as a step has slots.

    With `bins.drop_last`, the last packs of the plan belong to no step.

    Args:
        plan: packs of units.
        rows: rows of each unit, shape (U,).
        num_steps: number of optimizer steps.
        bins: the slots of a step.
    """
    num_slots = bins.num_slots
    packs = [plan.order[start:stop] for start, stop in pairwise(plan.offsets)]
    assert bins.drop_last or len(packs) <= num_steps * num_slots, "more packs than slots"
    packs = packs[: num_steps * num_slots]
    if len(packs) <= (num_steps - 1) * num_slots:
        # There is no pack left for the last step, because the plan of the first epoch, which fixed the number of steps,
        # had more packs. The packs are split and spread over all steps, so that no step is empty. There are at least
        # as many units as steps, because every pack of the first plan had a unit.
        packs = split_up_to(packs, rows, num_steps)
        bounds = np.arange(num_steps + 1) * len(packs) // num_steps
    else:
        bounds = np.minimum(np.arange(num_steps + 1) * num_slots, len(packs))
    return (split_up_to(packs[start:stop], rows, num_slots) for start, stop in pairwise(bounds))


def schedule_steps(units: Units, order: Int64Array, bounds: Int64Array, *, bins: Bins) -> Schedule:
    """Make a schedule in which the units of each step are given, as they are in unpacked training.

    The units of a step fill as few micro-batches as the capacity allows, evenly over ranks. The Trainer runs all G
    micro-batches of a step, so each micro-batch that would be empty gets one short unit. This is the online minibatch
    packing of arXiv 2407.09105. If packs should have about equal numbers of trained tokens (`bins.evens_targets`), the
    units fill as many micro-batches as in unpacked training, because the user's loss may be a mean per micro-batch.

    The units always fit. Let B be the number of documents in a micro-batch of unpacked training. A step of S' = G * W
    slots has at most S' * B documents. The capacity is B times `max_length`, the most tokens of a document, so each
    document has at most `capacity / B` tokens. In a unit of several documents, the first document has a row for each
    token. Every further document joins only if at least half of its tokens are shared (`features/prefixes`), so it adds
    at most half as many rows as it has tokens. So a unit of k documents has at most (1 + (k - 1) / 2) * capacity / B
    rows, which is (k + 1) / 2 * capacity / B. `_few_packs` proves that few enough packs follow from this.

    Args:
        units: all units of the epoch.
        order: numbers of the units, step after step. Units behind the last bound are in no step.
        bounds: step i has the units `order[bounds[i]:bounds[i + 1]]`, shape (S + 1,).
        bins: the slots of a step, and how units are dealt to them.

    >>> from .costs import LLAMA_7B
    >>> units, bins = Units(np.array([4, 1, 2, 3]), LLAMA_7B), Bins(capacity=8, accumulation=2)
    >>> schedule = schedule_steps(units, np.array([3, 2, 1, 0]), np.array([0, 4]), bins=bins)
    >>> [batch.tolist() for batch in schedule.micro_batches(0)]  # 10 tokens: two packs of at most 8
    [[0, 1], [3, 2]]
    """
    if bins.num_slots == 1:  # each step is one pack, which the units of the step are known to fit into
        return Schedule(order[: bounds[-1]], bounds, bins.accumulation, bins.world_size)

    def packs_of_step(members: Int64Array) -> list[Int64Array]:
        """Return the packs of a step with these units, at most one for each slot."""
        packs = _few_packs(members, units, bins)
        if bins.evens_targets:
            # As many packs as unpacked training has micro-batches with a document. `even_targets` deals the units to
            # them anew. If it finds nothing more even, it returns `packs`, and some slots may stay empty
            num_filled = min(-(-len(members) // bins.batch_size), bins.num_slots)
            return even_targets(packs, units, num_packs=num_filled, bins=bins)
        if bins.balance == "step":
            # Balance only as many micro-batches as the packs need; the others get single units afterwards
            filled_micro_batches = -(-len(packs) // bins.world_size)
            packs = balance_packs(packs, units, replace(bins, accumulation=filled_micro_batches))
        return _fill_empty_packs(packs, units.rows, bins.num_slots)

    steps = (packs_of_step(order[start:stop]) for start, stop in pairwise(bounds.tolist()))
    return _make_schedule(steps, bins)


def _few_packs(members: Int64Array, units: Units, bins: Bins) -> list[Int64Array]:
    """Put the units of a step into few packs with about equal numbers of rows.

    Args:
        members: numbers of the units of the step.
        units: all units.
        bins: the slots of the step.

    Returns:
        As many packs as best-fit decreasing needs, rounded up to a multiple of the ranks. If one of these packs
        would be above the capacity, the packs of best-fit decreasing.
    """
    longest_first = members[np.argsort(-units.rows[members], kind="stable")]
    rows = units.rows[longest_first]
    plan = plan_bfd(rows, bins.capacity)  # best-fit decreasing
    # The units need at most S' packs. (`schedule_steps` defines B and S', and bounds the rows of a unit.) The step
    # has at most S' * B documents. So there are at most S' packs if every pack but the last has at least B documents.
    # Take a pack that is not the last one, and the m units and d documents in it when the last pack is opened.
    # - If m >= B, then d >= B, because each unit has at least one document.
    # - If m < B, the pack has no room for the unit that opens the last pack. That unit is no longer than any of the m
    #   units, so it has at most 1 / m of their rows, and the m units have more than m / (m + 1) * capacity rows.
    #   By the bound, summed over the m units, they have at most (d + m) / 2 * capacity / B rows. From both follows
    #   d > 2 m B / (m + 1) - m. For 1 <= m < B this is at least B - 1, so d >= B.
    assert plan.num_packs <= bins.num_slots
    num_packs = -(-plan.num_packs // bins.world_size) * bins.world_size
    # Put each unit, the longest first, into the pack with the fewest rows: rows take the place of costs here. If no
    # pack has room for it, it goes into one that is then above the capacity
    even_packs = [
        longest_first[pack] for pack in least_loaded(rows, costs=rows, num_packs=num_packs, capacity=bins.capacity)
    ]
    if bins.fits(even_packs, units):  # no pack is above the capacity
        return even_packs
    return np.split(longest_first[plan.order], plan.offsets[1:-1])


def _fill_empty_packs(packs: list[Int64Array], rows: Int64Array, num_packs: int) -> list[Int64Array]:
    """Extend `packs` to `num_packs` packs, and move a unit to each empty pack, because the Trainer runs all of them.

    The shortest units are moved, but no pack loses its last unit. So a pack stays empty if there are too few units.
    """
    unit_lists = [pack.tolist() for pack in packs] + [[] for _ in range(num_packs - len(packs))]
    empty_packs = [units for units in unit_lists if not units]
    # Units are sorted by rows. Units with equal rows are sorted by their place in their pack, then by pack.
    candidates = sorted(
        (int(rows[unit]), place, i, unit) for i, units in enumerate(unit_lists) for place, unit in enumerate(units)
    )
    # This generator is read while the loop below takes units away. So its condition, that the pack of a unit has more
    # than one unit, is tested when the unit is about to move, and no pack loses its last unit
    movable = ((i, unit) for _, _, i, unit in candidates if len(unit_lists[i]) > 1)
    for empty_pack, (i, unit) in zip(empty_packs, movable, strict=False):
        empty_pack.append(unit)
        unit_lists[i].remove(unit)
    return [np.array(units, dtype=np.int64) for units in unit_lists]


def split_up_to(packs: list[Int64Array], rows: Int64Array, num_packs: int) -> list[Int64Array]:
    """Halve the packs with the most rows until there are `num_packs` packs, or no pack has two units.

    Both halves take the place of their pack in the list. Halves hold shorter units than other packs, because a pack of
    one long unit cannot be halved. If the halves came last, the epoch would end with short units. Of packs with equal
    rows, the pack whose first unit has the smallest number is halved first.

    Args:
        packs: numbers of the units in each pack.
        rows: rows of each unit, by its number.
        num_packs: number of packs to make.

    >>> packs = [np.array([3]), np.array([1, 0, 2]), np.array([4, 5])]
    >>> [pack.tolist() for pack in split_up_to(packs, np.array([2, 3, 1, 9, 3, 2]), 4)]
    [[3], [1], [0, 2], [4, 5]]
    """
    if len(packs) >= num_packs:
        return packs

    def heap_entry(i: int) -> tuple[int, int, int]:
        """Return the key of pack i in the heap. The pack with the smallest key is halved first."""
        return -int(rows[packs[i]].sum()), int(packs[i][0]), i

    heap = [heap_entry(i) for i, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    packs = list(packs)
    places = list(range(len(packs)))  # the place of each pack in the result; two halves have one place
    while len(packs) < num_packs and heap:
        *_, i = heapq.heappop(heap)
        longest_first = packs[i][np.argsort(-rows[packs[i]], kind="stable")]
        sorted_rows = rows[longest_first]
        first_half, second_half = least_loaded(
            sorted_rows, costs=sorted_rows, num_packs=2, capacity=int(sorted_rows.sum())
        )
        packs[i] = longest_first[first_half]
        packs.append(longest_first[second_half])
        places.append(places[i])
        for new_pack in (i, len(packs) - 1):
            if len(packs[new_pack]) > 1:
                heapq.heappush(heap, heap_entry(new_pack))
    return [packs[i] for i in sorted(range(len(packs)), key=places.__getitem__)]


def _make_schedule(steps: Iterable[list[Int64Array]], bins: Bins) -> Schedule:
    """Make a schedule of the packs of all steps. Slots for which a step has no pack are empty.

    Step after step, the packs become two arrays, which take less memory than an array for each pack.
    """
    no_units = np.zeros(0, np.int64)
    orders = [no_units]
    sizes = [np.zeros(1, np.int64)]
    for packs in steps:
        orders.append(np.concatenate([no_units, *packs]))  # `concatenate` refuses an empty list
        sizes.append(np.zeros(bins.num_slots, np.int64))
        sizes[-1][: len(packs)] = [len(pack) for pack in packs]
    offsets = np.concatenate(sizes)
    np.cumsum(offsets, out=offsets)
    return Schedule(np.concatenate(orders), offsets, bins.accumulation, bins.world_size)
