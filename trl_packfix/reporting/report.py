"""The report of a run, and how a user sees it: lines, a picture, a file, numbers for loggers, and the model card.

`build.py` makes a `PackingReport` before training starts. The trainer prints it, saves it beside the model, logs its
numbers (`metrics`) and writes it into the model card (`complete_card`). Its lines are made in `lines.py`, its numbers
in `columns.py`, and its picture in `pictures.py`.

A *pack* is the documents that pass through the model together; its *capacity* is the largest number of tokens that it
may hold. A *trained* token counts in the loss. The *unpacked run* is the training that TRL would do with the same
settings and without packing. A *micro-step* is the micro-batches with the same index on all ranks. The *ledger* counts
documents and tokens that are kept, cut or dropped.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .columns import COLUMNS
from .lines import LINES
from .numbers import PackingNumbers, finite
from .page import REPORT_FILE, Log, summarise
from .pictures import plot_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_WIDTH = 100  # characters of a line, if the output is no terminal


@dataclass(frozen=True)
class PackingReport(PackingNumbers):
    """What packing did with the training set. It is made once, before the first step.

    The fields are those of `PackingNumbers`. Counts are numbers of documents, packs or tokens.

    - `efficiency`: tokens / (packs x capacity).
    - `padding_efficiency`: tokens / (tokens and padding) of unpacked batches of the same batch size.
    - `lower_bound`: every plan needs at least so many packs. A plan with this number of packs may not exist.
    - `num_steps`: optimizer steps of an epoch; for a stream, optimizer steps of the run.
    - `max_steps`: optimizer steps of the run on a table, if the setting is set; else None.
    - `documents_not_reached`, `tokens_not_reached`: documents and tokens that `dataloader_drop_last` drops in the first
      epoch. The ledger does not count them, because it holds for every epoch.
    - `most_documents`: the most documents in one micro-batch of the first epoch.
    - `imbalance`: modelled time of the first epoch / modelled time if ranks never waited.
    - `shared`: with sequence parallelism, how ranks share packs (of a stream: in the steps so far); else None.
    - `prefixes`: with `share_prefixes`, the section on the share of the tokens that is computed; else None. The share
      is known for "family". For "pack" it is None, because it depends on tokens, and none is read. `trl-packfix plan`
      estimates it for any setting.
    - `images`: the images of the documents, and what they cost; None for a dataset without images.
    - `turns`: with `per_turn`, the number of conversations and assistant turns of which the rows are made; else None.
    - `trained`: what the loss is computed on, and by which setting.
    - `data`: whether everything that the rows give is in the tokens, exactly once; None for tokenised rows.
    - `model`: name and class of the model, and how many of its parameters are trained.
    - `unpacked_loss`: TRL's unpacked loss / packed loss; gradients have the same ratio. It is below 1 for
      models such as GPT-2, where TRL counts the first label of each document in the divisor of the loss.
    - `experimental`: settings of this run with which several GPUs have not been tested yet.
    - `newer_libraries`: installed libraries that are newer than the versions with which this package was tested.
    - `sample`: what pictures show of the first epoch (`PlanSample`): some packs; the modelled costs of the first
      micro-steps on each rank; and the fills, a histogram of tokens / capacity over the micro-batches.

    The length of a stream is not known (`num_rows` is None). The counts of a stream are of the documents read so far,
    in all passes, and the report is made again when training ends.

    >>> from datasets import Dataset
    >>> from trl_packfix import packed_dataloader
    >>> from trl_packfix.reporting.build import make_report
    >>> loader = packed_dataloader(Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]}), max_length=7)
    >>> report = make_report(loader.batch_sampler.planner, loader.dataset.reader)  # as in the trainer
    >>> report.num_packs, report.efficiency, report.num_steps
    (2, 1.0, 2)
    """

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `sample`, as JSON values."""
        # `sample` is taken out first, because `asdict` would copy its packs
        values = asdict(replace(self, sample=None)) | {"ledger": self.ledger.to_dict()}
        values["newer_libraries"] = list(self.newer_libraries)
        del values["sample"]
        return finite(values)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw packs as strips, the mask of one pack, the lengths, and the cost of each rank.

        This needs matplotlib (`pip install matplotlib`).

        Args:
            path: file to which the picture is saved, in the format of its suffix; None saves nothing.

        Raises:
            ValueError: the report is of a stream, or was read from a file.
        """
        return plot_report(self, path)

    def save(self, directory: str | Path) -> Path:
        """Write `packing_report.json` into the directory and return its path."""
        path = Path(directory) / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.saved_values(), indent=2) + "\n")
        return path

    def saved_values(self) -> dict[str, Any]:
        """Return the values of `to_dict`, the lines, and the costs and fills of the sample: what `page.py` reads."""
        costs = None if self.sample is None else self.sample.costs
        fills = None if self.sample is None else self.sample.fills
        return self.to_dict() | {"costs": costs, "fills": fills, "lines": self.lines()}

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, text) of each line."""
        return [line for make_lines in LINES for line in make_lines(self)]

    def show(self, console: Console | None = None) -> None:
        """Print the report, as a table on a terminal and as plain lines elsewhere."""
        show_lines("Packing report", self.lines(), console)


