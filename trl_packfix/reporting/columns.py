"""The numbers of a report as columns: in the tables of `trl-packfix plan`, in their legend, and for loggers.

A new number is an entry here. If it is not known from the report's attributes, `build.py` computes it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any


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

    def cell(self, value: object) -> str:
        """A value as text."""
        return "-" if value is None else format(value, self.text)


def _of(path: str) -> Callable[[Any], Any]:
    """A number of the report by its path; None where the report does not have this part."""

    def value(report: object) -> Any:
        return reduce(lambda part, name: getattr(part, name, None), path.split("."), report)

    return value


KEYS = (  # they begin every table
    Column("max_length", _of("max_length")),
    Column("strategy", _of("strategy"), text=""),
    Column("ranks", _of("world_size")),
)
FILLED, PADDED = "tokens / room in the packs", "the same without packing"
LOST = "trained tokens that are cut, dropped or not reached"
COMPUTED = "tokens that are computed over those of the documents"
EXCHANGE = "in the exchange between ranks that share a pack"
WAITED = "modelled time / modelled time if ranks never waited"
IMBALANCE = "1.06 where waiting for the slowest rank adds 6 % (modelled)"
COLUMNS = (
    Column("", _of("num_documents"), metric="documents", unit="documents", meaning="in an epoch"),
    Column("packs", _of("num_packs"), metric="packs", unit="packs", meaning="in an epoch"),
    Column("", _of("lower_bound"), metric="lower_bound", unit="packs", meaning="fewest that any plan needs"),
    Column("filled", _of("efficiency"), ".1%", "efficiency", FILLED, meaning="tokens / (packs x capacity)"),
    Column("padded", _of("padding_efficiency"), ".1%", "padding_efficiency", PADDED),
    Column("steps", _of("steps_per_epoch"), metric="steps_per_epoch", unit="steps", meaning="optimizer steps"),
    Column(
        "docs/step",
        _of("documents_per_step"),
        ",.1f",
        "documents_per_step",
        unit="documents",
        meaning="mean of the epoch",
    ),
    Column("imbalance", _of("imbalance"), ".3f", "imbalance", IMBALANCE, "ratio", WAITED),
    Column("cut", _of("num_cut"), legend="documents truncated, split or dropped"),
    Column("lost", _of("lost_trained_share"), ".2%", "lost_trained_share", "share of the trained tokens", meaning=LOST),
    Column(
        "computed",
        _of("shared_prefixes.rows"),
        ".2f",
        "computed_share",
        "share of the tokens of the documents",
        meaning=COMPUTED,
    ),
    Column(
        "families/step",
        _of("shared_prefixes.families_per_step"),
        ",.1f",
        "families_per_step",
        "those that begin alike, each as one",
        "families",
    ),
    Column("images/pack", _of("images.per_pack"), ".1f", "images_per_pack", unit="images", meaning="mean"),
    Column(
        "too long", _of("too_long"), legend='documents dropped because an image does not fit, or by overlong="drop"'
    ),
    Column(
        "language",
        _of("images.language_imbalance"),
        ".3f",
        "language_imbalance",
        "imbalance of the language model alone",
        "ratio",
    ),
    Column(
        "tower", _of("images.tower_imbalance"), ".3f", "tower_imbalance", "imbalance of the vision tower alone", "ratio"
    ),
    Column(
        "exchange",
        _of("shared.exchange_share"),
        ".1%",
        "exchange_share",
        f"share of the time {EXCHANGE}",
        meaning=f"of the modelled time, {EXCHANGE}",
    ),
    Column("part", _of("shared.largest_part"), legend="tokens of the largest part of a pack on a rank"),
    Column(
        "micro-steps by degree", _of("shared.histogram"), text="", legend="degree: ranks that share a pack", wraps=True
    ),
    Column(
        "",
        _of("shared.smallest_degree"),
        metric="smallest_degree",
        unit="ranks",
        meaning="that share a pack, where documents allow",
    ),
)
