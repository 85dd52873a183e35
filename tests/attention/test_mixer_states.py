"""Scans over ranks that send states: documents are what they are alone; and when states are sent."""

import sys
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from support import zoo
from support.double import in_double
from support.versions import current_models
from torch.nn.functional import normalize, softplus

from trl_packfix.attention import mixer_states, mixers
from trl_packfix.attention.choice import select_attention
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.attention.mixer_states import volume_of
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.attention.scan import Scan, Transition
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.planning.degrees import GroupTimes, Speeds

# 48 tokens: documents that fill parts, that end with a part, and that begin and end in one
PACKS = [(5, 1, 30, 2, 9, 1), (48,), (2, 45, 1), (12, 12, 24), (16, 15, 17), (1,) * 48]
TOKENS = 48
HEADS, GROUPS, SIZE, WIDTH = 4, 2, 3, 5
SCANS = {
    "delta": ("qwen3_5_text", "torch_chunk_gated_delta_rule"),
    "kimi": ("kimi_linear", "chunk_kimi_delta_attention"),
    "mamba2": ("bamba", "mamba2_chunk_scan"),
}


def drawn(*shape):
    return torch.randn(1, TOKENS, *shape, dtype=torch.float64)


def inputs(kind):
    """Leaves with tokens in axis 1, and parameters."""
    if kind == "mamba2":
        leaves = [drawn(HEADS, WIDTH), drawn(HEADS), drawn(GROUPS, SIZE), drawn(GROUPS, SIZE)]
        return leaves, [-torch.rand(HEADS, dtype=torch.float64), *torch.randn(2, HEADS, dtype=torch.float64)]
    heads = HEADS  # transformers repeats the keys before the scan
    decay = -softplus(drawn(heads, SIZE) if kind == "kimi" else drawn(heads))
    return [normalize(drawn(heads, SIZE), dim=-1) for _ in range(2)] + [
        drawn(heads, WIDTH),
        decay,
        drawn(heads).sigmoid(),
    ], []


@cache
def function(kind):
    """What the mixers of this kind call in transformers."""
    model_type, name = SCANS[kind]
    modules = {sys.modules[type(each).__module__] for each in zoo.build_model(model_type).modules()}
    return next(vars(module)[name] for module in modules if name in vars(module))


def run(kind, running, leaves, parameters):
    inner = function(kind)
    if kind != "mamba2":
        return mixers.scan_delta(inner, running, *leaves)[0]
    states, dt, B, C = leaves
    A, D, bias = parameters
    options = {"chunk_size": 8, "D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": (1e-3, 2.0)}
    return mixers.scan_chunks(inner, running, states, dt, A, B, C, **options)


def packed(lengths, **more):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedForward(bounds, bounds, max(lengths), max(lengths), **more)


