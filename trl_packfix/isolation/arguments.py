"""Watch the calls of modules: arguments and outputs, by the names of their places, the same in every call."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

Leaves = list[tuple[str, Any]]
T = TypeVar("T")


def argument_leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Leaves, TreeSpec]:
    """All values in the arguments of a call with their places, and the tree that rebuilds (args, kwargs) from them.

    A place begins with the name of the argument, also for positional ones: "hidden_states", "position_embeddings[0]".
    """
    leaves: Any
    leaves, tree = tree_flatten_with_path((args, kwargs))
    names = _parameter_names(type(module).forward)
    named = []
    for path, value in leaves:
        by_name = path[0].idx == 1
        name = path[1].key if by_name else names[path[1].idx] if path[1].idx < len(names) else f"*{path[1].idx}"
        named.append((name + keystr(path[2:]), value))
    return named, tree


def output_leaves(output: object) -> tuple[Leaves, TreeSpec]:
    """All values in an output with their places, "[0]" or "['last_hidden_state']", and the tree that rebuilds it."""
    leaves, tree = tree_flatten_with_path(output)
    return [(keystr(path), value) for path, value in leaves], tree


@cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


@contextmanager
def calls_watched(
    modules: dict[str, nn.Module], read: Callable[[Leaves], T], note: Callable[[str, int, T, T | None], None]
) -> Iterator[None]:
    """Within this context, note each call of these modules: its number, and what `read` takes of inputs and outputs.

    Of a repaired module these are the inputs before its own hooks, and the outputs after them. Calls that raise are
    noted at the end, the outermost first, without outputs.
    """
    inputs: dict[str, list[T]] = {name: [] for name in modules}
    calls: Counter[str] = Counter()
    with ExitStack() as hooks:
        for name, module in modules.items():

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                inputs[name].append(read(argument_leaves(module, args, kwargs)[0]))

            def after(module: nn.Module, args: tuple[Any, ...], output: object, name: str = name) -> None:
                note(name, calls[name], inputs[name].pop(), read(output_leaves(output)[0]))
                calls[name] += 1

            hooks.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        try:
            yield
        finally:
            for name, raised in inputs.items():
                for values in raised:
                    note(name, calls[name], values, None)
