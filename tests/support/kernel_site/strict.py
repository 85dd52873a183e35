"""What the kernels of hybrid models accept, refuse and compute, in plain torch on the CPU.

causal_conv1d 1.7, flash-linear-attention 0.6 (`fla`), mamba_ssm 2.3. With this folder on `sys.path` transformers finds
all three packages and runs its path with kernels. The functions beside this file have the signatures of the packages.

- A call that a kernel refuses raises here, too: dtypes, layouts, shapes, `seq_idx` that is not int32, several rows with
  `cu_seqlens`, heads of more than 256 dimensions (csrc/causal_conv1d.cpp, fla/ops/*/chunk.py, ssd_combined.py).
- What a GPU would compute wrongly without an error is a line in `silent`: boundaries that do not cover the tokens.
- `calls` counts calls by kernel and by the boundaries that it got, so that a test can see that this code ran.

Scans run token by token, so they share nothing with the chunked algorithms of transformers and of the kernels.

Limits: it shows that calls are right, and nothing of what happens in a kernel: no rounding, memory, speed or streams.
"""

from collections import Counter

import torch
import torch.nn.functional as F

# A test may add float64, in which it can tell a leak from rounding. The kernels have none.
dtypes = {torch.float32, torch.float16, torch.bfloat16}
calls: Counter[str] = Counter()
silent: list[str] = []
# The kernel of the convolution wants strides of 16 bytes, which tiny models do not have. A test may switch it off.
options = {"aligned": True}


def check(holds, message):
    if not holds:
        raise RuntimeError(message)


def count(kernel, **boundaries):
    names = [name for name, value in boundaries.items() if value is not None]
    calls[f"{kernel}({', '.join(names)})"] += 1


def wide(*tensors):
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.to(dtype) for x in tensors]


def documents(num_tokens, cu_seqlens=None, seq_idx=None):
    """Return the number of the document of each token, (T,)."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            silent.append(f"cu_seqlens {bounds[:4]} ... {bounds[-1]} do not cover {num_tokens} tokens")
        return torch.bucketize(torch.arange(num_tokens), cu_seqlens[1:].long(), right=True).tolist()
    if seq_idx is not None:
        return seq_idx[0].tolist()
    return [0] * num_tokens


def convolution(x, weight, bias, seq_idx, initial_states, activation):
    """x (B, D, T), weight (D, W): y[t] = sum over w of weight[:, w] x[t - (W - 1) + w], within a document."""
    num_tokens = x.shape[2]
    width = weight.shape[1]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states
    padded, weight = wide(torch.cat([before, x], dim=2), weight)
    out = 0
    for w in range(width):
        back = width - 1 - w
        term = padded[:, :, w : w + num_tokens] * weight[:, w, None]
        if seq_idx is not None and back:
            term = term * (F.pad(seq_idx, (back, 0), value=-1)[:, :num_tokens] == seq_idx)[:, None]
        out = out + term
    if bias is not None:
        out = out + bias[:, None]
    return (F.silu(out) if activation in ("silu", "swish") else out).to(x.dtype)


def delta_rule(query, key, value, g, beta, scale, initial_state, cu_seqlens, normalise):
    """query, key (B, T, G, K), value (B, T, H, V); g (B, T, H) decays the state, (B, T, H, K) each of its rows.

    Returns the output and the last state of each document, (N, H, K, V).
    """
    rows, num_tokens, num_keys, width = query.shape
    heads, depth = value.shape[2:]
    query, key, value, g, beta = wide(query, key, value, g, beta)
    if normalise:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(heads // num_keys, dim=2) for x in (query * scale, key))
    decay = g.exp()[..., None, None] if g.dim() == 3 else g.exp()[..., None]
    numbers = documents(num_tokens, cu_seqlens)
    states = {}
    outs = []
    for t, number in enumerate(numbers):
        if number not in states:
            one = slice(None) if cu_seqlens is None else slice(number, number + 1)
            none = query.new_zeros(rows, heads, width, depth)
            states[number] = none if initial_state is None else initial_state[one].to(query.dtype)
        state = states[number] * decay[:, t]
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = (value[:, t] - known) * beta[:, t, :, None]
        states[number] = state + key[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", states[number], query[:, t]))
    return torch.stack(outs, dim=1), torch.cat(list(states.values()))


def scan_chunks(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit):
    """Mamba-2: x (b, T, h, p), dt (b, T, h), A (h,), B, C (b, T, groups, n).

    As in the kernel, a decay is a difference of sums over all tokens before, also those of other documents.
    """
    dtype = x.dtype
    heads = x.shape[2]
    x, dt, A, B, C = wide(x, dt, A, B, C)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (y.repeat_interleave(heads // y.shape[2], dim=2) for y in (B, C))
    sums = (dt * A).cumsum(dim=1)
    decay = (sums - F.pad(sums, (0, 0, 1, 0))[:, :-1]).exp()
    add = torch.einsum("bthp,bthn->bthpn", x * dt[..., None], B)
    numbers = documents(x.shape[1], seq_idx=seq_idx)
    none = x.new_zeros(x.shape[0], heads, x.shape[3], B.shape[3])
    state = none if initial_states is None else initial_states.to(x.dtype)
    outs = []
    for t, number in enumerate(numbers):
        if t and number != numbers[t - 1]:
            state = none
        state = state * decay[:, t, :, None, None] + add[:, t]
        outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    out = torch.stack(outs, dim=1)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        out = out * F.silu(z.to(out.dtype))
    return out.to(dtype), state
