"""Draw a plan with matplotlib: packs as strips, the mask of one pack, the lengths, the cost of each rank.

No information is in the colour alone: documents are numbered, trained tokens are drawn taller, empty and waiting parts
are hatched. The hues are Okabe and Ito's, which colour-blind readers can distinguish
(https://jfly.uni-koeln.de/color/). Documents do not have their sky blue: it is near to the pale blue of untrained
tokens.
"""

import io
import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .packs import ShownPack
from .sections import LengthHistogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .report import PackingReport, PlanSample

BLUE = "#0072B2"
SKY = "#56B4E9"
RED = "#D55E00"
HUES = (BLUE, "#E69F00", "#009E73", "#CC79A7", RED)  # of documents
INK = "#222222"
QUIET = "#8c8c8c"
DPI = 110
EMPTY: dict[str, Any] = {"facecolor": "none", "edgecolor": QUIET, "linewidth": 0}
BOX: dict[str, Any] = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
THOUSANDS = "{x:,.0f}"  # of ticks
PALE = 0.30  # opacity of untrained tokens
MIN_LABELLED = 1 / 45  # of the capacity: narrower documents get no number, no line before them
MIN_BOUNDED = 1 / 250
BLOCKS_IN_MASK = 6  # preferred number of visible blocks: fewer show little, more cannot be distinguished


def plot_report(report: "PackingReport", path: str | Path | None = None) -> "Figure":
    """Four panels about one plan, saved to `path` if one is given, in the format of its suffix."""
    if report.sample is None or report.lengths is None:
        raise ValueError(
            f"The report of a run with strategy {report.strategy!r} was given without its first packs. The packs of a "
            "stream are not known in advance, and a saved report does not hold them. Plot `trainer.packing_report` of "
            "a dataset that is not a stream, or use `trl-packfix show --plot`."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window opens, and the caller's global state does not change.
    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    (strips, mask), (lengths, costs) = figure.subplots(2, 2, width_ratios=(2.1, 1), height_ratios=(1.25, 1))
    _draw_strips(strips, report, report.sample)
    _draw_mask(mask, report.sample)
    _draw_lengths(lengths, report, report.lengths)
    _draw_costs(costs, report, report.sample)
    for axes in (strips, mask, lengths, costs):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    if path is not None:
        figure.savefig(path, dpi=DPI, facecolor="white")
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]  # notebooks show it, without pyplot
    return figure


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png", facecolor="white")
    return file.getvalue()


def _write_number(axes: "Axes", x: float, y: float, *, document: int) -> None:
    axes.text(x, y, str(document), ha="center", va="center", fontsize=7.5, color=INK, bbox=BOX)


def _draw_strips(axes: "Axes", report: "PackingReport", sample: "PlanSample") -> None:
    from matplotlib.patches import Patch

    widest = max(pack.capacity for pack in sample.packs)
    for y, pack in enumerate(sample.packs):
        start = 0
        for number, document in enumerate(pack.documents):
            length = document.num_rows
            hue = HUES[number % len(HUES)]
            axes.broken_barh([(start, length)], (y - 0.2, 0.4), facecolor=hue, alpha=PALE, linewidth=0)
            spans = [(start + first, end - first) for trained, first, end in document.own_spans if trained]
            axes.broken_barh(spans, (y - 0.4, 0.8), facecolor=hue, linewidth=0)
            if length > MIN_BOUNDED * widest:
                axes.vlines(start, y - 0.4, y + 0.4, color=INK, linewidth=0.6)
            if length > MIN_LABELLED * widest:
                _write_number(axes, start + length / 2, y, document=number)
            start += length
        axes.vlines(start, y - 0.4, y + 0.4, color=INK, linewidth=0.6)
        rest = [(start, pack.capacity - start)]
        axes.broken_barh(rest, (y - 0.4, 0.8), hatch="////", **EMPTY)
        for held in pack.ranks():
            first, end = held["tokens"]
            axes.vlines(end, y - 0.48, y + 0.48, color=INK, linewidth=1.8)
            if end - first > 2 * MIN_LABELLED * widest:
                rank = f"rank {held['rank']}"
                axes.text((first + end) / 2, y + 0.5, rank, ha="center", va="center", fontsize=6, color=INK)
    tokens = report.groups.axis_label(report)
    if any(pack.cu_seq_lens_k for pack in sample.packs):
        tokens = f"computed tokens (capacity {report.capacity:,}); what documents share is drawn once"
    axes.set(xlim=(0, widest * 1.002), ylim=(len(sample.packs) - 0.4, -1.15), xlabel=tokens)
    axes.set_yticks(range(len(sample.packs)), [pack.place for pack in sample.packs])
    if report.accumulation > 1:
        axes.set_ylabel("step.micro-batch")
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.set_title(_packs_title(report), loc="left", fontsize=11)
    keys = [
        Patch(facecolor=INK, label="trained (tall)"),
        Patch(facecolor=INK, alpha=PALE, label="not trained (low)"),
        Patch(hatch="////", label="empty", **EMPTY),
    ]
    axes.legend(handles=keys, loc="upper left", ncols=3, fontsize=8, frameon=False, borderaxespad=0, handlelength=1.6)


