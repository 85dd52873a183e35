"""The attention implementation `packfix_varlen`: in a packed row each document attends causally to itself only.

A pack is several documents, end to end in one row of T tokens. Its *boundaries* say where each document begins. The
module registers two functions with transformers: `varlen_attention`, which each attention layer of a model calls, and
`varlen_mask`, which the model calls for its mask. `choice.py` chooses the implementation for a model. `kernels.py` and
`runs.py` do the computation. In packed forwards no (T, T) mask is built.

A call is *packed* if its module is in training mode, if it gets `cu_seq_lens_q`, or if a packed forward is running. A
packed call without boundaries, or with a mask, a cache or several rows, raises an error. Every other call, such as
`generate` with its cache or a padded evaluation batch, gives the result of transformers' `sdpa`. Sinks and softcap,
which `sdpa` does not support, are then computed here. In a repaired module (see below) a call with a mask, or one that
is not causal, is never packed.

The boundaries come from the argument `cu_seq_lens_q`, else from the `PackedForward` that is running: hooks on the model
record it when a forward gets a pack (`packed_forward.py`). Both are missing if a layer that passes only positions to
its attention (stablelm) is recomputed in backward by checkpointing that does not enter the `PackedForward` again, such
as FSDP's. The boundaries are then read from `position_ids`.

Words:

    repaired module  a test of the model has found that documents of a pack change each other in this module. So hooks
                     (`isolation/repair.py`) run it on batches of several rows, with one document per row
    part             the tokens of a pack that one rank holds, where several ranks share the pack
    run              where documents share a prefix, the pack has the prefix once. A run is the tokens of a document
                     behind its prefix
    launch           a call of a flash kernel on CUDA, for all documents of the pack or for some of them
    window, chunk    limits of what a query attends to: the last w tokens, or the tokens of its own chunk
    wide heads       heads of more dimensions than FlashAttention-2 supports, 256

Shapes: T tokens, H query heads, G key/value heads, D head dimension.
"""

import itertools
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..group import ALONE
from ..wording import count_of
from .exchange import HeadExchange
from .flash import CUDA_DTYPES, MAX_CUDA_HEAD_DIM, cuda_varlen_problem, kernel_head_dim
from .kernel_errors import OwnAttentionError
from .kernels import (
    AttentionOptions,
    attend_by_document,
    attend_on_cpu,
    attend_wide,
    limit_if_shorter,
    math_in_tiles,
    wide_kernel,
)

# Whoever imports the name from here has also imported this module, and so registered the implementation.
from .packed_forward import ATTENTION_NAME as ATTENTION_NAME
from .packed_forward import (
    BOUNDARIES,
    CACHE_NAMES,
    CU_SEQ_LENS,
    PACK_REMEDY,
    PackedForward,
    in_backward,
    running_forward,
)
from .runs import attend_pack_on_cuda, attend_shared_on_cpu

# Arguments in the `**kwargs` of `varlen_attention` that it reads, or that change no result. It refuses all other
# arguments, because they may select keys or change scores, as the `block_indices` of MiniMax-M3 do.
# `BOUNDARIES`: the names of the entries of a batch with the boundaries, `cu_seq_lens_q` and so on.
READ_ARGUMENTS = {*BOUNDARIES, "position_ids", "sliding_window", "is_causal", "position_bias"}
CACHE_ARGUMENTS = {*CACHE_NAMES, "cache_position", "use_cache"}  # packed forwards refuse the cache itself
HARMLESS_ARGUMENTS = {
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "labels",
    "deterministic",
}
KNOWN_ARGUMENTS = frozenset(READ_ARGUMENTS | CACHE_ARGUMENTS | HARMLESS_ARGUMENTS)
# Devices on which attention runs on the FlashAttention-2 kernels of torch. Tests add "meta", whose tensors have shapes
# and no values, so that reading a value on the host raises an error.
FLASH_DEVICES = {"cuda"}


