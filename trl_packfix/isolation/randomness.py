"""Watch a forward: which modules draw random numbers, by changes of the generator state, and the dtypes of outputs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


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


@contextmanager
def watching_draws(model: nn.Module, device: torch.device) -> Iterator[tuple[set[type[nn.Module]], set[torch.dtype]]]:
    """Within this context, note the classes of the modules that draw random numbers, and the dtypes of all outputs.

    A draw is attributed to the innermost module that is running, its forward hooks included. The dtypes of the weights
    are not enough: accelerate runs fp32 weights under autocast inside the model's forward.
    """
    kinds = set[type[nn.Module]]()
    dtypes = set[torch.dtype]()
    running = list[nn.Module]()

    def current() -> torch.Tensor:
        state = device_state(device)
        return torch.get_rng_state() if state is None else torch.cat([torch.get_rng_state(), state.cpu()])

    last = current()

    def note() -> None:
        nonlocal last
        before = last
        last = current()
        if running and not torch.equal(before, last):
            kinds.add(type(running[-1]))

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        note()
        running.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        note()
        running.pop()
        for value in output if isinstance(output, tuple) else [output]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                dtypes.add(value.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield kinds, dtypes
