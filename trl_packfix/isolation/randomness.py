"""Watch a forward: which modules draw random numbers, by changes of the generator state, and the dtypes of outputs."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks


def device_state(device: torch.device) -> torch.Tensor | None:
    """The state of the random generator of a device; None on the CPU and on `meta`, where nothing is restored."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def set_device_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Put back what `device_state` returned."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, *([] if device.type == "mps" else [device]))


class DrawWatcher(ModelHooks):
    """Records which modules draw random numbers, and the dtypes of outputs, while it is installed.

    A draw is attributed to the innermost module that is running, its forward hooks included. The dtypes of the weights
    are not enough: accelerate runs fp32 weights under autocast inside the model's forward.

    Attributes:
        kinds: classes of the modules that drew.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__()
        self.model = model
        self.kinds: set[type[nn.Module]] = set()
        self.dtypes: set[torch.dtype] = set()
        self._device = device
        self._running: list[nn.Module] = []

    def _register(self) -> list[RemovableHandle]:
        self._last = self._state()
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        return handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._note()
        self._running.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._note()
        self._running.pop()
        for value in output if isinstance(output, tuple) else [output]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.dtypes.add(value.dtype)

    def _note(self) -> None:
        state = self._state()
        if not torch.equal(state, self._last) and self._running:
            self.kinds.add(type(self._running[-1]))
        self._last = state

    def _state(self) -> torch.Tensor:
        state = device_state(self._device)
        return torch.get_rng_state() if state is None else torch.cat([torch.get_rng_state(), state.cpu()])
