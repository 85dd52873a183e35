"""Steps are dealt to slots as by a plain search over a few units, at each limit. Numbers are set by hand."""

from itertools import combinations

import numpy as np
import pytest

from trl_packfix.planning import balance
from trl_packfix.planning.balance import _Slots, balance_packs, deal_units, even_targets, least_loaded
from trl_packfix.planning.costs import CostModel
from trl_packfix.planning.degrees import divide_step
from trl_packfix.planning.parallel import SequenceParallel
from trl_packfix.planning.units import Bins, Units

LINEAR = CostModel(1.0, 0.0)


def as_lists(packs):
    return [pack.tolist() for pack in packs]


# Whether a step is dealt anew


def balance_step(monkeypatch, rows, packs, dealt, world_size=2, accumulation=1, synchronisation="micro"):
    """Return the packs of a step and whether its units were dealt anew.

    `dealt` is what dealing them returns; if it is None, packs that take more time.
    """
    calls = []
    units = Units(np.array(rows), LINEAR)
    everywhere = [np.arange(len(rows))] * (world_size * accumulation)  # in every slot, which takes more time
    dealt = everywhere if dealt is None else dealt
    monkeypatch.setattr(balance, "deal_units", lambda *args, **more: calls.append(more) or dealt)
    bins = Bins(capacity=10_000, accumulation=accumulation, world_size=world_size, synchronisation=synchronisation)
    return as_lists(balance_packs([np.array(pack) for pack in packs], units, bins)), len(calls)


@pytest.mark.parametrize("more, is_dealt", [(2, 0), (3, 1)])
def test_a_step_is_dealt_anew_if_ranks_wait_for_more_than_two_thousandths(monkeypatch, more, is_dealt):
    """Costs are 1,000 + `more` of the first pack and 1,000 - `more` of the second, so their mean is 1,000."""
    rows = [250, 250, 250, 250 + more, 250, 250, 250, 250 - more]
    packs = [[0, 1, 2, 3], [4, 5, 6, 7]]
    dealt = [np.array([0, 1, 2, 4]), np.array([3, 5, 6, 7])]
    balanced, num_calls = balance_step(monkeypatch, rows, packs, dealt)
    assert num_calls == is_dealt
    assert balanced == (as_lists(dealt) if is_dealt else packs)


@pytest.mark.parametrize("num, is_dealt", [(7, 0), (8, 1)])
def test_a_step_of_fewer_than_four_units_per_slot_is_not_dealt_anew(monkeypatch, num, is_dealt):
    packs = [[0], [*range(1, num)]]
    assert balance_step(monkeypatch, [100] * num, packs, None)[1] == is_dealt


