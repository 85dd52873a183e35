"""Where a value stands among a module's arguments or in its output, by a name that stays the same between calls."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

Leaves = list[tuple[str, Any]]


def argument_leaves(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Leaves, TreeSpec]:
    """Every value in the arguments of a call with its place, and how to put them together again as (args, kwargs).

    A place begins with the name of the argument, given by name or not: "hidden_states", "position_embeddings[0]".
    """
    leaves: Any
    leaves, tree = tree_flatten_with_path((args, kwargs))
    names = _parameter_names(type(module).forward)
    found = []
    for path, value in leaves:
        by_name = path[0].idx == 1
        name = path[1].key if by_name else names[path[1].idx] if path[1].idx < len(names) else f"*{path[1].idx}"
        found.append((name + keystr(path[2:]), value))
    return found, tree


def output_leaves(output: Any) -> tuple[Leaves, TreeSpec]:
    """Every value in an output with its place: "[0]", "['last_hidden_state']"."""
    leaves, tree = tree_flatten_with_path(output)
    return [(keystr(path), value) for path, value in leaves], tree


@cache
def _parameter_names(forward: Callable) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)
