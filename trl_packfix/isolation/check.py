"""The leak probe: does a document in a pack change another, on this model as it stands?

Nothing is assumed from the name of an attention implementation. Small packs are built exactly as for training; one
document is changed in its tokens and in its length, and the others must not move; every document must be what it is
alone, far from the start of a pack, too; and the gradient of one document's outputs with respect to the embeddings of
another must be exactly zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import inf

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.forwards import mark_packed_forwards
from ..attention.models import text_config
from ..attention.varlen import ATTENTION_NAME
from .probe import CannotRun, Probe, distance
from .report import IsolationReport
from .thresholds import thresholds
from .tracing import Evidence, Leak, find_leaks, find_origins

LENGTHS = (13, 1, 11, 22)  # documents of the small pack: 47 tokens, a prime that no hidden size equals
FAR = (100,) * 6  # documents before one that lies far from the start of its pack: half precision counts to 256
COARSE = 1e-4  # a tolerance above it is one of half precision
DRAWS = 6  # of roundings: with a router the largest change is a rare one
MOST_NOISE = 0.5  # of the largest state: attention that leaks moves documents by all of it
SPARE = 3  # tokens by which a document passes a threshold


def check_isolation(model: nn.Module, max_length: int | None = None) -> IsolationReport:
    """Judge the model as it stands: its attention implementation, adapters, dtype and wrapping.

    Parameters, gradients, buffers, random state and training mode are as before when it returns. Costs about ten
    forwards of 47 tokens and four backwards, one forward of 611 tokens, six of 47 more in half precision, and twice a
    pack just longer than the largest threshold below `max_length` where the model has one. Wrapped models (DDP,
    DeepSpeed, FSDP) are judged by forwards alone; all ranks must call.

    Args:
        model: a transformers causal LM, wrapped by PEFT, DDP or an engine or not.
        max_length: the longest document of the run, in tokens; None is the longest that the model has positions for.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> report = check_isolation(LlamaForCausalLM(tiny))
    >>> report.isolated, report.equal
    (True, True)
    """
    probe = Probe(model)
    with probe.undisturbed(), _marked(probe.inner):
        try:
            return judge(probe, max_length)[0]
        except CannotRun as error:
            return refused(probe, error)


def refused(probe: Probe, error: CannotRun) -> IsolationReport:
    """The verdict on a model that raises."""
    return IsolationReport(False, False, inf, inf, None, 0.0, probe.attention, error=str(error))


def judge(probe: Probe, max_length: int | None) -> tuple[IsolationReport, Evidence | None]:
    """The verdict, and the pair of runs that shows best what is wrong; None if nothing is. Raises `CannotRun`."""
    probe.silence_draws()
    reach, unreachable = thresholds(probe.config, max_length, min(LENGTHS))
    lengths = [min(n, max_length or n) for n in LENGTHS]
    documents = [probe.tokens(n) for n in lengths]
    everyone = range(len(documents))
    base, repeat = probe.packed(documents), probe.packed(documents)
    scale = max(states.abs().max().item() for states in base)
    rounding = tolerance = 8 * distance(base, repeat, everyone) / scale + probe.rounding(documents)
    if rounding > COARSE:
        # A deep model adds roundings up, and a router sends a token elsewhere for one.
        moved_by = []
        for draw in range(DRAWS):
            with probe.rounded_otherwise(draw):
                moved_by.append(distance(base, probe.packed(documents), everyone))
        tolerance = max(rounding, min(3 * max(moved_by) / scale, MOST_NOISE))

    seen: list[tuple[float, Evidence]] = []  # changes of documents that were not changed themselves
    # The first document can move those behind it, the third those on both sides; the gradient asks all pairs.
    for changed in (0, 2):
        others = [i for i in everyone if i != changed]
        for more in (0, SPARE):
            variant = [*documents]
            variant[changed] = probe.tokens(lengths[changed] + more)
            seen.append((distance(base, probe.packed(variant), others) / scale, Evidence(documents, variant)))
    alone = [(distance(base[i : i + 1], [probe.alone(ids)], [0]) / scale, i) for i, ids in enumerate(documents)]
    worst, which = max(alone)
    unequal = [(worst, Evidence(documents, alone=which))]

    if reach:  # one long document passes every threshold at once, between two short ones
        long = [probe.tokens(7), probe.tokens(max(reach.values()) + SPARE), probe.tokens(9)]
        together = probe.packed(long, large=True)
        for i, ids in enumerate(long):
            gap = distance(together[i : i + 1], [probe.alone(ids, large=True)], [0]) / scale
            unequal.append((gap, Evidence(long, alone=i, large=True)))
        short = [long[0], probe.tokens(8), long[2]]
        gap = distance(together, probe.packed(short, large=True), [0, 2]) / scale
        seen.append((gap, Evidence(long, short, large=True)))

    gradient = None if probe.has_engine else probe.gradient(documents)
    if not probe.on_any_rank(gradient):  # else the verdict stands
        _explain(probe, seen, tolerance, scale)
        _explain(probe, unequal, tolerance, scale)
    change = max(gap for gap, _ in seen)
    if not probe.on_any_rank(gradient or max(change, *(gap for gap, _ in unequal)) > tolerance):
        far = [*(probe.tokens(min(n, max_length or n)) for n in FAR), documents[2]]
        last = probe.packed(far, large=True)[-1:]
        gap = distance(last, [probe.alone(documents[2], large=True)], [0]) / scale
        unequal.append((gap, Evidence(far, alone=len(FAR), large=True)))
        _explain(probe, unequal, tolerance, scale)
    # Where tokens alone show it, nothing else has moved, and the place can be seen best.
    leaking = [pair for pair in seen if pair[0] > tolerance] or seen
    _, leak = max(leaking, key=lambda pair: (pair[1].same_length, pair[0]))
    difference, odd = max(unequal, key=lambda pair: pair[0])
    moved = probe.on_any_rank(change > tolerance)
    leaks = find_leaks(probe, leak, tolerance) if moved else []
    if not moved and tolerance > COARSE:
        leaks, leak = _origins(probe, seen, rounding)
        moved = bool(leaks)
    report = IsolationReport(
        isolated=not moved and not gradient,
        equal=difference <= tolerance,
        max_change=change,
        max_difference=difference,
        max_gradient=gradient,
        tolerance=tolerance,
        attention=probe.attention,
        leaks=leaks,
        unreachable=unreachable,
    )
    if report.isolated and report.equal:
        return report, None
    return report, leak if not report.isolated else odd


def _explain(probe: Probe, seen: list[tuple[float, Evidence]], tolerance: float, scale: float) -> None:
    """Replace the largest gaps by what other roundings leave of them, until one above the tolerance stays there.

    A router or an indexer that picks the largest of nearly equal scores picks another one for one rounding, and what
    follows is as large as a leak. But then the two runs agree under some of their roundings, token by token.
    """
    for _ in seen:
        largest = max(range(len(seen)), key=lambda i: seen[i][0])
        gap, evidence = seen[largest]
        if not probe.on_any_rank(gap > tolerance):
            return
        left = _smallest_gap(probe, evidence) / scale
        seen[largest] = (left, evidence)
        if probe.on_any_rank(left > tolerance):
            return


def _smallest_gap(probe: Probe, evidence: Evidence) -> float:
    """Of each token the smallest gap between the two runs, each under several roundings; of these the largest."""
    documents, variant, alone = evidence.documents, evidence.variant, evidence.alone
    same = [i for i, ids in enumerate(documents) if (i == alone if variant is None else ids is variant[i])]

    def run(pack: list[Tensor] | None, draw: int | None) -> Tensor:
        with nullcontext() if draw is None else probe.rounded_otherwise(draw):
            if pack is None:
                return probe.alone(documents[same[0]], evidence.large)
            states = probe.packed(pack, evidence.large)
        return torch.cat([states[i] for i in same])

    first = [run(documents, draw) for draw in (None, *range(DRAWS))]
    smallest = torch.full((len(first[0]),), inf, dtype=torch.double, device=first[0].device)
    for draw in (None, *range(DRAWS, 2 * DRAWS)):
        second = run(variant, draw).double()
        for one in first:
            smallest = torch.minimum(smallest, (one.double() - second).abs().amax(-1).nan_to_num(inf))
    return smallest.max().item()


def _origins(probe: Probe, seen: list[tuple[float, Evidence]], rounding: float) -> tuple[list[Leak], Evidence]:
    """Where documents begin to move: half precision hides it at the end of a deep model, but not where it happens."""
    leaks: list[Leak] = []
    for gap, evidence in seen:
        if not probe.on_any_rank(gap):
            continue
        if evidence.large:  # all that a long document leaves in a large model would be too much to keep
            leaks = find_leaks(probe, evidence, rounding, positions_only=True)
        else:  # with as many tokens all sums are in the same order
            leaks = find_origins(probe, evidence, rounding / 2 if evidence.same_length else rounding)
        if probe.on_any_rank(leaks):
            break
    return leaks, evidence


@contextmanager
def _marked(inner: PreTrainedModel) -> Iterator[None]:
    guard = mark_packed_forwards(inner) if text_config(inner)._attn_implementation == ATTENTION_NAME else None
    try:
        yield
    finally:
        if guard is not None:
            guard.remove()
