"""Show on stderr what is done before the first step, where users wait for it.

A *proof* tests that documents in a pack do not influence each other on the user's model. If they do, modules of the
model are *repaired*, if possible.

`status_shown` shows a text and the elapsed time while the dataset is read or a model is proved; `proof_status` adds how
many forwards the proof has run. The `announce_deepspeed_*` functions print a line before DeepSpeed compiles an
extension, which takes minutes and prints nothing. The first rank shows a status, and the first rank of each machine
prints a line.
"""

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

# Forwards that a proof runs on a dense decoder with nothing to repair (tests/training/test_progress.py)
USUAL_FORWARDS = 12


@contextmanager
def status_shown(args: TrainingArguments, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` and the elapsed time on stderr in this context, and yield a function that replaces the text.

    Nothing is shown with `disable_tqdm`, nor on ranks above 0. If stderr is a file, it gets one line at the end.
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
        progress.update(task, total=1, completed=1)  # stops the clock


@contextmanager
def proof_status(args: TrainingArguments, packed_model: PackedModel) -> Iterator[None]:
    """Show in this context how many forwards the proof and the search for a repair of a model have run."""
    model = base_model(packed_model.model)
    with status_shown(args, f"Proving isolation on {type(model).__name__}") as show_status:
        count = 0

        def count_forward(*_: object) -> None:
            nonlocal count
            count += 1
            action = "Proving isolation"
            usual_count = f" of about {USUAL_FORWARDS}" if count <= USUAL_FORWARDS else ""
            if packed_model.repaired:  # modules that now get one document at a time
                action = f"Repairing {', '.join(repair.module for repair in packed_model.repaired)}"
                usual_count = ""
            show_status(f"{action} on {type(model).__name__}: forward {count}{usual_count}")

        handle = model.register_forward_pre_hook(count_forward)
        try:
            yield
        finally:
            handle.remove()


def announce_deepspeed_communication(args: TrainingArguments) -> None:
    """Print a line if DeepSpeed is going to compile its communication for CPUs, when ranks first exchange data."""
    uses_deepspeed = args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if uses_deepspeed and not torch.accelerator.is_available():
        _announce_compilation("deepspeed_shm_comm", "communication of ranks on this machine")


def announce_deepspeed_offloading(accelerator: Accelerator) -> None:
    """Print a line if DeepSpeed is going to compile its optimizer for states in CPU memory, when training begins."""
    plugin = accelerator.state.deepspeed_plugin
    key = "zero_optimization.offload_optimizer.device"
    if plugin is not None and plugin.hf_ds_config.get_value(key) == "cpu":
        _announce_compilation("cpu_adam", "AdamW on the CPU")


def _announce_compilation(extension: str, purpose: str) -> None:
    """Print a line on stderr that DeepSpeed compiles an extension, unless it was compiled before."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if os.environ.get("LOCAL_RANK", "0") == "0" and not any(folder.glob(f"**/{extension}.so")):
        text = f"DeepSpeed compiles `{extension}` ({purpose}), once on each machine. This may take minutes."
        print(text, file=sys.stderr, flush=True)
