"""Take the user's hooks on gradients from the model during tests, and check that tests have changed no parameter.

Two tests run backward passes before and between optimizer steps: the leak probe, which tests whether documents of a
pack change each other, and `training/first_step.py`. These passes call the hooks on gradients that the user has
registered. Some hooks change something: an optimizer that is fused into the backward pass takes its step in a hook
(GaLore and APOLLO layer by layer), and others count their calls. No test needs these hooks, because they act on
gradients of whole steps. The user's forward hooks run in tests, because they may change what the model computes.
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
# Names of hooks of transformers that tests run without all the same: they step an optimizer or a scheduler
STEPPING_HOOKS = ("optimizer_hook", "scheduler_hook")
NUM_SAMPLED = 16  # values of each parameter by which a change is noticed
NUM_NAMED = 3  # hooks that a message names


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
    return _package_of(hook) not in LIBRARIES or name_of(hook).rpartition(".")[2] in STEPPING_HOOKS


def _gradient_hooks(model: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return the dictionaries in which torch holds the hooks on gradients, if they have hooks to be left out in tests.

    Returns:
        Pairs of dictionaries of hooks, by the id of their handle: all hooks, and the hooks to be left out.
    """
    tables: list[dict[int, Any]] = []
    for module in model.modules():
        tables += [module._backward_hooks, module._backward_pre_hooks]
    for parameter in model.parameters():
        tables.append(parameter._backward_hooks or {})
        tables.append(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
    tables_and_entries = []
    for hooks in tables:
        left_out = {key: hook for key, hook in hooks.items() if _is_left_out(hook)}
        if left_out:
            tables_and_entries.append((hooks, left_out))
    return tables_and_entries


@contextmanager
def gradient_hooks_aside(model: nn.Module) -> Iterator[None]:
    """Within this context, the model is without the user's hooks on gradients. Afterwards it has them again."""
    with hooks_left_out(_gradient_hooks(model)):
        yield


def describe_hooks(model: nn.Module) -> str:
    """Return a text that says which of the user's hooks tests run without, and which they run; "" if there are none."""
    num_left_out = Counter(name_of(hook) for _, left_out in _gradient_hooks(model) for hook in left_out.values())
    forward_hooks = forward_hooks_of_user(model)
    text = ""
    if num_left_out:
        names = _join_names([f"{name} ({num} times)" for name, num in num_left_out.items()])
        text += f"; hooks on gradients left out: {names}"
    if forward_hooks:
        text += f"; forward hooks ran, and count their calls in the tests, too: {_join_names(forward_hooks)}"
    return text


def _join_names(names: list[str]) -> str:
    """Return the first names as a text, with the number of all others."""
    text = ", ".join(names[:NUM_NAMED])
    return f"{text} and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else text


def forward_hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of the user's forward hooks, which run in tests, with their modules."""
    return [
        f"{name_of(hook)} of {name or 'the model'}"
        for name, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if _package_of(hook) not in LIBRARIES
    ]


def sample_parameters(model: nn.Module) -> Tensor:
    """Return some values of each parameter, as this rank holds it, in one tensor in fp32 on the CPU.

    Two such tensors are equal if the parameters have not been trained in between.
    """
    for module in model.modules():
        # After a forward the root module of FSDP2 holds whole parameters, and other modules may. `reshard` leaves only
        # the shard of this rank, of which the samples are taken.
        if isinstance(module, FSDPModule):
            module.reshard()
    samples = []
    for parameter in model.parameters():
        values: Tensor = getattr(parameter, "ds_tensor", parameter.detach())  # with ZeRO-3, the values on this rank
        if isinstance(values, DTensor):
            values = values.to_local()
        values = values.flatten()
        if values.is_floating_point():  # weights that are quantised to bytes are not trained
            step = max(values.numel() // NUM_SAMPLED, 1)
            samples.append(values[::step][:NUM_SAMPLED].float().cpu())
    return torch.cat([torch.zeros(0), *samples])


@contextmanager
def parameters_unchanged(model: nn.Module) -> Iterator[None]:
    """Raise ValueError at the end of this context if a test in it has changed parameters of the model."""
    before = sample_parameters(model)
    yield
    after = sample_parameters(model)
    if before.shape == after.shape:  # another number of values is a change, too: a parameter was added or replaced
        is_equal = (before == after) | (before.isnan() & after.isnan())
        if bool(is_equal.all()):
            return
    hooks = forward_hooks_of_user(model)
    ran = f"These hooks ran in the tests: {_join_names(hooks)}" if hooks else "No hook of the user's ran in the tests"
    raise ValueError(
        f"The tests before the first step changed parameters of {type(model).__name__}, so training would not begin "
        f"with the weights that were given. {ran}. Register what changes weights in `on_step_begin` of a callback, "
        "which is called after the tests, or in a subclass's `training_step`."
    )
