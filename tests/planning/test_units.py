"""Units in bins: each unit once, no bin above its capacity, all costs counted, as many micro-batches on every rank.

Documents, documents with images and families are planned by the same functions, also on groups of ranks.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import time_bound

from trl_packfix.planning.costs import CostModel, Heads
from trl_packfix.planning.degrees import Step, modelled_time
from trl_packfix.planning.families import TokenOrder, make_pieces, shared_by_neighbours, sort_by_tokens
from trl_packfix.planning.packing import Bins, Packing
from trl_packfix.planning.parallel import SequenceParallel
from trl_packfix.planning.plans import schedule_epoch, schedule_kept_steps
from trl_packfix.planning.schedule import rank_costs
from trl_packfix.planning.strategies import STRATEGIES
from trl_packfix.planning.units import Units

MODEL = CostModel(per_token=1e12, per_pair=4e10, attention=(Heads(8, 6, 2, 64, 64),))  # 6 heads: uneven on 4 ranks
KINDS = ("documents", "images", "families")


def tokens_of(num: int, seed: int) -> list[np.ndarray]:
    """Documents of 5 to 60 tokens, most of which begin as others do."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 9, rng.integers(20, 40)) for _ in range(3)]
    return [
        np.concatenate([stems[i % 3] if i % 4 else stems[0][:0], rng.integers(0, 9, rng.integers(5, 20))])
        for i in range(num)
    ]


def units_of(kind: str, tokens: list[np.ndarray], room: int = 64) -> Units:
    lengths = np.array([len(each) for each in tokens])
    if kind == "documents":
        return Units(lengths, MODEL)
    if kind == "images":
        return Units(lengths, MODEL, np.random.default_rng(len(tokens)).integers(0, 3, len(tokens)) * 1e14)
    return make_pieces(sorted_by_tokens(tokens), lengths, lengths - 1, cost_model=MODEL, room=room)


def sorted_by_tokens(tokens: list[np.ndarray]) -> TokenOrder:
    def read(chosen, first, width):
        found = np.full((len(chosen), width), 2**32 - 1, dtype=">u4")
        for row, i in enumerate(chosen.tolist()):
            found[row, : len(tokens[i][first:])] = tokens[i][first : first + width]
        return found

    return sort_by_tokens(np.array([len(each) for each in tokens]), read)


