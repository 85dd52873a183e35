"""Find which axes of a module's arguments and outputs index tokens, and which index rows, from recorded runs.

The size of an axis is not enough: the hidden size may equal the length of a pack. So shapes are recorded in two packs
of different lengths, and in batches without boundaries of different lengths and numbers of rows.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..attention.rows import TensorAxes
from .arguments import Leaves, calls_watched
from .probe import Probe
from .probed_model import CannotRun

Sizes = dict[str, tuple[int, ...] | int]  # shapes of tensors and values of integers, by place
WATCHED_PACKS = ((13, 5, 29), (13, 5, 35))  # documents of two packs: 47 and 53 tokens, primes
WATCHED_BATCHES = ((1, 17), (1, 23), (2, 23))  # (rows, tokens) of batches without boundaries
SHORTEST_BATCH = (1, 1)  # the same for axes that grow up to a limit, which may be reached at 17 tokens


class NotLearned(Exception):
    """The recorded shapes do not show what the axes of a module are."""


@dataclass(frozen=True)
class ModuleAxes:
    """Axes of a module's arguments and outputs, by their places (see `arguments.py`)."""

    inputs: dict[str, TensorAxes | None]  # None if no axis indexes tokens
    outputs: dict[str, TensorAxes | None]
    numbers: set[str] = field(default_factory=set)  # places of integer arguments that hold the number of tokens
    # Places of outputs that have an axis beside the tokens which depends on their number, such as top-k indices
    widening: set[str] = field(default_factory=set)


def learn_axes(probe: Probe, names: list[str]) -> dict[str, ModuleAxes]:
    """Axes of each named module of the model, except modules that are not called in a pack.

    Raises `NotLearned` if a shape changes with the number of tokens or rows in an unknown way.
    """
    modules = {name: probe.inner.get_submodule(name) for name in names}
    packs = [_record_sizes(modules, partial(probe.forward_packed, [probe.tokens(k) for k in n])) for n in WATCHED_PACKS]
    *rows, shortest = [
        _record_sizes(modules, partial(probe.forward_rows, torch.stack([probe.tokens(n)] * b)))
        for b, n in (*WATCHED_BATCHES, SHORTEST_BATCH)
    ]
    totals = [sum(lengths) for lengths in WATCHED_PACKS]
    axes = {}
    for name in names:
        if not all(name in sizes for sizes in packs):
            continue
        (first, _), (second, _) = (sizes[name] for sizes in packs)
        ins, outs = ([sizes.get(name, ({}, {}))[i] for sizes in rows] for i in (0, 1))
        inputs = {}
        numbers = set()
        for place in first.keys() & second.keys():
            size = first[place]
            other = second[place]
            if isinstance(size, int):
                if (size, other) == tuple(totals):
                    numbers.add(place)
                continue
            tokens = _growing(name, place, size, other=other, totals=totals)
            inputs[place] = _find_axes(tokens, size, [sizes.get(place) for sizes in ins])
        outputs = {}
        widening = set()
        _, of_one_token = shortest.get(name, ({}, {}))
        for place in set.intersection(*(set(sizes) for sizes in outs)):
            one, longer, double = (sizes[place] for sizes in outs)
            if isinstance(one, tuple) and isinstance(longer, tuple):
                tokens = _growing(name, place, one, other=longer, totals=[n for _, n in WATCHED_BATCHES[:2]])
                outputs[place] = _find_axes(tokens, longer, [one, longer, double])
                if _widens(tokens, one, of_one_token.get(place)):
                    widening.add(place)
        axes[name] = ModuleAxes(inputs, outputs, numbers, widening)
    return axes


def _growing(
    name: str, place: str, size: tuple[int, ...], *, other: tuple[int, ...] | int, totals: list[int]
) -> tuple[int, ...]:
    if not isinstance(other, tuple) or len(size) != len(other):
        raise NotLearned(f"{name}: {place} has a different number of axes in another pack")
    axes = tuple(i for i, pair in enumerate(zip(size, other, strict=True)) if pair[0] != pair[1])
    if any((size[i], other[i]) != tuple(totals) for i in axes) or len(axes) > 2:
        raise NotLearned(f"{name}: {place} of shape {size} grows to {other} with {totals[0]} to {totals[1]} tokens")
    return axes


def _widens(tokens: tuple[int, ...], size: tuple[int, ...], shortest: tuple[int, ...] | int | None) -> bool:
    """Whether an axis that is not one of `tokens` differs between a row of tokens, of shape `size`, and one token.

    >>> _widens((1,), (1, 17, 6), (1, 1, 1)), _widens((1,), (1, 17, 32), (1, 1, 32))
    (True, False)
    """
    if not isinstance(shortest, tuple) or len(shortest) != len(size):
        return False  # the model takes no single token, or returns it in another form
    return any(size[i] != shortest[i] for i in range(len(size)) if i not in tokens)


def _find_axes(
    tokens: tuple[int, ...], size: tuple[int, ...], rows: list[tuple[int, ...] | int | None]
) -> TensorAxes | None:
    """Axes of a tensor of shape `size`. `rows`: its shapes in one row, in one longer row, in two rows, or None."""
    _, one, two = rows
    batch = None
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two) == len(size):
        doubled = [i for i, pair in enumerate(zip(one, two, strict=True)) if pair[1] == 2 * pair[0]]
        batch = doubled[0] if doubled else None
    elif tokens:  # absent without boundaries: take an axis of size 1, before the tokens if there is one
        single = [i for i, n in enumerate(size) if n == 1 and i not in tokens]
        near = single if len(tokens) == 2 else single[::-1]  # a mask is (rows, heads, T, T)
        batch = next((i for i in near if i < tokens[0]), single[0] if single else None)
    return TensorAxes(tokens, batch) if tokens else None


def _leaf_sizes(leaves: Leaves) -> Sizes:
    tensors: Sizes = {place: tuple(value.shape) for place, value in leaves if isinstance(value, Tensor)}
    return tensors | {place: value for place, value in leaves if type(value) is int}


def _record_sizes(modules: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, tuple[Sizes, Sizes]]:
    """Sizes of the arguments and outputs of each module in its first call. If a run raises, of those called before."""
    seen: dict[str, tuple[Sizes, Sizes]] = {}

    def note(name: str, call: int, inputs: Sizes, outputs: Sizes | None) -> None:
        seen.setdefault(name, (inputs, outputs or {}))

    with suppress(CannotRun), calls_watched(modules, _leaf_sizes, note):
        run()
    return seen
