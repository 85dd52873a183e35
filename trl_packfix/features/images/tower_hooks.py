"""Hooks on the vision towers and the decoder of a model while it takes packs with images.

A `PackedForwardGuard` (`attention/forwards.py`) makes the boundaries of documents known inside of a model that takes
packs, and installs these hooks with its own. They keep these boundaries from the tower. If ranks share the pack, each
rank computes some of the images, the outputs of all ranks are joined, and the decoder gets the part of the pack that
this rank holds. `parts.py` divides, joins and cuts.
"""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...attention.forwards import CallArguments, PackedForwardGuard
from ...attention.models import backbone, find_towers
from ...attention.packed_forward import BOUNDARIES, CU_SEQ_LENS, running_forward
from ...isolation.repair import AroundCall, AroundCalls
from .parts import cut_to_part, divide_tower_inputs, outermost_towers


class TowerHooks(AroundCalls):
    """The hooks on the towers and the decoder of the model of a guard."""

    def __init__(self, guard: PackedForwardGuard):
        self._towers = find_towers(guard.model)  # a tower may contain another one, such as an encoder below a projector
        super().__init__(*outermost_towers(self._towers))
        self._guard = guard

    def _register(self) -> list[RemovableHandle]:
        handles = [tower.register_forward_pre_hook(_drop_boundaries, with_kwargs=True) for tower in self._towers]
        handles += super()._register()
        if self._towers:
            handles.append(backbone(self._guard.model).register_forward_pre_hook(_cut_decoder_inputs, with_kwargs=True))
        return handles

    def _around(self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Run a tower on the images that this rank computes, where ranks share the pack, and join the outputs.

        Yields:
            The arguments of the call, for which the generator gets the output, and then the joined output. Nothing is
            yielded if the call stays as it is.
        """
        forward = running_forward()  # the packed forward that runs, with the group of ranks that share the pack
        # A model may have several guards, each with `TowerHooks` of its own. Only the guard that has made the running
        # forward has it as `entered_forward`. The hooks of the others do nothing, so the images are divided once.
        if forward is None or forward is not self._guard.entered_forward:
            return
        args, kwargs, division = divide_tower_inputs(args, kwargs, forward.group)
        if division is not None:
            output = yield args, kwargs
            yield division.gather_outputs(output)


def _drop_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Remove the boundaries of documents (`cu_seq_lens_q`, `seq_idx` and so on) from the arguments of a tower.

    A tower passes boundaries of images to its attention under the same names.
    """
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _cut_decoder_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
    """Cut the inputs of the decoder to the tokens of this rank, if ranks share the pack."""
    forward = running_forward()
    if forward is None or forward.group.is_alone:
        return None
    # Cut all inputs but the boundaries of queries and keys (`cu_seq_lens_q`, `max_length_q` and so on), which describe
    # the whole pack on every rank. `part_tokens` is the number of tokens that each rank holds
    inputs = {name: value for name, value in kwargs.items() if name not in CU_SEQ_LENS}
    return args, kwargs | cut_to_part(inputs, forward.part_tokens, forward.group.rank)