def check(schedule, units: Units, num_documents: int, capacity: int, degrees: np.ndarray) -> None:
    """What holds for any schedule that leaves nothing out; `degrees` are those of the micro-steps."""
    assert sorted(schedule.order.tolist()) == list(range(len(units)))
    rows = np.add.reduceat(np.append(units.rows[schedule.order], 0), schedule.offsets[:-1])
    rows[np.diff(schedule.offsets) == 0] = 0
    assert (rows.reshape(len(degrees), -1) <= capacity * degrees[:, None]).all()
    assert len({len(list(schedule.micro_batches(rank))) for rank in range(schedule.world_size)}) == 1
    assert len(degrees) == schedule.num_steps * schedule.accumulation
    documents, offsets = units.documents(schedule.order, schedule.offsets, np.random.default_rng(0))
    assert sorted(documents.tolist()) == list(range(num_documents))
    again, offsets_again = units.of(documents, offsets)
    assert again.tolist() == schedule.order.tolist() and offsets_again.tolist() == schedule.offsets.tolist()
    assert rank_costs(schedule, units.costs()).sum() == pytest.approx(units.costs().sum())


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    strategy=st.sampled_from([name for name, traits in STRATEGIES.items() if not traits.cuts_blocks]),
    accumulation=st.integers(1, 3),
    world_size=st.sampled_from([1, 3, 4, 8, 12]),
    on_groups=st.booleans(),
    balance=st.sampled_from(["step", "none"]),
    synchronisation=st.sampled_from(["micro", "step"]),
    epoch=st.integers(0, 2),
)
def test_a_run_is_planned_from_units_and_settings_alone(
    kind, num, seed, strategy, accumulation, world_size, on_groups, balance, synchronisation, epoch
):
    units, traits, order = units_of(kind, tokens_of(num, seed)), STRATEGIES[strategy], np.arange(num)
    on_groups = on_groups and world_size % 4 == 0 and not traits.keeps_steps
    packing = Packing(
        strategy=strategy,
        max_length=64,
        accumulation=accumulation,
        world_size=world_size,
        seed=seed % 100,
        tokens_per_rank=16 if on_groups else None,
        balance=balance,
        synchronisation=synchronisation,
        cost_model=MODEL,
    )
    if traits.keeps_steps:
        if kind == "families":
            return  # those of its steps: `test_families.py`
        schedule = schedule_kept_steps(packing, units, order)
        assert schedule.num_steps == packing.num_kept_steps(num)
        steps = [sorted(schedule.step_documents(step).tolist()) for step in range(schedule.num_steps)]
        assert steps == [np.flatnonzero(packing.kept_steps(order) == step).tolist() for step in range(len(steps))]
    else:
        first = packing.plan(units, 0)
        schedule = schedule_epoch(packing, units, epoch, first=first, num_steps=packing.num_steps(first.num_packs))
        again = schedule_epoch(packing, units, epoch, first=packing.plan(units, 0), num_steps=schedule.num_steps)
        assert again.order.tolist() == schedule.order.tolist()
        assert schedule.num_steps == -(-first.num_packs // packing.num_bins)
    degrees = np.ones(schedule.num_steps * accumulation, np.int64) if schedule.degrees is None else schedule.degrees
    check(schedule, units, num, 16 if on_groups else 64, degrees)
    if not on_groups:
        return
    time = modelled_time(schedule, units, packing.parallel)
    assert time_bound(schedule, units, packing.bins, parallel=packing.parallel) <= time.seconds.sum() * (1 + 1e-9)
    for step in range(schedule.num_steps if balance == "step" else 0):
        divided = Step(schedule.step_documents(step), units, packing.bins, parallel=packing.parallel)
        one = [divided.one_degree(divided.members, degree, accumulation) for degree in packing.parallel.degrees]
        chosen = time.seconds[step * accumulation : (step + 1) * accumulation].sum()
        assert chosen <= min(each.seconds for each in one if each is not None) * (1 + 1e-9)


# What a unit costs


def test_a_unit_costs_more_on_a_group_where_its_parts_do():
    lengths, images = np.array([8, 20]), np.array([0.0, 3e12])
    alone = Units(lengths, MODEL, images)
    assert alone.costs().tolist() == (MODEL(lengths) + images).tolist()
    # 6 heads on 4 ranks: two on some. The images are divided
    uneven = CostModel(MODEL.per_token, MODEL.per_pair * 4 / 3)
    assert alone.costs(4) == pytest.approx(uneven(lengths) + images)
    assert alone.costs(2) == pytest.approx(MODEL(lengths) + images)


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 40), seed=st.integers(0, 2**32), degree=st.sampled_from([1, 2, 4]))
def test_a_family_costs_at_each_degree_what_is_computed_of_it(num, seed, degree):
    tokens = tokens_of(num, seed)
    units, model = units_of("families", tokens), MODEL.shared_by(degree)
    for piece, (first, stop) in enumerate(pairwise(units.offsets)):
        members = units.order[first:stop]
        common = [0]
        for a, b in pairwise(members):
            shorter = min(len(tokens[a]), len(tokens[b]))
            same = tokens[a][:shorter] == tokens[b][:shorter]
            common.append(shorter if same.all() else int(same.argmin()))
        lengths = np.array([len(tokens[i]) for i in members])
        shared = shared_by_neighbours(np.array(common), lengths)
        assert units.rows[piece] == (lengths - shared).sum()
        # position p attends to p + 1 tokens
        computed = [np.arange(s, n) for s, n in zip(shared.tolist(), lengths.tolist(), strict=True)]
        cost = sum((model.per_token + model.per_pair * (each + 1)).sum() for each in computed)
        assert units.costs(degree)[piece] == pytest.approx(cost)


def test_a_short_document_with_large_images_takes_as_many_ranks_as_a_long_one():
    """By its rows it would not end later than the others."""
    rows, parallel = np.full(8, 4), SequenceParallel(tokens_per_rank=64, smallest=1, degrees=(1, 2, 4))
    bins, everything = Bins(capacity=64, world_size=4), np.arange(8)
    images = np.zeros(8)
    without = Step(everything, Units(rows, MODEL, images), bins, parallel=parallel).best_degree(everything, 1)
    images[3] = 1e15
    with_images = Step(everything, Units(rows, MODEL, images), bins, parallel=parallel).best_degree(everything, 1)
    assert (without.degrees, with_images.degrees) == ([1], [4])
