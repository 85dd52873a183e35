"""`planning`: every document once, no pack over capacity, exact best-fit decreasing, order kept, few packs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launch import run_python
from support.packing_settings import CHANGES

from trl_packfix.planning.exact_fill import StreamPacker
from trl_packfix.planning.packing import Packing, compare_settings
from trl_packfix.planning.packs import LOOK_AHEAD, PackPlan, plan_bfd, plan_stream
from trl_packfix.planning.strategies import STRATEGIES, plan_packs

PLANNED = [name for name, traits in STRATEGIES.items() if traits.alternative is None]  # from lengths alone


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [plan.order[a:b].tolist() for a, b in itertools.pairwise(plan.offsets)]


def check(plan: PackPlan, lengths, capacity: int) -> None:
    """Check that every document is there once, no pack empty or over capacity, and the arrays as the contract says."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert plan.order.dtype == plan.offsets.dtype == np.int64
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(lengths) == len(plan.order)
    assert plan.num_packs == len(plan.offsets) - 1
    assert plan.capacity == capacity
    assert (np.bincount(plan.order, minlength=len(lengths)) == 1).all()
    assert (np.diff(plan.offsets) > 0).all()
    if plan.num_packs:
        tokens = np.add.reduceat(lengths[plan.order], plan.offsets[:-1])
        assert tokens.max() <= capacity
        assert plan.efficiency == pytest.approx(tokens.sum() / (plan.num_packs * capacity))
    assert len(lengths) or (plan.num_packs, plan.lower_bound, plan.efficiency) == (0, 0, 1.0)
    assert -(-int(lengths.sum()) // capacity) <= plan.lower_bound <= plan.num_packs


def lognormal(capacity: int, median: float, sigma: float, num: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, num)
    return np.clip(drawn.astype(np.int64), 1, capacity)


@st.composite
def documents(draw, max_size=150, max_capacity=60, most_of_capacity=1.0):
    capacity = draw(st.integers(8, max_capacity))
    longest = int(capacity * most_of_capacity)
    return draw(st.lists(st.integers(1, longest), max_size=max_size)), capacity


def best_fit_decreasing_by_item(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put one document at a time into the fullest pack with room; of equals, into the one that became so first."""
    packs = []
    space = []
    since = []
    for moment, length in enumerate(sorted(lengths, reverse=True)):
        open_packs = [i for i in range(len(packs)) if space[i] >= length]
        if open_packs:
            i = min(open_packs, key=lambda i: (space[i], since[i]))
        else:
            i = len(packs)
            packs.append([])
            space.append(capacity)
            since.append(moment)
        packs[i].append(length)
        space[i] -= length
        since[i] = moment
    return packs


def by_length(plan: PackPlan, lengths) -> list[tuple[int, ...]]:
    return sorted(tuple(lengths[i] for i in pack) for pack in packs_of(plan))


@settings(deadline=None, max_examples=300)
@given(documents())
def test_bfd_equals_item_by_item(case):
    lengths, capacity = case
    reference = sorted(tuple(pack) for pack in best_fit_decreasing_by_item(lengths, capacity))
    plan = plan_bfd(lengths, capacity)
    check(plan, lengths, capacity)
    assert by_length(plan, lengths) == reference
    assert [min(pack) for pack in packs_of(plan)] == sorted(min(pack) for pack in packs_of(plan))
    shuffled = plan_bfd(lengths, capacity, rng=np.random.default_rng(0))
    check(shuffled, lengths, capacity)
    assert by_length(shuffled, lengths) == reference


@pytest.mark.parametrize("capacity, median, sigma", [(2048, 200, 1.0), (2048, 700, 0.5), (70_000, 9_000, 0.8)])
def test_bfd_equals_item_by_item_on_thousands(capacity, median, sigma):
    lengths = lognormal(capacity, median, sigma, 2000)
    reference = sorted(tuple(pack) for pack in best_fit_decreasing_by_item(lengths.tolist(), capacity))
    assert by_length(plan_bfd(lengths, capacity), lengths.tolist()) == reference
    assert max(map(len, reference)) > 2
    assert capacity < 2**16 or lengths.max() >= 2**15


def test_bfd_rng_exchanges_equal_lengths_and_shuffles_packs():
    for lengths, exchanged in (([5] * 40 + [3] * 40, True), (range(30, 60), False)):
        first, second = (packs_of(plan_bfd(lengths, 60, rng=np.random.default_rng(seed))) for seed in (0, 1))
        assert first != second
        assert ({frozenset(pack) for pack in first} != {frozenset(pack) for pack in second}) == exchanged


@pytest.mark.parametrize(
    "lengths, capacity, packs",
    [
        ([8, 3, 3, 10, 11, 3, 2], 20, 2),  # only arrival order finds this many,
        ([5, 8, 9, 3, 9, 5], 20, 2),  # only exact fills from the longest down,
        ([3, 3, 4, 4, 2, 2, 5, 4, 2, 2, 4, 2, 4, 4], 15, 3),  # only best-fit decreasing
    ],
)
def test_stream_packs_the_last_buffer_by_the_best_of_three(lengths, capacity, packs):
    order = np.arange(len(lengths))
    plan = plan_stream(lengths, capacity, order=order)
    check(plan, lengths, capacity)
    assert plan.num_packs == packs
    check_oldest_first(plan, order, len(lengths), every_pack=True)


def check_oldest_first(plan: PackPlan, order, buffer_size: int, every_pack: bool) -> None:
    waiting = list(order)
    for pack in packs_of(plan):
        assert waiting[0] in pack or not every_pack
        for document in pack:
            assert document in waiting[:buffer_size]
            waiting.remove(document)


@settings(deadline=None, max_examples=200)
@given(documents(max_capacity=200, most_of_capacity=0.25), st.integers(1, 30))
def test_stream_places_the_oldest_next_and_only_buffered_documents(case, buffer_size):
    lengths, capacity = case  # at least four documents per pack: the window of `buffer_size` is never widened
    order = np.random.default_rng(0).permutation(len(lengths))
    check_oldest_first(
        plan_stream(lengths, capacity, order=order, buffer_size=buffer_size), order, buffer_size, every_pack=True
    )


@settings(deadline=None, max_examples=200)
@given(documents(max_size=400), st.integers(1, 8))
def test_stream_window_is_bounded_for_large_documents(case, buffer_size):
    lengths, capacity = case
    order = np.random.default_rng(0).permutation(len(lengths))
    plan = plan_stream(lengths, capacity, order=order, buffer_size=buffer_size)
    check(plan, lengths, capacity)
    check_oldest_first(plan, order, LOOK_AHEAD * buffer_size, every_pack=False)


def test_stream_widens_the_window_where_documents_are_large():
    lengths = np.random.default_rng(0).integers(400, 1640, 20_000)
    order = np.random.default_rng(1).permutation(len(lengths))
    plan = plan_stream(lengths, 2048, order=order, buffer_size=100)
    check(plan, lengths, 2048)
    places = np.argsort(order)  # of each document in `order`
    moved = np.abs(places[plan.order] - np.arange(len(order)))
    assert moved.max() > 5 * 100  # or this test would not see the wide window
    assert moved.max() < 2 * LOOK_AHEAD * 100
    assert plan.num_packs <= 1.005 * plan_bfd(lengths, 2048).num_packs


@pytest.mark.parametrize(
    "capacity, lengths, at_least",
    [
        (2048, lognormal(2048, 51, 1.0, 60_000), 0.9999),
        (2048, lognormal(2048, 205, 1.0, 60_000), 0.9999),
        (8192, lognormal(8192, 819, 1.0, 60_000), 0.9999),
        (8192, lognormal(8192, 2731, 0.8, 60_000), 0.9985),  # fewer than four to a pack
        # Like grade-school maths, 11 to a pack, of which best-fit decreasing loses half a percent
        (2048, np.random.default_rng(0).normal(185, 60, 20_000).astype(np.int64).clip(60, 500), 0.999),
    ],
)
def test_stream_needs_hardly_more_packs_than_the_bound(capacity, lengths, at_least):
    plan = plan_packs(lengths, capacity)
    check(plan, lengths, capacity)
    assert plan.lower_bound / plan.num_packs >= at_least


@pytest.mark.parametrize(
    "lengths",
    [
        np.random.default_rng(0).integers(10, 2001, 20_000),
        np.random.default_rng(0).integers(500, 1501, 20_000),
        lognormal(2048, 1024, 0.6, 20_000),
        lognormal(2048, 512, 0.8, 20_000),
    ],
    ids=["10 to 2,000", "500 to 1,500", "lognormal, 1.8 to a pack", "lognormal, 3 to a pack"],
)
def test_arrivals_fill_packs_of_few_documents_as_the_whole_set_does(lengths):
    packs = list(StreamPacker(lengths.tolist(), 2048, 1000, longest=2048))
    plan = plan_bfd(lengths, 2048)
    assert len(packs) <= 1.004 * plan.num_packs
    assert lengths.sum() > 0.985 * 2048 * len(packs)
    for num in (1, 2000, len(packs) - 400):  # a restart knows the documents that wait, in their order
        rest_of_documents = np.setdiff1d(np.arange(len(lengths)), np.concatenate(packs[:num]))
        resumed = StreamPacker(lengths[rest_of_documents].tolist(), 2048, 1000, longest=2048)
        assert [rest_of_documents[pack].tolist() for pack in resumed] == packs[num:]


def bound_by_definition(lengths: list[int], capacity: int) -> int:
    """Compute L2 of Martello and Toth, threshold by threshold."""
    best = 0
    for k in range(capacity // 2 + 1):
        documents_alone = [w for w in lengths if w > capacity - k]
        long = [w for w in lengths if capacity / 2 < w <= capacity - k]
        short = [w for w in lengths if k <= w <= capacity / 2]
        overflow = sum(short) - (len(long) * capacity - sum(long))
        best = max(best, len(documents_alone) + len(long) + max(0, -(-overflow // capacity)))
    return best


@settings(deadline=None, max_examples=200)
@given(documents())
def test_lower_bound_is_l2(case):
    lengths, capacity = case
    assert plan_bfd(lengths, capacity).lower_bound == bound_by_definition(lengths, capacity)


def test_the_settings_that_a_restart_compares():
    """Restarts compare a field that is not saved with its default."""
    packing = Packing(max_length=8)
    compared = {change.compared_as: change.default for change in CHANGES.values() if change.compared_as}
    on_streams = {change.compared_as for change in CHANGES.values() if change.on_streams}
    assert packing.settings("table") == compared
    assert packing.settings("stream") == {name: compared[name] for name in compared.keys() & on_streams}
    assert compare_settings({}, Packing(max_length=8).settings("table")) == {"max_length": (None, 8)}


@pytest.mark.parametrize("drop_last, last", [(True, -1), (False, 2)])
def test_kept_steps_are_those_of_the_unpacked_run(drop_last, last):
    packing = Packing(max_length=8, strategy="minibatch", batch_size=2, accumulation=2, drop_last=drop_last)
    order = np.array([5, 4, 3, 2, 1, 0, 8, 7, 6])
    assert packing.unpacked_step_of_documents(order).tolist() == [1, 1, 0, 0, 0, 0, last, 1, 1]


@pytest.mark.parametrize("strategy", PLANNED)
def test_epochs_and_seeds_differ_and_are_reproducible(strategy):
    lengths = lognormal(512, 60, 0.8, 500)
    plans = [plan_packs(lengths, 512, strategy, *pair) for pair in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]]
    assert len({tuple(plan.order) for plan in plans}) == 4
    assert packs_of(plans[0]) == packs_of(plans[-1])
    one, other_packs = ({frozenset(pack) for pack in packs_of(plan)} for plan in plans[:2])
    assert len(one & other_packs) < len(one) / 2  # other packs, not the same ones in another order


@pytest.mark.parametrize("strategy", PLANNED)
def test_integer_type_does_not_matter(strategy):
    lengths = lognormal(255, 40, 0.8, 400)
    expected = plan_packs(lengths.tolist(), 255, strategy, 3)
    for dtype in (np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint64, ">i4"):
        plan = plan_packs(lengths.astype(dtype), np.int32(255), strategy, 3)
        assert plan.order.tolist() == expected.order.tolist()
        assert plan.offsets.tolist() == expected.offsets.tolist()
        check(plan, lengths, 255)


@pytest.mark.parametrize("strategy", PLANNED)
def test_full_and_tiny_documents(strategy):
    check(plan_packs([8] * 5, 8, strategy), [8] * 5, 8)
    assert plan_packs([8] * 5, 8, strategy).num_packs == 5
    assert plan_packs([1] * 17, 8, strategy).num_packs == 3
    assert plan_packs([3], 10**12, strategy).num_packs == 1  # no array of `capacity` entries


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"strategy": "bfd_split"}, "'bfd_split'.*from lengths alone.*split the documents.*strategy='bfd'"),
        ({"strategy": "ffd"}, "'ffd'.*No such packing strategy.*'stream', 'bfd'.*'bfd_split', 'wrapped', 'minibatch'"),
        ({"capacity": 0}, r"capacity=0.*at least one.*per_device_train_batch_size \* max_length"),
        ({"capacity": 8.0}, "capacity=8.0.*whole number of tokens.*Set it to"),
        ({"capacity": None}, "capacity=None.*whole number of tokens.*Set it to"),
        ({"lengths": [3, 0, 2, -1]}, r"document 1 has 0.*document 3 has -1.*\(2 of 4 documents\).*Drop empty"),
        ({"lengths": [3, 9, 2]}, r"document 1 has 9 tokens \(1 of 3 documents\).*capacity=8.*Truncate, split or"),
        ({"lengths": [9] * 20}, r"document 9 has 9 tokens, ... \(20 of 20 documents\)"),
        ({"lengths": np.array([2**63], dtype=np.uint64)}, "document 0 has 9223372036854775808 tokens"),
        ({"lengths": [1.0, 2.5]}, "float64.*one whole number of tokens per document.*array of integers"),
        ({"lengths": [True, False]}, "bool.*one whole number of tokens per document.*array of integers"),
        ({"lengths": [[1, 2], [3, 4]]}, r"shape \(2, 2\).*one-dimensional"),
        ({"lengths": [[5, 6, 7], [8]]}, r"nested sequences.*len\(ids\) for ids in dataset\['input_ids'\]"),
        ({"lengths": 5}, r"shape \(\).*one-dimensional"),
        # refused before an array of that many numbers is made
        ({"lengths": [2**32], "capacity": 2**32}, "has 4294967296 tokens.*up to 67108864 tokens.*or less"),
        ({"seed": -1}, "seed=-1.*non-negative.*Set seed to 0"),
        ({"epoch": 0.5}, "epoch=0.5.*non-negative.*Set epoch to 0"),
    ],
)
def test_messages(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_packs(**({"lengths": [1, 2, 3], "capacity": 8} | arguments))


@pytest.mark.processes
def test_planning_needs_numpy_only():
    """Look in a fresh interpreter: this one has torch already."""
    code = (
        "import sys, trl_packfix.planning.packing; from trl_packfix import plan_packs; plan_packs([3, 4, 5], 8, 'bfd');"
        "print([m for m in ('torch', 'datasets', 'trl', 'transformers', 'pyarrow', 'numba') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"
