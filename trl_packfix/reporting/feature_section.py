"""The section of a report about a feature, a capability in a folder of its own: how much is computed, and a line.

`Feature.report_section` (`trl_packfix/feature.py`) makes the section of a run before training, and `Feature.estimate`
makes the section for `trl-packfix plan`. The only feature with a section so far is shared prefixes: documents that
begin alike compute their common beginning once (`features/prefixes/savings.py`). The *unpacked run* is the training
that TRL would do with the same settings and without packing.
"""

from typing import Protocol, Self


class FeatureSection(Protocol):
    """What a feature does in the first epoch. A feature implements this in a class of its own folder."""

    @property
    def is_used(self) -> bool:
        """Whether the run uses the feature; False if it is off, or refused for the model."""
        ...

    @property
    def flops(self) -> float | None:
        """The share of the modelled FLOPs that is computed; None if it is not known."""
        ...

    def refuse(self, reason: str) -> Self:
        """Return this section for a run whose model cannot have the feature, for a reason that is shown."""
        ...

    def line(self, num_documents: int, unpacked_documents: int, step_size_settings: str) -> str | None:
        """Return the line of the report; None if there is nothing to say.

        Args:
            num_documents: documents of the run.
            unpacked_documents: documents of an optimizer step of the unpacked run.
            step_size_settings: the settings that give a step more documents.
        """
        ...

    def independent_documents(self, unpacked_documents: int) -> tuple[float, str, str] | None:
        """Return how many independent documents a step has. Documents that begin alike count as one.

        Args:
            unpacked_documents: documents of an optimizer step of the unpacked run.

        Returns:
            (number of independent documents, beginning of a line that says so, end of this line that names another
            setting); None if all documents of a step are independent.
        """
        ...


class ContentSection(Protocol):
    """What documents hold beside tokens, such as images; `RowReader.report_section` makes it."""

    @property
    def imbalances_text(self) -> str:
        """The end of a line on the imbalance of ranks, with the imbalances of its parts; "" if they are not known."""
        ...

    def line(self) -> str:
        """Return the text of the line of the report."""
        ...
