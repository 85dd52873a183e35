"""Ranks finish together as far as the documents of a step allow, and the bound is one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import imbalance_bound

from trl_packfix.data.rank_share import RankShare
from trl_packfix.group import ALONE, Group
from trl_packfix.planning.balance import deal_units
from trl_packfix.planning.costs import LLAMA_7B, CostModel
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.packs import PackPlan, plan_stream
from trl_packfix.planning.schedule import NO_DOCUMENTS, Schedule, imbalance, rank_costs, schedule_packs
from trl_packfix.planning.units import Bins, Units

ACCUMULATION = 4


def long_mix(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return chat-like lengths, 0.1 % of the documents at 64k to 128k tokens, 1 % at 8k to 64k; cut at the capacity."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(np.log(600), 1.0, num), 10)
    share = rng.random(num)
    lengths = np.where(share < 0.011, 2 ** rng.uniform(13, 16, num), lengths)
    lengths = np.where(share < 0.001, 2 ** rng.uniform(16, 17, num), lengths)
    return np.minimum(lengths.astype(np.int64), capacity)


def schedules(lengths, capacity, world_size, accumulation=ACCUMULATION, model=LLAMA_7B, drop_last=False):
    """Return the schedules of one plan by (balance, synchronisation)."""
    order = np.random.default_rng([0, 0]).permutation(len(lengths))
    plan = plan_stream(lengths, capacity, order=order)  # a pack that is not full is the last, in no whole step
    slots = accumulation * world_size
    steps = plan.num_packs // slots if drop_last else -(-plan.num_packs // slots)
    bins = Bins(capacity=capacity, accumulation=accumulation, world_size=world_size, drop_last=drop_last)
    return {
        kind: schedule_packs(
            plan, Units(lengths, model), steps, bins=replace(bins, balance=kind[0], synchronisation=kind[1])
        )
        for kind in (("none", "micro"), ("step", "micro"), ("step", "step"))
    }


@pytest.mark.parametrize("capacity, target", [(8192, 1.03), (32768, 1.05), (65536, 1.13)])
def test_long_tails_wait_little_at_64_ranks(capacity, target):
    """Two steps each; `python benchmarks/balance.py` has 8 and 512 ranks and more lengths."""
    slots = 64 * ACCUMULATION
    lengths = long_mix(int(2.1 * slots * capacity / long_mix(20_000, capacity).mean()), capacity)
    schedules_made = schedules(lengths, capacity, 64, drop_last=True)
    ours = {kind: imbalance(schedule, LLAMA_7B(lengths), kind[1]) for kind, schedule in schedules_made.items()}
    bound = {
        kind: imbalance_bound(schedules_made["none", "micro"], Units(lengths, LLAMA_7B), capacity, synchronisation=kind)
        for kind in ("micro", "step")
    }
    assert ours["step", "micro"] <= min(target, bound["micro"] + 0.007), "further from the bound than measured (0.005)"
    assert ours["step", "step"] <= bound["step"] + 0.008, "further from the bound than measured (0.006)"
    if capacity == 8192:
        assert ours["step", "step"] <= 1.005
    assert ours["none", "micro"] > 1 + 2 * (target - 1), "an even mix would pass anyway"
    assert ours["none", "micro"] == pytest.approx({8192: 1.11, 32768: 1.42, 65536: 1.83}[capacity], abs=0.06)


@pytest.mark.parametrize("by_rank", [False, True])
def test_full_slots_are_filled_to_the_token(by_rank):
    """Fill 32 slots with a thousand random documents and no token to spare."""
    lengths = np.random.default_rng(0).integers(20, 240, 1000)
    lengths[-1] += -lengths.sum() % 32
    capacity = int(lengths.sum()) // 32
    cost = lengths + lengths**2 / 100
    packs = deal_units(lengths, cost, capacity=capacity, world_size=8, num_slots=32, by_rank=by_rank)
    assert [lengths[pack].sum() for pack in packs] == [capacity] * 32
    ranks = np.array([cost[pack].sum() for pack in packs]).reshape(4, 8)
    assert ranks.sum(axis=0).max() < 1.005 * ranks.sum(axis=0).mean(), "more than measured (0.003)"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 64), min_size=1, max_size=200),
        st.lists(st.sampled_from([1, 2, 3, 5, 8, 50, 64]), min_size=1, max_size=200),
    ),
    world_size=st.integers(1, 8),
    accumulation=st.integers(1, 4),
    per_pair=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_steps_keep_their_documents_and_wait_no_longer_than_as_they_come(lengths, world_size, accumulation, per_pair):
    lengths = np.array(lengths)
    model = CostModel(1.0, per_pair)
    schedules_made = schedules(lengths, 64, world_size, accumulation, model)
    as_they_come = schedules_made["none", "micro"]
    for (balance, synchronisation), schedule in schedules_made.items():
        assert schedule.num_steps == as_they_come.num_steps
        for step in range(schedule.num_steps):
            assert sorted(schedule.step_documents(step)) == sorted(as_they_come.step_documents(step))
        ours = imbalance(schedule, model(lengths), synchronisation)
        bound = imbalance_bound(schedule, Units(lengths, model), 64, synchronisation=synchronisation)
        assert 1 - 1e-9 <= bound <= ours + 1e-9
        if balance == "step":
            assert ours <= imbalance(as_they_come, model(lengths), synchronisation) + 1e-9


def test_minibatches_are_balanced_within_their_steps():
    lengths = np.random.default_rng(0).choice([100, 900], 512, p=[0.8, 0.2])
    model = CostModel(1.0, 0.01)
    sizes = {"max_length": 900, "batch_size": 8, "accumulation": 4, "world_size": 4}
    packings = {balance: Packing(strategy="minibatch", balance=balance, **sizes) for balance in ("step", "none")}
    units = Units(lengths, model)
    order = np.arange(512)
    schedules_made = {balance: packing.schedule_unpacked_steps(units, order) for balance, packing in packings.items()}
    ratio = {balance: imbalance(schedule, model(lengths), "micro") for balance, schedule in schedules_made.items()}
    assert ratio["none"] > 1.05
    assert ratio["step"] < 1 + (ratio["none"] - 1) / 2


def test_imbalance_by_hand():
    # two steps of two micro-batches on two ranks, one token costs 1: (4, 2), (1, 3) and (2, 2), (0, 2)
    costs = np.array([4.0, 2, 1, 3, 2, 2, 2])
    schedule = Schedule(np.arange(7), np.array([0, 1, 2, 3, 4, 5, 6, 6, 7]), 2, 2)
    assert rank_costs(schedule, costs).tolist() == [[[4, 2], [1, 3]], [[2, 2], [0, 2]]]
    assert imbalance(schedule, costs, "micro") == (4 + 3 + 2 + 2) / 8
    assert imbalance(schedule, costs, "step") == (5 + 4) / 8
    assert imbalance(Schedule(np.arange(2), np.array([0, 1, 2]), accumulation=2, world_size=1), costs, "micro") == 1


def test_slots_of_packs_that_ranks_share_by_hand():
    """Two ranks share the first pack of each step, and have one document each, or none, in its second micro-batch."""
    offsets = np.array([0, 2, 2, 3, 4, 6, 6, 7, 7])
    degrees = np.array([2, 1, 2, 1])
    schedule = Schedule(np.arange(7), offsets, accumulation=2, world_size=2, degrees=degrees)
    first, second = ([batch.tolist() for batch in schedule.micro_batches(rank)] for rank in range(2))
    assert first == [[0, 1], [2], [4, 5], [6]]
    assert second == [[0, 1], [3], [4, 5], [NO_DOCUMENTS]]
    assert NO_DOCUMENTS < 0, "documents are numbered from 0"
    for rank, batches in enumerate([first, second]):
        shares = [*RankShare.of_schedule(schedule, rank)]
        assert shares == batches
        assert [share.group for share in shares] == [Group(2, rank), ALONE, Group(2, rank), ALONE]
    assert schedule.num_steps == 2
    assert [schedule.step_documents(step).tolist() for step in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]
    costs = np.array([4.0, 2, 1, 3, 2, 2, 2])
    assert rank_costs(schedule, costs).tolist() == [[[3, 3], [1, 3]], [[2, 2], [2, 0]]]
    assert imbalance(schedule, costs, "micro") == (3 + 3 + 2 + 2) / ((6 + 4 + 4 + 2) / 2)


@pytest.mark.parametrize(
    "num_packs, steps",
    [
        (2, [[0, 1], [2, 3]]),  # as many packs as steps: one for each, halved
        (3, [[0, 1, 2, 3], [4, 5]]),  # more packs than the slots of the first step: as they come
        (3, [[0, 1], [2, 3], [4, 5]]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_steps_of_fewer_packs_than_slots_by_hand(num_packs, steps):
    lengths = np.array([3, 2] * num_packs)
    plan = PackPlan(np.arange(2 * num_packs), np.arange(0, 2 * num_packs + 1, 2), lengths, capacity=5)
    bins = Bins(capacity=5, world_size=2, balance="none")
    schedule = schedule_packs(plan, Units(lengths, CostModel(1.0, 0.0)), len(steps), bins=bins)
    assert [sorted(schedule.step_documents(step).tolist()) for step in range(schedule.num_steps)] == steps
    assert np.diff(schedule.offsets).min() >= 1, "a slot without a document"
