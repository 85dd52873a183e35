"""The lines of a report, in order: label and text of each.

A part of the report that may be absent (images, turns, ...) has a method `line`. What needs several parts is here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..planning.strategies import STRATEGIES
from .savings import PrefixSavings

if TYPE_CHECKING:
    from .report import PackingReport

WORTH_SHARING = 0.95  # share of the tokens; the report names a setting that would compute less
Lines = Iterator[tuple[str, str]]  # label and text


def lines_of(report: "PackingReport") -> list[tuple[str, str]]:
    return [line for part in LINES for line in part(report)]


def _documents(report: "PackingReport") -> Lines:
    if report.turns is not None:
        yield "conversations", report.turns.line()
    text = "a stream of unknown length; packed in arrival order, read again from its start at its end"
    if report.num_rows is not None:
        packs = "" if report.num_packs is None else f" -> {report.num_packs:,} packs ({report.strategy})"
        text = f"{report.num_documents:,} of {report.num_rows:,} rows, {report.num_tokens:,} tokens{packs}"
    yield "documents", text
    if report.trained is not None:
        yield "trained tokens", report.trained.line(report.num_trained_tokens, report.num_tokens)
    if report.images is not None:
        yield "images", report.images.line()
    if report.lengths is not None:
        yield "lengths", report.lengths.line()


def _packs(report: "PackingReport") -> Lines:
    size = f"{report.capacity:,} tokens (batch size {report.batch_size} x max_length {report.max_length:,})"
    if report.shared is not None:
        size = (
            f"{report.shared.tokens_per_rank:,} tokens at most on each rank (tokens_per_rank); a document of "
            f"max_length {report.max_length:,} needs {report.shared.smallest_degree} ranks"
        )
    if report.num_rows is None:
        yield "micro-batch", size
        degree = 1 if report.shared is None else report.shared.smallest_degree
        yield (
            "steps",
            f"{report.num_steps:,} (max_steps), packs in each: {report.accumulation * report.world_size // degree} "
            f"(accumulation {report.accumulation}, ranks {report.world_size})",
        )
        if report.num_packs:
            if report.shared is not None:
                yield "sequence parallelism", report.shared.line()
            read = report.ledger.given
            yield "read", f"{read.documents:,} documents, {read.tokens:,} tokens ({read.trained_tokens:,} trained)"
            tokens = f"{report.num_tokens:,} tokens ({report.num_trained_tokens:,} trained)"
            yield "trained", f"{report.num_documents:,} documents, {tokens} in {report.num_packs:,} packs"
            yield "efficiency", f"{report.efficiency:.2%} of the packs filled"
        return
    filled = "no padding" if report.num_packs is None else f"{report.efficiency:.2%} filled"
    yield "micro-batch", f"{size}, {filled}; unpacked: {report.padding_efficiency:.2%}"
    documents = report.unpacked_documents
    yield (
        "steps",
        f"{report.num_steps:,} of about {report.documents_per_step:,.1f} documents (accumulation "
        f"{report.accumulation}, ranks {report.world_size}); unpacked: {-(-report.num_documents // documents):,} of "
        f"{documents:,}",
    )
    if (text := prefixes_text(report)) is not None:
        yield "common prefixes", text
    yield "against unpacked", _unpacked_text(report)
    if report.unpacked_loss != 1:
        yield (
            "unpacked loss",
            f"{report.unpacked_loss:.3f} of the packed one, and its gradients: TRL also divides by first labels",
        )
    if report.shared is not None:
        yield "sequence parallelism", report.shared.line()
        exchange = f"{report.shared.exchange_share:.1%} of it in the exchange"
        yield "modelled time", f"{exchange}, imbalance {report.imbalance:.3f}"
    elif report.world_size > 1:
        text, images = f"{report.imbalance:.3f} modelled (1 is perfect)", report.images
        if images is not None and images.tower_imbalance is not None:
            text += f"; of the language model alone {images.language_imbalance:.3f}"
            text += f", of the vision tower alone {images.tower_imbalance:.3f}"
        yield "imbalance", text


def _cuts(report: "PackingReport") -> Lines:
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


def _model(report: "PackingReport") -> Lines:
    if report.experimental:
        yield "experimental", f"{', '.join(report.experimental)}: several GPUs have not run this yet"
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


LINES = (_documents, _packs, _cuts, _model)


def prefixes_text(report: "PackingReport") -> str | None:
    """What common prefixes save, and how many independent families a step has; None if nothing is worth a line."""
    prefixes = report.prefixes
    if prefixes is None:
        return None
    if prefixes.refused is not None:
        return f"not shared: {prefixes.refused}"
    sample = "" if prefixes.num_packs is None else f" (estimated from {prefixes.num_packs} packs)"
    if prefixes.images is not None:
        return f"{prefixes.rows:.2f} of the tokens and {prefixes.images:.2f} of the images are computed{sample}"
    if prefixes.rows is None:
        return "computed once in each pack; the log's computed_share is the share of the tokens that is computed"
    documents = prefixes.num_documents or report.num_documents
    families = f"{documents:,} documents in {prefixes.num_families:,} families"
    if prefixes.setting == "family":
        return _families_text(report, prefixes, families)
    in_families = ""
    if prefixes.in_families is not None and prefixes.in_families < WORTH_SHARING:
        neighbours = "" if prefixes.num_documents is None else ", neighbours in the table, as an estimate"
        in_families = f'"family" {prefixes.in_families:.2f} ({families}{neighbours})'
    if prefixes.setting == "pack":
        text = f"{prefixes.rows:.2f} of the tokens are computed{sample}"
        return text + (f"; with share_prefixes={in_families}" if in_families else "")
    assert prefixes.in_packs is not None
    would = [f'"pack" {prefixes.in_packs:.2f} of the tokens{sample}'] if prefixes.in_packs < WORTH_SHARING else []
    would += [in_families] if in_families else []
    return f"not shared; share_prefixes would compute: {', '.join(would)}" if would else None


def _families_text(report: "PackingReport", prefixes: PrefixSavings, families: str) -> str:
    assert prefixes.families_per_step is not None
    text = (
        f"{prefixes.rows:.2f} of the tokens are computed, {families}; an optimizer step has about "
        f"{prefixes.families_per_step:,.1f} of them"
    )
    wanted = report.unpacked_documents
    if prefixes.families_per_step < wanted:
        settings = "gradient_accumulation_steps"
        settings += " or per_device_train_batch_size" if report.shared is None else ""
        text += (
            f", and unpacked {wanted:,} documents: for as many independent ones, raise {settings} "
            f"{wanted / prefixes.families_per_step:.1f} times"
        )
    return text


def _unpacked_text(report: "PackingReport") -> str:
    """What to set instead of the unpacked run's. The learning rate is scaled by the square root, for Adam."""
    if STRATEGIES[report.strategy].keeps_steps:
        same = "the same steps" if report.unpacked_loss == 1 else "the same steps but for the loss"
        return f"{same}: no setting has to change"
    assert report.documents_per_step is not None  # it is known for a table
    documents = report.unpacked_documents
    ratio = report.documents_per_step / documents
    if ratio < 1.1:  # a learning rate 1.05 times as high
        return f"about {documents:,} documents per step, too: no setting has to change"
    prefixes, independent, families, instead = report.prefixes, ratio, "", ""
    if prefixes is not None and prefixes.families_per_step is not None:
        independent = prefixes.families_per_step / documents
        families = f"{prefixes.families_per_step:,.1f} families per step (unpacked: {documents:,} documents): "
        instead = '; or share_prefixes="pack"'
    elif report.shared is None:  # `minibatch` plans by documents, so ranks cannot share its packs
        instead = '; or packing_strategy="minibatch"'
    rate = f"learning_rate x {independent**0.5:.1f}" if independent > 1.1 else "keep learning_rate"
    return f"{families}{rate}, settings in steps / {ratio:.1f}{instead}"
