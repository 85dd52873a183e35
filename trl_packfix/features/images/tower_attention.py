"""The attention implementation `packfix_flash_tower`, for vision towers that compute all images of a pack in one row.

With `sdpa` such towers call attention once per image, or once per window of an image, and read the lengths of the
images on the host in every layer. To flash attention they pass the boundaries of all images in one call. transformers
knows flash attention by its name, which contains "flash". So the name of this implementation contains it, to get the
boundaries, and then it computes with:

    CUDA   FlashAttention-2 as built into torch, not causal: one call per layer, and the host reads nothing
    other  F.scaled_dot_product_attention: images (or windows) of equal length are rows of one batch

The implementation is set on the config of the tower (`towers.py`). A call without boundaries gives the result
of `sdpa`.

Shapes: T patches, H query heads, G key/value heads, D head dimension.
"""

import inspect
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...attention.flash import CUDA_DTYPES, CudaKernel, flash_on_cuda
from ...attention.kernel_errors import KernelError, is_device_error
from ...attention.kernels import attend_by_document
from ...attention.models import find_towers
from ...attention.varlen import cast_for_autocast, runs_flash

TOWER_ATTENTION = "packfix_flash_tower"
# The attention of towers that `packfix_flash_tower` replaces. Any other attention is the user's choice.
REPLACED_ATTENTION = "sdpa"


class TowerAttentionError(KernelError):
    """Raised if `packfix_flash_tower` does not compute what a tower needs, or if its kernel refuses a call."""

    kernel = TOWER_ATTENTION


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
    """Compute attention for a module of a tower; the signature is that of transformers' attention functions.

    Each patch attends to all patches of its image, or of its window.

    Args:
        module: the attention module.
        query, key, value: (1, H, T, D), (1, G, T, D) and (1, G, T, D).
        scaling: factor of the logits; None: 1 / sqrt(D).
        dropout: rate at which attention weights are dropped.
        kwargs: among others `cu_seq_lens_q`, the boundaries of images or windows.

    Returns:
        The output (1, T, H, D), and None in place of the attention weights.

    Raises:
        TowerAttentionError: the call is causal, has several rows, a cache, softcap, sinks or a position bias, or the
            kernel refuses it.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    # Boundaries say which patches belong to one image. A mask may hide more, so with a mask `sdpa` computes the call
    if bounds is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    # `s_aux` is what transformers calls attention sinks
    problems = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if is_causal:
        problems.append("is_causal")
    if query.shape[0] != 1:
        problems.append("several rows")
    if query.shape[2] != key.shape[2]:  # keys of earlier calls come before these
        problems.append("a cache")
    if problems:
        raise TowerAttentionError(
            f"{type(module).__name__} gives {', '.join(problems)} to the attention of its tower, and {TOWER_ATTENTION} "
            "has full attention within each image only. Set attn_implementation='sdpa' on the config of the tower."
        )
    query, key, value = cast_for_autocast(module, query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if runs_flash(query, value, softcap=None, dropout=dropout) and query.dtype in CUDA_DTYPES:
        longest = kwargs["max_length_q"]
        kernel = CudaKernel((bounds, bounds), (longest, longest), window=None, scale=scale, is_causal=False)
        try:
            out = flash_on_cuda(query, key, value, sinks=None, kernel=kernel)
        except RuntimeError as error:
            if is_device_error(error):
                raise
            raise TowerAttentionError(str(error)) from error
    else:
        lengths = bounds.diff().tolist()
        out = attend_by_document(query, key, value, lengths, is_causal=False, scale=scale, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TOWER_ATTENTION, tower_attention)
AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)


@lru_cache(maxsize=256)
def _passes_boundaries(module_class: type[nn.Module]) -> bool:
    """Return whether the code of a module passes boundaries of its own to flash attention, and to no other attention.

    transformers has no field for this, so the source is searched.
    """
    try:
        code = inspect.getsource(module_class)
    except (OSError, TypeError):
        return False
    return "is_flash_attention_requested(" in code and "cu_seq_lens_q=" in code


def tower_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs of the modules of towers that give all images to flash attention in one call.

    With any other attention these modules call it once per image.
    """
    configs = {}
    for tower in find_towers(model):
        for module in tower.modules():
            module_class: Any = type(module)
            config = getattr(module, "config", None)
            if config is not None and _passes_boundaries(module_class):
                configs[id(config)] = config
    return list(configs.values())
