"""Remember the proofs of a model in files beside the dataset, so that the next start does not prove the same again.

A proof is remembered if it passed on the model as it was given: without a repair, and without images. The name of its
file is a hash of what it depends on:

- the code of this package (every file), and the versions of all packages that are loaded or installed, kernels among
  them;
- the modules of the model, their code, hooks and simple attributes, parameters, configs, attention, engine, device;
- the files of the classes of these modules, and the files beside them, because a version says nothing about a package
  whose code is edited in place.

A function that was replaced while the program runs, or that a class calls from another folder without a version, cannot
be seen here. The comparison of the first step, which is made at every start, runs it.
"""

import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..data.cache import PREFIX, SUFFIX, read_arrays, write_arrays
from ..isolation.isolation_report import IsolationReport
from ..isolation.probed_model import gather_values
from ..samples.row import PREPARATION_SOURCE_HASH

SIMPLE = (bool, int, float, str, type(None))


class RememberedProofs:
    """Proofs in a folder. They may depend on `settings` of the run that the model does not show."""

    def __init__(self, folder: Path, settings: object):
        self.folder = folder
        self.settings = settings

    def recall(
        self, wrapped: nn.Module, prove: Callable[[], IsolationReport], *, model: nn.Module, case: object
    ) -> IsolationReport:
        """The report of an earlier start on the same `model`, settings and `case`, or that of `prove`.

        All ranks must call it: where one does not remember, all prove.
        """
        key = hashlib.sha256(repr([case, self.settings, *_proof_key_parts(wrapped, model)]).encode()).hexdigest()
        file = self.folder / f"{PREFIX}-proof-{key[:16]}{SUFFIX}"
        arrays = read_arrays(file)
        if all(gather_values(arrays is not None)) and arrays is not None:
            return IsolationReport(**json.loads(arrays["report"].tobytes()))
        report = prove()
        if report.passed:
            text = json.dumps(asdict(replace(report, proved_on=f"{date.today():%d %b %Y}")))
            write_arrays(file, {"report": np.frombuffer(text.encode(), np.uint8)})
        return report


def _proof_key_parts(wrapped: nn.Module, model: Any) -> Iterator[Any]:
    """What a proof depends on, without an address or a time."""
    device = next(model.parameters()).device.type
    versions = {name: _package_version(name) for name in [*sys.modules] if "." not in name}
    yield PREPARATION_SOURCE_HASH, sorted((name, version) for name, version in versions.items() if version is not None)
    # A kernel may be loaded only when it first runs. The names of these folders hold the name and the version
    yield sorted({folder.name for place in sys.path for folder in Path(place).glob("*-info")})
    yield device, dist.is_initialized() and dist.get_world_size()
    # torch.get_float32_matmul_precision() raises once one of these was set, as `tf32=True` does
    yield [each.matmul.fp32_precision for each in (torch.backends.cuda, torch.backends.mkldnn)]
    yield torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    yield torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    yield model.config.to_json_string(use_diff=False)
    kinds = {type(module) for module in wrapped.modules()}
    yield sorted((f"{kind.__module__}.{kind.__qualname__}", repr(_code_content(kind.forward))) for kind in kinds)
    yield sorted(_hashes_of_code(kinds))
    for name, module in model.named_modules():
        yield name, sorted((key, value) for key, value in vars(module).items() if isinstance(value, SIMPLE))
        yield type(module).__qualname__, _code_content(vars(module).get("forward"))
    for module in wrapped.modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        yield [_code_content(getattr(hook, "func", hook)) for hook in hooks]  # of a partial, the function
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tuple(values.shape), str(values.dtype), values.requires_grad


def _hashes_of_code(kinds: set[type[nn.Module]]) -> set[str]:
    """Hash each Python file in the folders that define these classes and their bases."""
    hashes = set()
    folders = set()
    for base in {base for kind in kinds for base in kind.__mro__}:
        try:
            folders.add(Path(inspect.getfile(base)).parent)
        except (OSError, TypeError):  # built in, or typed in a notebook
            hashes.add(repr([_code_content(value) for value in vars(base).values()]))
    for file in {file for folder in folders for file in folder.glob("*.py")}:
        with suppress(OSError):  # it belongs to another user
            hashes.add(hashlib.sha256(file.read_bytes()).hexdigest())
    return hashes


def _package_version(package: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that will take it away
        version = getattr(sys.modules.get(package), "__version__", None)
    return version if isinstance(version, str) else None


def _code_content(function: Any) -> Any:
    """What a function does, without the places of its lines; None of anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else function
    if not isinstance(code, CodeType):
        return None
    constants = [_constant_content(each) for each in code.co_consts]
    return code.co_code.hex(), code.co_names, code.co_varnames, constants


def _constant_content(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code_content(value)
    # The order of a set of texts differs between processes
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
