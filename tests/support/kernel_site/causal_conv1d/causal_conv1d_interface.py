"""The functions of causal_conv1d with their signatures, and the checks of csrc/causal_conv1d.cpp."""

import strict
import torch
from strict import check


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    strict.count("causal_conv1d_fn", seq_idx=seq_idx, initial_states=initial_states)
    if activation not in [None, "silu", "swish"]:
        raise NotImplementedError("activation must be None, silu, or swish")
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    check({x.dtype, weight.dtype} <= strict.dtypes, f"input has {x.dtype}, weight {weight.dtype}")
    rows, channels, num_tokens = x.shape
    width = weight.shape[-1]
    check(weight.shape == (channels, width), "weight must have shape (dim, width)")
    channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if channel_last and strict.options["aligned"]:
        check(channels % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now")
        strides_fit = x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
        check(strides_fit, "causal_conv1d with channel last layout requires strides to be multiples of 8")
    check(2 <= width <= 4, "causal_conv1d only supports width between 2 and 4")
    check(bias is None or (bias.dtype == weight.dtype and bias.shape == (channels,)), "bias must have shape (dim)")
    if seq_idx is not None:
        check(channel_last, "seq_idx is only supported for channel last layout")
        check(seq_idx.dtype == torch.int32, "seq_idx.scalar_type() == torch::kInt32")
        check(seq_idx.shape == (rows, num_tokens), "seq_idx must have shape (batch_size, seqlen)")
    if initial_states is not None:
        check(channel_last, "initial_states is only supported for channel last layout")
        check(
            initial_states.shape == (rows, channels, width - 1),
            "initial_states must have shape (batch, dim, width - 1)",
        )
    assert not return_final_states, "the stand-in returns no final states"
    assert final_states_out is None, "the stand-in returns no final states"
    return strict.convolution(x, weight, bias, seq_idx, initial_states, activation)


def causal_conv1d_update(*args, **options):
    """For generation only; training must not reach it."""
    raise AssertionError("a training reached causal_conv1d_update, which is for generation")
