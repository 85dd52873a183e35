"""Find the modules that draw random numbers in their forwards, from changes of the generator state."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks


class DrawWatcher(ModelHooks):
    """Records which modules of `model` draw random numbers, while it is installed.

    A draw is attributed to the innermost module that is running, its forward hooks included.

    Attributes:
        kinds: classes of the modules that drew.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__()
        self.model = model
        self.kinds: set[type[nn.Module]] = set()
        self._device = device
        self._running: list[nn.Module] = []

    def _register(self) -> list[RemovableHandle]:
        self._last = self._state()
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        return handles

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._note()
        self._running.append(module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._note()
        self._running.pop()

    def _note(self) -> None:
        state = self._state()
        if not torch.equal(state, self._last) and self._running:
            self.kinds.add(type(self._running[-1]))
        self._last = state

    def _state(self) -> torch.Tensor:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return torch.cat(states)
