"""Hooks of the user's that tests before and between optimizer steps leave out, and a check that nothing was changed.

Backward passes of a test call the hooks on gradients that the user has registered. Some have an effect: an optimizer
that is fused into the backward steps in them (GaLore and APOLLO layer by layer), others count their calls. No test
needs them, because they act on gradients of whole steps. Forward hooks stay: they may change what the model computes.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..compat import hooks_left_out

# Packages whose hooks on gradients are a part of the model, or of what shards or divides it
LIBRARIES = ("torch", "deepspeed", "accelerate", "trl_packfix", "transformers", "peft", "trl", "bitsandbytes")
# But these of transformers step an optimizer or a scheduler, layer by layer
STEPPING = ("optimizer_hook", "scheduler_hook")
SAMPLED = 16  # values of a parameter by which a change is noticed
NAMED = 3  # hooks that a message names


def _package_of(hook: Any) -> str:
    """Return the top-level package that defines a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0]


def name_of(hook: Any) -> str:
    """Return the name of a hook, as a message writes it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _is_left_out(hook: Any) -> bool:
    """Return whether tests run without this hook on gradients."""
    return _package_of(hook) not in LIBRARIES or name_of(hook).rpartition(".")[2] in STEPPING


def _gradient_hooks(model: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return each table of hooks on gradients that has some to leave out, and these, by their handles."""
    tables: list[dict[int, Any]] = []
    for module in model.modules():
        tables += [module._backward_hooks, module._backward_pre_hooks]
    for parameter in model.parameters():
        tables.append(parameter._backward_hooks or {})
        tables.append(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
    found = []
    for hooks in tables:
        left_out = {key: hook for key, hook in hooks.items() if _is_left_out(hook)}
        if left_out:
            found.append((hooks, left_out))
    return found


@contextmanager
def gradient_hooks_aside(model: nn.Module) -> Iterator[None]:
    """Take the user's hooks on gradients from the model, and give them back at the end."""
    with hooks_left_out(_gradient_hooks(model)):
        yield


def describe_hooks(model: nn.Module) -> str:
    """Say which hooks of the user's the tests left out, and which ran in them; "" if there are none."""
    aside = Counter(name_of(hook) for _, of_user in _gradient_hooks(model) for hook in of_user.values())
    ran = forward_hooks_of_user(model)
    text = ""
    if aside:
        text += (
            f"; hooks on gradients left out: {_join_names([f'{name} ({num} times)' for name, num in aside.items()])}"
        )
    if ran:
        text += f"; forward hooks ran, and count their calls in the tests, too: {_join_names(ran)}"
    return text


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def forward_hooks_of_user(model: nn.Module) -> list[str]:
    """Name the user's forward hooks, with their modules. Tests run them."""
    return [
        f"{name_of(hook)} of {name or 'the model'}"
        for name, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if _package_of(hook) not in LIBRARIES
    ]


def sample_parameters(model: nn.Module) -> Tensor:
    """Return some values of each parameter, as this rank holds it: fp32 on the CPU, equal if nothing was trained."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # after a forward the root still holds whole parameters
            module.reshard()
    samples = []
    for parameter in model.parameters():
        values: Tensor = getattr(parameter, "ds_tensor", parameter.detach())
        if isinstance(values, DTensor):
            values = values.to_local()
        values = values.flatten()
        if values.is_floating_point():  # not weights that are packed in bytes
            samples.append(values[:: max(values.numel() // SAMPLED, 1)][:SAMPLED].float())
    return torch.cat([sample.cpu() for sample in samples]) if samples else torch.zeros(0)


@contextmanager
def parameters_unchanged(model: nn.Module) -> Iterator[None]:
    """Raise ValueError at the end of this context if a test in it has changed parameters of the model."""
    before = sample_parameters(model)
    yield
    after = sample_parameters(model)
    if before.shape == after.shape and bool(((before == after) | (before.isnan() & after.isnan())).all()):
        return
    hooks = forward_hooks_of_user(model)
    ran = f"These hooks ran in the tests: {_join_names(hooks)}" if hooks else "No hook of the user's ran in the tests"
    raise ValueError(
        f"The tests before the first step changed parameters of {type(model).__name__}, so training would not begin "
        f"with the weights that were given. {ran}. Register what changes weights in `on_step_begin` of a callback, "
        "which is called after the tests, or in a subclass's `training_step`."
    )
