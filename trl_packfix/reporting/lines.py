"""Make the lines of a report, in order. `Lines` is an iterator of pairs (label, text).

`PackingReport.lines` (`report.py`) calls the functions in `LINES`, and shows their lines on the terminal and in the
model card. A section of the report that may be absent (images, turns, ...) has a method `line` that returns its text; a
line that needs several sections is made here.

A *pack* is several documents in one row. A *trained* token counts in the loss. A *step* is an optimizer step. The
*unpacked run* is the training that TRL would do with the same settings and without packing. A *stream* is a dataset
that is read while training runs, so its size is unknown; all other datasets are *tables*.
"""

from typing import Any

from ..planning.strategies import STRATEGIES
from .numbers import PackingNumbers
from .sections import Lines


def _section_line(label: str, section: Any, *arguments: object) -> Lines:
    """Yield the line of a section of the report, if there are a section and a text.

    Args:
        label: label of the line.
        section: the section, or None.
        arguments: arguments of the method `line` of the section.
    """
    text = None if section is None else section.line(*arguments)
    if text is not None:
        yield label, text


def _documents_lines(report: PackingNumbers) -> Lines:
    """Yield the lines on the documents, before they are packed."""
    yield from _section_line("conversations", report.turns)
    if report.num_rows is None:
        text = (
            "a stream of unknown length; packed in arrival order, with uneven lengths in the first and last documents "
            "of each pass; read again from its start at its end"
        )
    else:
        packs = "" if report.num_packs is None else f" -> {report.num_packs:,} packs ({report.strategy})"
        text = f"{report.num_documents:,} of {report.num_rows:,} rows, {report.num_tokens:,} tokens{packs}"
    yield "documents", text
    yield from _section_line("trained tokens", report.trained, report.num_trained_tokens, report.num_tokens)
    yield from _section_line("data", report.data)  # whether the tokens hold every text of the rows, once
    yield from _section_line("images", report.images)
    yield from _section_line("lengths", report.lengths)


def _packs_lines(report: PackingNumbers) -> Lines:
    """Yield the lines on packs, steps and ranks."""
    if report.num_rows is None:
        yield from _stream_packs_lines(report)
    else:
        yield from _table_packs_lines(report)


def _stream_packs_lines(report: PackingNumbers) -> Lines:
    """Yield the lines on packs, steps and ranks of a stream."""
    # `rank_section`: the section on ranks that share packs, or on ranks with packs of their own
    yield "micro-batch", report.rank_section.capacity_text(report.max_length)
    # The ranks of a stream are divided into groups of `smallest_degree`, the fewest that hold a document of
    # `max_length` tokens. It is 1 if each rank has packs of its own
    packs_per_step = report.accumulation * report.world_size // report.rank_section.smallest_degree
    step = f"accumulation {report.accumulation}, ranks {report.world_size}"
    yield "steps", f"{report.num_steps:,} (max_steps), packs in each: {packs_per_step} ({step})"
    if report.num_packs:
        yield from _section_line("sequence parallelism", report.shared)
        read = report.ledger.given  # counts of all documents that were read
        yield "read", f"{read.documents:,} documents, {read.tokens:,} tokens ({read.trained_tokens:,} trained)"
        tokens = f"{report.num_tokens:,} tokens ({report.num_trained_tokens:,} trained)"
        yield "trained", f"{report.num_documents:,} documents, {tokens} in {report.num_packs:,} packs"
        yield "efficiency", f"{report.efficiency:.2%} of the packs filled"


