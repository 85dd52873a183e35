"""The numbers of a report: what packing did with the documents. Lines, columns and pictures are made of them."""

from dataclasses import dataclass, field

from ..data.documents import Ledger
from ..isolation.isolation_report import IsolationReport
from ..planning.strategies import Strategy
from ..samples.row import Trained, TurnCounts
from .sample import LengthHistogram, PlanSample
from .savings import PrefixSavings

MAX_LOST_SHARE = 0.01  # share of the trained tokens; above it the report warns and `trl-packfix plan` exits with 1


@dataclass(frozen=True)
class Groups:
    """The ranks that share packs.

    Attributes:
        tokens_per_rank: most tokens of a pack on one rank.
        smallest_degree: ranks that a document of `max_length` needs.
        micro_steps: number of micro-steps by degree.
    """

    tokens_per_rank: int
    smallest_degree: int
    micro_steps: dict[int, int]

    @property
    def histogram(self) -> str:
        """Micro-steps by degree.

        >>> Groups(16384, 8, {1: 30, 8: 10}).histogram
        '1: 30, 8: 10'
        """
        return ", ".join(f"{degree}: {count:,}" for degree, count in sorted(self.micro_steps.items()))

    def micro_batch(self, max_length: int) -> str:
        """The room of a micro-batch."""
        return (
            f"{self.tokens_per_rank:,} tokens at most on each rank (tokens_per_rank); a document of max_length "
            f"{max_length:,} needs {self.smallest_degree} ranks"
        )


@dataclass(frozen=True)
class SharedPacks(Groups):
    """What sequence parallelism does in the first epoch of a table, modelled.

    Attributes:
        exchange_share: share of the time in the exchange between the ranks of a group.
        largest_part: tokens of the largest part of a pack on one rank.
    """

    exchange_share: float
    largest_part: int


@dataclass(frozen=True)
class ImageNumbers:
    """The images of the documents, and what they cost in the first epoch, modelled.

    Attributes:
        num_images, num_documents: images, and documents with any.
        per_pack, most: images in a pack, mean and largest number.
        tower_share: share of the vision tower in the FLOPs; None if its cost is not known.
        tower_imbalance, language_imbalance: imbalance of the vision tower and of the language model, each by itself.
            Ranks are balanced by the sum of both.
        most_waiting: of a stream, documents and bytes after which no other document is read; None for a table.
    """

    num_images: int
    num_documents: int
    per_pack: float
    most: int
    tower_share: float | None = None
    tower_imbalance: float | None = None
    language_imbalance: float | None = None
    most_waiting: tuple[int, int] | None = None

    def line(self) -> str:
        """How many images there are, and what they cost."""
        if self.most_waiting is None:
            return self._counted
        documents, size = self.most_waiting
        waiting = f"at most {documents:,} documents, or {size / 2**20:,.0f} MiB of encoded images, wait on a rank"
        return f"{self._counted}; {waiting}" if self.num_images else waiting

    @property
    def _counted(self) -> str:
        tower = "cost not known, so not balanced"
        if self.tower_share is not None:
            tower = f"{self.tower_share:.1%} of the modelled FLOPs"
        return (
            f"{self.num_images:,} in {self.num_documents:,} documents; {self.per_pack:.1f} in a pack, at most "
            f"{self.most:,}; vision tower: {tower}"
        )


@dataclass(frozen=True)
class ReportNumbers:
    """The attributes of a `PackingReport`, which describes them."""

    strategy: Strategy
    overlong: str
    max_length: int
    batch_size: int
    accumulation: int
    world_size: int
    capacity: int
    num_rows: int | None
    num_documents: int
    num_tokens: int
    num_trained_tokens: int
    num_packs: int | None
    lower_bound: int | None
    efficiency: float | None
    padding_efficiency: float | None
    num_steps: int
    documents_per_step: float | None
    documents_not_reached: int
    ledger: Ledger
    tokens_not_reached: int = 0
    trained_tokens_not_reached: int = 0
    most_documents: int | None = None
    unpacked_loss: float = 1.0
    imbalance: float | None = None
    shared: SharedPacks | None = None
    groups: Groups | None = None
    prefixes: PrefixSavings | None = None
    images: ImageNumbers | None = None
    turns: TurnCounts | None = None
    trained: Trained | None = None
    lengths: LengthHistogram | None = None
    attention: str = "not chosen yet"
    isolation: IsolationReport | None = None
    first_step: str | None = None
    experimental: tuple[str, ...] = ()
    sample: PlanSample | None = field(default=None, repr=False)

    @property
    def sharing(self) -> Groups | None:
        """How ranks share packs, of a table or a stream; None if they do not."""
        return self.shared or self.groups

    @property
    def shared_prefixes(self) -> PrefixSavings | None:
        """What shared prefixes save; None if nothing is shared."""
        shares = self.prefixes is not None and self.prefixes.setting != "off" and self.prefixes.refused is None
        return self.prefixes if shares else None

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None for a stream."""
        return None if self.num_rows is None else self.num_steps

    @property
    def num_cut(self) -> int:
        """Documents that are truncated, split or dropped."""
        ledger = self.ledger
        return sum(count.documents for count in (ledger.truncated, ledger.split, *ledger.dropped.values()))

    @property
    def too_long(self) -> int | None:
        """Documents that are dropped because they do not fit; None without images."""
        count = self.ledger.dropped.get("overlong")
        return None if self.images is None else 0 if count is None else count.documents

    @property
    def lost_trained_share(self) -> float | None:
        """Share of the given trained tokens that are cut, dropped or not reached; None if none was given."""
        lost, of_all = self.ledger.lost_trained_tokens, self.ledger.given.trained_tokens
        return (lost + self.trained_tokens_not_reached) / of_all if of_all else None

    @property
    def warning(self) -> str | None:
        """What to set, if more than 1 % of the trained tokens are lost; else None."""
        lost = self.lost_trained_share
        if lost is None or lost <= MAX_LOST_SHARE:
            return None
        remedies = []
        if self.ledger.lost_trained_tokens:
            instead = ' or set overlong="split"' if self.overlong in ("truncate", "drop") else ""
            remedies.append(f"raise max_length ({self.max_length:,}){instead}")
        if self.trained_tokens_not_reached:
            remedies.append("set dataloader_drop_last=False")
        return f"{lost:.1%} of the trained tokens are lost: {', and '.join(remedies)}"
