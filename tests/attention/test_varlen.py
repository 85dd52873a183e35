"""The varlen attention function and its kernels, against attention written out with a dense mask."""

import dataclasses
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.attention import (
    bounds_of,
    in_float64,
    largest_difference,
    one_launch,
    outputs_and_gradients,
    random_inputs,
    take_path_of_cuda,
)
from support.models import attend_packs
from support.runs import packed_model
from support.strict_varlen import StrictVarlen
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from trl_packfix.attention import choice, flash, kernels, varlen
from trl_packfix.attention.flash import visible_keys
from trl_packfix.attention.kernel_errors import KernelError
from trl_packfix.attention.kernels import attend_by_document, attend_on_cpu, attend_on_cuda
from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward, packed_forward_entered, this_thread
from trl_packfix.attention.runs import _cut_launch_at_chunks, attend_pack_on_cuda
from trl_packfix.attention.varlen import OwnMaskError, _pack_of, varlen_attention, varlen_mask
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.group import ALONE

LENGTHS = [1, 70, 9, 200, 1]  # longer and shorter than a tile of 64 queries, and single tokens
T = sum(LENGTHS)
WINDOWS = [None, 1, 3, 64, 100, 1000]


def dense_attention(query, key, value, lengths, scale, window=None, softcap=None, sinks=None):
    """Compute attention by its definition, with one (T, T) mask and one softmax.

    Key/value heads are repeated, and the sink is one more column of logits.
    """
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(sum(lengths))
    hidden = (document[:, None] != document) | (token > token[:, None])
    if window is not None:
        hidden |= token <= token[:, None] - window
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(1, -1, logits.shape[2], 1)], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


# The kernels


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_heads,value_dim", [(4, 8), (2, 8), (1, 12), (2, 5)])
@pytest.mark.parametrize("attend", [attend_on_cpu, attend_by_document])
def test_every_feature_equals_dense_attention(attend, kv_heads, value_dim, window, softcap, sinks):
    inputs = random_inputs(T, kv_heads=kv_heads, value_dim=value_dim, sinks=sinks)
    options = {"scale": 0.4, "window": window, "softcap": softcap}
    results = [outputs_and_gradients(function, inputs, LENGTHS, **options) for function in (attend, dense_attention)]
    assert largest_difference(*results) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window,sinks", [(None, False), (64, False), (None, True), (3, True)])
