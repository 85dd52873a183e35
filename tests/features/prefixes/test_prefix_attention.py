"""Attention over packs whose documents share prefixes, against each document alone: outputs and all gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import MODELS, in_float64, outputs_and_gradients, random_inputs
from support.models import attend_packs
from support.shared_rows import pack_of
from support.strict_varlen import StrictVarlen
from sweep.judge import PrefixJudge, with_prefixes
from torch import nn

from trl_packfix.attention import flash, runs, varlen
from trl_packfix.attention.flash import visible_keys
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.attention.kernels import math_attention
from trl_packfix.attention.packed_forward import packed_forward_entered, this_thread
from trl_packfix.attention.runs import attend_pack_on_cuda, attend_shared_on_cpu, runs_of
from trl_packfix.attention.varlen import _lengths_from_positions, varlen_attention
from trl_packfix.data import by_length
from trl_packfix.data.loaders import PackCollator
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.layout import LAYOUT_KEY

# The kernels


def packed(documents, **settings):
    return PrefixCollator(min_shared=1, **settings)([{"input_ids": tokens} for tokens in documents])


def dense(query, key, value, shared, scale, window=None, chunk=None, sinks=None):
    """Compute attention by its definition: each run by the formula over its own copy of its keys."""
    outs = []
    q_bounds, k_bounds = (bounds.tolist() for bounds in (shared.cu_seq_lens_q, shared.cu_seq_lens_k))
    for a, b, c, d in zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False):
        visible = visible_keys(b - a, d - c, window, device="cpu")
        if chunk is not None:
            of_chunk = torch.arange(d - c) // chunk
            visible &= of_chunk[-(b - a) :, None] == of_chunk
        keys = shared.kv_index[c:d]
        inputs = query[:, :, a:b], key[:, :, keys], value[:, :, keys], visible
        outs.append(math_attention(*inputs, scale=scale, sinks=sinks))
    return torch.cat(outs, dim=2)


def differences(attend, shared, dtype=torch.float64, sinks=False, **features):
    """Return the largest differences of outputs and of the gradients of queries, keys, values and sinks."""
    inputs = random_inputs(int(shared.cu_seq_lens_q[-1]), head_dim=6, value_dim=4, sinks=sinks, dtype=dtype)
    results = outputs_and_gradients(attend, inputs, shared, scale=0.5, **features)
    exact = outputs_and_gradients(dense, in_float64(inputs), shared, scale=0.5, **features)
    pairs = zip(results, exact, strict=True)
    return [((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]


FEATURES = {
    "full": {},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 3, "sinks": True},
}
TOKENS = st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(1, most), min_size=1, max_size=24))
PACKS = st.lists(TOKENS, min_size=2, max_size=9)


@pytest.fixture(scope="module", autouse=True)
def short_tiles():
    """Make tiles so short that the runs of these tests have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "FLASH_TILE", 4)
        patch.setattr(flash, "CUDA_DTYPES", (torch.bfloat16, torch.float16, torch.float64))
        yield


@settings(max_examples=50)
@given(PACKS, st.sampled_from(sorted(FEATURES)), st.booleans(), st.sampled_from([None, 1, 2**30]))
def test_random_packs_equal_the_definition(documents, name, keeps_last_rows, most_bytes):
    """Compare on the CPU, and on CUDA with a strict stand-in for the operators.

    All launches pass a bound of 1 byte.
    """
    batch = packed(documents, keeps_last_rows=keeps_last_rows)
    if LAYOUT_KEY not in batch:
        return
    attend = attend_shared_on_cpu if most_bytes is None else attend_pack_on_cuda
    with pytest.MonkeyPatch.context() as patch, StrictVarlen():
        patch.setattr(runs, "COPIED_BYTES", most_bytes or 0)
        assert max(differences(attend, pack_of(batch), **FEATURES[name])) < 1e-12


# A chat of which each turn is a document, with two answers to the last, and a document of its own
CHAT = [[*range(1, 2 * n + 1), 9, n, 9] for n in range(1, 5)] + [[*range(1, 9), 6, 6], [4, 4]]


@pytest.mark.parametrize("name", FEATURES)
def test_launches_above_the_bound_of_copied_keys(name, monkeypatch):
    """Launches each copy the keys of some runs."""
    shared = pack_of(packed(CHAT))
    num_rows = int(shared.cu_seq_lens_q[-1])
    num_keys = len(shared.kv_index)
    monkeypatch.setattr(runs, "most_copied_keys", lambda *tensors: num_rows)
    with StrictVarlen() as calls:
        assert max(differences(attend_pack_on_cuda, shared, **FEATURES[name])) < 1e-12
    assert len(calls.forwards) == len(calls.backwards) == 2
    copied = [keys for _, keys, _, _ in calls.forwards]
    assert max(copied) <= num_rows < sum(copied) == num_keys


@pytest.mark.parametrize("name", FEATURES)
def test_packs_sorted_by_length_read_their_prefixes(name, monkeypatch):
    """On CUDA the trainer sorts packs by length. A launch for runs of one length has no keys of prefixes."""
    monkeypatch.setattr(by_length, "LENGTH_CLASSES", (8, 40))
    monkeypatch.setattr(by_length, "TILE_QUERIES", 4)
    documents = [[1] * 12 + [2 + i] * length for i, length in enumerate([70, 33, 20, 7, 5, 3, 2])]
    collate = by_length.ByLength(PackCollator(PrefixCollator(min_shared=1)))
    batch = collate([{"input_ids": tokens} for tokens in documents])
    assert by_length.plan_launches(batch["cu_seq_lens_q"].numpy(), batch["max_length_q"]), "runs have similar lengths"
    with StrictVarlen():
        assert max(differences(attend_pack_on_cuda, pack_of(batch), **FEATURES[name])) < 1e-12


