"""Draw a plan with matplotlib: packs as strips, the attention mask of one pack, the lengths, the cost of each rank.

`PackingReport.plot` calls `plot_report`, and the page of a run (`page.py`) has two of the panels. The packs are the
ones that `packs.first_packs` has read. A *row* of a pack is the place of one token. With shared prefixes, documents
that begin alike compute the rows of their common beginning once, and these rows are drawn in the first of the
documents.

No information is in the colour alone: documents are numbered, trained tokens are drawn taller, and empty and waiting
areas are hatched. The hues are by Okabe and Ito, and colour-blind readers can distinguish them
(https://jfly.uni-koeln.de/color/). Their sky blue is not used for documents, because it is near to the pale blue of
untrained tokens.
"""

import io
import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .numbers import PackingNumbers, PlanSample
from .packs import ShownPack
from .sections import LengthHistogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
SKY = "#56B4E9"
RED = "#D55E00"
DOCUMENT_HUES = (BLUE, "#E69F00", "#009E73", "#CC79A7", RED)
INK = "#222222"
GREY = "#8c8c8c"
DPI = 110
EMPTY_STYLE: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "linewidth": 0}
TEXT_BOX: dict[str, Any] = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
TICK_FORMAT = "{x:,.0f}"
UNTRAINED_OPACITY = 0.30
MIN_NUMBERED_SHARE = 1 / 45  # documents with a smaller share of the widest pack get no number
MIN_BOUNDED_SHARE = 1 / 250  # documents with a smaller share get no line before them
NUM_MASK_BLOCKS = 6  # preferred number of visible blocks in the mask: few show little, many cannot be told apart


def plot_report(report: PackingNumbers, path: str | Path | None = None) -> "Figure":
    """Draw four panels about the plan of a report.

    Args:
        report: a report that has its first packs.
        path: file to which the figure is saved, in the format of its suffix; None saves nothing.

    Raises:
        ValueError: the report is of a stream, or was read from a file.
    """
    if report.sample is None or report.lengths is None:
        raise ValueError(
            f"The report of a run with strategy {report.strategy!r} was given without its first packs. The packs of a "
            "stream are not known in advance, and a saved report does not hold them. Plot `trainer.packing_report` of "
            "a dataset that is not a stream, or use `trl-packfix show --plot`."
        )
    figure = new_figure(12, 7.2)
    panels = figure.subplots(2, 2, width_ratios=(2.1, 1), height_ratios=(1.25, 1))
    _draw_strips(panels[0, 0], report, report.sample)
    _draw_mask(panels[0, 1], report.sample)
    draw_lengths(panels[1, 0], report, report.lengths)
    draw_costs(panels[1, 1], report, report.sample)
    for axes in panels.flat:
        style_axes(axes)
    if path is not None:
        figure.savefig(path, dpi=DPI, facecolor="white")
    figure._repr_png_ = partial(png_bytes, figure)  # type: ignore[attr-defined]  # so notebooks show the figure
    return figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches.

    It is made without pyplot, so no window opens, and the global state of the caller does not change.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: "Axes") -> None:
    """Remove the upper and the right border of a panel, and colour its ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def png_bytes(figure: "Figure") -> bytes:
    """Return the figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png", facecolor="white")
    return file.getvalue()


def _write_number(axes: "Axes", x: float, y: float, *, document: int) -> None:
    """Write the number of a document in a box."""
    axes.text(x, y, str(document), ha="center", va="center", fontsize=7.5, color=INK, bbox=TEXT_BOX)


