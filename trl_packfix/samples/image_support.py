"""Define what the package asks of the folder `features/images`, and what it does without this folder.

A row has images if it has a column named in `IMAGES` (`checks.py`), as TRL names them. The folder `features/images`
measures and packs such rows. Its subclass of `ImageSupport` overrides all methods. Other modules call the methods on
the object that `image_support()` returns, and never import the folder.

Without the folder, this object is an `ImageSupport`. It refuses to pack rows with images, to measure them and to train
their assistant turns only. All else needs no support, because TRL itself trains unpacked rows with images.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

from ..feature import find_folder
from .checks import IMAGES, columns_of, has_images
from .row import AssistantTurnCounts

T = TypeVar("T")


class ImageSupport:
    """The methods that support rows with images, as they are without the folder `features/images`."""

    def with_named_images(self, dataset: T, name: str) -> T:
        """Return a dataset with a column `images`, if its messages have paths of images; any other object as it is.

        Without the folder every dataset is returned as it is.

        Args:
            dataset: The dataset, or any object that the user gives in its place.
            name: The dataset's name in messages.
        """
        return dataset

    def check_texts(self, dataset: object, name: str, *, per_turn: bool) -> None:
        """Raise ValueError for a table of images and `conversations`, a form of text that TRL's collator cannot read.

        With `per_turn` this form is accepted. Without the folder, nothing is checked.
        """

    def reading_class(self, dataset: object) -> Any:
        """Return the class that makes documents of a dataset with images for packing; None for one without images.

        It is a subclass of `TextReading` (`training/reading.py`).

        Raises:
            ValueError: If the dataset has images, and the folder is missing.
        """
        if has_images(dataset):
            _refuse_images(dataset, "packs its rows", remedy="Set `packing=False`")
        return None

    def read_table(self, dataset: Any, processor: Any, args: Any) -> Any:
        """Measure the rows of a table with images as the trainer does, and return their `RowReader` (`data/reader.py`).

        Raises:
            ValueError: If the folder is missing.
        """
        _refuse_images(dataset, "measures its rows", remedy="Remove the column if the text alone is to be trained")

    def masking_collator(self, collate: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return a collator of rows with images that trains only the assistant turns that a rule selects.

        Args:
            collate: TRL's collator.
            rule: A `TurnRule` (`turns.py`).

        Raises:
            ValueError: If the folder is missing.
        """
        raise ValueError(
            "`assistant_only_loss=True` was given with images, and this installation of trl_packfix is without its "
            "folder `features/images`, which finds the turns of the assistant behind images. Set "
            "`assistant_only_loss=False`, or install trl_packfix anew."
        )

    def count_turns(self, dataset: object, rule: Any) -> AssistantTurnCounts | None:
        """Count the assistant turns of a table with images; None for a stream, and without the column `messages`."""
        return None


def _refuse_images(dataset: object, purpose: str, *, remedy: str) -> NoReturn:
    """Raise ValueError for a dataset with images, which needs the missing folder.

    Args:
        dataset: The dataset.
        purpose: What the folder does, for the message.
        remedy: What to set in place of installing the folder.
    """
    (column, *_) = [name for name in columns_of(dataset) if name in IMAGES]
    raise ValueError(
        f"A dataset with the column `{column}` was given, and this installation of trl_packfix is without its folder "
        f"`features/images`, which {purpose}. {remedy}, or install trl_packfix anew."
    )


@cache
def image_support() -> ImageSupport:
    """Return the support that is installed: of `features/images`, or none."""
    module = find_folder("images.support")
    support: ImageSupport = ImageSupport() if module is None else module.SUPPORT
    return support
