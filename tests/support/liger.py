"""Liger's entry point, played without its kernels: it changes a model where Liger does, on any device."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import liger


class PlayedLiger:
    """Stands in for `_apply_liger_kernel_to_instance`: gives norms a forward, and the model one with Liger's own loss.

    Attributes:
        calls: how often a norm with the new forward was called.
        given: the settings of the last model that was changed, such as `rope` and `swiglu`.
        mixes: whether norms add the mean over all rows, so that documents of a pack leak.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.given: dict[str, Any] | None = None
        self.mixes = False

    def apply(self, model: nn.Module, **kernels: Any) -> None:
        """Change a model."""
        self.given = kernels
        for norm in [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]:
            norm.forward = types.MethodType(self._norm, norm)
        if kernels.get("fused_linear_cross_entropy", True):
            model.forward = lambda *args, **kwargs: pytest.fail("the loss of Liger was called")

    def _norm(self, norm: Any, states: Tensor) -> Tensor:
        self.calls += 1
        out = torch.nn.functional.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
        return out + 0.1 * states.mean(1, keepdim=True) if self.mixes else out


@contextmanager
def liger_played() -> Iterator[PlayedLiger]:
    """Put a `PlayedLiger` in the place of the package, which need not be installed, within this context."""
    entry = PlayedLiger()
    kernels: Any = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = entry.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
        patch.setitem(sys.modules, "liger_kernel.transformers", kernels)
        patch.setattr(liger, "is_liger_kernel_available", lambda: True)
        yield entry
