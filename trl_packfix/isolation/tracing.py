"""Find where information crosses: the smallest modules in which one document of a pack changes another."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .arguments import Leaves, calls_watched
from .probe import Probe, RunPair
from .probed_model import CannotRun, gather_values, to_exact

PART_TOKENS = 23  # of each rank in the packs of `find_wrong_parts`: a prime that no hidden size equals
DOCUMENT_TOKENS = 11  # of each document there but the last


@dataclass(frozen=True)
class Leak:
    """A module in which information crosses: its inputs for a document are unchanged, its outputs are not."""

    name: str  # in the model
    module: str  # name of its class
    change: float  # largest of its outputs, relative to the largest value of each tensor


class ShiftedPositions(NamedTuple):
    """Positions that start differently in a pack: alone, those that module `name` gets at `place` start at `first`."""

    name: str
    place: str
    axis: int  # of tokens
    first: int


Found = TypeVar("Found", Leak, ShiftedPositions)
# By place: the token axis of a tensor, and its values as (T, rest). A record: inputs and outputs of a module's call
Values = dict[str, tuple[int, Tensor]]
Records = dict[str, list[tuple[Values, Values]]]
Spans = list[tuple[slice, slice]]  # of documents that are the same in both runs


def find_leaks(probe: Probe, case: RunPair, tolerance: float, *, positions_only: bool = False) -> list[Leak]:
    """The smallest modules whose inputs for a document agree in both runs and whose outputs do not.

    Values are compared relative to the largest of each tensor. `positions_only` restricts the search to modules without
    parameters that get positions, such as rotary embeddings: their outputs depend on little else.
    """
    modules = {
        name: module
        for name, module in probe.inner.named_modules()
        if not positions_only or next(module.parameters(), None) is None
    }
    # All values of a long pack may not fit on the device beside the model.
    recording = partial(_record_values, modules, positions_only=positions_only, on_host=case.large)
    first = recording(sum(map(len, case.documents)), partial(case.first_states, probe))
    num_others = _row_length(probe, case.others[0]) if case.alone else sum(map(len, case.others))
    second = recording(num_others, partial(case.second_states, probe))
    return _innermost([*_iterate_leaks(modules, first, second, pairs=case.spans, tolerance=tolerance)])


def _iterate_leaks(
    modules: dict[str, nn.Module], first: Records, second: Records, *, pairs: Spans, tolerance: float
) -> Iterator[Leak]:
    for name, module in modules.items():
        for one, other in zip(first.get(name, []), second.get(name, []), strict=False):
            came_in, went_out = (_largest_change(a, b, pairs) for a, b in zip(one, other, strict=True))
            if came_in <= tolerance < went_out:
                yield Leak(name, type(module).__name__, went_out)
                break


def find_origins(probe: Probe, case: RunPair, tolerance: float) -> list[Leak]:
    """The smallest modules with bit-identical inputs for a document in two packs, and different outputs.

    Only modules whose inputs are bit-identical are judged, so rounding that adds up in a deep model cannot hide a leak.
    `tolerance` is the relative change that rounding inside one module may cause: two units in the last place of half
    precision, in packs of equal lengths. There, a change of an eighth of a unit in more than half of a token's numbers
    also counts as a leak, because rounding changes only few numbers. Modules whose outputs change in a repeated run of
    the same pack are skipped.
    """
    modules = dict(probe.inner.named_modules())
    pairs = case.spans
    num_tokens = sum(map(len, case.documents))
    first = _record_values(modules, num_tokens, partial(probe.forward_packed, case.documents))

    # The other runs are compared while they run, so that only one run needs memory.
    repeats: set[tuple[str, int]] = set()  # calls with the same outputs in a repeated run

    def note_repeat(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        calls = first.get(name, [])
        if outputs and call < len(calls) and not _largest_change(calls[call][1], outputs, [(slice(None), slice(None))]):
            repeats.add((name, call))

    moved: dict[str, Leak] = {}
    leaking = set()

    def note_variant(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        if not outputs or name in moved or (name, call) not in repeats:
            return
        came_in, went_out = first[name][call]
        if not came_in.keys() & inputs.keys() or _largest_change(came_in, inputs, pairs):
            return
        change = _largest_change(went_out, outputs, pairs)
        if change:
            moved[name] = Leak(name, type(modules[name]).__name__, change)
            if case.same_length:
                leaks = change > tolerance or _share_moved(went_out, outputs, pairs, minimum=tolerance / 16) > 0.5
            else:  # integers may be positions in the pack
                leaks = _largest_change(_numeric_values(went_out), _numeric_values(outputs), pairs) > tolerance
            if leaks:
                leaking.add(name)

    with calls_watched(modules, partial(_by_token, num_tokens=num_tokens), note_repeat):
        probe.forward_packed(case.documents)
    with calls_watched(modules, partial(_by_token, num_tokens=sum(map(len, case.others))), note_variant):
        probe.forward_packed(case.others)
    return [leak for leak in _innermost([*moved.values()]) if leak.name in leaking]


def find_wrong_parts(probe: Probe, tolerance: float) -> list[Leak]:
    """The smallest modules that get the same inputs for a part of a pack as for the whole, and give other outputs.

    They read tokens of other ranks without an exchange, or would have to. The model is run on whole packs, too, where
    it has been tested. All ranks must call; they find the same modules.
    """
    documents = [*probe.tokens(PART_TOKENS * probe.degree).split(DOCUMENT_TOKENS)]
    modules = dict(probe.inner.named_modules())
    whole = _record_values(modules, PART_TOKENS * probe.degree, partial(probe.forward_padded, documents))

    def run() -> None:
        with suppress(CannotRun):  # modules that run are recorded
            probe.forward_packed(documents)

    part = _record_values(modules, PART_TOKENS, run)
    first = probe.ranks.index * PART_TOKENS
    pairs = [(slice(first, first + PART_TOKENS), slice(None))]
    leaks = [*_iterate_leaks(modules, whole, part, pairs=pairs, tolerance=tolerance)]
    found = sorted((leak for leaks in gather_values(leaks) for leak in leaks), key=lambda leak: leak.change)
    largest = {leak.name: leak for leak in found}
    return _innermost([largest[name] for name in modules if name in largest])


def _innermost(found: list[Found]) -> list[Found]:
    """Those whose module contains that of no other."""
    names = {each.name for each in found}
    return [each for each in found if not any(_is_inside(name, each.name) for name in names - {each.name})]


def find_shifted(probe: Probe, documents: list[Tensor]) -> list[ShiftedPositions]:
    """Innermost modules whose positions count up in each document, but from a different start than alone."""
    lengths = [len(ids) for ids in documents]
    recording = partial(_record_values, dict(probe.inner.named_modules()))
    packed = recording(sum(lengths), partial(probe.forward_packed, documents))
    alone = [recording(_row_length(probe, ids), partial(probe.forward_alone, ids)) for ids in documents]
    shifted = []
    for name in packed:
        for place, (axis, values) in packed[name][0][0].items():
            if values.is_floating_point() or values.dtype == torch.bool or values.shape[1] != 1:
                continue
            seen = [records[name][0][0].get(place) for records in alone if name in records]
            counts = [alone_values[1].flatten() for alone_values in seen if alone_values is not None]
            if len(counts) < len(alone):
                continue
            parts = values.flatten().split(lengths)
            counts_up = all(torch.equal(part.diff(), torch.ones_like(part[1:])) for part in [*counts, *parts])
            first = {int(count[0]) for count in counts}
            if counts_up and len(first) == 1 and any(int(part[0]) not in first for part in parts):
                shifted.append(ShiftedPositions(name, place, axis, first.pop()))
    return _innermost(shifted)


def find_raising(probe: Probe, documents: list[Tensor]) -> str | None:
    """The innermost module that was running when the model raised on this pack; None if it does not raise."""
    raised: list[str] = []

    def note(name: str, call: int, inputs: int, outputs: int | None) -> None:
        if outputs is None:
            raised.append(name)

    with suppress(CannotRun), calls_watched(dict(probe.inner.named_modules()), len, note):
        probe.forward_packed(documents)
    return raised[-1] if raised else None


def _record_values(
    modules: dict[str, nn.Module],
    num_tokens: int,
    run: Callable[[], object],
    *,
    positions_only: bool = False,
    on_host: bool = False,
) -> Records:
    """Inputs and outputs of each call in a run that have an axis of `num_tokens`."""
    records: Records = {}

    def note(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        if not positions_only or any(not values.is_floating_point() for _, values in inputs.values()):
            records.setdefault(name, []).append((inputs, outputs or {}))

    with calls_watched(modules, partial(_by_token, num_tokens=num_tokens, on_host=on_host), note):
        run()
    return records


def _row_length(probe: Probe, document: Any) -> int:
    """Tokens of a document alone, with the padding that the model needs."""
    return probe.make_row(document)["input_ids"].shape[1]


def _is_inside(name: str, parent: str) -> bool:
    return not parent or name.startswith(parent + ".")


def _by_token(leaves: Leaves, num_tokens: int, on_host: bool = False) -> Values:
    values_by_place = {}
    for place, value in leaves:
        if isinstance(value, Tensor) and num_tokens in value.shape[:4]:
            axis = value.shape.index(num_tokens)
            rows = value.detach().movedim(axis, 0).reshape(num_tokens, -1)
            # a copy: the model may go on to change the tensor in place
            values_by_place[place] = (axis, rows.cpu() if on_host and rows.device.type != "cpu" else rows.clone())
    return values_by_place


def _largest_change(before: Values, after: Values, pairs: Spans) -> float:
    """Largest change of these spans, relative to the largest value of each tensor; 0 if nothing can be compared."""
    changes = []
    for place in before.keys() & after.keys():
        one = before[place][1]
        other = after[place][1]
        if one.shape[1] != other.shape[1] or not one.numel():  # a mask (T, T) of packs of different lengths
            continue
        if one.is_complex():
            one = torch.view_as_real(one)
            other = torch.view_as_real(other)
        one = to_exact(one)
        other = to_exact(other)
        scale = one.abs().max().clamp(min=1e-30)
        gaps = [(one[here] - other[there]).abs() for here, there in pairs]
        changes += [gap.max() / scale for gap in gaps if gap.numel()]
    if not changes:
        return 0.0
    # one read from the device, not one per tensor and document
    return max(0.0, *torch.stack([change.to(changes[0].device) for change in changes]).tolist())


def _numeric_values(values: Values) -> Values:
    return {place: value for place, value in values.items() if value[1].is_floating_point() or value[1].is_complex()}


def _share_moved(before: Values, after: Values, pairs: Spans, *, minimum: float) -> float:
    """Largest share, over tokens, of a token's numbers that change by more than `minimum` times their own size."""
    shares = [0.0]
    for place in before.keys() & after.keys():
        one, other = (x if x.is_complex() else to_exact(x) for x in (before[place][1], after[place][1]))
        if one.shape[1] == other.shape[1] > 1:
            moved = [(one[here] - other[there]).abs() > minimum * one[here].abs() for here, there in pairs]
            shares += [change.float().mean(1).max().item() for change in moved]
    return max(shares)
