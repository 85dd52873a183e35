"""Names of places in a module's arguments and outputs that stay the same between calls."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

Leaves = list[tuple[str, Any]]


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
