"""Imported before flash-linear-attention and mamba_ssm: their Triton kernels run on the CPU, in Triton's interpreter.

Four things keep them from it (triton 3.9), none of them in what the kernels compute:

- Autotuners measure their configurations on a device. Here they take the smallest.
- The interpreter has Python ints for counters of loops, which have no `.to`.
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
from triton.runtime import autotuner, interpreter


def _run_the_smallest(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
    config = min(configs, key=lambda each: sum(size for size in each.kwargs.values() if isinstance(size, int)))
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


_source = interpreter.FunctionRewriter._prepare_source


def _with_cast_counters(self: Any, lines: list[str]) -> str:
    return re.sub(r"\bi_t\.to\((tl\.int\d+)\)", r"(tl.full([], 0, \1) + i_t)", _source(self, lines))


def interpret() -> None:
    """Replace what keeps the kernels from the CPU; for the life of the process."""
    autotuner.Autotuner.run = _run_the_smallest
    interpreter.FunctionRewriter._prepare_source = _with_cast_counters
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1)
    spec = importlib.util.find_spec("mamba_ssm")
    assert spec is not None, "mamba_ssm is not installed"
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
