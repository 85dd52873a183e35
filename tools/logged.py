"""Write docs/logging.md: every key of the log with its unit, from the code (`python tools/logged.py`)."""

from pathlib import Path

from trl_packfix.features.pack_forward import trainers
from trl_packfix.reporting.columns import COLUMNS
from trl_packfix.training import callbacks, evaluation, totals

PAGE = Path(__file__).parents[1] / "docs" / "logging.md"
Keys = dict[str, tuple[str, str]]  # unit, and what it is
REPORT: Keys = {
    f"packing/{column.metric}": (column.unit, column.meaning or column.legend) for column in COLUMNS if column.metric
}
PARTS: dict[str, Keys] = {
    "In each log of a training": totals.LOGGED,
    "In each log of an evaluation": evaluation.LOGGED,
    "Once, before the first step: the report": REPORT,
    "Once, before the first step: the proof": callbacks.LOGGED,
    "In each log with `pack_forward`": trainers.LOGGED,
}
BEGIN = """\
# What is logged

To the console, to every logger (`report_to`) and to `log_history` in `trainer_state.json`, beside what transformers
logs. Values of a training are since its last log; in its last line, which `train()` returns as `metrics`, they are of
all steps since it began or was resumed. A key without a value is not logged. `loss` is the mean over the trained tokens
of each optimizer step. A key that is renamed works under both names for one minor version.
"""


def page() -> str:
    """The page as text."""
    parts = [BEGIN]
    for title, keys in PARTS.items():
        rows = "".join(f"- `{key}` ({unit}): {meaning}\n" for key, (unit, meaning) in keys.items())
        parts.append(f"## {title}\n\n{rows}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
