"""`share_prefixes="family"`: documents that begin alike are planned as one, once each, at the cost of what is new."""

import json
import re
from dataclasses import replace
from itertools import pairwise, takewhile

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from support.features import sharing
from support.planners import make_epochs, of_units
from support.prefixes import forest
from support.runs import build_trainer, logged

from trl_packfix.cli import main
from trl_packfix.data import epochs
from trl_packfix.data.cache import cached_documents
from trl_packfix.data.documents import make_documents
from trl_packfix.data.reader import TokenReader
from trl_packfix.features.prefixes import families, savings
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.features.prefixes.families import (
    KEYS_PER_CAPACITY,
    TARGETS_PER_CAPACITY,
    make_pieces,
    share_order,
    shared_by_neighbours,
    sort_by_tokens,
)
from trl_packfix.features.prefixes.tokens import token_order
from trl_packfix.layout import LAYOUT_KEY
from trl_packfix.planning import arrays
from trl_packfix.planning.costs import CostModel, HeadCounts
from trl_packfix.planning.degrees import modelled_time
from trl_packfix.planning.schedule import imbalance
from trl_packfix.reporting.build import make_report
from trl_packfix.reporting.pictures import ranges_of_seen_rows
from trl_packfix.training.table_source import continue_planner, settings_of, step_hash

pytestmark = pytest.mark.slow

COSTS = CostModel(per_token=3.0, per_pair=1.0, windows=((8, 0.5),), chunks=((16, 0.25),))


def sorted_by_tokens(documents, block=1):
    def read(documents_read, first, width):
        keys = np.full((len(documents_read), width), arrays.END_TOKEN_KEY, dtype=">u4")
        for row, i in enumerate(documents_read.tolist()):
            tokens = documents[i][first : first + width]
            keys[row, : len(tokens)] = tokens
        return keys

    return sort_by_tokens(lengths_of(documents), read, block)


def sort_key(tokens):
    return [*tokens, arrays.END_TOKEN_KEY]


def naive_order(documents, members=None):
    """Return the order of documents, or of some of them, and the common tokens of neighbours, as `sorted` has them."""
    order = sorted(range(len(documents)) if members is None else members, key=lambda i: sort_key(documents[i]))
    pairs = (zip(documents[a], documents[b], strict=False) for a, b in pairwise(order))
    common = [sum(takewhile(bool, (one == other_token for one, other_token in pair))) for pair in pairs]
    return order, [0, *common][: len(order)]


def lengths_of(documents):
    return np.array([len(document) for document in documents])


def pieces_of(documents, room, cost_model=COSTS, **trained):
    lengths = lengths_of(documents)
    return make_pieces(
        sorted_by_tokens(documents), lengths, **{"trained": lengths - 1} | trained, cost_model=cost_model, room=room
    )


def members_of(pieces):
    """Return the numbers of the documents of each piece."""
    return np.split(pieces.order, pieces.offsets[1:-1])


@st.composite
def token_lists(draw):
    """Draw documents that begin alike often: on few tokens, behind common beginnings, some twice, some cut short."""
    seed = draw(st.integers(0, 2**32))
    letters = draw(st.integers(1, 3))
    beginnings = draw(st.integers(0, 3))
    rng = np.random.default_rng(seed)
    starts = [rng.integers(0, letters, rng.integers(0, 60)) for _ in range(beginnings + 1)]
    documents = []
    for _ in range(draw(st.integers(1, 30))):
        own_tokens = rng.integers(0, letters, rng.integers(1, 40))
        documents.append(np.concatenate([starts[rng.integers(len(starts))], own_tokens]))
        if rng.random() < 0.3:
            documents.append(documents[-1][: rng.integers(1, len(documents[-1]) + 1)])
    return documents


@settings(max_examples=100)
@given(documents=token_lists(), block=st.sampled_from([1, 10**6]), seed=st.integers(0, 2**32))
def test_the_order_by_tokens_is_that_of_a_naive_sort(documents, block, seed):
    """Sort all documents rightly, and each group of them without reading a token."""
    by_tokens = sorted_by_tokens(documents, block)
    order, common = naive_order(documents)
    assert (by_tokens.order.tolist(), by_tokens.common.tolist()) == (order, common)
    shared = shared_by_neighbours(by_tokens.common, lengths_of(documents)[order])
    assert share_order(documents) == (order, shared.tolist())
    groups = np.random.default_rng(seed).integers(-1, 3, len(documents))
    by_group = by_tokens.within(groups)
    expected = [naive_order(documents, np.flatnonzero(groups == group).tolist()) for group in range(3)]
    assert by_group.order.tolist() == sum((order for order, _ in expected), [])
    assert by_group.common.tolist() == sum((common for _, common in expected), [])


