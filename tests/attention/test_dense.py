"""One long document on dense causal attention: the same result, and only where it is faster.

On a CPU torch's own kernel of `scaled_dot_product_attention` stands in for cuDNN, and `StrictVarlen` for the
FlashAttention-2 kernels.
"""

from functools import partial

import pytest
import torch
from support.attention import outputs_and_gradients, pack_alone, random_inputs
from support.strict_varlen import StrictVarlen

from trl_packfix.attention import dense, flash
from trl_packfix.attention.kernels import attend_on_cpu
from trl_packfix.attention.runs import attend_pack_on_cuda

LENGTH = 40
SCALE = 0.3


@pytest.fixture
def kernels(monkeypatch):
    """Take 40 tokens for a long document, whose dense attention was measured to be faster."""
    monkeypatch.setattr(dense, "LONG_DOCUMENT", LENGTH)
    monkeypatch.setattr(dense, "is_faster", lambda *args: True)
    monkeypatch.setattr(dense, "measured", {})
    monkeypatch.setattr(flash, "CUDA_DTYPES", (torch.float64,))
    with StrictVarlen() as strict:
        yield strict


def states_of(length=LENGTH):
    return random_inputs(length, head_dim=16)


@pytest.mark.parametrize("window", [None, LENGTH], ids=["no window", "a window that limits nothing"])
def test_a_long_document_is_computed_densely_and_equals_the_reference(kernels, window):
    states = states_of()
    results = outputs_and_gradients(attend_pack_on_cuda, states, pack_alone([LENGTH]), scale=SCALE, window=window)
    expected = outputs_and_gradients(attend_on_cpu, states, [LENGTH], scale=SCALE)
    assert kernels.forwards == []
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).norm() < 1e-13 * reference.norm()


CASES = {
    "two documents": ([LENGTH - 3, 3], {}),
    "a short document": ([LENGTH - 1], {}),
    "a window": ([LENGTH], {"window": 7}),
    "sinks": ([LENGTH], {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)}),
    "chunks": ([LENGTH], {"chunk": 9}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_packs_compute_everything_else(case, kernels):
    lengths, options = CASES[case]
    attend_pack_on_cuda(*states_of(sum(lengths)), pack_alone(lengths), scale=SCALE, **options)
    assert len(kernels.forwards) == 1


def test_tensors_with_offsets_beyond_32_bits_stay_on_the_kernels_of_packs(kernels, monkeypatch):
    monkeypatch.setattr(dense, "MAX_ELEMENTS", 4 * LENGTH * 16 - 1)
    attend_pack_on_cuda(*states_of(), pack_alone([LENGTH]), scale=SCALE)
    assert len(kernels.forwards) == 1


def test_deterministic_runs_do_not_choose_by_time(kernels):
    torch.use_deterministic_algorithms(True)
    try:
        attend_pack_on_cuda(*states_of(), pack_alone([LENGTH]), scale=SCALE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kernels.forwards) == 1


def test_a_kind_of_heads_is_measured_once(kernels, monkeypatch):
    """Measure outside of the graph of the call and of the modes of the calling thread."""
    calls = []

    def is_faster(dense_attend, on_flash, states):
        calls.append([tuple(x.shape) for x in states])
        assert not any(x.requires_grad for x in states)
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        return False

    monkeypatch.setattr(dense, "is_faster", is_faster)
    monkeypatch.setattr(dense, "MEASURED_TOKENS", 24)
    for length in (LENGTH, LENGTH + 8):
        attend_pack_on_cuda(*states_of(length), pack_alone([length]), scale=SCALE)
    assert calls == [[(1, 4, 24, 16), (1, 2, 24, 16), (1, 2, 24, 16)]]
    assert len(kernels.forwards) == 2


def test_heads_with_other_values_are_measured_by_themselves(kernels, monkeypatch):
    calls = []
    monkeypatch.setattr(dense, "is_faster", lambda dense_attend, on_flash, states: calls.append(states) or False)
    query, key, value = states_of()
    for values in (value, value[..., :8], value):
        attend_pack_on_cuda(query, key, values, pack_alone([LENGTH]), scale=SCALE)
    assert [states[2].shape[-1] for states in calls] == [16, 8]


def test_gradients_of_nan_are_wrong(monkeypatch):
    class NanGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, states):
            return states.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    now = [0.0]
    monkeypatch.setattr(dense, "_time_when_finished", lambda device: now[0])

    def attend_on_flash(*states):
        now[0] += 1
        return dense.attend_dense(*states, scale=SCALE)

    def attend_with_nan(query, key, value):
        return dense.attend_dense(query, key, NanGradient.apply(value), scale=SCALE)

    states = [x.detach() for x in states_of()]
    assert dense.is_faster(partial(dense.attend_dense, scale=SCALE), attend_on_flash, states), "only NaN may be wrong"
    assert not dense.is_faster(attend_with_nan, attend_on_flash, states)


def raising(*states):
    raise RuntimeError("No available kernel")


@pytest.mark.parametrize(
    "dense_takes, flash_takes, factor, expected",
    [(1.0, 2.0, 1.0, True), (2.0, 1.0, 1.0, False), (1.0, 2.0, 1.1, False)],
    ids=["faster", "slower", "faster and wrong"],
)
def test_dense_attention_is_taken_if_it_is_faster_and_right(dense_takes, flash_takes, factor, expected, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(dense, "_time_when_finished", lambda device: now[0])

    def attend(seconds, scale):
        def timed(*states):
            now[0] += seconds
            return scale * dense.attend_dense(*states, scale=SCALE)

        return timed

    states = [x.detach() for x in states_of()]
    assert dense.is_faster(attend(dense_takes, factor), attend(flash_takes, 1.0), states) is expected


def test_heads_that_cudnn_does_not_take_stay_on_the_kernels_of_packs():
    states = [x.detach() for x in states_of()]
    assert dense.is_faster(raising, lambda *x: dense.attend_dense(*x, scale=SCALE), states) is False
