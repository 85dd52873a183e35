"""Costs are read from configs and split over ranks as computed by hand, without a model."""

from types import SimpleNamespace

import numpy as np
import pytest

from trl_packfix.planning.costs import (
    LLAMA_7B,
    CostModel,
    HeadCounts,
    ScanCosts,
    TowerCosts,
    decoder_costs_of,
    tower_costs_of,
)


def heads_of(heads, kv_heads=1, key_dim=8, value_dim=8, layers=1):
    return HeadCounts(layers, heads, kv_heads, key_dim, value_dim)


def scan_of(heads=2, layers=1, per_token=5.0, chunk=4, per_pair=3.0):
    costs = {"per_token": per_token, "chunk": chunk, "per_pair": per_pair}
    return ScanCosts(layers, heads, kv_heads=1, exchanged_per_head=1, exchanged_per_kv_head=1, **costs)


MODEL = CostModel(10.0, 2.0, windows=((4, 3.0), (8, 5.0)), chunks=((16, 7.0),))


def with_layers(attention=(), mixers=()):
    return CostModel(10.0, 2.0, MODEL.windows, MODEL.chunks, attention, mixers)


def test_the_fewest_heads_of_any_layer_limit_a_split():
    assert with_layers((heads_of(8), heads_of(4)), (scan_of(6),)).heads == 4
    assert with_layers((heads_of(8), heads_of(4)), (scan_of(2),)).heads == 2
    assert with_layers().heads is None


@pytest.mark.parametrize(
    "attention, mixers, degree, factor",
    [
        ((), (), 8, 1),
        ((heads_of(8),), (), 4, 1),
        ((heads_of(8),), (), 1, 1),
        ((heads_of(28),), (), 8, 8 / 7),
        ((heads_of(8), heads_of(28)), (), 8, 8 / 7),
        ((heads_of(28), heads_of(8)), (scan_of(3),), 8, 8 / 7),
        ((), (scan_of(3), scan_of(8)), 8, 8 / 3),
        ((heads_of(2),), (), 4, 2),
        ((heads_of(3),), (), 2, 4 / 3),
    ],
)
def test_heads_that_do_not_divide_make_attention_dearer(attention, mixers, degree, factor):
    model = with_layers(attention, mixers)
    shared = model.shared_by(degree)
    assert shared.per_token == 10
    assert shared.per_pair == 2 * factor
    assert shared.windows == ((4, 3 * factor), (8, 5 * factor))
    assert shared.chunks == ((16, 7 * factor),)
    assert (shared is model) == (factor == 1)


