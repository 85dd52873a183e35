"""Which axes of a module's arguments and outputs count tokens, and which count rows: learned from runs, not guessed.

An axis that is as long as the pack may be the hidden size by chance. So a module is watched in two packs of different
lengths, and in batches without boundaries of different lengths and numbers of rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.rows import Axes
from .arguments import Leaves, argument_leaves, output_leaves
from .probe import CannotRun, Probe

Sizes = dict[str, tuple[int, ...] | int]  # of each tensor and number, by its place among arguments or outputs
PACKS = ((13, 5, 29), (13, 5, 35))  # documents of two packs: 47 and 53 tokens, primes
ROWS = ((1, 17), (1, 23), (2, 23))  # rows and tokens without boundaries


class NotLearned(Exception):
    """What the axes of a module mean could not be seen."""


@dataclass(frozen=True)
class ModuleAxes:
    """By the place where a value is given or put out: its axes; None where it does not depend on tokens or rows.

    `numbers` are the places of arguments that are the number of tokens.
    """

    inputs: dict[str, Axes | None]
    outputs: dict[str, Axes | None]
    numbers: set[str] = field(default_factory=set)


def learn_axes(probe: Probe, names: list[str]) -> dict[str, ModuleAxes]:
    """Axes of each named module of the model; modules that a pack does not call are left out.

    Raises `NotLearned` where a size changes with tokens or rows in a way that is none of the known ones.
    """
    modules = {name: probe.inner.get_submodule(name) for name in names}
    packs = [_watch(modules, lambda n=n: probe.packed([probe.tokens(k) for k in n])) for n in PACKS]
    rows = [_watch(modules, lambda b=b, n=n: probe.alone(torch.stack([probe.tokens(n)] * b))) for b, n in ROWS]
    totals = [sum(lengths) for lengths in PACKS]
    found = {}
    for name in names:
        if not all(name in sizes for sizes in packs):
            continue
        (first, _), (second, _) = (sizes[name] for sizes in packs)
        ins, outs = ([sizes.get(name, ({}, {}))[i] for sizes in rows] for i in (0, 1))
        inputs, numbers = {}, set()
        for place in first.keys() & second.keys():
            size, other = first[place], second[place]
            if isinstance(size, int):
                if (size, other) == tuple(totals):
                    numbers.add(place)
                continue
            tokens = _growing(name, place, size, other, totals)
            inputs[place] = _axes(tokens, size, [sizes.get(place) for sizes in ins])
        outputs = {}
        for place in set.intersection(*(set(sizes) for sizes in outs)):
            one, longer, double = (sizes[place] for sizes in outs)
            if isinstance(one, tuple) and isinstance(longer, tuple):
                tokens = _growing(name, place, one, longer, [n for _, n in ROWS[:2]])
                outputs[place] = _axes(tokens, longer, [one, longer, double])
        found[name] = ModuleAxes(inputs, outputs, numbers)
    return found


def _growing(name: str, place: str, size: Any, other: Any, totals: list[int]) -> tuple[int, ...]:
    if not isinstance(other, tuple) or len(size) != len(other):
        raise NotLearned(f"{name}: {place} has another number of axes in another pack")
    axes = tuple(i for i, pair in enumerate(zip(size, other, strict=True)) if pair[0] != pair[1])
    if any((size[i], other[i]) != tuple(totals) for i in axes) or len(axes) > 2:
        raise NotLearned(f"{name}: {place} of shape {size} grows to {other} with {totals[0]} to {totals[1]} tokens")
    return axes


def _axes(tokens: tuple[int, ...], size: tuple[int, ...], rows: list[Any]) -> Axes | None:
    """`rows` are sizes in one row, in one longer row and in two rows, where they were seen."""
    _, one, two = rows
    batch = None
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two) == len(size):
        doubled = [i for i, pair in enumerate(zip(one, two, strict=True)) if pair[1] == 2 * pair[0]]
        batch = doubled[0] if doubled else None
    elif tokens:  # not given without boundaries: an axis of one entry, before the tokens where there is one
        single = [i for i, n in enumerate(size) if n == 1 and i not in tokens]
        batch = next((i for i in reversed(single) if i < tokens[0]), single[0] if single else None)
    return Axes(tokens, batch) if tokens else None


def _sizes(leaves: Leaves) -> Sizes:
    """Shapes of tensors and values of numbers, by their place."""
    found: Sizes = {}
    for place, value in leaves:
        if isinstance(value, Tensor):
            found[place] = tuple(value.shape)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[place] = value
    return found


def _watch(modules: dict[str, nn.Module], run: Any) -> dict[str, tuple[Sizes, Sizes]]:
    """Sizes of the arguments and outputs of each module in its first call, as far as a run gets that raises."""
    seen: dict[str, tuple[Sizes, Sizes]] = {}
    handles = []
    for name, module in modules.items():

        def before(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
            seen.setdefault(name, (_sizes(argument_leaves(module, args, kwargs)[0]), {}))

        def after(module: nn.Module, args: tuple, output: Any, name: str = name) -> None:
            if not seen[name][1]:
                seen[name][1].update(_sizes(output_leaves(output)[0]))

        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        run()
    except CannotRun:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen
