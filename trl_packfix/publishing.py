"""The report outside the terminal: numbers for loggers, a section of the model card."""

from pathlib import Path

from .report import PackingReport


def metrics(report: PackingReport) -> dict[str, float]:
    """The numbers for a logger, by the names they have there; what is not known is left out."""
    found = {
        "documents": report.num_documents,
        "packs": report.num_packs,
        "lower_bound": report.lower_bound,
        "efficiency": report.efficiency,
        "padding_efficiency": report.padding_efficiency,
        "documents_per_step": report.documents_per_step,
        "steps_per_epoch": None if report.num_rows is None else report.num_steps,
        "imbalance": report.imbalance,
        "lost_trained_share": report.lost_trained_share,
    }
    return {f"packing/{name}": value for name, value in found.items() if value is not None}


def add_to_card(card: Path, report: PackingReport) -> None:
    """Say in a model card that the model was trained on packs, how, and what was proved."""
    rows = "\n".join(f"| {label} | {text.replace('|', '/')} |" for label, text in report.lines())
    proof = (
        "" if report.isolation is None else ", which was tested on this model before its first step: see `isolation`"
    )
    section = (
        "## Packing\n\nTrained with trl_packfix on packs, several documents in one row, in which no document sees "
        f"another{proof}.\n\n| | |\n|---|---|\n{rows}\n\n"
    )
    before, mark, after = card.read_text(encoding="utf-8").partition("### Framework versions")
    card.write_text(f"{before}{section}{mark}{after}", encoding="utf-8")
