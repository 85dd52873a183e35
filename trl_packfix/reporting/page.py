"""Make the page of a finished run: what was trained, tokens that were lost, checks that passed, speed, and pictures.

Training saves `packing_report.json` and the log of the trainer, `trainer_state.json`. `trl-packfix report` reads them
(`read_run`) and writes a page of HTML (`make_page`), in one file that needs no network. `summarise` makes its first
table, which is also in the model card and on the terminal. No model and no dataset is read.

The pictures are drawn with matplotlib, and left out where it is not installed.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2  # a requirement of torch

from ..version import __version__
from .numbers import PackingNumbers
from .pictures import BLUE, RED, draw_costs, draw_lengths, new_figure, png_bytes, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE = "packing_report.json"
STATE_FILE = "trainer_state.json"
TEMPLATE = Path(__file__).with_name("page.html")
NO_PICTURES = "matplotlib is not installed, so nothing is drawn. Run `pip install matplotlib` and this command again."

Log = Sequence[Mapping[str, Any]]
"""The entries of a trainer's log, in order: the `log_history` of transformers."""


class SavedRun(NamedTuple):
    """What training saved about a run, and the files that hold it."""

    numbers: PackingNumbers
    lines: Sequence[tuple[str, str]]  # (label, text) of each line of the report
    log: Log
    files: list[Path]


def read_run(folder: Path) -> SavedRun:
    """Read the report and the log of a run from its `output_dir`, or from one of its checkpoints; both have a report.

    While a run trains, and if it was interrupted, only its checkpoints have a log. Then the newest one is read.

    Raises:
        ValueError: there is no report, or a file cannot be read.
    """
    report_file = folder / REPORT_FILE
    if not report_file.is_file():
        raise ValueError(
            f"`{folder}` was given, and it has no `{REPORT_FILE}`. Training writes it into `output_dir`, with packing "
            "and unless `packing_report=False`. Give the `output_dir` of a run on packs."
        )
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    # The log in `folder` itself comes last, and is read if there is one
    state_files = [path / STATE_FILE for path in (*checkpoints, folder) if (path / STATE_FILE).is_file()]
    values = _read_json(report_file)
    if "lines" not in values:
        raise ValueError(
            f"`{report_file}` was given, which an earlier version of trl_packfix has written. It lacks the lines of "
            "the report. Train again, or read the file itself."
        )
    log = _read_json(state_files[-1])["log_history"] if state_files else []
    return SavedRun(PackingNumbers.from_saved(values), values["lines"], log, [report_file, *state_files[-1:]])


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file; ValueError if it is not whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"`{file}` was given. It is not whole: {error}. Often writing it was interrupted, or the disk was full. "
            "Give the folder of a checkpoint of the run."
        ) from error


def summarise(numbers: PackingNumbers, lines: Sequence[tuple[str, str]], log: Log) -> list[tuple[str, str]]:
    """Return the short form of a report as (label, text): what was trained, lost tokens, passed checks, and the speed.

    Args:
        numbers: the numbers of the report.
        lines: its lines, (label, text) of each.
        log: the log of the trainer; [] before training and where it was not saved.
    """
    texts = dict(lines)  # by label
    last_logged = {name: value for entry in log for name, value in entry.items()}
    rows = []
    if numbers.model is not None:
        rows.append(("model", numbers.model))
    packs = "" if numbers.num_packs is None else f" in {numbers.num_packs:,} packs"
    if numbers.efficiency is not None:  # None for a dataset that is read as a stream, before its first pack
        packs += f", {numbers.efficiency:.1%} full"
    data = f"{numbers.num_documents:,} documents, {numbers.num_tokens:,} tokens"
    rows.append(("data", f"{data} ({numbers.num_trained_tokens:,} trained){packs}"))
    if "step" in last_logged:
        losses = [entry["loss"] for entry in log if "loss" in entry]
        loss = f", loss {losses[0]:.3g} to {losses[-1]:.3g}" if losses else ""
        if "train_loss" in last_logged and not losses:
            loss = f", loss {last_logged['train_loss']:.3g} on average"
        if "eval_loss" in last_logged:
            loss += f", evaluation {last_logged['eval_loss']:.3g}"
        rows.append(
            ("trained", f"{last_logged['step']:,} optimizer steps, {last_logged.get('epoch', 0):.3g} epochs{loss}")
        )
    rows.append(("lost", _lost_text(numbers)))
    # Checks before training: that documents of a pack do not change each other, and that the first step on packs has
    # the loss and the gradients of the same step without packing
    rows += [(label, texts[label]) for label in ("isolation", "first step") if label in texts]
    speed = _speed_text(last_logged)
    if speed:
        rows.append(("speed", speed))
    return rows


