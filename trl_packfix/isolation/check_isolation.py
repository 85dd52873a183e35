"""The leak probe: test on the model itself whether a document in a pack changes another.

The name of the attention implementation does not matter. Small packs are built exactly as for training, and three
things are tested:

1. One document is changed, in its tokens and in its length. The states of the others must not change.
2. Every document must have the states that it has alone, also far from the start of a pack. Alone it runs on the model
   as the user gave it, with its own attention, as unpacked TRL would train it.
3. The gradient of one document's outputs with respect to the embeddings of another before it must be exactly zero, or
   rounding where a kernel sums tokens of several documents. With several ranks that of its own must be the one that it
   has alone.

With a degree above 1 the ranks of a group share each of these packs, as in training with sequence parallelism. Their
states are put together before they are compared. A model that passes alone may fail on parts, so each degree is tested.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.forwards import mark_packed_forwards
from ..attention.models import has_attention
from ..attention.varlen import ATTENTION_NAME
from .image_probe import ImageExamples
from .isolation_report import IsolationReport
from .prefix_probe import make_probe
from .probe import DOCUMENT_LENGTHS, NUM_EXTRA_TOKENS, Documents, Examples, Probe, RunPair, replace_documents
from .probed_model import MAX_NOISE, NUM_DRAWS, CannotRun, largest_distance, to_exact
from .thresholds import thresholds
from .ties import FirstOfTies
from .tracing import Leak, find_leaks, find_origins, find_wrong_parts

FAR_TOKENS = 300  # tokens before the document far from the start: bf16 represents integers exactly up to 256 only
FILLER_TOKENS = 100  # tokens of each of these documents before it
HALF_PRECISION_TOLERANCE = 1e-4  # a tolerance above it means half precision
MAXIMUM_FIELDS = ("max_change", "max_difference", "tolerance")  # numbers of a report, the larger of text and images


def check_isolation(
    model: nn.Module,
    max_length: int | None = None,
    degree: int = 1,
    *,
    images: ImageExamples | None = None,
    user_attention: str | None = None,
) -> IsolationReport:
    """Test whether documents in a pack are isolated on this model, with its attention, adapters, dtype and wrapping.

    Parameters, gradients, buffers, random state and training mode are unchanged when it returns. It costs about ten
    forwards of at most 50 tokens, two backwards, and forwards of packs of 311, 611, 1,211 ... up to `max_length` tokens
    (only the first of these if it is None), as many as fit the memory of the device; `IsolationReport.reach` says how
    far apart documents were tested. In half precision it costs up to seven more forwards of 47 tokens, where one
    rounding does not explain what is seen. If the model has a threshold below `max_length`, it costs two packs just
    longer than the largest of them. All ranks must call it with wrapped models (DDP, DeepSpeed, FSDP). These are tested
    by forwards only with degree 1, and have a backward for each document above it.

    Args:
        model: a transformers causal LM, wrapped or not by PEFT, DDP or an engine.
        max_length: the longest document of the run, in tokens; None is the number of positions of the model.
        degree: number of neighbouring ranks that share a pack (sequence parallelism). Above 1 all ranks must call it
            with the same model and images.
        images: makes documents with images, which are tested after those of text alone; None tests text.
        user_attention: the attention implementation that the model had before it was set up for packs. A document alone
            runs on it. None: the current one, or transformers' default if that is `packfix_varlen`.

    Returns:
        The result of the test. A model that raises on a pack is reported, not raised: see `IsolationReport.error`.

    Raises:
        ValueError: the number of ranks is not a multiple of `degree`, or an attention kernel cannot compute this model
            (heads, dtype, GPU).
        RuntimeError: an error of the device or of communication.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> report = check_isolation(LlamaForCausalLM(tiny))
    >>> report.passed, report.isolated, report.equal
    (True, True, True)
    """
    return check_packs(model, max_length, degree, images=images, user_attention=user_attention, farthest=max_length)


def check_packs(
    model: nn.Module,
    max_length: int | None = None,
    degree: int = 1,
    *,
    images: ImageExamples | None = None,
    user_attention: str | None = None,
    shares: bool = False,
    farthest: int | None = None,
) -> IsolationReport:
    """Judge packs whose documents share prefixes, or not; up to `farthest` tokens apart, else `FAR_TOKENS`.

    If they share, `equal` is False, too, if a document does not attend to the tokens that it shares. `max_gradient`
    then holds the relative difference of its gradients. With `images` documents share images, and text in front of
    other images. With a degree above 1 runs read keys that lie in other parts.
    """
    probe = make_probe(model, images, degree, user_attention=user_attention, shares=shares)
    with probe.undisturbed(), ExitStack() as hooks:
        try:
            if probe.attention == ATTENTION_NAME:
                hooks.callback(mark_packed_forwards(probe.inner).remove)
            elif probe.degree > 1 and has_attention(probe.inner):
                raise CannotRun(f"attention {probe.attention!r} does not exchange tokens; {ATTENTION_NAME!r} does.")
            report, case = judge_probe(probe, max_length, farthest=farthest)
            if case is not None or (examples := probe.image_examples()) is None:
                return report
            seen = judge_probe(probe, max_length, examples)[0]
            largest = {name: max(getattr(report, name), getattr(seen, name)) for name in MAXIMUM_FIELDS}
            return replace(seen, unreachable=report.unreachable, **largest)
        except CannotRun as error:
            return report_refusal(probe, error)


def report_refusal(probe: Probe, error: CannotRun) -> IsolationReport:
    """The report on a model that raises."""
    unpacked = probe.error_unpacked()
    return IsolationReport(
        isolated=False,
        equal=False,
        max_change=inf,
        max_difference=inf,
        max_gradient=None,
        tolerance=0.0,
        attention=probe.attention,
        error=unpacked or str(error),
        degree=probe.degree,
        runs_unpacked=unpacked is None,
    )


Gap = tuple[float, RunPair]  # a change of states relative to the largest one, and the two runs that show it


class ProbeMeasurement:
    """The runs of a probe and what rounding explains of their gaps, which is measured only as far as a gap needs it.

    Attributes:
        scale: the largest state of the documents, to which gaps are relative.
        rounding: the relative change that rounding of one sum may cause.
        tolerance: the one at the end of the model.
    """

    def __init__(self, probe: Probe, documents: Documents):
        self.probe = probe
        self.documents = documents
        self._base = probe.silenced(lambda: probe.forward_packed(documents))
        with probe.unpacked(max(map(len, documents))):
            self._alone = {id(one): probe.forward_alone(one) for one in documents}
        self.scale = max(states.abs().max().item() for states in self._base)
        self.rounding = self.tolerance = probe.rounding
        self._last = documents, self._base  # the first run of the last case
        self._is_repeated = False
        self._draws = iter(range(1, 1 + NUM_DRAWS if self.rounding > HALF_PRECISION_TOLERANCE else 1))

    def gap(self, case: RunPair) -> Gap:
        """How far the documents that both runs have are apart."""
        if case.documents is not self._last[0]:
            self._last = case.documents, self.probe.forward_packed(case.documents)
        known = self._alone.get(id(case.others[0])) if case.alone else None
        second = case.second_states(self.probe) if known is None else [known]
        return largest_distance([self._last[1][i] for i, _ in case.common_documents], second) / self.scale, case

    def explains(self, gap: float) -> bool:
        """Whether rounding explains a gap, on all ranks."""
        if self.probe.is_beyond([gap], [self.tolerance]):
            self.repeat()
            # Roundings add up in a deep model, and one of them can make a router choose other experts
            (self.tolerance,) = self.probe.limits_of_rounding(
                [gap], [self.tolerance], lambda: [self._moved()], draws=self._draws
            )
        return not self.probe.is_beyond([gap], [self.tolerance])

    def repeat(self) -> None:
        """Add to the rounding of one sum what a repeated run changes."""
        if not self._is_repeated:
            self._is_repeated = True
            # Without the cap, a model that draws random numbers, or whose states are not finite, would explain any leak
            self.rounding = min(self.rounding + 8 * self._moved(), MAX_NOISE)
            self.tolerance = max(self.tolerance, self.rounding)

    def _moved(self) -> float:
        return largest_distance(self._base, self.probe.forward_packed(self.documents)) / self.scale


def judge_probe(
    probe: Probe, max_length: int | None, examples: Examples | None = None, *, farthest: int | None = None
) -> tuple[IsolationReport, RunPair | None]:
    """The report, and the pair of runs that shows a defect most clearly; None if there is no defect.

    The documents are `examples`, or text of all lengths that matter. Raises `CannotRun` if the model raises.
    """
    to_test, unreachable = thresholds(probe.config, max_length, min(DOCUMENT_LENGTHS))
    if examples is None:
        examples = probe.examples(max_length)
    else:
        to_test = {}
    documents, variants = examples
    runs = ProbeMeasurement(probe, documents)
    changes = [runs.gap(RunPair(documents, variant)) for variant in variants]
    alone = [runs.gap(RunPair(documents, [one], alone=True)) for one in documents]
    # transformers drops a mask that hides nothing, and with it the causality of some models
    last = documents[-1:]
    differences = [
        max(alone, key=lambda gap: (gap[0], gap[1].common_documents)),
        runs.gap(RunPair(last, last, alone=True)),
    ]
    if to_test:  # one document exceeds all thresholds at once, between two short ones
        long, (shorter,) = probe.long_examples(max(to_test.values()) + NUM_EXTRA_TOKENS)
        changes.append(runs.gap(RunPair(long, shorter, large=True)))
        differences += [runs.gap(RunPair(long, [one], alone=True, large=True)) for one in long]
    gradient = probe.gradient(documents) if probe.takes_gradient else None
    reach = 0
    if not probe.on_any_rank(gradient):  # else the result is clear
        _explain_by_rounding(runs, changes)
        _explain_by_rounding(runs, differences)
        if runs.explains(max(gap for gap, _ in changes + differences)):
            length = min(FILLER_TOKENS, max_length or FILLER_TOKENS)
            reach = _test_far(runs, documents[2], length, changes=changes, differences=differences, farthest=farthest)
    change, (difference, odd) = max(gap for gap, _ in changes), max(differences, key=lambda gap: gap[0])
    moved = not runs.explains(change)
    leaks, leak = _find_leaking_modules(runs, changes, moved=moved, is_equal=runs.explains(difference))
    report = IsolationReport(
        isolated=not (moved or gradient or (leaks and probe.degree == 1)),
        equal=difference <= runs.tolerance,
        max_change=change,
        max_difference=difference,
        max_gradient=gradient,
        tolerance=runs.tolerance,
        attention=probe.attention,
        leaks=leaks,
        unreachable=unreachable,
        degree=probe.degree,
        reads_ahead=probe.reads_ahead,
        dtype=str(probe.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp"),
        reach=reach,
    )
    if report.passed:
        return report, None
    return report, leak if not report.isolated else odd


def _test_far(
    runs: ProbeMeasurement,
    document: Any,
    length: int,
    *,
    changes: list[Gap],
    differences: list[Gap],
    farthest: int | None,
) -> int:
    """Compare a document far from the start of a pack with itself alone, and return the last distance that passed.

    Documents of `length` tokens are before it. Where it differs, they are changed: only so a leak is told from another
    error, such as positions that are rounded. Both gaps are added to the lists. It ends at a distance that does not fit
    the memory of this device, and raises `OutOfMemoryError` where other ranks would wait for this one.
    """
    probe = runs.probe
    reach = 0
    for num_tokens in _distances(farthest):
        before = [probe.tokens(length) for _ in range(0, num_tokens, length)]
        far = [*before, document]
        try:
            differences.append(runs.gap(RunPair(far, [document], alone=True, large=True)))
        except torch.OutOfMemoryError:
            if probe.has_engine or probe.degree > 1 or not reach:
                raise
            break
        _explain_by_rounding(runs, differences)
        if not runs.explains(max(gap for gap, _ in differences)):
            others = replace_documents(far, {i: probe.tokens(length) for i in range(len(before))})
            changes.append(runs.gap(RunPair(far, others, large=True)))
            _explain_by_rounding(runs, changes)
            break
        reach = sum(map(len, before))
    return reach


def _distances(farthest: int | None) -> Iterator[int]:
    """Generate how many tokens stand before a document: `FAR_TOKENS`, then twice as many up to `farthest` if given.

    >>> [*_distances(2048)], [*_distances(None)]
    ([300, 600, 1200, 2048], [300])
    """
    num_tokens = FAR_TOKENS
    yield num_tokens
    while farthest is not None and num_tokens < farthest:
        num_tokens = min(2 * num_tokens, farthest)
        yield num_tokens


def _find_leaking_modules(
    runs: ProbeMeasurement, changes: list[Gap], *, moved: bool, is_equal: bool
) -> tuple[list[Leak], RunPair]:
    """The modules where information crosses, and the runs that show it."""
    probe = runs.probe
    tolerance = runs.tolerance
    # Prefer runs of equal lengths: only tokens differ in them, which shows the place of the leak most clearly.
    leaking = [gap for gap in changes if gap[0] > tolerance] or changes
    _, case = max(leaking, key=lambda gap: (gap[1].same_length, gap[0]))
    leaks: list[Leak] = []
    if probe.degree > 1:
        return find_wrong_parts(probe, tolerance) if moved or not is_equal else [], case
    if not probe.traces_leaks:
        return [], case
    if moved:
        return find_leaks(probe, case, tolerance), case
    # At the end of a deep model the rounding of half precision may hide a leak; in the module where it begins, not.
    for gap, case in changes if runs.rounding > HALF_PRECISION_TOLERANCE else ():
        if not probe.on_any_rank(gap):
            continue
        runs.repeat()
        if case.large:  # recording all modules for a long document would need too much memory
            leaks = find_leaks(probe, case, runs.rounding, positions_only=True)
        else:  # with equal numbers of tokens all sums have the same order, so half the tolerance is enough
            leaks = find_origins(probe, case, runs.rounding / 2 if case.same_length else runs.rounding)
        if probe.on_any_rank(leaks):
            break
    return leaks, case


def _explain_by_rounding(runs: ProbeMeasurement, gaps: list[Gap]) -> None:
    """Replace the largest gaps by their minimum over several roundings, until one stays above the tolerance.

    A router or an indexer picks the largest of nearly equal scores. One rounding can change which one it picks, and
    the change of the states is then as large as a leak. But such runs agree, token by token, under some roundings, with
    equal scores in the order of the document (`ties.py`).
    """
    for _ in gaps:
        largest = max(range(len(gaps)), key=lambda i: gaps[i][0])
        gap, case = gaps[largest]
        if runs.explains(gap):
            return
        gaps[largest] = (_smallest_gap(runs.probe, case) / runs.scale, case)
        if not runs.explains(gaps[largest][0]):
            return


def _smallest_gap(probe: Probe, case: RunPair) -> float:
    """The smallest gap of each token between the two runs, over several roundings of each; the largest of these."""

    def run(states: Callable[[Probe], list[Tensor]], draw: int | None) -> Tensor:
        rounding = nullcontext() if draw is None else probe.rounded_otherwise(draw)
        with FirstOfTies(), rounding:
            return torch.cat(states(probe))

    first = [run(case.first_states, draw) for draw in (None, *range(NUM_DRAWS))]
    gaps = []
    for draw in (None, *range(NUM_DRAWS, 2 * NUM_DRAWS)):
        second = to_exact(run(case.second_states, draw))
        gaps += [(to_exact(one) - second).abs().amax(-1).nan_to_num(inf) for one in first]
    return torch.stack(gaps).amin(0).max().item()
