"""The functions of Mamba-2 with their signatures, and the checks of ssd_combined.py."""

from math import inf

import strict
import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    strict.count("mamba_chunk_scan_combined", seq_idx=seq_idx, cu_seqlens=cu_seqlens, initial_states=initial_states)
    rows, num_tokens, heads, width = x.shape
    groups, depth = B.shape[2:]
    assert heads % groups == 0
    assert B.shape == C.shape == (rows, num_tokens, groups, depth)
    assert dt.shape == (rows, num_tokens, heads)
    assert A.shape == (heads,)
    assert D is None or D.shape in ((heads, width), (heads,))
    assert seq_idx is None or seq_idx.shape == (rows, num_tokens)
    assert initial_states is None or initial_states.shape == (rows, heads, width, depth)
    assert cu_seqlens is None, "the stand-in has no states of documents"
    assert not return_varlen_states, "the stand-in has no states of documents"
    out, state = strict.scan_chunks(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit)
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, inf), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    strict.count("mamba_split_conv1d_scan_combined", seq_idx=seq_idx, initial_states=initial_states)
    assert activation in [None, "silu", "swish"]
    assert not return_final_states
    heads = D.shape[0]
    dim = heads * (headdim if D.dim() == 1 else D.shape[1])
    depth = (conv1d_weight.shape[0] - dim) // ngroups // 2
    sizes = [dim, dim + 2 * ngroups * depth, heads]
    assert zxbcdt.shape[-1] == sum(sizes)
    assert conv1d_weight.shape[0] == sizes[1]
    assert dt_bias.shape == A.shape == (heads,)
    z, xBC, dt = torch.split(zxbcdt, sizes, dim=-1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation)
    x, B, C = torch.split(xBC.transpose(1, 2), [dim, ngroups * depth, ngroups * depth], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    B, C = (y.unflatten(-1, (ngroups, -1)) for y in (B, C))
    gate = None if rmsnorm_weight is not None else z.unflatten(-1, (heads, -1))
    out, _ = strict.scan_chunks(x, dt, A, B, C, D, gate, dt_bias, initial_states, seq_idx, True, dt_limit)
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        y, z = strict.wide(out, z)
        dtype = out.dtype
        y = y if norm_before_gate else y * F.silu(z)
        y = y.unflatten(-1, (ngroups, -1))  # the norm of each group
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + rmsnorm_eps)).flatten(2) * rmsnorm_weight
        out = (y * F.silu(z) if norm_before_gate else y).to(dtype)
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)
