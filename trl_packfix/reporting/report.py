"""The report: what packing did with the data, in numbers to act on."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..data.documents import Ledger
from ..data.turns import TurnCounts
from ..isolation.isolation_report import IsolationReport, finite
from ..planning.strategies import STRATEGIES, Strategy
from .sample import LengthHistogram, PlanSample
from .savings import PrefixSavings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH_SHARING = 0.95  # share of the tokens; the report names a setting that would compute less
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

    def histogram(self) -> str:
        """Micro-steps by degree.

        >>> Groups(16384, 8, {1: 30, 8: 10}).histogram()
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
        time_over_bound: time over a lower bound of the time of these steps, with any groups.
        largest_part: tokens of the largest part of a pack on one rank.
    """

    exchange_share: float
    time_over_bound: float
    largest_part: int


@dataclass(frozen=True)
class PackedImages:
    """The images of the documents, and what they cost in the first epoch, modelled.

    Attributes:
        num_images, num_documents: images, and documents with any.
        per_pack, most: images in a pack, mean and largest number.
        tower_share: share of the vision tower in the FLOPs; None if its cost is not known.
        tower_imbalance, language_imbalance: imbalance of the vision tower and of the language model, each by itself.
            Ranks are balanced by the sum of both.
    """

    num_images: int
    num_documents: int
    per_pack: float
    most: int
    tower_share: float | None = None
    tower_imbalance: float | None = None
    language_imbalance: float | None = None

    def line(self) -> str:
        """How many images there are, and what they cost."""
        tower = "cost not known, so not balanced"
        if self.tower_share is not None:
            tower = f"{self.tower_share:.1%} of the modelled FLOPs"
        return (
            f"{self.num_images:,} in {self.num_documents:,} documents; {self.per_pack:.1f} in a pack, at most "
            f"{self.most:,}; vision tower: {tower}"
        )


@dataclass(frozen=True)
class PackingReport:
    """What packing did with the training set. It is made once, before the first step.

    Units are documents, packs and tokens.

    - `efficiency`: tokens / (packs x capacity).
    - `padding_efficiency`: tokens / (tokens and padding) of unpacked batches of the same batch size.
    - `lower_bound`: no plan needs fewer packs. A plan with this number of packs may not exist.
    - `documents_not_reached`, `tokens_not_reached`: dropped by `dataloader_drop_last` in the first epoch. The ledger
      does not count them: it is the same in every epoch.
    - `most_documents`: the most documents in one micro-batch of the first epoch.
    - `imbalance`: modelled time of the first epoch / modelled time if ranks never waited.
    - `imbalance_bound`: no schedule of the same steps has a lower imbalance; None with sequence parallelism.
    - `shared`: with sequence parallelism, how packs are shared between ranks; else None.
    - `groups`: the same of a stream, for the steps so far; None for a table.
    - `prefixes`: with `share_prefixes`, the share of the tokens that is computed, as far as the plan says it; else
      None. `trl-packfix plan` estimates it for any setting.
    - `images`: the images of the documents, and what they cost; None for a dataset without.
    - `turns`: with `per_turn`, how many conversations and assistant turns the rows are; else None.
    - `unpacked_loss`: TRL's unpacked loss, and each of its gradients, as a share of the packed one. It is below 1 for
      models such as GPT-2, where TRL counts the first label of each document in the divisor of the loss.

    The length of a stream is not known (`num_rows` is None). Its counts are those of the documents read so far, in all
    passes, and the report is made again when training ends.

    >>> from datasets import Dataset
    >>> from trl_packfix import packed_dataloader
    >>> from trl_packfix.reporting.build import make_report
    >>> loader = packed_dataloader(Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]}), max_length=7)
    >>> report = make_report(loader.batch_sampler.planner, "truncate", loader.dataset.reader)  # as in the trainer
    >>> report.num_packs, report.efficiency, report.num_steps
    (2, 1.0, 2)
    """

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
    imbalance_bound: float | None = None
    shared: SharedPacks | None = None
    groups: Groups | None = None
    prefixes: PrefixSavings | None = None
    images: PackedImages | None = None
    turns: TurnCounts | None = None
    lengths: LengthHistogram | None = None
    attention: str = "not chosen yet"
    isolation: IsolationReport | None = None
    sample: PlanSample | None = field(default=None, repr=False)

    def to_dict(self) -> dict:
        """All attributes except the sample, as JSON values."""
        values = asdict(replace(self, sample=None)) | {"ledger": self.ledger.to_dict()}
        del values["sample"]
        return finite(values)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw packs as strips, the mask of one pack, lengths, and the cost of each rank; save it if `path` is given.

        Needs matplotlib (`pip install matplotlib`).

        Raises:
            ValueError: the report is of a stream, or was read from a file.
        """
        from .pictures import plot_report

        return plot_report(self, path)

    def save(self, directory: str | Path) -> Path:
        """Write `packing_report.json` into the directory and return its path."""
        path = Path(directory) / "packing_report.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return path

    @property
    def lost_trained_share(self) -> float | None:
        """Share of the given trained tokens that are cut, dropped or not reached; None if none was given."""
        given = self.ledger.given.trained_tokens
        return (self.ledger.lost_trained_tokens + self.trained_tokens_not_reached) / given if given else None

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

    def lines(self) -> list[tuple[str, str]]:
        """Label and text of each line."""
        return (self._stream_lines() if self.num_rows is None else self._table_lines()) + self._common_lines()

    def _table_lines(self) -> list[tuple[str, str]]:
        tokens = self.num_tokens
        packs = "" if self.num_packs is None else f" -> {self.num_packs:,} packs ({self.strategy})"
        rows = [
            ("documents", f"{self.num_documents:,} of {self.num_rows:,} rows{packs}"),
            ("micro-batch", self._micro_batch()),
            ("tokens", f"{tokens:,}, of which {self.num_trained_tokens:,} trained"),
        ]
        if self.turns is not None:
            rows.insert(0, ("conversations", self.turns.line()))
        if self.images is not None:
            rows.append(("images", self.images.line()))
        if self.lengths is not None:
            rows.append(("lengths", self.lengths.line()))
        if self.num_packs is not None:
            rows.append(
                (
                    "efficiency",
                    f"{self.efficiency:.2%} of the packs filled; padded batches: {self.padding_efficiency:.2%}; lower "
                    f"bound of packs: {self.lower_bound:,}",
                )
            )
        else:
            rows.append(("efficiency", f"no padding; padded batches are filled to {self.padding_efficiency:.2%}"))
        rows.append(
            (
                "steps",
                f"{self.num_steps:,} per epoch, about {self.documents_per_step:,.1f} documents each "
                f"(accumulation {self.accumulation}, ranks {self.world_size})",
            )
        )
        if (text := self.prefixes_text()) is not None:
            rows.append(("common prefixes", text))
        rows.append(("against unpacked", self._against_unpacked()))
        if self.unpacked_loss != 1:
            rows.append(
                (
                    "unpacked loss",
                    f"{self.unpacked_loss:.3f} of the packed one, and so are its gradients: for this model TRL also "
                    "counts the first label of each document in the divisor, although it is not a target; with SGD or "
                    "max_grad_norm its steps are smaller",
                )
            )
        if self.shared is not None:
            rows.append(
                (
                    "sequence parallelism",
                    f"micro-steps by degree (ranks that share a pack): {self.shared.histogram()}; the largest part of "
                    f"a rank has {self.shared.largest_part:,} tokens",
                )
            )
            rows.append(
                (
                    "modelled time",
                    f"{self.shared.time_over_bound:.3f} of the lower bound for the documents of these steps; "
                    f"{self.shared.exchange_share:.1%} of it in the exchange, imbalance {self.imbalance:.3f}",
                )
            )
        elif self.world_size > 1:
            parts = ""
            if self.images is not None and self.images.tower_imbalance is not None:
                parts = (
                    f"; of the language model alone {self.images.language_imbalance:.3f}, of the vision tower alone "
                    f"{self.images.tower_imbalance:.3f}"
                )
            rows.append(
                (
                    "imbalance",
                    f"{self.imbalance:.3f} modelled (1 is perfect); lower bound for the documents of these steps: "
                    f"{self.imbalance_bound:.3f}{parts}",
                )
            )
        return rows

    def prefixes_text(self) -> str | None:
        """What common prefixes save, and how many independent families a step has; None if nothing is worth a line."""
        prefixes = self.prefixes
        if prefixes is None:
            return None
        if prefixes.refused is not None:
            return f"not shared: {prefixes.refused}"
        sample = "" if prefixes.num_packs is None else f" (estimated from {prefixes.num_packs} packs)"
        if prefixes.images is not None:
            return f"{prefixes.rows:.2f} of the tokens and {prefixes.images:.2f} of the images are computed{sample}"
        if prefixes.rows is None:
            return "computed once in each pack; the log's computed_share is the share of the tokens that is computed"
        documents = prefixes.num_documents or self.num_documents
        families = f"{documents:,} documents in {prefixes.num_families:,} families"
        if prefixes.setting == "family":
            assert prefixes.families_per_step is not None
            text = (
                f"{prefixes.rows:.2f} of the tokens are computed, {families}; an optimizer step has about "
                f"{prefixes.families_per_step:,.1f} of them"
            )
            wanted = self.batch_size * self.accumulation * self.world_size
            if prefixes.families_per_step < wanted:
                settings = "gradient_accumulation_steps"
                settings += " or per_device_train_batch_size" if self.shared is None else ""
                text += (
                    f", and unpacked {wanted:,} documents: for as many independent ones, raise {settings} "
                    f"{wanted / prefixes.families_per_step:.1f} times"
                )
            return text
        in_families = ""
        if prefixes.in_families is not None and prefixes.in_families < WORTH_SHARING:
            neighbours = "" if prefixes.num_documents is None else ", neighbours in the table, as an estimate"
            in_families = f'"family" {prefixes.in_families:.2f} ({families}{neighbours})'
        if prefixes.setting == "pack":
            text = f"{prefixes.rows:.2f} of the tokens are computed{sample}"
            return text + (f"; with share_prefixes={in_families}" if in_families else "")
        assert prefixes.in_packs is not None
        would = [f'"pack" {prefixes.in_packs:.2f} of the tokens{sample}'] if prefixes.in_packs < WORTH_SHARING else []
        would += [in_families] if in_families else []
        return f"not shared; share_prefixes would compute: {', '.join(would)}" if would else None

    def _micro_batch(self) -> str:
        groups = self.shared or self.groups
        if groups is not None:
            return groups.micro_batch(self.max_length)
        return (
            f"{self.capacity:,} tokens at most: per_device_train_batch_size {self.batch_size} x max_length "
            f"{self.max_length:,}"
        )

    def _stream_lines(self) -> list[tuple[str, str]]:
        num_packs = self.accumulation * self.world_size // (1 if self.groups is None else self.groups.smallest_degree)
        rows = [
            ("documents", "a stream of unknown length; packed in arrival order, read again from its start at its end"),
            ("micro-batch", self._micro_batch()),
            (
                "steps",
                f"{self.num_steps:,} (max_steps), packs in each: {num_packs} "
                f"(accumulation {self.accumulation}, ranks {self.world_size})",
            ),
        ]
        if self.groups is not None and self.groups.micro_steps:
            rows.append(
                (
                    "sequence parallelism",
                    f"micro-steps by degree (ranks that share a pack): {self.groups.histogram()}",
                )
            )
        if self.num_packs:
            read = self.ledger.given
            rows.append(
                ("read", f"{read.documents:,} documents, {read.tokens:,} tokens ({read.trained_tokens:,} trained)")
            )
            rows.append(
                (
                    "trained",
                    f"{self.num_documents:,} documents, {self.num_tokens:,} tokens ({self.num_trained_tokens:,} "
                    f"trained) in {self.num_packs:,} packs",
                )
            )
            rows.append(("efficiency", f"{self.efficiency:.2%} of the packs filled"))
        return rows

    def _common_lines(self) -> list[tuple[str, str]]:
        """Lines of every report: what was lost, the attention, repairs and isolation."""
        ledger, rows = self.ledger, []
        if ledger.truncated.documents:
            rows.append(
                (
                    "truncated",
                    f"{ledger.truncated.documents:,} documents lost {ledger.truncated.tokens:,} tokens "
                    f"({ledger.truncated.trained_tokens:,} trained)",
                )
            )
        if ledger.split.documents:
            rows.append(("split", f"{ledger.split.documents:,} documents into {ledger.fragments:,}"))
        for reason, count in ledger.dropped.items():
            rows.append((f"dropped, {reason}", f"{count.documents:,} documents, {count.tokens:,} tokens"))
        if self.documents_not_reached:
            lost = f"{self.documents_not_reached:,} documents, {self.tokens_not_reached:,} tokens"
            rows.append(("not reached", f"{lost} per epoch (dataloader_drop_last)"))
        if self.warning is not None:
            rows.append(("warning", self.warning))
        rows.append(("attention", self.attention))
        if self.isolation is not None:
            if self.isolation.repaired:
                repairs = "; ".join(str(repair) for repair in self.isolation.repaired)
                rows.append(("repaired", f"{repairs}: these modules see each document separately, with some padding"))
            rows.append(("isolation", _isolation_text(self.isolation)))
        return rows

    def _against_unpacked(self) -> str:
        """What packing changes in the optimisation, and what to do about it."""
        documents = self.batch_size * self.accumulation * self.world_size
        steps = -(-self.num_documents // documents)
        if STRATEGIES[self.strategy].keeps_steps:
            same = "the same" if self.unpacked_loss == 1 else "the same but for the loss"
            return f"{same}: {documents:,} documents per step, {steps:,} steps per epoch; no setting has to change"
        assert self.documents_per_step is not None  # it is known for a table
        ratio = self.documents_per_step / documents
        if self.prefixes is not None and self.prefixes.families_per_step is not None:
            return self._families_against_unpacked(documents, steps, ratio, self.prefixes.families_per_step)
        if ratio < 1.1:  # a learning rate 1.05 times as high
            return (
                f"about {documents:,} documents per step, {self.num_steps:,} steps per epoch instead of {steps:,}: no "
                "setting has to change"
            )
        # `minibatch` plans by documents, so ranks cannot share its packs.
        instead = ', or set packing_strategy="minibatch" and change nothing' if self.shared is None else ""
        return (
            f"{ratio:.1f} times the documents per step (unpacked: {documents:,}) and {self.num_steps:,} steps per "
            f"epoch instead of {steps:,}: raise learning_rate about {ratio**0.5:.1f} times (the square root; Adam) and "
            f"divide settings in steps (warm-up, save, eval, logging) by {ratio:.1f}{instead}"
        )

    def _families_against_unpacked(self, documents: int, steps: int, ratio: float, families: float) -> str:
        independent = families / documents
        rate = "keep learning_rate"
        if independent > 1.1:
            rate = f"raise learning_rate about {independent**0.5:.1f} times (the square root of the families; Adam)"
        return (
            f"{ratio:.1f} times the documents per step, in about {families:,.1f} families (unpacked: {documents:,} "
            f"documents), and {self.num_steps:,} steps per epoch instead of {steps:,}: {rate}, and divide settings in "
            f'steps (warm-up, save, eval, logging) by {ratio:.1f}; share_prefixes="pack" brings no documents together'
        )

    def show(self, console: Console | None = None) -> None:
        """Print the report, as a table on a terminal and as plain lines elsewhere."""
        show_lines("Packing report", self.lines(), console)


def show_lines(title: str, lines: list[tuple[str, str]], console: Console | None = None) -> None:
    """Print labels and texts, as a table on a terminal and as plain lines elsewhere."""
    console = console or Console()
    if console.is_terminal:
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # a path or the name of a module is wrapped, never cut
        for label, text in lines:
            table.add_row(label, Text(text))  # no markup: "[@+ ]" is a histogram
        console.print(table)
        return
    width = max(len(label) for label, _ in lines)
    print(title)
    for label, text in lines:
        print(f"  {label:<{width}}  {text}")


def _isolation_text(isolation: IsolationReport) -> str:
    if isolation.error is not None:
        return f"NOT POSSIBLE: the model refuses a pack: {isolation.error}"
    if not isolation.isolated:
        return f"LEAK: a document moves another by {isolation.max_change:.1e} (rounding: {isolation.tolerance:.1e})"
    gradient = ", no gradient crosses" if isolation.max_gradient == 0 else ""
    if not isolation.equal:
        return f"WRONG: documents in a pack differ from themselves alone by {isolation.max_difference:.1e}"
    text = (
        f"proved on this model: documents do not move each other (largest change {isolation.max_change:.1e}, rounding "
        f"explains {isolation.tolerance:.1e}){gradient}; each equals itself alone"
    )
    if isolation.unreachable:
        text += f"; not tested, because beyond max_length: {', '.join(isolation.unreachable)}"
    return text


def metrics(report: PackingReport) -> dict[str, float]:
    """The numbers for a logger, by their names there. Unknown numbers are omitted."""
    groups = report.shared or report.groups
    found = {
        "documents": report.num_documents,
        "packs": report.num_packs,
        "lower_bound": report.lower_bound,
        "efficiency": report.efficiency,
        "padding_efficiency": report.padding_efficiency,
        "documents_per_step": report.documents_per_step,
        "steps_per_epoch": None if report.num_rows is None else report.num_steps,
        "imbalance": report.imbalance,
        "exchange_share": None if report.shared is None else report.shared.exchange_share,
        "time_over_bound": None if report.shared is None else report.shared.time_over_bound,
        "rows_computed": None if report.prefixes is None or report.prefixes.refused else report.prefixes.rows,
        "families_per_step": None if report.prefixes is None else report.prefixes.families_per_step,
        "images_per_pack": None if report.images is None else report.images.per_pack,
        "tower_imbalance": None if report.images is None else report.images.tower_imbalance,
        "language_imbalance": None if report.images is None else report.images.language_imbalance,
        "lost_trained_share": report.lost_trained_share,
        "smallest_degree": None if groups is None else groups.smallest_degree,
    }
    return {f"packing/{name}": value for name, value in found.items() if value is not None}


def add_to_card(card: Path, report: PackingReport) -> None:
    """Add a section to a model card: that the model was trained on packs, how, and the result of the leak probe."""
    rows = "\n".join(f"| {label} | {text.replace('|', '/')} |" for label, text in report.lines())
    proof = (
        "" if report.isolation is None else ", which was tested on this model before its first step: see `isolation`"
    )
    section = (
        "## Packing\n\nTrained with trl_packfix on packs, several documents in one row, in which no document sees "
        f"another{proof}.\n\n| | |\n|---|---|\n{rows}\n\n"
    )
    before, mark, after = card.read_text(encoding="utf-8").partition("### Framework versions")
    card.write_text(f"{before}{section}{mark}{after}", encoding="utf-8")