def _draw_strips(axes: "Axes", report: PackingNumbers, sample: PlanSample) -> None:
    """Draw each pack as a horizontal strip of its documents, as wide as its rows."""
    from matplotlib.patches import Patch

    widest = max(pack.capacity for pack in sample.packs)
    for y, pack in enumerate(sample.packs):
        first_row = 0  # row of the pack with which the document begins
        for number, document in enumerate(pack.documents):
            length = document.num_rows
            hue = DOCUMENT_HUES[number % len(DOCUMENT_HUES)]
            axes.broken_barh([(first_row, length)], (y - 0.2, 0.4), facecolor=hue, alpha=UNTRAINED_OPACITY, linewidth=0)
            # `own_spans`: (whether trained, first row, row behind the last) of tokens that this document does not
            # share. A document of which only the last token is not shared has no row
            own_spans = document.own_spans if length else []
            spans = [(first_row + first, end - first) for trained, first, end in own_spans if trained]
            axes.broken_barh(spans, (y - 0.4, 0.8), facecolor=hue, linewidth=0)
            if length > MIN_BOUNDED_SHARE * widest:
                axes.vlines(first_row, y - 0.4, y + 0.4, color=INK, linewidth=0.6)
            if length > MIN_NUMBERED_SHARE * widest:
                _write_number(axes, first_row + length / 2, y, document=number)
            first_row += length
        axes.vlines(first_row, y - 0.4, y + 0.4, color=INK, linewidth=0.6)
        empty_span = (first_row, pack.capacity - first_row)
        axes.broken_barh([empty_span], (y - 0.4, 0.8), hatch="////", **EMPTY_STYLE)
        for rank_rows in pack.ranks():  # which rows of the pack each rank holds; [] if one rank has the pack alone
            first, end = rank_rows["tokens"]
            axes.vlines(end, y - 0.48, y + 0.48, color=INK, linewidth=1.8)
            if end - first > 2 * MIN_NUMBERED_SHARE * widest:
                label = f"rank {rank_rows['rank']}"
                axes.text((first + end) / 2, y + 0.5, label, ha="center", va="center", fontsize=6, color=INK)
    label = report.rank_section.axis_label()  # tokens, with the capacity of a pack or the tokens of each rank
    if any(pack.cu_seq_lens_k for pack in sample.packs):  # it is [] if no documents of the pack share rows
        label = f"computed tokens (capacity {report.capacity:,}); what documents share is drawn once"
    axes.set(xlim=(0, widest * 1.002), ylim=(len(sample.packs) - 0.4, -1.15), xlabel=label)
    axes.set_yticks(range(len(sample.packs)), [pack.place for pack in sample.packs])
    if report.accumulation > 1:
        axes.set_ylabel("step.micro-batch")
    axes.xaxis.set_major_formatter(TICK_FORMAT)
    axes.set_title(_packs_title(report), loc="left", fontsize=11)
    handles = [
        Patch(facecolor=INK, label="trained (tall)"),
        Patch(facecolor=INK, alpha=UNTRAINED_OPACITY, label="not trained (low)"),
        Patch(hatch="////", label="empty", **EMPTY_STYLE),
    ]
    axes.legend(
        handles=handles, loc="upper left", ncols=3, fontsize=8, frameon=False, borderaxespad=0, handlelength=1.6
    )


def _packs_title(report: PackingNumbers) -> str:
    """Return the title of the panel of packs."""
    if report.num_packs is None:  # the strategy packs each step by itself, so the packs of the epoch are not counted
        return f"{report.num_documents:,} documents in {report.num_steps:,} steps ({report.strategy})"
    # A batch of one document has no padding
    padded = f"; padded batches: {report.padding_efficiency:.1%}" if report.batch_size > 1 else ""
    shared = "" if report.shared_prefixes is None else " without sharing"
    # If a step has fewer packs than micro-batches, planning divides these packs, so that no micro-batch is empty. With
    # sequence parallelism (`report.shared`) the ranks of a group share a micro-batch, so the product below, which
    # counts it once for each of them, does not apply
    num_micro_batches = report.num_steps * report.accumulation * report.world_size
    divided = ""
    if report.shared is None and num_micro_batches > report.num_packs:
        # Some tokens are not reached because `dataloader_drop_last` leaves out the last micro-batches
        num_reached = report.num_tokens - report.tokens_not_reached
        fill = num_reached / (num_micro_batches * report.capacity)
        divided = f",\ndivided into {num_micro_batches:,} micro-batches, {fill:.1%} full"
    return (
        f"{report.num_documents:,} documents in {report.num_packs:,} packs ({report.strategy}), "
        f"{report.efficiency:.1%} full{shared}{divided}{padded}"
    )


