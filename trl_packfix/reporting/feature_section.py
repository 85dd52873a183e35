"""Define what the report asks of the section of a feature, such as how much the feature saves, and its line.

A feature is a part of the package that a run may use, in a folder of `features/`. `Feature.report_section`
(`trl_packfix/feature.py`) makes the section of a run before training. For `trl-packfix plan`, `estimate_savings` of the
folder makes it. The only feature with a section so far is shared prefixes: documents that begin alike compute their
common beginning once (`features/prefixes/savings.py`). The protocol names what every section has. A section also has
numbers of its own, such as `families_per_step`, which `columns.py` reads by the names of their attributes. The
*unpacked run* is the training that TRL would do with the same settings and without packing.
"""

from typing import Protocol, Self


class FeatureSection(Protocol):
    """What a feature does in the first epoch. A feature has a subclass in its own folder."""

    @property
    def is_used(self) -> bool:
        """Whether the run uses the feature; False if it is off, or refused for the model."""
        ...

    @property
    def flops(self) -> float | None:
        """Modelled FLOPs with the feature / modelled FLOPs without it; None if the share is not known."""
        ...

    def refuse(self, reason: str) -> Self:
        """Return the section of a run whose model cannot use the feature; `line` shows the reason."""
        ...

    def line(self, num_documents: int, unpacked_documents: int, step_size_settings: str) -> str | None:
        """Return the line of the report; None if there is nothing to say.

        Args:
            num_documents: documents of the run.
            unpacked_documents: documents of an optimizer step of the unpacked run.
            step_size_settings: the settings that give a step more documents, as text, such as
                "gradient_accumulation_steps".
        """
        ...

    def independent_documents(self, unpacked_documents: int) -> tuple[float, str, str] | None:
        """Return how many independent documents a step has. Documents that begin alike count as one.

        Args:
            unpacked_documents: documents of an optimizer step of the unpacked run.

        Returns:
            The number of independent documents, and two parts of the line "against unpacked". The line begins with the
            first part, which tells this number, and ends with the second, which names a setting that the user may
            choose in place of another learning rate. For example, `(12.5, "12.5 families per step (unpacked: 32
            documents): ", '; or share_prefixes="pack"')`. None if all documents of a step are independent.
        """
        ...


class ContentSection(Protocol):
    """What documents hold beside tokens, such as images. `report_section` of a reader of rows makes it."""

    @property
    def imbalances_text(self) -> str:
        """The end of the line on the imbalance of ranks, with that of each part of the model, such as its vision tower.

        It is "" if they are not known.
        """
        ...

    def line(self) -> str:
        """Return the text of the line of the report."""
        ...