class OwnMaskError(ValueError):
    """Raised for a packed forward with a mask that the model made itself, because the kernels support no mask.

    Attributes:
        may_only_hide: whether the mask may do nothing but hide keys, as boundaries do. This is so if it has at most two
            values and needs no gradient. A bias, or a mask that is learned, does more than hide.

    Args:
        mask: the mask; None if the error was raised before the model had computed it. An unknown mask counts as one
            that may only hide keys.
    """

    def __init__(self, message: str, mask: Tensor | None):
        super().__init__(message)
        self.may_only_hide = mask is None or (not mask.requires_grad and len(mask.unique()) <= 2)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a module of a model; the signature is that of transformers' attention functions.

    Args:
        module: the attention module.
        query, key, value: (1, H, T, D), (1, G, T, D) and (1, G, T, D) in a packed call.
        scaling: factor of the logits; None: 1 / sqrt(D).
        dropout: rate at which attention weights are dropped.
        softcap: the logits become softcap * tanh(logit / softcap).
        s_aux: attention sinks (gpt_oss), (H,).
        kwargs: among others `sliding_window`, the number of tokens that a query attends to, itself included.

    Returns:
        The output (1, T, H, D), and None in place of the attention weights.

    Raises:
        OwnAttentionError: an argument is not in `KNOWN_ARGUMENTS`, or a packed call is not causal or has a bias.
        ValueError: a packed call has an attention mask, a cache, several rows or no boundaries, or the device does not
            support a feature.
    """
    _check_arguments(module, kwargs)
    running = running_forward()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options: AttentionOptions = {"scale": scale, "dropout": dropout, "softcap": softcap, "sinks": s_aux}
    if running is not None and running.in_repaired_module:
        # Each row is one document. Without a mask, the rows are computed below as the documents of a pack. With a mask,
        # which must be honoured, the call is computed as one that is not packed.
        is_packed = attention_mask is None and _is_causal(module, kwargs)
    else:
        is_packed = module.training or running is not None or kwargs.get("cu_seq_lens_q") is not None

    # A call that is not packed gives the result of `sdpa`.
    if not is_packed:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        query, key, value = cast_for_autocast(module, query, key, value)
        num_rows, _, num_queries, _ = query.shape
        is_causal = attention_mask is None and num_queries > 1 and _is_causal(module, kwargs)
        # A static cache may have more keys than the prompt has queries. Then only the first are filled: transformers
        # makes a mask if an earlier forward has filled some.
        if is_causal:
            key = key[:, :, :num_queries]
            value = value[:, :, :num_queries]
        # In fp32, flash kernels of CUDA raise an error, which is right for a pack. Other calls must have a result.
        is_flash = query.dtype in CUDA_DTYPES and runs_flash(query, value, softcap, dropout=dropout)
        if not is_causal or not (is_flash or query.device.type == "cpu"):
            out = math_in_tiles(query, key, value, is_causal=is_causal, mask=attention_mask, **options)
            return out.transpose(1, 2).contiguous(), None
        # transformers makes a mask wherever padding or a window hides a key. So without a mask, the rows are computed
        # like those of a repaired module, each as a document of a pack. With `num_rows` set, `running` says that it is
        # the forward of a repaired module (`in_repaired_module`), so step 1 below joins the rows.
        bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * num_queries
        running = PackedForward(bounds, bounds, num_queries, num_queries, num_rows=num_rows, group=ALONE)

    # A packed call:
    # 1. Several rows, as those of a repaired module, become one row. Its boundaries are in `running`, not in the
    #    arguments.
    num_rows = query.shape[0]
    if running is not None and running.in_repaired_module:
        query, key, value = (_join_rows(states, running) for states in (query, key, value))
        kwargs = {name: argument for name, argument in kwargs.items() if name not in BOUNDARIES}
    _check_packed_call(module, query, key, mask=attention_mask, kwargs=kwargs, running=running)
    query, key, value = cast_for_autocast(module, query, key, value)
    # 2. Where ranks share the pack, each rank has all heads of its part of the tokens. It gives heads to the other
    #    ranks, and gets their tokens: then it has all tokens of some heads, the query heads `exchange.heads`, a slice.
    group = ALONE  # this rank by itself
    if running is not None:
        _check_part(module, query, running, dropout)
        group = running.group
    exchange = HeadExchange(query.shape[1], key.shape[1], group)
    query, key, value = exchange.to_heads([query], [key, value])  # tensors of query heads, and of key heads
    options["sinks"] = None if s_aux is None else s_aux[exchange.heads]
    # 3. Each document attends to itself. Then the output gets the shape of the input.
    out = _attend_documents(module, query, key, value=value, kwargs=kwargs, running=running, **options)
    out = exchange.to_tokens(out)  # (1, T, H, D)
    return out.reshape(num_rows, -1, *out.shape[2:]).contiguous(), None


def _attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    *,
    value: Tensor,
    kwargs: dict[str, Any],
    running: PackedForward | None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute attention within each document of a pack on the fastest kernel that supports it: (1, H, T, D).

    Args:
        query, key, value: for all tokens of the pack.
        kwargs: the arguments of the call, with or without boundaries.
        running: the packed forward that is running, if any.

    Raises:
        ValueError: documents share prefixes, and no flash kernel computes this call.
    """
    window, chunk = _window_and_chunk(module, kwargs)
    options["window"] = window
    dropout = options["dropout"]
    softcap = options["softcap"]
    num_tokens = query.shape[2]
    is_flash = runs_flash(query, value, softcap, dropout=dropout)
    is_wide = chunk is None and _runs_wide(query, value, options)
    pack = _pack_of(kwargs, running, num_tokens, stays_on_device=is_flash or is_wide)  # the boundaries of this call
    chunk = limit_if_shorter(chunk, pack.max_length_k)  # None if no document of this pack is longer than a chunk
    flash_options: dict[str, Any] = {name: options[name] for name in ("scale", "window", "sinks")}
    if is_flash:
        return attend_pack_on_cuda(query, key, value, pack, chunk=chunk, **flash_options)
    device = query.device.type
    if pack.kv_index is not None:
        # Documents share prefixes: `pack.kv_index` lists the keys of each run. Only flash kernels look them up, so the
        # kernel for wide heads is refused, too.
        obstacle = ""
        if dropout > 0:
            obstacle = f"dropout={dropout}"
        elif softcap is not None:
            obstacle = f"softcap={softcap}"
        elif device != "cpu":
            obstacle = f"heads of {query.shape[3]} dimensions on {device!r}, for which there is no flash kernel"
        if obstacle:
            raise ValueError(
                f"A pack of {len(pack.cu_seq_lens_q) - 1} runs whose documents share prefixes came to a "
                f"{type(module).__name__} with {obstacle}. Attention that looks up shared keys runs on flash "
                'kernels, and has neither softcap nor dropout. Set `share_prefixes="off"`, or the model\'s attention '
                "dropout to 0."
            )
        return attend_shared_on_cpu(query, key, value, pack, chunk=chunk, **flash_options)
    if is_wide:
        return attend_wide(query, key, value, pack.cu_seq_lens_q, pack.max_length_q, options["scale"])
    lengths = _lengths_between(pack.bounds, num_tokens)  # `pack.bounds`: the boundaries as a list
    if chunk is not None:
        # Tokens of different chunks do not attend to each other, so each chunk is like a document.
        lengths = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
    attend = attend_on_cpu if device == "cpu" else attend_by_document
    return attend(query, key, value, lengths, **options)