def _table_packs_lines(report: PackingNumbers) -> Lines:
    """Yield the lines on packs, steps and ranks of a table."""
    capacity = report.rank_section.capacity_text(report.max_length)
    filled = "no padding" if report.num_packs is None else f"{report.efficiency:.2%} filled"
    # `padding_efficiency`: the share of tokens in padded batches
    yield "micro-batch", f"{capacity}, {filled}; unpacked: {report.padding_efficiency:.2%}"
    documents_per_unpacked_step = report.unpacked_documents
    steps = f"{report.num_steps:,}"
    if report.max_steps is not None:
        steps = f"{report.max_steps:,} (max_steps; an epoch has {report.num_steps:,})"
    num_unpacked_steps = -(-report.num_documents // documents_per_unpacked_step)
    unpacked_steps = f"{num_unpacked_steps:,} of {documents_per_unpacked_step:,}"
    yield (
        "steps",
        f"{steps} of about {report.documents_per_step:,.1f} documents (accumulation "
        f"{report.accumulation}, ranks {report.world_size}); unpacked: {unpacked_steps}",
    )
    step_size_settings = report.rank_section.step_size_settings  # names of settings that enlarge a step
    yield from _section_line(
        "common prefixes", report.prefixes, report.num_documents, documents_per_unpacked_step, step_size_settings
    )
    yield "against unpacked", _unpacked_text(report)
    # `unpacked_loss`: TRL's loss / packed loss. TRL may divide by the number of all labels. The first label of a
    # document adds no loss, because no token predicts it, so TRL's loss and its gradients are then smaller
    if report.unpacked_loss != 1:
        yield (
            "unpacked loss",
            f"{report.unpacked_loss:.3f} of the packed one, and its gradients: TRL also divides by first labels",
        )
    assert report.imbalance is not None, "the imbalance of a table is known"
    image_imbalances = "" if report.images is None else report.images.imbalances_text
    yield from report.rank_section.lines(report.world_size, report.imbalance, image_imbalances)


def _unpacked_text(report: PackingNumbers) -> str:
    """Return the advice how to change the settings of an unpacked run, because a packed step has more documents.

    The learning rate is scaled by the square root of a ratio, as is usual for Adam: the documents of a packed step over
    those of an unpacked step. For this ratio only *independent* documents of the packed step count: documents that
    begin alike and are packed together count as one.
    """
    if STRATEGIES[report.strategy].keeps_unpacked_steps:  # a packed step has the documents of an unpacked step
        exceptions = [] if report.unpacked_loss == 1 else ["the loss"]
        # `dataloader_drop_last` leaves out the whole incomplete step here, and in TRL only an incomplete micro-batch
        if report.documents_not_reached >= report.batch_size * report.world_size:
            exceptions.append("the incomplete last one of an epoch, of which TRL trains whole micro-batches")
        but_for = f" but for {' and '.join(exceptions)}" if exceptions else ""
        return f"the same steps{but_for}: no setting has to change"
    assert report.documents_per_step is not None, "the documents of a step are not known"
    documents = report.unpacked_documents  # documents of an unpacked step
    ratio = report.documents_per_step / documents
    if ratio < 1.1:  # the learning rate would be at most 1.05 times as high
        return f"about {documents:,} documents per step, too: no setting has to change"
    independent_ratio = ratio
    independent_text = ""
    # The end of the line, which names a strategy with which no setting has to change; "" if there is none
    alternative = report.rank_section.alternative_text
    # `independent_documents` returns None if all documents of a step are independent, else their number per step, the
    # beginning of the line and its end
    independent = None if report.prefixes is None else report.prefixes.independent_documents(documents)
    if independent is not None:
        per_step, independent_text, alternative = independent
        independent_ratio = per_step / documents
    rate = f"learning_rate x {independent_ratio**0.5:.1f}" if independent_ratio > 1.1 else "keep learning_rate"
    # An epoch has fewer steps, so settings that count steps (such as `warmup_steps`) are divided
    return f"{independent_text}{rate}, settings in steps / {ratio:.1f}{alternative}"


def _cuts_lines(report: PackingNumbers) -> Lines:
    """Yield the lines on documents that are cut, dropped or not reached."""
    ledger = report.ledger  # counts of documents and tokens by what was done with them
    truncated = ledger.truncated
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
    """Yield the lines on the model, its attention and the proof that documents are isolated."""
    if report.experimental:
        yield "experimental", f"{', '.join(report.experimental)}: several GPUs have not run this yet"
    # The probe tests the model of this run before training. The sweep is the package's own test of all model types,
    # which ran with older libraries
    if report.newer_libraries:
        yield "not tested with", f"{', '.join(report.newer_libraries)}: the probe runs, the sweep has not"
    yield "attention", report.attention
    if report.compiled is not None:
        yield "torch_compile", report.compiled
    if report.memory is not None:
        yield "memory", report.memory
    if report.isolation is not None:
        isolation = report.isolation  # result of the test that documents of a pack do not change each other
        if isolation.repaired:  # modules that now get one document per row
            repairs = "; ".join(str(repair) for repair in isolation.repaired)
            yield "repaired", f"{repairs}: these modules see each document separately, with some padding"
        if isolation.passed:
            result = "passed"
        elif isolation.error is not None:
            result = "NOT POSSIBLE"
        else:  # documents are isolated, but a gradient or another value is wrong; or a document changes another one
            result = "WRONG" if isolation.isolated else "LEAK"
        text = f"{result}: {isolation.summary()}"
        # `unreachable`: settings of the model, such as its window, with an effect only in longer documents
        if isolation.passed and isolation.unreachable:
            text += f"; not tested, because beyond max_length: {', '.join(isolation.unreachable)}"
        yield "isolation", text
    if report.first_step is not None:  # text on the comparison of the first step with unpacked documents
        yield "first step", report.first_step


LINES = (_documents_lines, _packs_lines, _cuts_lines, _model_lines)
