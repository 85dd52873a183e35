"""What the report asks of the part of a feature: how much is computed, and a line of text.

`Feature.report_part` (`feature.py`) makes the part of a run, and `trl-packfix plan` an estimate of it.
"""

from typing import Protocol, Self


class FeaturePart(Protocol):
    """What a feature does in the first epoch."""

    @property
    def is_used(self) -> bool:
        """Whether packs of the run have the feature."""
        ...

    @property
    def flops(self) -> float | None:
        """The share of the modelled FLOPs that is computed; None if it is not known."""
        ...

    def refuse(self, reason: str) -> Self:
        """Return the part of a run whose model cannot have the feature."""
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
        """Say how many independent documents a step has, if they are fewer than its documents; else None.

        Returns:
            Their number; a text that says so, which begins a line; and another setting, which ends it.
        """
        ...
