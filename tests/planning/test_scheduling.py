"""Every document in exactly one slot, equal counts on all ranks, a number of steps that is known and exact."""

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planners import make_epochs

from trl_packfix.data.epochs import unpacked_order
from trl_packfix.data.loaders import PackedBatchSampler
from trl_packfix.data.reader import TokenReader
from trl_packfix.data.spans import make_documents
from trl_packfix.planning.costs import LLAMA_7B, CostModel
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.plans import schedule_kept_steps
from trl_packfix.planning.schedule import EMPTY
from trl_packfix.planning.strategies import STRATEGIES
from trl_packfix.planning.units import Units

ATTENTION_DOMINATES = CostModel(per_token=1, per_pair=1 / 6)


def planner(lengths, strategy, max_length=12, **kwargs):
    data = Dataset.from_dict({"input_ids": [list(range(n)) for n in lengths]})
    traits = STRATEGIES[strategy]
    documents = make_documents(TokenReader(data), max_length, traits.overlong, wrapped=traits.cuts_blocks)
    return make_epochs(documents, strategy, max_length=max_length, **kwargs)


documents_of_a_dataset = st.lists(st.integers(2, 40), min_size=1, max_size=200)


@settings(max_examples=250, deadline=None)
@given(
    lengths=documents_of_a_dataset,
    strategy=st.sampled_from([*STRATEGIES]),
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 8),
    world_size=st.integers(1, 8),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    balance=st.sampled_from(["step", "none"]),
    synchronisation=st.sampled_from(["micro", "step"]),
)
def test_every_document_once_per_epoch_over_all_ranks(
    lengths, strategy, batch_size, accumulation, world_size, epoch, shuffle, balance, synchronisation
):
    settings_of_run = {
        "batch_size": batch_size,
        "accumulation": accumulation,
        "world_size": world_size,
        "shuffle": shuffle,
        "balance": balance,
        "synchronisation": synchronisation,
        "cost_model": ATTENTION_DOMINATES,
    }
    # each rank makes its own planner and never talks to another
    ranks = [planner(lengths, strategy, **settings_of_run) for _ in range(world_size)]
    documents = ranks[0].documents
    seen, steps = [], set()
    for rank, plan in enumerate(ranks):
        sampler = PackedBatchSampler(plan, rank)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) == plan.num_steps * accumulation, "another number of micro-batches"
        steps.add(plan.num_steps)
        for batch in batches:
            assert batch, "an empty batch cannot be collated"
            assert EMPTY not in batch or batch == [EMPTY]
            real = [i for i in batch if i != EMPTY]
            assert documents.lengths[real].sum() <= plan.packing.capacity
            seen += real
    assert sorted(seen) == list(range(len(documents)))
    assert len(steps) == 1
    last = ranks[0].schedule(epoch)
    assert all(len(last.step_documents(step)) for step in range(last.num_steps)), "a step without a document"


