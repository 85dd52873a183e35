"""Divide the images of a pack among the ranks that share it, and cut the inputs of the decoder to the part of a rank.

With sequence parallelism a *group* of s neighbouring ranks shares a pack, and each rank holds a *part* of its tokens.
The tokens of an image may lie in several parts, so with images each rank gets the whole pack as input. Then the hooks
of `attention/forwards.py` call this module:

    1. Before the vision tower, `divide_tower_inputs` selects the images that this rank computes, so that each image is
       computed once.
    2. Behind the tower, `TowerDivision.gather_outputs` collects the outputs of all ranks. In backward, each rank gets
       the gradients of its images from all ranks.
    3. Before the decoder, `cut_to_part` cuts the inputs to the tokens of this rank.

This is right if the tower computes each image by itself, which is tested on the model before packs are shared by a
group of this size. The inputs of a tower can be divided in two forms: N tiles (pieces of images) of one size, (N,
channels, height, width); or the P patches of N images, (P, values), with the grid of each image, its number of patches
along each axis. If a tower has other inputs, each rank computes all images.

Shapes: T tokens of the pack, s ranks that share it, V tokens of images.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...attention.exchange import exchange_pieces
from ...group import Group

# The arguments of towers that have one entry per tile
TILE_INPUTS = {"pixel_values", "patch_attention_mask", "pixel_attention_mask"}
# The inputs of decoders that are lists of tensors with one row per token of an image, (V, hidden). For each input, the
# name of the mask that says which tokens of the pack these are, (1, T).
IMAGE_INPUTS = {"deepstack_visual_embeds": "visual_pos_masks"}


@dataclass(frozen=True)
class TowerDivision:
    """How the ranks of a group divide the input rows of a tower, which are tiles or patches.

    Attributes:
        rows_by_rank: the number of input rows that each rank contributes.
        group: the ranks that divide them.
        num_computed: the number of input rows that this rank computes. A rank that contributes none computes the first
            image, because all ranks have to call the tower, and does not send the result.
    """

    rows_by_rank: list[int]
    group: Group
    num_computed: int

    def gather_outputs(self, output: object) -> Any:
        """Return the output of the tower for all images. Each rank sends its output for the images that it computed.

        Raises:
            ValueError: the first axis of a tensor in the output does not belong to the rows.
        """
        for tensor in tree_leaves(output):
            # A tower may return fewer rows than it reads. If this rank got 2 output rows for its 8 input rows, 20 input
            # rows of all ranks give 20 * 2 / 8 = 5 output rows. This number must be whole
            if isinstance(tensor, Tensor) and (
                tensor.dim() == 0 or tensor.shape[0] * sum(self.rows_by_rank) % self.num_computed
            ):
                raise ValueError(
                    f"The vision tower returned a tensor of shape {tuple(tensor.shape)} for {self.num_computed} of "
                    f"{sum(self.rows_by_rank)} patches or tiles, which the {len(self.rows_by_rank)} ranks that share a "
                    "pack divide. Its first axis does not belong to them, so it cannot be joined. Set "
                    "`tokens_per_rank=None`."
                )
        return tree_map_only(Tensor, self._gather_tensor, output)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the output for all images: the rows from all ranks, end to end."""
        num_ranks = len(self.rows_by_rank)
        row_size = tensor[:1].numel()
        # How many numbers each rank contributes. If the tower merges patches, output rows are fewer than input rows
        counts = [tensor.shape[0] * num_rows // self.num_computed * row_size for num_rows in self.rows_by_rank]
        # Each rank sends its numbers to all ranks, and gets `counts[i]` numbers from rank i
        sent = tensor.flatten()[: counts[self.group.rank]]
        received = exchange_pieces(sent.repeat(num_ranks), [len(sent)] * num_ranks, counts, self.group)
        return received.view(-1, *tensor.shape[1:])


def divide_tower_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: Group
) -> tuple[tuple[Any, ...], dict[str, Any], TowerDivision | None]:
    """Select the images that a rank computes.

    Args:
        args, kwargs: the arguments of the tower for all images of the pack.
        group: the ranks that share the pack.

    Returns:
        The arguments for the images of the rank, and the division. The division is None if this rank is
        alone, or the inputs cannot be divided. Then the arguments are unchanged, and the rank computes all images.
    """
    arguments = dict(enumerate(args)) | kwargs
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if group.is_alone or not tensors:
        return args, kwargs, None

    # Find out how many input rows each image has. Towers take the pixels first, also by position: then the name is 0
    pixels = next(iter(tensors.values()))
    grid = tensors.get("grid_thw")
    has_tiles = pixels.dim() == 4 and all(
        (name in TILE_INPUTS or name == 0) and len(value) == len(pixels) for name, value in tensors.items()
    )
    if grid is not None and pixels.dim() == 2 and len(tensors) == 2:  # the pixels and the grid only
        sizes = grid.prod(-1).tolist()
    elif has_tiles:
        sizes = [1] * len(pixels)
    else:
        return args, kwargs, None

    # Divide the images and their rows among the ranks
    bounds = _image_bounds(sizes, group.size)
    first_rows = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    rows_by_rank = [first_rows[stop] - first_rows[first] for first, stop in pairwise(bounds)]
    has_images = rows_by_rank[group.rank] > 0
    images = slice(bounds[group.rank], bounds[group.rank + 1]) if has_images else slice(0, 1)
    own_rows = slice(first_rows[images.start], first_rows[images.stop])

    arguments |= {name: value[images] if value is grid else value[own_rows] for name, value in tensors.items()}
    own_args = tuple(arguments[i] for i in range(len(args)))
    own_kwargs = {name: arguments[name] for name in kwargs}
    return own_args, own_kwargs, TowerDivision(rows_by_rank, group, own_rows.stop - own_rows.start)


