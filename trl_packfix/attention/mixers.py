"""Recurrent mixers in packs: convolutions and scans that start anew in each document, also over ranks.

The mixers of hybrid models (Mamba, gated delta nets, Kimi's delta attention, short convolutions) call functions by name
in their modeling module: a short convolution and a scan. `compat.ReplacedFunctions` replaces these names while packs
run, and puts them back after each forward. What replaces them reads the boundaries of the running forward, as
`packfix_varlen` does. It calls the function that was there, so transformers' choice between a kernel and torch stays.

No interface of transformers reaches these functions: `use_kernel_func_from_hub_with_fallback` keeps what it found at
import in a closure, and `kernelize` takes repositories of the Hub only, for the life of a model. A name that is not
found is no error: its module leaks, and the leak probe finds and repairs it.

    convolution  a kernel that takes boundaries (`seq_idx`) gets them. For every other, and over ranks, each document
                 gets the W - 1 tokens before it (zeros, or rows of the part before or of the prefix), laid end to end
    scan         a kernel that takes boundaries (`cu_seqlens`, `seq_idx`) gets them. Every other gets documents as
                 rows of right-padded batches. Over ranks, tokens are exchanged for heads as in attention. Where
                 documents share prefixes, the pieces of one level run together (`mixer_prefixes.py`)
    fused        convolution, scan and output projection in one: only where nothing of it would be lost

T tokens of the pack, s ranks that share it, C channels, W width of the convolution, H heads of values, G heads of keys.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ..compat import ReplacedFunctions, kernel_package
from .exchange import HeadExchange, exchange_halo
from .mixer_prefixes import ScanCall, run_levels
from .packed_forward import PackedForward, once_per_pack, running_pack
from .rows import TensorAxes

# What a mixer may give its kernels as boundaries: dropped, as those of the running forward are used
MIXER_BOUNDARIES = ("cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
AXES_OF_TOKENS = TensorAxes((1,), 0)  # of (rows, tokens, ...)


def run_scan(scan: ScanCall, running: PackedForward) -> Tensor:
    """Run the scan on each document of the pack: (1, T / s, H, D)."""
    exchange = None
    if running.degree > 1:
        exchange = HeadExchange(scan.values[0].shape[2], scan.keys[0].shape[2], running.degree)
        states = [*scan.values, *scan.keys]
        num_values = len(scan.values)
        for dtype in dict.fromkeys(x.dtype for x in states):  # such as fp32 for the decay, beside values in bf16
            chosen = [i for i, x in enumerate(states) if x.dtype == dtype]
            first_key = sum(i < num_values for i in chosen)
            by_head = [states[i].transpose(1, 2) for i in chosen]
            for i, x in zip(chosen, exchange.to_heads(by_head[:first_key], by_head[first_key:]), strict=True):
                states[i] = x.transpose(1, 2)
        parameters = [None if parameter is None else parameter[exchange.heads] for parameter in scan.parameters]
        scan = scan._replace(values=states[:num_values], keys=states[num_values:], parameters=parameters)
    if running.kv_index is not None:
        out = run_levels(scan, running)
    elif scan.boundaries is not None:
        boundaries = _boundary_tensor(running, scan.boundaries, scan.values[0].shape[1])
        out = scan.call(scan.values, scan.keys, scan.parameters, **{scan.boundaries: boundaries})
    else:
        rows = running.document_rows(running.num_tokens)
        outs = []
        for group in rows.groups:
            values, keys = ([group.split(x, AXES_OF_TOKENS) for x in states] for states in (scan.values, scan.keys))
            outs.append(scan.call(values, keys, scan.parameters))
        out = rows.join(outs, AXES_OF_TOKENS)
    return out if exchange is None else exchange.to_tokens(out.transpose(1, 2))


@once_per_pack
def _boundary_tensor(running: PackedForward, name: str, num_tokens: int) -> Tensor:
    """`cu_seqlens`, or `seq_idx` (1, T): the number of the document of each token. The same tensor in each layer.

    flash-linear-attention finds what it derived from boundaries by the identity of the tensor.
    """
    bounds = running.cu_seq_lens_q
    if name == "cu_seqlens":
        return bounds
    numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    # with the size of the output the host does not wait for the device
    return torch.repeat_interleave(numbers, bounds.diff(), output_size=num_tokens)[None]


def _seq_idx(inner: Callable[..., Any], running: PackedForward, num_tokens: int) -> dict[str, Tensor]:
    """The argument `seq_idx` of a kernel that takes it, where it says all: no row of a document is elsewhere."""
    says_all = running.degree == 1 and running.kv_index is None and _takes_argument(inner, "seq_idx")
    return {"seq_idx": _boundary_tensor(running, "seq_idx", num_tokens)} if says_all else {}


# ---- The convolution


def convolve_documents(
    inner: Callable[..., Any],
    running: PackedForward,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """A causal convolution per channel: (1, C, T / s), weight (C, W) -> (1, C, T / s)."""
    call = partial(inner, weight=weight, bias=bias, activation=activation, **_without_boundaries(options))
    rows = states.transpose(1, 2)  # (1, T / s, C)
    if seq_idx := _seq_idx(inner, running, rows.shape[1]):
        # The kernel takes boundaries only where the channels of a token are neighbours
        return call(rows.contiguous().transpose(1, 2) if states.stride(1) != 1 else states, **seq_idx)
    width = weight.shape[-1]
    if running.degree > 1 and running.kv_index is not None:
        raise ValueError(
            f"A part of a pack on {running.degree} ranks whose documents share prefixes came to a convolution of "
            f"{width} tokens. The rows before a run may lie in any part, and ranks exchange only the last ones of "
            'each. Set `tokens_per_rank=None`, or `share_prefixes="off"`.'
        )
    zeros = rows.new_zeros(1, 1, rows.shape[2])
    halo = exchange_halo(rows, width - 1, running.degree)
    source, places = _rows_with_context(running, width, rows.shape[1])
    laid_out = torch.cat([zeros, halo, rows], dim=1).index_select(1, source)
    return call(laid_out.transpose(1, 2)).transpose(1, 2).index_select(1, places).transpose(1, 2)


@once_per_pack
def _rows_with_context(running: PackedForward, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows with the W - 1 tokens before each document, end to end, and where each row of this part is among them.

    The first tensor has places in: a row of zeros, the W - 1 last rows of the part before, the rows of this part. The
    second is (T / s,).
    """
    bounds = running.cu_seq_lens_q.long()
    keys = running.cu_seq_lens_k.long()
    first = running.index * num_rows
    steps = torch.arange(num_rows, device=bounds.device)
    tokens = steps + first
    document = torch.bucketize(tokens, bounds[1:], right=True)
    places = steps + (document - document[:1] + 1) * (width - 1)
    source = torch.zeros(num_rows + (len(bounds) - 1) * (width - 1), dtype=torch.int64, device=bounds.device)
    for back in range(width):
        earlier = keys[document + 1] - bounds[document + 1] + tokens - back
        is_own = earlier >= keys[document]
        if running.kv_index is not None:
            earlier = running.kv_index[earlier.clamp(min=0)]
        source[places - back] = torch.where(is_own, earlier - first + width, 0)
    return source, places


