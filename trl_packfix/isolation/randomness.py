"""Find which modules draw random numbers in a forward, and the dtypes of outputs. `probe.py` and others use this.

A module has drawn if the state of a random generator has changed while it ran.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


def device_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the random generator of a device, or None for the CPU and for `meta`.

    Callers restore the generator of the CPU by `torch.random.fork_rng`.
    """
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def set_device_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Restore the state that `device_state` returned; without effect if that was None."""
    if state is None:
        return
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


@contextmanager
def watching_draws(model: nn.Module, device: torch.device) -> Iterator[tuple[set[type[nn.Module]], set[torch.dtype]]]:
    """Within this context, two sets are filled: classes of modules that draw random numbers, and dtypes of outputs.

    A draw is attributed to the innermost module that is running. Draws of hooks on the forward of a module (the noise
    of NEFTune) count as draws of the module. The dtypes are those in which the model computes. The weights may have
    another dtype: accelerate runs fp32 weights under autocast.
    """
    drawing_classes: set[type[nn.Module]] = set()
    dtypes: set[torch.dtype] = set()
    running: list[nn.Module] = []  # the innermost module last

    def generator_state() -> torch.Tensor:
        state = device_state(device)
        return torch.get_rng_state() if state is None else torch.cat([torch.get_rng_state(), state.cpu()])

    last_state = generator_state()

    def note_draws() -> None:
        nonlocal last_state
        state_before = last_state
        last_state = generator_state()
        if running and not torch.equal(state_before, last_state):
            drawing_classes.add(type(running[-1]))

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        note_draws()
        running.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        note_draws()
        running.pop()
        # Tensors in other containers, such as a `ModelOutput`, are left out
        for value in output if isinstance(output, tuple) else [output]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                dtypes.add(value.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            # `enter` runs before and `leave` after the module's other hooks; `leave` also if the module raises
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield drawing_classes, dtypes
