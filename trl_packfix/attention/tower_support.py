"""Define what all other modules know of `features/images`: the support for vision towers in a model that takes packs.

A *tower* is a part of a model that reads something else than text, such as images. A model *takes packs* while it has
the attention and the hooks that packed rows of documents need. Towers need a change only for packs with images, for
which `features/images` has a subclass of `TowerSupport`. These modules call its methods:

    forwards.py                  installs hooks on towers while a model takes packs
    isolation/packed_model.py    sets the attention of towers while a model takes packs, unless packs leak with it
    isolation/probed_model.py    runs documents alone with the attention that towers have outside of packs

Without the folder of the feature, `TowerSupport` itself leaves towers as they are. Rows with images are then refused
before a model is loaded (`feature.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from ..feature import find_folder


class TowerSupport:
    """Support for the towers of models. This class leaves them as they are; `features/images` has a subclass.

    Attributes:
        attention_name: the attention that towers get while a model takes packs; "" for none.
    """

    attention_name: str = ""

    def make_hooks(self, guard: Any) -> list[Any]:
        """Return the hooks on the towers of a model (`ModelHooks`).

        Args:
            guard: the hooks on the model itself, which install these hooks (`PackedForwardGuard` in `forwards.py`).
        """
        return []

    def set_attention(self, model: PreTrainedModel, takes_packs: bool) -> None:
        """Give `attention_name` to the towers of a model whose attention the user has not chosen.

        Args:
            takes_packs: whether the model takes packs from now on. False gives the towers their attention outside of
                packs again.
        """

    def has_attention(self, model: PreTrainedModel) -> bool:
        """Return whether a tower of the model has `attention_name`."""
        return False

    @contextmanager
    def own_attention_restored(self, model: PreTrainedModel) -> Iterator[None]:
        """Within this context, towers have the attention that they have outside of packs."""
        had_tower_attention = self.has_attention(model)
        self.set_attention(model, False)
        try:
            yield
        finally:
            if had_tower_attention:
                self.set_attention(model, True)

    def note(self, model: PreTrainedModel, may_replace: bool, why_not: str) -> str:
        """Return what the report says about the towers of a model, to be appended to a line; "" for no towers.

        Args:
            may_replace: whether `attention_name` may replace the attention of towers.
            why_not: the reason if it must not.
        """
        return ""


@cache
def tower_support() -> TowerSupport:
    """Return the support that is installed: of `features/images`, or none."""
    module = find_folder("images.towers")
    support: TowerSupport = TowerSupport() if module is None else module.SUPPORT
    return support