@pytest.mark.parametrize("head_dim", [8, 512])
def test_documents_share_nothing_where_there_is_no_flash_kernel(head_dim, monkeypatch):
    """There is no such kernel on MPS, nor for wide heads on CUDA."""
    monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cuda"} if head_dim == 8 else {"meta"})
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device_type: False)  # it does not know "meta"
    shared = pack_of(packed(CHAT))
    states = [torch.empty(1, 2, int(shared.cu_seq_lens_q[-1]), head_dim, device="meta") for _ in range(3)]
    message = f"heads of {head_dim} dimensions on 'meta', for which there is no flash kernel.*share_prefixes"
    with packed_forward_entered(shared), pytest.raises(ValueError, match=message):
        varlen_attention(nn.Module(), *states, None, scaling=0.5)


def test_gradients_of_shared_keys_are_summed_in_fp32(monkeypatch):
    """Documents with 60 shared tokens in bfloat16; summed in bfloat16 the gradients of keys are further off."""
    rng = np.random.default_rng(0)
    shared = pack_of(packed([[1] * 60 + rng.integers(2, 99, 4).tolist() for _ in range(32)]))

    def error(attend):
        with StrictVarlen():
            return max(differences(attend, shared, dtype=torch.bfloat16)[2:])

    def in_bfloat16(total, places, values):
        for i in range(values.shape[2]):
            place = i if isinstance(places, slice) else int(places[i])
            total[:, :, place] = (total[:, :, place] + values[:, :, i]).to(torch.bfloat16)

    right = error(attend_pack_on_cuda)
    assert 0 < error(attend_shared_on_cpu) < 2 * right < 0.02
    monkeypatch.setattr(flash, "_add_at_rows", in_bfloat16)
    assert error(attend_pack_on_cuda) > 3 * right


@pytest.mark.parametrize("fault", ["rows", "own", "number"])
def test_contradicting_keys_are_refused_on_the_cpu(fault):
    shared = pack_of(packed(CHAT))
    keys = shared.kv_index.clone()
    if fault == "rows":
        keys[0] = 10**6
    elif fault == "own":
        keys[runs_of(shared)[1].keys.stop - 1] -= 1
    else:
        keys = keys[:-1]
    with pytest.raises(ValueError, match=r"(?s)runs with .* rows and .* share_prefixes"):
        differences(attend_shared_on_cpu, replace(shared, kv_index=keys, derived={}))


# Whole models

TYPES = ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "llama4_text"]


@pytest.mark.parametrize("most_bytes", [None, 2**30, 1], ids=["on the CPU", "one launch", "several"])
@pytest.mark.parametrize("model_type", TYPES)
def test_each_document_is_as_alone(model_type, most_bytes, tiny_model, monkeypatch):
    """On the CPU, and the code for CUDA with a strict stand-in for the operators of torch."""
    if most_bytes is not None:
        monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cpu"})
        monkeypatch.setattr(runs, "COPIED_BYTES", most_bytes)
    judge = PrefixJudge(tiny_model(model_type, attn_implementation="eager", **MODELS[model_type]))
    model = tiny_model(model_type, **MODELS[model_type])
    attend_packs(model)
    with StrictVarlen() as calls:
        judgement = judge.compare(model, torch.float64)
    assert 0 < judgement.error < 1e-12, judgement
    assert not this_thread.packed_forwards
    launches = len(calls.forwards)
    one_each = len(judge.cases) * model.config.num_hidden_layers
    assert launches > one_each if most_bytes == 1 else launches == (0 if most_bytes is None else one_each)


# Boundaries of runs, where a document's are expected


def test_modules_see_no_boundaries_of_runs(tiny_model):
    """Modules that read `cu_seq_lens_q` would take runs for documents."""
    model = tiny_model("llama")
    attend_packs(model)
    arguments = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: arguments.append(set(kwargs)), with_kwargs=True
    )
    model(**with_prefixes(CHAT))
    assert arguments
    assert not any("seq_lens" in name or name == "seq_idx" for name in arguments[0])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_attention_is_refused(name, tiny_model):
    model = tiny_model("llama", attn_implementation=name)
    mark_packed_forwards(model)
    with pytest.raises(ValueError, match=rf"6 documents share prefixes .*{name}.* share_prefixes='off'"):
        model(**with_prefixes(CHAT))
    assert not this_thread.packed_forwards


def test_positions_never_say_where_documents_begin():
    """Without the packed forward, as in a recomputation by the user's own code, attention has the positions only."""
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(50):
        documents = [rng.integers(0, 2, rng.integers(1, 20)).tolist() for _ in range(6)]
        batch = packed(documents, keeps_last_rows=bool(rng.integers(2)))
        if LAYOUT_KEY in batch and any(own_run.num_earlier_keys for own_run in runs_of(pack_of(batch))):
            refused += 1
            with pytest.raises(ValueError, match=r"share prefixes .* gradient_checkpointing=True"):
                _lengths_from_positions(batch["position_ids"], batch["input_ids"].shape[1])
    assert refused > 40
