"""Sequence parallelism: how many ranks share a pack, chosen for every micro-step by a model of its time. numpy only.

With `tokens_per_rank` a document may be longer than what one rank holds. Then s neighbouring ranks, a *group*, share a
pack, and each holds a *part* of it, T / s consecutive tokens. s is the *degree*. Inside attention a group exchanges
tokens for heads (an all-to-all, as in Ulysses, arXiv 2309.14509), which costs time, and so do the scans of hybrid
models. So short documents should have a degree of 1, a long one a high degree: then its group ends as early as the
others, which wait for it.

An optimizer step keeps its documents, whatever the degrees. Inside a step, the documents are sorted, longest first.
They are dealt to the micro-steps with one degree, the best by the model, or halved by tokens and micro-steps, and each
half is divided in the same way; the faster of the two is taken. So the longest documents may have a degree of their
own, and since one degree for the whole step is among the divisions, no step is slower, by the model, than with the best
single degree of the run. Only ratios of the speeds decide.

Letters: G micro-steps of a step, W ranks, s the degree, C tokens per rank, S the smallest degree that holds a document
of `max_length`.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from .arrays import Float64Array, Int64Array
from .balance import balance_packs, least_loaded
from .best_fit import best_fit_decreasing
from .costs import CostModel
from .packs import PackPlan
from .parallel import SequenceParallel, Speeds
from .schedule import Schedule, packs_of_steps
from .units import Bins, Units

BESIDE = 8  # times a document: room of a group that shares it; half as many or all ranks take up to 10 % longer


@dataclass(frozen=True)
class GroupTimes:
    """Modelled seconds of groups of ranks that share a pack.

    >>> times = GroupTimes(CostModel(per_token=1e9, per_pair=0.0), Speeds())
    >>> float(times.seconds(times.cost_model(np.array([1000])), np.array([1000]), 1)[0])  # 4e12 at 4e14/s
    0.01
    """

    cost_model: CostModel
    speeds: Speeds = field(default_factory=Speeds)

    def exchange(self, degree: int) -> tuple[float, float]:
        """Seconds of the exchanges of attention and scans: (for each token of a rank, whatever the tokens).

        A token sends its queries and gets back their outputs. Keys are sent for as many heads as there are ranks, if
        the model has fewer.
        """
        if degree == 1:
            return 0.0, 0.0
        speeds = self.speeds
        values = 0
        layers = 0
        inside = min(degree, speeds.ranks_per_node)
        # For each byte of a rank, which keeps its share of them
        sent = (inside - 1) / degree / speeds.within + (degree - inside) / degree / speeds.between
        latency = speeds.latency_within if degree <= speeds.ranks_per_node else speeds.latency_between
        for kind in self.cost_model.attention:
            layers += kind.layers
            values += kind.layers * (kind.heads + max(kind.kv_heads, degree)) * (kind.key_dim + kind.value_dim)
        for scan in self.cost_model.mixers:
            layers += scan.layers
            values += scan.layers * (scan.heads * scan.per_head + max(scan.kv_heads, degree) * scan.per_kv_head)
        passes = speeds.exchanging_passes
        return values * speeds.bytes_per_value * passes * sent, 2 * passes * layers * latency

    def seconds(self, costs: Float64Array, tokens: Int64Array | Float64Array, degree: int) -> Float64Array:
        """Seconds of groups with packs of these costs, in FLOPs of all its ranks, and rows, shape (N,)."""
        per_token, fixed = self.exchange(degree)
        return costs * (self.speeds.passes / (self.speeds.flops * degree)) + tokens * (per_token / degree) + fixed


def room_of_families(lengths: Int64Array, parallel: SequenceParallel) -> Int64Array:
    """Most rows of a piece of a family that begins with each document, shape (N,).

    That of the smallest group that holds the document `BESIDE` times, else of the largest, as far as packs are filled.
    A smaller group would compute shared rows for few documents, a larger one pays more for the exchange.

    >>> parallel = SequenceParallel(tokens_per_rank=100, smallest=4, degrees=(1, 2, 4), fill=0.95)
    >>> room_of_families(np.array([10, 20, 130, 390]), parallel).tolist()
    [95, 190, 380, 390]
    """
    rooms = parallel.tokens_per_rank * 2 ** np.arange(parallel.smallest.bit_length())
    room = rooms[np.searchsorted(rooms, np.minimum(BESIDE * lengths, rooms[-1]))]
    return np.maximum((parallel.fill * room).astype(np.int64), lengths)


@dataclass(frozen=True)
class DividedStep:
    """The units of one optimizer step in groups of ranks."""

    seconds: float  # modelled time, the sum over micro-steps of their longest group
    degrees: list[int]  # of each micro-step, shape (G,)
    packs: list[Int64Array]  # of each group, micro-step after micro-step; a micro-step of degree s has W // s

    def __add__(self, other: "DividedStep") -> "DividedStep":
        return DividedStep(self.seconds + other.seconds, self.degrees + other.degrees, self.packs + other.packs)


def schedule_groups(
    plan: PackPlan, units: Units, num_steps: int, *, bins: Bins, parallel: SequenceParallel
) -> Schedule:
    """`schedule_packs` with sequence parallelism: the slots of `num_steps` steps, and the degree of each micro-step.

    The plan is for groups of S ranks; the world size of the bins is W.

    >>> from .costs import LLAMA_7B
    >>> plan = PackPlan(np.array([0, 1, 2]), np.array([0, 1, 3]), np.array([8, 4, 3]), capacity=8)
    >>> units, bins = Units(plan.lengths, LLAMA_7B), Bins(capacity=8, world_size=2, accumulation=2)
    >>> parallel = SequenceParallel(tokens_per_rank=4, smallest=2, degrees=(1, 2))
    >>> schedule = schedule_groups(plan, units, 1, bins=bins, parallel=parallel)
    >>> [[batch.tolist() for batch in schedule.micro_batches(rank)] for rank in range(2)], schedule.degrees
    ([[[0], [1]], [[0], [2]]], array([2, 1]))
    """
    planned = replace(bins, world_size=bins.world_size // parallel.smallest)
    steps = packs_of_steps(plan, units.rows, num_steps, bins=planned)
    divided = [divide_step(packs, units, bins, parallel=parallel) for packs in steps]
    degrees = [degree for step in divided for degree in step.degrees]
    packs = [pack for step in divided for pack in step.packs]
    sizes = np.zeros((len(degrees), bins.world_size), np.int64)
    remaining = iter(map(len, packs))
    for row, degree in zip(sizes, degrees, strict=True):  # a pack is in the slot of the first rank of its group
        row[::degree] = [next(remaining) for _ in row[::degree]]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    order = np.concatenate([np.zeros(0, np.int64), *packs])
    return Schedule(order, offsets, bins.accumulation, bins.world_size, degrees=np.array(degrees))


def divide_step(packs: list[Int64Array], units: Units, bins: Bins, *, parallel: SequenceParallel) -> DividedStep:
    """The units of these packs for groups of S ranks in groups with the least modelled time that is found."""
    step = UndividedStep(np.concatenate(packs), units, bins, parallel=parallel)
    degree = parallel.smallest
    accumulation = bins.accumulation
    packs = packs + [np.zeros(0, np.int64)] * (bins.num_slots // degree - len(packs))
    if bins.balance == "none":
        return step.grouped(packs, degree)
    fastest = step.divided(step.members, accumulation)
    if fastest is None or step.first_packs(step.members, degree, accumulation) is None:
        planned = step.grouped(step.balanced(packs, degree, accumulation), degree)  # these packs always fit
        if fastest is None or planned.seconds < fastest.seconds:
            fastest = planned
    return fastest


class UndividedStep:
    """The units of one optimizer step, longest and dearest first, while they are divided among groups of ranks."""

    def __init__(self, members: Int64Array, units: Units, bins: Bins, *, parallel: SequenceParallel):
        self.members = members[np.lexsort((-units.costs()[members], -units.rows[members]))]
        self.units = units
        self.bins = bins
        self.parallel = parallel
        self.times = GroupTimes(units.cost_model, parallel.speeds)

    def divided(self, members: Int64Array, num: int) -> DividedStep | None:
        """The best of: one degree for these units in `num` micro-steps, or halves of them, divided in the same way.

        The longer half of the tokens gets the first half of the micro-steps. None if no division is found.
        """
        joined = None
        if num > 1 and len(members):
            first = num // 2
            ends = np.cumsum(self.units.rows[members])
            split = max(int(np.searchsorted(ends, ends[-1] * first / num, side="right")), 1)
            longer = self.divided(members[:split], first)
            shorter = self.divided(members[split:], num - first)
            joined = None if longer is None or shorter is None else longer + shorter
        return self.best_degree(members, num, joined)

    def best_degree(
        self, members: Int64Array, accumulation: int, best: DividedStep | None = None
    ) -> DividedStep | None:
        """The best single degree for these units in so many micro-steps, if it takes less time than `best`.

        Degrees are tried in the order of a lower bound of their time, until none can be better.
        """
        if not len(members):
            # One degree is as good as another for a micro-step without units.
            degree = self.parallel.degrees[0]
            return best or self.grouped([members] * (self.bins.world_size // degree * accumulation), degree)
        for bound, degree in sorted((self._lower_bound(members, degree), degree) for degree in self.parallel.degrees):
            if best is not None and bound >= best.seconds:
                break
            division = self.one_degree(members, degree, accumulation)
            if division is not None and (best is None or division.seconds < best.seconds):
                best = division
        return best

    def _lower_bound(self, members: Int64Array, degree: int) -> float:
        """Seconds below which no division of these units with this degree is."""
        rows = self.units.rows[members]
        costs = self.units.costs(degree)[members]
        even = self.times.seconds(costs.sum(keepdims=True), rows.sum(keepdims=True), degree)
        longest = self.times.seconds(costs, rows, degree).max()
        return float(max(even[0] * degree / self.bins.world_size, longest))

    def one_degree(self, members: Int64Array, degree: int, accumulation: int) -> DividedStep | None:
        """The units in groups of one degree, in so many micro-steps; None if no such packs are found."""
        packs = self.first_packs(members, degree, accumulation)
        return None if packs is None else self.grouped(self.balanced(packs, degree, accumulation), degree)

    def first_packs(self, members: Int64Array, degree: int, accumulation: int) -> list[Int64Array] | None:
        """The units in packs for groups of one degree, before they are balanced; None if none are found."""
        rows = self.units.rows[members]
        capacity = degree * self.parallel.tokens_per_rank
        num = self.bins.world_size // degree * accumulation
        if rows[0] > capacity:
            return None
        places = least_loaded(rows, self.units.costs(degree)[members], num, capacity=capacity)
        if not places:
            tightest, sizes = best_fit_decreasing(rows, capacity)
            places = np.split(tightest, np.cumsum(sizes)[:-1]) if len(sizes) <= num else []
        return [members[pack] for pack in places] or None

    def balanced(self, packs: list[Int64Array], degree: int, accumulation: int) -> list[Int64Array]:
        """The units of these packs dealt to the groups of so many micro-steps, see `balance.py`."""
        bins = replace(
            self.bins,
            capacity=degree * self.parallel.tokens_per_rank,
            accumulation=accumulation,
            world_size=self.bins.world_size // degree,
            degree=degree,
            synchronisation="micro",  # the ranks of a group wait for each other in every layer
        )
        return balance_packs(packs, self.units, bins)

    def grouped(self, packs: list[Int64Array], degree: int) -> DividedStep:
        """Packs of groups of one degree, micro-step after micro-step, with their modelled time."""
        of_units = self.units.costs(degree)
        costs = np.array([of_units[pack].sum() for pack in packs])
        rows = np.array([self.units.rows[pack].sum() for pack in packs])
        seconds = self.times.seconds(costs, rows, degree).reshape(-1, self.bins.world_size // degree).max(axis=1)
        return DividedStep(float(seconds.sum()), [degree] * len(seconds), packs)


def modelled_time(schedule: Schedule, units: Units, parallel: SequenceParallel) -> tuple[Float64Array, Float64Array]:
    """Modelled seconds of each micro-step, of its longest group; and in the exchanges, the mean over ranks; (S*G,)."""
    times = GroupTimes(units.cost_model, parallel.speeds)
    seconds, exchange = np.zeros((2, len(schedule.degrees)))
    tokens = schedule.slot_sums(units.rows)
    for degree in np.unique(schedule.degrees).tolist():
        rows = np.flatnonzero(schedule.degrees == degree)
        leaders = slice(None, None, degree)
        costs = schedule.slot_sums(units.costs(degree))
        some = tokens[rows][:, leaders]
        seconds[rows] = times.seconds(costs[rows][:, leaders], some, degree).max(axis=1)
        exchange[rows] = times.seconds(np.zeros_like(some, dtype=np.float64), some, degree).mean(axis=1)
    return seconds, exchange
