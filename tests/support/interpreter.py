"""Imported before flash-linear-attention, mamba_ssm and Liger: their Triton kernels run on the CPU, in its interpreter.

Five things keep them from it (triton 3.9), none of them in what the kernels compute:

- Autotuners measure their configurations on a device. Here they take the smallest.
- The interpreter has Python numbers for counters of loops and scalar arguments, which have no `.to`.
- The functions of libdevice are CUDA code, and return None.
- mamba_ssm enters `torch.cuda.device(...)` around each kernel, and flash-linear-attention asks for the processors of
  the device.
- `import mamba_ssm` imports a CUDA extension. Its files of Triton code are imported without it.
"""

import contextlib
import importlib.util
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import autotuner, interpreter


def _run_the_smallest(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
    config = min(configs, key=lambda config: sum(size for size in config.kwargs.values() if isinstance(size, int)))
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


_source = interpreter.FunctionRewriter._prepare_source


def _with_cast_numbers(self: Any, lines: list[str]) -> str:
    return re.sub(
        r"\b(i_t|eps|offset|gate_multiplier)\.to\(([\w.]+)\)", r"(tl.full([], 0, \2) + \1)", _source(self, lines)
    )


def interpret() -> None:
    """Replace what keeps the kernels from the CPU; for the life of the process."""
    autotuner.Autotuner.run = _run_the_smallest
    libdevice.rsqrt = _rsqrt
    libdevice.tanh = _tanh
    interpreter.FunctionRewriter._prepare_source = _with_cast_numbers
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1)
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is not None:
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
