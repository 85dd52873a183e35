"""Padded batches on the FlashAttention-2 kernels of torch, as `attn_implementation="flash_attention_2"` computes them.

So a padded run and a packed one can be compared on the same kernels, on a machine without flash-attn. Rows are unpadded
by the functions of transformers: in each layer the host waits for the device twice, as with flash-attn.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input, _upad_input

NAME = "padded_varlen"
NO_WINDOW = {"window_size_left": -1, "window_size_right": 0}


def attend_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of rows (B, H, T, D), padded where `attention_mask` (B, T) is 0: (B, T, H, D)."""
    batch, _, length, head_dim = query.shape
    dtype = query.dtype
    half = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    q, k, v = (states.transpose(1, 2).to(half) for states in (query, key, value))
    indices = None
    if attention_mask is None:
        q, k, v = (states.flatten(0, 1) for states in (q, k, v))
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        longest = length
    else:
        q, k, v, indices, (bounds, _), (longest, _) = _upad_input(q, k, v, attention_mask, length, _unpad_input)
    scale = head_dim**-0.5 if scaling is None else scaling
    options = {"scale": scale} | NO_WINDOW
    # torch knows the backward of this operator
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, int(longest), int(longest), 0.0, True, False, **options
    )[0]
    rows = out.unflatten(0, (batch, length)) if indices is None else _pad_input(out, indices, batch, length)
    return rows.to(dtype), None


AttentionInterface.register(NAME, attend_padded)
AttentionMaskInterface.register(NAME, flash_attention_mask)