def count_by_hand(n):
    """Return the costs of a document of n tokens for `MODEL`, pair by pair."""
    pairs = [(i, j) for i in range(n) for j in range(i + 1)]
    near = [sum(3.0 * (i - j < 4) + 5.0 * (i - j < 8) for i, j in pairs)]
    return 10.0 * n + 2.0 * len(pairs) + sum(near) + 7.0 * sum(i // 16 == j // 16 for i, j in pairs)


def test_windows_and_chunks_cost_what_their_pairs_cost():
    lengths = np.array([0, 1, 3, 4, 5, 8, 9, 15, 16, 17, 32, 40])
    assert MODEL(lengths).tolist() == [count_by_hand(n) for n in lengths]


def test_many_tokens_do_not_overflow():
    n = np.array([2**20], dtype=np.int32)
    assert CostModel(0.0, 1.0)(n)[0] == 2**20 * (2**20 + 1) // 2


def test_llama_of_7b_by_hand():
    """Count 6.61 billion parameters for a token, without those of the embedding, and two products for a pair."""
    parameters = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 4096 * 32000
    assert LLAMA_7B.per_token == 2 * parameters
    assert LLAMA_7B.per_pair == 32 * 32 * 2 * (128 + 128)
    assert LLAMA_7B.attention == (HeadCounts(layers=32, heads=32, kv_heads=32, key_dim=128, value_dim=128),)
    assert LLAMA_7B.tower(5, 7) == 0


# Configs


def layer_of(**fields):
    return SimpleNamespace(**{"num_attention_heads": 4, "hidden_size": 32} | fields)


def config_of(layers, **fields):
    return SimpleNamespace(per_layer_config=layers, num_hidden_layers=len(layers), num_attention_heads=4, **fields)


def test_heads_of_each_layer_are_counted_by_their_sizes():
    layers = [
        layer_of(),
        layer_of(num_key_value_heads=2),
        layer_of(head_dim=16, v_head_dim=6),
        layer_of(),
        layer_of(kv_lora_rank=3, qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=9, num_key_value_heads=1),
        layer_of(kv_lora_rank=3, qk_nope_head_dim=5, qk_rope_head_dim=2),
    ]
    model = decoder_costs_of(config_of(layers), 7.0)
    assert model.attention == (
        heads_of(4, 4, 8, 8, layers=2),
        heads_of(4, 2, 8, 8),
        heads_of(4, 4, 16, 6),
        heads_of(4, 4, 7, 9),
        heads_of(4, 4, 7, 7),
    )
    assert model.per_pair == 2 * 4 * (3 * 16 + 22 + 16 + 14)
    assert model.per_token == 7
    assert (model.windows, model.chunks) == ((), ())
    # Numbers of heads by layer come before those of the config
    model = decoder_costs_of(config_of(layers[:2], num_attention_heads_per_layer=[2, 6]), 7.0)
    assert model.attention == (heads_of(2, 2, 8, 8), heads_of(6, 2, 8, 8))


def test_pairs_of_each_kind_of_layer_are_added():
    kinds = [
        *("sliding_attention", "full_attention", "chunked_attention", "sliding_attention", "chunked_attention"),
        *("sliding_attention", "mamba", "conv", "mlp", "moe", "recurrent", "linear_attention"),
    ]
    layers = [layer_of(sliding_window=window, attention_chunk_size=64) for window in (9, 9, 9, 9, 9, 5, *[9] * 6)]
    model = decoder_costs_of(config_of(layers, layer_types=kinds), 0.0)
    assert model.windows == ((5, 64 * 2.0), (9, 2 * 64 * 2.0))
    assert model.chunks == ((64, 2 * 64 * 2.0),)
    assert model.per_pair == 64 * 2.0
    assert model.attention == (heads_of(4, 4, 8, 8, layers=6),)
    assert decoder_costs_of(config_of(layers, layers_block_type=kinds), 0.0) == model


@pytest.mark.parametrize(
    "kind, sums", [("indexed_attention", 1), ("compressed_sparse_attention", 1), ("minimax_m3_sparse", 0)]
)
def test_an_indexer_scores_every_pair(kind, sums):
    layers = [layer_of(index_n_heads=3, index_head_dim=5)] * 2
    score = 2.0 * 3 * (5 + sums)
    config = config_of(layers, layer_types=[kind] * 2)
    assert decoder_costs_of(config, 0.0).per_pair == 2 * (128 + score)
    config.indexer_types = ["full", "shared"]
    assert decoder_costs_of(config, 0.0).per_pair == 2 * 128 + score
    without = config_of([layer_of()], layer_types=[kind])
    assert decoder_costs_of(without, 0.0).per_pair == 128


@pytest.mark.parametrize(
    "kind, score", [("compressed_sparse_attention", 2 * 3 * (5 + 1)), ("heavily_compressed_attention", 0)]
)
def test_compressed_layers_see_a_window_and_one_of_several_tokens(kind, score):
    layers = [layer_of(index_n_heads=3, index_head_dim=5, compress_rates={kind: 4}, sliding_window=9)]
    model = decoder_costs_of(config_of(layers, layer_types=[kind]), 0.0)
    assert model.per_pair == (128 + score) / 4
    assert model.windows == ((9, 128.0),)


@pytest.mark.parametrize(
    "fields, windows, per_pair",
    [
        ({}, (), 256),
        ({"sliding_window": 9}, ((9, 256),), 0),
        ({"sliding_window": 9, "use_sliding_window": True}, ((9, 256),), 0),
        ({"sliding_window": 9, "use_sliding_window": False}, (), 256),
        ({"sliding_window": None, "use_sliding_window": True}, (), 256),
    ],
)
def test_a_config_without_kinds_of_layers_has_one(fields, windows, per_pair):
    layers = [layer_of(sliding_window=fields.get("sliding_window"))] * 2
    model = decoder_costs_of(config_of(layers, **fields), 0.0)
    assert model.windows == windows
    assert model.per_pair == per_pair


def test_scans_are_windows_of_one_token_and_pairs_of_a_chunk():
    kinds = ["sliding_attention", "sliding_attention", "chunked_attention", "chunked_attention", "mamba"]
    layers = [layer_of(sliding_window=size, attention_chunk_size=size) for size in (1, 9, 4, 64, 5)]
    scans = (
        scan_of(layers=2),
        scan_of(layers=3, per_token=7.0, chunk=32, per_pair=2.0),
        scan_of(per_pair=0.0, chunk=1),
    )
    model = decoder_costs_of(config_of(layers, layer_types=kinds), 1.0, scans)
    assert model.windows == ((1, 128 + 2 * 5 + 3 * 7 + 5), (9, 128.0))
    assert model.chunks == ((4, 128 + 2 * 3), (32, 3 * 2), (64, 128.0))
    assert model.mixers == scans


def test_a_config_without_heads_has_no_attention():
    assert decoder_costs_of(SimpleNamespace(per_layer_config=[layer_of()] * 3, num_hidden_layers=3), 4.0) == CostModel(
        4.0, 0.0
    )


# Vision towers


@pytest.mark.parametrize(
    "fields, per_value, per_pair",
    [
        ({"num_hidden_layers": 3, "hidden_size": 8, "patch_size": 2}, 120 / 12, 3 * 4 * 8 / 12**2),
        ({"depth": 3, "embed_dim": 8, "hidden_size": 99, "patch_size": (2, 5)}, 120 / 30, 3 * 4 * 8 / 30**2),
        ({"depth": 3, "embed_dim": 8, "patch_size": 2, "temporal_patch_size": 2}, 120 / 24, 3 * 4 * 8 / 24**2),
        (
            {"num_hidden_layers": 3, "hidden_size": 99, "head_dim": 5, "num_attention_heads": 4, "patch_size": [2, 2]},
            120 / 12,
            3 * 4 * 20 / 12**2,
        ),
        (
            {"depth": 5, "hidden_size": 8, "patch_size": 2, "fullatt_block_indexes": [1, 4], "window_size": 6},
            (120 + 3 * 4 * 8 * 9) / 12,
            2 * 4 * 8 / 12**2,
        ),
        (
            {"depth": 5, "hidden_size": 8, "patch_size": 2, "fullatt_block_indexes": [], "window_size": 4},
            (120 + 5 * 4 * 8 * 4) / 12,
            0,
        ),
    ],
)
def test_towers_by_hand(fields, per_value, per_pair):
    """Windows of the last two towers are of 3 x 3 patches in three layers, and of 2 x 2 patches in all five."""
    assert tower_costs_of(SimpleNamespace(**fields), 120.0) == TowerCosts(per_value, per_pair)
