"""Which modules draw random numbers in their forwards: seen in the state of the generators, whatever they call it."""

from typing import Any

import torch
from torch import nn


class DrawWatcher:
    """Watches the forwards of all modules of `model`; `remove()` ends it.

    A draw belongs to the innermost module that was running, its forward hooks included.

    Attributes:
        kinds: classes of the modules that drew.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.kinds: set[type[nn.Module]] = set()
        self._device = device
        self._running: list[nn.Module] = []
        self._last = self._state()
        self._handles = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

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
