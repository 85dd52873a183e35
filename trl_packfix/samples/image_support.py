"""What the package can do with rows that have images, as its wings see them.

A row has images if it has a column named in `IMAGES` (`checks.py`), as TRL names them. `features/images` measures,
packs and proves such rows. It is met through an `ImageSupport` before there is a run; a run then has objects of the
feature (`training/reading.py`).

Without the folder of the feature, `ImageSupport` itself refuses what would need it. TRL trains unpacked rows with
images by itself.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

from ..feature import find_folder
from .checks import IMAGES, columns_of, has_images
from .row import AssistantTurnCounts

T = TypeVar("T")


class ImageSupport:
    """Support for rows with images. This class refuses them; `features/images` has a subclass."""

    def with_named_images(self, dataset: T, name: str) -> T:
        """Return a dataset with the images that its messages name in a column `images`; other objects as they are."""
        return dataset

    def check_texts(self, dataset: object, name: str, *, per_turn: bool) -> None:
        """Refuse rows with images whose texts TRL's collator cannot read."""

    def reading_class(self, dataset: object) -> Any:
        """Return the subclass of `TextReading` that reads a dataset with images; None for a dataset without images."""
        if has_images(dataset):
            _refuse(dataset, "packs its rows. Set `packing=False`")
        return None

    def read_table(self, dataset: Any, processor: Any, args: Any) -> Any:
        """Return the `RowReader` of a table of rows with images, which are measured as the trainer does."""
        _refuse(dataset, "measures its rows. Remove the column if the text alone is to be trained")

    def masking_collator(self, collate: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return TRL's collator of rows with images, or one that trains the assistant turns that a rule selects."""
        raise ValueError(
            "`assistant_only_loss=True` was given with images, and this installation of trl_packfix is without its "
            "folder `features/images`, which finds the turns of the assistant behind images. Set "
            "`assistant_only_loss=False`, or install trl_packfix anew."
        )

    def count_turns(self, dataset: object, rule: Any) -> AssistantTurnCounts | None:
        """Count the assistant turns of a table with images; None for a stream, and without the column `messages`."""
        return None


def _refuse(dataset: object, what_it_does_and_remedy: str) -> NoReturn:
    (column, *_) = [name for name in columns_of(dataset) if name in IMAGES]
    raise ValueError(
        f"A dataset with the column `{column}` was given, and this installation of trl_packfix is without its folder "
        f"`features/images`, which {what_it_does_and_remedy}, or install trl_packfix anew."
    )


@cache
def image_support() -> ImageSupport:
    """Return the support that is installed: of `features/images`, or none."""
    folder = find_folder("images")
    support: ImageSupport = ImageSupport() if folder is None else folder.image_support()
    return support
