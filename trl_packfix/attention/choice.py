"""Choose the attention implementation for packed batches, and set it on the model.

A pack is several documents in one row of T tokens. The implementation must keep them apart without a (T, T) mask. The
implementation of this package is `packfix_varlen` (`varlen.py`). `choose_attention` takes the first implementation of
this list that works. On CUDA:

    1. the flash attention that the user has set on the model
    2. flash_attention_2, if flash-attn is installed and the model supports it
    3. packfix_varlen on the FlashAttention-2 kernels built into torch, or on the kernels that the user has activated in
       torch in their place
    4. packfix_varlen document by document, without a flash kernel, and with a warning

On every other device: packfix_varlen, document by document. With `enforce_flash_attention=False` the user's choice
stays, with a warning about its cost. If the model calls its attention in a way that packfix_varlen does not support,
packs keep the model's own attention in place of packfix_varlen, on every device.
"""

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.attention
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from .flash import CUDA_DTYPES, MAX_CUDA_HEAD_DIM, capability_problem, cuda_varlen_problem
from .kernels import wide_kernel
from .masked import own_in_packs
from .models import base_model, layer_configs, text_config
from .varlen import ATTENTION_NAME

# The names of config fields that hold the dropout rate of attention weights: attention_dropout, attn_pdrop, ...
ATTENTION_DROPOUT = re.compile(r"^(attention|attn).*drop")
# The names of config fields that hold the dimensions of an attention head. Heads of linear attention, and of the
# indexer that chooses keys in sparse attention, have other names.
HEAD_DIM = re.compile(r"^(global_|swa_|attention_|v_|qk_|qk_nope_|qk_rope_)?head_dim$")
BY_DOCUMENT = "not flash: document by document through scaled_dot_product_attention, without a (T, T) mask"
INSTALL = "pip install flash-attn --no-build-isolation"  # with build isolation, the build of flash-attn misses torch


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen attention implementation for packed batches.

    Attributes:
        name: the implementation, as in `config._attn_implementation`.
        is_flash: whether it runs on flash kernels.
        previous: the implementation that the model has before this one is set.
        reason: why this implementation was chosen, for the report.
    """

    name: str
    is_flash: bool
    previous: str
    reason: str


def choose_attention(
    model: nn.Module,
    enforce_flash_attention: bool = True,
    dtype: torch.dtype | None = None,
    *,
    device_type: str | None = None,
    refusals: dict[str, str] | None = None,
    needs_varlen: str | None = None,
) -> AttentionChoice:
    """Choose the attention implementation for packed batches of the model, or of its text part.

    The model is the same afterwards. (To see whether flash_attention_2 works, it is set on the model for a moment.)

    Args:
        enforce_flash_attention: False keeps the implementation that the model has.
        dtype: the dtype of the queries in the kernel. With autocast, or an engine such as DeepSpeed, it may differ from
            the dtype of the weights. None: the dtype of the weights.
        device_type: the device on which the model will train; None: the device of the model.
        refusals: implementation that cannot compute this model -> the reason.
        needs_varlen: what flash attention other than packfix_varlen lacks for this training, as a predicate for a
            message ("does not exchange tokens between ..."). packfix_varlen is then chosen. None: it lacks nothing.

    Raises:
        ValueError: no kernel can compute this model. The message says what to change.
    """
    model = base_model(model)
    device_type = model.device.type if device_type is None else device_type
    previous = own_attention(model)

    # stablelm and opt set only `_supports_sdpa`. `_can_set_attn_implementation` looks into the source of the model, and
    # is False for a model with attention code of its own.
    supports_other_attention = model._supports_attention_backend or model._supports_sdpa
    if not (supports_other_attention and model._can_set_attn_implementation()):
        reason = f"{type(model).__name__} has its own attention code and supports no other implementation"
        return AttentionChoice(previous, False, previous, reason)
    refusals = refusals or {}
    # packfix_varlen is refused for a model that calls its attention in a way that packfix_varlen does not support.
    # Packs then keep the attention that the model has, or the default of transformers if it has packfix_varlen.
    refusal = refusals.get(ATTENTION_NAME)
    if refusal is not None and enforce_flash_attention:
        name = default_attention(model) if previous == ATTENTION_NAME else previous
        # `sdpa` builds no mask for a pack of one document. For a model with modules that are causal only by the mask,
        # `own_in_packs` returns `packfix_masked` in place of `sdpa`, which always builds it.
        name = own_in_packs(model, name)
        return AttentionChoice(name, "flash" in name, previous, f"the model's own: {refusal}")
    if not enforce_flash_attention:
        if previous in ("sdpa", "eager"):
            warnings.warn(
                f"enforce_flash_attention=False keeps attn_implementation={previous!r}: it builds a mask of T x T "
                "entries for every pack of T tokens (at batch size 8 packed training was measured 5.9 times slower "
                "than unpacked on a CPU). Set enforce_flash_attention=True for memory linear in T.",
                stacklevel=2,
            )
        # `packfix_varlen` may have been set before. On CUDA it runs on flash kernels.
        is_flash = "flash" in previous or (previous == ATTENTION_NAME and device_type == "cuda")
        return AttentionChoice(previous, is_flash, previous, "unchanged: enforce_flash_attention=False")
    if device_type == "cuda":
        dtype = model.dtype if dtype is None else dtype
        choice = _choose_on_cuda(model, previous, dtype, refusals=refusals, needs_varlen=needs_varlen)
        if "flash" in previous:
            return choice  # its reason names this attention, if it is replaced
    else:
        reason = f"no flash kernel on {device_type!r}: {BY_DOCUMENT}"
        if device_type == "cpu":
            reason = "varlen attention on the CPU, without a mask"
        choice = AttentionChoice(ATTENTION_NAME, False, previous, reason)
    if choice.name == previous:
        return choice
    # Add to the reason the name of the attention that is replaced.
    masks = " and its T x T masks" if previous in ("sdpa", "eager") else ""
    note = f"; in place of the model's {previous}{masks} (enforce_flash_attention=False keeps it)"
    return replace(choice, reason=choice.reason + note)


def own_attention(model: nn.Module) -> str:
    """Return the attention implementation that the model has now, or its text part."""
    return text_config(base_model(model))._attn_implementation or "eager"


def default_attention(model: nn.Module) -> str:
    """Return the attention implementation that transformers gives the model by default."""
    return "sdpa" if base_model(model)._supports_sdpa else "eager"


def activated_in_torch() -> str | None:
    """Return the kernels that the user has activated in torch in place of FlashAttention-2, such as "FA3", or None."""
    # torch 2.10 cannot activate other kernels.
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def set_attention(model: nn.Module, name: str) -> None:
    """Call `model.set_attn_implementation(name)` for the text part only: vision and audio towers are not packed.

    transformers does not save the implementation in config.json, so a checkpoint reloads without this package.
    """
    model = base_model(model)
    text = text_config(model)
    model.set_attn_implementation(_implementation_argument(model.config, text, name))
    assert text._attn_implementation == name, f"attention is {text._attn_implementation}, not {name}"


def _implementation_argument(config: PreTrainedConfig, target: PreTrainedConfig, name: str) -> Any:
    """Return the argument with which `set_attn_implementation` of a model sets `name` on one of its configs.

    Args:
        config: the config of the model.
        target: the config to set: `config`, or one inside of it.

    Returns:
        `name` if `config` is `target`, a dictionary such as {"": name, "text_config": name} if `target` is inside of
        `config`, else None.
    """
    if config is target:
        return name
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        nested_name = None if sub_config is None else _implementation_argument(sub_config, target, name)
        if nested_name is not None:
            # "" is the top level. It has no layers, but makes the masks for the text part.
            return {"": name, key: nested_name}
    return None


def head_dim(config: PreTrainedConfig) -> int:
    """Return the dimensions of the widest attention head that a text config describes; 0 if it describes none."""
    dims = [0]
    for layer in layer_configs(config):
        fields = {name: n for name, n in vars(layer).items() if HEAD_DIM.search(name) and isinstance(n, int)}
        dims += fields.values()
        # The queries of MLA have two parts, with and without rotary positions.
        dims.append(fields.get("qk_nope_head_dim", 0) + fields.get("qk_rope_head_dim", 0))
        num_heads = getattr(layer, "num_attention_heads", None)
        if not fields and isinstance(num_heads, int) and num_heads > 0:
            dims.append(layer.hidden_size // num_heads)
    return max(dims)


def dropped_weights(config: PreTrainedConfig) -> dict[str, float]:
    """Return by field of a text config the rate at which attention drops weights in training, if it is above 0."""
    return {
        name: rate
        for name, rate in vars(config).items()
        if ATTENTION_DROPOUT.match(name) and isinstance(rate, float) and rate > 0
    }


def _choose_on_cuda(
    model: PreTrainedModel, previous: str, dtype: torch.dtype, *, refusals: dict[str, str], needs_varlen: str | None
) -> AttentionChoice:
    """Return the choice on CUDA; the arguments are those of `choose_attention`."""
    config = text_config(model)
    old_gpu_problem = capability_problem()  # a text; None if the GPU is new enough
    if old_gpu_problem is None and dtype not in CUDA_DTYPES:
        raise ValueError(
            f"attention would get {dtype} on CUDA: flash attention supports bfloat16 and float16 only. Set bf16=True "
            "(autocast; the weights may stay float32), or load the model with dtype=torch.bfloat16, or set "
            "enforce_flash_attention=False."
        )
    # 1. The user's flash attention. Sinks are parameters: per head one more logit in the softmax, without a value.
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    kernel = re.split("[@:]", previous)[0]  # "repository@revision:function" is a kernel on the Hub
    drops_sinks = has_sinks and kernel in ("flash_attention_2", "kernels-community/flash-attn2")
    if "flash" in previous and not drops_sinks and previous not in refusals and needs_varlen is None:
        return AttentionChoice(previous, True, previous, "the user's choice")
    if drops_sinks:
        warnings.warn(
            f"attn_implementation={previous!r} on {type(model).__name__}, which has attention sinks: FlashAttention-2 "
            f"ignores them silently, so the model would train wrongly. {ATTENTION_NAME} is used instead and computes "
            "them exactly. Set attn_implementation='flash_attention_4' for a flash attention that supports sinks.",
            stacklevel=3,
        )
    # 2. flash_attention_2, if flash-attn is installed. After a refusal it is not tried: it may be what was refused, and
    # if it was another flash attention, packfix_varlen follows.
    widest = head_dim(config)
    refused_text = "".join(f"; {name} cannot be used: {reason}" for name, reason in refusals.items())  # for the reason
    if needs_varlen is not None and "flash" in previous:
        refused_text += f"; {previous} {needs_varlen}"
    if drops_sinks:
        refused_text += f"; {previous} ignores attention sinks"
    compatible = getattr(model, "_compatible_flash_implementations", None)
    supports_fa2 = model._supports_flash_attn and (compatible is None or "flash_attention_2" in compatible)
    fits_fa2 = supports_fa2 and not has_sinks and old_gpu_problem is None and widest <= MAX_CUDA_HEAD_DIM
    if is_flash_attn_2_available() and fits_fa2 and not refused_text and needs_varlen is None:
        # Whether it works is only known when it is set on the model. `finally` restores the previous attention.
        try:
            set_attention(model, "flash_attention_2")
            reason = "flash-attn is installed and the model supports it"
            return AttentionChoice("flash_attention_2", True, previous, reason)
        except (ImportError, OSError, ValueError) as error:
            # flash-attn was built for another torch, or the model's config refuses it.
            refused_text = f"; flash_attention_2 cannot be used: {' '.join(str(error).split())}"
        finally:
            if own_attention(model) != previous:
                set_attention(model, previous)

    # 3. packfix_varlen on flash kernels
    obstacles, remedies = _find_kernel_obstacles(config, widest, has_sinks)
    if not obstacles:
        active = activated_in_torch()
        kernels = "the FlashAttention-2 kernels built into torch"
        if active is not None:
            kernels = f"{active}, which is activated in torch"
        if widest > MAX_CUDA_HEAD_DIM:
            kernels += ", and ffpa-attn for wider heads without a window"
        return AttentionChoice(ATTENTION_NAME, True, previous, kernels + refused_text)

    # 4. packfix_varlen document by document
    reason = f"{'; '.join(obstacles)}: {BY_DOCUMENT}{refused_text}"
    advice = f" For flash attention {', or '.join(remedies)}." if remedies and old_gpu_problem is None else ""
    warnings.warn(f"{type(model).__name__} trains packs without flash attention: {reason}.{advice}", stacklevel=3)
    return AttentionChoice(ATTENTION_NAME, False, previous, reason)


def _find_kernel_obstacles(config: PreTrainedConfig, widest: int, has_sinks: bool) -> tuple[list[str], list[str]]:
    """Return why the flash kernels of `packfix_varlen` on CUDA cannot compute this model, and what the user can do.

    Args:
        widest: dimensions of the widest attention head.
    """
    obstacles = []
    remedies = []
    problem = cuda_varlen_problem()
    if problem is not None:
        obstacles.append(problem)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        obstacles.append(f"the kernels built into torch have no softcap (attn_logit_softcapping={softcap})")
        remedies.append(f"install flash-attn ({INSTALL})")
    for name, rate in dropped_weights(config).items():
        obstacles.append(f"the kernels built into torch have no dropout ({name}={rate})")
        remedies.append(f"load the model with {name}=0.0, or install flash-attn ({INSTALL})")
    # `wide_kernel`: the kernel of ffpa-attn for wider heads, which has no sinks. In a model whose layers differ, only
    # the layers with wider heads lack a kernel.
    if widest > MAX_CUDA_HEAD_DIM and (has_sinks or wide_kernel() is None):
        obstacles.append(
            f"heads have up to {widest} dimensions and the kernels take {MAX_CUDA_HEAD_DIM} (narrower layers use them)"
        )
        if not has_sinks:
            remedies.append("install ffpa-attn, whose kernels take more dimensions (pip install ffpa-attn)")
    return obstacles, remedies
