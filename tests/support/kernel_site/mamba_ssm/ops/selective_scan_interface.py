"""The functions of Mamba-1 with their signatures. None takes boundaries."""

import strict
import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """u, delta, z (b, d, T), A (d, n), B, C (b, n, T), D, delta_bias (d,)."""
    strict.count("selective_scan_fn")
    dtype = u.dtype
    u, delta, A, B, C = strict.wide(u, delta, A, B, C)
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    decay = torch.exp(torch.einsum("bdt,dn->bdtn", delta, A))
    add = torch.einsum("bdt,bnt,bdt->bdtn", delta, B, u)
    state = u.new_zeros(*u.shape[:2], A.shape[1])
    outs = []
    for t in range(u.shape[2]):
        state = decay[:, :, t] * state + add[:, :, t]
        outs.append(torch.einsum("bdn,bn->bd", state, C[:, :, t]))
    out = torch.stack(outs, dim=2)
    out = out if D is None else out + u * D[:, None]
    out = (out if z is None else out * F.silu(z.to(out.dtype))).to(dtype)
    return (out, state) if return_last_state else out


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None,
    D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
    b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
):  # fmt: skip
    strict.count("mamba_inner_fn")
    assert B is None
    assert C is None
    rank = delta_proj_weight.shape[1]
    width = A.shape[-1]
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    dt, B, C = F.linear(x.transpose(1, 2), x_proj_weight).split([rank, width, width], dim=-1)

    def norm(y, weight):
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + b_c_dt_rms_eps)
        return y if weight is None else y * scale * weight[: y.shape[-1]]

    dt = norm(dt, dt_rms_weight)
    B = norm(B, b_rms_weight)
    C = norm(C, c_rms_weight)
    delta = (dt @ delta_proj_weight.t()).transpose(1, 2)
    out = selective_scan_fn(x, delta, A, B.transpose(1, 2), C.transpose(1, 2), D, z, delta_bias, delta_softplus)
    return F.linear(out.transpose(1, 2), out_proj_weight, out_proj_bias)
