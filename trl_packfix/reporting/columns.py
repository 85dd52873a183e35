"""The numbers of a report as columns: in the tables of `trl-packfix plan`, in their legend, and for loggers.

A new number is an entry here. If it is not known from the report's attributes, `build.py` computes it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ..data.documents import DocumentCounts


@dataclass(frozen=True)
class Column:
    """A number: `of` is the path of its attribute, or a function.

    In the tables of `plan` it has a heading, with a legend below them, and is not shown where no row has a value. For
    loggers it has a metric (a name behind `packing/`), whose unit and meaning (else the legend) are in docs/logging.md.
    """

    heading: str
    of: str | Callable[[Any], Any]
    text: str = ","
    metric: str = ""
    legend: str = ""
    unit: str = "share"
    meaning: str = ""
    wraps: bool = False  # whether a cell may take several lines

    def value(self, report: object) -> Any:
        """The number; None where a part of its path is None."""
        if callable(self.of):
            return self.of(report)
        return reduce(lambda part, name: getattr(part, name, None), self.of.split("."), report)

    def cell(self, value: object) -> str:
        return "-" if value is None else format(value, self.text)


KEYS = (  # they begin every table
    Column("max_length", "max_length"),
    Column("strategy", "strategy", text=""),
    Column("ranks", "world_size"),
)
FILLED = "tokens / room in the packs"
PADDED = "the same without packing"
LOST = "trained tokens that are cut, dropped or not reached"
STEPS = "optimizer steps"
MEAN = "mean of the epoch"
OF_TOKENS = "share of the tokens of the documents"
COMPUTED = "tokens that are computed over those of the documents"
EXCHANGE = "share of the modelled time in the exchange between ranks that share a pack"
WAITED = "modelled time / modelled time if ranks never waited"
FAMILIES = "those that begin alike, each as one"
TOO_LONG = 'documents dropped because an image does not fit, or by overlong="drop"'
LANGUAGE = "imbalance of the language model alone"
TOWER = "imbalance of the vision tower alone"
SMALLEST = "that share a pack, where documents allow"
IMBALANCE = "1.06 where waiting for the slowest rank adds 6 % (modelled)"
COLUMNS = (
    Column("", "num_documents", metric="documents", unit="documents", meaning="in an epoch"),
    Column("packs", "num_packs", metric="packs", unit="packs", meaning="in an epoch"),
    Column("", "lower_bound", metric="lower_bound", unit="packs", meaning="fewest that any plan needs"),
    Column("filled", "efficiency", ".1%", "efficiency", FILLED, meaning="tokens / (packs x capacity)"),
    Column("padded", "padding_efficiency", ".1%", "padding_efficiency", PADDED),
    Column("steps", lambda r: r.num_rows and r.num_steps, metric="steps_per_epoch", unit="steps", meaning=STEPS),
    Column("docs/step", "documents_per_step", ",.1f", "documents_per_step", unit="documents", meaning=MEAN),
    Column("imbalance", "imbalance", ".3f", "imbalance", IMBALANCE, "ratio", WAITED),
    Column("cut", "num_cut", legend="documents truncated, split or dropped"),
    Column("lost", "lost_trained_share", ".2%", "lost_trained_share", "share of the trained tokens", meaning=LOST),
    Column("computed", "shared_prefixes.rows", ".2f", "computed_share", OF_TOKENS, meaning=COMPUTED),
    Column("families/step", "shared_prefixes.families_per_step", ",.1f", "families_per_step", FAMILIES, "families"),
    Column("images/pack", "images.per_pack", ".1f", "images_per_pack", unit="images", meaning="mean"),
    Column(
        "too long", lambda r: r.images and r.ledger.dropped.get("overlong", DocumentCounts()).documents, legend=TOO_LONG
    ),
    Column("language", "images.language_imbalance", ".3f", "language_imbalance", LANGUAGE, "ratio"),
    Column("tower", "images.tower_imbalance", ".3f", "tower_imbalance", TOWER, "ratio"),
    Column("exchange", "shared.exchange_share", ".1%", "exchange_share", EXCHANGE),
    Column("part", "shared.largest_part", legend="tokens of the largest part of a pack on a rank"),
    Column("micro-steps by degree", "shared.histogram", text="", legend="degree: ranks that share a pack", wraps=True),
    Column("", "shared.smallest_degree", metric="smallest_degree", unit="ranks", meaning=SMALLEST),
)