# ---- The scans


def scan_delta(
    inner: Callable[..., Any],
    running: PackedForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """A gated delta rule: query, key (1, T, G, K), value (1, T, H, V), g (1, T, H) or (1, T, H, K), beta (1, T, H)."""
    options = _without_boundaries(options) | {"initial_state": None, "output_final_state": False}

    def call(values: list[Tensor], keys: list[Tensor], parameters: Sequence[Any], **more: Any) -> Any:
        value, g, beta = values
        out = inner(*keys, value, g=g, beta=beta, **options | more)
        return out if more.get("output_final_state") else out[0]

    name = "cu_seqlens" if _takes_argument(inner, "cu_seqlens") else None
    scan = ScanCall([value, g, beta], [query, key], [], call, name, ("initial_state", "output_final_state"))
    return run_scan(scan, running), None


def scan_chunks(
    inner: Callable[..., Any],
    running: PackedForward,
    states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Tensor:
    """Mamba-2: states (1, T, H, P), dt (1, T, H), B, C (1, T, G, N), A, D, dt_bias (H,)."""
    options = _without_boundaries(options) | {"initial_states": None, "return_final_states": False}
    D, z, dt_bias = (options.pop(name, None) for name in ("D", "z", "dt_bias"))
    if running.kv_index is not None:  # the kernel may change steps no more: one of 0 leaves a state as it is
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))  # as the kernels, which add them up
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (softplus(dt) if options.get("dt_softplus") else dt).clamp(*options.get("dt_limit", (0.0, inf)))
        dt_bias = None
        options = options | {"dt_softplus": False, "dt_limit": (0.0, inf)}

    def call(values: list[Tensor], keys: list[Tensor], parameters: Sequence[Any], **more: Any) -> Any:
        states, dt, *gate = values
        A, D, dt_bias = parameters
        per_head = {"D": D, "z": gate[0] if gate else None, "dt_bias": dt_bias}
        return inner(states, dt, A, *keys, **per_head, **options | more)

    values = [states, dt, *([] if z is None else [z])]
    name = "seq_idx" if _takes_argument(inner, "seq_idx") else None
    names = ("initial_states", "return_final_states")
    return run_scan(ScanCall(values, [B, C], [A, D, dt_bias], call, name, names), running)


