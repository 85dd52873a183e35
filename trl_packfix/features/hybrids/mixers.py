"""Run the convolutions and scans of hybrid models anew in each document of a pack, also where ranks share the pack.

A mixer is the layer of a hybrid model that mixes tokens without attention: Mamba, gated delta nets, Kimi's delta
attention, short convolutions. It calls two functions by their names in its modeling module: a short convolution, in
which each token reads the W - 1 tokens before it, and a scan, which carries a state from token to token. In a pack,
several documents end to end in one row, neither may read over the boundary of a document.

`compat.ReplacedValues` replaces these functions while a packed forward runs, and restores them afterwards. Each
replacement (`support.py`) calls a function of this module, which calls the original function on each document. So
transformers still decides whether a kernel or plain torch computes it. The functions here take `inner`, the original
function; `running`, the `PackedForward` with the boundaries; and the arguments of the mixer.

    convolution  A kernel that takes boundaries (`seq_idx`) gets them. Otherwise, and where ranks share the pack, each
                 document is laid out behind the W - 1 tokens that it may read: zeros, tokens of the previous rank, or
                 tokens of its prefix
    scan         A kernel that takes boundaries (`cu_seqlens`, `seq_idx`) gets them. Otherwise documents become the
                 sequences of right-padded batches. Where ranks share the pack, they first exchange tokens for heads, as
                 attention does. Where documents share prefixes, `prefixes.py` runs the scan
    fused        A kernel that computes convolution, scan and output projection runs only if it takes boundaries and
                 bypasses no adapter (LoRA). Otherwise the mixer calls convolution and scan one by one

No interface of transformers gives access to these functions. `use_kernel_func_from_hub_with_fallback` chooses between
a kernel and plain torch at import, and keeps its choice in a closure. `kernelize` replaces functions for the whole life
of a model, and by repositories of the Hub only. A mixer that calls functions of other names is no error here: the test
of the model before training (`isolation/`) finds that documents change each other, and repairs the mixer.

Words:

    part    the tokens of a pack that one of s ranks holds, where ranks share the pack
    prefix  the common beginning of documents, which a pack with `kv_index` has only once
    run     the rows of a document behind its prefix; without shared prefixes, all of its rows
    state   what a scan remembers of the tokens so far, a tensor per head
    call    a `ScanCall` of `prefixes.py` holds the arguments of a scan: `values`, tensors with H heads; `keys`, with G
            heads; `parameters`, one number or tensor per head; and the function that runs the scan on them

Shapes: T tokens of the pack, s ranks that share it, C channels, W width of the convolution, H heads of values, G heads
of keys. Names of arguments such as `dt`, `A`, `B`, `g` and `beta` are those of the replaced functions.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...attention.exchange import HeadExchange, exchange_halo
from ...attention.packed_forward import PackedForward, once_per_pack
from ...attention.rows import TensorAxes
from .prefixes import ScanCall, run_levels

AXES_OF_TOKENS = TensorAxes(tokens=(1,), batch=0)  # of the tensors of a scan: (rows, tokens, ...)


def run_scan(scan: ScanCall, running: PackedForward) -> Tensor:
    """Run a scan on each document of the pack.

    Args:
        scan: the call, with the tensors of this rank: T / s tokens.

    Returns:
        (1, T / s, H, D).
    """
    # 1. Where ranks share the pack, each rank gets all tokens of some heads. On one rank the exchange changes nothing.
    num_heads = scan.values[0].shape[2]
    num_key_heads = scan.keys[0].shape[2]
    exchange = HeadExchange(num_heads, num_key_heads, running.group)
    tensors = [*scan.values, *scan.keys]  # values first
    num_values = len(scan.values)
    # One exchange per dtype: decays, for instance, are fp32 beside values in bf16.
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        indices = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        heads_first = [tensors[i].transpose(1, 2) for i in indices]  # (1, heads, T / s, ...)
        num_values_of_dtype = sum(i < num_values for i in indices)  # in `heads_first`, too, values come first
        all_tokens = exchange.to_heads(heads_first[:num_values_of_dtype], heads_first[num_values_of_dtype:])
        for i, x in zip(indices, all_tokens, strict=True):  # `all_tokens`: one list, again values first
            tensors[i] = x.transpose(1, 2)
    # `exchange.heads`: the heads of `values` that this rank computes
    parameters = [None if parameter is None else parameter[exchange.heads] for parameter in scan.parameters]
    scan = scan._replace(values=tensors[:num_values], keys=tensors[num_values:], parameters=parameters)
    # 2. Run the scan: level by level where documents share prefixes, else with boundaries, or else on padded batches.
    if running.kv_index is not None:
        out = run_levels(scan, running)
    elif scan.boundaries is not None:
        boundaries = _boundary_tensor(running, scan.boundaries, scan.values[0].shape[1])
        out = scan.call(scan.values, scan.keys, scan.parameters, **{scan.boundaries: boundaries})
    else:
        rows = running.document_rows(running.num_tokens)  # `DocumentRows`: the tokens of each document in the pack
        outs = []
        for batch in rows.padded_batches:  # documents of similar length, as sequences of one batch
            values = [batch.split(x, AXES_OF_TOKENS) for x in scan.values]
            keys = [batch.split(x, AXES_OF_TOKENS) for x in scan.keys]
            outs.append(scan.call(values, keys, scan.parameters))
        out = rows.join(outs, AXES_OF_TOKENS)  # in the order of the pack again, without padding
    # 3. Each rank gets all heads of its tokens again.
    return exchange.to_tokens(out.transpose(1, 2))


@once_per_pack
def _boundary_tensor(running: PackedForward, name: str, num_tokens: int) -> Tensor:
    """Return the boundaries as the argument `name` of a kernel; one tensor for all layers of a forward.

    flash-linear-attention caches what it derives from boundaries by the identity of the tensor.

    Args:
        name: "cu_seqlens" for where each document begins, (N + 1,) for N documents, or "seq_idx" for the number of the
            document of each token, (1, T).
    """
    bounds = running.cu_seq_lens_q
    if name == "cu_seqlens":
        return bounds
    numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    # `output_size` spares the host from waiting for the device.
    return torch.repeat_interleave(numbers, bounds.diff(), output_size=num_tokens)[None]


def _seq_idx_argument(inner: Callable[..., Any], running: PackedForward, num_tokens: int) -> dict[str, Tensor]:
    """Return the argument `seq_idx` for the function `inner`, by name; {} if `seq_idx` cannot separate the documents.

    It can if `inner` takes the argument, and if all tokens of each document are on this rank, one after the other.
    """
    has_whole_documents = running.group.is_alone and running.kv_index is None
    if not (has_whole_documents and takes_argument(inner, "seq_idx")):
        return {}
    return {"seq_idx": _boundary_tensor(running, "seq_idx", num_tokens)}


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
    """Run a causal convolution per channel within each document: (1, C, T / s).

    Args:
        inner: the convolution that this function replaces.
        running: the packed forward that is running.
        states: (1, C, T / s).
        weight: (C, W).

    Raises:
        ValueError: ranks share the pack, and its documents share prefixes.
    """
    convolve = partial(inner, weight=weight, bias=bias, activation=activation, **options)
    rows = states.transpose(1, 2)  # (1, T / s, C)
    seq_idx = _seq_idx_argument(inner, running, rows.shape[1])
    if seq_idx:
        # The kernel takes boundaries only if the channels of a token are neighbours in memory.
        if states.stride(1) != 1:
            states = rows.contiguous().transpose(1, 2)
        return convolve(states, **seq_idx)
    width = weight.shape[-1]
    if running.kv_index is not None and not running.group.is_alone:
        raise ValueError(
            f"A part of a pack on {running.group.size} ranks whose documents share prefixes came to a convolution of "
            f"{width} tokens. The rows before a run may lie in any part, and ranks exchange only the last ones of "
            'each. Set `tokens_per_rank=None`, or `share_prefixes="off"`.'
        )
    # Lay out each document behind the W - 1 tokens that its first tokens read, convolve, and take the rows of this
    # rank from the result. `source` counts rows in the concatenation below: zeros, halo, rows.
    zeros = rows.new_zeros(1, 1, rows.shape[2])
    # The last W - 1 rows of the previous rank; zeros on the first rank, and without other ranks
    halo = exchange_halo(rows, width - 1, running.group)
    source, places = _rows_with_context(running, width, rows.shape[1])
    laid_out = torch.cat([zeros, halo, rows], dim=1).index_select(1, source)
    out = convolve(laid_out.transpose(1, 2)).transpose(1, 2)
    return out.index_select(1, places).transpose(1, 2)


@once_per_pack
def _rows_with_context(running: PackedForward, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Lay out the rows of this rank with the W - 1 tokens before each document, or before each run.

    Args:
        num_rows: rows of this rank, T / s.

    Returns:
        source: for each row of the layout its index in the concatenation of one row of zeros, the last W - 1 rows of
            the previous rank, and the rows of this rank. int64.
        places: where each row of this rank is in the layout, (T / s,).
    """
    bounds = running.cu_seq_lens_q.long()
    key_bounds = running.cu_seq_lens_k.long()
    first_token = running.group.rank * num_rows
    steps = torch.arange(num_rows, device=bounds.device)
    tokens = steps + first_token  # the rows of this rank, counted in the pack
    document = torch.bucketize(tokens, bounds[1:], right=True)  # for each row its document, or its run
    # W - 1 rows of context come before the first row of this rank, and before each further document on it. With W = 3
    # and two documents of 2 and 1 rows the layout is . . a b . . c, and `places` is 2 3 6.
    places = steps + (document - document[:1] + 1) * (width - 1)
    # Room for the context of all documents of the pack, of which this rank may have fewer: the end stays unused.
    source = torch.zeros(num_rows + (len(bounds) - 1) * (width - 1), dtype=torch.int64, device=bounds.device)
    for distance in range(width):
        # Find the token `distance` before each row, by its number among the keys of all runs, end to end. The keys of a
        # run are the rows of its prefix, then its own rows; `kv_index` has the row of each key. Without shared
        # prefixes, keys are numbered like rows. The rows and the keys of a run end with the same token, so keys are
        # counted from the end. Before the first key of the run, the convolution reads zeros.
        # For example, the run a b c d has the keys 0 to 3, and the run e f with the prefix a b has the keys 4 to 7:
        # a b e f. From e to the end of its run are 2 rows, so the token before e is key 8 - 2 - 1 = 5, the row of b.
        rows_to_end = bounds[document + 1] - tokens
        earlier_key = key_bounds[document + 1] - rows_to_end - distance
        is_in_document = earlier_key >= key_bounds[document]
        earlier_row = earlier_key
        if running.kv_index is not None:
            earlier_row = running.kv_index[earlier_key.clamp(min=0)]
        # In the concatenation, one row of zeros and W - 1 rows of the previous rank come before the rows of this rank.
        # Several distances write the same place, each with the same token.
        source[places - distance] = torch.where(is_in_document, earlier_row - first_token + width, 0)
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
    """Run a gated delta rule within each document: ((1, T / s, H, V), None), as `inner` returns output and state.

    Args:
        query, key: (1, T / s, G, K).
        value: (1, T / s, H, V).
        g: logarithm of the decay, (1, T / s, H) or (1, T / s, H, K).
        beta: how strongly each token changes the state, (1, T / s, H).
    """
    options |= {"initial_state": None, "output_final_state": False}

    def call(values: list[Tensor], keys: list[Tensor], parameters: Sequence[Any], **scan_options: Any) -> Any:
        """Call `inner` with tensors in the order of the `ScanCall` below; so do the other functions `call`.

        Returns:
            The output, (rows, T, H, D); with the option for final states, a pair of the output and these states.
        """
        value, g, beta = values
        out = inner(*keys, value, g=g, beta=beta, **options | scan_options)
        return out if scan_options.get("output_final_state") else out[0]

    scan = ScanCall(
        values=[value, g, beta],
        keys=[query, key],
        parameters=[],
        call=call,
        boundaries="cu_seqlens" if takes_argument(inner, "cu_seqlens") else None,
        state_options=("initial_state", "output_final_state"),
    )
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
    """Run the scan of Mamba-2 within each document: (1, T / s, H, P).

    Args:
        states: (1, T / s, H, P).
        dt: step sizes, (1, T / s, H).
        A: (H,).
        B, C: (1, T / s, G, N).
        options: among others D and dt_bias, (H,), and the gate z, (1, T / s, H, P).
    """
    options |= {"initial_states": None, "return_final_states": False}
    D, z, dt_bias = (options.pop(name, None) for name in ("D", "z", "dt_bias"))
    if running.kv_index is not None:
        # A step size of 0 in the padding must reach the scan as 0, so that it leaves a state as it is. The kernel would
        # still change it by bias, softplus and limits. So these are applied here, in fp32 as in the kernel.
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if options.get("dt_softplus"):
            dt = softplus(dt)
        dt = dt.clamp(*options.get("dt_limit", (0.0, inf)))
        dt_bias = None
        options = options | {"dt_softplus": False, "dt_limit": (0.0, inf)}

    def call(values: list[Tensor], keys: list[Tensor], parameters: Sequence[Any], **scan_options: Any) -> Any:
        states, dt, *gate = values
        A, D, dt_bias = parameters
        per_head = {"D": D, "z": gate[0] if gate else None, "dt_bias": dt_bias}
        return inner(states, dt, A, *keys, **per_head, **options | scan_options)

    scan = ScanCall(
        values=[states, dt] if z is None else [states, dt, z],
        keys=[B, C],
        parameters=[A, D, dt_bias],
        call=call,
        boundaries="seq_idx" if takes_argument(inner, "seq_idx") else None,
        state_options=("initial_states", "return_final_states"),
    )
    return run_scan(scan, running)


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
    """Run the scan of Mamba-1 within each document: (1, C, T / s), and None for the state if the mixer wants both.

    For `run_scan` each channel is a head of one dimension, and B and C have one head. No kernel of Mamba-1 takes
    boundaries, so documents are rows of batches.

    Args:
        states: (1, C, T / s).
        dt: step sizes, (1, C, T / s).
        A: (C, N).
        B, C: (1, N, T / s).
        options: among others D and delta_bias, (C,), and the gate z, (1, C, T / s).
    """
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
    """Run the kernel that computes convolution, scan and output projection; None makes the mixer run them one by one.

    The kernel computes the projection from its weight alone, so an adapter around it would be left out. A frozen weight
    may have an adapter, so the kernel runs only if the weight is trained.
    """
    projection_weight = options.get("outproj_weight")
    seq_idx = _seq_idx_argument(inner, running, args[0].shape[1])
    if not seq_idx or projection_weight is None or not projection_weight.requires_grad:
        return None
    return inner(*args, **options, **seq_idx)


@cache
def takes_argument(inner: Callable[..., Any], name: str) -> bool:
    """Return whether `inner` is transformers' wrapper of a function that takes an argument of this name.

    The wrapper keeps the names of the function's arguments in its closure, as `applicable_params`. The function is a
    kernel or plain torch, which takes no boundaries.
    """
    return inspect.isfunction(inner) and name in inspect.getclosurevars(inner).nonlocals.get("applicable_params", ())