def test_no_token_is_read_beyond_the_first_difference_and_its_block():
    same = np.arange(1000)
    documents = [np.append(same, 1), np.append(same, 2), *(np.full(1000, 5 + i) for i in range(50))]
    read = []

    def counted(documents_read, first, width):
        read.append(len(documents_read) * width)
        return np.stack(
            [np.pad(documents[i], (0, 2000), constant_values=9)[first : first + width] for i in documents_read]
        )

    sort_by_tokens(lengths_of(documents), counted, num_key_tokens=1)
    assert 2 * 1001 <= sum(read) <= 2 * (1001 + 16) + 50 * 16


@settings(max_examples=100)
@given(documents=token_lists(), spare=st.integers(0, 60))
def test_pieces_have_every_document_once_within_the_capacity_at_the_cost_of_their_rows(documents, spare):
    lengths = lengths_of(documents)
    capacity = int(lengths.max()) + spare
    model = replace(COSTS, attention=(HeadCounts(1, 6, 2, 64, 64),))  # 6 heads: two on some of 4 ranks
    pieces = pieces_of(documents, capacity, model)
    assert sorted(pieces.order.tolist()) == list(range(len(documents)))
    firsts = np.minimum.reduceat(pieces.order, pieces.offsets[:-1])
    assert (np.diff(firsts) > 0).all()
    for i, members in enumerate(members_of(pieces)):
        assert len(set(pieces.family[members].tolist())) == 1
        order, shared = share_order([documents[j] for j in members])
        assert order == [*range(len(members))], "not sorted by tokens"
        own_lengths = [(int(lengths[members[j]]), s) for j, s in zip(order, shared, strict=True)]
        assert pieces.rows[i] == sum(n - s for n, s in own_lengths) <= capacity
        for degree in (1, 4):  # position p costs what the first p + 1 tokens cost beyond the first p
            steps = np.diff(model.shared_by(degree)(np.arange(lengths.max() + 1)))
            assert pieces.costs(degree)[i] == pytest.approx(sum(steps[s:n].sum() for n, s in own_lengths), rel=1e-12)
        assert len(members) == 1 or sum(n for n, s in own_lengths if n - s > 1) <= KEYS_PER_CAPACITY * capacity
        assert len(members) == 1 or lengths[members].sum() - len(members) <= TARGETS_PER_CAPACITY * capacity
        for (before, _), (n, s) in pairwise(own_lengths):
            assert 2 * s >= max(before, n)


def test_a_family_is_cut_where_it_has_too_many_rows_keys_or_targets(monkeypatch):
    documents = [np.append(np.arange(100), [i, 0, 0]) for i in range(1000, 1060)]  # 103 rows, then 4 each
    one_each = np.ones(60, np.int64)
    monkeypatch.setattr(families, "KEYS_PER_CAPACITY", 100)
    pieces = pieces_of(documents, 150, trained=one_each)
    assert (pieces.num_families, pieces.rows.tolist()) == (1, [103 + 11 * 4] * 5)
    monkeypatch.setattr(families, "KEYS_PER_CAPACITY", 4)
    pieces = pieces_of(documents, 250, trained=one_each)  # at most 1000 keys
    assert (pieces.num_families, np.diff(pieces.offsets).tolist()) == (1, [9] * 6 + [6])
    # A chat of which each sample begins the next: what remains of the shorter ones looks up nothing
    samples = [np.arange(n) for n in range(100, 200)]
    assert len(pieces_of(samples, 300, trained=np.ones(100, np.int64))) == 1
    pieces = pieces_of(samples, 300)
    bound = TARGETS_PER_CAPACITY * 300
    assert bound / 2 < sorted(pieces.targets)[1] < pieces.targets.max() <= bound
    assert pieces.targets.sum() == lengths_of(samples).sum() - 100 > 3 * bound
    assert pieces.num_families == 1
    assert not pieces.distance.any()


