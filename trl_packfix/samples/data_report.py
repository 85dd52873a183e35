"""The report of `check_data`: which texts and images of a dataset are missing from its tokens, repeated or changed.

`data_proof.py` renders rows with marks in their texts and follows the marks into the tokens. What it finds is a
`Finding` each, in a `DataReport`. `make_samples.py` refuses a dataset or warns by this report before training.
"""

import logging
from dataclasses import dataclass
from typing import Literal

from ..wording import count_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One way in which the tokens of some rows differ from what the rows contain.

    Attributes:
        what: The finding as a predicate whose subject is "rows". It begins with "have ".
        num_rows: Number of rows with this finding.
        rows: Indices of the first rows with this finding.
        cause: Why the tokens differ, as a sentence; may be empty.
        remedy: What the user can set or change, as a sentence; may be empty.
        example: The beginning of a text that is missing; may be empty.
        severity: "error" if training is refused, "warning", "mended" if this package corrects the rows, or "note".
    """

    what: str
    num_rows: int
    rows: tuple[int, ...]
    cause: str = ""
    remedy: str = ""
    example: str = ""
    severity: Literal["error", "warning", "mended", "note"] = "warning"

    @property
    def predicate(self) -> str:
        """The finding as a predicate of its number of rows: "have ...", or "has ..." of one row."""
        return f"has {self.what.removeprefix('have ')}" if self.num_rows == 1 else self.what


@dataclass(frozen=True)
class DataReport:
    """The report of `check_data`: whether every text and image of a dataset is in its tokens exactly once.

    Texts are sorted into kinds, for example "`content` of the first message of the role `user`". Some rows of each kind
    are rendered with a mark in the text, and the mark is looked for in the tokens. `print(report)` shows one line with
    the counts and all findings, and one message for each finding that is not a note.

    Attributes:
        name (`str`):
            Name of the dataset in messages, for example "train".
        num_rows (`int`):
            Number of rows that were read: all rows of a table, or the first rows of a stream.
        of_stream (`bool`):
            Whether the dataset is a stream.
        num_kinds (`int`):
            Number of kinds of texts. The kind of a text is its column and key, and the role and the place of its
            message. It is 0 for a dataset of plain text.
        num_rendered (`int`):
            Number of rows that were rendered with marks.
        num_untried (`int`):
            Number of kinds whose mark could not be followed into the tokens, so nothing is known of them.
        findings (`tuple[Finding, ...]`):
            The differences between rows and tokens. Each [`Finding`] has `what`, `num_rows`, the first `rows`, `cause`,
            `remedy`, `example` and `severity` ("error": training is refused; "warning", "mended" or "note").

    Example:

    ```python
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    report = check_data(dataset, tokenizer)
    print(report)
    report.raise_if_lost()
    ```
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
        """Whether no finding is a warning or an error."""
        return all(finding.severity in ("mended", "note") for finding in self.findings)

    @property
    def _findings_to_show(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity != "note"]

    def line(self) -> str:
        """Return the result, the counts and the findings as one line.

        >>> DataReport("train", 1200, num_kinds=3, num_rendered=4).line()
        'every text of 1,200 rows is in the tokens once (3 kinds of texts, 4 rows rendered)'
        >>> DataReport("train", 1200, num_kinds=3, num_rendered=1, findings=(Finding("have images", 1, (7,)),)).line()
        '1,200 rows (3 kinds of texts, 1 row rendered); 1 row has images'
        """
        rows = f"{'the first ' if self.of_stream else ''}{count_of(self.num_rows, 'row')}"
        counts = f"{count_of(self.num_kinds, 'kind')} of texts, {count_of(self.num_rendered, 'row')} rendered"
        counts += f"; {count_of(self.num_untried, 'kind')} not tried" if self.num_untried else ""
        # At least one kind must have been tried. Nothing is claimed of the others, of which `counts` tells the number
        is_proved = self.complete and self.num_rendered and self.num_untried < self.num_kinds
        tried = " that was tried" if self.num_untried else ""
        if not self.num_kinds:
            text = f"{rows} of plain text"
        elif is_proved:
            text = f"every text{tried} of {rows} is in the tokens once ({counts})"
        else:
            text = f"{rows} ({counts})"
        clauses = [f"{count_of(finding.num_rows, 'row')} {finding.predicate}" for finding in self.findings]
        return "; ".join([text, *clauses])

    def message(self, finding: Finding) -> str:
        """Return a finding as sentences: which rows have it, its cause, and what the user can do."""
        count = f"{finding.num_rows:,} of {'the first ' if self.of_stream else ''}{self.num_rows:,} rows"
        first = f" (the first are {[*finding.rows]})" if finding.num_rows < self.num_rows else ""
        example = f", for example {finding.example!r}" if finding.example else ""
        finding_text = f"{count} of the {self.name} dataset {finding.predicate}{example}{first}."
        return " ".join(sentence for sentence in (finding_text, finding.cause, finding.remedy) if sentence)

    def __str__(self) -> str:
        return "\n".join([self.line(), *map(self.message, self._findings_to_show)])

    def raise_if_lost(self) -> None:
        """Refuse data that would be trained wrongly.

        Raises:
            ValueError: If a finding is an error. `data_proof.py` decides which are: images, all turns of one role or
                the weights of turns are ignored, or the text has lists or dictionaries as Python prints them.
        """
        error = next((finding for finding in self.findings if finding.severity == "error"), None)
        if error is not None:
            raise ValueError(self.message(error))

    def warn(self) -> None:
        """Log a warning for each finding that is not a note."""
        for finding in self._findings_to_show:
            logger.warning("%s", self.message(finding))
