"""The lines of a report, in order: label and text of each.

A part of the report that may be absent (images, turns, ...) has a method `line`. What needs several parts is here.
"""

from typing import Any

from ..planning.strategies import STRATEGIES
from .numbers import PackingNumbers
from .sections import Lines


def _part_line(label: str, part: Any, *given: object) -> Lines:
    """That of a part of the report, if it has one."""
    text = None if part is None else part.line(*given)
    if text is not None:
        yield label, text


def _documents_lines(report: PackingNumbers) -> Lines:
    yield from _part_line("conversations", report.turns)
    text = (
        "a stream of unknown length; packed in arrival order, with uneven lengths in the first and last documents of "
        "each pass; read again from its start at its end"
    )
    if report.num_rows is not None:
        packs = "" if report.num_packs is None else f" -> {report.num_packs:,} packs ({report.strategy})"
        text = f"{report.num_documents:,} of {report.num_rows:,} rows, {report.num_tokens:,} tokens{packs}"
    yield "documents", text
    yield from _part_line("trained tokens", report.trained, report.num_trained_tokens, report.num_tokens)
    yield from _part_line("data", report.data)
    yield from _part_line("images", report.images)
    yield from _part_line("lengths", report.lengths)


def _packs_lines(report: PackingNumbers) -> Lines:
    size = report.groups.size(report.max_length)
    if report.num_rows is None:
        yield "micro-batch", size
        num = report.accumulation * report.world_size // report.groups.smallest_degree
        of_run = f"accumulation {report.accumulation}, ranks {report.world_size}"
        yield "steps", f"{report.num_steps:,} (max_steps), packs in each: {num} ({of_run})"
        if report.num_packs:
            yield from _part_line("sequence parallelism", report.shared)
            read = report.ledger.given
            yield "read", f"{read.documents:,} documents, {read.tokens:,} tokens ({read.trained_tokens:,} trained)"
            tokens = f"{report.num_tokens:,} tokens ({report.num_trained_tokens:,} trained)"
            yield "trained", f"{report.num_documents:,} documents, {tokens} in {report.num_packs:,} packs"
            yield "efficiency", f"{report.efficiency:.2%} of the packs filled"
        return
    filled = "no padding" if report.num_packs is None else f"{report.efficiency:.2%} filled"
    yield "micro-batch", f"{size}, {filled}; unpacked: {report.padding_efficiency:.2%}"
    documents = report.unpacked_documents
    steps = f"{report.num_steps:,}"
    if report.max_steps is not None:
        steps = f"{report.max_steps:,} (max_steps; an epoch has {report.num_steps:,})"
    yield (
        "steps",
        f"{steps} of about {report.documents_per_step:,.1f} documents (accumulation "
        f"{report.accumulation}, ranks {report.world_size}); unpacked: {-(-report.num_documents // documents):,} of "
        f"{documents:,}",
    )
    wanted = report.num_documents, documents, report.groups.enlarges_steps
    yield from _part_line("common prefixes", report.prefixes, *wanted)
    yield "against unpacked", _unpacked_text(report)
    if report.unpacked_loss != 1:
        yield (
            "unpacked loss",
            f"{report.unpacked_loss:.3f} of the packed one, and its gradients: TRL also divides by first labels",
        )
    assert report.imbalance is not None  # it is known for a table
    of_images = "" if report.images is None else report.images.imbalances
    yield from report.groups.lines(report.world_size, report.imbalance, of_images)


def _unpacked_text(report: PackingNumbers) -> str:
    """What to set instead of the unpacked run's. The learning rate is scaled by the square root, for Adam."""
    if STRATEGIES[report.strategy].keeps_unpacked_steps:
        same = "the same steps" if report.unpacked_loss == 1 else "the same steps but for the loss"
        return f"{same}: no setting has to change"
    assert report.documents_per_step is not None  # it is known for a table
    documents = report.unpacked_documents
    ratio = report.documents_per_step / documents
    if ratio < 1.1:  # a learning rate 1.05 times as high
        return f"about {documents:,} documents per step, too: no setting has to change"
    independent = ratio
    families = ""
    instead = report.groups.instead
    if report.prefixes is not None and report.prefixes.families_per_step is not None:
        per_step = report.prefixes.families_per_step
        independent = per_step / documents
        instead = '; or share_prefixes="pack"'
        families = f"{per_step:,.1f} families per step (unpacked: {documents:,} documents): "
    rate = f"learning_rate x {independent**0.5:.1f}" if independent > 1.1 else "keep learning_rate"
    return f"{families}{rate}, settings in steps / {ratio:.1f}{instead}"


def _cuts_lines(report: PackingNumbers) -> Lines:
    ledger, truncated = report.ledger, report.ledger.truncated
    if truncated.documents:
        tokens = f"{truncated.tokens:,} tokens ({truncated.trained_tokens:,} trained)"
        yield "truncated", f"{truncated.documents:,} documents lost {tokens}"
    if ledger.split.documents:
        yield "split", f"{ledger.split.documents:,} documents into {ledger.fragments:,}"
    for reason, count in ledger.dropped.items():
        yield f"dropped, {reason}", f"{count.documents:,} documents, {count.tokens:,} tokens"
    if report.documents_not_reached:
        lost = f"{report.documents_not_reached:,} documents, {report.tokens_not_reached:,} tokens"
        yield "not reached", f"{lost} per epoch (dataloader_drop_last)"
    if report.warning is not None:
        yield "warning", report.warning


def _model_lines(report: PackingNumbers) -> Lines:
    if report.experimental:
        yield "experimental", f"{', '.join(report.experimental)}: several GPUs have not run this yet"
    if report.newer_libraries:
        yield "not tested with", ", ".join(report.newer_libraries)
    yield "attention", report.attention
    if report.isolation is not None:
        if report.isolation.repaired:
            repairs = "; ".join(str(repair) for repair in report.isolation.repaired)
            yield "repaired", f"{repairs}: these modules see each document separately, with some padding"
        found = report.isolation
        failure = "NOT POSSIBLE" if found.error is not None else "WRONG" if found.isolated else "LEAK"
        text = f"{'passed' if found.passed else failure}: {found.summary()}"
        if found.passed and found.unreachable:
            text += f"; not tested, because beyond max_length: {', '.join(found.unreachable)}"
        yield "isolation", text
    if report.first_step is not None:
        yield "first step", report.first_step


LINES = (_documents_lines, _packs_lines, _cuts_lines, _model_lines)