def _draw_mask(axes: "Axes", sample: PlanSample) -> None:
    """Draw the attention mask of one pack: which rows (keys) each row (query) sees."""
    from matplotlib.patches import Polygon
    from matplotlib.ticker import MaxNLocator

    def num_visible_blocks(pack: ShownPack) -> float:
        """Return the number of equally long documents that together have as many tokens and fill as much of the mask.

        k documents of n tokens fill k n^2: (k n)^2 / (k n^2) = k.
        """
        lengths = np.array([document.num_tokens for document in pack.documents], dtype=float)
        return lengths.sum() ** 2 / (lengths**2).sum()

    pack = min(sample.packs, key=lambda pack: abs(np.log(num_visible_blocks(pack) / NUM_MASK_BLOCKS)))
    seen_ranges = ranges_of_seen_rows(pack)
    starts = [ranges[-1][0] for ranges in seen_ranges]  # the last range of a document is its own rows
    total = pack.cu_seq_lens[-1]  # rows of the pack
    for number, (*shared_rows, (own_start, own_end)) in enumerate(seen_ranges):
        hue = DOCUMENT_HUES[number % len(DOCUMENT_HUES)]
        for first, stop in shared_rows:
            block = [(first, own_start), (stop, own_start), (stop, own_end), (first, own_end)]
            axes.add_patch(Polygon(block, facecolor=hue, edgecolor=INK, linewidth=0.3, alpha=0.6))
        triangle = [(own_start, own_start), (own_start, own_end), (own_end, own_end)]
        axes.add_patch(Polygon(triangle, facecolor=hue, edgecolor=INK, linewidth=0.6))
        axes.hlines(own_start, 0, own_start, color=GREY, linewidth=0.6, linestyle=":")
        if own_end - own_start > total / 14:
            _write_number(axes, (own_end + 2 * own_start) / 3, (own_start + 2 * own_end) / 3, document=number)
    # Count the entries of the mask in which a query sees a key. Row i of a document, from 1, sees i rows, so its n rows
    # have n (n + 1) / 2 entries. If it shares its first s rows, their s (s + 1) / 2 entries are counted in an earlier
    # document. The causal triangle of T rows has T (T + 1) / 2 entries. The factor 1/2 cancels out.
    lengths = np.array([sum(end - first for first, end in ranges) for ranges in seen_ranges], dtype=float)
    shared = lengths - [document.num_rows for document in pack.documents]
    seen_share = (lengths * (lengths + 1) - shared * (shared + 1)).sum() / (total * (total + 1))
    # Ticks need some distance from the start of the document before.
    distant_starts = [later for earlier, later in itertools.pairwise(starts) if later - earlier > total / 18]
    ticks = [starts[0], *distant_starts]
    axes.set(xlim=(0, total), ylim=(total, 0), xlabel="key (token seen)", ylabel="query, ticks: document starts")
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.set_aspect("equal", adjustable="box")
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(TICK_FORMAT)
    axes.set_title(f"attention in {pack.place}:\n{seen_share:.0%} of the causal triangle", loc="left", fontsize=11)


def ranges_of_seen_rows(pack: ShownPack) -> list[list[tuple[int, int]]]:
    """Return for each document the rows of the pack that it sees, as ranges (first, one behind the last).

    A document sees the rows that it shares with the document before it, and then its own rows, which are the last
    range.
    """
    seen_ranges: list[list[tuple[int, int]]] = []
    first_row = 0
    for document in pack.documents:
        num_remaining = document.shared  # shared rows that are not in a range yet
        shared_ranges = []
        previous_ranges = seen_ranges[-1] if seen_ranges else []
        for first, end in previous_ranges:
            if num_remaining > 0:
                shared_ranges.append((first, min(end, first + num_remaining)))
                num_remaining -= end - first
        seen_ranges.append([*shared_ranges, (first_row, first_row + document.num_rows)])
        first_row += document.num_rows
    return seen_ranges


