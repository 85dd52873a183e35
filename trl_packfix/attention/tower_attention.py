"""The attention implementation `packfix_flash_tower`: vision towers that hold all images of a pack in one row.

On sdpa such towers call attention once per image, or per window of an image, and read the lengths on the host in every
layer. To a flash attention they hand the boundaries of the images. A name with "flash" makes transformers do so here:

    device  how
    CUDA    FlashAttention-2 as built into torch, not causal: one call per layer, and no read on the host
    other   images, or windows, of one length are rows of one batch of F.scaled_dot_product_attention

The implementation is set on the config of the tower itself. Calls without boundaries give the result of `sdpa`.

T patches, H query heads, G key/value heads, D head dimension.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..compat import set_config_attention
from .flash import CUDA_DTYPES, CudaKernel, flash_on_cuda
from .kernel_errors import KernelError, is_device_error
from .kernels import attend_by_document
from .models import towers
from .varlen import cast_for_autocast, runs_flash

TOWER_ATTENTION = "packfix_flash_tower"
REPLACED_ATTENTION = "sdpa"  # the attention of towers that this one replaces; any other is the user's choice

# Boundaries -> lengths. On devices without flash attention the host reads them once, not in every layer.
_lengths = WeakTensorKeyDictionary()


class TowerAttentionError(KernelError):
    """A tower needs something that this attention does not compute, or its kernel refused the call."""


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `query` (1, H, T, D), `key` and `value` (1, G, T, D) -> ((1, T, H, D), None).

    Each patch attends to all patches between the same two boundaries in `cu_seq_lens_q`.

    Raises:
        TowerAttentionError: the call is causal, has several rows, softcap or sinks, or the kernel refuses it.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    is_causal = kwargs.get("is_causal")
    problems = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    problems += ["is_causal"] * bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    problems += ["several rows"] * (query.shape[0] != 1) + ["a cache"] * (query.shape[2] != key.shape[2])
    if problems:
        raise TowerAttentionError(
            f"{type(module).__name__} gives {', '.join(problems)} to the attention of its tower, and {TOWER_ATTENTION} "
            "has full attention within each image only. Set attn_implementation='sdpa' on the config of the tower."
        )
    query, key, value = cast_for_autocast(module, query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if runs_flash(query, value, None, dropout=dropout) and query.dtype in CUDA_DTYPES:
        longest = kwargs["max_length_q"]
        kernel = CudaKernel((bounds, bounds), (longest, longest), None, scale, is_causal=False)
        try:
            out = flash_on_cuda(query, key, value, None, kernel)
        except RuntimeError as error:
            if is_device_error(error):
                raise
            raise TowerAttentionError(str(error)) from error
    else:
        if bounds not in _lengths:
            _lengths[bounds] = [stop - start for start, stop in pairwise(bounds.tolist())]
        out = attend_by_document(query, key, value, _lengths[bounds], is_causal=False, scale=scale, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TOWER_ATTENTION, tower_attention)
AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)


@lru_cache(maxsize=256)
def _hands_over_boundaries(kind: type[nn.Module]) -> bool:
    """Whether the code of a module passes boundaries of its own to a flash attention, and to no other."""
    try:
        code = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return "is_flash_attention_requested(" in code and "cu_seq_lens_q=" in code


def tower_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of towers that hand boundaries to a flash attention, and call any other image by image."""
    configs = {}
    for module in (module for tower in towers(model) for module in tower.modules()):
        kind: Any = type(module)
        config = getattr(module, "config", None)
        if config is not None and _hands_over_boundaries(kind):
            configs[id(config)] = config
    return list(configs.values())


def set_tower_attention(model: PreTrainedModel, name: str) -> None:
    """Set `TOWER_ATTENTION` on towers that have `REPLACED_ATTENTION`, or the reverse."""
    for config in tower_configs(model):
        if config._attn_implementation in (TOWER_ATTENTION, REPLACED_ATTENTION):
            set_config_attention(config, name)


def has_tower_attention(model: PreTrainedModel) -> bool:
    return any(config._attn_implementation == TOWER_ATTENTION for config in tower_configs(model))


def note_on_towers(model: PreTrainedModel, takes: bool, why_not: str) -> str:
    """What the report says about vision towers: whether this attention `takes` them, or `why_not`."""
    names = {config._attn_implementation for config in tower_configs(model)}
    if takes and names & {REPLACED_ATTENTION, TOWER_ATTENTION}:
        return f"; vision tower on {TOWER_ATTENTION}, all images of a pack together"
    slow = [name for name in sorted(names) if name is not None and "flash" not in name]
    if not slow:
        return ""
    return (
        f"; vision tower on {slow[0]}, image by image: {why_not} "
        "(attn_implementation='flash_attention_2' for the whole model avoids it)"
    )


@contextmanager
def towers_as_given(model: PreTrainedModel) -> Iterator[None]:
    """Within this context no tower has `TOWER_ATTENTION`."""
    has = has_tower_attention(model)
    set_tower_attention(model, REPLACED_ATTENTION)
    try:
        yield
    finally:
        if has:
            set_tower_attention(model, TOWER_ATTENTION)
