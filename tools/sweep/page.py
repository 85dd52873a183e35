"""Write and read docs/compatibility.md and its CSV: the results of a sweep over all model types."""

import csv
import datetime
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .model_types import NOT_TESTED, VERDICTS, WRONG, Row

PAGE = "compatibility.md"
TABLE = "compatibility.csv"
MEANING = {
    "native": "with the model's own attention, and with `packfix_varlen` if supported",
    "varlen": "with `packfix_varlen`, but not with the model's own attention",
    "repaired": "modules in which documents change each other run on each document separately",
    "unpack only": "documents run as rows of padded batches",
    "refused": "training stops with an error that gives the reason",
    "no text": "the model cannot be built here, or does not accept text alone",
    NOT_TESTED: "with images only: this type has no tiny processor here",
}
FIRST = {  # what people train first
    "llama": "Llama 3",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi-4",
    "smollm3": "SmolLM3",
    "olmo3": "OLMo 3",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe": "GLM-4.5",
    "gpt_oss": "gpt-oss",
    "lfm2": "LFM2",
    "falcon": "Falcon",
    "opt": "OPT",
    "jamba": "Jamba",
}
SHOWN = ("model_type", "kind", "stock_trl", "verdict", "with_kernels", "given", "error", "attention", "shared")
SHOWN += ("prefixes", "images", "images_error", "images_stock", "repairs", "reason", "images_reason")
CHOICES = ("kind", "verdict", "stock_trl")  # columns with a list of values to choose from
FLOATS = ("error", "given", "stock_error", "prefix_error", "images_error", "images_stock_error")


def line(row: Row) -> str:
    """Return a row as one line of plain text."""
    truth = f"SILENT LEAK x{row.false_negatives}" if row.false_negatives else ""
    truth += " SHARED PREFIXES WRONG" if row.prefixes == WRONG else ""
    alarm = f"false alarm x{row.false_positives}" if row.false_positives else ""
    marks = ", ".join(mark for mark in (truth, alarm) if mark)
    error = "" if row.verdict == "no text" else f"{row.error:.1e}"
    stock = row.stock_trl or "-"
    why = row.reason if row.verdict == "refused" else row.repairs or row.reason
    images = f" | with images: {row.images}, stock {row.images_stock or '-'} {row.images_reason}" if row.images else ""
    return f"{row.model_type:<26} {row.kind:<10} {row.verdict:<11} {error:<8} TRL {stock:<9} {marks} {why}{images}"