def test_rounding_is_that_of_sdpa(dtype, window, sinks):
    """Compare the error against fp64 with that of torch's own masked sdpa in the same dtype (which has no sinks)."""
    inputs = random_inputs(T, head_dim=16, sinks=sinks, dtype=dtype)
    options = {"scale": 0.25, "window": window}

    def masked_sdpa(query, key, value, lengths, scale, window):
        mask = torch.block_diag(*[visible_keys(n, n, window, device="cpu") for n in lengths])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)

    def errors(attend, inputs):
        results = outputs_and_gradients(attend, inputs, LENGTHS, **options)
        exact = outputs_and_gradients(dense_attention, in_float64(inputs), LENGTHS, **options)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]

    ours = errors(attend_on_cpu, inputs)
    sdpa = errors(masked_sdpa, inputs[:3])
    # the sinks' own gradient, the fifth, has nothing to stand beside
    assert all(a <= 2 * b for a, b in zip(ours, sdpa, strict=False)), (ours, sdpa)
    assert max(ours) < 20 * torch.finfo(dtype).eps  # the sinks' gradient, and a guard against both being wrong


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 20, "sinks": True}], ids=str)
@pytest.mark.parametrize("attend", [attend_on_cpu, attend_by_document])
def test_dropout_drops_the_same_weights_in_backward_and_stays_in_its_document(attend, options):
    """It keeps the mean, drops the same weights in backward, and values of one document do not reach another."""
    query, key, value, sinks = random_inputs(40, sinks=True)
    value = torch.ones_like(value, requires_grad=True)
    with torch.no_grad():
        value[:, :, 30:] = 0
    options = {"scale": 1.0, **options, "sinks": sinks if options.get("sinks") else None}
    torch.manual_seed(0)
    out = attend(query, key, value, [30, 10], dropout=0.5, **options)
    change = (out - attend(query, key, value, [30, 10], **options))[:, :, :30]
    assert (out[:, :, 30:] == 0).all()
    assert change.mean().abs() < 0.15
    assert change.std() > 0.1
    grad = torch.randn_like(out)
    # With the dropped weights fixed the output is linear in the values
    (grad_value,) = torch.autograd.grad(out, value, grad)
    assert torch.allclose((grad * out).sum(), (grad_value * value).sum(), rtol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Note the elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": True}, {"window": 128}, {"window": 1024, "sinks": True}, {"softcap": 30.0}, {"dropout": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [[2048], [1500, 48, 500]], ids=["one document", "three documents"])
def test_no_tensor_has_t_squared_entries(lengths, options):
    num_tokens = sum(lengths)
    query, key, value, sinks = random_inputs(num_tokens, heads=1, kv_heads=1, sinks=True, dtype=torch.float32)
    options = {**options, "sinks": sinks if options.get("sinks") else None}
    with LargestTensor() as largest:
        out = attend_on_cpu(query, key, value, lengths, scale=0.4, **options)
        out.sum().backward()
    assert largest.numel >= out.numel()  # it saw something
    # a tile of 256 queries against one whole document is the most that may exist at a time
    assert largest.numel <= 256 * max(lengths) < num_tokens**2 / 4


def test_a_window_costs_its_length(monkeypatch):
    """Query-key pairs that reach the kernel must be linear in the document, not quadratic."""
    pairs = []
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counting(query, key, *args, **kwargs):
        pairs.append(query.shape[2] * key.shape[2])
        return call(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counting)
    for length in (2048, 4096):
        pairs.clear()
        attend_on_cpu(*random_inputs(length, heads=1, kv_heads=1, dtype=torch.float32), [length], scale=1, window=128)
        assert 128 * length / 2 < sum(pairs) < 200 * length


# Devices without a flash kernel


@pytest.fixture
def launches(monkeypatch):
    """Record the shape of the queries of every call of `scaled_dot_product_attention`, and whether it got a mask."""
    calls = []
    call = F.scaled_dot_product_attention

    def counting(query, key, value, attn_mask=None, **kwargs):
        assert key.shape[1] == query.shape[1]  # else CUDA computes T x T weights
        assert "enable_gqa" not in kwargs
        calls.append((tuple(query.shape), attn_mask is not None))
        return call(query, key, value, attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return calls


def test_many_short_documents_are_few_launches_without_much_padding(launches):
    lengths = torch.randint(1, 17, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    attend_by_document(*random_inputs(sum(lengths)), lengths, scale=1.0)
    padded = sum(rows * length for (rows, _, length, _), _ in launches)
    assert len(launches) <= 3
    assert padded <= 2 * sum(lengths)
    assert not any(masked for _, masked in launches)


def test_masks_of_windows_are_no_larger_than_two_windows(launches):
    attend_by_document(*random_inputs(2000), [1500, 500], scale=1.0, window=300)
    assert len(launches) == 7  # 1500 = 5 tiles, 500 = 2
    assert max(shape[2] for shape, _ in launches) == 300


# The code for CUDA, on a strict stand-in for the operators of torch


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 7, 1000])
def test_cuda_kernel_translates_exactly(monkeypatch, window, sinks):
    monkeypatch.setattr(flash, "CUDA_DTYPES", (torch.float64,))  # so that exactness can be seen
    inputs = random_inputs(T, head_dim=6, value_dim=5, sinks=sinks)
    with StrictVarlen() as calls:  # which takes heads of a multiple of 8 only
        results = outputs_and_gradients(attend_on_cuda, inputs, [one_launch(LENGTHS)], scale=0.4, window=window)
    expected = outputs_and_gradients(dense_attention, inputs, LENGTHS, scale=0.4, window=window)
    assert largest_difference(results, expected) < 1e-12
    assert len(calls.forwards) == len(calls.backwards) == 1


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"chunk": 2}], ids=str)
def test_a_pack_may_have_more_documents_than_tokens(options, monkeypatch):
    """The last pack of an epoch may be small, and a collator pads it with empty documents."""
    monkeypatch.setattr(flash, "CUDA_DTYPES", (torch.float64,))
    documents = [{"input_ids": [5] * n} for n in (3, 2)]
    results = []
    numbers_of_documents = []
    for collate in (PackedDataCollator(pad_documents_to_multiple_of=8), PackedDataCollator()):
        batch = collate(documents)
        pack = PackedForward(*(batch[name] for name in CU_SEQ_LENS), group=ALONE)
        numbers_of_documents.append(len(pack.cu_seq_lens_q) - 1)
        with StrictVarlen() as calls:
            results.append(outputs_and_gradients(attend_pack_on_cuda, random_inputs(5), pack, scale=0.4, **options))
        assert len(calls.forwards) == len(calls.backwards) == 1
    assert numbers_of_documents == [8, 2]
    assert largest_difference(*results) < 1e-12


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 20))
def test_chunks_of_documents_are_made_on_the_device(lengths, chunk):
    launch = one_launch(lengths)
    bounds_of_chunks, keys = _cut_launch_at_chunks(launch, sum(lengths), chunk).cu_seq_lens
    chunks = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
    assert [n for n in bounds_of_chunks.diff().tolist() if n] == chunks
    assert bounds_of_chunks.dtype == torch.int32
    assert bounds_of_chunks[-1] == sum(lengths)
    assert (bounds_of_chunks.diff() >= 0).all()
    assert torch.equal(bounds_of_chunks, keys)
    on_meta = launch._replace(
        cu_seq_lens=[bounds.to("meta") for bounds in launch.cu_seq_lens]
    )  # any read on the host raises
    assert _cut_launch_at_chunks(on_meta, sum(lengths), chunk).cu_seq_lens[0].shape == bounds_of_chunks.shape


