"""Choose the attention implementation for packed batches, and set it on the model.

`choose_attention` applies this precedence. On CUDA:

    the user's flash attention -> flash_attention_2, if flash-attn is installed and the model supports it
        -> packfix_varlen on the FlashAttention-2 kernels built into torch -> an error that says what to change

On the CPU: packfix_varlen. `enforce_flash_attention=False` keeps the user's choice and warns about its cost.
"""

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from .forwards import mark_packed_forwards
from .models import base_model, text_config
from .varlen import ATTENTION_NAME

# Config fields that hold the dropout rate of attention weights: attention_dropout, attn_pdrop, ...
ATTENTION_DROPOUT = re.compile(r"^(attention|attn).*drop")
CUDA_VARLEN_TORCH = (2, 10)  # the first torch whose FlashAttention-2 varlen kernels take windows


@dataclass(frozen=True)
class AttentionChoice:
    """The attention implementation for packed batches.

    Attributes:
        name: as in `config._attn_implementation`.
        is_flash: whether it runs on flash attention kernels.
        previous: the implementation that the model had before.
        reason: why this one was chosen.
    """

    name: str
    is_flash: bool
    previous: str
    reason: str


def prepare_for_packing(
    model: nn.Module, enforce_flash_attention: bool = True, dtype: torch.dtype | None = None
) -> AttentionChoice:
    """Prepare a model for packed batches in a custom training loop. Call it once, before the first batch.

    It chooses attention that reads document boundaries and sets it on the model. It adds hooks to the model's forward,
    so that no (T, T) mask is built for packs. It passes the boundaries to layers that gradient checkpointing
    recomputes. The trainer does all of this itself. Test the result with `check_isolation(model)`.

    Args:
        model: a transformers causal LM, with or without PEFT, on the device on which it will train.
        enforce_flash_attention: as in `SFTConfig`; False keeps the model's attention, with a warning.
        dtype: the dtype that reaches the attention kernel, if autocast makes it differ from that of the weights.

    Returns:
        The choice, with `.name`, `.is_flash` and `.reason`.

    Raises:
        ValueError: no attention kernel fits the model, its dtype and the device. The message says what to change.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> prepare_for_packing(LlamaForCausalLM(tiny)).name
    'packfix_varlen'
    """
    choice = select_attention(model, enforce_flash_attention, dtype)
    mark_packed_forwards(model)
    return choice


def select_attention(
    model: nn.Module,
    enforce_flash_attention: bool = True,
    dtype: torch.dtype | None = None,
    *,
    device_type: str | None = None,
) -> AttentionChoice:
    """Choose the attention implementation for packed batches (`choose_attention`) and set it on the model.

    Undo with `set_attention(model, choice.previous)`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> select_attention(LlamaForCausalLM(tiny)).name
    'packfix_varlen'
    """
    choice = choose_attention(model, enforce_flash_attention, dtype, device_type=device_type)
    if choice.name != choice.previous:
        set_attention(model, choice.name)
    return choice


def choose_attention(
    model: nn.Module,
    enforce_flash_attention: bool = True,
    dtype: torch.dtype | None = None,
    *,
    device_type: str | None = None,
    shares_packs: bool = False,
) -> AttentionChoice:
    """Choose the attention implementation for packed batches of the model, or of its text part; change nothing.

    A model with its own attention code, which does not use transformers' attention interface, keeps it; `reason` says
    so. The leak probe then tests whether its documents stay isolated.

    Args:
        model: a transformers model, with or without PEFT.
        dtype: the dtype that reaches the kernel: that of autocast or of the engine, if it differs from the weights'.
        device_type: "cuda" or "cpu": where the model will train, if it is not there yet.
        shares_packs: whether ranks share packs (sequence parallelism). Only packfix_varlen exchanges tokens between
            them, so it is chosen instead of the user's flash attention.

    Raises ValueError if no kernel fits; the message says what to change.
    """
    model = base_model(model)
    device_type = model.device.type if device_type is None else device_type
    dtype = model.dtype if dtype is None else dtype
    previous = own_attention(model)
    user_flash = "flash" in previous

    if not _uses_attention_interface(model):
        reason = f"{type(model).__name__} has its own attention code and supports no other implementation"
        return AttentionChoice(previous, False, previous, reason)
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
        return _choose_on_cuda(model, previous, dtype, shares_packs)
    raise ValueError(
        f"packed training on device type {device_type!r}: {ATTENTION_NAME} has kernels for cpu and cuda only. Set "
        "enforce_flash_attention=False with an attn_implementation that the device has, or packing=False."
    )


def own_attention(model: nn.Module) -> str:
    """The current implementation of the model, or of its text part."""
    return text_config(base_model(model))._attn_implementation or "eager"


