"""The functions below the autograd function, which mamba_ssm's fused kernel calls."""

import torch

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

causal_conv1d_update_function = causal_conv1d_update


def causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation):
    activation = "silu" if silu_activation else None
    return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, False, final_states_out, activation)


def causal_conv1d_bwd_function(
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu_activation
):
    assert initial_states is None
    assert dfinal_states is None
    assert not return_dinitial_states
    inputs = [x, weight] if bias is None else [x, weight, bias]
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = causal_conv1d_fwd_function(
            *leaves[:2], None if bias is None else leaves[2], seq_idx, None, None, silu_activation
        )
        gradients = torch.autograd.grad(out, leaves, dout)
    if dx is not None:  # where the caller wants it
        gradients = (dx.copy_(gradients[0]), *gradients[1:])
    return (*gradients, *[None] * (4 - len(gradients)))