def _packs_title(report: "PackingReport") -> str:
    if report.num_packs is None:
        return f"{report.num_documents:,} documents in {report.num_steps:,} steps ({report.strategy})"
    padded = f"; padded batches: {report.padding_efficiency:.1%}" if report.batch_size > 1 else ""
    shared = "" if report.shared_prefixes is None else " without sharing"
    # The packs of the last step are divided between all of its micro-batches.
    num = report.num_steps * report.accumulation * report.world_size
    divided = ""
    if report.shared is None and num > report.num_packs:
        full = (report.num_tokens - report.tokens_not_reached) / (num * report.capacity)
        divided = f",\ndivided into {num:,} micro-batches, {full:.1%} full"
    return (
        f"{report.num_documents:,} documents in {report.num_packs:,} packs ({report.strategy}), "
        f"{report.efficiency:.1%} full{shared}{divided}{padded}"
    )


def _draw_mask(axes: "Axes", sample: "PlanSample") -> None:
    from matplotlib.patches import Polygon
    from matplotlib.ticker import MaxNLocator

    def blocks(pack: ShownPack) -> float:  # the number of equal documents with this total and this sum of squares
        lengths = np.array([document.num_tokens for document in pack.documents], dtype=float)
        return lengths.sum() ** 2 / (lengths**2).sum()

    pack = min(sample.packs, key=lambda pack: abs(np.log(blocks(pack) / BLOCKS_IN_MASK)))
    paths = row_paths(pack)
    starts = [path[-1][0] for path in paths]
    total = paths[-1][-1][1]
    for number, (*before, (start, end)) in enumerate(paths):
        hue = HUES[number % len(HUES)]
        for first, stop in before:
            block = [(first, start), (stop, start), (stop, end), (first, end)]
            axes.add_patch(Polygon(block, facecolor=hue, edgecolor=INK, linewidth=0.3, alpha=0.6))
        axes.add_patch(Polygon([(start, start), (start, end), (end, end)], facecolor=hue, edgecolor=INK, linewidth=0.6))
        axes.hlines(start, 0, start, color=QUIET, linewidth=0.6, linestyle=":")
        if end - start > total / 14:
            _write_number(axes, (end + 2 * start) / 3, (start + 2 * end) / 3, document=number)
    lengths = np.array([sum(end - first for first, end in path) for path in paths], dtype=float)
    shared = lengths - [document.num_rows for document in pack.documents]
    computed = (lengths * (lengths + 1) - shared * (shared + 1)).sum() / (total * (total + 1))
    labelled = [starts[0]]
    labelled += [s for before, s in itertools.pairwise(starts) if s - before > total / 18]
    axes.set(xlim=(0, total), ylim=(total, 0), xlabel="key (token seen)", ylabel="query, ticks: document starts")
    axes.set_yticks(labelled, [f"{start:,}" for start in labelled], fontsize=8)
    axes.set_aspect("equal", adjustable="box")
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.set_title(f"attention in {pack.place}:\n{computed:.0%} of the causal triangle", loc="left", fontsize=11)


