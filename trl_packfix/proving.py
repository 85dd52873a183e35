"""A model and its packs: attention is chosen, isolation is proved, and what leaks is unpacked."""

from dataclasses import replace

import torch
from torch import nn

from .attention import base_model, mark_packed_forwards, select_attention, set_attention
from .compat import gather_lm_head_with_model
from .config import SFTConfig
from .isolation import IsolationReport, check_isolation
from .repair import UnpackedForward


class PackedModel:
    """What packed batches of `model` run on.

    Attributes:
        attention: the implementation chosen, and why.
        isolation: the verdict of the last probe; None before the first.
    """

    def __init__(self, model: nn.Module, args: SFTConfig, dtype: torch.dtype):
        self.model, self.args = model, args
        self.attention = select_attention(model, args.enforce_flash_attention, dtype)
        self.isolation: IsolationReport | None = None
        self._guard = mark_packed_forwards(model)
        self._unpacked: UnpackedForward | None = None

    @property
    def is_proved(self) -> bool:
        """Whether the last probe found documents isolated and equal to themselves alone."""
        return self.isolation is not None and self.isolation.isolated and self.isolation.equal

    def prove(self, wrapped: nn.Module) -> IsolationReport:
        """Probe the model as it is `wrapped`; on a leak, with `on_leak="unpack"`, unpack it and probe again."""
        gather_lm_head_with_model(base_model(self.model))
        self.isolation = found = check_isolation(wrapped, self.args.max_length)
        if not self.is_proved and self.args.on_leak == "unpack" and self._unpacked is None:
            self._guard.remove()
            set_attention(self.model, self.attention.previous)
            self._unpacked = UnpackedForward(self.model)
            self.isolation = check_isolation(wrapped, self.args.max_length)
            reason = f"UNPACKED, documents as rows of padded batches, because {found.summary()}"
            self.attention = replace(self.attention, name=self.attention.previous, is_flash=False, reason=reason)
        return self.isolation

    def release(self) -> None:
        """Give the model back as it was."""
        self._guard.remove()
        if self._unpacked is not None:
            self._unpacked.remove()
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.previous)
