"""`torch_compile`: which linear layers run compiled in each step, on the path of CUDA.

torch leaves out what it cannot compile without an error: it runs as it is. So the calls of linear layers are counted in
the graphs that run, with those inside checkpoints. torch 2.11 traces less than later versions: `make
compile-oldest` runs this file on it.
"""

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.models import build_tiny_model
from support.runs import trainer
from support.strict_varlen import StrictVarlen
from support.versions import compiles_inputs
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from trl_packfix.attention import choice, varlen
from trl_packfix.attention.forwards import CarryingCheckpoint
from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward, packed_forward_entered
from trl_packfix.attention.varlen import varlen_attention

pytestmark = pytest.mark.slow

STEPS = 5
LEARNT = 3  # steps: torch compiles in the first one, sees in the second which sizes change, and needs no third
SETTINGS = {"packing_strategy": "minibatch", "max_steps": STEPS, "learning_rate": 1e-2, "bf16": True}
SETTINGS |= {"gradient_checkpointing": True, "shuffle_dataset": False}
# Texts that begin alike. In each pack of two the longest has another length
DOCUMENTS = Dataset.from_dict({"text": ["abcdefghij" * 3 + "kl"[i % 2] * (1 + i) for i in range(2 * STEPS)]})
CASES = {
    "LoRA": {"adapters": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")},
    "prefixes": {"share_prefixes": "pack"},
}


def linear_calls(graph: GraphModule) -> int:
    """Count the calls of `F.linear` in a graph and in the graphs within it, such as the bodies of checkpoints."""
    calls = sum(node.op == "call_function" and node.target is torch._C._nn.linear for node in graph.graph.nodes)
    return calls + sum(linear_calls(inner) for inner in graph.children() if isinstance(inner, GraphModule))


class CompiledCalls(TrainerCallback):
    """The calls of linear layers that ran compiled, and the graphs that have any, in each step.

    Attributes:
        compile: `torch.compile` with a backend that runs graphs as they are and counts.
        calls: one number for each step.
        graphs: how many graphs with linear layers there were at the end of each step.
    """

    def __init__(self):
        self.compile = partial(torch.compile, backend=self._counted)
        self.calls = []
        self.graphs = []
        self._ran = 0
        self._num_graphs = 0

    def _counted(self, graph, example_inputs):
        calls = linear_calls(graph)
        self._num_graphs += calls > 0

        @torch.compiler.disable
        def run(*args):
            self._ran += calls
            return graph.forward(*args)

        return run

    def on_step_begin(self, *args, **kwargs):
        self._ran = 0  # without what the proof and evaluation ran

    def on_step_end(self, *args, **kwargs):
        self.calls.append(self._ran)
        self.graphs.append(self._num_graphs)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Take our path of CUDA with a stand-in for its kernels; under a dispatch mode torch would compile nothing."""
    kernels = StrictVarlen()
    monkeypatch.setattr(choice, "cuda_varlen_problem", lambda: None)
    monkeypatch.setattr(varlen, "FLASH_DEVICES", {"cpu"})
    with torch.library._scoped_library("aten", "IMPL") as operators:
        operators.impl("_flash_attention_forward", lambda *args, **options: kernels._forward(*args, **options), "CPU")
        operators.impl("_flash_attention_backward", lambda *args, **options: kernels._backward(*args, **options), "CPU")
        yield kernels


def train(folder, monkeypatch, adapters=None, **settings):
    """Return a run that has ended, and its `CompiledCalls`."""
    torch.compiler.reset()
    counted = CompiledCalls()
    monkeypatch.setattr(torch, "compile", lambda model, **options: counted.compile(model))
    model = build_tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)  # tracing takes seconds
    more = {"callbacks": [counted], "peft_config": adapters}
    run = trainer(folder, DOCUMENTS, model, more, torch_compile=True, **SETTINGS | settings)
    run.train()
    return run, counted


def num_linear_layers(run):
    """Count linear layers inside the decoder layers.

    In a step each runs once, and again in backward if its layer is checkpointed.
    """
    layers = run.accelerator.unwrap_model(run.model, keep_torch_compile=False).get_decoder().layers
    return sum(isinstance(module, nn.Linear) for module in layers.modules())


@compiles_inputs
@pytest.mark.parametrize("case", CASES)
def test_every_linear_layer_runs_compiled(case, flash_on_cpu, tmp_path, monkeypatch):
    run, counted = train(tmp_path, monkeypatch, **CASES[case])
    settled = slice(LEARNT, None)
    assert counted.calls[settled] == [num_linear_layers(run)] * (STEPS - LEARNT)
    assert counted.graphs[settled] == [counted.graphs[LEARNT - 1]] * (STEPS - LEARNT)
    # And it was not easy: each step has another longest document, and keys are shared where the case says so
    longest = [batch["max_length_k"] for batch in run.get_train_dataloader()][:STEPS]
    assert len(set(longest)) == STEPS, longest
    shares = [num_queries < num_keys for num_queries, num_keys, *_ in flash_on_cpu.forwards]
    assert any(shares) is ("share_prefixes" in CASES[case])
    assert not getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)


@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
def test_a_checkpoint_is_not_compiled_anew_for_other_documents(flash_on_cpu):
    """In a loop of one's own, in which torch is not told which numbers change, as the trainer tells it."""
    torch.compiler.reset()
    counter = CompileCounter()
    layer = CarryingCheckpoint(partial(checkpoint, use_reentrant=False))
    compiled = torch.compile(partial(layer, varlen_attention, nn.Module()), backend=counter, fullgraph=True)
    for longest in (9, 14, 11, 23, 17):
        bounds = torch.tensor([0, 3, 3 + longest], dtype=torch.int32)
        states = torch.randn(3, 1, 2, 3 + longest, 8, dtype=torch.bfloat16, requires_grad=True).unbind()
        given = dict(zip(CU_SEQ_LENS, (bounds, bounds, longest, longest), strict=True))
        with packed_forward_entered(PackedForward(**given)):
            compiled(*states, None, **given)
    assert counter.frame_count == 2  # the second when torch sees that lengths change
