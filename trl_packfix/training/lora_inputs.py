"""LoRA under autocast: the inputs of adapters are not cast to fp32 and back."""

from types import MethodType

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks
from ..attention.packed_forward import running_forward

CAST = "_cast_input_dtype"  # peft's method


class LoraInputs(ModelHooks):
    """In packed forwards under autocast LoRA takes its inputs as they are.

    peft casts each input to the dtype of the adapter, fp32, and autocast casts it back: a copy in fp32 of what every
    adapted layer gets. Without dropout the results are equal to the bit; with it, its masks are other ones. peft still
    casts outside of packs, such as in generation, which may run without autocast, and for variants such as DoRA, which
    compute in the dtype of the input. Can be removed when peft does not cast under autocast; see dev/upstream.md.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._layers = [each for each in model.modules() if type(each) is Linear and not each.lora_variant]

    def _register(self) -> list[RemovableHandle]:
        for layer in self._layers:
            vars(layer)[CAST] = MethodType(_cast_input, layer)
        return []

    def remove(self) -> None:
        for layer in self._layers:
            vars(layer).pop(CAST, None)


def _cast_input(layer: Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    if running_forward() is not None and torch.is_autocast_enabled(x.device.type):
        return x
    return Linear._cast_input_dtype(layer, x, dtype)