@settings(max_examples=100, deadline=None)
@given(
    lengths=documents_of_a_dataset,
    strategy=st.sampled_from([*STRATEGIES]),
    accumulation=st.integers(1, 4),
    world_size=st.integers(1, 4),
)
def test_drop_last_drops_one_incomplete_step_and_counts_it(lengths, strategy, accumulation, world_size):
    kwargs = {"batch_size": 2, "accumulation": accumulation, "world_size": world_size}
    whole = planner(lengths, strategy, **kwargs)
    try:
        cut = planner(lengths, strategy, drop_last=True, **kwargs)
    except ValueError as error:
        assert "nothing would be trained" in str(error) and whole.num_steps == 1
        return
    assert whole.num_steps - 1 <= cut.num_steps <= whole.num_steps
    for epoch in range(2):
        schedule = cut.schedule(epoch)
        assert schedule.num_steps == cut.num_steps
        assert len(set(schedule.order.tolist())) == len(schedule.order)
        assert len(schedule.order) + schedule.num_skipped == len(cut.documents)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=120),
    batch_size=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    world_size=st.integers(1, 4),
)
def test_minibatch_steps_hold_the_documents_of_the_unpacked_run(lengths, batch_size, accumulation, world_size):
    run = planner(lengths, "minibatch", batch_size=batch_size, accumulation=accumulation, world_size=world_size)
    per_step = batch_size * accumulation * world_size
    for epoch in range(2):
        schedule, order = run.schedule(epoch), unpacked_order(len(lengths), 0, epoch)
        assert schedule.num_steps == -(-len(lengths) // per_step)
        for step in range(schedule.num_steps):
            expected = order[step * per_step : (step + 1) * per_step]
            assert sorted(schedule.step_documents(step)) == sorted(expected)


def test_minibatch_fills_few_micro_batches_evenly_over_ranks():
    lengths = np.full(32, 10)
    packing = Packing(strategy="minibatch", max_length=100, batch_size=4, accumulation=4, world_size=2)
    schedule = schedule_kept_steps(packing, Units(lengths, LLAMA_7B), np.arange(32))
    sizes = np.diff(schedule.offsets).reshape(1, 4, 2)[0]
    # 320 tokens fit into one pack: one micro-step carries nearly all of them, the rest one document for each rank
    assert sizes.tolist() == [[13, 13], [1, 1], [1, 1], [1, 1]]


def test_unpacked_order_is_that_of_the_stock_trainer(tmp_path, tokenizer, tiny_model):
    """The promise of `minibatch` stands on accelerate's seedable sampler; this fails when it changes."""
    import trl

    rows = Dataset.from_dict({"text": [chr(97 + i) * 4 for i in range(13)]})
    args = trl.SFTConfig(str(tmp_path), per_device_train_batch_size=1, use_cpu=True, bf16=False, report_to=[], seed=7)
    loader = trl.SFTTrainer(tiny_model("llama"), args, train_dataset=rows, processing_class=tokenizer)
    loader = loader.get_train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        first = [chr(tokenizer.decode(batch["input_ids"][0, :1]).encode()[0]) for batch in loader]
        assert first == [chr(97 + i) for i in unpacked_order(13, 7, epoch)]


def test_epochs_differ_and_are_reproducible():
    lengths = np.random.default_rng(0).integers(2, 12, 100).tolist()
    for strategy in STRATEGIES:
        run, again = planner(lengths, strategy, batch_size=2), planner(lengths, strategy, batch_size=2)
        orders = [run.schedule(epoch).order.tolist() for epoch in range(3)]
        assert orders[0] != orders[1] != orders[2], strategy
        assert [again.schedule(epoch).order.tolist() for epoch in (2, 0, 1)] == [orders[2], orders[0], orders[1]]


def test_sequential_keeps_the_order_given():
    lengths = np.random.default_rng(0).integers(2, 12, 20_000).tolist()
    # `stream` looks at most two buffers of 1,000 documents ahead; within a step documents may change places
    for strategy, tolerance in (("stream", 2000), ("wrapped", 0), ("minibatch", 8)):
        run = planner(lengths, strategy, batch_size=2, accumulation=4, shuffle=False)
        order = run.schedule(0).order
        moved = np.abs(order - np.arange(len(order)))
        assert np.percentile(moved, 99) <= tolerance, strategy
        assert (run.schedule(1).order == order).all()
        shuffled = planner(lengths, strategy, batch_size=2, accumulation=4).schedule(0).order
        moved = np.abs(shuffled - np.arange(len(order)))
        assert np.percentile(moved, 99) > 10_000, "the bound would hold for any order"


def test_balance_pairs_packs_of_similar_cost():
    lengths = np.random.default_rng(0).choice([12, 3], 400).tolist()
    ratio = {}
    for balance in ("step", "none"):
        sizes = {"max_length": 12, "batch_size": 3, "accumulation": 8, "world_size": 4}
        # so packs of equal tokens cost differently
        run = planner(lengths, "wrapped", **sizes, balance=balance, cost_model=ATTENTION_DOMINATES)
        schedule = run.schedule(0)
        cost = ATTENTION_DOMINATES(run.documents.lengths)
        slots = [cost[schedule.order[a:b]].sum() for a, b in zip(schedule.offsets, schedule.offsets[1:], strict=False)]
        micro = np.array(slots).reshape(-1, 4)
        ratio[balance] = micro.max(1).sum() / micro.mean(1).sum()
    assert ratio["step"] < 1 + (ratio["none"] - 1) / 2


def test_an_epoch_too_short_for_one_step_is_refused():
    with pytest.raises(ValueError, match="1 packs, and one optimizer step needs more.*dataloader_drop_last=False"):
        planner([5, 5], "stream", batch_size=1, accumulation=2, drop_last=True)


@settings(max_examples=60, deadline=None)
@given(
    lengths=documents_of_a_dataset,
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 8),
)
def test_packed_evaluation_sees_every_document_once(lengths, batch_size, world_size):
    """The settings of evaluation: `bfd` in table order, no accumulation."""
    ranks = [
        planner(lengths, "bfd", batch_size=batch_size, world_size=world_size, shuffle=False) for _ in range(world_size)
    ]
    batches = [list(PackedBatchSampler(plan, rank)) for rank, plan in enumerate(ranks)]
    assert len({len(rank) for rank in batches}) == 1, "ranks run different numbers of batches"
    seen = [i for rank in batches for batch in rank for i in batch if i != EMPTY]
    assert sorted(seen) == list(range(len(lengths)))
    for step in zip(*batches, strict=True):
        if [EMPTY] in step:
            assert max(map(len, step)) == 1, "a rank is empty though another has two documents"
