"""Find which axes of a module's arguments and outputs index tokens, and which index rows, from recorded runs.

`search.py` calls `learn_axes` for modules that it is about to repair, and `repair.py` uses the axes to divide arguments
among documents and to join outputs.

The size of an axis is not enough: the hidden size may equal the length of a pack. So shapes are recorded in two packs
with different numbers of tokens. They are also recorded in unpacked batches, whose rows are single documents of equal
length without boundaries, with different numbers of tokens and of rows. An axis that changes with the number of tokens
is a *token axis*, and one that doubles with the number of rows is the *batch axis*.

Words: a *place* names a value among the arguments or outputs of a call (`arguments.py`). *Sizes* are the shapes of
tensors, and the values of integers, by place. `TensorAxes` (`attention/rows.py`) has the token axes of a tensor and its
batch axis.
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

Shape = tuple[int, ...]
Axes = tuple[int, ...]  # indices of axes
Sizes = dict[str, Shape | int]
WATCHED_PACKS = ((13, 5, 29), (13, 5, 35))  # lengths of the documents of two packs: in sum 47 and 53, primes
WATCHED_BATCHES = ((1, 17), (1, 23), (2, 23))  # (rows, tokens) of batches without boundaries
# One more batch, for axes that grow with the number of tokens up to a limit. For example, top-6 indices (1, T, min(6,
# T)) have 6 numbers per token in rows of 17 and of 23 tokens, and 1 in this batch
SHORTEST_BATCH = (1, 1)


class NotLearned(Exception):
    """The recorded shapes do not show what the axes of a module are."""


@dataclass(frozen=True)
class ModuleAxes:
    """The axes of a module's arguments and outputs, by their places.

    Attributes:
        inputs: axes of tensors among the arguments; None if no axis indexes tokens.
        outputs: axes of tensors among the outputs; None if no axis indexes tokens.
        numbers: places of integer arguments that hold the number of tokens.
        widening: places of outputs with an axis that depends on the number of tokens and does not index them, such as
            the last axis of top-k indices.
    """

    inputs: dict[str, TensorAxes | None]
    outputs: dict[str, TensorAxes | None]
    numbers: set[str] = field(default_factory=set)
    widening: set[str] = field(default_factory=set)


def learn_axes(probe: Probe, names: list[str]) -> dict[str, ModuleAxes]:
    """Return the axes of the named modules of the model, by name, except modules that are not called in a pack.

    Args:
        probe: runs random documents (`tokens`) through the model `inner`: in a pack, or in a batch without boundaries.
        names: paths of the modules in the model.

    Raises:
        NotLearned: a shape changes with the number of tokens or rows in an unknown way.
    """
    modules = {name: probe.inner.get_submodule(name) for name in names}
    pack_sizes = [
        _record_sizes(modules, partial(probe.forward_packed, [probe.tokens(n) for n in lengths]))
        for lengths in WATCHED_PACKS
    ]
    *sizes_of_batches, sizes_of_shortest = [
        _record_sizes(
            modules, partial(probe.forward_without_boundaries, torch.stack([probe.tokens(num_tokens)] * num_rows))
        )
        for num_rows, num_tokens in (*WATCHED_BATCHES, SHORTEST_BATCH)
    ]
    pack_lengths = [sum(lengths) for lengths in WATCHED_PACKS]
    batch_lengths = [num_tokens for _, num_tokens in WATCHED_BATCHES[:2]]
    no_sizes: tuple[Sizes, Sizes] = ({}, {})  # inputs and outputs of a module that a run does not call
    axes = {}
    for name in names:
        if not all(name in sizes for sizes in pack_sizes):
            continue
        batch_sizes = [sizes.get(name, no_sizes) for sizes in sizes_of_batches]
        # Arguments: the axes that differ between the two packs are token axes. In a batch without boundaries the module
        # may lack some of its arguments.
        inputs_of_first, inputs_of_second = (sizes[name][0] for sizes in pack_sizes)
        inputs = {}
        numbers = set()
        for place in inputs_of_first.keys() & inputs_of_second.keys():
            size = inputs_of_first[place]
            longer = inputs_of_second[place]
            if isinstance(size, int):
                if (size, longer) == tuple(pack_lengths):
                    numbers.add(place)
                continue
            token_axes = _find_token_axes(name, place, size, longer=longer, lengths=pack_lengths)
            shapes = [input_sizes.get(place) for input_sizes, _ in batch_sizes]
            inputs[place] = _add_batch_axis(token_axes, size, shapes)
        # Outputs: the axes that differ between two batches of one row are token axes. In a repaired model the arguments
        # that the module gets are those of a pack. They are divided into batches without boundaries, on which the
        # module runs. So its arguments are recorded in packs, and its outputs in such batches.
        outputs = {}
        widening = set()
        _, sizes_of_one_token = sizes_of_shortest.get(name, no_sizes)
        output_sizes = [sizes for _, sizes in batch_sizes]
        for place in set.intersection(*map(set, output_sizes)):
            short, longer, two_rows = (sizes[place] for sizes in output_sizes)
            if isinstance(short, tuple) and isinstance(longer, tuple):
                token_axes = _find_token_axes(name, place, short, longer=longer, lengths=batch_lengths)
                outputs[place] = _add_batch_axis(token_axes, longer, [short, longer, two_rows])
                if _widens(token_axes, short, sizes_of_one_token.get(place)):
                    widening.add(place)
        axes[name] = ModuleAxes(inputs, outputs, numbers, widening)
    return axes


def _find_token_axes(name: str, place: str, size: Shape, *, longer: Shape | int, lengths: list[int]) -> Axes:
    """Return the axes whose size is the number of tokens in two runs.

    Args:
        name, place: the module and the place of the tensor, for errors.
        size: its shape in the run with fewer tokens.
        longer: its shape in the run with more tokens.
        lengths: the numbers of tokens of the two runs.

    Raises:
        NotLearned: an axis differs in another way, or more than two axes differ.
    """
    if not isinstance(longer, tuple) or len(size) != len(longer):
        raise NotLearned(f"{name}: {place} has a different number of axes in another run")
    axes = tuple(i for i in range(len(size)) if size[i] != longer[i])
    grow_with_tokens = all((size[i], longer[i]) == tuple(lengths) for i in axes)
    if not grow_with_tokens or len(axes) > 2:
        raise NotLearned(f"{name}: {place} of shape {size} grows to {longer} with {lengths[0]} to {lengths[1]} tokens")
    return axes


def _widens(token_axes: Axes, size: Shape, size_of_one_token: Shape | int | None) -> bool:
    """Return whether an axis that is not a token axis differs between a row of tokens, of shape `size`, and one token.

    >>> _widens((1,), (1, 17, 6), (1, 1, 1)), _widens((1,), (1, 17, 32), (1, 1, 32))
    (True, False)
    """
    if not isinstance(size_of_one_token, tuple) or len(size_of_one_token) != len(size):
        return False  # the model takes no single token, or returns it in another form
    return any(size[i] != size_of_one_token[i] for i in range(len(size)) if i not in token_axes)


def _add_batch_axis(token_axes: Axes, size: Shape, shapes: list[Shape | int | None]) -> TensorAxes | None:
    """Return the token axes of a tensor with its batch axis; None if it has no token axes.

    Args:
        size: the shape of the tensor.
        shapes: its shapes in the three `WATCHED_BATCHES`: one row, one longer row, and two rows of the longer length.
            A shape is None if the module did not get the tensor, for example because there were no boundaries.
    """
    if not token_axes:
        return None
    _, one_row, two_rows = shapes
    if isinstance(one_row, tuple) and isinstance(two_rows, tuple) and len(one_row) == len(two_rows) == len(size):
        doubled = [i for i in range(len(size)) if two_rows[i] == 2 * one_row[i]]
        return TensorAxes(token_axes, doubled[0] if doubled else None)
    # Without these shapes, the batch axis is an axis of size 1, before the token axes if possible. In a mask (rows,
    # heads, T, T) it is the first axis of size 1. In all other tensors it is the axis of size 1 next to the token axis.
    single_axes = [i for i, n in enumerate(size) if n == 1 and i not in token_axes]
    axes_before = [i for i in single_axes if i < token_axes[0]]
    if not axes_before:
        return TensorAxes(token_axes, single_axes[0] if single_axes else None)
    return TensorAxes(token_axes, axes_before[0] if len(token_axes) == 2 else axes_before[-1])


def _leaf_sizes(leaves: Leaves) -> Sizes:
    """Return the sizes of the tensors and integers among some leaves."""
    tensors: Sizes = {place: tuple(value.shape) for place, value in leaves if isinstance(value, Tensor)}
    return tensors | {place: value for place, value in leaves if type(value) is int}


def _record_sizes(modules: dict[str, nn.Module], run_model: Callable[[], object]) -> dict[str, tuple[Sizes, Sizes]]:
    """Return the sizes of arguments and outputs of each module, in its first call in a run.

    If the run raises, modules that were not called before are missing.
    """
    recorded: dict[str, tuple[Sizes, Sizes]] = {}

    # `calls_watched` calls it after each call of a module, with None for outputs if the module has raised.
    def note_first_call(name: str, call: int, inputs: Sizes, outputs: Sizes | None) -> None:
        recorded.setdefault(name, (inputs, outputs or {}))

    with suppress(CannotRun), calls_watched(modules, _leaf_sizes, note_first_call):
        run_model()
    return recorded