@settings(max_examples=60)
@given(documents=token_lists(), seed=st.integers(0, 2**32), capacity=st.integers(100, 300))
def test_copies_are_in_pieces_of_their_own_and_visited_far_apart(documents, seed, capacity):
    rng = np.random.default_rng(seed)
    documents += [documents[i] for i in rng.integers(0, len(documents), rng.integers(0, 40))]
    pieces = pieces_of(documents, capacity)
    tokens = [[tuple(documents[i]) for i in members] for members in members_of(pieces)]
    assert sorted(pieces.order.tolist()) == list(range(len(documents)))
    assert all(len(row) == len(set(row)) for row in tokens)
    start_order = rng.permutation(len(pieces))
    order = pieces.visiting_order(start_order)
    assert sorted(order.tolist()) == sorted(start_order.tolist())
    if len(set(map(tuple, documents))) == len(documents):
        assert order.tolist() == start_order.tolist()
    # pieces that begin with copies have the same original, behind which they are spread over the epoch
    visits = [(row[0], *visit) for row, *visit in zip(tokens, pieces.original, pieces.distance, strict=True)]
    assert len(set(visits)) == len(visits)
    assert len({visit[:2] for visit in visits}) == len({visit[0] for visit in visits})


def test_copies_of_a_row_are_not_one_update():
    """They share a step no more often than in unpacked training."""
    once = chats(100)
    _, documents = sorted_documents(once * 4)

    def planner(share_prefixes, documents=documents):
        return make_epochs(documents, "stream", 4, 256, share_prefixes=share_prefixes)

    def together(plan):
        num_repeated = 0
        for epoch in range(2):
            schedule = plan.schedule(epoch)
            for step in range(schedule.num_steps):
                rows = schedule.step_documents(step) % len(once)
                num_repeated += len(rows) - len(np.unique(rows))
        return num_repeated / 2 / len(documents)

    family = planner("family")
    single = planner("family", sorted_documents(once)[1])
    assert 3 * single.num_steps <= family.num_steps <= 4 * single.num_steps
    assert single.num_steps > 10
    assert together(family) <= together(planner("off")) < 0.05
    # In the steps of the unpacked run copies may meet: that run has them in one step, too
    same = sorted_documents([np.arange(50)] * 64)[1]
    assert len(make_epochs(same, "minibatch", 4, 256, 8, share_prefixes="family").units()) == 2


