"""A model and its packs: attention is chosen, isolation is proved, and what leaks is unpacked."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from ..attention.choice import select_attention, set_attention
from ..attention.forwards import base_model, carry_boundaries, mark_packed_forwards
from ..compat import gather_lm_head_with_model
from .check import check_isolation
from .probe import Probe
from .repair import Repair
from .report import IsolationReport
from .search import RepairSearch, agreed
from .unpacking import UnpackedForward

OnLeak = Literal["repair", "raise", "unpack"]


class PackedModel:
    """What packed batches of `model` run on.

    Attributes:
        attention: the implementation chosen, and why.
        isolation: the verdict of the last probe; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device_type: str,
        max_length: int | None,
        on_leak: OnLeak = "repair",
        enforce_flash_attention: bool = True,
    ):
        self.model, self.max_length, self.on_leak = model, max_length, on_leak
        self.wants_flash = enforce_flash_attention and device_type == "cuda"  # the model may not be there yet
        self.attention = select_attention(model, enforce_flash_attention, dtype, device_type=device_type)
        self.isolation: IsolationReport | None = None
        self._guard = mark_packed_forwards(model)
        self._search: RepairSearch | None = None
        self._unpacked: UnpackedForward | None = None

    @property
    def is_proved(self) -> bool:
        """Whether the last probe found documents isolated and equal to themselves alone."""
        return self.isolation is not None and self.isolation.isolated and self.isolation.equal

    @property
    def is_unpacked(self) -> bool:
        """Whether the backbone sees documents as rows of padded batches."""
        return self._unpacked is not None

    @property
    def repaired(self) -> list[Repair]:
        """What was repaired, and how; empty where nothing had to be."""
        return [] if self._search is None else self._search.repairs

    def prove(self, wrapped: nn.Module) -> IsolationReport:
        """Probe the model as it is `wrapped`; on a leak do what `on_leak` says, and probe again."""
        gather_lm_head_with_model(base_model(self.model))
        carry_boundaries(base_model(self.model))
        self.isolation = found = self._check(wrapped)
        if not self.is_proved and self.on_leak == "repair" and self._search is None and self._unpacked is None:
            self._repair(wrapped)
        if not self.is_proved and self.on_leak != "raise" and self._unpacked is None:
            self._unpack()
            self.isolation = self._check(wrapped)
            reason = f"UNPACKED, documents as rows of padded batches, because {found.summary()}"
            self.attention = replace(self.attention, name=self.attention.previous, is_flash=False, reason=reason)
        return self.isolation

    def _check(self, wrapped: nn.Module) -> IsolationReport:
        found = check_isolation(wrapped, self.max_length)
        agreed((found.isolated, found.equal))
        return replace(found, repaired=self.repaired)

    def _repair(self, wrapped: nn.Module) -> None:
        """Repair on the attention chosen, else on the model's own, whose masks may say more than boundaries."""
        for name in dict.fromkeys((self.attention.name, self.attention.previous)):
            if name != self.attention.name:
                set_attention(self.model, name)
            probe = Probe(wrapped)
            search = RepairSearch(probe, self._guard, self.max_length)
            with probe.undisturbed():
                found = search.run()
            if found.isolated and found.equal:
                self._search = search
                self.isolation = replace(found, repaired=search.repairs)
                if name != self.attention.name:
                    reason = f"the model's own, for {self.attention.name} cannot say what its masks say"
                    self.attention = replace(self.attention, name=name, is_flash="flash" in name, reason=reason)
                    if self.wants_flash:
                        warnings.warn(
                            f"attention {name!r} on packed batches is not flash attention: {reason}", stacklevel=2
                        )
                return
            search.remove()

    def _unpack(self) -> None:
        self._guard.remove()
        set_attention(self.model, self.attention.previous)
        self._unpacked = UnpackedForward(self.model)

    def attend(self) -> None:
        """Put the attention chosen on the model, after `rest`."""
        self._guard.at_rest = None
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.name)

    def rest(self) -> None:
        """Give the model its own attention back, for what is not packed, and refuse packs until `attend`.

        In train mode the attention chosen refuses what is not packed, and the model's own may not read boundaries.
        """
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.previous)
            self._guard.at_rest = self.attention.previous

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While it runs the model attends; then it rests again, if it did."""
        rested = self._guard.at_rest is not None
        self.attend()
        try:
            yield
        finally:
            if rested:
                self.rest()

    def release(self) -> None:
        """Give the model back as it was."""
        self._guard.remove()
        for installed in (self._search, self._unpacked):
            if installed is not None:
                installed.remove()
        self.rest()
