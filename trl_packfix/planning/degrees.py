"""Choose for each micro-step how many ranks share a pack, by a model of the time. Sequence parallelism, numpy only.

With `tokens_per_rank` a document may be longer than what one rank holds. Then neighbouring ranks, a *group*, share a
pack, and each rank holds a *part* of its tokens. The *degree* is the number of ranks in a group. Before and after
attention, or the scan of a recurrent layer, the ranks of a group exchange tokens for heads (an all-to-all, as in
Ulysses, arXiv 2309.14509), which takes time. So short documents should have a degree of 1. A long document should have
a high degree, so that its group ends as early as the other groups, which wait for it.

`Packing.schedule` calls `schedule_groups`, which makes the schedule of an epoch from a plan of packs. A *micro-step* is
the micro-batches that all ranks compute at the same time. A *unit* is a document, or a family of documents planned as
one. Its *rows* are its tokens; a token that documents of a family share is one row.

An optimizer step keeps its units, whatever the degrees. `UndividedStep.divide` deals them to micro-steps in the faster
of two ways. In the first, all micro-steps have one degree, the best by the model. In the second, the units are sorted,
longest first, and cut into two halves with about as many tokens. Each half gets its share of the micro-steps, and is
divided in the same two ways. So the longest documents may have a degree of their own, and no step is slower, by the
model, than with the best single degree. If computing, links and latencies were all twice as fast, the choice would be
the same.

Letters: G micro-steps of a step, W ranks, C tokens per rank, S the smallest degree that holds a document of
`max_length`.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from .arrays import Float64Array, Int64Array, offsets_of
from .balance import balance_packs, least_loaded
from .best_fit import best_fit_decreasing
from .costs import CostModel
from .packs import PackPlan
from .parallel import SequenceParallel, Speeds
from .schedule import Schedule, packs_of_steps
from .units import Bins, Units


@dataclass(frozen=True)
class GroupTimes:
    """The modelled time, in seconds, of groups of ranks that share a pack.

    >>> times = GroupTimes(CostModel(per_token=1e9, per_pair=0.0), Speeds())
    >>> costs = times.cost_model(np.array([1000]))  # FLOPs of a forward pass; a training step has 4 times as many
    >>> float(times.seconds(costs, np.array([1000]), degree=1)[0])  # 4e12 FLOPs at 4e14 per second
    0.01
    """

    cost_model: CostModel
    speeds: Speeds = field(default_factory=Speeds)

    def exchange_seconds(self, degree: int) -> tuple[float, float]:
        """Return the seconds that the exchanges of attention and scans take in one micro-step.

        A token sends its queries, keys and values, and gets back outputs. If the model has fewer key heads than the
        group has ranks, keys and values are sent for as many heads as ranks.

        Returns:
            The seconds for each token of a rank, and the seconds that do not depend on tokens.
        """
        if degree == 1:
            return 0.0, 0.0
        speeds = self.speeds  # `within` and `between`: bytes per second within a node and between nodes
        ranks_inside = min(degree, speeds.ranks_per_node)  # ranks of the group on one node
        # A rank keeps 1 / degree of its bytes, and sends an equal share to each other rank of the group.
        seconds_within = (ranks_inside - 1) / degree / speeds.within
        seconds_per_byte = seconds_within + (degree - ranks_inside) / degree / speeds.between
        latency = speeds.latency_within if degree <= speeds.ranks_per_node else speeds.latency_between
        num_values = 0  # numbers that are exchanged for one token in all layers
        num_layers = 0
        for kind in self.cost_model.attention + self.cost_model.mixers:  # layers with equal heads
            # `exchanged_per_head`: numbers that are exchanged for one token of a query head, or of a value head of a
            # mixer, before and after together. `exchanged_per_kv_head`: the same for a key head
            num_layers += kind.layers
            kv_heads = max(kind.kv_heads, degree)
            num_per_layer = kind.heads * kind.exchanged_per_head + kv_heads * kind.exchanged_per_kv_head
            num_values += kind.layers * num_per_layer
        passes = speeds.exchanging_passes  # 3: the forward, the recomputed forward and the backward pass
        per_token = num_values * speeds.bytes_per_value * passes * seconds_per_byte
        return per_token, 2 * passes * num_layers * latency  # a layer exchanges twice, before and after

    def seconds(self, costs: Float64Array, tokens: Int64Array | Float64Array, degree: int) -> Float64Array:
        """Return the seconds of one micro-step of each of N groups, shape (N,).

        Args:
            costs: FLOPs of the pack of each group, on all its ranks together, shape (N,).
            tokens: tokens of the pack of each group, shape (N,).
            degree: number of ranks in a group.
        """
        per_token, latency = self.exchange_seconds(degree)
        # A training step has the FLOPs of 4 forward passes (`passes`): one for each of the two forward passes, and two
        # for the backward pass
        return costs * (self.speeds.passes / (self.speeds.flops * degree)) + tokens * (per_token / degree) + latency


@dataclass(frozen=True)
class DividedStep:
    """The units of one optimizer step, or of some of its micro-steps, in groups of ranks."""

    seconds: float  # modelled time: the sum over micro-steps of the time of the slowest group
    degrees: list[int]  # the degree of each micro-step
    # The units of each group, micro-step after micro-step; a micro-step has W // degree groups
    packs: list[Int64Array]

    def __add__(self, other: "DividedStep") -> "DividedStep":
        """Return the micro-steps of both, one after the other."""
        return DividedStep(self.seconds + other.seconds, self.degrees + other.degrees, self.packs + other.packs)


def schedule_groups(
    plan: PackPlan, units: Units, num_steps: int, *, bins: Bins, parallel: SequenceParallel
) -> Schedule:
    """Make the schedule of an epoch with sequence parallelism, as `schedule.schedule_packs` does without it.

    Args:
        plan: packs of units for groups of S ranks.
        units: the units of the plan.
        num_steps: number of optimizer steps.
        bins: the slots of a step, for W ranks.
        parallel: the degrees that may be chosen, and the speeds of the devices.

    >>> from .costs import LLAMA_7B
    >>> lengths = np.array([8, 4, 3])
    >>> plan = PackPlan(order=np.array([0, 1, 2]), offsets=np.array([0, 1, 3]), lengths=lengths, capacity=8)
    >>> units, bins = Units(lengths, LLAMA_7B), Bins(capacity=8, world_size=2, accumulation=2)
    >>> parallel = SequenceParallel(tokens_per_rank=4, smallest=2, degrees=(1, 2))
    >>> schedule = schedule_groups(plan, units, num_steps=1, bins=bins, parallel=parallel)
    >>> [[batch.tolist() for batch in schedule.micro_batches(rank)] for rank in range(2)], schedule.degrees
    ([[[0], [1]], [[0], [2]]], array([2, 1]))
    """
    planned_bins = replace(bins, world_size=bins.world_size // parallel.smallest)  # one slot for each group of S ranks
    planned_steps = packs_of_steps(plan, units.rows, num_steps, bins=planned_bins)
    steps = [divide_step(packs, units, bins, parallel=parallel) for packs in planned_steps]
    degrees = np.array([degree for step in steps for degree in step.degrees], np.int64)
    packs = [pack for step in steps for pack in step.packs]
    # A pack is in the slot of the first rank of its group; the slots of the other ranks are empty.
    degree_of_pack = np.repeat(degrees, bins.world_size // degrees)
    sizes = np.zeros(len(degrees) * bins.world_size, np.int64)
    sizes[np.cumsum(degree_of_pack) - degree_of_pack] = [len(pack) for pack in packs]
    order = np.concatenate([np.zeros(0, np.int64), *packs])
    return Schedule(order, offsets_of(sizes), bins.accumulation, bins.world_size, degrees=degrees)


def divide_step(packs: list[Int64Array], units: Units, bins: Bins, *, parallel: SequenceParallel) -> DividedStep:
    """Divide the units of one optimizer step among groups of ranks so that the modelled time is short.

    Args:
        packs: the units of the step in packs for groups of S ranks.
        units: all units of the epoch.
        bins: the slots of a step, for W ranks.
        parallel: the degrees that may be chosen, and the speeds of the devices.
    """
    step = UndividedStep(np.concatenate(packs), units, bins, parallel=parallel)
    degree = parallel.smallest
    accumulation = bins.accumulation
    if bins.balance == "none":  # the packs are trained as they are planned, with empty packs for the other groups
        num_groups = bins.num_slots // degree
        return step.make_division(packs + [np.zeros(0, np.int64)] * (num_groups - len(packs)), degree)
    fastest = step.divide(step.members, accumulation)
    # A division with degree S always exists: the planned packs. `step.divide` has considered degree S for the whole
    # step only if `unbalanced_packs` finds packs for it. Otherwise compare the planned packs, balanced, with `fastest`.
    if fastest is None or step.unbalanced_packs(step.members, degree, accumulation) is None:
        planned = step.make_division(step.balance(packs, degree, accumulation), degree)
        if fastest is None or planned.seconds < fastest.seconds:
            fastest = planned
    return fastest


class UndividedStep:
    """The units of one optimizer step, longest first, and the ways to divide them among groups of ranks.

    The methods get `members`: the numbers of all units of the step, or of some of them in the same order. A method
    returns None if it does not find how these units fit into packs. Of units of equal length, the most costly come
    first.

    Args:
        members: numbers of the units of the step.
        units: all units of the epoch.
        bins: the slots of a step, for W ranks.
        parallel: the degrees that may be chosen, and the speeds of the devices.
    """

    def __init__(self, members: Int64Array, units: Units, bins: Bins, *, parallel: SequenceParallel):
        self.members = members[np.lexsort((-units.costs()[members], -units.rows[members]))]
        self.units = units
        self.bins = bins
        self.parallel = parallel
        self.times = GroupTimes(units.cost_model, parallel.speeds)

    def divide(self, members: Int64Array, num_micro_steps: int) -> DividedStep | None:
        """Divide units among `num_micro_steps` micro-steps, with one degree or in halves.

        In halves, the longer units go to the first half of the micro-steps. If these are 2 of 5 micro-steps, the
        longest units that together have at most 2 / 5 of the rows go there, and at least one unit.
        """
        in_halves = None
        if num_micro_steps > 1 and len(members):
            first_half = num_micro_steps // 2  # micro-steps for the longer units
            ends = np.cumsum(self.units.rows[members])
            rows_of_first_half = ends[-1] * first_half / num_micro_steps
            split = max(int(np.searchsorted(ends, rows_of_first_half, side="right")), 1)
            longer = self.divide(members[:split], first_half)
            shorter = self.divide(members[split:], num_micro_steps - first_half)
            if longer is not None and shorter is not None:
                in_halves = longer + shorter
        return self.divide_with_best_degree(members, num_micro_steps, in_halves)

    def divide_with_best_degree(
        self, members: Int64Array, num_micro_steps: int, best: DividedStep | None = None
    ) -> DividedStep | None:
        """Divide units among micro-steps of one degree, with the degree that takes least time.

        Degrees are tried in the order of a lower bound of their time, until none can take less than the best one.

        Args:
            members: numbers of the units.
            num_micro_steps: number of micro-steps.
            best: a division of the same units with several degrees, to compare with; None if there is none.

        Returns:
            The fastest division with one degree, or `best` if that takes no more time; None if there is neither.
        """
        if not len(members):  # every group gets an empty pack, and all degrees are equally good
            degree = self.parallel.degrees[0]
            num_groups = self.bins.world_size // degree * num_micro_steps
            return self.make_division([members] * num_groups, degree)
        bounds = sorted((self._lower_bound(members, degree), degree) for degree in self.parallel.degrees)
        for bound, degree in bounds:
            if best is not None and bound >= best.seconds:
                break
            division = self.divide_with_degree(members, degree, num_micro_steps)
            if division is not None and (best is None or division.seconds < best.seconds):
                best = division
        return best

    def _lower_bound(self, members: Int64Array, degree: int) -> float:
        """Return a lower bound, in seconds, of the modelled time of every division of these units with this degree."""
        rows = self.units.rows[members]
        costs = self.units.costs(degree)[members]  # FLOPs on all ranks of a group together
        # Summed over groups, every division takes at least the time of one group that has all units: the FLOPs and
        # tokens are the same, and each group has the latency. W / degree groups work at the same time, which divides
        # this time. And no division takes less time than its slowest unit.
        on_one_group = self.times.seconds(costs.sum(keepdims=True), rows.sum(keepdims=True), degree)
        slowest_unit = self.times.seconds(costs, rows, degree).max()
        return float(max(on_one_group[0] * degree / self.bins.world_size, slowest_unit))

    def divide_with_degree(self, members: Int64Array, degree: int, num_micro_steps: int) -> DividedStep | None:
        """Divide units among micro-steps of this degree, balanced over groups."""
        packs = self.unbalanced_packs(members, degree, num_micro_steps)
        if packs is None:
            return None
        return self.make_division(self.balance(packs, degree, num_micro_steps), degree)

    def unbalanced_packs(self, members: Int64Array, degree: int, num_micro_steps: int) -> list[Int64Array] | None:
        """Put units into packs for groups of one degree, at most one pack for each group and micro-step.

        Their costs are evened out as far as one pass over the units does it; `balance` evens them out further. The
        result is None if some unit is longer than a pack, or if neither of two ways to pack fits.
        """
        rows = self.units.rows[members]
        bins = self._bins_of(degree, num_micro_steps)
        if rows[0] > bins.capacity or rows.sum() > bins.num_slots * bins.capacity:
            return None
        costs = self.units.costs(degree)[members]
        # First way: each unit into the pack of least cost that has room. A unit that fits nowhere goes into a pack
        # without room for it, and then the second way is tried
        packs = [members[pack] for pack in least_loaded(rows, costs, bins.num_slots, capacity=bins.capacity)]
        if bins.fits(packs, self.units):  # no pack is above the capacity
            return packs
        # Second way: as few packs as best-fit decreasing needs
        best_fit, sizes = best_fit_decreasing(rows, bins.capacity)
        packs = np.split(members[best_fit], np.cumsum(sizes)[:-1])
        return packs if len(packs) <= bins.num_slots and bins.fits(packs, self.units) else None

    def balance(self, packs: list[Int64Array], degree: int, num_micro_steps: int) -> list[Int64Array]:
        """Deal the units of packs evenly to groups, and return one pack for each group and micro-step."""
        return balance_packs(packs, self.units, self._bins_of(degree, num_micro_steps))

    def _bins_of(self, degree: int, num_micro_steps: int) -> Bins:
        """Return the slots of `num_micro_steps` micro-steps: one for each group of `degree` ranks."""
        return replace(
            self.bins,
            capacity=degree * self.parallel.tokens_per_rank,
            accumulation=num_micro_steps,
            world_size=self.bins.world_size // degree,  # groups, which take the place of ranks
            degree=degree,  # the cost of a unit depends on it
            synchronisation="micro",  # the ranks of a group wait for each other in every layer
        )

    def make_division(self, packs: list[Int64Array], degree: int) -> DividedStep:
        """Make the `DividedStep` of packs for groups of one degree, micro-step after micro-step, with its time."""
        unit_costs = self.units.costs(degree)
        costs = np.array([unit_costs[pack].sum() for pack in packs])
        rows = np.array([self.units.rows[pack].sum() for pack in packs])
        seconds = self.times.seconds(costs, rows, degree).reshape(-1, self.bins.world_size // degree).max(axis=1)
        return DividedStep(float(seconds.sum()), [degree] * len(seconds), packs)


def modelled_time(schedule: Schedule, units: Units, parallel: SequenceParallel) -> tuple[Float64Array, Float64Array]:
    """Compute the modelled seconds of each micro-step of an epoch.

    Returns:
        The seconds of the slowest group of each micro-step, and the mean over ranks of the seconds in exchanges; both
        of shape (micro-steps,).
    """
    times = GroupTimes(units.cost_model, parallel.speeds)
    seconds = np.zeros(len(schedule.degrees))
    exchange = np.zeros(len(schedule.degrees))
    slot_tokens = schedule.slot_sums(units.rows)  # tokens of the pack in each slot, (micro-steps, W)
    for degree in np.unique(schedule.degrees).tolist():
        micro_steps = np.flatnonzero(schedule.degrees == degree)
        first_ranks = slice(None, None, degree)  # the first rank of each group, whose slot holds the pack
        costs = schedule.slot_sums(units.costs(degree))[micro_steps][:, first_ranks]
        tokens = slot_tokens[micro_steps][:, first_ranks]
        seconds[micro_steps] = times.seconds(costs, tokens, degree).max(axis=1)
        # A group with tokens but without FLOPs takes only the time of its exchanges, with their latency. Groups have
        # equal numbers of ranks, so the mean over groups is the mean over ranks.
        exchange[micro_steps] = times.seconds(np.zeros_like(tokens, dtype=np.float64), tokens, degree).mean(axis=1)
    return seconds, exchange
