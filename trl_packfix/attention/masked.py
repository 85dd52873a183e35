"""The attention implementation `packfix_masked`: transformers' `sdpa` with a mask in every packed forward.

`choice.py` uses it for a model that must keep its own attention `sdpa`. With `sdpa` transformers builds no mask where
it would hide nothing but later tokens, as in a pack of one document. But modules with `is_causal=False`, such as those
of the text part of PaliGemma, are causal only by the mask. Without it they would attend to later tokens.
"""

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .models import text_config
from .packed_forward import running_forward

MASKED_NAME = "packfix_masked"


def packed_sdpa_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the result of `sdpa_mask`; never None in a packed forward."""
    if running_forward() is not None:  # a packed forward is running
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(MASKED_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(MASKED_NAME, packed_sdpa_mask)


def own_in_packs(model: PreTrainedModel, name: str) -> str:
    """Return the attention implementation that a model with its own attention `name` has in packs.

    It is `packfix_masked` if `name` is `sdpa` and the model has attention modules that are causal only by the mask,
    else `name`.
    """
    text = text_config(model)
    # Attention modules have `is_causal`. Those of a vision tower have another config than the text part.
    text_modules = [module for module in model.modules() if getattr(module, "config", None) is text]
    needs_masks = any(getattr(module, "is_causal", True) is False for module in text_modules)
    return MASKED_NAME if name == "sdpa" and needs_masks else name
