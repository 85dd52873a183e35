"""The numbers of a report as columns: in the tables of `trl-packfix plan`, in the legend below them, and for loggers.

`COLUMNS` is read by `cli/forecast.py` (tables and legend), by `report.metrics` (loggers) and by `tools/logged.py`,
which writes docs/logging.md. A new number is an entry of `COLUMNS`. If it is not an attribute of `PackingReport` yet,
`build.py` has to compute it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..data.documents import DocumentCounts


@dataclass(frozen=True)
class Column:
    """A number that is read from a report, or from another object whose table the command line prints.

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
        """Return the number of a report; None if an attribute on its path is None."""
        if callable(self.source):
            return self.source(report)
        section: Any = report
        for name in self.source.split("."):
            section = None if section is None else getattr(section, name)
        return section

    def cell(self, value: object) -> str:
        """Return the text of a cell."""
        return "-" if value is None else format(value, self.text)


# The first columns of every table
KEY_COLUMNS = (
    Column("max_length", "max_length"),
    Column("strategy", "strategy", text=""),
    Column("ranks", "world_size"),
)

# The numbers of a report, in the order of the tables. Ranks that share a pack exchange parts of it in each layer
COLUMNS = (
    Column("", "num_documents", metric="documents", unit="documents", meaning="in an epoch"),
    Column("packs", "num_packs", metric="packs", unit="packs", meaning="in an epoch"),
    Column("", "lower_bound", metric="lower_bound", unit="packs", meaning="fewest that any plan needs"),
    Column(
        "filled",
        "efficiency",
        ".1%",
        "efficiency",
        legend="tokens / room in the packs",
        meaning="tokens / (packs x capacity)",
    ),
    Column("padded", "padding_efficiency", ".1%", "padding_efficiency", legend="the same without packing"),
    # The steps of a stream (`num_rows` is None) are not steps of an epoch
    Column(
        "steps",
        lambda report: None if report.num_rows is None else report.num_steps,
        metric="steps_per_epoch",
        unit="steps",
        meaning="optimizer steps",
    ),
    Column(
        "docs/step", "documents_per_step", ",.1f", "documents_per_step", unit="documents", meaning="mean of the epoch"
    ),
    Column(
        "imbalance",
        "imbalance",
        ".3f",
        "imbalance",
        legend="1.06 where waiting for the slowest rank adds 6 % (modelled)",
        unit="ratio",
        meaning="modelled time / modelled time if ranks never waited",
    ),
    Column("cut", "num_cut", legend="documents truncated, split or dropped"),
    Column(
        "lost",
        "lost_trained_share",
        ".2%",
        "lost_trained_share",
        legend="share of the trained tokens",
        meaning="trained tokens that are cut, dropped or not reached",
    ),
    # The section `shared_prefixes` is None if no prefixes are shared. Its `rows` is the share of the tokens that is
    # computed, and a family is a set of documents that begin alike
    Column(
        "computed",
        "shared_prefixes.rows",
        ".2f",
        "computed_share",
        legend="share of the tokens of the documents",
        meaning="tokens that are computed over those of the documents",
    ),
    Column(
        "families/step",
        "shared_prefixes.families_per_step",
        ",.1f",
        "families_per_step",
        legend="those that begin alike, each as one",
        unit="families",
    ),
    Column("images/pack", "images.per_pack", ".1f", "images_per_pack", unit="images", meaning="mean"),
    # Shown only for datasets with images, which cannot be cut
    Column(
        "too long",
        # The ledger counts dropped documents by reason
        lambda report: report.images and report.ledger.dropped.get("overlong", DocumentCounts()).documents,
        legend='documents dropped because an image does not fit, or by overlong="drop"',
    ),
    Column(
        "language",
        "images.language_imbalance",
        ".3f",
        "language_imbalance",
        legend="imbalance of the language model alone",
        unit="ratio",
    ),
    Column(
        "tower",
        "images.tower_imbalance",
        ".3f",
        "tower_imbalance",
        legend="imbalance of the vision tower alone",
        unit="ratio",
    ),
    Column(
        "exchange",
        "shared.exchange_share",
        ".1%",
        "exchange_share",
        legend="share of the modelled time in the exchange between ranks that share a pack",
    ),
    Column("part", "shared.largest_part", legend="tokens of the largest part of a pack on a rank"),
    Column("micro-steps by degree", "shared.histogram", text="", legend="degree: ranks that share a pack", wraps=True),
    # The number of ranks that a document of `max_length` needs. Packs of shorter documents may be on fewer ranks, which
    # `meaning` says as "where documents allow"
    Column(
        "",
        "shared.smallest_degree",
        metric="smallest_degree",
        unit="ranks",
        meaning="that share a pack, where documents allow",
    ),
)