def draw_lengths(axes: "Axes", report: PackingNumbers, histogram: LengthHistogram) -> None:
    """Draw the histogram of lengths, and what `max_length` does to it."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    edges = np.array(histogram.edges)
    counts = np.array(histogram.counts)
    first_over = report.max_length + 1  # shortest length that is too long
    # A bin that `max_length` cuts is drawn as two bars, both as high as the bin.
    if edges[0] < first_over < edges[-1] and first_over not in edges:
        cut = int(np.searchsorted(edges, first_over))
        edges = np.insert(edges, cut, first_over)
        counts = np.insert(counts, cut, counts[cut - 1])
    is_too_long = edges[:-1] >= first_over
    style: dict[str, Any] = {"align": "edge", "alpha": 0.75, "edgecolor": "white", "linewidth": 0.5}
    for is_drawn, hatch, color in ((~is_too_long, None, BLUE), (is_too_long, "xxx", RED)):
        axes.bar(edges[:-1][is_drawn], counts[is_drawn], np.diff(edges)[is_drawn], color=color, hatch=hatch, **style)
    axes.axvline(report.max_length, color=INK, linewidth=1.4, linestyle="--")
    num_shortened = report.num_cut - report.num_dropped  # `num_cut` counts dropped documents, too
    note = f"max_length {report.max_length:,}\ncut or split: {num_shortened:,}\ndropped: {report.num_dropped:,}"
    # The note stands on the wider side of the line: to the left if the line is behind the middle of the log axis
    is_left = report.max_length > np.sqrt(edges[0] * edges[-1])
    side: dict[str, Any] = {"xytext": (-6, 0), "ha": "right"} if is_left else {"xytext": (6, 0), "ha": "left"}
    axes.annotate(
        note,
        (report.max_length, 0.97),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        bbox=TEXT_BOX,
        **side,
    )
    limits = (0.7, 6 * counts.max())  # with a bar for a single document, and with space for the note
    axes.set(xscale="log", yscale="log", ylim=limits, xlabel="length in tokens", ylabel="documents")
    # Both axes have ticks in one notation, and about as many on a narrow range as on a wide one.
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        decades = np.log10(high / low)
        log_locator = LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0))
        axis.set_major_locator(MaxNLocator(6, integer=True) if decades < 1 else log_locator)
        axis.set_major_formatter(TICK_FORMAT)
        axis.set_minor_formatter(NullFormatter())
    lengths = f"median {histogram.median:,}, longest {histogram.longest:,}"
    axes.set_title(f"lengths of {report.ledger.given.documents:,} documents: {lengths}", loc="left", fontsize=11)


def draw_costs(axes: "Axes", report: PackingNumbers, sample: PlanSample) -> None:
    """Draw a bar of modelled cost for each micro-step and rank, and above it the time that the rank waits."""
    costs = np.array(sample.costs)  # modelled FLOPs, (micro-steps, ranks)
    costs = costs / costs.mean()
    num_micro_steps, num_ranks = costs.shape
    width = 0.84 / num_ranks
    left_edges = np.arange(num_micro_steps)[:, None] - 0.42 + width * np.arange(num_ranks)
    line_width, hatch = (0.4, "////") if num_ranks <= 32 else (0, None)
    axes.bar(left_edges.ravel(), costs.ravel(), width, align="edge", color=SKY, edgecolor="white", linewidth=line_width)
    longest = costs.max(axis=1, keepdims=True)
    waiting = (longest - costs).ravel()
    bottom = costs.ravel()
    axes.bar(left_edges.ravel(), waiting, width, bottom=bottom, align="edge", hatch=hatch, **EMPTY_STYLE)
    axes.hlines(longest.ravel(), left_edges[:, 0], left_edges[:, -1] + width, color=INK, linewidth=1.2)
    names = [f"{i // report.accumulation}.{i % report.accumulation}" for i in range(num_micro_steps)]
    axes.set_xticks(
        range(num_micro_steps), names if report.accumulation > 1 else [str(i) for i in range(num_micro_steps)]
    )
    axes.set(ylim=(0, float(longest.max()) * 1.12), ylabel="modelled cost (mean 1)")
    axes.set_xlabel("step.micro-batch" if report.accumulation > 1 else "step")
    title = "one rank: no waiting"
    if num_ranks > 1:
        title = f"{num_ranks:,} ranks; hatched: waiting\nimbalance of the epoch: {report.imbalance:.3f}"
    axes.set_title(title, loc="left", fontsize=11)
