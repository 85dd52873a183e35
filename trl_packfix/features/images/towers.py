"""Give other folders what they need for the vision towers of models in packs with images: a `TowerSupport`.

`attention/tower_support.py` says who calls it, and what each method does. While a model takes packs, its towers have
the hooks of `tower_hooks.py`. Towers that would compute one image after the other have the attention of
`tower_attention.py`, too.
"""

from typing import Any

from transformers import PreTrainedModel

from ...attention.forwards import ModelHooks
from ...attention.tower_support import TowerSupport
from ...compat import set_config_attention
from .tower_attention import REPLACED_ATTENTION, TOWER_ATTENTION, tower_configs
from .tower_hooks import TowerHooks


class Towers(TowerSupport):
    """Support for vision towers in packs with images."""

    attention_name = TOWER_ATTENTION

    def make_hooks(self, guard: Any) -> list[ModelHooks]:
        """Return the hooks on the towers of a model.

        Args:
            guard: a `PackedForwardGuard`, which holds the model and installs the hooks while it takes packs.
        """
        return [TowerHooks(guard)]

    def set_attention(self, model: PreTrainedModel, takes_packs: bool) -> None:
        """Set our attention on towers that have `sdpa` (`REPLACED_ATTENTION`), or set `sdpa` again.

        Args:
            takes_packs: whether the model takes packs from now on.
        """
        for config in tower_configs(model):
            if config._attn_implementation in (TOWER_ATTENTION, REPLACED_ATTENTION):
                set_config_attention(config, TOWER_ATTENTION if takes_packs else REPLACED_ATTENTION)

    def has_attention(self, model: PreTrainedModel) -> bool:
        """Return whether a tower of the model has our attention."""
        return any(config._attn_implementation == TOWER_ATTENTION for config in tower_configs(model))

    def note(self, model: PreTrainedModel, may_replace: bool, why_not: str) -> str:
        """Return what the report says about the attention of the towers, as the end of a line; "" for nothing.

        Args:
            may_replace: whether our attention may replace the attention of towers.
            why_not: the reason if it must not.
        """
        names = {config._attn_implementation for config in tower_configs(model)}
        if may_replace and names & {REPLACED_ATTENTION, TOWER_ATTENTION}:
            return f"; vision tower on {TOWER_ATTENTION}, all images of a pack together"
        # Towers call every attention without "flash" in its name once per image (`tower_attention.py`)
        slow_names = [name for name in sorted(names) if name is not None and "flash" not in name]
        if not slow_names:
            return ""
        return (
            f"; vision tower on {slow_names[0]}, image by image: {why_not} "
            "(attn_implementation='flash_attention_2' for the whole model avoids it)"
        )


SUPPORT = Towers()
