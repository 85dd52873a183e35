"""LoRA under autocast: the inputs of adapters are not cast to fp32 and back."""

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks
from ..attention.packed_forward import running_forward
from ..compat import set_lora_cast


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
        set_lora_cast(self._layers, _cast_input)
        return []

    def remove(self) -> None:
        set_lora_cast(self._layers, None)


def _cast_input(layer: Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    if running_forward() is not None and torch.is_autocast_enabled(x.device.type):
        return x
    return Linear._cast_input_dtype(layer, x, dtype)