def show_lines(title: str, lines: list[tuple[str, str]], console: Console | None = None) -> None:
    """Print lines of (label, text), as a table on a terminal and as plain lines elsewhere."""
    console = console or Console()
    if console.is_terminal:
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # long paths and names of modules are wrapped and not cut
        for label, text in lines:
            table.add_row(label, Text(text))  # `Text` has no markup: "[@+ ]" is a histogram and no style
        console.print(table)
        return
    width = max(len(label) for label, _ in lines)
    print(title)
    for label, text in lines:
        for row in wrap(text, FILE_WIDTH - width - 4, break_long_words=False, break_on_hyphens=False):
            print(f"  {label:<{width}}  {row}")
            label = ""


def metrics(report: PackingReport) -> dict[str, float]:
    """Return the numbers of a report for a logger, by their names there, without the ones that are not known.

    Before training, all counts of a stream are 0, which means that they are not known.
    """
    values = {column.metric: column.value(report) for column in COLUMNS if column.metric}
    unknown_values = (None,) if report.num_documents else (None, 0)
    return {f"packing/{name}": value for name, value in values.items() if value not in unknown_values}


def is_on_hub(name: str) -> bool:
    """Return whether the name of a model or dataset is a name on the hub, and not a file or folder here."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists()


def complete_card(
    card: Path, model: Any, datasets: Sequence[str], *, report: PackingReport | None, log: Log = ()
) -> None:
    """Write into TRL's model card what the model was made of, and what packing did.

    TRL's template links local models and files as if they were on the hub. A card may be published, so here only the
    last part of a local path is written, without a link.

    Args:
        card: the model card, a Markdown file.
        model: the model, whose config names the model that was fine-tuned.
        datasets: names of the datasets.
        report: the report, whose short form becomes a section of the card; None if the run was not packed.
        log: the log of the trainer.
    """
    base = _link_to_hub(model.config.name_or_path, "model") if model.config.name_or_path else "a model made in Python"
    data = f" on {', '.join(_link_to_hub(name, 'dataset') for name in datasets)}" if datasets else ""
    sentence = f"This model is a fine-tuned version of {base}{data}.\n"
    text = re.sub(r"This model is a fine-tuned version of .*\n", lambda _: sentence, card.read_text(encoding="utf-8"))
    # TRL writes None if `hub_model_id` is not set
    text = text.replace('model="None"', f'model="{card.parent.name}"')
    if report is not None:
        before, heading, after = text.partition("### Framework versions")
        # (label, text) of a few lines. The sentence above names the model
        summary = summarise(report, report.lines(), log)
        rows = "\n".join(f"| {label} | {line.replace('|', '/')} |" for label, line in summary if label != "model")
        proved = ", which was tested on this model before its first step: see `isolation`"
        text = (
            f"{before}## Packing\n\nTrained with trl_packfix on packs, several documents in one row, in which no "
            f"document sees another{'' if report.isolation is None else proved}.\n\n| | |\n|---|---|\n{rows}\n\n"
            f"All numbers are in `{REPORT_FILE}`.\n\n{heading}{after}"
        )
    card.write_text(text, encoding="utf-8")


def _link_to_hub(name: str, kind: str) -> str:
    """Return the Markdown for the name of a model or dataset (`kind`): a link if it is on the hub."""
    if not is_on_hub(name):
        return f"`{Path(name).name}` (local {kind})"
    return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name})"
