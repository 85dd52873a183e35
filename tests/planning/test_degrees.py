"""Sequence parallelism, planned: every document once, no part too long, never slower than one degree for the run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import skip_first_batches
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import time_bound
from support.planners import documents_of_lengths, make_epochs, of_units
from support.runs import config
from test_scheduling import KINDS, documents_of, rows_of
from transformers import AutoConfig

from trl_packfix import PackedDataCollator
from trl_packfix.data.documents import Documents, make_documents
from trl_packfix.data.epochs import EpochPlanner
from trl_packfix.data.loaders import DocumentDataset, PackCollator, PackedBatchSampler, document_loader
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.data.reader import TokenReader
from trl_packfix.layout import LAYOUT_KEY
from trl_packfix.planning.costs import LLAMA_7B, CostModel, HeadCounts, ScanCosts, TowerCosts
from trl_packfix.planning.degrees import GroupTimes, UndividedStep, modelled_time
from trl_packfix.planning.parallel import Speeds, possible_degrees
from trl_packfix.planning.units import Units
from trl_packfix.training.checks import check_before_loading
from trl_packfix.training.choices import RunSettings
from trl_packfix.training.planner import make_planner
from trl_packfix.training.table_source import step_hash

# Attention and exchange weigh as much at these lengths as they do on a 7B model at thousands of tokens.
MODEL = CostModel(per_token=1e12, per_pair=4e10, attention=(HeadCounts(8, 8, 2, 64, 64),))
FREE = replace(MODEL, attention=())
# A scan for each two layers of attention
SCANS = (ScanCosts(8, 8, 2, 1e10, 4, 1e9, 128, 64), ScanCosts(8, 8, 8, 1e10, 1, 0.0, 32, 32))
HYBRID = replace(
    MODEL,
    windows=((1, 8 * 1e10 + 8 * 1e10),),
    chunks=((4, 8 * 1e9),),
    attention=(HeadCounts(1, 8, 2, 64, 64),),
    mixers=SCANS,
)
DEAR = Speeds(within=3e6, between=1e6, ranks_per_node=4, latency_within=1e-4, latency_between=3e-4)
CHEAP = Speeds(within=3e8, between=1e8, ranks_per_node=4)


def planner(lengths, world_size=4, tokens_per_rank=16, max_length=64, strategy="stream", **kwargs) -> EpochPlanner:
    documents = lengths if isinstance(lengths, Documents) else documents_of_lengths(lengths)
    kwargs = {"cost_model": MODEL, "speeds": DEAR} | kwargs
    return make_epochs(
        documents, strategy, 1, max_length, world_size=world_size, tokens_per_rank=tokens_per_rank, **kwargs
    )


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num=st.integers(1, 100),
    seed=st.integers(0, 99),
    world=st.sampled_from([(4, 16), (8, 8), (8, 16), (12, 16), (8, 64), (1, 64), (2, 32)]),  # ranks, tokens per rank
    accumulation=st.integers(1, 5),
    speeds=st.sampled_from([DEAR, CHEAP]),
    epoch=st.integers(0, 1),
    costs=st.sampled_from((MODEL, HYBRID)),
)
def test_never_slower_than_one_degree_for_the_run(kind, num, seed, world, accumulation, speeds, epoch, costs):
    documents = documents_of(rows_of(num, seed), kind)
    costs = replace(costs, tower=TowerCosts(1e10, 1e7))
    share_prefixes = "family" if kind == "families" else "off"
    how = {"accumulation": accumulation, "speeds": speeds, "cost_model": costs, "share_prefixes": share_prefixes}
    epochs = planner(documents, *world, **how)
    schedule, units = of_units(epochs, epoch)
    packing = epochs.packing
    seconds = modelled_time(schedule, units, packing.parallel)[0].sum()
    assert time_bound(schedule, units, packing.bins, parallel=packing.parallel) <= seconds * (1 + 1e-9)
    members = map(schedule.step_documents, range(schedule.num_steps))
    steps = [UndividedStep(member, units, packing.bins, parallel=packing.parallel) for member in members]
    possible = possible_degrees(64, world[1], world[0], num_heads=8) if epoch == 0 else packing.degrees
    for degree in possible:
        divided = [step.divide_with_degree(step.members, degree, accumulation) for step in steps]
        if None not in divided:  # all documents fit groups of it
            assert seconds <= sum(pack_of_rank.seconds for pack_of_rank in divided) * (1 + 1e-9), degree


def test_faster_than_any_one_degree_where_lengths_differ():
    """Without this the test above would hold for a planner that always takes the best single degree."""
    lengths = [*np.random.default_rng(0).integers(1, 12, 400).tolist(), 60, 50, 64]
    seconds = {}
    for degrees in (None, (1,), (2,), (4,)):
        epochs = planner(lengths, 4, 16, accumulation=4, degrees=degrees)
        seconds[degrees] = modelled_time(epochs.schedule(0), epochs.units(), epochs.packing.parallel)[0].sum()
    assert set(epochs.schedule(0).degrees.tolist()) == {4}
    assert seconds[None] < 0.9 * seconds[(4,)]


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 150), seed=st.integers(0, 99), accumulation=st.integers(1, 4), epoch=st.integers(0, 2))
def test_an_optimizer_step_keeps_its_documents_whatever_the_degrees(num, seed, accumulation, epoch):
    lengths = [len(row) for row in rows_of(num, seed)]
    planners = [
        planner(lengths, 8, 16, accumulation=accumulation, **kwargs)
        for kwargs in ({}, {"speeds": CHEAP}, {"cost_model": FREE}, {"degrees": (4,)}, {"balance": "none"})
    ]
    assert len({step_hash(planner_of_launch, epoch) for planner_of_launch in planners}) == 1


def test_the_exchange_sends_what_ulysses_sends():
    """Count by hand what 8 ranks of one node exchange.

    It is 7/8 of the queries, keys, values and outputs of a token, in three passes and in bf16.
    """
    per_token, fixed = GroupTimes(LLAMA_7B).exchange_seconds(8)
    assert per_token == pytest.approx(32 * 4 * 32 * 128 * 2 * 3 * 7 / 8 / 300e9)
    assert fixed == pytest.approx(32 * 2 * 3 * 20e-6)
    # 16 ranks of two nodes: 7/16 inside, 8/16 between, and the latency between nodes
    per_token, fixed = GroupTimes(LLAMA_7B).exchange_seconds(16)
    assert per_token == pytest.approx(32 * 4 * 32 * 128 * 2 * 3 * (7 / 16 / 300e9 + 8 / 16 / 50e9))
    assert fixed == pytest.approx(32 * 2 * 3 * 60e-6)
    assert GroupTimes(LLAMA_7B).exchange_seconds(1) == (0.0, 0.0)
    # fewer key heads than ranks: every rank needs one
    few = CostModel(1.0, 1.0, attention=(HeadCounts(1, 32, 4, 128, 128),))
    assert GroupTimes(few).exchange_seconds(8)[0] == pytest.approx((32 + 8) * 256 * 2 * 3 * 7 / 8 / 300e9)


def test_ranks_divide_the_costs_of_images():
    lengths = np.array([8, 20])
    images = np.array([0.0, 3e12])
    assert Units(lengths, MODEL, images).costs(8) == pytest.approx(MODEL.shared_by(8)(lengths) + images)


def test_heads_are_read_from_the_config():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 32}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=2)
    assert make_cost_model(config).attention == (HeadCounts(3, 8, 2, 8, 8),)
    latent = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **latent, num_attention_heads=4, first_k_dense_replace=3)
    assert make_cost_model(config).attention == (HeadCounts(3, 4, 4, 24, 12),)


@pytest.mark.parametrize(
    "model_type, sizes, heads, keys, values",
    [
        ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2}, 8, 2 * 4 * 16, 8 * 33),
        ("mamba", {}, 128, 4 * 2 * 16, 128 * 3),
    ],
)
def test_a_model_without_attention_pays_for_exchanges(model_type, sizes, heads, keys, values):
    """Mixers exchange tokens for heads, too. Without that cost all short packs would be shared by most ranks."""
    sizes |= {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 32, "state_size": 16}
    costs = make_cost_model(AutoConfig.for_model(model_type, **sizes))
    (scan,) = costs.mixers
    assert (scan.layers, scan.heads) == (3, heads)
    latency = 3 * 2 * 3 * 20e-6
    seconds = 3 * (keys + values) * 2 * 3 * 3 / 4 / 300e9
    assert GroupTimes(costs).exchange_seconds(4) == pytest.approx((seconds, latency))
    assert GroupTimes(costs).seconds(np.zeros(1), np.array([400]), 4)[0] == pytest.approx(100 * seconds + latency)
    lengths = np.random.default_rng(0).integers(2, 12, 400).tolist()
    degrees = [
        planner(lengths, cost_model=cost_model, speeds=Speeds(), world_size=8, max_length=32).schedule(0).degrees
        for cost_model in (costs, replace(costs, mixers=()))
    ]
    assert (degrees[0] == 1).mean() > 0.7
    assert degrees[0].max() == 2
    assert (degrees[1] > 2).mean() > 0.7


def test_degrees_divide_the_ranks_and_leave_each_rank_a_head():
    assert possible_degrees(64, 16, 24) == (1, 2, 4, 8)
    assert possible_degrees(16, 16, 7) == (1,)
    assert possible_degrees(64, 16, 64, num_heads=MODEL.heads) == (1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"max_length=64.*there are 6 ranks.*at most 2.*Set `max_length` to 32"):
        possible_degrees(64, 16, 6, num_heads=8)
    with pytest.raises(ValueError, match=r"max_length=256.*the model has 8 attention heads.*Set `max_length` to 128"):
        planner([5, 6], 64, 16, max_length=256)


@pytest.mark.parametrize("ranks, heads, helps", [(6, 8, True), (6, None, True), (6, 2, False), (64, 2, False)], ids=str)
def test_more_ranks_are_advised_only_if_the_model_has_a_head_for_each(ranks, heads, helps):
    with pytest.raises(ValueError, match=r"needs a group of 4 ranks.*Set `max_length` to 32 or less") as refused:
        possible_degrees(64, 16, ranks, num_heads=heads)
    assert ("train on a multiple of 4 ranks" in str(refused.value)) == helps


def test_a_loader_reads_its_parts_and_goes_on_after_skipped_batches():
    lengths = [*np.random.default_rng(0).integers(2, 12, 120).tolist(), 60, 50, 64, 33]
    reader = TokenReader(Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]}))
    documents = make_documents(reader, 64)

    def loader():
        sampler = PackedBatchSampler(planner(documents, 4, 16, accumulation=2), rank=3)
        rows = DocumentDataset(reader, documents)
        return document_loader(rows, sampler, PackCollator(PackedDataCollator()), device=None)

    whole_epoch = loader()
    epoch_rest = skip_first_batches(loader(), 3)
    for any_loader in (whole_epoch, epoch_rest):
        any_loader.set_epoch(1)  # after skipping, as the Trainer does: accelerate 1.13 forgets the epoch then
    batches = list(whole_epoch)
    assert [batch["input_ids"].tolist() for batch in epoch_rest] == [
        batch["input_ids"].tolist() for batch in batches[3:]
    ]
    rank_parts = [(b[LAYOUT_KEY].group.size, b[LAYOUT_KEY].group.rank) if LAYOUT_KEY in b else (1, 0) for b in batches]
    degrees = whole_epoch.batch_sampler.planner.schedule(1).degrees.tolist()
    assert rank_parts == [(degree, 3 % degree) for degree in degrees]
    assert len(set(rank_parts)) > 1


def test_slow_links_get_smaller_degrees(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(200, 4000, 300), [30_000] * 4])
    settings = {"per_device_train_batch_size": 1, "max_length": 32_768, "tokens_per_rank": 8192}
    used = []
    for speeds in (None, {"within": 1e9, "between": 1e9}, '{"within": 1e9, "between": 1e9}'):  # the flag is JSON
        args = config(tmp_path, **settings, exchange_speeds=speeds)
        of_run = {"world_size": 8, "synchronisation": "micro", "batch_size": 1}
        planner = make_planner(args, documents_of_lengths(lengths), LLAMA_7B, **of_run)
        used.append(planner.schedule(0).degrees.tolist())
    assert used[1] == used[2]
    assert np.mean(used[1]) < np.mean(used[0])


def test_documents_beyond_all_ranks_are_refused(tmp_path):
    args = config(tmp_path, tokens_per_rank=16, per_device_train_batch_size=1, max_steps=1)
    model = SimpleNamespace(config=AutoConfig.for_model("llama"))
    # one rank cannot hold documents of 64 tokens; found before the model is loaded and the dataset tokenised
    with pytest.raises(ValueError, match="`max_length=64` was given with `tokens_per_rank=16` on 1 ranks"):
        check_before_loading(RunSettings(args=args, model=model))
