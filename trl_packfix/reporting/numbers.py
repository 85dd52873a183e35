"""The numbers of a report, without the ways to show them.

`build.py` computes them. `lines.py` and `pictures.py` read them, and `PackingReport` (`report.py`) adds the ways to
show them. A *pack* is the documents that pass through the model together. A *trained* token counts in the loss. The
*unpacked run* is the training that TRL would do with the same settings and without packing. A *section* of the report
is an object with numbers on one topic, and a method that returns its line.
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
    # Modelled FLOPs of each of the first micro-steps (the micro-batches with the same index on all ranks), on each rank
    costs: list[list[float]]
    # Histogram of fill (tokens / capacity) from 0 to 1, in bins of equal width: number of micro-batches of the epoch
    fills: list[int]


@dataclass(frozen=True)
class PackingNumbers:
    """What packing did with the training set. None means that a number is not known, or a section does not apply."""

    # Settings of the run
    strategy: Strategy  # how the documents of a pack are chosen
    overlong: str  # what happens to documents above `max_length`: "truncate", "split", "drop" or "raise"
    max_length: int  # most tokens of a document
    batch_size: int  # documents of a micro-batch in the unpacked run
    accumulation: int  # micro-batches of an optimizer step on one rank
    world_size: int  # number of ranks
    capacity: int  # most tokens of a pack
    # Counts of an epoch; for a stream, of the documents read so far
    num_documents: int
    num_tokens: int
    num_trained_tokens: int
    num_packs: int | None  # None for a strategy that keeps the steps of the unpacked run, and packs each step anew
    efficiency: float | None  # tokens / (packs x capacity)
    num_steps: int  # optimizer steps of an epoch; for a stream, of the run
    ledger: Ledger  # documents and tokens of the dataset that are kept, truncated, split, or dropped
    num_rows: int | None = None  # rows of the dataset; None for a stream
    max_steps: int | None = None  # optimizer steps of a run on a table, if the setting is set
    lower_bound: int | None = None  # number of packs that every plan needs at least
    padding_efficiency: float | None = None  # tokens / (tokens and padding) of batches in the unpacked run
    documents_per_step: float | None = None  # mean of the epoch
    # What the first epoch leaves out with `dataloader_drop_last`; not counted in the ledger
    documents_not_reached: int = 0
    tokens_not_reached: int = 0
    trained_tokens_not_reached: int = 0
    most_documents: int | None = None  # the most documents in one micro-batch of the first epoch
    # Loss of the unpacked run / loss of the packed run. It is below 1 if TRL counts the first label of each row in the
    # divisor of its loss. No token predicts this label, so it adds no loss
    unpacked_loss: float = 1.0
    imbalance: float | None = None  # modelled time of the first epoch / modelled time if ranks never waited
    # Sections
    shared: SharedPacks | None = None  # how ranks share packs, with sequence parallelism
    prefixes: FeatureSection | None = None  # what shared prefixes save
    images: ContentSection | None = None
    turns: PerTurnCounts | None = None  # with `per_turn`, the conversations and turns of which rows are made
    trained: TrainedSummary | None = None  # which tokens are trained, and by which setting
    data: DataReport | None = None  # whether the tokens hold all texts of the rows, once
    lengths: LengthHistogram | None = None  # lengths of documents before they are cut; None for a stream
    # Texts of lines, which the trainer sets
    model: str | None = None
    attention: str = "not chosen yet"
    isolation: "IsolationReport | None" = None  # the proof that documents of a pack do not change each other
    first_step: str | None = None
    compiled: str | None = None
    memory: str | None = None
    experimental: tuple[str, ...] = ()  # settings of this run that were not tested on several GPUs
    newer_libraries: tuple[str, ...] = ()  # installed libraries above the versions with which the package was tested
    sample: PlanSample | None = field(default=None, repr=False)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> Self:
        """Return the numbers, texts, ledger, lengths and costs of a saved report; its other sections are None.

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
            lengths=None if lengths is None else LengthHistogram(**lengths),
            sample=sample,
        )

    @property
    def rank_section(self) -> SharedPacks | OwnPacks:
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
        num_in_dataset = self.ledger.given.trained_tokens
        return num_lost / num_in_dataset if num_in_dataset else None

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