def _image_bounds(sizes: list[int], degree: int) -> list[int]:
    """Divide consecutive images evenly among ranks: return the first image of each rank, and the number of images.

    The rows of all images are divided into `degree` equal ranges, one for each rank. An image belongs to the rank
    whose range holds the middle of the image.

    Args:
        sizes: number of rows of each image.
        degree: number of ranks.

    >>> _image_bounds([4, 4, 4, 12], 2), _image_bounds([1], 4)
    ([0, 3, 4], [0, 0, 0, 1, 1])
    """
    stops = np.cumsum(sizes)
    middles = stops - np.array(sizes) / 2
    ranks = (middles * degree / stops[-1]).astype(int)  # in rising order
    return np.searchsorted(ranks, range(degree + 1)).tolist()


def outermost_towers(towers: list[nn.Module]) -> list[nn.Module]:
    """Return the towers that are not inside of another tower."""
    inside = {module for tower in towers for module in tower.modules() if module is not tower}
    return [tower for tower in towers if tower not in inside]


def cut_to_part(inputs: dict[str, Any], part_tokens: int, index: int) -> dict[str, Any]:
    """Cut the inputs of a decoder to the tokens of one rank.

    Args:
        inputs: the inputs by name, without boundaries. If they have the tokens of this rank only, they are returned
            unchanged: a pack of text is cut when it is collated.
        part_tokens: the number of tokens of the rank, T / s.
        index: the rank in its group.

    Raises:
        ValueError: it is not known which rows of an input belong to which tokens.

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
    cut_inputs: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
            cut_inputs[name] = value[:, rows]
        elif name == "position_ids" and value is not None:
            # With M-RoPE, (3, 1, T) or, with positions of text, (4, 1, T)
            cut_inputs[name] = value[..., rows]
        elif name in IMAGE_INPUTS and value is not None:
            # The input has a row for each token of an image. Select the rows whose tokens this rank holds.
            is_own = torch.zeros(1, num_tokens, dtype=torch.bool, device=states.device)
            is_own[:, rows] = True
            in_part = is_own[inputs[IMAGE_INPUTS[name]]]
            cut_inputs[name] = [features[in_part] for features in value]
        else:
            shapes = [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()]
            if shapes:
                raise ValueError(
                    f"`{name}` of shape {shapes[0]} enters the decoder beside {num_tokens} tokens of a pack with "
                    f"images, of which this rank holds {part_tokens}. Which of its rows belong to which tokens is not "
                    "known, so it cannot be cut. Set `tokens_per_rank=None`."
                )
            cut_inputs[name] = value
    return cut_inputs
