"""`torch_compile`: which linear layers run compiled in each step, on the path of CUDA.

torch leaves out what it cannot compile without an error: it runs as it is. So the calls of linear layers are counted in
the graphs that run, with those inside checkpoints. torch 2.11 traces less than later versions: `make
compile-oldest` runs this file on it.
"""

from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.attention import take_path_of_cuda
from support.features import marked
from support.models import build_tiny_model
from support.runs import build_trainer, weights
from support.strict_varlen import StrictVarlen
from support.versions import compiles_inputs
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from trl_packfix.attention import flash
from trl_packfix.attention.forwards import CarryingCheckpoint
from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward, packed_forward_entered
from trl_packfix.attention.varlen import varlen_attention
from trl_packfix.compat import compiles_layers_of_packs, look_up_backend
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.group import ALONE
from trl_packfix.training import compiled_layers
from trl_packfix.training.compiled_layers import compile_layers, decoder_layers

pytestmark = pytest.mark.slow

STEPS = 10
SETTINGS = {"packing_strategy": "minibatch", "max_steps": STEPS, "learning_rate": 1e-2, "gradient_checkpointing": True}
SETTINGS |= {"shuffle_dataset": False}
# Texts that begin alike. In each pack of two the longest has another length
DOCUMENTS = Dataset.from_dict({"text": ["abcdefghij" * 3 + "kl"[i % 2] * (1 + i) for i in range(2 * STEPS)]})
LORA = {"adapters": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
CASES = {"LoRA": LORA, "without checkpoints": {"gradient_checkpointing": False}, "prefixes": {"share_prefixes": "pack"}}


def linear_calls(graph: GraphModule) -> int:
    """Count the calls of `F.linear` in a graph and in the graphs within it, such as the bodies of checkpoints."""
    calls = sum(node.op == "call_function" and node.target is torch._C._nn.linear for node in graph.graph.nodes)
    return calls + sum(linear_calls(inner) for inner in graph.children() if isinstance(inner, GraphModule))


class CompiledCalls(TrainerCallback):
    """The calls of linear layers that ran compiled, and the graphs that have any, in each step.

    Attributes:
        backend: a backend of `torch.compile` that runs graphs as they are and counts.
        calls: one number for each step.
        graphs: how many graphs with linear layers there were at the end of each step.
        num_graphs: how many there are now.
    """

    def __init__(self):
        self.calls = []
        self.graphs = []
        self.num_graphs = 0
        self._ran = 0

    def backend(self, graph, example_inputs, **options):
        calls = linear_calls(graph)
        self.num_graphs += calls > 0

        @torch.compiler.disable
        def run_counted(*args):
            self._ran += calls
            return graph.forward(*args)

        return run_counted

    def on_step_begin(self, *args, **kwargs):
        self._ran = 0  # without what the proof and evaluation ran

    def on_step_end(self, *args, **kwargs):
        self.calls.append(self._ran)
        self.graphs.append(self.num_graphs)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Take our path of CUDA with a stand-in for its kernels, also in fp64, so that a mistake is told from rounding."""
    take_path_of_cuda(monkeypatch)
    monkeypatch.setattr(flash, "CUDA_DTYPES", (*flash.CUDA_DTYPES, torch.float64))
    with StrictVarlen().registered() as kernels:
        yield kernels


def train(folder, adapters=None, compiles=True, model=None, **settings):
    """Return a run in fp64 that has ended, and its `CompiledCalls`."""
    torch.compiler.reset()
    counted = CompiledCalls()
    model = model or build_tiny_model("llama", dtype=torch.float64, num_hidden_layers=1)  # tracing takes seconds
    more = {"callbacks": [counted], "peft_config": adapters}
    compiled = {"torch_compile": True, "torch_compile_backend": counted.backend} if compiles else {}
    trainer = build_trainer(folder, DOCUMENTS, model, **more, **SETTINGS | settings | compiled)
    trainer.model.double()  # adapters are made in fp32
    trainer.train()
    return trainer, counted


def num_linear_layers(trainer):
    """Count linear layers inside the decoder layers.

    In a step each runs once, and again in backward if its layer is checkpointed.
    """
    return sum(isinstance(module, nn.Linear) for module in trainer.model.get_decoder().layers.modules())


@compiles_inputs
@pytest.mark.parametrize("case", marked(CASES))
def test_every_linear_layer_runs_compiled(case, flash_on_cpu, tmp_path):
    trainer, counted = train(tmp_path, **CASES[case])
    assert counted.calls == [0] + [num_linear_layers(trainer)] * (STEPS - 1)  # layers are compiled after the first step
    assert counted.graphs == [0] + [1] * (STEPS - 1)
    assert trainer.packing_report.compiled == "1 of 1 layers compiled, 1 graph"
    # And training is the same
    flash_on_cpu.forwards.clear()
    eager, counted = train(tmp_path, **CASES[case], compiles=False)
    assert counted.calls == [0] * STEPS
    assert eager.packing_report.compiled is None
    assert torch.allclose(weights(trainer), weights(eager), rtol=0, atol=1e-12)
    # And it was not easy: each step has another longest document, and keys are shared where the case says so
    longest = [batch["max_length_k"] for batch in trainer.get_train_dataloader()][:STEPS]
    assert len(set(longest)) == STEPS, longest
    shares = [num_queries < num_keys for num_queries, num_keys, *_ in flash_on_cpu.forwards]
    assert any(shares) is ("share_prefixes" in CASES[case])
    assert not getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)


@compiles_inputs
def test_a_second_training_compiles_its_layers_too(flash_on_cpu, tmp_path, capsys):
    trainer, counted = train(tmp_path, max_steps=2, gradient_checkpointing=False)
    trainer.train()
    assert counted.calls == [0, num_linear_layers(trainer)] * 2
    assert capsys.readouterr().out.count("torch_compile: 1 of 1 layers compiled, 1 graph") == 2


@compiles_inputs
def test_no_pack_is_compiled_anew_after_the_second(flash_on_cpu, tmp_path):
    trainer, counted = train(tmp_path, max_steps=1)
    rng = np.random.default_rng(0)
    layers = decoder_layers(trainer.model)
    trainer.packed_model.attach_packed_attention()
    graphs = []
    with compiles_layers_of_packs(True):
        compile_layers(layers, counted.backend)
        for _ in range(200):
            documents = [{"input_ids": rng.integers(3, 250, n)} for n in rng.integers(2, 30, rng.integers(1, 5))]
            batch = PackedDataCollator()(documents)
            trainer.model(**batch)
            graphs.append(counted.num_graphs)
    assert graphs[1:] == [graphs[1]] * 199
    assert graphs[1] <= 2


def test_layers_stay_as_they_are_under_zero3(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_layers, "is_deepspeed_zero3_enabled", lambda: True)
    trainer, counted = train(tmp_path, max_steps=3, enforce_flash_attention=False)
    assert "ZeRO-3" in trainer.packing_report.compiled
    assert counted.num_graphs == 0


def test_it_is_said_if_nothing_is_compiled(tmp_path, capsys):
    """Attention of a CPU is a loop over documents, which torch does not compile inside a checkpoint."""
    trainer, counted = train(tmp_path, max_steps=3)
    assert counted.calls == [0, 0, 0]
    assert trainer.packing_report.compiled == "0 of 1 layers compiled, 0 graphs"
    assert "torch_compile: 0 of 1 layers compiled, 0 graphs" in capsys.readouterr().out


@compiles_inputs
@pytest.mark.parametrize("part, checkpoints", [("", True), ("mlp.down_proj", False)])
def test_a_layer_that_torch_runs_as_it_is_does_not_count(part, checkpoints, flash_on_cpu, tmp_path):
    """Disable tracing of the second of two layers, as a whole or in one module."""
    model = build_tiny_model("llama", dtype=torch.float64, num_hidden_layers=2)
    module = model.model.layers[1].get_submodule(part)
    module.forward = torch.compiler.disable(module.forward)
    trainer, counted = train(tmp_path, model=model, max_steps=2, gradient_checkpointing=checkpoints)
    assert trainer.packing_report.compiled.startswith("1 of 2 layers compiled, ")
    assert num_linear_layers(trainer) > counted.calls[1] >= num_linear_layers(trainer) / 2


def test_graphs_are_compiled_with_the_options_of_a_mode():
    def own_backend(graph, example_inputs, mode):
        return mode

    assert look_up_backend("inductor", None) is look_up_backend("inductor", "default")
    options = look_up_backend("inductor", "max-autotune").keywords
    assert options == {"config_patches": torch._inductor.list_mode_options("max-autotune", dynamic=True)}
    assert options["config_patches"]["max_autotune"]
    assert look_up_backend(own_backend, "fast")(None, []) == "fast"


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
        bounds_of_pack = dict(zip(CU_SEQ_LENS, (bounds, bounds, longest, longest), strict=True))
        with packed_forward_entered(PackedForward(**bounds_of_pack, group=ALONE)):
            compiled(*states, None, **bounds_of_pack)
    assert counter.frame_count == 2  # the second when torch sees that lengths change
