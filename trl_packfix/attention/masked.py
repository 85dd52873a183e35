"""transformers' sdpa attention with a mask in every pack, registered as `packfix_masked`.

For sdpa transformers drops a mask that hides nothing but later tokens, as that of a pack of one document. Modules that
are not causal by themselves (`is_causal=False`: the text part of PaliGemma) would then attend to later tokens.
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
    """The result of `sdpa_mask`, in a packed forward never None."""
    if running_forward() is not None:
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(MASKED_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(MASKED_NAME, packed_sdpa_mask)


def own_in_packs(model: PreTrainedModel, name: str) -> str:
    """What a model that keeps its own attention `name` runs packs on."""
    text = text_config(model)
    attentions = [module for module in model.modules() if getattr(module, "config", None) is text]
    needs_masks = any(getattr(module, "is_causal", True) is False for module in attentions)
    return MASKED_NAME if name == "sdpa" and needs_masks else name
