"""Cut what enters the decoder of an image-text model to the part of a pack that a rank holds: sequence parallelism.

An image may lie in several parts of a pack. So each rank of a group gets the whole pack and puts all its images among
the tokens. Its decoder computes the rows of its part.

T tokens of the pack, s ranks that share it, V tokens of images.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Inputs with one row per token of an image, (V, hidden) each -> the mask of these tokens, (1, T)
OF_IMAGES = {"deepstack_visual_embeds": "visual_pos_masks"}


def cut_to_part(inputs: dict[str, Any], part_tokens: int, index: int) -> dict[str, Any]:
    """The inputs of a decoder, by name and without boundaries, cut to `part_tokens` = T / s rows: those of this rank.

    They are returned as they are if they are a part already: without images, packs are cut when they are collated.

    Raises:
        ValueError: an input has no known axis of tokens.

    >>> whole = {"inputs_embeds": torch.zeros(1, 6, 8), "position_ids": torch.arange(24).reshape(4, 1, 6)}
    >>> part = cut_to_part(whole, part_tokens=3, index=1)
    >>> part["inputs_embeds"].shape, part["position_ids"][0].tolist()
    (torch.Size([1, 3, 8]), [[3, 4, 5]])
    """
    states = inputs.get("inputs_embeds")
    if states is None or states.shape[1] == part_tokens:
        return inputs
    num_tokens = states.shape[1]
    rows = slice(index * part_tokens, (index + 1) * part_tokens)
    part: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
            part[name] = value[:, rows]
        elif name == "position_ids" and value is not None:  # (1, T) and, with M-RoPE, (4, 1, T)
            part[name] = value[..., rows]
        elif name in OF_IMAGES and value is not None:
            is_own = torch.zeros(1, num_tokens, dtype=torch.bool, device=states.device)
            is_own[:, rows] = True
            in_part = is_own[inputs[OF_IMAGES[name]]]
            part[name] = [features[in_part] for features in value]
        elif shapes := [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()]:
            raise ValueError(
                f"`{name}` of shape {shapes[0]} enters the decoder beside {num_tokens} tokens of a pack with images, "
                f"of which this rank holds {part_tokens}. Which of its rows belong to which tokens is not known, so it "
                "cannot be cut. Set `tokens_per_rank=None`."
            )
        else:
            part[name] = value
    return part