def varlen_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Return the mask of a forward: None in a packed forward, the result of `sdpa_mask` in every other forward.

    The signature is that of transformers' mask functions. transformers sets `use_vmap` if the model adds a mask pattern
    of its own, as a function, to the causal mask.

    Raises:
        OwnMaskError: the model puts a mask of its own on a pack.
        ValueError: a packed forward has padding, a cache or several rows.
    """
    running = running_forward()
    has_own_mask = attention_mask is not None or kwargs.get("use_vmap")
    # In a repaired module each row is one document, so the model's own mask of the rows is right.
    if running is None or (running.in_repaired_module and has_own_mask):
        kwargs["attention_mask"] = attention_mask
        return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
    num_rows = running.num_rows or 1  # `running.num_rows`: the rows of the batch of a repaired module
    if batch_size != num_rows or q_length != kv_length:
        raise ValueError(
            f"a packed forward has {count_of(batch_size, 'row')}, {q_length} queries and {kv_length} keys: a pack is "
            f"one row without padding or cache, with as many keys as queries. {PACK_REMEDY}"
        )
    # `running.ignores_masks`: a test of the model has found that its masks only repeat the boundaries.
    if has_own_mask and not running.ignores_masks:
        own_mask = "an attention_mask" if attention_mask is not None else "a mask of its own over the causal one"
        raise OwnMaskError(
            f"the model lays {own_mask} on a pack of {q_length} tokens: {ATTENTION_NAME} builds no mask and would lose "
            f"it. {PACK_REMEDY}",
            attention_mask,
        )
    return None


AttentionInterface.register(ATTENTION_NAME, varlen_attention)
AttentionMaskInterface.register(ATTENTION_NAME, varlen_mask)


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether the call is causal, by its argument, else by the module."""
    is_causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _join_rows(states: Tensor, running: PackedForward) -> Tensor:
    """Lay the rows (B, H, L, D) of a repaired module end to end in one row (1, H, B * L, D).

    Raises:
        ValueError: the number of rows or their length is not the one of `running`.
    """
    if states.shape[0] != running.num_rows or states.shape[2] != running.max_length_q:
        raise ValueError(
            f"a repaired module got {running.num_rows} documents of {running.max_length_q} tokens, and its attention "
            f"{states.shape[0]} rows of {states.shape[2]}: which row belongs to which document is unknown. Set "
            'on_leak="unpack".'
        )
    return states.transpose(0, 1).flatten(1, 2)[None]


