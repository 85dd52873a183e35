"""Epochs of families: which units are planned, the rows of their packs, and what documents keep when some are taken."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planners import make_epochs, of_units
from support.prefixes import forest

from trl_packfix.data.cache import cached_documents
from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.epochs import EpochPlanner, unpacked_order
from trl_packfix.data.reader import TokenReader
from trl_packfix.features.prefixes import families
from trl_packfix.features.prefixes.families import share_order
from trl_packfix.features.prefixes.sharing import PrefixSharing
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.strategies import STRATEGIES
from trl_packfix.planning.token_order import TokenOrder

ROOM = 64  # tokens of a pack


@settings(max_examples=40)
@given(
    strategy=st.sampled_from([name for name, traits in STRATEGIES.items() if not traits.cuts_blocks]),
    num=st.integers(1, 60),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 4),
)
def test_a_pack_has_at_most_the_rows_that_were_planned(strategy, num, seed, batch_size, accumulation):
    """In a pack, two pieces may begin alike, too."""
    table = forest(num, seed)
    reader = TokenReader(table)
    documents = cached_documents(reader, ROOM, STRATEGIES[strategy].overlong, feature=PrefixSharing("family"))
    sizes = {"max_length": ROOM, "batch_size": batch_size, "accumulation": accumulation, "seed": seed}
    planner = make_epochs(documents, strategy, share_prefixes="family", **sizes)
    planned, units = of_units(planner)
    schedule = planner.schedule(0)
    spans = zip(documents.row, documents.start, documents.stop, strict=True)
    tokens = [reader.read(*span)["input_ids"] for span in spans]
    packs = np.split(schedule.order, schedule.offsets[1:-1])
    for pack, num_rows in zip(packs, planned.slot_sums(units.rows).ravel(), strict=True):
        _, shared = share_order([tokens[i] for i in pack])
        assert documents.lengths[pack].sum() - sum(shared) <= num_rows


def find_pieces(monkeypatch, strategy, epochs, **settings):
    """Return the units of some epochs, and the arguments with which families were cut into pieces."""
    calls = []

    def make_pieces(planner, tokens, splits_copies=True):
        calls.append((tokens.order.tolist(), splits_copies))
        return f"pieces {len(calls)}"

    monkeypatch.setattr(families, "make_family_pieces", make_pieces)
    lengths = np.full(10, 10)
    tokens = TokenOrder(np.arange(10), np.full(10, 5))
    documents = Documents(np.arange(10), 0 * lengths, lengths, lengths - 1, Ledger(), token_order=tokens)
    planner = object.__new__(EpochPlanner)  # no epoch is planned
    planner.documents = documents
    planner.packing = Packing(strategy=strategy, max_length=256, batch_size=2, accumulation=2, **settings)
    return [planner.units(epoch) for epoch in epochs], calls


def test_units_are_families_where_they_are_shared(monkeypatch):
    (units,), calls = find_pieces(monkeypatch, "minibatch", (0,))
    assert units.rows.tolist() == [10] * 10
    assert calls == []
    units, calls = find_pieces(monkeypatch, "stream", (0, 1), share_prefixes="family")
    assert units == ["pieces 1", "pieces 1"]
    assert calls == [([*range(10)], True)]
    units, calls = find_pieces(monkeypatch, "minibatch", (0, 1), share_prefixes="family")
    assert units == ["pieces 1", "pieces 2"]
    assert [splits_copies for _, splits_copies in calls] == [False, False]
    for epoch, (order, _) in enumerate(calls):  # the documents of a step are neighbours
        steps = unpacked_order(10, 0, epoch).tolist()
        assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [sorted(steps[i : i + 4]) for i in (0, 4, 8)]


def test_documents_that_are_taken_keep_their_order_by_tokens():
    reader = TokenReader(forest(60))
    documents = cached_documents(reader, 96, feature=PrefixSharing("family"))
    subset = documents.select(np.random.default_rng(1).random(len(documents)) < 0.5)
    tokens = [reader.read(*span)["input_ids"] for span in zip(subset.row, subset.start, subset.stop, strict=True)]
    assert sorted(subset.token_order.order) == list(range(len(tokens)))
    for (before, document), common in zip(
        pairwise(subset.token_order.order), subset.token_order.common[1:], strict=True
    ):
        same = [a == b for a, b in zip(tokens[before], tokens[document], strict=False)]
        assert common == [*same, False].index(False)