def on_ranks(kind, lengths, degree, leaves, parameters, monkeypatch):
    """The outputs of all ranks, which are threads of this process."""
    sent, found, me, all_here = {}, {}, threading.local(), threading.Barrier(degree, timeout=60)

    def exchange(flat, send, receive, group):
        sent[me.index] = flat.split(send)
        all_here.wait()
        out = torch.cat([sent[j][me.index] for j in range(degree)])
        all_here.wait()
        assert len(out) == sum(receive) and out.requires_grad, "a rank would be missing in the backward pass"
        return out

    def play(index):
        me.index = index
        size = TOKENS // degree
        part = packed(lengths, degree=degree, index=index, part_tokens=size, sends_states=lambda *given: True)
        try:
            own = [x[:, index * size : (index + 1) * size] for x in leaves]
            found[index] = run(kind, part, own, parameters)
        except BaseException:
            all_here.abort()
            raise

    monkeypatch.setattr(mixer_states, "exchange_pieces", exchange)
    monkeypatch.setattr(mixer_states, "group_of", lambda degree: None)
    threads = [threading.Thread(target=play, args=(i,)) for i in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([found[i] for i in range(degree)], dim=1)


@pytest.mark.parametrize(
    "kind, degree", [*((kind, degree) for kind in ("delta", "mamba2") for degree in (2, 3, 4)), ("kimi", 3)]
)
def test_parts_are_what_documents_are_alone(kind, degree, monkeypatch):
    """Outputs and every gradient, in fp64."""
    torch.manual_seed(degree)
    given = inputs(kind)
    leaves, parameters = ([x.detach().requires_grad_() for x in each] for each in given)
    with in_double():
        for lengths in PACKS:
            alone = [
                run(kind, packed((len(own[0][0]),)), own, parameters)
                for own in zip(*(x.split(lengths, dim=1) for x in leaves), strict=True)
            ]
            expected = torch.cat(alone, dim=1)
            out = on_ranks(kind, lengths, degree, leaves, parameters, monkeypatch)
            weights = torch.randn_like(expected)
            assert out.shape == expected.shape and expected.abs().max() > 0.1
            everything = [*leaves, *parameters]
            grads = [torch.autograd.grad((x * weights).sum(), everything) for x in (out, expected)]
            for ours, theirs in zip([out, *grads[0]], [expected, *grads[1]], strict=True):
                assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max(), lengths


def scan_of_qwen3_5():
    """With the sizes of transformers' default config, in bf16: 32 heads of values, 16 of keys, 128 wide."""

    def given(*shape, dtype=torch.bfloat16):
        return torch.empty(1, 1, *shape, dtype=dtype, device="meta")

    transition = Transition((128, 128), (128, 128), None, None)
    values = [given(32, 128), given(32, dtype=torch.float32), given(32)]
    return Scan(values, [given(16, 128)] * 2, [], None, None, transition=transition)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_states_are_sent_by_long_parts_only(degree):
    """Both ways send as much at 170 tokens times the ranks. What is computed twice moves that between nodes."""
    volume = volume_of(scan_of_qwen3_5(), degree)
    assert volume.per_token == pytest.approx(24.8e3, rel=0.01) and volume.state == pytest.approx(4.19e6, rel=0.01)
    only_bytes = Speeds(flops=1e30, latency_within=0.0, latency_between=0.0)
    crossover = 170 * degree
    for tokens, expected in ((0.95 * crossover, False), (1.05 * crossover, True)):
        assert only_bytes.sends_states(volume, int(tokens), degree) is expected
    fast, slow = (replace(only_bytes, flops=400e12, ranks_per_node=n) for n in (8, 1))
    assert not fast.sends_states(volume, int(1.05 * crossover), degree)
    shortest = [
        next(n for n in range(100, 99_999, 50) if each.sends_states(volume, n, degree)) for each in (fast, slow)
    ]
    assert crossover < shortest[1] < shortest[0] < 4 * crossover


@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", "olmo_hybrid", pytest.param("kimi_linear", marks=current_models), "bamba", "mamba2"]
)
def test_degrees_are_chosen_by_what_the_run_sends(model_type, monkeypatch):
    """The volume that planning reads from the modules is that of the scan in a packed forward in bf16."""
    model = zoo.build_model(model_type).bfloat16()
    seen, right = [], mixers.run_scan
    monkeypatch.setattr(mixers, "run_scan", lambda scan, running: seen.append(scan) or right(scan, running))
    select_attention(model)
    guard = mark_packed_forwards(model)
    batch = PackedDataCollator()([{"input_ids": torch.arange(20, 20 + n)} for n in (5, 4)])
    model.train()(**{name: each for name, each in batch.items() if name != "labels"})
    guard.remove()
    costs = make_cost_model(model.config)
    (layers,) = costs.mixers
    assert len(seen) == layers.layers
    for degree in (2, 8):
        assert GroupTimes(costs).volume(layers, degree) == pytest.approx(volume_of(seen[0], degree), rel=0.01)


def test_only_parts_that_share_no_rows_send_states():
    scan = scan_of_qwen3_5()
    part = packed((9,), degree=4, index=1, part_tokens=3, sends_states=lambda *given: True)
    assert mixer_states.sends_states(scan, part)
    whole, shared = packed((9,), sends_states=part.sends_states), replace(part, kv_index=torch.arange(9))
    for other in (whole, shared, replace(part, sends_states=None), replace(part, sends_states=lambda *given: False)):
        assert not mixer_states.sends_states(scan, other)
    assert not mixer_states.sends_states(scan._replace(transition=None), part)