def _check_arguments(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise `OwnAttentionError` if the module passes an argument that is not in `KNOWN_ARGUMENTS`."""
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in KNOWN_ARGUMENTS)
    if unknown:
        raise OwnAttentionError(
            f"{type(module).__name__} gives {', '.join(unknown)} to its attention, and {ATTENTION_NAME} would leave it "
            "out: what it does to the scores is unknown",
            "Set enforce_flash_attention=False to keep the model's own attention, or remove the argument if you passed "
            "it to the model.",
        )


def _check_packed_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    running: PackedForward | None,
) -> None:
    """Raise an error if a packed call has a mask, several rows, a cache or a bias, or is not causal."""
    name = type(module).__name__
    if mask is not None and not (running is not None and running.ignores_masks):
        raise OwnMaskError(
            f"{name} got an attention_mask of shape {tuple(mask.shape)} in a packed or training forward: the "
            f"boundaries alone say who attends to whom, so the mask would be ignored. {PACK_REMEDY} (If you gave no "
            "mask, transformers built it: call trl_packfix.prepare_for_packing(model) once, and it builds none for "
            "packs.)",
            mask,
        )
    if query.shape[0] != 1:
        raise ValueError(
            f"{name} got {query.shape[0]} rows in a packed or training forward: the boundaries describe one row, and "
            f"which one is unknown. {PACK_REMEDY}"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name} got {query.shape[2]} queries and {key.shape[2]} keys in a packed or training forward: keys from a "
            f"cache or another sequence belong to no document of the pack. {PACK_REMEDY}"
        )
    if not _is_causal(module, kwargs):
        raise OwnAttentionError(
            f"{name} is not causal (is_causal=False), and {ATTENTION_NAME} computes causal attention only",
            "Set model.set_attn_implementation('sdpa') for this part of the model.",
        )
    if kwargs.get("position_bias") is not None:
        raise OwnAttentionError(
            f"{name} adds a position_bias of shape {tuple(kwargs['position_bias'].shape)}, and {ATTENTION_NAME} does "
            "not support a bias",
            "Set enforce_flash_attention=False with attn_implementation='eager'.",
        )


def _check_part(module: nn.Module, query: Tensor, running: PackedForward, dropout: float) -> None:
    """Raise ValueError if ranks share the pack, and the module has other tokens than this rank's part, or dropout."""
    if running.group.is_alone:
        return
    name = type(module).__name__
    if running.in_repaired_module or query.shape[2] != running.part_tokens:
        raise ValueError(
            f"{name} got {query.shape[2]} tokens, and each of the {running.group.size} ranks that share the pack holds "
            f"{running.part_tokens}: a module that collects or repeats tokens cannot work on a part of a pack. Set "
            "tokens_per_rank=None."
        )
    if dropout > 0:
        raise ValueError(
            f"{name} got dropout={dropout} on a part of a pack: all ranks draw the same random numbers, so heads on "
            "different ranks would drop the same weights. Set the model's attention_dropout to 0, or "
            "tokens_per_rank=None."
        )


def runs_flash(query: Tensor, value: Tensor, softcap: float | None, *, dropout: float) -> bool:
    """Return whether the FlashAttention-2 kernels of torch compute this call. Nothing is read from the device."""
    return (
        _runs_on_flash_device(query)
        and softcap is None
        and dropout == 0
        and kernel_head_dim(query, value) <= MAX_CUDA_HEAD_DIM
    )


def _runs_wide(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Return whether ffpa-attn (kernels for wide heads) computes this call, which has no option except the scale."""
    return (
        query.dtype in CUDA_DTYPES
        and kernel_head_dim(query, value) > MAX_CUDA_HEAD_DIM
        and all(options.get(name) is None for name in ("window", "sinks", "softcap"))
        and options["dropout"] == 0
        and _runs_on_flash_device(query)
        and wide_kernel() is not None
    )


def _runs_on_flash_device(query: Tensor) -> bool:
    """Return whether the device of a call has flash kernels."""
    device = query.device.type
    return device in FLASH_DEVICES and (device != "cuda" or cuda_varlen_problem() is None)


def _pack_of(
    kwargs: dict[str, Any], running: PackedForward | None, num_tokens: int, *, stays_on_device: bool
) -> PackedForward:
    """Return the pack of a call: the running packed forward, or one that is made from the arguments of the call.

    Args:
        kwargs: the arguments, with `cu_seq_lens_q` and so on, `position_ids`, or neither.
        num_tokens: T.
        stays_on_device: whether the kernel of this call reads the boundaries on the device, and the host must not. The
            kernel then needs the length of the longest document as a number, too.

    Raises:
        ValueError: there are no boundaries, or they are incomplete.
    """
    call_boundaries: list[Any] = [kwargs.get(name) for name in CU_SEQ_LENS]
    bounds = call_boundaries[0]
    has_all_arguments = all(x is not None for x in call_boundaries)
    # Kernels that read boundaries on the device need all four arguments, and other kernels only `cu_seq_lens_q`.
    arguments_suffice = bounds is not None and (has_all_arguments or not stays_on_device)
    # 1. The running forward, if it has what the arguments lack. Shared prefixes are never among the arguments.
    if running is not None and (running.kv_index is not None or not arguments_suffice):
        return running
    # 2. The running forward, if the arguments are its own boundaries, and it has more than they have. For a kernel that
    #    reads boundaries on the device, these are planned launches. For every other kernel, it is `running.bounds`: the
    #    list is cached, so that only the first layer waits for the device. If it has no more, the arguments are better
    #    (4.): torch.compile would take the numbers in `running` for constants of its graph, but not the arguments.
    if running is not None and (running.launches or not stays_on_device) and bounds is running.cu_seq_lens_q:
        return running
    # 3. The positions, in the case that the module's docstring describes. Here the host has to wait for the device.
    if bounds is None:
        lengths = _lengths_from_positions(kwargs.get("position_ids"), num_tokens)
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(kwargs["position_ids"].device)
        return PackedForward(bounds, bounds, max(lengths), max(lengths), group=ALONE)
    # 4. The arguments. Only kernels that read boundaries on the device need the length of the longest document. For
    #    others, T takes its place.
    if not stays_on_device:
        return PackedForward(bounds, bounds, num_tokens, num_tokens, group=ALONE)
    if not has_all_arguments:
        raise ValueError(
            f"attention got cu_seq_lens_q but not all of {', '.join(CU_SEQ_LENS[1:])}: to find the longest document "
            "the host would wait for the device in every layer. Pass all four, as PackedDataCollator returns them."
        )
    q_bounds, k_bounds, longest_q, longest_k = call_boundaries
    return PackedForward(q_bounds, k_bounds, longest_q, longest_k, group=ALONE)


def _lengths_between(bounds: list[int], num_tokens: int) -> list[int]:
    """Return the number of tokens of each document, from the boundaries.

    Raises:
        ValueError: a document is empty, or a token belongs to no document.
    """
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if not lengths or min(lengths) <= 0 or bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seq_lens_q is {bounds[:3]}...{bounds[-1:]} for a pack of {num_tokens} tokens: every token must belong "
            "to exactly one document. Set it to [0, first length, ..., T], increasing."
        )
    return lengths


def _lengths_from_positions(position_ids: Tensor | None, num_tokens: int) -> list[int]:
    """Return the number of tokens of each document, from positions that restart at 0 at each document.

    Raises:
        ValueError: there are no positions, they do not count 0, 1, 2, ... within each document, or they never restart.
            Models make up such positions if they get none, so these are accepted only while a checkpointed layer is
            recomputed, whose boundaries the first forward has checked.
    """
    if position_ids is None:
        raise ValueError(
            f"attention got {num_tokens} tokens and no document boundaries (neither cu_seq_lens_q nor position_ids): "
            f"it never assumes a single document. {PACK_REMEDY}"
        )
    positions = position_ids.flatten()
    is_start = positions == 0
    counts_up = (is_start[1:] | (positions.diff() == 1)).all()
    if len(positions) != num_tokens or not is_start[0] or not counts_up:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} for a pack of {num_tokens} tokens do not count 0, 1, "
            f"2, ... within each document: no boundaries can be read from them. {PACK_REMEDY} (Documents that share "
            "prefixes have such positions: with share_prefixes use gradient_checkpointing=True, not checkpoints of "
            "your own.)"
        )
    starts = [*is_start.nonzero().flatten().tolist(), num_tokens]
    is_recomputation = in_backward()  # a forward inside of a backward recomputes a layer
    # A single token can only be a single document
    if len(starts) == 2 and num_tokens > 1 and not is_recomputation:
        raise ValueError(
            f"attention got {num_tokens} tokens, no cu_seq_lens_q, and position_ids that never restart, which models "
            f"also make up themselves: attention never assumes a single document. {PACK_REMEDY}"
        )
    return [stop - start for start, stop in itertools.pairwise(starts)]


def _window_and_chunk(module: nn.Module, kwargs: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the window and the chunk of the layer, in tokens; None is no limit."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"], None
    # Llama 4 and Qwen2-MoE pass their chunks and windows to the mask function only, so they are read from the config.
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types and hasattr(module, "layer_idx") else None
    window = config.sliding_window if layer_type == "sliding_attention" else None
    chunk = config.attention_chunk_size if layer_type == "chunked_attention" else None
    return window, chunk


def cast_for_autocast(module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Cast tensors as autocast would for `scaled_dot_product_attention`; autocast does not know the kernels used here.

    A model in half precision may have queries in fp32 without autocast. They are cast to the dtype of its layers.
    """
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    # peft sets the norms of quantised models to fp32. Norms of queries then make the queries fp32, too.
    # `get_target_dtype` reads the dtype from the module's config or from its first linear layer.
    has_linear = any(isinstance(layer, nn.Linear) for layer in module.modules())
    if tensors[0].dtype == torch.float32 and hasattr(module, "config") and has_linear:
        dtype = get_target_dtype(tensors[0], module)
        return [x.to(dtype) for x in tensors]
    return list(tensors)
