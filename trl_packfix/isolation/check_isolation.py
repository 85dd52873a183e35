"""The leak probe: test on the model itself whether a document in a pack changes another document.

The test does not depend on the name of the attention implementation. Small packs are built exactly as for training, and
three things are tested:

1. One document is changed, in its tokens and in its length. The states of the other documents must not change.
2. Every document must have the states that it has alone, also far from the start of a pack. Alone it runs on the model
   as the user gave it, with the attention that it had then, as unpacked TRL would train it.
3. The gradient of one document's outputs with respect to the embeddings of another document must be exactly zero, or as
   small as rounding where a kernel sums tokens of several documents. With several ranks per pack, the gradient with
   respect to the document's own embeddings must also be the gradient that the document has alone.

A model and the length of the longest document come in; an `IsolationReport` goes out (`isolation_report.py`). `Probe`
(`probe.py`) builds and runs the packs. `packed_model.py` and `search.py` call this module before training and while
they repair a model; users call `check_isolation`.

Words:

    gap         a difference between the states of a document in two runs, relative to the largest state. A `RunPair`
                says which two runs
    change      a gap between two packs, in which other documents differ
    difference  a gap between a pack and the document alone
    tolerance   the part of a gap that rounding explains. A larger gap is a defect
    threshold   a length above which the model computes a document differently, such as a sliding window
    degree      the number of ranks that share each pack (sequence parallelism). A model that passes on whole packs may
                fail on the parts that ranks hold, so each degree is tested. The states of all ranks are gathered before
                they are compared
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.forwards import mark_packed_forwards
from ..attention.models import has_attention
from ..attention.varlen import ATTENTION_NAME
from ..feature import PLAIN, Feature
from .isolation_report import IsolationReport
from .probe import DOCUMENT_LENGTHS, NUM_EXTRA_TOKENS, Documents, Examples, Probe, RunPair, replace_documents
from .probed_model import MAX_NOISE, NOT_FINITE, NUM_DRAWS, CannotRun, largest_distance, to_exact
from .thresholds import thresholds
from .ties import FirstOfTies
from .tracing import Leak, find_leaks, find_origins, find_wrong_parts

# Tokens before a document that is tested far from the start of a pack: bf16 represents integers exactly up to 256 only
FAR_TOKENS = 300
FILLER_TOKENS = 100  # length of each document that fills the tokens before it
HALF_PRECISION_TOLERANCE = 1e-4  # a tolerance above it means half precision
# If packs of text are tested, and then packs that hold more than text, the report has the larger values in these fields
MAXIMUM_FIELDS = ("max_change", "max_difference", "tolerance")


def check_isolation(
    model: nn.Module,
    max_length: int | None = None,
    degree: int = 1,
    *,
    images: Any = None,
    user_attention: str | None = None,
) -> IsolationReport:
    """Test whether documents in a pack are isolated on this model, with its attention, adapters, dtype and wrapping.

    The model is not trained or changed: parameters, gradients, buffers, random state and training mode are the same
    when the function returns.

    The cost is about ten forwards of at most 50 tokens, two backwards, and forwards of packs with a document of 11
    tokens behind 300, 600, 1,200, ... others, up to `max_length` (behind 300 only if that is None), as far as they fit
    the memory of the device. [`IsolationReport`]'s `reach` says how far apart documents were tested. In half precision
    there are up to seven more forwards of 47 tokens, if one rounding does not explain the differences. If the model has
    thresholds below `max_length`, such as a sliding window, two packs just longer than the largest threshold are run.

    If the model is wrapped (DDP, DeepSpeed, FSDP), all ranks must call this function. With `degree=1` a wrapped model
    is tested without its gradients. With a larger degree there is one backward for each document.

    Args:
        model (`nn.Module`):
            A transformers causal LM, bare or wrapped by PEFT, DDP or an engine.
        max_length (`int`, *optional*):
            The longest document of the run, in tokens. If `None`, the number of positions of the model.
        degree (`int`, *optional*, defaults to `1`):
            Number of neighbouring ranks that share a pack (sequence parallelism). If it is larger than 1, all ranks
            must call this function, with the same model and images.
        images (`ImageExamples`, *optional*):
            Makes documents with images, which are tested after documents of text. If `None`, only text is tested.
        user_attention (`str`, *optional*):
            The attention implementation that the model had before it was set up for packs, on which documents run
            alone. If `None`, the current one, or transformers' default if the current one is `packfix_varlen`.

    Returns:
        [`IsolationReport`]: The result of the test. A model that raises on a pack is reported in its `error` field.

    Raises:
        ValueError: If the number of ranks is not a multiple of `degree`, or an attention kernel cannot compute this
            model (heads, dtype, GPU).
        RuntimeError: If the device or the communication between ranks fails.

    Example:

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> report = check_isolation(LlamaForCausalLM(tiny))
    >>> report.passed, report.isolated, report.equal
    (True, True, True)
    """
    feature = PLAIN if images is None else images
    return check_packs(model, max_length, degree, user_attention=user_attention, feature=feature, farthest=max_length)


def check_packs(
    model: nn.Module,
    max_length: int | None = None,
    degree: int = 1,
    *,
    user_attention: str | None = None,
    feature: Feature = PLAIN,
    farthest: int | None = None,
) -> IsolationReport:
    """Test packs with a feature, or plain packs, and return the report.

    `check_isolation` describes the parameters that are not listed here.

    Args:
        feature: makes the probe. With a feature by which documents share rows, the test is also failed if a document
            does not attend to the tokens that it shares.
        farthest: the most tokens in front of a document that is tested in a long pack; None: `FAR_TOKENS`.
    """
    probe_class = feature.make_probe_class(Probe)
    probe = probe_class(model, degree, user_attention)
    # `undisturbed` switches dropout off, and restores the random state and the modes of the model.
    with probe.undisturbed(), ExitStack() as hooks:
        try:
            if probe.attention == ATTENTION_NAME:
                # In this context a forward that gets boundaries makes them known to the attention modules.
                hooks.callback(mark_packed_forwards(probe.inner).remove)
            elif not probe.group.is_alone and has_attention(probe.inner):
                raise CannotRun(f"attention {probe.attention!r} does not exchange tokens; {ATTENTION_NAME!r} does.")
            text_report, defect = judge_probe(probe, max_length, farthest=farthest)
            if defect is not None or not probe.has_further_examples:
                return text_report
            # Documents far from the start of a long pack were tested with text, so only `FAR_TOKENS` are tested here.
            report, _ = judge_probe(probe, max_length, probe.further_examples())
            largest = {name: max(getattr(text_report, name), getattr(report, name)) for name in MAXIMUM_FIELDS}
            return replace(report, unreachable=text_report.unreachable, **largest)
        except CannotRun as error:
            return report_refusal(probe, error)


def report_refusal(probe: Probe, error: CannotRun) -> IsolationReport:
    """Return the report on a model that `error` kept a probe from running on a pack. Run a row without packing, too."""
    unpacked_error = probe.error_unpacked()
    return IsolationReport(
        isolated=False,
        equal=False,
        max_change=inf,
        max_difference=inf,
        max_gradient=None,
        tolerance=0.0,
        attention=probe.attention,
        error=unpacked_error or str(error),
        degree=probe.degree,
        runs_unpacked=unpacked_error is None,
    )


class Gap(NamedTuple):
    """A difference of states between two runs."""

    size: float  # relative to the largest state
    pair: RunPair  # the two runs


class ProbeMeasurement:
    """Measures gaps between runs of a probe, and how much of them rounding explains.

    It begins with an estimate of rounding from the dtype. Only if a gap is larger, it repeats runs and adds noise to
    measure the rounding of this model.

    Args:
        documents: the pack on which rounding is measured. Most pairs of runs are this pack and another run.

    Attributes:
        scale: the largest finite state of the documents, to which gaps are relative.
        rounding: the relative change that rounding inside one module may cause.
        tolerance: the relative change that rounding may cause at the end of the model. A larger gap is a defect.
    """

    def __init__(self, probe: Probe, documents: Documents):
        self.probe = probe
        self.documents = documents
        # This first run also finds modules that draw random numbers, such as routers with jitter, and stops them.
        self._packed_states = probe.run_without_draws(lambda: probe.forward_packed(documents))
        with probe.unpacked(max(map(len, documents))):
            # By the id of the document, because tensors are no keys
            self._states_alone = {id(document): probe.forward_alone(document) for document in documents}
        if probe.on_any_rank(not all(states.isfinite().all() for states in self._states_alone.values())):
            raise CannotRun(NOT_FINITE)
        # Relative to infinity every change would be 0.
        finite_states = [states[states.isfinite()].abs() for states in self._packed_states]
        self.scale = max((states.max().item() for states in finite_states if states.numel()), default=1.0)
        self.rounding = probe.rounding
        self.tolerance = self.rounding
        # The last pack that was a first run, and its states: the first run of the next pair is often the same.
        self._last_documents = documents
        self._last_states = self._packed_states
        self._is_repeated = False  # whether `measure_repetition` has run
        # Numbers of the random roundings (`rounded_otherwise` in `probed_model.py`) that have not been tried
        num_roundings = NUM_DRAWS if self.rounding > HALF_PRECISION_TOLERANCE else 0
        self._untried_roundings = iter(range(1, 1 + num_roundings))

    def measure_gap(self, pair: RunPair) -> Gap:
        """Run a pair, unless its states are known, and return the largest difference of its common documents."""
        if pair.first_documents is not self._last_documents:
            self._last_states = self.probe.forward_packed(pair.first_documents)
            self._last_documents = pair.first_documents  # after the forward, which may raise
        first_states = [self._last_states[i] for i, _ in pair.common_documents]
        states_alone = self._states_alone.get(id(pair.second_documents[0])) if pair.is_alone else None
        second_states = pair.run_second(self.probe) if states_alone is None else [states_alone]
        return Gap(largest_distance(first_states, second_states) / self.scale, pair)

    def explains(self, gap: float) -> bool:
        """Return whether rounding explains a gap of this size, on all ranks. A measurement may raise `tolerance`."""
        if self.probe.is_beyond([gap], [self.tolerance]):  # on any rank
            self.measure_repetition()
            # Roundings add up in a deep model, and one of them can make a router choose other experts. So run the pack
            # again under random roundings, until the tolerance explains the gap or all have been tried.
            (self.tolerance,) = self.probe.limits_of_rounding(
                [gap], [self.tolerance], lambda: [self._change_of_rerun()], draws=self._untried_roundings
            )
        return not self.probe.is_beyond([gap], [self.tolerance])

    def measure_repetition(self) -> None:
        """Add the change that a repeated run of the same pack makes to `rounding` and `tolerance`, once."""
        if not self._is_repeated:
            self._is_repeated = True
            # The factor is there because a repeated run is only one sample of rounding. Without the cap, rounding would
            # explain any leak of a model that draws random numbers or has NaN states.
            self.rounding = min(self.rounding + 8 * self._change_of_rerun(), MAX_NOISE)
            self.tolerance = max(self.tolerance, self.rounding)

    def _change_of_rerun(self) -> float:
        """Run the pack again and return the change of its states, relative to `scale`."""
        return largest_distance(self._packed_states, self.probe.forward_packed(self.documents)) / self.scale


def judge_probe(
    probe: Probe, max_length: int | None, examples: Examples | None = None, *, farthest: int | None = None
) -> tuple[IsolationReport, RunPair | None]:
    """Test a model with one set of documents, and judge the gaps.

    Args:
        max_length: the longest document of the run, in tokens; None is the number of positions of the model.
        examples: a pack and variants of it. None draws text, and documents longer than the thresholds of the model.
        farthest: see `check_packs`.

    Returns:
        The report, and the pair of runs that shows a defect most clearly; None in its place if there is no defect.

    Raises:
        CannotRun: the model raises on a pack, or its states are NaN or infinite without packing, too.
    """
    # 1. Choose the documents.
    shortest = min(DOCUMENT_LENGTHS)
    # Lengths in tokens at which the model may change, by field of the config: those that some of the documents here
    # exceed, and those that no document of the run exceeds
    tested_thresholds, unreachable = thresholds(probe.config, max_length, shortest)
    if examples is None:
        examples = probe.examples(max_length)
    else:  # thresholds are tested with text
        tested_thresholds = {}
    documents, variants = examples
    # 2. Compare variants of the pack with it (changes), and documents in the pack with themselves alone (differences).
    measurement = ProbeMeasurement(probe, documents)
    changes = [measurement.measure_gap(RunPair(documents, variant)) for variant in variants]
    differences_alone = [
        measurement.measure_gap(RunPair(documents, [document], is_alone=True)) for document in documents
    ]
    # Of equal gaps, the one of the last document is chosen, which has the most documents before it. The common document
    # of these pairs is the one that runs alone, and `common_documents` begins with its index in the pack.
    largest_alone = max(differences_alone, key=lambda gap: (gap.size, gap.pair.common_documents))
    # In a pack of one document no boundary hides a token. transformers then makes no mask, and models that are causal
    # only by the mask (PaliGemma) compute something else.
    last_document = documents[-1:]
    differences = [largest_alone, measurement.measure_gap(RunPair(last_document, last_document, is_alone=True))]
    if tested_thresholds:  # one document exceeds all thresholds at once, between two short ones
        long_pack, (short_pack,) = probe.long_examples(max(tested_thresholds.values()) + NUM_EXTRA_TOKENS)
        changes.append(measurement.measure_gap(RunPair(long_pack, short_pack, is_large=True)))
        long_pairs = [RunPair(long_pack, [document], is_alone=True, is_large=True) for document in long_pack]
        differences += [measurement.measure_gap(pair) for pair in long_pairs]
    gradient = probe.gradient(documents) if probe.takes_gradient else None
    # 3. Unless a gradient has shown a defect, find out what rounding explains, and test a document far from the start.
    # `gradient` is None if it is not tested, and 0 if it is not larger than rounding explains.
    reach = 0
    if not probe.on_any_rank(gradient):
        _explain_by_rounding(measurement, changes)
        _explain_by_rounding(measurement, differences)
        if measurement.explains(max(gap.size for gap in changes + differences)):
            filler_length = min(FILLER_TOKENS, max_length or FILLER_TOKENS)
            document = documents[2]  # any document of several tokens will do
            reach = _test_far(
                measurement, document, filler_length, changes=changes, differences=differences, farthest=farthest
            )
    # 4. Judge the largest gaps, and find the modules where information crosses.
    change = max(gap.size for gap in changes)
    difference, unequal_pair = max(differences, key=lambda gap: gap.size)
    is_changed = not measurement.explains(change)
    is_equal = measurement.explains(difference)
    leaks, leaking_pair = _find_leaking_modules(measurement, changes, is_changed=is_changed, is_equal=is_equal)
    # On one rank, modules are found only where information crosses. If ranks share packs, they are also found where
    # documents only differ from themselves alone.
    crosses = is_changed or gradient or (leaks and probe.group.is_alone)
    report = IsolationReport(
        isolated=not crosses,
        # Not `is_equal`: the search for modules may have raised the tolerance since.
        equal=difference <= measurement.tolerance,
        max_change=change,
        max_difference=difference,
        max_gradient=gradient,
        tolerance=measurement.tolerance,
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
    return report, unequal_pair if report.isolated else leaking_pair


def _test_far(
    measurement: ProbeMeasurement,
    document: Any,
    filler_length: int,
    *,
    changes: list[Gap],
    differences: list[Gap],
    farthest: int | None,
) -> int:
    """Compare a document far from the start of a pack with itself alone, at growing distances.

    Documents of `filler_length` tokens fill the pack before it. If the document differs from itself alone, the test
    ends with a second pack, in which the documents before it are changed. If it changes with them, there is a leak, and
    else another error, such as rounded positions. The test also ends at a distance that does not fit the memory of this
    device.

    Args:
        changes, differences: the gaps so far, to which the gaps of this test are added.
        farthest: see `check_packs`.

    Returns:
        The largest distance that passed, in tokens.

    Raises:
        OutOfMemoryError: even the first pack does not fit, or other ranks would wait for this one.
    """
    probe = measurement.probe
    reach = 0
    for num_tokens in _distances(farthest):
        fillers = [probe.tokens(filler_length) for _ in range(0, num_tokens, filler_length)]
        pack = [*fillers, document]
        try:
            differences.append(measurement.measure_gap(RunPair(pack, [document], is_alone=True, is_large=True)))
        except torch.OutOfMemoryError:
            other_ranks_wait = probe.has_engine or not probe.group.is_alone
            if other_ranks_wait or not reach:
                raise
            break
        _explain_by_rounding(measurement, differences)
        if not measurement.explains(max(gap.size for gap in differences)):
            variant = replace_documents(pack, {i: probe.tokens(filler_length) for i in range(len(fillers))})
            changes.append(measurement.measure_gap(RunPair(pack, variant, is_large=True)))
            _explain_by_rounding(measurement, changes)
            break
        reach = sum(map(len, fillers))
    return reach


def _distances(farthest: int | None) -> Iterator[int]:
    """Yield the numbers of tokens before a document: `FAR_TOKENS`, then twice as many up to `farthest` if given.

    >>> [*_distances(2048)], [*_distances(None)]
    ([300, 600, 1200, 2048], [300])
    """
    num_tokens = FAR_TOKENS
    yield num_tokens
    while farthest is not None and num_tokens < farthest:
        num_tokens = min(2 * num_tokens, farthest)
        yield num_tokens


def _find_leaking_modules(
    measurement: ProbeMeasurement, changes: list[Gap], *, is_changed: bool, is_equal: bool
) -> tuple[list[Leak], RunPair]:
    """Return the modules where information crosses, and the pair of runs that shows it.

    Args:
        changes: gaps between a pack and variants of it.
        is_changed: whether one of these gaps is a defect.
        is_equal: whether documents in the pack equal themselves alone.
    """
    probe = measurement.probe
    tolerance = measurement.tolerance
    # Prefer runs of equal lengths: only tokens differ in them, which shows the place of the leak most clearly.
    leaking_gaps = [gap for gap in changes if gap.size > tolerance] or changes
    pair = max(leaking_gaps, key=lambda gap: (gap.pair.has_equal_lengths, gap.size)).pair
    leaks: list[Leak] = []
    if not probe.group.is_alone:  # ranks share packs
        is_defect = is_changed or not is_equal
        return find_wrong_parts(probe, tolerance) if is_defect else [], pair
    if not probe.traces_leaks:  # documents share rows, so inputs and outputs cannot be told apart by document
        return [], pair
    if is_changed:
        return find_leaks(probe, pair, tolerance), pair
    if measurement.rounding <= HALF_PRECISION_TOLERANCE:
        return [], pair
    # At the end of a deep model, rounding in half precision may hide a leak. It cannot in the module where it begins.
    # So search in each pair, until modules are found. Without any, the pair of the last search is returned.
    for gap in changes:
        if not probe.on_any_rank(gap.size):  # nothing has changed at all
            continue
        pair = gap.pair
        measurement.measure_repetition()
        rounding = measurement.rounding
        if pair.is_large:  # recording all modules for a long document would need too much memory
            leaks = find_leaks(probe, pair, rounding, positions_only=True)
        else:
            # Packs with equal document lengths have all sums in the same order, so rounding explains smaller gaps
            # between them: up to half the limit.
            leaks = find_origins(probe, pair, rounding / 2 if pair.has_equal_lengths else rounding)
        if probe.on_any_rank(leaks):
            break
    return leaks, pair


def _explain_by_rounding(measurement: ProbeMeasurement, gaps: list[Gap]) -> None:
    """Replace the largest gaps in the list by their minimum over several roundings, until one remains a defect.

    A router picks the experts, and the indexer of sparse attention the keys, with the largest of nearly equal scores.
    One rounding can change which of them it picks, and the states then change as much as by a leak. But without a leak
    there are, for each token, roundings under which the two runs agree, if equal scores are picked in the order of the
    document (`ties.py`).
    """
    for _ in gaps:  # at most once for each gap
        largest = max(range(len(gaps)), key=lambda i: gaps[i].size)
        size, pair = gaps[largest]
        if measurement.explains(size):
            return
        gaps[largest] = Gap(_smallest_gap(measurement.probe, pair) / measurement.scale, pair)
        if not measurement.explains(gaps[largest].size):
            return


def _smallest_gap(probe: Probe, pair: RunPair) -> float:
    """Return the largest difference between states of two runs that remains under the best roundings.

    Both runs are repeated under several roundings. For each token the smallest gap between any first and any second run
    counts. The largest of these gaps, over all tokens, is returned.
    """

    def run_rounded(compute_states: Callable[[Probe], list[Tensor]], draw: int | None) -> Tensor:
        rounding = nullcontext() if draw is None else probe.rounded_otherwise(draw)
        with FirstOfTies(), rounding:
            return torch.cat(compute_states(probe))

    first_runs = [run_rounded(pair.run_first, draw) for draw in (None, *range(NUM_DRAWS))]
    token_gaps = []
    for draw in (None, *range(NUM_DRAWS, 2 * NUM_DRAWS)):
        second = to_exact(run_rounded(pair.run_second, draw))
        token_gaps += [(to_exact(first) - second).abs().amax(-1).nan_to_num(inf) for first in first_runs]
    return torch.stack(token_gaps).amin(0).max().item()