def test_what_runs_on_flash_is_decided_without_a_look_at_the_device(monkeypatch):
    def runs_inference(head_dim=256, softcap=None, dropout=0.0):
        states = SimpleNamespace(device=torch.device("cuda"), shape=(1, 4, 9, head_dim))
        return varlen.runs_flash(states, states, softcap, dropout=dropout)

    monkeypatch.setattr(varlen, "cuda_varlen_problem", lambda: None)
    assert runs_inference()
    assert not runs_inference(head_dim=264)
    assert not runs_inference(softcap=50.0)
    assert not runs_inference(dropout=0.1)
    monkeypatch.setattr(varlen, "cuda_varlen_problem", lambda: "compute capability 7.5 is below 8.0")
    assert not runs_inference()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_sinks_and_softcap_outside_of_packs_need_memory_linear_in_their_tokens(masked, sinks):
    """Run alone, as the probe runs them, documents of thousands of tokens fit into memory: H x T x T weights would be
    10 GiB for 64 heads.
    """
    num_tokens = 600
    *states, logits = random_inputs(num_tokens, sinks=True)
    window = 20 if masked else None
    mask = visible_keys(num_tokens, num_tokens, window, device="cpu")[None, None] if masked else None
    softcap, sinks = (None, logits) if sinks else (5.0, None)
    with torch.no_grad(), LargestTensor() as largest:
        out, _ = varlen_attention(Layer().eval(), *states, mask, scaling=0.5, softcap=softcap, s_aux=sinks)
    expected = dense_attention(*states, [num_tokens], 0.5, window, softcap, sinks)
    assert largest_difference([out], [expected.transpose(1, 2)]) < 1e-12
    assert largest.numel <= 4 * kernels.MATH_TILE * (num_tokens + 1) < 4 * num_tokens**2