def summary(rows: Sequence[Row]) -> str:
    """Return counts, as lines of plain text."""
    lines = []
    for kind, name in (("causal", "causal-LM types"), ("image-text", "image-text types, on text alone")):
        group = [row for row in rows if row.kind == kind]
        if not group:
            continue
        verdicts = Counter(row.verdict for row in group)
        stock = Counter(row.stock_trl for row in group if row.stock_trl)
        trained = sum(row.is_right for row in group)
        lines += [
            f"{len(group)} {name}: {trained} train packed as unpacked; " + _counts(verdicts, VERDICTS),
            f"stock TRL: {stock['isolated']} isolated, {stock['leaks']} leak, {stock['refuses']} refuse",
            f"{sum(row.probes for row in group)} probes: {sum(row.false_negatives for row in group)} silent leaks, "
            f"{sum(row.false_positives for row in group)} false alarms",
        ]
        tested = [row for row in group if row.images and row.images != NOT_TESTED]
        if tested:
            verdicts = Counter(row.images for row in tested)
            trained = sum(row.is_right_with_images for row in tested)
            lines += [
                f"with images, {len(tested)} of them: {trained} train packed as unpacked; "
                + _counts(verdicts, VERDICTS[:5]),
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
        writer.writerows(asdict(row) | {name: _number(getattr(row, name)) for name in FLOATS} for row in rows)
    (folder / PAGE).write_text(_page(rows))


def read(folder: str | Path) -> list[Row]:
    """Return the rows of the CSV in `folder`."""
    numbers: dict[str, Any] = dict.fromkeys(FLOATS, lambda text: float(text) if text else None)
    numbers |= dict.fromkeys(("probes", "false_negatives", "false_positives"), int)
    with (Path(folder) / TABLE).open(newline="") as file:
        return [
            Row(**{key: numbers.get(key, str)(value) for key, value in row.items()}) for row in csv.DictReader(file)
        ]


def kept(folder: str | Path, rows: Sequence[Row]) -> list[Row]:
    """Return `rows` with the columns that other commands fill, as they are in the CSV in `folder`, if there is one."""
    before = {(row.model_type, row.kind): row for row in read(folder)} if (Path(folder) / TABLE).exists() else {}
    found = []
    for row in rows:
        old = before.get((row.model_type, row.kind), row)
        found.append(replace(row, shared=old.shared, with_kernels=old.with_kernels))
    return found


def filled(rows: Sequence[Row], column: str, values: Mapping[str, str]) -> list[Row]:
    """Return `rows` with these values, by type, in a column of the causal types; types without a value keep theirs."""
    return [
        replace(row, **{column: values[row.model_type]}) if row.kind == "causal" and row.model_type in values else row
        for row in rows
    ]


def replaced(folder: str | Path, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the CSV in `folder`, with those of the same type and kind replaced by `rows`."""
    new = {(row.model_type, row.kind) for row in rows}
    return [row for row in read(folder) if (row.model_type, row.kind) not in new] + list(rows)


def sample(rows: Sequence[Row], size: int) -> list[Row]:
    """Return about `size` rows with some of every kind and verdict, evenly spread over the alphabet; deterministic."""
    strata = defaultdict(list)
    for row in rows:
        if row.verdict != "no text":
            strata[row.kind, row.verdict].append(row)
    total = sum(map(len, strata.values()))
    chosen = []
    for stratum in strata.values():
        count = min(len(stratum), max(2, round(size * len(stratum) / total)))
        chosen += [stratum[(2 * i + 1) * len(stratum) // (2 * count)] for i in range(count)]
    return chosen


def _page(rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl", "torch"))
    causal = {row.model_type: row for row in rows if row.kind == "causal"}
    leaking = sorted(name for name, row in causal.items() if row.stock_trl == "leaks")
    first = defaultdict(list)
    for name, model in FIRST.items():
        if name in causal:
            first[causal[name].stock_trl, causal[name].verdict].append(f"{model} ({name})")
    lines = [
        "# Does my model leak?",
        "",
        f"In packs of stock TRL, documents change each other on {len(leaking)} of {len(causal)} causal types, without "
        "a warning. The types that are trained most:",
        "",
        "| stock TRL | here | models (`model_type`) |",
        "|---|---|---|",
        *[f"| {stock} | {verdict} | {', '.join(models)} |" for (stock, verdict), models in first.items()],
        "",
        "*refuses*: the forward raises on a CPU, without the packages of its kernels ([hybrid models](hybrids.md)).",
        "",
        f"The {len(leaking)} that leak: {', '.join(leaking)}. [Since when](leaks_by_release.md).",
        "",
        "Yours, with its weights:",
        "",
        "```bash",
        "trl-packfix check Qwen/Qwen3-0.6B",
        "```",
        "",
        "| here | documents are isolated |",
        "|---|---|",
        *[f"| {verdict} | {meaning} |" for verdict, meaning in MEANING.items()],
        "",
        "## How it was tested",
        "",
        "Logits and every gradient of a tiny random model on packs are compared with those of unpacked TRL (`given`, "
        "which decides), and of each document alone (`error`), to 1e-4 in fp32 and 1e-9 in fp64. Generated by "
        f"`make sweep` on {datetime.date.today()}, with {versions}, on the CPU of a {platform.machine()} machine.",
        "",
        *[f"- {text}" for text in summary(rows).splitlines()],
        f"- `tokens_per_rank`: {Counter(row.shared for row in rows)['yes']} causal types can be shared by two ranks "
        "(`python benchmarks/sequence_parallel.py --types --page docs`)",
        f"- `share_prefixes`: {Counter(row.prefixes for row in rows)['yes']} types",
        "",
        "## Every type",
        "",
        f"From [{TABLE}]({TABLE}). Columns that begin with `images` are on packs with images, `stock` is TRL alone, "
        "and `with_kernels` is with the kernels of [hybrid models](hybrids.md).",
        "",
        f'<div data-table="../{TABLE}" data-columns="{",".join(SHOWN)}" data-choices="{",".join(CHOICES)}" '
        'data-example="e.g. qwen3 leaks"></div>',
    ]
    return "\n".join(lines) + "\n"


def _counts(verdicts: Mapping[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{verdicts[name]} {name}" for name in names if verdicts[name])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
