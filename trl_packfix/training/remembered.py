"""Remember the proofs of a model in files beside the dataset, so that the next start need not repeat them.

A proof is a test before training that documents in a pack do not influence each other on this model. Its result is an
`IsolationReport`. `recall_proof` returns the report that an earlier start has saved. If there is none, it runs the
test, and saves the report if the test passed.

`PackedModel` calls `recall_proof` in place of the test if the training set is a table of text whose documents are
cached, unless the model was repaired (`isolation/repair.py`) or unpacked (`isolation/unpacking.py`). The name of the
file of a report is a hash of everything that the proof depends on:

- the code of this package (every file), and the versions of all packages that are loaded or installed;
- the modules of the model, their code, hooks and simple attributes, parameters, configs, attention, device, and the
  engine (DDP, DeepSpeed, FSDP);
- the files of the classes of these modules, and the files beside them, because a version says nothing about a package
  whose code is edited in place.

The hash misses two kinds of changes: a function other than `forward` that is replaced while the program runs, and a
changed file of a package without a version, in another folder than those of the classes of the modules. But every start
also compares its first step with unpacked training (`first_step.py`), and this comparison runs such code as it is.
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

SIMPLE_TYPES = (bool, int, float, str, type(None))  # types of attributes of modules that enter the hash


def recall_proof(
    wrapped: nn.Module,
    prove: Callable[[], IsolationReport],
    *,
    folder: Path,
    settings: object,
    model: nn.Module,
    case: object,
) -> IsolationReport:
    """Return the report of an earlier start, or run the proof, return its report and save it if it passed.

    All ranks must call it. If a rank has no saved report, all ranks run the proof.

    Args:
        wrapped: the model as the engine has wrapped it.
        prove: runs the proof.
        folder: the folder of the saved proofs.
        settings: what all proofs of the run depend on, such as the engine; with an equal `repr` in every process.
        model: the model without a wrapper.
        case: what this proof depends on beside the model and `settings`, such as the dtype and the longest document;
            with an equal `repr` in every process.
    """
    key = hashlib.sha256(repr([case, settings, *_proof_key_parts(wrapped, model)]).encode()).hexdigest()
    file = folder / f"{PREFIX}-proof-{key[:16]}{SUFFIX}"
    arrays = read_arrays(file)
    report_exists_on_ranks = gather_values(arrays is not None)  # the values of all ranks
    if arrays is not None and all(report_exists_on_ranks):
        return IsolationReport(**json.loads(arrays["report"].tobytes()))
    report = prove()
    if report.passed:
        text = json.dumps(asdict(replace(report, proved_on=f"{date.today():%d %b %Y}")))
        write_arrays(file, {"report": np.frombuffer(text.encode(), np.uint8)})
    return report


def _proof_key_parts(wrapped: nn.Module, model: Any) -> Iterator[Any]:
    """Yield what a proof depends on, in forms that have equal texts in every process: no addresses and no times."""
    # Code and versions. `PREPARATION_SOURCE_HASH` is a hash of every file of this package
    device = next(model.parameters()).device.type
    versions = {name: _package_version(name) for name in [*sys.modules] if "." not in name}
    yield PREPARATION_SOURCE_HASH, sorted((name, version) for name, version in versions.items() if version is not None)
    # A kernel that is loaded only when it first runs has no version yet, so the names of the folders of all installed
    # packages enter the hash, which contain name and version
    yield sorted({folder.name for directory in sys.path for folder in Path(directory).glob("*-info")})
    # Device, ranks and precision. The precisions of CUDA and of the CPU are read separately, because
    # `torch.get_float32_matmul_precision()` raises an error if they differ, as with `tf32=True`.
    yield device, dist.is_initialized() and dist.get_world_size()
    yield [backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    yield torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    yield torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    # The model
    yield model.config.to_json_string(use_diff=False)
    classes = {type(module) for module in wrapped.modules()}
    yield sorted((f"{cls.__module__}.{cls.__qualname__}", repr(_code_content(cls.forward))) for cls in classes)
    yield sorted(_hashes_of_code(classes))
    for name, module in model.named_modules():
        yield name, sorted((key, value) for key, value in vars(module).items() if isinstance(value, SIMPLE_TYPES))
        yield type(module).__qualname__, _code_content(vars(module).get("forward"))
    for module in wrapped.modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        yield [_code_content(getattr(hook, "func", hook)) for hook in hooks]  # `func` is the function of a `partial`
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tuple(values.shape), str(values.dtype), values.requires_grad


def _hashes_of_code(classes: set[type[nn.Module]]) -> set[str]:
    """Return a hash of each Python file in the folders that define these classes and their bases."""
    hashes = set()
    folders = set()
    bases = {base for cls in classes for base in cls.__mro__}
    for base in bases:
        try:
            folders.add(Path(inspect.getfile(base)).parent)
        except (OSError, TypeError):  # the class is built in, or was typed in a notebook
            hashes.add(repr([_code_content(value) for value in vars(base).values()]))
    for folder in folders:
        for file in folder.glob("*.py"):
            with suppress(OSError):  # the file may belong to another user
                hashes.add(hashlib.sha256(file.read_bytes()).hexdigest())
    return hashes


def _package_version(package: str) -> str | None:
    """Return the version of a package that is loaded; None if it has no `__version__`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some packages warn that they will remove `__version__`
        version = getattr(sys.modules.get(package), "__version__", None)
    return version if isinstance(version, str) else None


def _code_content(function: Any) -> Any:
    """Return the content of a function or a code object, without line numbers; None for any other value."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else function
    if not isinstance(code, CodeType):
        return None
    constants = [_constant_content(constant) for constant in code.co_consts]
    return code.co_code.hex(), code.co_names, code.co_varnames, constants


def _constant_content(value: Any) -> Any:
    """Return the content of a constant of a code object, which may be the code of an inner function."""
    if isinstance(value, CodeType):
        return _code_content(value)
    # A set of texts has another order in each process
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
