"""Find the modules in which information crosses from one document of a pack to another.

The inputs and outputs of all modules are recorded in two runs that should agree, a `RunPair` (`probe.py`). Where the
inputs of a module agree for a document and its outputs do not, information crosses in this module. The smallest of
these modules are returned as `Leak` records. `check_isolation.py` puts them into its report, and `search.py` repairs
the modules. Other functions find the module that raises, modules whose positions start at another number in a pack than
alone, and modules that compute something else if ranks share a pack.

The `Probe` draws documents (`tokens`), runs them as a pack (`forward_packed`) or one of them alone (`forward_alone`),
and holds the model (`inner`). If ranks share a pack, `forward_packed` runs the part of this rank, and `forward_padded`
runs the whole pack on each rank, with the padding of a shared pack. A `RunPair` has the documents of both runs, and
does the runs (`run_first`, `run_second`). The second run may be a document alone (`is_alone`).

Words: a *place* names one value among the arguments or outputs of a call (`arguments.py`), such as "hidden_states" or
"[0]". A *call* is one of the calls of a module in a run, by number. If ranks share a pack, the *part* of a rank is the
tokens that it holds.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .arguments import Leaves, calls_watched
from .probe import Documents, Probe, RunPair
from .probed_model import CannotRun, gather_values, to_exact

# Length of the part of each rank in `find_wrong_parts`. `_by_token` finds the axis of tokens by its size, so it is a
# prime that no hidden size equals
PART_TOKENS = 23
DOCUMENT_TOKENS = 11  # length of each document in `find_wrong_parts`, except that the last document may be shorter


@dataclass(frozen=True)
class Leak:
    """A module in which information crosses: its inputs for a document are unchanged, and its outputs have changed."""

    name: str  # path of the module in the model
    module: str  # name of the module's class
    change: float  # largest change of the outputs, relative to the largest value of each tensor


class ShiftedPositions(NamedTuple):
    """Position ids that a module gets, and that start differently in a pack than for a document alone."""

    name: str  # path of the module in the model
    place: str  # name of the argument that holds the positions
    axis: int  # the axis of the argument that indexes tokens
    first: int  # the position of the first token of a document alone


Finding = TypeVar("Finding", Leak, ShiftedPositions)


class TokenValues(NamedTuple):
    """A copy of a tensor among the arguments or outputs of a call, with the values of one token in each row."""

    axis: int  # the axis of the tensor that indexes tokens
    by_token: Tensor  # (T, values per token)


Values = dict[str, TokenValues]  # the tensors among the arguments, or among the outputs, of one call, by place


class CallRecord(NamedTuple):
    """What a module got and returned in one call."""

    inputs: Values
    outputs: Values  # {} if the call raised


Records = dict[str, list[CallRecord]]  # the calls of each module in a run, by the name of the module
# For each document that both runs have, the slices of its tokens in the first and in the second run
Spans = list[tuple[slice, slice]]


def find_leaks(probe: Probe, pair: RunPair, tolerance: float, *, positions_only: bool = False) -> list[Leak]:
    """Return the smallest modules whose inputs for a document agree in both runs and whose outputs do not.

    Args:
        tolerance: change up to which values agree, relative to the largest value of each tensor.
        positions_only: look only at modules without parameters that get positions, such as rotary embeddings. Their
            outputs depend on little else.
    """
    modules = {
        name: module
        for name, module in probe.inner.named_modules()
        if not positions_only or next(module.parameters(), None) is None
    }
    if pair.is_alone:
        second_length = _row_length(probe, pair.second_documents[0])
    else:
        second_length = _num_tokens(pair.second_documents)
    # All values of a long pack may not fit on the device beside the model.
    record = partial(_record_values, modules, positions_only=positions_only, on_host=pair.is_large)
    first_records = record(_num_tokens(pair.first_documents), partial(pair.run_first, probe))
    second_records = record(second_length, partial(pair.run_second, probe))
    leaks = _iterate_leaks(modules, first_records, second_records, spans=pair.common_spans, tolerance=tolerance)
    return _innermost([*leaks])


def _iterate_leaks(
    modules: dict[str, nn.Module], first: Records, second: Records, *, spans: Spans, tolerance: float
) -> Iterator[Leak]:
    """Yield each module with a call whose inputs agree in both records and whose outputs do not."""
    for name, module in modules.items():
        # If a run has raised, as it may in `find_wrong_parts`, it has fewer calls.
        for first_call, second_call in zip(first.get(name, []), second.get(name, []), strict=False):
            input_change = _largest_change(first_call.inputs, second_call.inputs, spans)
            output_change = _largest_change(first_call.outputs, second_call.outputs, spans)
            if input_change <= tolerance < output_change:
                yield Leak(name, type(module).__name__, output_change)
                break


def find_origins(probe: Probe, pair: RunPair, tolerance: float) -> list[Leak]:
    """Return the smallest modules with equal inputs for a document in two packs, and with other outputs.

    `find_leaks` compares with one tolerance for the whole model. Here inputs must be equal to the bit, so they have no
    rounding of earlier modules, and also a small leak in a deep model is found. Modules whose outputs change in a
    repeated run of the same pack are skipped.

    Args:
        pair: two packs; no document runs alone.
        tolerance: relative change that rounding inside one module may cause. A larger change is a leak. If documents
            of both packs have equal lengths, a smaller change is a leak, too, if more than half of the numbers of some
            token change by more than `tolerance / 16` of their own size. Rounding changes fewer numbers.
    """
    modules = dict(probe.inner.named_modules())
    spans = pair.common_spans
    num_tokens = _num_tokens(pair.first_documents)
    # 1. Record the first pack.
    first_records = _record_values(modules, num_tokens, partial(probe.forward_packed, pair.first_documents))

    # 2. Repeat it, and note the calls with the same outputs. This run and the next one are compared while they run, so
    # that only the first run needs memory.
    repeatable: set[tuple[str, int]] = set()
    all_tokens = [(slice(None), slice(None))]

    def note_repeated_call(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        calls = first_records.get(name, [])
        if outputs and call < len(calls) and not _largest_change(calls[call].outputs, outputs, all_tokens):
            repeatable.add((name, call))

    with calls_watched(modules, partial(_by_token, num_tokens=num_tokens), note_repeated_call):
        probe.forward_packed(pair.first_documents)

    # 3. Run the second pack, and note the modules whose outputs change (`changed`), and which of them change beyond
    # rounding (`leaking_names`). A module with a changed module inside is not returned, because the leak begins in the
    # inner one. This holds even if the inner one changes so little that it is not returned itself.
    changed: dict[str, Leak] = {}
    leaking_names = set()

    def note_changed_call(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        if not outputs or name in changed or (name, call) not in repeatable:
            return
        first_inputs, first_outputs = first_records[name][call]
        # Without an input that can be compared, a change may have come in from outside, so the call is skipped.
        common_places = first_inputs.keys() & inputs.keys()
        if not common_places or _largest_change(first_inputs, inputs, spans):
            return
        change = _largest_change(first_outputs, outputs, spans)
        if not change:
            return
        changed[name] = Leak(name, type(modules[name]).__name__, change)
        if pair.has_equal_lengths:
            leaks = change > tolerance or _share_changed(first_outputs, outputs, spans, minimum=tolerance / 16) > 0.5
        else:
            # A document that begins at another token of the pack may have other integers, such as positions. So only
            # real and complex numbers are compared.
            leaks = _largest_change(_numeric_values(first_outputs), _numeric_values(outputs), spans) > tolerance
        if leaks:
            leaking_names.add(name)

    second_length = _num_tokens(pair.second_documents)
    with calls_watched(modules, partial(_by_token, num_tokens=second_length), note_changed_call):
        probe.forward_packed(pair.second_documents)
    return [leak for leak in _innermost([*changed.values()]) if leak.name in leaking_names]


def find_wrong_parts(probe: Probe, tolerance: float) -> list[Leak]:
    """Return the smallest modules that compute the part of a rank differently than the same tokens of a whole pack.

    Their inputs agree and their outputs do not, so such a module needs tokens that other ranks hold. Whole packs have
    been tested before, so they are the reference. All ranks must call this function, and all get the same modules.
    """
    documents = [*probe.tokens(PART_TOKENS * probe.degree).split(DOCUMENT_TOKENS)]
    modules = dict(probe.inner.named_modules())
    whole_records = _record_values(modules, PART_TOKENS * probe.degree, partial(probe.forward_padded, documents))

    def run_part() -> None:
        with suppress(CannotRun):  # modules that ran before an error are recorded
            probe.forward_packed(documents)

    part_records = _record_values(modules, PART_TOKENS, run_part)
    first_token = probe.group.rank * PART_TOKENS
    spans = [(slice(first_token, first_token + PART_TOKENS), slice(None))]
    leaks = [*_iterate_leaks(modules, whole_records, part_records, spans=spans, tolerance=tolerance)]
    leaks_of_all_ranks = [leak for leaks_of_rank in gather_values(leaks) for leak in leaks_of_rank]
    # Of several leaks with the name of one module, the dictionary holds the last, which has the largest change.
    largest = {leak.name: leak for leak in sorted(leaks_of_all_ranks, key=lambda leak: leak.change)}
    return _innermost([largest[name] for name in modules if name in largest])


def _innermost(findings: list[Finding]) -> list[Finding]:
    """Return the findings whose module contains no module of another finding."""
    names = {finding.name for finding in findings}
    return [
        finding for finding in findings if not any(_is_inside(name, finding.name) for name in names - {finding.name})
    ]


def find_shifted(probe: Probe, documents: list[Tensor]) -> list[ShiftedPositions]:
    """Return the innermost modules whose position ids start at another number in a pack than in documents alone.

    Position ids count up by 1 in each document, packed and alone, and start at the same number in all documents alone.
    """
    lengths = [len(ids) for ids in documents]
    record = partial(_record_values, dict(probe.inner.named_modules()))
    records_packed = record(sum(lengths), partial(probe.forward_packed, documents))
    records_alone = [record(_row_length(probe, ids), partial(probe.forward_alone, ids)) for ids in documents]
    shifted = []
    for name, calls in records_packed.items():
        for place, (axis, values) in calls[0].inputs.items():  # the first call of the module stands for all
            is_integer = not values.is_floating_point() and values.dtype != torch.bool
            if not is_integer or values.shape[1] != 1:  # position ids are one integer per token
                continue
            inputs_alone = [records[name][0].inputs for records in records_alone if name in records]
            positions_alone = [inputs[place].by_token.flatten() for inputs in inputs_alone if place in inputs]
            if len(positions_alone) < len(documents):
                continue
            positions_packed = values.flatten().split(lengths)
            counts_up = all(
                torch.equal(positions.diff(), torch.ones_like(positions[1:]))
                for positions in [*positions_alone, *positions_packed]
            )
            starts_alone = {int(positions[0]) for positions in positions_alone}
            starts_packed = {int(positions[0]) for positions in positions_packed}
            if counts_up and len(starts_alone) == 1 and starts_packed != starts_alone:
                shifted.append(ShiftedPositions(name, place, axis, starts_alone.pop()))
    return _innermost(shifted)


def find_raising(probe: Probe, documents: list[Tensor]) -> str | None:
    """Return the name of the innermost module that was running when the model raised on a pack, or None."""
    raising: list[str] = []  # `calls_watched` notes modules that raise from the outermost to the innermost

    # No values are needed, so `len` stands for reading them: `inputs` and `outputs` are the numbers of values.
    def note_raising_call(name: str, call: int, inputs: int, outputs: int | None) -> None:
        if outputs is None:
            raising.append(name)

    with suppress(CannotRun), calls_watched(dict(probe.inner.named_modules()), len, note_raising_call):
        probe.forward_packed(documents)
    return raising[-1] if raising else None


def _record_values(
    modules: dict[str, nn.Module],
    num_tokens: int,
    run_model: Callable[[], object],
    *,
    positions_only: bool = False,
    on_host: bool = False,
) -> Records:
    """Call `run_model`, and return the tensors with an axis of `num_tokens` among inputs and outputs of each call.

    Args:
        run_model: runs the model. Its result is not used.
        positions_only: record only calls that get integers, which may be positions.
        on_host: record on the CPU.
    """
    records: Records = {}

    def note_call(name: str, call: int, inputs: Values, outputs: Values | None) -> None:
        if not positions_only or any(not value.by_token.is_floating_point() for value in inputs.values()):
            records.setdefault(name, []).append(CallRecord(inputs, outputs or {}))

    with calls_watched(modules, partial(_by_token, num_tokens=num_tokens, on_host=on_host), note_call):
        run_model()
    return records


def _row_length(probe: Probe, document: Any) -> int:
    """Return the number of tokens of a document alone, with the padding that the model needs."""
    return probe.make_unpacked_batch(document)["input_ids"].shape[1]


def _num_tokens(documents: Documents) -> int:
    """Return the number of tokens of a pack."""
    return sum(map(len, documents))


def _is_inside(name: str, parent: str) -> bool:
    """Return whether module `name` is inside module `parent`. The name of the whole model is empty."""
    return not parent or name.startswith(parent + ".")


def _by_token(leaves: Leaves, num_tokens: int, on_host: bool = False) -> Values:
    """Return copies of the tensors among some leaves that have an axis of `num_tokens` among their first four axes.

    Hidden states, queries and keys, and attention weights have their tokens there; (B, heads, T, T) has the most axes.
    """
    values_by_place = {}
    for place, value in leaves:
        if isinstance(value, Tensor) and num_tokens in value.shape[:4]:
            axis = value.shape.index(num_tokens)
            by_token = value.detach().movedim(axis, 0).reshape(num_tokens, -1)
            # The values are copied, because the model may change the tensor in place afterwards.
            by_token = by_token.cpu() if on_host and by_token.device.type != "cpu" else by_token.clone()
            values_by_place[place] = TokenValues(axis, by_token)
    return values_by_place


def _largest_change(first: Values, second: Values, spans: Spans) -> float:
    """Return the largest change of some tokens, relative to the largest finite value of each tensor.

    It is 0 if no tensors can be compared.

    Args:
        first, second: the tensors of a call in two runs.
        spans: the tokens that are compared.
    """
    changes = []
    for place in first.keys() & second.keys():
        before = first[place].by_token
        after = second[place].by_token
        # A mask (T, T) has different shapes in packs of different lengths.
        if before.shape[1] != after.shape[1] or not before.numel():
            continue
        if before.is_complex():
            before = torch.view_as_real(before)
            after = torch.view_as_real(after)
        before = to_exact(before)  # in fp64, in which a difference is hardly rounded
        after = to_exact(after)
        scale = before.abs().nan_to_num(nan=0.0, posinf=0.0).max().clamp(min=1e-30)
        gaps = [_absolute_changes(before[first_span], after[second_span]) for first_span, second_span in spans]
        changes += [gap.max() / scale for gap in gaps if gap.numel()]
    if not changes:
        return 0.0
    # All changes are read from the device at once, not one per tensor and document.
    return max(0.0, *torch.stack([change.to(changes[0].device) for change in changes]).tolist())


def _absolute_changes(before: Tensor, after: Tensor) -> Tensor:
    """Return by how much each number changes: 0 for equal infinities and for two NaN, infinity for a change to NaN."""
    is_equal = (before == after) | (before.isnan() & after.isnan())
    return (before - after).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(is_equal, 0.0)


def _numeric_values(values: Values) -> Values:
    """Return the tensors that hold real or complex numbers, without integers and masks."""
    return {
        place: value
        for place, value in values.items()
        if value.by_token.is_floating_point() or value.by_token.is_complex()
    }


def _share_changed(first: Values, second: Values, spans: Spans, *, minimum: float) -> float:
    """Return the largest share of a token's numbers that change by more than `minimum` times their own size."""
    shares = [0.0]
    for place in first.keys() & second.keys():
        before = first[place].by_token
        after = second[place].by_token
        if not before.is_complex():  # the difference of complex numbers has a size, too
            before = to_exact(before)
            after = to_exact(after)
        if before.shape[1] == after.shape[1] > 1:  # a share of one number would say nothing
            for first_span, second_span in spans:
                old = before[first_span]
                is_changed = (old - after[second_span]).abs() > minimum * old.abs()
                shares.append(is_changed.float().mean(1).max().item())
    return max(shares)
