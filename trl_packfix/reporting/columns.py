"""The numbers of a report as columns: in the tables of `trl-packfix plan`, in the legend below them, and for loggers.

`COLUMNS` is read by `cli/forecast.py` (tables and legend), by `report.metrics` (loggers) and by `tools/logged.py`,
which writes docs/logging.md. A new number is an entry of `COLUMNS`. If it is not an attribute of `PackingReport` yet,
`build.py` has to compute it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ..data.documents import DocumentCounts


@dataclass(frozen=True)
class Column:
    """A number that is read from a report. Other tables of the command line use columns for objects of their own.

    A column with a heading is shown in the tables of `plan`, except where no row has a value. A column with a metric
    goes to loggers.
    """

    heading: str  # heading in the tables; "" for none
    source: str | Callable[[Any], Any]  # path of the attribute, such as "images.per_pack", or report -> value
    text: str = ","  # format of a cell
    metric: str = ""  # name for loggers, behind "packing/"; "" for none
    legend: str = ""  # explanation below the tables
    unit: str = "share"  # unit of the metric in docs/logging.md
    meaning: str = ""  # explanation of the metric in docs/logging.md; "" for the legend
    wraps: bool = False  # whether a cell may take several lines

    def value(self, report: object) -> Any:
        """Return the number of a report; None where an attribute on its path is None."""
        if callable(self.source):
            return self.source(report)
        return reduce(lambda section, name: getattr(section, name, None), self.source.split("."), report)

    def cell(self, value: object) -> str:
        """Return the text of a cell."""
        return "-" if value is None else format(value, self.text)


# The first columns of every table
KEY_COLUMNS = (
    Column("max_length", "max_length"),
    Column("strategy", "strategy", text=""),
    Column("ranks", "world_size"),
)
# Legends and meanings of some of the columns below
FILLED_LEGEND = "tokens / room in the packs"
PADDED_LEGEND = "the same without packing"
LOST_MEANING = "trained tokens that are cut, dropped or not reached"
STEPS_MEANING = "optimizer steps"
EPOCH_MEAN_MEANING = "mean of the epoch"
COMPUTED_LEGEND = "share of the tokens of the documents"
COMPUTED_MEANING = "tokens that are computed over those of the documents"
EXCHANGE_LEGEND = "share of the modelled time in the exchange between ranks that share a pack"
IMBALANCE_MEANING = "modelled time / modelled time if ranks never waited"
FAMILIES_LEGEND = "those that begin alike, each as one"
TOO_LONG_LEGEND = 'documents dropped because an image does not fit, or by overlong="drop"'
LANGUAGE_LEGEND = "imbalance of the language model alone"
TOWER_LEGEND = "imbalance of the vision tower alone"
SMALLEST_DEGREE_MEANING = "that share a pack, where documents allow"
IMBALANCE_LEGEND = "1.06 where waiting for the slowest rank adds 6 % (modelled)"
COLUMNS = (
    Column("", "num_documents", metric="documents", unit="documents", meaning="in an epoch"),
    Column("packs", "num_packs", metric="packs", unit="packs", meaning="in an epoch"),
    Column("", "lower_bound", metric="lower_bound", unit="packs", meaning="fewest that any plan needs"),
    Column("filled", "efficiency", ".1%", "efficiency", FILLED_LEGEND, meaning="tokens / (packs x capacity)"),
    Column("padded", "padding_efficiency", ".1%", "padding_efficiency", PADDED_LEGEND),
    # The steps of a stream are not steps of an epoch
    Column(
        "steps", lambda r: r.num_rows and r.num_steps, metric="steps_per_epoch", unit="steps", meaning=STEPS_MEANING
    ),
    Column(
        "docs/step", "documents_per_step", ",.1f", "documents_per_step", unit="documents", meaning=EPOCH_MEAN_MEANING
    ),
    Column("imbalance", "imbalance", ".3f", "imbalance", IMBALANCE_LEGEND, "ratio", IMBALANCE_MEANING),
    Column("cut", "num_cut", legend="documents truncated, split or dropped"),
    Column(
        "lost", "lost_trained_share", ".2%", "lost_trained_share", "share of the trained tokens", meaning=LOST_MEANING
    ),
    Column("computed", "shared_prefixes.rows", ".2f", "computed_share", COMPUTED_LEGEND, meaning=COMPUTED_MEANING),
    Column(
        "families/step", "shared_prefixes.families_per_step", ",.1f", "families_per_step", FAMILIES_LEGEND, "families"
    ),
    Column("images/pack", "images.per_pack", ".1f", "images_per_pack", unit="images", meaning="mean"),
    # Shown only for datasets with images, which cannot be cut
    Column(
        "too long",
        lambda r: r.images and r.ledger.dropped.get("overlong", DocumentCounts()).documents,
        legend=TOO_LONG_LEGEND,
    ),
    Column("language", "images.language_imbalance", ".3f", "language_imbalance", LANGUAGE_LEGEND, "ratio"),
    Column("tower", "images.tower_imbalance", ".3f", "tower_imbalance", TOWER_LEGEND, "ratio"),
    Column("exchange", "shared.exchange_share", ".1%", "exchange_share", EXCHANGE_LEGEND),
    Column("part", "shared.largest_part", legend="tokens of the largest part of a pack on a rank"),
    Column("micro-steps by degree", "shared.histogram", text="", legend="degree: ranks that share a pack", wraps=True),
    Column("", "shared.smallest_degree", metric="smallest_degree", unit="ranks", meaning=SMALLEST_DEGREE_MEANING),
)