def test_fp32_queries_of_a_model_in_half_precision_are_cast(running_forward):
    """peft keeps norms in fp32; without autocast (DeepSpeed) the kernels would get fp32 queries and keys."""
    layer = Layer()
    layer.config = SimpleNamespace(dtype=torch.bfloat16)
    layer.proj = nn.Linear(8, 8, dtype=torch.bfloat16)
    query, key, value = random_inputs(T, dtype=torch.float32)

    def dtype_of_output(layer, value):
        return varlen_attention(layer, query, key, value, None)[0].dtype

    assert dtype_of_output(layer, value.bfloat16()) == torch.bfloat16
    layer.proj = nn.Linear(8, 8)
    layer.config._is_quantized = True
    assert dtype_of_output(layer, value.bfloat16()) == torch.bfloat16
    del layer.config._is_quantized
    assert dtype_of_output(layer, value) == torch.float32
    assert dtype_of_output(Layer(), value) == torch.float32  # no config and no projection to go by


def test_the_cuda_kernels_refuse_fp32():
    inputs = random_inputs(3, head_dim=64, dtype=torch.float32)
    with pytest.raises(KernelError, match=r"got torch.float32 on CUDA.*support bfloat16 and float16.*Set bf16=True"):
        attend_on_cuda(*inputs, [one_launch([3])], scale=1.0)


def wide_stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Stand for ffpa-attn's `ffpa_attn_varlen_func`, with its limits: (T, H, D) -> (T, H, D)."""
    lengths = cu_seqlens_q.diff().tolist()
    assert q.shape[-1] == v.shape[-1] >= 320
    assert q.shape[-1] % 64 == 0
    assert cu_seqlens_q.dtype == torch.int32
    assert k.data_ptr() != v.data_ptr()
    assert max_seqlen_q == max_seqlen_k >= max(lengths)
    assert options.pop("causal")
    assert options.pop("enable_gqa")
    states = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return attend_by_document(*states, lengths, scale=options.pop("softmax_scale"), **options)[0].transpose(0, 1)


@pytest.mark.parametrize("installed", [False, True], ids=["", "ffpa-attn"])
def test_gemma_4_is_flash_where_it_can_be(installed, tiny_model, monkeypatch):
    """On CUDA its full layers have wider heads than the kernels of torch take, its other layers do not."""
    take_path_of_cuda(monkeypatch)
    heads = set()

    def noting(attend):
        def called(query, *args, **options):
            heads.add((attend.__name__, query.shape[-1]))
            return attend(query, *args, **options)

        return called

    monkeypatch.setattr(varlen, "attend_on_cpu", noting(attend_by_document))
    for module in (varlen, kernels, choice):
        monkeypatch.setattr(module, "wide_kernel", lambda: noting(wide_stand_in) if installed else None)
    monkeypatch.setattr(choice, "is_flash_attn_2_available", lambda: True)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    sizes = {"head_dim": 8, "global_head_dim": 264, "num_kv_shared_layers": 0, "dtype": torch.bfloat16}
    model = tiny_model("gemma4_text", **sizes, **layers)
    message = "heads have up to 264 dimensions and the kernels take 256.*install ffpa-attn"
    with nullcontext() if installed else pytest.warns(UserWarning, match=message):
        packed = packed_model(model, torch.bfloat16, "cuda")
    with StrictVarlen() as calls:
        report = packed.prove(model)
    assert packed.is_proved, report.summary()
    assert not packed.repaired, report.summary()
    assert report.max_gradient == 0, report.summary()
    assert packed.attention.name == varlen.ATTENTION_NAME
    assert packed.attention.is_flash is installed
    assert ("ffpa-attn for wider heads without a window" in packed.attention.reason) is installed
    # The layer with windows is on torch's kernels
    assert calls.forwards
    assert heads == {("wide_stand_in", 320) if installed else ("attend_by_document", 264)}


def test_wide_heads_with_other_features_run_document_by_document(monkeypatch):
    monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "wide_kernel", lambda: wide_stand_in)
    plain = {"window": None, "sinks": None, "softcap": None, "dropout": 0.0, "scale": 1.0}
    states = torch.zeros(1, 2, 4, 512, dtype=torch.bfloat16)
    assert varlen._runs_wide(states, states, plain)
    assert not varlen._runs_wide(states.float(), states.float(), plain)
    assert not varlen._runs_wide(states[..., :256], states[..., :256], plain)
    for feature in ({"window": 3}, {"sinks": torch.zeros(2)}, {"softcap": 5.0}, {"dropout": 0.1}):
        assert not varlen._runs_wide(states, states, plain | feature)


