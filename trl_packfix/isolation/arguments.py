"""Watch the calls of modules: read their arguments and outputs by names that are the same in every call.

`tracing.py` and `axes.py` record values in this way, and `repair.py` changes them.

Words: a *leaf* is a value among the arguments or outputs of a call that is not a tuple, list or dictionary. Its *place*
is a name of where it stands, such as "hidden_states", "position_embeddings[0]" or "['last_hidden_state']".
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

Leaves = list[tuple[str, Any]]  # place and value of each leaf
T = TypeVar("T")


def argument_leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Leaves, TreeSpec]:
    """Return the leaves of the arguments of a call, and the tree that rebuilds them, as a pair (args, kwargs).

    A place begins with the name of the argument, also if the argument is positional.
    """
    leaves: Any
    leaves, tree = tree_flatten_with_path((args, kwargs))
    names = _parameter_names(type(module).forward)
    named = []
    # The path to a leaf begins with keys of torch's trees: 0 for `args` or 1 for `kwargs`, then the number or the name
    # of the argument.
    for (collection, argument, *path_inside), value in leaves:
        is_keyword = collection.idx == 1
        if is_keyword:
            name = argument.key
        elif argument.idx < len(names):
            name = names[argument.idx]
        else:  # one of `*args`
            name = f"*{argument.idx}"
        named.append((name + keystr(tuple(path_inside)), value))
    return named, tree


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, also those that are positional."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def output_leaves(output: object) -> tuple[Leaves, TreeSpec]:
    """Return the leaves of an output, and the tree that rebuilds the output from their values.

    A place is "[0]" or "['last_hidden_state']"; it is empty if the output is a single value.
    """
    leaves, tree = tree_flatten_with_path(output)
    return [(keystr(path), value) for path, value in leaves], tree


@cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a forward that may be positional, without `self`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


@contextmanager
def calls_watched(
    modules: dict[str, nn.Module], read: Callable[[Leaves], T], note: Callable[[str, int, T, T | None], None]
) -> Iterator[None]:
    """Within this context, `note` is called after each call of the modules.

    Inputs and outputs are read for the whole pack, also those of a repaired module (`repair.py`). Its hooks divide the
    inputs into batches of documents, and join the outputs to a pack again. Inputs are read before they are divided, and
    outputs after they are joined.

    Args:
        modules: the modules to watch, by name, the outermost first.
        read: converts the leaves of the inputs of a call, and the leaves of its outputs, to what `note` gets.
        note: gets the name of the module, how many calls of this module have ended before, and what was read from
            inputs and from outputs. Calls that raise have no outputs: at the end of the context, `note` gets None in
            their place, in the order of `modules`.
    """
    inputs: dict[str, list[T]] = {name: [] for name in modules}  # of the calls that run, the innermost last
    num_calls: Counter[str] = Counter()  # calls that have ended
    with ExitStack() as hooks:
        for name, module in modules.items():
            # `name` is a default of the hooks, because it changes with the loop.

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                inputs[name].append(read(argument_leaves(module, args, kwargs)[0]))

            def after(module: nn.Module, args: tuple[Any, ...], output: object, name: str = name) -> None:
                note(name, num_calls[name], inputs[name].pop(), read(output_leaves(output)[0]))
                num_calls[name] += 1

            # `before` runs before all other hooks on the module, and `after` runs after them.
            hooks.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        try:
            yield
        finally:
            for name, inputs_of_raised_calls in inputs.items():
                for values in inputs_of_raised_calls:
                    note(name, num_calls[name], values, None)