def row_paths(pack: ShownPack) -> list[list[tuple[int, int]]]:
    """For each document the rows that it sees, as (first, one after the last) of stretches; the last are its own."""
    paths: list[list[tuple[int, int]]] = []
    start = 0
    for document in pack.documents:
        left = document.shared
        path = []
        for first, end in paths[-1] if left else ():
            if left > 0:
                path.append((first, min(end, first + left)))
                left -= end - first
        paths.append([*path, (start, start + document.num_rows)])
        start += document.num_rows
    return paths


def _draw_lengths(axes: "Axes", report: "PackingReport", histogram: LengthHistogram) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    edges = np.array(histogram.edges)
    counts = np.array(histogram.counts)
    first_over = report.max_length + 1
    if edges[0] < first_over < edges[-1] and first_over not in edges:  # drawn in two, both as high as the bin
        cut = int(np.searchsorted(edges, first_over))
        edges = np.insert(edges, cut, first_over)
        counts = np.insert(counts, cut, counts[cut - 1])
    over = edges[:-1] >= first_over
    style: dict[str, Any] = {"align": "edge", "alpha": 0.75, "edgecolor": "white", "linewidth": 0.5}
    for mask, hatch, color in ((~over, None, BLUE), (over, "xxx", RED)):
        axes.bar(edges[:-1][mask], counts[mask], np.diff(edges)[mask], color=color, hatch=hatch, **style)
    axes.axvline(report.max_length, color=INK, linewidth=1.4, linestyle="--")
    touched = report.num_cut - report.num_dropped
    note = f"max_length {report.max_length:,}\ncut or split: {touched:,}\ndropped: {report.num_dropped:,}"
    is_left = report.max_length > np.sqrt(edges[0] * edges[-1])
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    place |= {"xytext": (-6, 0), "ha": "right"} if is_left else {"xytext": (6, 0), "ha": "left"}
    axes.annotate(note, (report.max_length, 0.97), fontsize=8.5, bbox=BOX, **place)
    limits = (0.7, 6 * counts.max())  # with space for the note
    axes.set(xscale="log", yscale="log", ylim=limits, xlabel="length in tokens", ylabel="documents")
    for axis in (axes.xaxis, axes.yaxis):  # all ticks in one notation, and as many on a narrow axis as on a wide one
        low, high = axis.get_view_interval()
        decades = np.log10(high / low)
        wide = LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0))
        axis.set_major_locator(MaxNLocator(6, integer=True) if decades < 1 else wide)
        axis.set_major_formatter(THOUSANDS)
        axis.set_minor_formatter(NullFormatter())
    lengths = f"median {histogram.median:,}, longest {histogram.longest:,}"
    axes.set_title(f"lengths of {report.ledger.given.documents:,} documents: {lengths}", loc="left", fontsize=11)


def _draw_costs(axes: "Axes", report: "PackingReport", sample: "PlanSample") -> None:
    costs = np.array(sample.costs)
    costs = costs / costs.mean()
    steps, ranks = costs.shape
    width = 0.84 / ranks
    left = np.arange(steps)[:, None] - 0.42 + width * np.arange(ranks)
    line, hatch = (0.4, "////") if ranks <= 32 else (0, None)
    axes.bar(left.ravel(), costs.ravel(), width, align="edge", color=SKY, edgecolor="white", linewidth=line)
    longest = costs.max(axis=1, keepdims=True)
    waiting = (longest - costs).ravel()
    bottom = costs.ravel()
    axes.bar(left.ravel(), waiting, width, bottom=bottom, align="edge", hatch=hatch, **EMPTY)
    axes.hlines(longest.ravel(), left[:, 0], left[:, -1] + width, color=INK, linewidth=1.2)
    names = [f"{i // report.accumulation}.{i % report.accumulation}" for i in range(steps)]
    axes.set_xticks(range(steps), names if report.accumulation > 1 else [str(i) for i in range(steps)])
    axes.set(ylim=(0, float(longest.max()) * 1.12), ylabel="modelled cost (mean 1)")
    axes.set_xlabel("step.micro-batch" if report.accumulation > 1 else "step")
    title = "one rank: no waiting"
    if ranks > 1:
        title = f"{ranks:,} ranks; hatched: waiting\nimbalance of the epoch: {report.imbalance:.3f}"
    axes.set_title(title, loc="left", fontsize=11)