# Two slots of 8 units and two empty ones would take less time than 7 + 3, which are the costs of the slots
@pytest.mark.parametrize(
    "rows, sizes, dealt_sizes",
    [([1] * 7 + [3], [7, 1], [1, 7]), ([1] * 16, [7, 3, 3, 3], [8, 8, 0, 0])],
    ids=["no better than before", "slots without a unit"],
)
def test_a_step_stays_as_it_is_where_dealing_does_not_help(monkeypatch, rows, sizes, dealt_sizes):
    packs, dealt = (np.split(np.arange(len(rows)), np.cumsum(numbers)[:-1]) for numbers in (sizes, dealt_sizes))
    balanced = balance_step(monkeypatch, rows, as_lists(packs), dealt, accumulation=len(sizes) // 2)
    assert balanced == (as_lists(packs), 1)


def costs_of_two_ranks(packs, rows):
    return [sum(rows[i] for pack in packs[rank::2] for i in pack) for rank in range(2)]


def test_ranks_that_wait_after_two_micro_steps_have_even_sums(monkeypatch):
    """Ranks get costs of 9 + 1 and 8 + 2. In the order of their costs they would get 9 + 2 and 8 + 1."""
    rows = [9, 8, 2, 1]
    balanced, _ = balance_step(monkeypatch, rows, [[0], [1], [2], [3]], None, accumulation=2, synchronisation="step")
    assert costs_of_two_ranks(balanced, rows) == [10, 10]


def test_packs_of_neighbouring_costs_share_a_micro_step(monkeypatch):
    rows = [9, 1, 8, 2, 7]
    packs = [[0], [1], [2], [3], [4]]
    assert balance_step(monkeypatch, rows, packs, None, accumulation=3)[0] == [[0], [2], [4], [3], [1], []]
    # Ranks that wait at the end of a step have 9 + 2 + 1 and 8 + 7
    balanced, _ = balance_step(monkeypatch, rows, packs, None, accumulation=3, synchronisation="step")
    assert sorted(costs_of_two_ranks(balanced, rows)) == [12, 15]
    assert balance_step(monkeypatch, rows, packs, None, world_size=1, accumulation=6)[0] == [*packs, []]


# Even packs


@pytest.mark.parametrize(
    "rows, num, capacity, packs",
    [
        ([3, 3, 2, 2, 2], 2, 6, [[0, 2, 4], [1, 3]]),  # as many rows as fit, but not in this order
        ([3, 3, 2, 2, 2], 2, 7, [[0, 2, 4], [1, 3]]),
        ([3, 3, 2, 2], 2, 5, [[0, 2], [1, 3]]),  # no row to spare
        ([3, 3, 2, 2, 1], 2, 5, [[0, 2, 4], [1, 3]]),  # more rows than fit
        ([3], 2, 3, [[0], []]),
        ([], 2, 3, [[], []]),
    ],
)
def test_units_go_to_the_pack_with_the_least_cost_that_has_room(rows, num, capacity, packs):
    rows = np.array(rows, dtype=np.int64)
    assert as_lists(least_loaded(rows, rows, num, capacity=capacity)) == packs


def test_packs_stay_as_they_are_if_none_are_more_even():
    units = Units(np.array([6, 6]), LINEAR, targets=np.array([5, 5]))
    packs = [np.array([0]), np.array([1])]
    assert as_lists(even_targets(packs, units, 3, bins=Bins(capacity=10))) == [[0], [1], []]
    assert as_lists(even_targets(packs, units, 1, bins=Bins(capacity=10))) == [[0], [1]]


def test_packs_are_as_even_as_units_of_unequal_targets_allow():
    targets = np.array([9, 1, 1, 1, 8, 2])
    units = Units(np.array([9, 9, 9, 9, 8, 8]), LINEAR, targets=targets)
    packs = even_targets([np.array([0, 4]), np.array([1, 2, 3, 5])], units, 2, bins=Bins(capacity=30))
    assert sorted(int(targets[pack].sum()) for pack in packs) == [11, 11]


# Slots


def slots_of(documents, capacity, lengths):
    """Return slots that already have some documents."""
    slots = _Slots(np.array(lengths), np.array(lengths), capacity=capacity, num_slots=len(documents), spare=0)
    for slot, indices in enumerate(documents):
        for document in indices:
            slots.put_unit(document, slot)
    return slots


def deal_plainly(slots, documents, groups, limit):
    """Deal each document to the group with the least excess that has room, without a heap."""
    documents_left = []
    for document in documents:
        wanted = min(slots.rows[document] + slots.spare, slots.capacity)
        keys = []
        for group in groups:
            room = max(slots.room[slot] for slot in group)
            load = sum(slots.costs[d] for slot in group for d in slots.units[slot])
            keys.append((room < wanted, (load,) if room >= wanted else (-room, load), group))
        has_no_room, key, group = min(keys)
        if key[-1] + slots.costs[document] > limit or (has_no_room and limit < np.inf):
            documents_left.append(document)
        else:
            slots.put_unit(document, max(group, key=slots.room.__getitem__))
    return documents_left


@pytest.mark.parametrize("limit", [np.inf, 30, 12])
@pytest.mark.parametrize("spare", [0, 2])
def test_documents_go_to_the_group_with_the_least_excess_that_has_room(limit, spare):
    rng = np.random.default_rng(0)
    for case in range(40):
        lengths = np.sort(rng.integers(1, 11, rng.integers(1, 14)))[::-1].copy()
        if case % 2:  # about longest first
            rng.shuffle(lengths[len(lengths) // 2 :])
        excess = rng.integers(0, 12, len(lengths))
        groups = [[0, 3], [1, 4], [2, 5]] if case % 3 else [[0], [1], [2], [3]]
        num_slots = sum(map(len, groups))
        fast, plain = (_Slots(lengths, excess, capacity=10, num_slots=num_slots, spare=spare) for _ in range(2))
        order = [*range(len(lengths))]
        assert fast.deal_to_groups(order, groups, limit) == deal_plainly(plain, order, groups, limit)
        assert fast.units == plain.units
        assert fast.room == plain.room


@pytest.mark.parametrize(
    "rooms, documents_left, filled",
    [
        ([9, 8], [0, 1, 2, 3], [9, 8]),  # 9 tokens are more than two documents of at most 4; 8 are no sum of two
        ([7, 1], [2], [0, 0]),
        ([3, 4], [2, 3], [0, 0]),
        ([0, -1], [0, 1, 2, 3], [0, -1]),
    ],
)
def test_slots_with_little_room_are_filled_to_the_token(rooms, documents_left, filled):
    slots = slots_of([[], []], 12, [4, 3, 2, 1])
    slots.room = [*rooms]
    assert slots.fill_slots_exactly([0, 1, 2, 3]) == documents_left
    assert slots.room == filled
    assert sorted(document for documents in slots.units for document in documents) == [
        document for document in range(4) if document not in documents_left
    ]


def test_without_short_documents_no_slot_is_filled():
    assert slots_of([[], []], 12, [4]).fill_slots_exactly([]) == []


def divide_plainly(slots, slot, partner):
    """Return the tokens that `slot` gets: the fewest with which neither has too many; else the slot loses one or more.

    None if no sum of lengths does this.
    """
    lengths = [slots.rows[d] for i in (slot, partner) for d in slots.units[i]]
    held = sum(slots.rows[d] for d in slots.units[slot])
    sums = {sum(combination) for n in range(len(lengths) + 1) for combination in combinations(lengths, n)}
    low = max(held - slots.room[partner], 0)
    high = held + slots.room[slot]
    if held - slots.room[partner] > high:
        high = held - 1
    return min((n for n in sums if low <= n <= high), default=None)


def test_two_slots_divide_their_documents_as_a_plain_search_does():
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        lengths = rng.integers(1, 12, 7)
        slots = slots_of(
            [[0, 1, 2, 3], [4, 5, 6][: rng.integers(0, 4)]], int(lengths[:4].sum() - rng.integers(1, 6)), lengths
        )
        if slots.room[1] <= 0:
            continue
        expected = divide_plainly(slots, 0, 1)
        before = [slots.capacity, *slots.room, *map(sorted, slots.units)]
        assert slots.divide_pair(0, 1) is (expected is not None)
        if expected is None:
            assert [slots.capacity, *slots.room, *map(sorted, slots.units)] == before
        else:
            tokens = [int(lengths[documents].sum()) for documents in slots.units]
            assert tokens == [expected, lengths[sorted(sum(before[3:], []))].sum() - expected]
            assert slots.room == [slots.capacity - held for held in tokens]
            assert slots.room[1] >= 0
            for documents in slots.units:
                assert (np.diff(lengths[documents]) <= 0).all()
        outcomes.add((expected is not None, expected is not None and slots.room[0] < 0))
    assert outcomes == {(True, False), (True, True), (False, False)}


@pytest.mark.parametrize("num_useless, succeeds", [(0, True), (15, True), (16, False)])
def test_sixteen_partners_are_tried_for_a_slot_above_its_capacity(num_useless, succeeds):
    """The slot has 5 + 5 tokens, above 9. A partner with 8 tokens in one document cannot help, one with 4 + 4 can."""
    lengths = [5, 5, 4, 4] + [8] * num_useless
    documents = [[0, 1], *([4 + i] for i in range(num_useless)), [2, 3]]
    slots = slots_of(documents, 9, lengths)
    slots.relieve_slots()
    assert (min(slots.room) >= 0) is succeeds


def test_a_slot_without_a_partner_stays_above_its_capacity():
    slots = slots_of([[0, 1], [2]], 9, [5, 5, 9])
    slots.relieve_slots()
    assert slots.room == [-1, 0]


def test_a_partner_that_did_not_help_one_slot_may_help_another():
    """Slots of one document of 8 tokens cannot take 5 of 5 + 5, which 4 + 4 can, but can take 1 of 5 + 4 + 1."""
    slots = slots_of([[0, 1], [2, 3, 4], [5], [6, 7]], 9, [5, 5, 5, 4, 1, 8, 4, 4])
    slots.relieve_slots()
    assert slots.room == [0, 0, 0, 0]


def test_a_division_takes_at_least_a_token_from_the_slot():
    """Without a division of 6 + 6 and 8 that leaves 9 to 11 in a slot, one that leaves 12 would change nothing."""
    slots = slots_of([[0, 1], [2]], 9, [6, 6, 8])
    assert not slots.divide_pair(0, 1)
    assert slots.units == [[0, 1], [2]]


def test_a_slot_may_lose_all_documents_that_are_divided():
    """Four tokens are too many, which the four shortest documents have."""
    slots = slots_of([[*range(7)], []], 12, [10, 1, 1, 1, 1, 1, 1])
    assert slots.divide_pair(0, 1)
    assert slots.room == [0, 8]


def test_documents_that_fit_nowhere_are_above_the_capacity():
    lengths = np.array([5, 5, 5])
    packs = deal_units(lengths, lengths * 1.0, capacity=8, world_size=2, num_slots=2, by_rank=False)
    assert sorted(map(len, packs)) == [1, 2]


# What may share a pack


class FewUnits(Bins):
    """Bins of at most four units, which is a rule that no planner knows."""

    def fits(self, packs, units):
        return super().fits(packs, units) and all(len(pack) <= 4 for pack in packs)


# Units that are more even as five and three, in cost and in trained tokens, than they are in these two packs
RULED_ROWS = np.array([8, 7, 6, 5, 5, 2, 1, 1])
RULED = Units(RULED_ROWS, CostModel(1.0, 1.0), targets=RULED_ROWS)
RULED_PACKS = [np.array([1, 0, 7, 4]), np.array([5, 6, 3, 2])]
PARALLEL = SequenceParallel(tokens_per_rank=21, degrees=(1,))


@pytest.mark.parametrize("kind, most_packs", [(Bins, 5), (FewUnits, 4)])
@pytest.mark.parametrize(
    "deal",
    [
        lambda bins: balance_packs(RULED_PACKS, RULED, bins),
        lambda bins: even_targets(RULED_PACKS, RULED, 2, bins=bins),
        lambda bins: divide_step(RULED_PACKS, RULED, bins, parallel=PARALLEL).packs,
    ],
    ids=["balance", "targets", "groups"],
)
def test_units_that_are_dealt_anew_obey_the_rule_of_bins(deal, kind, most_packs):
    packs = deal(kind(capacity=21, world_size=2))
    assert max(map(len, packs)) == most_packs