def test_keys_may_be_the_values_of_wide_heads(monkeypatch):
    monkeypatch.setattr(kernels, "wide_kernel", lambda: wide_stand_in)
    query, key, _ = random_inputs(T, head_dim=320)
    out = kernels.attend_wide(query, key, key, BOUNDS, max(LENGTHS), 0.1)
    assert largest_difference([out], [attend_by_document(query, key, key, LENGTHS, scale=0.1)]) < 1e-12


# The attention function: when a call is packed, and where its boundaries come from


class Layer(nn.Module):
    is_causal = True
    num_key_value_groups = 2


BOUNDS = bounds_of(LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
FROM_KWARGS = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 200, "max_length_k": 200}


@pytest.fixture
def running_forward():
    with packed_forward_entered(PackedForward(**FROM_KWARGS, group=ALONE)):
        yield


def test_boundaries_are_taken_from_any_source():
    query, key, value = random_inputs(T)
    expected = dense_attention(query, key, value, LENGTHS, 8**-0.5).transpose(1, 2)

    def check(layer, **kwargs):
        out, weights = varlen_attention(layer, query, key, value, None, **kwargs)
        assert weights is None
        assert out.is_contiguous()
        assert largest_difference([out], [expected]) < 1e-12

    for kwargs in (FROM_KWARGS, {"cu_seq_lens_q": BOUNDS}, {"position_ids": POSITIONS}):
        check(Layer(), **kwargs)
    check(Layer().eval(), cu_seq_lens_q=BOUNDS)
    with packed_forward_entered(PackedForward(**FROM_KWARGS, group=ALONE)):
        check(Layer())
        check(Layer().eval())


def test_autocast_decides_the_dtype():
    query, key, value, sinks = random_inputs(T, sinks=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({}, {"s_aux": sinks}, {"sliding_window": 5}, {"softcap": 3.0}):
            out, _ = varlen_attention(Layer(), query, key.bfloat16(), value, None, cu_seq_lens_q=BOUNDS, **options)
            assert out.dtype == torch.bfloat16, options


QUERY, KEY, VALUE = random_inputs(T)
CALL = {"query": QUERY, "key": KEY, "value": VALUE, "attention_mask": None}
LONG = [F.pad(states, (0, 0, 5, 0)) for states in (KEY, VALUE)]
TWO_ROWS = [states.expand(2, -1, -1, -1) for states in (QUERY, KEY, VALUE)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (FROM_KWARGS | {"attention_mask": torch.ones(1, T)}, r"of shape \(1, 281\).*would be ignored.*Feed one packed"),
        (
            FROM_KWARGS | dict(zip(CALL, TWO_ROWS, strict=False)),
            r"got 2 rows.*which one is unknown.*Feed one packed row",
        ),
        (FROM_KWARGS | {"key": LONG[0], "value": LONG[1]}, r"got 281 queries and 286 keys.*cache.*Feed one packed row"),
        (
            FROM_KWARGS | {"is_causal": False},
            r"is not causal.*causal attention only.*set_attn_implementation\('sdpa'\)",
        ),
        (
            FROM_KWARGS | {"position_bias": torch.zeros(1, 4, T, T)},
            r"position_bias of .*does not support a bias.*'eager'",
        ),
        ({}, r"281 tokens and no document boundaries.*never assumes a single document.*Feed one"),
        ({"cu_seq_lens_q": BOUNDS[:-1]}, r"\[0, 1, 71\]\.\.\.\[280\] for a pack of 281.*increasing"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 5, T])}, r"exactly one document.*Set it to \[0, first"),
        ({"position_ids": POSITIONS + 1}, r"position_ids of shape \(1, 281\).*do not count 0, 1, 2"),
        ({"position_ids": torch.arange(T)[None]}, r"281 tokens.*never restart.*never assumes.*Feed one"),
        ({"position_ids": POSITIONS[:, ::2]}, r"position_ids of shape \(1, 141\)"),
    ],
    ids=lambda x: next(reversed(x), "nothing") if isinstance(x, dict) else "",
)
def test_a_packed_call_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        varlen_attention(Layer(), **CALL | arguments)


