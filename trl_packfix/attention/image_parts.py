"""Images in a pack that ranks share: each goes through the vision tower once, and each rank decodes its part.

An image may lie in several parts of a pack, so each rank of a group gets the whole pack. A hook before the tower leaves
it a share of the images, and a hook behind it exchanges what the tower returns, so that the rest of the model sees all
of them. In backward a rank gets the gradients of its share from all ranks. Towers compute images apart from each other,
which the proof of each degree confirms. What enters the decoder is then cut to the part of the rank.

Two forms are divided: tiles of one size, (N, channels, height, width), and the patches of N images, (P, values), with
the grid of each image. Any other is computed whole on each rank.

T tokens of the pack, s ranks that share it, V tokens of images.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .exchange import exchange_pieces

# Arguments of a tower with one entry per tile
TILE_INPUTS = {"pixel_values", "patch_attention_mask", "pixel_attention_mask"}
# Inputs of the decoder with one row per token of an image, (V, hidden) each -> the mask of these tokens, (1, T)
IMAGE_INPUTS = {"deepstack_visual_embeds": "visual_pos_masks"}


@dataclass(frozen=True)
class TowerDivision:
    """The share of each rank in a call of a tower.

    Attributes:
        rows: of the tower's input, tiles or patches, for each rank.
        index: this rank. If it has no image, it computes the first, so that all ranks call the tower.
        computed: rows that it computes.
    """

    rows: list[int]
    index: int
    computed: int

    def exchanged(self, output: object, group: dist.ProcessGroup) -> Any:
        """The output of the tower on this share -> that on all images."""
        leaves, structure = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] * sum(self.rows) % self.computed:
                raise ValueError(
                    f"The vision tower returned a tensor of shape {tuple(tensor.shape)} for {self.computed} of "
                    f"{sum(self.rows)} patches or tiles, which the {len(self.rows)} ranks that share a pack divide. "
                    "Its first axis does not belong to them, so it cannot be joined. Set `tokens_per_rank=None`."
                )
        own = self.rows[self.index]
        send = torch.cat([tensor[: self._rows_of(tensor, own)].flatten() for tensor in tensors])
        sizes = [[tensor[:1].numel() * self._rows_of(tensor, rows) for tensor in tensors] for rows in self.rows]
        ranks = len(self.rows)
        got = exchange_pieces(send.repeat(ranks), [len(send)] * ranks, [sum(size) for size in sizes], group)
        pieces = [
            piece.split(size) for piece, size in zip(got.split([sum(size) for size in sizes]), sizes, strict=True)
        ]
        whole = (
            torch.cat([piece.view(-1, *tensor.shape[1:]) for piece in from_ranks]).to(tensor.dtype)
            for tensor, from_ranks in zip(tensors, zip(*pieces, strict=True), strict=True)
        )
        return tree_unflatten([next(whole) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def _rows_of(self, tensor: Tensor, rows: int) -> int:
        """Rows of the output for so many rows of the input: fewer, if the tower merges patches."""
        return tensor.shape[0] * rows // self.computed


def divide_tower_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], degree: int, *, index: int
) -> tuple[tuple[Any, ...], dict[str, Any], TowerDivision | None]:
    """The arguments of a tower for the share of rank `index`, and the division; None if it computes all images."""
    arguments = dict(enumerate(args)) | kwargs
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    pixels = next(iter(tensors.values()), None)
    grid = tensors.get("grid_thw")
    if pixels is None:
        return args, kwargs, None
    if grid is not None and pixels.dim() == 2 and len(tensors) == 2:
        sizes = grid.prod(-1).tolist()
    elif pixels.dim() == 4 and all(
        (name in TILE_INPUTS or name == 0) and len(value) == len(pixels) for name, value in tensors.items()
    ):
        sizes = [1] * len(pixels)
    else:
        return args, kwargs, None
    bounds = _share_bounds(sizes, degree)
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    rows = [starts[stop] - starts[start] for start, stop in pairwise(bounds)]
    first, stop = (bounds[index], bounds[index + 1]) if rows[index] else (0, 1)
    patches = slice(starts[first], starts[stop])
    arguments |= {name: value[first:stop] if value is grid else value[patches] for name, value in tensors.items()}
    division = TowerDivision(rows, index, patches.stop - patches.start)
    return tuple(arguments[i] for i in range(len(args))), {name: arguments[name] for name in kwargs}, division


def _share_bounds(sizes: list[int], degree: int) -> list[int]:
    """Where the share of each rank begins: the middle of each of its images is in its share of the rows.

    >>> _share_bounds([4, 4, 4, 12], 2), _share_bounds([1], 4)
    ([0, 3, 4], [0, 0, 0, 1, 1])
    """
    total = sum(sizes)
    middle = 0.0
    ranks = []
    for size in sizes:
        ranks.append(int((middle + size / 2) * degree / total))
        middle += size
    return [sum(rank < j for rank in ranks) for j in range(degree + 1)]


def outermost_towers(towers: list[nn.Module]) -> list[nn.Module]:
    """Those that are in no other."""
    inside = {module for tower in towers for module in tower.modules() if module is not tower}
    return [tower for tower in towers if tower not in inside]


def cut_to_part(inputs: dict[str, Any], part_tokens: int, index: int) -> dict[str, Any]:
    """The inputs of a decoder, by name and without boundaries, cut to `part_tokens` = T / s rows: those of this rank.

    They are returned as they are if they are a part already: without images, packs are cut when they are collated.

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
        elif name in IMAGE_INPUTS and value is not None:
            is_own = torch.zeros(1, num_tokens, dtype=torch.bool, device=states.device)
            is_own[:, rows] = True
            in_part = is_own[inputs[IMAGE_INPUTS[name]]]
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
