"""The numbers of a report as columns: in the tables of `trl-packfix plan`, in their legend, and for loggers.

A new number is an entry here. If it is not known from the report's attributes, `build.py` computes it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `plan --help` reads the columns, and imports neither torch nor transformers
    from .report_numbers import ReportNumbers


@dataclass(frozen=True)
class Column:
    """A number, and how it is shown.

    Attributes:
        heading: in the tables of `plan`; a column without a heading is only logged.
        value: of a report. None if it has no meaning there; a column without any value is not shown.
        text: the format of a value in a table.
        metric: its name for loggers, behind `packing/`; empty if it is not logged.
        legend: what the heading means, below the tables.
        unit: of the logged value.
        meaning: of the logged value, in docs/logging.md; the legend if it is empty.
        wraps: whether a cell may take several lines.
    """

    heading: str
    value: Callable[[Any], Any]
    text: str = ","
    metric: str = ""
    legend: str = ""
    unit: str = "share"
    meaning: str = ""
    wraps: bool = False

    def cell(self, value: Any) -> str:
        """A value as text."""
        return "-" if value is None else format(value, self.text)


def _of(part: str, name: str) -> Callable[["ReportNumbers"], Any]:
    """An attribute of a part of the report; None where the report does not have this part."""
    return lambda report: getattr(getattr(report, part), name, None)


def _too_long(report: "ReportNumbers") -> int | None:
    count = report.ledger.dropped.get("overlong")
    return None if report.images is None else 0 if count is None else count.documents


def _cut(report: "ReportNumbers") -> int:
    ledger = report.ledger
    return sum(count.documents for count in (ledger.truncated, ledger.split, *ledger.dropped.values()))


KEYS = (  # they begin every table
    Column("max_length", lambda report: report.max_length),
    Column("strategy", lambda report: report.strategy, text=""),
    Column("ranks", lambda report: report.world_size),
)
COLUMNS = (
    Column("", lambda report: report.num_documents, metric="documents", unit="documents", meaning="in an epoch"),
    Column("packs", lambda report: report.num_packs, metric="packs", unit="packs", meaning="in an epoch"),
    Column(
        "", lambda report: report.lower_bound, metric="lower_bound", unit="packs", meaning="fewest that any plan needs"
    ),
    Column(
        "filled",
        lambda report: report.efficiency,
        ".1%",
        "efficiency",
        "share of the packs",
        meaning="tokens / (packs x capacity)",
    ),
    Column(
        "padded",
        lambda report: report.padding_efficiency,
        ".1%",
        "padding_efficiency",
        "the same of unpacked batches of this size",
    ),
    Column(
        "steps",
        lambda report: None if report.num_rows is None else report.num_steps,
        metric="steps_per_epoch",
        unit="steps",
        meaning="optimizer steps",
    ),
    Column(
        "docs/step",
        lambda report: report.documents_per_step,
        ",.1f",
        "documents_per_step",
        unit="documents",
        meaning="mean of the epoch",
    ),
    Column(
        "imbalance",
        lambda report: report.imbalance,
        ".3f",
        "imbalance",
        "modelled time / modelled time if ranks never waited",
        unit="ratio",
    ),
    Column("cut", _cut, legend="documents truncated, split or dropped"),
    Column(
        "lost",
        lambda report: report.lost_trained_share,
        ".2%",
        "lost_trained_share",
        "share of the trained tokens",
        meaning="trained tokens that are cut, dropped or not reached",
    ),
    Column(
        "computed",
        _of("shared_prefixes", "rows"),
        ".2f",
        "computed_share",
        "share of the tokens of the documents",
        meaning="tokens that are computed over those of the documents",
    ),
    Column(
        "families/step",
        _of("shared_prefixes", "families_per_step"),
        ",.1f",
        "families_per_step",
        "those that begin alike, each as one",
        unit="families",
    ),
    Column("images/pack", _of("images", "per_pack"), ".1f", "images_per_pack", unit="images", meaning="mean"),
    Column("too long", _too_long, legend='documents dropped because an image does not fit, or by overlong="drop"'),
    Column(
        "language",
        _of("images", "language_imbalance"),
        ".3f",
        "language_imbalance",
        "imbalance of the language model alone",
        unit="ratio",
    ),
    Column(
        "tower",
        _of("images", "tower_imbalance"),
        ".3f",
        "tower_imbalance",
        "imbalance of the vision tower alone",
        unit="ratio",
    ),
    Column(
        "exchange",
        _of("shared", "exchange_share"),
        ".1%",
        "exchange_share",
        "share of the time in the exchange between ranks that share a pack",
        meaning="of the modelled time, in the exchange between ranks that share a pack",
    ),
    Column("part", _of("shared", "largest_part"), legend="tokens of the largest part of a pack on a rank"),
    Column(
        "micro-steps by degree",
        _of("shared", "histogram"),
        text="",
        legend="degree: ranks that share a pack",
        wraps=True,
    ),
    Column(
        "",
        _of("sharing", "smallest_degree"),
        metric="smallest_degree",
        unit="ranks",
        meaning="that share a pack, where documents allow",
    ),
)