def test_boundaries_on_a_device_come_from_all_four_or_from_positions():
    with pytest.raises(ValueError, match=r"cu_seq_lens_q but not all of.*wait for the device.*Pass all four"):
        _pack_of({"cu_seq_lens_q": BOUNDS}, None, T, stays_on_device=True)
    for source in (FROM_KWARGS, {"position_ids": POSITIONS}):
        pack = _pack_of(source, None, T, stays_on_device=True)
        assert torch.equal(pack.cu_seq_lens_q, BOUNDS)
        assert pack.cu_seq_lens_k.dtype == torch.int32
        assert (pack.max_length_q, pack.max_length_k) == (200, 200)


def test_boundaries_of_packs_do_not_come_from_positions(tiny_model, monkeypatch):
    """transformers wants to stop reading them from positions (dev/upcoming.md)."""
    model = tiny_model("mistral")
    attend_packs(model)
    pack = PackedDataCollator()([{"input_ids": torch.arange(3, n)} for n in (40, 9, 25)])
    expected = model(**pack).logits
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    monkeypatch.setattr(varlen, "_lengths_from_positions", None)
    assert torch.equal(model(**pack).logits, expected)
    with pytest.raises(TypeError):
        model(input_ids=pack["input_ids"], position_ids=pack["position_ids"])


# The mask function


def test_mask_is_sdpas_outside_and_none_inside(running_forward):
    common = {"mask_function": causal_mask_function, "allow_is_causal_skip": False}
    assert varlen_mask(1, 5, 5, **common) is None
    running = this_thread.packed_forwards.pop()
    try:
        assert torch.equal(varlen_mask(2, 5, 5, **common), sdpa_mask(2, 5, 5, **common))
        padding = torch.tensor([[False, True, True], [True, True, True]])
        expected = sdpa_mask(2, 3, 3, attention_mask=padding, mask_function=causal_mask_function)
        assert torch.equal(varlen_mask(2, 3, 3, attention_mask=padding, mask_function=causal_mask_function), expected)
        assert varlen_mask(1, 5, 5, mask_function=causal_mask_function) is None  # as sdpa, which then uses is_causal
    finally:
        this_thread.packed_forwards.append(running)
    for wrong in ({"batch_size": 2}, {"kv_length": 9}):
        with pytest.raises(ValueError, match=r"rows?, 5 queries and \d keys.*without padding or cache.*Feed one"):
            varlen_mask(**{"batch_size": 1, "q_length": 5, "kv_length": 5, **common, **wrong})
    for own_mask in ({"attention_mask": torch.ones(1, 5)}, {"use_vmap": True}):
        with pytest.raises(OwnMaskError, match=r"mask.*on a pack of 5 tokens.*would lose it.*Feed one") as raised:
            varlen_mask(1, 5, 5, **own_mask, **common)
        assert raised.value.may_only_hide
        this_thread.packed_forwards[-1] = dataclasses.replace(running, ignores_masks=True)
        assert varlen_mask(1, 5, 5, **own_mask, **common) is None
        this_thread.packed_forwards[-1] = running


def test_attention_is_not_compiled_anew_for_other_documents():
    """Under `torch.compile` only the second pack, by which it learns what changes, may add graphs."""

    def attend(states, bounds):
        return attend_on_cpu(2 * states, states, states, bounds.diff().tolist(), scale=0.5) + 1

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attend, backend="eager")
    graphs = []
    for lengths in ([9, 23], [7, 3, 15, 2, 5], [30, 1, 1], [5, 6, 7, 8, 2, 3, 1]):
        states = torch.randn(1, 2, 32, 8)
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        assert torch.equal(compiled(states, bounds), attend(states, bounds))
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[-1]