def _lost_text(numbers: PackingNumbers) -> str:
    """Return how many tokens that the loss would count are cut, dropped or not reached, and of how many documents."""
    ledger = numbers.ledger  # counts of documents and tokens by what was done with them
    counts = {"truncated": ledger.truncated, "split": ledger.split}
    counts |= {f"dropped ({reason})": count for reason, count in ledger.dropped.items()}
    causes = [f"{count.documents:,} {name}" for name, count in counts.items() if count.documents]
    if numbers.documents_not_reached:
        causes.append(f"{numbers.documents_not_reached:,} not reached in an epoch")
    lost = "no trained token"
    if numbers.lost_trained_share:
        num_lost = ledger.lost_trained_tokens + numbers.trained_tokens_not_reached
        share = f"{numbers.lost_trained_share:.2%}"
        lost = f"{num_lost:,} of {ledger.given.trained_tokens:,} trained tokens ({share})"
    return f"{lost}; documents: {', '.join(causes)}" if causes else lost


def _speed_text(last_logged: Mapping[str, Any]) -> str:
    """Return how fast the run was, from the last values in its log; "" if nothing is logged."""
    formats = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "{:.1%} of the peak (MFU)",
        "data_wait": "{:.1%} of the time waiting for data",
        "train_runtime": "{:,.0f} s in all",
    }
    return ", ".join(text.format(last_logged[name]) for name, text in formats.items() if name in last_logged)


def make_page(saved: SavedRun, title: str) -> str:
    """Return the page of a run as HTML."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    texts = dict(saved.lines)  # by label
    problems = [f"{label}: {texts[label]}" for label in ("warning", "experimental") if label in texts]
    isolation = texts.get("isolation", "")
    if isolation and not isolation.startswith("passed"):
        problems.append(f"isolation: {isolation}")
    if not saved.log:
        problems.append(f"There is no `{STATE_FILE}`, so the run has not ended, or has saved no checkpoint.")
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        problems=problems,
        summary=summarise(saved.numbers, saved.lines, saved.log),
        pictures=_draw_pictures(saved),
        no_pictures=NO_PICTURES,
        lines=saved.lines,
        version=__version__,
        files=", ".join(f"{file.parent.name}/{file.name}" for file in saved.files),
    )


# Pictures


def draws_pictures() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _draw_pictures(saved: SavedRun) -> list[dict[str, str]]:
    """Return the pictures of a run, each with its name, its caption and the PNG in base64; [] without matplotlib."""
    if not draws_pictures():
        return []
    numbers = saved.numbers
    losses = [entry for entry in saved.log if "loss" in entry or "eval_loss" in entry]
    panels: list[tuple[str, str, Callable[[Axes], None]]] = []  # (name, caption, function that draws the picture)
    if losses:
        draw = partial(_draw_loss, entries=losses)
        panels.append(("loss", "Loss by optimizer step, in nats per trained token", draw))
    if numbers.lengths is not None:
        draw = partial(draw_lengths, report=numbers, histogram=numbers.lengths)
        panels.append(("lengths", "Documents by length, before they are cut", draw))
    if numbers.sample is not None:
        # `fills` is a histogram from 0 to 1: the number of micro-batches in each bin of tokens / capacity
        draw = partial(_draw_fills, counts=numbers.sample.fills)
        panels.append(("fill", "Micro-batches of the first epoch by the share of their capacity that is filled", draw))
        draw = partial(draw_costs, report=numbers, sample=numbers.sample)
        panels.append(("waiting", "Modelled cost of the first micro-steps on each rank", draw))
    pictures = []
    for name, caption, draw_panel in panels:
        figure = new_figure(9, 3)
        axes = figure.subplots()
        draw_panel(axes)
        style_axes(axes)
        pictures.append({"name": name, "caption": caption, "data": base64.b64encode(png_bytes(figure)).decode()})
    return pictures


def _draw_loss(axes: "Axes", *, entries: Log) -> None:
    """Draw the loss of training as a line, and the losses of evaluations as points on a dashed line."""
    for name, style, label in (("loss", "-", "training"), ("eval_loss", "o--", "evaluation")):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            color = BLUE if name == "loss" else RED
            axes.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.legend(frameon=False)


def _draw_fills(axes: "Axes", *, counts: list[int]) -> None:
    """Draw a histogram of micro-batches by their fill. `counts` has one number for each bin, from empty to full."""
    width = 100 / len(counts)
    axes.bar([width * i for i in range(len(counts))], counts, width, align="edge", color=BLUE, edgecolor="white")
    axes.set(xlim=(0, 100), xlabel="% of the capacity", ylabel="micro-batches")
