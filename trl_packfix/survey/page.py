"""docs/compatibility.md and its CSV: what packing does on every model type, as a sweep found it."""

import csv
import datetime
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

from .sweep import VERDICTS, Row, Task

PAGE, TABLE = "compatibility.md", "compatibility.csv"
MEANING = {
    "native": "the model's own attention keeps documents apart on our batches, and so does ours, on which it trains",
    "varlen": "its own attention does not; our varlen attention does",
    "repaired": "modules that let documents cross see each document by itself",
    "unpack only": "right with documents as rows of padded batches",
    "refused": "training stops with the reason",
    "no text": "cannot be built here, or takes no text alone",
}
GPU = "not measured"  # the sweep judges in fp32, which no flash kernel takes


def line(row: Row) -> str:
    """A row as one line of plain text."""
    truth = f"SILENT LEAK x{row.false_negatives}" if row.false_negatives else ""
    alarm = f"false alarm x{row.false_positives}" if row.false_positives else ""
    marks = ", ".join(mark for mark in (truth, alarm) if mark)
    error = "" if row.verdict == "no text" else f"{row.error:.1e}"
    stock = row.stock_trl or "-"
    why = row.reason if row.verdict == "refused" else row.repairs or row.reason
    return f"{row.model_type:<26} {row.kind:<10} {row.verdict:<11} {error:<8} TRL {stock:<9} {marks} {why}"


def summary(rows: Sequence[Row]) -> str:
    """Counts, as lines of plain text."""
    lines = []
    for kind, name in (("causal", "causal-LM types"), ("image-text", "image-text types, on text alone")):
        group = [row for row in rows if row.kind == kind]
        if not group:
            continue
        verdicts = Counter(row.verdict for row in group)
        stock = Counter(row.stock_trl for row in group if row.stock_trl)
        trained = sum(row.is_right for row in group)
        lines += [
            f"{len(group)} {name}: {trained} train packed as each document alone; "
            + ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS),
            f"stock TRL: {stock['isolated']} isolated, {stock['leaks']} leak, {stock['refuses']} refuse",
            f"probes: {sum(row.probes for row in group)}, of which {sum(row.false_negatives for row in group)} missed "
            f"what the judge saw, and {sum(row.false_positives for row in group)} saw what it did not",
        ]
    return "\n".join(lines)


def write(rows: Sequence[Row], folder: str | Path) -> None:
    """Write the page and the CSV beside it into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(rows, key=lambda row: (row.kind, row.model_type))
    with (folder / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {**asdict(row), "error": f"{row.error:.2e}", "stock_error": f"{row.stock_error:.2e}"} for row in rows
        )
    (folder / PAGE).write_text(_page(rows))


def read(folder: str | Path) -> list[Row]:
    """The rows of the CSV in `folder`."""
    numbers = {"error": float, "stock_error": float, "probes": int, "false_negatives": int, "false_positives": int}
    with (Path(folder) / TABLE).open(newline="") as file:
        return [
            Row(**{key: numbers.get(key, str)(value) for key, value in row.items()}) for row in csv.DictReader(file)
        ]


def replaced(folder: str | Path, rows: Sequence[Row]) -> list[Row]:
    """The rows of the CSV in `folder`, with `rows` in the place of those of the same type and kind."""
    new = {(row.model_type, row.kind) for row in rows}
    return [row for row in read(folder) if (row.model_type, row.kind) not in new] + list(rows)


def only(tasks: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Those of `tasks` with one of these model types; ValueError for a type that is not there."""
    known = {model_type for model_type, _ in tasks}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"`--only {','.join(names)}` was given. The installed transformers has no causal or image-text model type "
            f"{unknown[0]!r}. Give types as in their config.json, e.g. llama."
        )
    return [task for task in tasks if task[0] in names]


def sample(rows: Sequence[Row], size: int) -> list[Row]:
    """About `size` rows, of every kind and verdict some, evenly spread over the alphabet; the same every time."""
    strata = defaultdict(list)
    for row in rows:
        if row.verdict != "no text":
            strata[row.kind, row.verdict].append(row)
    total = sum(map(len, strata.values()))
    chosen = []
    for stratum in strata.values():
        count = min(len(stratum), max(2, round(size * len(stratum) / total)))
        chosen += [stratum[i * len(stratum) // count] for i in range(count)]
    return chosen


def _page(rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl", "torch"))
    lines = [
        "# Compatibility",
        "",
        f"Made by `trl-packfix check --all --output docs` on {datetime.date.today()}, with {versions}, on the CPU of a "
        f"{platform.machine()} machine. The numbers are in [{TABLE}]({TABLE}).",
        "",
        "Every type is a tiny random model. An independent judge compares training on packs with training on each "
        "document alone: logits and every gradient, to 1e-4 relative in fp32 or 1e-9 in fp64, on documents that the "
        "probe and the repair have not seen (one of a single token, as many tokens as hidden units, all of equal "
        "length, 64 short ones).",
        "",
        *[f"- {text}" for text in summary(rows).splitlines()],
        "",
        "| verdict | meaning |",
        "|---|---|",
        *[f"| {verdict} | {MEANING[verdict]} |" for verdict in VERDICTS],
    ]
    for kind, title in (("causal", "Causal language models"), ("image-text", "Image-text models, on text alone")):
        group = [row for row in rows if row.kind == kind]
        if group:
            lines += [
                "",
                f"## {title}",
                "",
                "| type | CPU | error | attention | GPU | stock TRL | why |",
                "|" + "---|" * 7,
            ]
            lines += [_cells(row) for row in group]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> str:
    # of the digits that the table keeps, so that the page can be made of it again
    error = "" if row.verdict == "no text" else f"{float(f'{row.error:.2e}'):.0e}"
    why = "; ".join(text for text in (row.repairs, row.reason) if text).replace("|", "\\|")
    return f"| {row.model_type} | {row.verdict} | {error} | {row.attention} | {GPU} | {row.stock_trl} | {why} |"
