"""The numbers of a report, without the ways to show them.

`build.py` computes them. `lines.py` and `pictures.py` read them, and `PackingReport` (`report.py`) adds the ways to
show them. A *pack* is the documents that pass through the model together. A *trained* token counts in the loss. The
*unpacked run* is the training that TRL would do with the same settings and without packing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

from ..data.documents import Ledger
from ..planning.strategies import Strategy
from ..samples.data_report import DataReport
from ..samples.row import PerTurnCounts, TrainedSummary
from .feature_section import ContentSection, FeatureSection
from .packs import ShownPack
from .sections import LengthHistogram, OwnPacks, SharedPacks

if TYPE_CHECKING:  # it needs torch, without which `trl-packfix plan` makes reports
    from ..isolation.isolation_report import IsolationReport

# If a larger share of the trained tokens is lost, the report warns, and `trl-packfix plan` exits with 1.
MAX_LOST_SHARE = 0.01


@dataclass(frozen=True)
class PlanSample:
    """Packs and costs from the beginning of the first epoch, which pictures show."""

    packs: list[ShownPack]  # without their tokens
    costs: list[list[float]]  # modelled FLOPs of each of the first micro-steps, on each rank
    fills: list[int]  # number of micro-batches of the epoch by fill, from empty to full


@dataclass(frozen=True)
class PackingNumbers:
    """What packing did with the training set. `PackingReport` (`report.py`) explains the fields; None is not known."""

    strategy: Strategy
    overlong: str
    max_length: int
    batch_size: int
    accumulation: int
    world_size: int
    capacity: int
    num_documents: int
    num_tokens: int
    num_trained_tokens: int
    num_packs: int | None
    efficiency: float | None
    num_steps: int
    ledger: Ledger
    num_rows: int | None = None
    max_steps: int | None = None
    lower_bound: int | None = None
    padding_efficiency: float | None = None
    documents_per_step: float | None = None
    documents_not_reached: int = 0
    tokens_not_reached: int = 0
    trained_tokens_not_reached: int = 0
    most_documents: int | None = None
    unpacked_loss: float = 1.0
    imbalance: float | None = None
    shared: SharedPacks | None = None
    prefixes: FeatureSection | None = None
    images: ContentSection | None = None
    turns: PerTurnCounts | None = None
    trained: TrainedSummary | None = None
    data: DataReport | None = None
    lengths: LengthHistogram | None = None
    model: str | None = None
    attention: str = "not chosen yet"
    isolation: "IsolationReport | None" = None
    first_step: str | None = None
    compiled: str | None = None
    memory: str | None = None
    experimental: tuple[str, ...] = ()
    newer_libraries: tuple[str, ...] = ()
    sample: PlanSample | None = field(default=None, repr=False)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> Self:
        """Return the numbers, the ledger, the lengths and the costs of a saved report; its other sections are None.

        Args:
            values: the values that `PackingReport.save` has written.
        """
        names = [report_field.name for report_field in fields(cls)]
        # `num_packs` and `efficiency` may be None in the file, and have no default.
        numbers: dict[str, Any] = {"num_packs": None, "efficiency": None}
        numbers |= {name: values[name] for name in names if isinstance(values.get(name), (bool, int, float, str))}
        lengths = values["lengths"]
        sample = None if values["costs"] is None else PlanSample([], values["costs"], values["fills"])
        return cls(
            **numbers,
            ledger=Ledger.from_dict(values["ledger"]),
            lengths=lengths and LengthHistogram(**lengths),
            sample=sample,
        )

    @property
    def groups(self) -> SharedPacks | OwnPacks:
        """The section on ranks: how they share packs, or that each has packs of its own."""
        return self.shared or OwnPacks(self.capacity, self.batch_size)

    @property
    def shared_prefixes(self) -> FeatureSection | None:
        """The section on shared prefixes; None if the run does not share prefixes."""
        return self.prefixes if self.prefixes is not None and self.prefixes.is_used else None

    @property
    def unpacked_documents(self) -> int:
        """The number of documents in an optimizer step of the unpacked run."""
        return self.batch_size * self.accumulation * self.world_size

    @property
    def num_dropped(self) -> int:
        """The number of documents that are dropped, for any reason."""
        return sum(count.documents for count in self.ledger.dropped.values())

    @property
    def num_cut(self) -> int:
        """The number of documents that are truncated, split or dropped."""
        return self.ledger.truncated.documents + self.ledger.split.documents + self.num_dropped

    @property
    def lost_trained_share(self) -> float | None:
        """The share of the dataset's trained tokens that are cut, dropped or not reached; None if there are none."""
        num_lost = self.ledger.lost_trained_tokens + self.trained_tokens_not_reached
        num_given = self.ledger.given.trained_tokens
        return num_lost / num_given if num_given else None

    @property
    def warning(self) -> str | None:
        """What is lost, and what to set, if more than 1 % of the trained tokens are lost; else None."""
        lost = self.lost_trained_share
        if lost is None or lost <= MAX_LOST_SHARE:
            return None
        remedies = []
        if self.ledger.lost_trained_tokens:
            split = ' or set overlong="split"' if self.overlong in ("truncate", "drop") else ""
            remedies.append(f"raise max_length ({self.max_length:,}){split}")
        if self.trained_tokens_not_reached:
            remedies.append("set dataloader_drop_last=False")
        return f"{lost:.1%} of the trained tokens are lost: {', and '.join(remedies)}"


def finite(value: object) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None, also inside dictionaries and lists.

    >>> finite({"max_change": float("inf"), "leaks": [0.5]})
    {'max_change': None, 'leaks': [0.5]}
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value
