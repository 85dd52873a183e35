"""Choose the attention implementation for packed batches, and set it on the model.

`choose_attention` applies this precedence. On CUDA:

    the user's flash attention
        -> flash_attention_2, if flash-attn works here and the model supports it
        -> packfix_varlen on the FlashAttention-2 kernels built into torch, or what the user activated in their place
        -> packfix_varlen document by document, with a warning: not flash, and still without a (T, T) mask

On every other device: packfix_varlen, document by document. `enforce_flash_attention=False` keeps the user's choice and
warns about its cost.
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

from .flash import MAX_CUDA_HEAD_DIM, capability_problem, cuda_varlen_problem
from .kernels import wide_kernel
from .masked import own_in_packs
from .models import base_model, layer_configs, text_config
from .varlen import ATTENTION_NAME

# Config fields that hold the dropout rate of attention weights: attention_dropout, attn_pdrop, ...
ATTENTION_DROPOUT = re.compile(r"^(attention|attn).*drop")
# Config fields that hold the dimensions of a head of attention (not of linear attention or of an indexer)
HEAD_DIM = re.compile(r"^(global_|swa_|attention_|v_|qk_|qk_nope_|qk_rope_)?head_dim$")
BY_DOCUMENT = "not flash: document by document through scaled_dot_product_attention, without a (T, T) mask"
INSTALL = "pip install flash-attn --no-build-isolation"  # with build isolation its build does not find torch


@dataclass(frozen=True)
class AttentionChoice:
    """The attention implementation for packed batches, as in `config._attn_implementation`, and the one before."""

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
    """Choose the attention implementation for packed batches of the model, or of its text part; change nothing.

    Args:
        dtype: the dtype that reaches the kernel: that of autocast or of the engine, if it differs from the weights'.
        device_type: where the model will train, if it is not there yet.
        refusals: implementations that cannot compute this model, with the reason.
        needs_varlen: what only packfix_varlen does and this run needs, as the end of a sentence ("does not exchange
            tokens between ..."); it is then chosen instead of the user's flash attention.

    The reason names the model's own attention where another takes its place. Raises ValueError if no kernel fits; the
    message says what to change.
    """
    model = base_model(model)
    device_type = model.device.type if device_type is None else device_type
    settings: dict[str, Any] = {"device_type": device_type, "refusals": refusals, "needs_varlen": needs_varlen}
    choice = _apply_precedence(model, enforce_flash_attention, dtype, **settings)
    previous = choice.previous
    replaces = choice.name != previous and choice.name in (ATTENTION_NAME, "flash_attention_2")
    if not replaces or (device_type == "cuda" and "flash" in previous):  # then the reason speaks of it
        return choice
    masks = " and its T x T masks" if previous in ("sdpa", "eager") else ""
    replaced = f"; in place of the model's {previous}{masks} (enforce_flash_attention=False keeps it)"
    return replace(choice, reason=choice.reason + replaced)


def _apply_precedence(
    model: PreTrainedModel,
    enforce_flash_attention: bool,
    dtype: torch.dtype | None,
    *,
    device_type: str,
    refusals: dict[str, str] | None,
    needs_varlen: str | None,
) -> AttentionChoice:
    """Apply the precedence of `choose_attention`."""
    dtype = model.dtype if dtype is None else dtype
    previous = own_attention(model)
    user_flash = "flash" in previous

    # stablelm and opt set only the second flag; models with their own attention code fail the source check
    takes_names = model._supports_attention_backend or model._supports_sdpa
    if not (takes_names and model._can_set_attn_implementation()):
        reason = f"{type(model).__name__} has its own attention code and supports no other implementation"
        return AttentionChoice(previous, False, previous, reason)
    refusal = (refusals or {}).get(ATTENTION_NAME)
    if refusal is not None and enforce_flash_attention:
        name = own_in_packs(model, default_attention(model) if previous == ATTENTION_NAME else previous)
        return AttentionChoice(name, "flash" in name, previous, f"the model's own: {refusal}")
    if not enforce_flash_attention:
        if previous in ("sdpa", "eager"):
            warnings.warn(
                f"enforce_flash_attention=False keeps attn_implementation={previous!r}: it builds a mask of T x T "
                "entries for every pack of T tokens (at batch size 8 packed training was measured 5.9 times slower "
                "than unpacked on a CPU). Set enforce_flash_attention=True for memory linear in T.",
                stacklevel=2,
            )
        on_kernel = user_flash or (previous == ATTENTION_NAME and device_type == "cuda")
        return AttentionChoice(previous, on_kernel, previous, "unchanged: enforce_flash_attention=False")
    if device_type == "cpu":
        return AttentionChoice(ATTENTION_NAME, False, previous, "varlen attention on the CPU, without a mask")
    if device_type == "cuda":
        return _choose_on_cuda(model, previous, dtype, refusals=refusals or {}, needs_varlen=needs_varlen)
    return AttentionChoice(ATTENTION_NAME, False, previous, f"no flash kernel on {device_type!r}: {BY_DOCUMENT}")


def own_attention(model: nn.Module) -> str:
    """The current implementation of the model, or of its text part."""
    return text_config(base_model(model))._attn_implementation or "eager"


def default_attention(model: nn.Module) -> str:
    """The implementation that transformers gives the model if none is named."""
    return "sdpa" if base_model(model)._supports_sdpa else "eager"


def activated_in_torch() -> str | None:
    """What the user put in the place of torch's FlashAttention-2 kernels, such as "FA3"; None if nothing."""
    # torch 2.10 has no such switch
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def set_attention(model: nn.Module, name: str) -> None:
    """Call `model.set_attn_implementation(name)` for the text part only: vision and audio towers are not packed.

    transformers does not save the implementation in config.json, so a checkpoint reloads without this package.
    """
    model = base_model(model)
    text = text_config(model)
    model.set_attn_implementation(_for_nested(model.config, text, name))
    assert text._attn_implementation == name, f"attention is {text._attn_implementation}, not {name}"


def _for_nested(config: PreTrainedConfig, target: PreTrainedConfig, name: str) -> Any:
    """`name` as transformers wants it for a config within another, such as {"": name, "text_config": name}."""
    for key in config.sub_configs if config is not target else ():
        inner = getattr(config, key, None)
        if inner is not None and (found := _for_nested(inner, target, name)) is not None:
            # "" is the top level: it has no layers, but makes the masks for the text part
            return {"": name, key: found}
    return name if config is target else None


def head_dim(config: PreTrainedConfig) -> int:
    """Dimensions of the widest attention head that a text config describes; 0 if it does not say."""
    sizes = [0]
    for layer in layer_configs(config):
        fields = {name: n for name, n in vars(layer).items() if HEAD_DIM.search(name) and isinstance(n, int)}
        # MLA adds the two parts of its queries
        sizes += [*fields.values(), fields.get("qk_nope_head_dim", 0) + fields.get("qk_rope_head_dim", 0)]
        heads = getattr(layer, "num_attention_heads", None)
        if not fields and isinstance(heads, int) and heads > 0:
            sizes.append(layer.hidden_size // heads)
    return max(sizes)


def dropped_weights(config: PreTrainedConfig) -> dict[str, float]:
    """Fields of a text config by which attention drops weights in training, with their rates above 0."""
    rates = {name: rate for name, rate in vars(config).items() if ATTENTION_DROPOUT.match(name)}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate > 0}


def _choose_on_cuda(
    model: PreTrainedModel, previous: str, dtype: torch.dtype, *, refusals: dict[str, str], needs_varlen: str | None
) -> AttentionChoice:
    config = text_config(model)
    old_gpu = capability_problem()
    if old_gpu is None and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention would get {dtype} on CUDA: flash attention supports bfloat16 and float16 only. Set bf16=True "
            "(autocast; the weights may stay float32), or load the model with dtype=torch.bfloat16, or set "
            "enforce_flash_attention=False."
        )
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    kernel = re.split("[@:]", previous)[0]  # "repo@revision:function" names a kernel on the Hub
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
    widest = head_dim(config)
    refused = "".join(f"; {name} cannot be used: {reason}" for name, reason in refusals.items())
    if needs_varlen is not None and "flash" in previous:
        refused += f"; {previous} {needs_varlen}"
    if drops_sinks:
        refused += f"; {previous} ignores attention sinks"
    compatible = getattr(model, "_compatible_flash_implementations", None)
    takes_fa2 = model._supports_flash_attn and (compatible is None or "flash_attention_2" in compatible)
    fits_fa2 = takes_fa2 and not has_sinks and old_gpu is None and widest <= MAX_CUDA_HEAD_DIM
    obstacles, remedies = _find_kernel_obstacles(config, widest, has_sinks)
    if is_flash_attn_2_available() and fits_fa2 and not refused and needs_varlen is None:
        try:
            set_attention(model, "flash_attention_2")
            reason = "flash-attn is installed and the model supports it"
            return AttentionChoice("flash_attention_2", True, previous, reason)
        except (ImportError, OSError, ValueError) as error:  # built for another torch; refused by the model's config
            refused = f"; flash_attention_2 cannot be used: {' '.join(str(error).split())}"
        finally:
            if own_attention(model) != previous:
                set_attention(model, previous)

    if not obstacles:
        active = activated_in_torch()
        kernels = "the FlashAttention-2 kernels built into torch"
        kernels = kernels if active is None else f"{active}, which is activated in torch"
        kernels += ", and ffpa-attn for wider heads without a window" * (widest > MAX_CUDA_HEAD_DIM)
        return AttentionChoice(ATTENTION_NAME, True, previous, kernels + refused)
    reason = f"{'; '.join(obstacles)}: {BY_DOCUMENT}{refused}"
    flash = f" For flash attention {', or '.join(remedies)}." if remedies and old_gpu is None else ""
    warnings.warn(f"{type(model).__name__} trains packs without flash attention: {reason}.{flash}", stacklevel=3)
    return AttentionChoice(ATTENTION_NAME, False, previous, reason)


def _find_kernel_obstacles(config: PreTrainedConfig, widest: int, has_sinks: bool) -> tuple[list[str], list[str]]:
    """Why the kernels of `packfix_varlen` on CUDA do not compute this model, and what makes it run on flash."""
    obstacles = []
    remedies = []
    if (problem := cuda_varlen_problem()) is not None:
        obstacles.append(problem)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        obstacles.append(f"the kernels built into torch have no softcap (attn_logit_softcapping={softcap})")
        remedies.append(f"install flash-attn ({INSTALL})")
    for name, rate in dropped_weights(config).items():
        obstacles.append(f"the kernels built into torch have no dropout ({name}={rate})")
        remedies.append(f"load the model with {name}=0.0, or install flash-attn ({INSTALL})")
    if widest > MAX_CUDA_HEAD_DIM and (has_sinks or wide_kernel() is None):
        obstacles.append(
            f"heads have up to {widest} dimensions and the kernels take {MAX_CUDA_HEAD_DIM} (narrower layers use them)"
        )
        if not has_sinks:
            remedies.append("install ffpa-attn, whose kernels take more dimensions (pip install ffpa-attn)")
    return obstacles, remedies
