"""Rows with images are packed, trained and proved with the pixels that the processor of a model makes of them."""

from typing import Any


def tower_support() -> Any:
    """Return the `TowerSupport` of this folder. Its modules need torch, so they are imported when it is called."""
    from .towers import Towers

    return Towers()


def image_support() -> Any:
    """Return the `ImageSupport` of this folder."""
    from .support import Images

    return Images()