def scan_channels(
    inner: Callable[..., Any],
    running: PackedForward,
    states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Tensor | tuple[Tensor, None]:
    """Mamba-1: states, dt, z (1, C, T), A (C, N), B, C (1, N, T), D, delta_bias (C,). Each channel is a head.

    No kernel takes boundaries, so documents are rows.
    """
    options = _without_boundaries(options)
    D, z, bias, returns_state = (options.pop(name, None) for name in ("D", "z", "delta_bias", "return_last_state"))
    gate = [] if z is None else [z.transpose(1, 2)]

    def call(values: list[Tensor], keys: list[Tensor], parameters: Sequence[Any]) -> Tensor:
        states, dt, *gate = (x.transpose(1, 2) for x in values)
        B, C = (x[:, :, 0].transpose(1, 2) for x in keys)
        A, D, bias = parameters
        per_channel = {"D": D, "z": gate[0] if gate else None, "delta_bias": bias}
        return inner(states, dt, A, B, C, **per_channel, **options).transpose(1, 2)[..., None]

    values = [states.transpose(1, 2), dt.transpose(1, 2), *gate]
    keys = [x.transpose(1, 2)[:, :, None] for x in (B, C)]
    out = run_scan(ScanCall(values, keys, [A, D, bias], call), running)
    out = out[..., 0].transpose(1, 2)
    return (out, None) if returns_state else out


def run_fused(inner: Callable[..., Any], running: PackedForward, *args: Any, **options: Any) -> Tensor | None:
    """Convolution, scan and output projection in one kernel; None makes the mixer run them one by one.

    An adapter on the projection would have no effect, as the kernel gets its weights, which are then frozen.
    """
    weight = options.get("outproj_weight")
    seq_idx = _seq_idx(inner, running, args[0].shape[1])
    if not seq_idx or weight is None or not weight.requires_grad:
        return None
    return inner(*args, **_without_boundaries(options), **seq_idx)


def _without_boundaries(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in MIXER_BOUNDARIES}


@cache
def _takes_argument(inner: Callable[..., Any], name: str) -> bool:
    """Whether the kernel in transformers' wrapper takes an argument of this name; fallbacks in torch do not."""
    return inspect.isfunction(inner) and name in inspect.getclosurevars(inner).nonlocals.get("applicable_params", ())


# What replaces a function of a modeling module, by its name there
MIXER_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve_documents,
    "torch_chunk_gated_delta_rule": scan_delta,
    "chunk_kimi_delta_attention": scan_delta,
    "mamba2_chunk_scan": scan_chunks,
    "mamba2_split_conv1d_scan_combined": run_fused,
    "mamba_selective_scan": scan_channels,
    "mamba_inner_fn": run_fused,
}

# What pip installs of each package with kernels, by the name that it is imported with
PIP_NAMES = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}


def missing_packages(model: nn.Module) -> list[str] | None:
    """What pip would install to give the mixers of a model all their kernels; None if it has no such mixer."""
    looked_for = [kernel_package(names[name]) for names, name in mixer_functions(model).places]
    known = [found for found in looked_for if found is not None and found[0] in PIP_NAMES]
    if not known:
        return None
    return sorted({PIP_NAMES[package] for package, is_installed in known if not is_installed})


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether transformers' model of a text config has recurrent mixers."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds and all("attention" in kind and kind != "linear_attention" for kind in kinds):
        return False
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and not MIXER_REPLACEMENTS.keys().isdisjoint(vars(sys.modules[model.__module__]))


def tokens_summed_in_common(model: nn.Module) -> int:
    """The chunk size of Mamba-2's kernel, in tokens, if the model runs packs on it; else 0.

    The kernel sums the decays of a chunk, whichever documents its tokens belong to. Each document gets a difference of
    two sums. So decays of other documents cancel up to rounding only, in outputs and in gradients.
    """
    mixers = [
        module
        for module in model.modules()
        if (scan := vars(sys.modules[type(module).__module__]).get("mamba2_chunk_scan"))
        and _takes_argument(scan, "seq_idx")
    ]
    return max((getattr(module, "chunk_size", 0) for module in mixers), default=0)


# ---- The names


def mixer_functions(model: nn.Module) -> ReplacedFunctions:
    """Return the functions that the mixers of a model call, to replace while a pack runs. Adapters do not matter."""
    classes = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    modules = sorted({kind.__module__ for kind in classes if issubclass(kind, nn.Module)})
    namespaces = [vars(sys.modules[module]) for module in modules]
    return ReplacedFunctions(
        [(names, name) for names in namespaces for name in MIXER_REPLACEMENTS if name in names], _make_replacement
    )


# What replaces each function: one for all models, so that code compiled with it stays valid
_replacements: dict[Callable[..., Any], Callable[..., Any]] = {}


def _make_replacement(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What does the same as `function` in each document of the pack that is running."""
    if function not in _replacements:
        in_documents = MIXER_REPLACEMENTS[name]

        # Not compiled with the model: how documents are separated depends on each pack
        @torch.compiler.disable
        @wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            pack = running_pack()
            return function(*args, **kwargs) if pack is None else in_documents(function, pack, *args, **kwargs)

        _replacements[function] = replaced
    return _replacements[function]
