"""Compile the decoder layers of a model one by one, for `torch_compile=True` with packing.

All layers of a kind share one graph, so torch compiles one layer and not the whole model. Embedding, LM head, loss and
the trainer's own code stay as they are, so nothing in them interrupts a graph. Under gradient checkpointing, backward
recomputes a layer in compiled code, too.

Layers are compiled after the first optimizer step. Before it, the proofs run, which test that documents in a pack do
not influence each other, and temporary hooks are on the model, such as those that check the gradients of adapters. With
compiled layers torch would compile again for each proof and each hook, until it reaches its limit and compiles nothing
more. So proofs later in the run, of longer documents for example, run the layers uncompiled, too. When training ends or
fails, the trainer calls `CompileLayers.undo`.

torch runs what it cannot compile as it is, without an error. So `CountingBackend` finds out in the second step, the
first with compiled layers, which layers ran in a graph: their weights are inputs of graphs. The number of these layers
is printed, and is in the packing report (`PackingReport.compiled`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention.models import backbone, base_model
from ..compat import look_up_backend, undo_compilation
from ..wording import count_of
from .trainer_view import TrainerView, complete_report


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the decoder of a model, as transformers marks them; [] if it marks none."""
    decoder = backbone(base_model(model))  # without the wrapper of PEFT, and without the LM head
    return [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]


def describe_compilation(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return what the packing report says of `torch_compile` before training; None without `torch_compile`."""
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


class CountingBackend:
    """A backend for `torch.compile` that compiles with another backend, and counts the layers that run in its graphs.

    The parameters that a graph uses are among the inputs with which torch calls the graph.

    Args:
        backend: the other backend, which gets a graph and examples of its inputs, and returns the compiled function.
        layers: the layers that are compiled.

    Attributes:
        num_graphs: how many graphs were compiled.
    """

    def __init__(self, backend: Callable[..., Callable[..., Any]], layers: list[nn.Module]):
        self.num_graphs = 0
        self._backend = backend
        self._num_layers = len(layers)
        # The layers that are not known to be compiled, each with the names of its trained parameters that were in no
        # graph yet. Parameters that are not trained may belong to adapters that are not in use, which run nowhere. If a
        # layer has no trained parameter, one parameter in a graph is enough.
        self._missing = {
            layer: {name for name, weight in layer.named_parameters() if weight.requires_grad} for layer in layers
        }

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph, and return the function that runs it and notes its inputs."""
        self.num_graphs += 1
        compiled_graph = self._backend(graph, example_inputs)

        def run_graph(*inputs: Any) -> Any:
            if self._missing:
                self._note_inputs({id(value) for value in inputs})
            return compiled_graph(*inputs)

        return run_graph

    def _note_inputs(self, ids_of_inputs: set[int]) -> None:
        """Remove the weights that are inputs of a graph, given by the `id` of each input, from the missing weights."""
        for layer, missing_names in [*self._missing.items()]:
            # The parameters are read in each call: while a layer runs, FSDP replaces its sharded parameters by whole
            # ones
            names = {name for name, weight in layer.named_parameters() if id(weight) in ids_of_inputs}
            if names and names >= missing_names:
                del self._missing[layer]
            elif names:
                self._missing[layer] = missing_names - names

    def stop(self) -> int:
        """Return how many layers had all of their trained weights in graphs, and note nothing more."""
        num_compiled = self._num_layers - len(self._missing)
        self._missing = {}
        return num_compiled


class CompileLayers(TrainerCallback):
    """Compiles the decoder layers after the first optimizer step, and says after the second what torch compiled."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self._layers: list[nn.Module] = []
        self._backend: CountingBackend | None = None  # made with the compilation, after the first step
        self._is_done = False

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        """Note whether there is anything to compile."""
        self._is_done = not self._trainer.args.torch_compile or is_deepspeed_zero3_enabled()

    def on_step_end(self, *arguments: object, **kwargs: object) -> None:
        """Compile after the first step of this training, and complete the packing report after the second."""
        if self._is_done:
            return
        trainer = self._trainer
        if self._backend is not None:  # the second step, which ran the compiled layers
            self._is_done = True
            self._report(self._backend.stop(), self._backend.num_graphs)
            return
        self._layers = decoder_layers(trainer.model)
        if not self._layers:
            self._is_done = True
            return
        backend = trainer.args.torch_compile_backend
        assert backend is not None  # transformers sets "inductor"
        self._backend = CountingBackend(look_up_backend(backend, trainer.args.torch_compile_mode), self._layers)
        compile_layers(self._layers, self._backend)

    def _report(self, num_compiled: int, num_graphs: int) -> None:
        """Print how many layers torch compiled, and write it into the packing report."""
        num_layers = len(self._layers)
        text = f"{num_compiled} of {num_layers} layers compiled, {count_of(num_graphs, 'graph')}"
        self._trainer.accelerator.print(f"torch_compile: {text}")
        complete_report(self._trainer, compiled=text)

    def undo(self) -> None:
        """Let the layers run as before this training. The trainer calls it at the end, also of a run that fails."""
        for layer in self._layers:
            undo_compilation(layer)
        self._layers = []
        if self._backend is not None:
            # torch keeps the backend with its graphs. `stop` drops its references to the layers, so that they are freed
            self._backend.stop()
            self._backend = None  # the next training compiles after its first step


def compile_layers(layers: list[nn.Module], backend: Callable[..., Callable[..., Any]]) -> None:
    """Let torch compile each layer with a backend at its next call, for packs of any length."""
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)  # in place, so that names of parameters stay
