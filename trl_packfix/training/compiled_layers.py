"""Compile the decoder layers of a model one by one, for `torch_compile=True` with packing.

All layers of a kind share one graph, so torch compiles one layer and not the whole model. Embedding, LM head, loss and
the trainer's own code stay as they are, so nothing in them interrupts a graph. Under gradient checkpointing the
recomputation of a layer is in its graph.

Layers are compiled after the first optimizer step. Before it, temporary hooks (`CheckAdapterGradients`) and the
forwards of the proofs would make torch compile again, until it reaches its limit and compiles nothing more. For the
same reason later proofs run uncompiled layers, and when training ends or fails, the trainer calls `CompileLayers.undo`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention.models import backbone, base_model
from ..compat import count_compiled_graphs, undo_compilation
from .config import SFTConfig
from .trainer_view import TrainerView


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the decoder of a model, as transformers marks them; [] if it marks none."""
    return [layer for layer in backbone(base_model(model)).modules() if isinstance(layer, GradientCheckpointingLayer)]


def describe_compilation(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return the line of the report before training; None without `torch_compile`."""
    if not args.torch_compile:
        return None
    if is_deepspeed_zero3_enabled():
        return "no layer is compiled: under ZeRO-3 hooks gather the weights of a layer, which interrupts its graph"
    num_layers = len(decoder_layers(model))
    if num_layers == 0:
        return f"no layer is compiled: {type(base_model(model)).__name__} has no layers that transformers marks"
    return f"{num_layers} layers, each by itself, after the first optimizer step"


def layers_uncompiled(args: TrainingArguments) -> AbstractContextManager[None]:
    """Return a context in which layers run as if they were not compiled.

    Proofs need it: compiled layers call no hooks that were added after the compilation, and other shapes would be
    compiled for a single forward.
    """
    return torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext()


class CompileLayers(TrainerCallback):
    """Compiles the decoder layers after the first optimizer step, and says after the second what torch compiled."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self._layers: list[nn.Module] = []
        self._num_graphs_before = 0
        self._is_done = False

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        """Note whether there is anything to compile."""
        self._is_done = not self._trainer.args.torch_compile or is_deepspeed_zero3_enabled()

    def on_step_end(self, *arguments: object, **kwargs: object) -> None:
        """Compile after the first step of this training, and complete the report after the second."""
        if self._is_done:
            return
        trainer = self._trainer
        if self._layers:  # the second step, which ran the compiled layers
            self._is_done = True
            self._say(count_compiled_graphs() - self._num_graphs_before)
            return
        self._layers = decoder_layers(trainer.model)
        self._is_done = not self._layers
        self._num_graphs_before = count_compiled_graphs()
        compile_layers(self._layers, trainer.args)

    def _say(self, num_graphs: int) -> None:
        """Print what torch compiled, and write it into the report."""
        trainer = self._trainer
        num_layers = len(self._layers)
        num_compiled = num_layers if num_graphs else 0  # torch silently skips what it cannot compile
        text = f"{num_compiled} of {num_layers} layers compiled, {num_graphs} graph{'' if num_graphs == 1 else 's'}"
        trainer.accelerator.print(f"torch_compile: {text}")
        assert trainer.packing_report is not None  # made with the training loader
        trainer.packing_report = replace(trainer.packing_report, compiled=text)
        if trainer.args.packing_report and trainer.is_world_process_zero():
            trainer.packing_report.save(str(trainer.args.output_dir))

    def undo(self) -> None:
        """Let the layers run as before this training. The trainer calls it at the end, also of a run that fails."""
        for layer in self._layers:
            undo_compilation(layer)
        self._layers = []


def compile_layers(layers: list[nn.Module], args: SFTConfig) -> None:
    """Let torch compile each layer at its next call, for packs of any length."""
    for layer in layers:
        # In place, so that names of parameters stay
        layer.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode, dynamic=True)
