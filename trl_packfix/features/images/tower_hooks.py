"""Hooks on the vision towers and the decoder of a model while it takes packs with images.

A `PackedForwardGuard` (`attention/forwards.py`) makes the boundaries of documents known inside of a model that takes
packs, and installs these hooks with its own. They keep these boundaries from the tower. If ranks share the pack, each
rank computes some of the images, the outputs of all ranks are joined, and the decoder gets the part of the pack that
this rank holds. `parts.py` divides, joins and cuts.
"""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...attention.forwards import CallArguments, ModelHooks, PackedForwardGuard
from ...attention.models import backbone, find_towers
from ...attention.packed_forward import BOUNDARIES, CU_SEQ_LENS, running_forward
from .parts import TowerDivision, cut_to_part, divide_tower_inputs, outermost_towers


class TowerHooks(ModelHooks):
    """The hooks on the towers and the decoder of the model of a guard."""

    def __init__(self, guard: PackedForwardGuard):
        super().__init__()
        self._guard = guard
        # For each call of a tower that is running, how its images are divided among ranks; None if they are not
        self._divisions: list[TowerDivision | None] = []

    def _register(self) -> list[RemovableHandle]:
        model = self._guard.model
        image_towers = find_towers(model)  # a tower may contain another one, such as an encoder below a projector
        outermost = outermost_towers(image_towers)
        decoders = [backbone(model)] if image_towers else []
        handles = [tower.register_forward_pre_hook(_drop_boundaries, with_kwargs=True) for tower in image_towers]
        handles += [tower.register_forward_pre_hook(self._divide_inputs, with_kwargs=True) for tower in outermost]
        handles += [decoder.register_forward_pre_hook(_cut_decoder_inputs, with_kwargs=True) for decoder in decoders]
        # `always_call`, because after a forward that raises the next one must not find a division
        handles += [tower.register_forward_hook(self._join_outputs, always_call=True) for tower in outermost]
        return handles

    def _divide_inputs(self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Return the arguments of a tower: where ranks share the pack, only the images that this rank computes."""
        forward = running_forward()  # the packed forward that runs, with the group of ranks that share the pack
        division = None
        # `entered_forward` is the packed forward that this guard has made. If several guards are on a model, the others
        # have None, so the images are divided once.
        if forward is not None and forward is self._guard.entered_forward:
            args, kwargs, division = divide_tower_inputs(args, kwargs, forward.group)
        self._divisions.append(division)
        return args, kwargs

    def _join_outputs(self, tower: nn.Module, args: tuple[Any, ...], output: object) -> object:
        """Return the output of a tower on all images of the pack, from its output on the images of each rank."""
        # Towers that are divided are not inside of each other, so the last division belongs to this call. torch calls
        # this hook even if a pre-hook raised. Then the list may be empty. If the forward of the tower raised, its
        # output is None.
        division = self._divisions.pop() if self._divisions else None
        if division is None or output is None:
            return output
        return division.gather_outputs(output)


def _drop_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Remove the boundaries of documents (`cu_seq_lens_q` and so on) from the arguments of a tower.

    A tower passes boundaries of images to its attention under the same names.
    """
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _cut_decoder_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
    """Cut the inputs of the decoder to the tokens of this rank, if ranks share the pack."""
    forward = running_forward()
    if forward is None or forward.group.is_alone:
        return None
    # Boundaries are of the whole pack on all ranks
    inputs = {name: value for name, value in kwargs.items() if name not in CU_SEQ_LENS}
    return args, kwargs | cut_to_part(inputs, forward.part_tokens, forward.group.rank)
