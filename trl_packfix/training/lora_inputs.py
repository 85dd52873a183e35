"""Save memory of LoRA under autocast: pass inputs to adapters without a cast to fp32.

`loading.py` adds `LoraInputs` to the `ModelHooks` that `isolation/packed_model.py` installs while the model takes
packs. A packed forward is a forward on a pack, a row of several documents.
"""

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks
from ..attention.packed_forward import running_forward
from ..compat import set_lora_cast


class LoraInputs(ModelHooks):
    """Replaces the cast of inputs in LoRA layers, in packed forwards under autocast.

    peft casts the input of each adapted layer to the dtype of the adapter, fp32, and autocast casts it back, so each
    input has a copy in fp32. Without the cast the results are equal to the bit, if there is no dropout, which draws
    other masks for another dtype.

    peft's cast stays in two cases: outside of packed forwards, such as in generation, which may run without autocast;
    and for variants of LoRA such as DoRA, whose own computations would run in another dtype without the cast. This
    class can be removed once peft no longer casts under autocast; see dev/upstream.md.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._layers = [module for module in model.modules() if type(module) is Linear and not module.lora_variant]

    def _register(self) -> list[RemovableHandle]:
        """Replace the method of peft that casts inputs. No hook is registered."""
        set_lora_cast(self._layers, _cast_input)
        return []

    def remove(self) -> None:
        """Give the layers the method of peft back."""
        set_lora_cast(self._layers, None)


def _cast_input(layer: Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of a LoRA layer as it is in a packed forward under autocast; else cast it as peft does."""
    is_packed_forward = running_forward() is not None
    if is_packed_forward and torch.is_autocast_enabled(x.device.type):
        return x
    return Linear._cast_input_dtype(layer, x, dtype)
