"""Show what is being done, and for how long, where people wait before the first step: on rank 0 only."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch.utils.cpp_extension import get_default_build_root
from transformers import TrainingArguments

from ..attention.models import base_model
from ..isolation.packed_model import PackedModel

USUAL_FORWARDS = 12  # of a probe of a dense decoder with nothing to repair (tests/training/test_progress.py)


@contextmanager
def status_shown(args: TrainingArguments, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` and the elapsed time on stderr while the block runs; the yielded function replaces the text.

    Nothing is shown on other ranks, and with `disable_tqdm`. A file gets one line, when the block ends.
    """
    with Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=args.disable_tqdm or args.process_index != 0,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)
        progress.update(task, total=1, completed=1)


@contextmanager
def proof_status(args: TrainingArguments, packed_model: PackedModel) -> Iterator[None]:
    """Show the forwards that the probe and the search for a repair have run so far."""
    model = base_model(packed_model.model)
    with status_shown(args, f"Proving isolation on {type(model).__name__}") as show:
        if args.torch_compile:  # a hook would be compiled, and its removal compile the model again
            yield
            return
        count = 0

        def count_forward(*_: object) -> None:
            nonlocal count
            count += 1
            kinds = packed_model.repaired
            what = f"Repairing {', '.join(repair.module for repair in kinds)}" if kinds else "Proving isolation"
            about = f" of about {USUAL_FORWARDS}" if count <= USUAL_FORWARDS and not kinds else ""
            show(f"{what} on {type(model).__name__}: forward {count}{about}")

        handle = model.register_forward_pre_hook(count_forward)
        try:
            yield
        finally:
            handle.remove()


def say_deepspeed_communicates(args: TrainingArguments) -> None:
    """Say what DeepSpeed compiles when ranks on CPUs first meet."""
    uses_deepspeed = args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if uses_deepspeed and not torch.accelerator.is_available():
        _say_compiles("deepspeed_shm_comm", "communication of ranks on this machine")


def say_deepspeed_offloads(accelerator: Accelerator) -> None:
    """Say what DeepSpeed compiles when training begins with optimizer states in the machine's memory."""
    plugin = accelerator.state.deepspeed_plugin
    key = "zero_optimization.offload_optimizer.device"
    if plugin is not None and plugin.hf_ds_config.get_value(key) == "cpu":
        _say_compiles("cpu_adam", "AdamW on the CPU")


def _say_compiles(extension: str, what: str) -> None:
    """One line on stderr, unless it was compiled before: DeepSpeed itself prints nothing."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if os.environ.get("LOCAL_RANK", "0") == "0" and not any(folder.glob(f"**/{extension}.so")):
        text = f"DeepSpeed compiles `{extension}` ({what}), once on each machine. This may take minutes."
        print(text, file=sys.stderr, flush=True)
