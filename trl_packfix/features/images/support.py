"""Offer what modules outside of `features` need for rows with images. No method needs a trainer.

`samples/image_support.py` says what each method does. Modules that need torch or TRL are imported when a method is
called.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from datasets import Dataset

from ...samples.checks import has_images, has_transform
from ...samples.image_support import ImageSupport
from ...samples.row import AssistantTurnCounts
from ...samples.texts import forms_of_table

T = TypeVar("T")


class Images(ImageSupport):
    """Support for rows with images."""

    def with_named_images(self, dataset: T, name: str) -> T:
        """Move the images that messages name, such as by a path, into a column `images`."""
        from .named_images import with_named_images

        return with_named_images(dataset, name)

    def check_texts(self, dataset: object, name: str, *, per_turn: bool) -> None:
        """Refuse a table with images and `conversations`, which TRL's collator of images does not read.

        With the setting `per_turn` it is not refused: each assistant turn becomes a `prompt` and a `completion` before
        TRL's collator reads it.
        """
        if not isinstance(dataset, Dataset) or not has_images(dataset) or has_transform(dataset):
            return  # the rows of a stream, or behind a transform, are checked when they are read
        # `forms_of_table` yields the columns of each form of text, such as ("conversations",), and which rows have it.
        # Plain text plays no part, so its column has no name here
        forms = [columns for columns, has_form in forms_of_table(dataset, text_field="") if has_form.any()]
        if not per_turn and ("conversations",) in forms:
            raise ValueError(
                f"The {name} dataset of {len(dataset)} rows has images and `conversations`. The collator of images "
                "reads `messages` with `role` and `content`. Convert the rows: "
                '`dataset.map(trl.maybe_convert_to_chatml, remove_columns="conversations")`.'
            )

    def reading_class(self, dataset: object) -> Any:
        """Return the class by which the trainer reads a dataset with images; None for other datasets."""
        if not has_images(dataset):
            return None
        from .reading import ImageReading

        return ImageReading

    def read_table(self, dataset: Any, processor: Any, args: Any) -> Any:
        """Return the reader of a table of rows with images, without a trainer."""
        from .reading import read_table

        return read_table(dataset, processor, args)

    def masking_collator(self, collate: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return a collator, made from TRL's, that trains only the assistant turns that a `TurnRule` selects."""
        from .measures import masking_collator

        return masking_collator(collate, rule)  # type: ignore[arg-type]  # the collator of TRL for images

    def count_turns(self, dataset: object, rule: Any) -> AssistantTurnCounts | None:
        """Count the assistant turns of a table with images by a `TurnRule`, before its rows are tokenised."""
        from .measures import count_turns_of_images

        return count_turns_of_images(dataset, rule)


SUPPORT = Images()