def set_attention(model: nn.Module, name: str) -> None:
    """Call `model.set_attn_implementation(name)` for the text part only: vision and audio towers are not packed.

    transformers does not save the implementation in config.json, so a checkpoint reloads without this package.
    """
    model = base_model(model)
    text = text_config(model)
    path = _path_to(model.config, text)
    # "" is the top level: it has no layers, but makes the masks for the text part
    request: Any = name
    for key in reversed(path):
        request = {"": name, key: request}
    model.set_attn_implementation(request)
    assert text._attn_implementation == name, f"attention is {text._attn_implementation}, not {name}"


def _path_to(config: Any, target: Any) -> list[str]:
    """Names of the nested configs that lead from `config` to `target`; [] if they are the same."""
    if config is target:
        return []
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if inner is target:
            return [key]
        if inner is not None and inner.sub_configs and (rest := _path_to(inner, target)):
            return [key, *rest]
    return []


def _uses_attention_interface(model: PreTrainedModel) -> bool:
    # stablelm and opt set only the second flag; models with their own attention code fail the source check
    takes_names = model._supports_attention_backend or model._supports_sdpa
    return bool(takes_names) and model._can_set_attn_implementation()


def _has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())


def _choose_on_cuda(model: PreTrainedModel, previous: str, dtype: torch.dtype, shares_packs: bool) -> AttentionChoice:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention would get {dtype} on CUDA: flash attention supports bfloat16 and float16 only. Set bf16=True "
            "(autocast; the weights may stay float32), or load the model with dtype=torch.bfloat16, or set "
            "enforce_flash_attention=False."
        )
    has_sinks = _has_sinks(model)
    softcap = getattr(text_config(model), "attn_logit_softcapping", None)
    if shares_packs:
        return _choose_exchange(model, previous, softcap)
    kernel = re.split("[@:]", previous)[0]  # "repo@revision:function" names a kernel on the Hub
    drops_sinks = has_sinks and kernel in ("flash_attention_2", "kernels-community/flash-attn2")
    if "flash" in previous and not drops_sinks:
        return AttentionChoice(previous, True, previous, "the user's choice")
    if drops_sinks:
        warnings.warn(
            f"attn_implementation={previous!r} on {type(model).__name__}, which has attention sinks: FlashAttention-2 "
            f"ignores them silently, so the model would train wrongly. {ATTENTION_NAME} is used instead and computes "
            "them exactly. Set attn_implementation='flash_attention_4' for a flash attention that supports sinks.",
            stacklevel=3,
        )
    compatible = getattr(model, "_compatible_flash_implementations", None)
    takes_fa2 = model._supports_flash_attn and (compatible is None or "flash_attention_2" in compatible)
    if is_flash_attn_2_available() and takes_fa2 and not has_sinks:
        return AttentionChoice("flash_attention_2", True, previous, "flash-attn is installed and the model supports it")
    if softcap is not None:
        raise ValueError(
            f"{type(model).__name__} caps its attention logits (attn_logit_softcapping={softcap}) and trains on CUDA "
            "without flash-attn: the FlashAttention-2 kernels built into torch have no softcap. Install flash-attn "
            "(pip install flash-attn), or set enforce_flash_attention=False for eager attention with a T x T mask."
        )
    for name, rate in vars(text_config(model)).items():
        if ATTENTION_DROPOUT.match(name) and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{type(model).__name__} applies dropout to attention weights ({name}={rate}) and trains on CUDA "
                "without flash-attn: the FlashAttention-2 kernels built into torch have no dropout. Load the model "
                f"with {name}=0.0, or install flash-attn (pip install flash-attn), or set "
                "enforce_flash_attention=False for the model's own attention with a T x T mask."
            )
    problem = cuda_varlen_problem()
    if problem is not None:
        raise ValueError(
            f"{problem}, and flash-attn is not installed or not supported by the model: no flash kernel can run packed "
            "batches on CUDA. Install flash-attn (pip install flash-attn), or set enforce_flash_attention=False for "
            "sdpa with a T x T mask."
        )
    return AttentionChoice(ATTENTION_NAME, True, previous, "the FlashAttention-2 kernels built into torch")


def _choose_exchange(model: PreTrainedModel, previous: str, softcap: float | None) -> AttentionChoice:
    problem = cuda_varlen_problem()
    if softcap is not None:
        problem = (
            f"{type(model).__name__} caps its attention logits (attn_logit_softcapping={softcap}), which the "
            "FlashAttention-2 kernels built into torch do not support"
        )
    if problem is not None:
        raise ValueError(
            f"{problem}, and tokens_per_rank is set: only {ATTENTION_NAME}, which runs on these kernels, exchanges "
            "tokens between the ranks that share a pack. Set tokens_per_rank=None."
        )
    reason = "the FlashAttention-2 kernels built into torch"
    if "flash" in previous:
        reason += f", instead of {previous}, which does not exchange tokens between the ranks that share a pack"
    return AttentionChoice(ATTENTION_NAME, True, previous, reason)


def cuda_varlen_problem() -> str | None:
    """Why the FlashAttention-2 kernels built into torch cannot run in this environment; None if they can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < CUDA_VARLEN_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, CUDA_VARLEN_TORCH))}"
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm, where its varlen kernels are not tested"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))} is below 8.0"
    return None
