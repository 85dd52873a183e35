"""What became of the data of a dataset, as a value: what is left out of its tokens, repeated or changed."""

import logging
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """Something that is not in the tokens as it was given."""

    what: str  # with its verb: "have ..."
    num_rows: int  # that have it
    rows: tuple[int, ...]  # the first of them
    cause: str = ""
    remedy: str = ""
    example: str = ""  # the beginning of a text that is left out
    severity: Literal["error", "warning", "mended", "note"] = "warning"


@dataclass(frozen=True)
class DataReport:
    """Whether everything that the rows of a dataset give is in the tokens, once.

    Attributes:
        num_rows: rows that were read: all of a table, the first of a stream.
        num_kinds: kinds of texts, by where they stand, the role of their message and its place.
        num_rendered: rows that were rendered with marks.
        num_untried: kinds of texts of which no mark could be followed.
        findings: what is left out, repeated or changed: `what`, `num_rows`, the first `rows`, `cause`, `remedy`, and
            `severity`, one of "error" (training is refused), "warning", "mended" and "note".
    """

    name: str
    num_rows: int
    of_stream: bool = False
    num_kinds: int = 0
    num_rendered: int = 0
    num_untried: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is left out, repeated or changed."""
        return all(finding.severity in ("mended", "note") for finding in self.findings)

    @property
    def _said(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity != "note"]

    def line(self) -> str:
        """
        >>> DataReport("train", 1200, num_kinds=3, num_rendered=4).line()
        'every text of 1,200 rows is in the tokens once (3 kinds of texts, 4 rows rendered)'
        """
        rows = f"{'the first ' if self.of_stream else ''}{self.num_rows:,} rows"
        counts = f"{self.num_kinds:,} kinds of texts, {self.num_rendered:,} rows rendered"
        counts += f"; {self.num_untried:,} kinds not tried" if self.num_untried else ""
        is_proved = self.complete and self.num_rendered and self.num_untried < self.num_kinds
        text = f"every text of {rows} is in the tokens once ({counts})" if is_proved else f"{rows} ({counts})"
        text = text if self.num_kinds else f"{rows} of plain text"
        return "; ".join([text, *(f"{finding.num_rows:,} rows {finding.what}" for finding in self.findings)])

    def message(self, finding: Finding) -> str:
        """Say what rows gave, why it is not trained as it was given, and what to set."""
        count = f"{finding.num_rows:,} of {'the first ' if self.of_stream else ''}{self.num_rows:,} rows"
        first = f" (the first are {[*finding.rows]})" if finding.num_rows < self.num_rows else ""
        example = f", for example {finding.example!r}" if finding.example else ""
        said = f"{count} of the {self.name} dataset {finding.what}{example}{first}."
        return " ".join(part for part in (said, finding.cause, finding.remedy) if part)

    def __str__(self) -> str:
        return "\n".join([self.line(), *map(self.message, self._said)])

    def raise_if_lost(self) -> None:
        """Raise a ValueError if training would be wrong.

        It would be if images, a whole side of the conversations or marks "not trained" are not read, or if lists or
        dictionaries are in the text as Python writes them.
        """
        error = next((finding for finding in self.findings if finding.severity == "error"), None)
        if error is not None:
            raise ValueError(self.message(error))

    def warn(self) -> None:
        """Warn of everything that is left out, repeated or changed."""
        for finding in self._said:
            logger.warning("%s", self.message(finding))