def chats(num=60, seed=0, beginning=20, longest=250):
    """Return samples of chats, one per turn, shuffled, as tokens."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 100, beginning)
    rows = []
    for _ in range(num):
        chat = np.concatenate([prompt, rng.integers(0, 100, 300)])
        for turn in range(rng.integers(1, 8)):
            own_tokens = rng.integers(0, 100, rng.integers(1, 20))
            rows.append(np.concatenate([chat[: 40 + 30 * turn], own_tokens])[:longest])
    return [rows[i] for i in rng.permutation(len(rows))]


def sorted_documents(tokens, max_length=256, **columns):
    reader = TokenReader(Dataset.from_dict({"input_ids": [row.tolist() for row in tokens], **columns}))
    documents = make_documents(reader, max_length)
    return reader, replace(documents, token_order=token_order(reader, documents), fingerprint="of a test")


TOKENS = chats()
READER, DOCUMENTS = sorted_documents(TOKENS)


def rows_of(tokens, pack):
    _, shared = share_order([tokens[i] for i in pack])
    return sum(len(tokens[i]) for i in pack) - sum(shared)


def test_families_leave_groups_less_to_compute_and_shorter_steps():
    """Documents of up to four ranks: with families the modelled time of an epoch falls with the rows."""
    reader, documents = sorted_documents(chats(num=120, longest=250))
    seconds = {}
    rows = {}
    for share_prefixes in ("off", "family"):
        settings = {"world_size": 4, "tokens_per_rank": 64, "cost_model": COSTS}
        plan = make_epochs(documents, "stream", 1, 256, 2, share_prefixes=share_prefixes, **settings)
        schedule, units = of_units(plan)
        modelled, exchange = modelled_time(schedule, units, plan.packing.parallel)
        savings = make_report(plan, reader).shared
        assert savings.exchange_share == pytest.approx(exchange.sum() / modelled.sum())
        assert savings.largest_part <= 64
        seconds[share_prefixes] = modelled.sum()
        rows[share_prefixes] = units.rows.sum()
    assert rows["family"] < 0.7 * rows["off"]
    assert seconds["family"] < 0.7 * seconds["off"]


@pytest.mark.parametrize("strategy", ["stream", "bfd", "minibatch"])
def test_the_plan_of_pack_is_that_of_off_to_the_byte(strategy):
    plans = [
        make_epochs(DOCUMENTS, strategy, 2, 256, 2, 2, share_prefixes=setting) for setting in ("off", "pack", "family")
    ]
    off, pack, family = ((plan.order.tobytes(), plan.offsets.tobytes()) for plan in (p.schedule(1) for p in plans))
    assert off == pack != family
    assert step_hash(plans[0], 1) == step_hash(plans[1], 1)


def test_balance_knows_the_cost_of_pieces():
    rng = np.random.default_rng(0)
    tokens = []
    waiting = {}
    for i in range(150):  # many short answers to a long question, whose rows cost more than those of other documents
        question = rng.integers(0, 1000, 200)
        tokens += [np.concatenate([question, rng.integers(0, 1000, 3)]) for _ in range(1 + 2 * i % 40)]
        tokens.append(rng.integers(0, 1000, rng.integers(20, 250)))
    for balance in ("step", "none"):
        how = {"balance": balance, "cost_model": CostModel(per_token=1.0, per_pair=1.0), "share_prefixes": "family"}
        schedule, pieces = of_units(make_epochs(sorted_documents(tokens)[1], "stream", 16, 256, 4, 4, **how))
        waiting[balance] = imbalance(schedule, pieces.costs(), "micro") - 1
    assert waiting["step"] < 0.002 * waiting["none"], "more than measured (0.0005); balanced by rows it is 0.009"


def test_documents_with_labels_that_are_not_tokens_share_nothing():
    tokens = [np.arange(50), np.arange(50), np.arange(60), np.arange(40)]
    labels = [row.tolist() for row in tokens]
    labels[0][7] = 8
    labels[2][:20] = [-100] * 20
    reader, documents = sorted_documents(tokens, labels=labels)
    spans = documents.row, documents.start, documents.stop
    assert reader.labels_are_tokens(*spans).tolist() == [False, True, True, True]
    assert documents.token_order.order.tolist() == [2, 1, 3, 0]
    assert documents.token_order.common.tolist() == [0, 50, 40, 0]
    # labels in another place of their buffer than tokens
    values = pa.array(np.concatenate([np.full(3, -100), *labels]))
    ends = np.cumsum([3, *(len(row_labels) for row_labels in labels)]).astype(np.int32)
    columns = {"input_ids": [row.tolist() for row in tokens], "labels": pa.ListArray.from_arrays(ends, values)}
    apart = TokenReader(Dataset(pa.table(columns)))
    assert apart.labels_are_tokens(*spans).tolist() == [False, True, True, True]
    # spans within rows, in another order
    table = Dataset.from_dict({"input_ids": [row.tolist() for row in tokens], "labels": labels})
    rows_reversed = TokenReader(Dataset(table.data.table.slice(0, 2)).flatten_indices().select([1, 0]))
    rows = np.array([1, 1, 0])
    starts = np.array([0, 8, 0])
    assert rows_reversed.labels_are_tokens(rows, starts, np.array([50, 50, 50])).tolist() == [False, True, True]


def test_labels_of_a_row_that_the_dataset_leaves_out_are_not_read():
    """It has fewer labels than tokens, so the labels of the rows behind it begin elsewhere than their tokens."""
    table = Dataset.from_dict(
        {"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8], [9]], "labels": [[1, 2, 3], [4], [6, 0, 8], [9]]}
    )
    reader = TokenReader(table.select([0, 2, 3]))
    rows = np.arange(3)
    assert reader.labels_are_tokens(rows, np.zeros(3, dtype=np.int64), reader.lengths).tolist() == [True, False, True]


def test_blocks_of_tokens_are_those_of_the_rows():
    tokens = [np.arange(5), np.arange(10, 13), np.arange(20, 27)]
    reader = TokenReader(Dataset.from_dict({"input_ids": [row.tolist() for row in tokens]}).select([2, 0, 1]))
    end = arrays.END_TOKEN_KEY
    values = reader.read_first_tokens(np.array([0, 2, 1, 1]), np.array([2, 1, 5, 0]), np.array([7, 3, 5, 4]), width=4)
    assert values.tolist() == [[22, 23, 24, 25], [11, 12, end, end], [end] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize("parts", [{}, {"batch_size": 1, "tokens_per_rank": 128}], ids=["ranks", "groups"])
def test_a_second_start_reads_no_token_and_plans_the_same(tmp_path, monkeypatch, parts):
    monkeypatch.setattr(epochs, "MIN_CACHED_DOCUMENTS", 1)
    Dataset.from_dict({"input_ids": [row.tolist() for row in TOKENS]}).save_to_disk(tmp_path)

    def start(share_prefixes="family"):
        reader = TokenReader(load_from_disk(tmp_path))
        documents = cached_documents(reader, 256, feature=sharing(share_prefixes))
        size = {"batch_size": 2, "max_length": 256, "accumulation": 2, "world_size": 2} | parts
        plan = make_epochs(documents, "stream", **size, share_prefixes=share_prefixes)
        return plan, plan.schedule(0), make_report(plan, reader).prefixes

    _, off, _ = start("off")
    first, schedule, saved = start()
    assert first.documents.fingerprint == start("off")[0].documents.fingerprint
    for name in ("read_first_tokens", "labels_are_tokens"):
        monkeypatch.delattr(TokenReader, name)
    again, same, savings_again = start()
    assert np.array_equal(same.order, schedule.order)
    assert savings_again == saved
    assert np.array_equal(same.degrees, schedule.degrees)
    assert (same.degrees == 1).all() == (not parts)
    assert again.cache_file("plan", 0).exists()
    assert again.cache_file("schedule", 0).exists()
    assert np.array_equal(start("off")[1].order, off.order)
    with pytest.raises(AttributeError):
        cached_documents(TokenReader(load_from_disk(tmp_path)), 200, feature=sharing("family"))  # not cached yet


def report(share_prefixes, reader=READER, documents=DOCUMENTS, **changes):
    settings = {"batch_size": 2, "accumulation": 2, "world_size": 2} | changes
    plan = make_epochs(documents, "stream", max_length=256, share_prefixes=share_prefixes, **settings)
    packing_report = make_report(plan, reader)
    if share_prefixes != "family":  # as `trl-packfix plan` does
        packing_report = replace(packing_report, prefixes=savings.estimated_savings(plan, reader))
    return packing_report, plan


def line(packing_report):
    return dict(packing_report.lines()).get("common prefixes")


def share_in_packs(plan):
    """Return the share of the tokens that is computed if each pack shares what it can."""
    packs = np.split(plan.schedule(0).order, plan.schedule(0).offsets[1:-1])
    assert len(packs) > 1
    return sum(rows_of(TOKENS, pack) for pack in packs) / DOCUMENTS.lengths.sum()


def test_the_report_says_what_is_computed_and_how_many_families_a_step_has():
    packing_report, plan = report("family")
    schedule, pieces = of_units(plan)
    steps = map(plan.schedule(0).step_documents, range(plan.num_steps))
    per_step = np.mean([len(set(pieces.family[documents].tolist())) for documents in steps])
    assert packing_report.prefixes.rows == pytest.approx(share_in_packs(plan))
    assert packing_report.prefixes.rows < 0.55
    assert packing_report.prefixes.families_per_step == pytest.approx(per_step)
    assert line(packing_report) == (
        f"{packing_report.prefixes.rows:.2f} of the tokens are computed, {len(TOKENS):,} documents in "
        f"{pieces.num_families} families; an optimizer step has about {per_step:,.1f} of them"
    )
    assert "families per step (unpacked: 8 documents)" in dict(packing_report.lines())["against unpacked"]
    assert packing_report.imbalance == pytest.approx(imbalance(schedule, pieces.costs(), "micro"))


def test_a_step_with_few_families_is_told_what_to_raise():
    one_chat = sorted_documents([np.append(np.arange(100), i) for i in range(64)])
    text = line(report("family", *one_chat, batch_size=4)[0])
    assert "has about 1.0 of them, and unpacked 16 documents: for as many independent ones, raise" in text
    assert "per_device_train_batch_size 16.0 times" in text
    settings = {"batch_size": 1, "world_size": 4, "tokens_per_rank": 128}  # which need micro-batches of one document
    text = line(report("family", *one_chat, **settings)[0])
    assert "raise gradient_accumulation_steps 8.0 times" in text


@pytest.mark.parametrize("name", ["off", "pack"])
def test_the_report_says_what_another_setting_would_save(name):
    packing_report, plan = report(name, batch_size=4)
    share = share_in_packs(plan)
    pieces = report("family", batch_size=4)[1].units()
    planned = pieces.rows.sum() / DOCUMENTS.lengths.sum()
    assert (packing_report.prefixes.in_packs, packing_report.prefixes.in_families) == pytest.approx((share, planned))
    families = f'"family" {planned:.2f} ({len(TOKENS):,} documents in {pieces.num_families} families)'
    assert line(packing_report) == (
        f'not shared; share_prefixes would compute: "pack" {share:.2f} of the tokens, {families}'
        if name == "off"
        else f"{share:.2f} of the tokens are computed; with share_prefixes={families}"
    )
    assert packing_report.prefixes.rows == (1.0 if name == "off" else packing_report.prefixes.in_packs)


def test_what_cannot_be_shared_has_no_line_and_a_large_table_is_estimated(monkeypatch):
    nothing = [np.random.default_rng(i).integers(0, 10_000, 60) for i in range(40)]
    assert line(report("off", *sorted_documents(nothing))[0]) is None
    rows_computed = report("off")[0].prefixes.in_families
    for name, number in (("NUM_PACKS", 4), ("NUM_STRETCHES", 2), ("STRETCH_LENGTH", 50)):
        monkeypatch.setattr(savings, name, number)
    together = sorted_documents(sorted(TOKENS, key=sort_key))
    packing_report = report("off", *together, batch_size=1, accumulation=1, world_size=1)[0]
    assert "(estimated from 4 packs)" in line(packing_report)
    assert "(100 documents in " in line(packing_report)
    assert "neighbours in the table, as an estimate)" in line(packing_report)
    assert packing_report.prefixes.in_families == pytest.approx(rows_computed, abs=0.1)


def test_a_restart_with_families_is_refused_and_one_with_other_packs_is_said(caplog):
    off, pack, family = (report(name)[1] for name in ("off", "pack", "family"))
    state = {"settings": settings_of(off, READER), "engine": "none", "epoch": 0, "global_step": 2}
    state["step_hash"] = step_hash(off, 0)
    del state["settings"]["share_prefixes"]  # as in a checkpoint of an earlier version
    with pytest.raises(ValueError, match="`share_prefixes` was 'off' and is 'family'.*Set them back"):
        continue_planner("checkpoint-2", state, settings_of(family, READER), planner=family)
    continue_planner("checkpoint-2", state, settings_of(pack, READER), planner=pack)
    assert "`share_prefixes` was 'off' and is 'pack'" in caplog.text


@pytest.mark.parametrize("name", ["off", "pack"])
def test_training_compares_no_tokens_before_the_first_step(name, tmp_path, monkeypatch):
    """Training measures what `plan` estimates by sorting documents."""
    read: list[int] = []
    monkeypatch.setattr(TokenReader, "read_first_tokens", lambda self, *args, **kwargs: read.append(1))
    settings = {"max_length": 96, "per_device_train_batch_size": 4, "max_steps": 2}
    trainer = build_trainer(tmp_path, forest(), share_prefixes=name, **settings)
    trainer.train()
    shares = logged(trainer, "computed_share")
    assert not read
    assert "packing/computed_share" not in str(trainer.state.log_history)
    if name == "off":
        assert line(trainer.packing_report) is None
        assert not shares
    else:
        text = "computed once in each pack; the log's computed_share is the share of the tokens that is computed"
        assert line(trainer.packing_report) == text
        assert max(shares) < 0.85
    with pytest.raises(TypeError):  # the guard: an estimate reads them
        savings.estimated_savings(trainer.data.source.planner, trainer.data.source.reader)
    assert read


def test_plan_forecasts_what_sharing_computes(tmp_path, capsys):
    forest().select_columns(["input_ids", "labels"]).save_to_disk(tmp_path)
    words = f"plan {tmp_path} --max-length 96 --batch-size 4 --world-size 2 --strategy stream".split()
    plans = {}
    for name in ("off", "pack", "family"):
        assert main([*words, "--share_prefixes", name, "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        (plans[name],) = output["plans"]
        assert "Common prefixes: " in output["reasons"][-1]
    shares = {name: plan["prefixes"]["rows"] for name, plan in plans.items()}
    assert shares["off"] == 1 > shares["pack"] > shares["family"] + 0.05
    assert plans["pack"]["num_packs"] == plans["off"]["num_packs"] > plans["family"]["num_packs"]
    for name in ("pack", "family"):
        assert plans[name]["flops"] == pytest.approx(plans["off"]["flops"] * plans[name]["prefixes"]["flops"])
        assert plans[name]["prefixes"]["flops"] == pytest.approx(shares[name], abs=0.01)
    assert main([*words, "--share-prefixes", "family"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if " stream " in line)
    steps = plans["family"]["prefixes"]["families_per_step"]
    assert row.split()[-3:-1] == [f"{shares['family']:.2f}", f"{steps:,.1f}"]


@pytest.mark.parametrize("ranks", ["--batch-size 2", "--tokens-per-rank 64 --world-size 4"])
@pytest.mark.parametrize("name", ["pack", "family"])
def test_show_draws_shared_beginnings_once(name, ranks, capsys, tmp_path):
    stem = list(range(5, 80))
    alike = [stem] * 12  # where two meet, the last row of one is not computed
    documents = [*alike, *([*stem[:60], *range(100 + i, 115 + i)] for i in range(12))]
    Dataset.from_dict({"input_ids": documents}).save_to_disk(tmp_path)
    words = f"show {tmp_path} --max-length 256 --strategy bfd --share-prefixes {name} {ranks}".split()
    assert main([*words, "--packs", "99", "--json"]) == 0
    packs = json.loads(capsys.readouterr().out)
    reader = TokenReader(load_from_disk(tmp_path))
    num_without_rows = 0
    assert any(pack.get("cu_seq_lens_k", pack["cu_seq_lens"]) != pack["cu_seq_lens"] for pack in packs)
    for pack in packs:
        spans = [(document["row"], document["start"], document["stop"]) for document in pack["documents"]]
        batch = PrefixCollator()([reader.read(*span) for span in spans])
        if LAYOUT_KEY not in batch:
            continue
        assert pack["cu_seq_lens"] == batch["cu_seq_lens_q"].tolist()
        assert pack["cu_seq_lens_k"] == batch["cu_seq_lens_k"].tolist()
        layout = batch[LAYOUT_KEY]
        own_rows = layout.lengths - torch.tensor([document["shared_tokens"] for document in pack["documents"]])
        rows = layout.lengths - layout.shared
        assert ((own_rows == rows) | (own_rows == 1)).all()  # a last row of its own is not computed
        num_without_rows += int((rows == 0).sum())
        assert ("ranks" in pack) == ("tokens-per-rank" in ranks)
        for rank in pack.get("ranks", []):
            first, stop = rank["tokens"]
            own_runs = batch["seq_idx"][0, first:stop].unique().numpy()
            assert stop - first <= 64
            assert rank["documents"] == np.flatnonzero(rows)[own_runs].tolist()
    assert num_without_rows, "every document has a row, so runs and documents have the same numbers"
    assert main([*words, "--packs", "1", "--tokens", "1000"]) == 0
    shared = [document["shared_tokens"] for document in packs[0]["documents"]]
    number, count = next((i, count) for i, count in enumerate(shared) if count)
    text = f"the first {count} tokens shared with [{number - 1}]\n    [... {count} shared ...] "
    assert text in capsys.readouterr().out


def test_the_picture_of_a_pack_covers_the_rows_that_each_document_sees():
    packing_report, _ = report("family")
    for pack_shown in packing_report.sample.packs:
        assert pack_shown.cu_seq_lens[-1] == sum(document.num_rows for document in pack_shown.documents)
    pack = packing_report.sample.packs[0]
    assert pack.cu_seq_lens[-1] < 0.8 * sum(document.num_tokens for document in pack.documents)
    for document, path in zip(pack.documents, ranges_of_seen_rows(pack), strict=True):
        rows = np.concatenate([np.arange(first, end) for first, end in path])
        assert len(rows) == document.shared + document.num_rows
        assert (np.diff(rows) > 0).all()
    strips, mask, *_ = packing_report.plot().axes
    areas = {3: 0.0, 4: 0.0}
    for patch in mask.patches:
        corners = patch.get_xy()[:-1]
        areas[len(corners)] += np.prod(np.ptp(corners, axis=0)) / (2 if len(corners) == 3 else 1)
    named = int(re.search(r"(\d+)% of", mask.get_title(loc="left")).group(1))
    assert areas[4] > 0
    assert named == pytest.approx(200 * sum(areas.values()) / mask.get_xlim()[1] ** 2, abs=2)
    assert "drawn once" in strips.get_xlabel()
