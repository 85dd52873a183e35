"""Draw a plan as text, where matplotlib is not installed: packs as strips, the lengths, and the waiting of ranks.

`trl-packfix show --plot` prints it. `pictures.py` draws the same panels as a picture. All characters are ASCII, for any
terminal and log file. No information is in the colour alone: documents begin with their numbers.
"""

import numpy as np
from rich.text import Text

from .numbers import PackingNumbers
from .packs import STYLES, ShownDocument, ShownPack

TRAINED = "#"
UNTRAINED = "-"
EMPTY = "."
WAITING = ":"
LEGEND = f"A document begins with its number; {TRAINED} trained, {UNTRAINED} not trained, {EMPTY} empty"
MIN_WIDTH = 20  # characters of the bars for lengths and costs, and of the widest pack on a narrow terminal
NUM_LENGTHS = 12  # rows of the histogram
NUM_RANKS = 12  # ranks whose costs are drawn
PERCENT_WIDTH = 6  # characters behind a pack: its fill, and a margin


def draw_plan(report: PackingNumbers, width: int) -> Text:
    """Return the panels as text with styles, one below the other.

    Args:
        report: a report of a table, whose first packs are known. The packs of a stream are not known in advance.
        width: characters of a line.
    """
    assert report.sample is not None, "the report has no packs"
    assert report.lengths is not None, "only streams have no lengths"
    text = Text()
    packs = report.sample.packs
    label_width = max(len(pack.place) for pack in packs) + 2
    bar_width = max(MIN_WIDTH, width - label_width - PERCENT_WIDTH)
    widest = max(pack.capacity for pack in packs)
    text.append(f"{report.num_documents:,} documents; the first packs, {widest:,} tokens wide. {LEGEND}\n", "bold")
    for pack in packs:
        text.append(f"{pack.place:<{label_width}}")
        text.append(_strip(pack, round(bar_width * pack.capacity / widest)))
        num_rows = pack.cu_seq_lens[-1]
        text.append(f" {num_rows / pack.capacity:>4.0%}\n")

    text.append("\nlengths in tokens, and number of documents\n", "bold")
    edges = report.lengths.edges
    counts = report.lengths.counts
    step = -(-len(counts) // NUM_LENGTHS)  # bins of the histogram that are merged to one row
    merged = [sum(counts[i : i + step]) for i in range(0, len(counts), step)]
    first_lengths = edges[:-1:step]
    last_lengths = [*first_lengths[1:], edges[-1]]
    labels = [f"{first:,}-{last - 1:,}" for first, last in zip(first_lengths, last_lengths, strict=True)]
    for label, count, first in zip(labels, merged, first_lengths, strict=True):
        cut = " longer than max_length" if first > report.max_length else ""
        bar = TRAINED * -(-count * MIN_WIDTH // max(merged))  # rounded up, so that no document is invisible
        text.append(f"{label:>{max(map(len, labels))}}  {bar:<{MIN_WIDTH}} {count:,}{cut}\n")

    if report.world_size > 1:
        text.append(f"\ncost of each rank by micro-step, {WAITING} waits for the slowest\n", "bold")
        for micro_step, costs in enumerate(report.sample.costs):  # modelled FLOPs of each rank
            bar_lengths = (round(MIN_WIDTH * cost / max(costs)) for cost in costs[:NUM_RANKS])
            bars = " ".join(f"{TRAINED * n}{WAITING * (MIN_WIDTH - n)}" for n in bar_lengths)
            text.append(f"{micro_step:>3}  {bars}\n")
    return text


def _strip(pack: ShownPack, width: int) -> Text:
    """Return a pack as `width` characters. Each stands for the token row at its middle, and shows if it is trained."""
    is_trained = np.concatenate([_is_trained(document) for document in pack.documents])  # of each row of the pack
    numbers = np.repeat(np.arange(len(pack.documents)), [document.num_rows for document in pack.documents])
    rows = ((np.arange(width) + 0.5) * pack.capacity / width).astype(int)
    strip = Text()
    previous = -1
    for row in rows.tolist():
        if row >= len(is_trained):
            strip.append(EMPTY)
            continue
        number = int(numbers[row])
        character = TRAINED if is_trained[row] else UNTRAINED
        if number != previous:  # the first character of the document
            character = str(number % 10)
        strip.append(character, STYLES[number % len(STYLES)])
        previous = number
    return strip


def _is_trained(document: ShownDocument) -> np.ndarray:
    """Return whether each row of a document is trained, shape (rows,)."""
    is_trained = np.zeros(document.num_rows, dtype=bool)
    for trained, first, end in document.own_spans:
        # `own_spans` leaves out tokens that are shared with the document before, and numbers the others from 0. So a
        # token has the number of its row
        is_trained[first:end] = trained
    return is_trained
