"""Packed against unpacked training through both trainers: the runs behind benchmarks.

One case is one model trained for five steps with SGD, on the same documents in every optimizer step: padded by TRL
(the reference), packed by us with `minibatch`, flattened by TRL with `padding_free`, and padded by TRL in other
micro-batches, which is the scale of rounding. Errors are relative to the weight change of the reference.
"""

import math
import random
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from ranks.faults import BEHIND_PROOF, Begins
from ranks.table import CHECKPOINTED, FAST, NO_ROUTER_LOSS, Row, build_model
from ranks.training import Packed, make_trainer

# By their names in the table of equivalences
MODELS = {"llama": "llama", "qwen3": "norms", "gemma3": "windows", "gpt_oss": "sinks", "opt": "learned_positions"}
MODELS |= {"mixtral": "experts"}
HYBRIDS = ("qwen3_5_text", "nemotron_h", "granitemoehybrid", "lfm2", "kimi_linear", "falcon_h1")
ADAPTERS = ("full", "lora", "dora")
# PEFT has no DoRA for experts, which are parameters and not modules, and refuses an output projection that is fused
OTHER_ADAPTERS = {("gpt_oss", "dora"): "dora_attention", ("mixtral", "dora"): "dora_attention"}
OTHER_ADAPTERS |= {("falcon_h1", "lora"): "inputs", ("nemotron_h", "lora"): "inputs"}
MAX_LENGTH = 96
NUM_STEPS = 5


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    adapter: str = "full"
    accumulation: int = 1
    checkpointing: bool = False
    dtype: torch.dtype = torch.float32
    num_documents: int = 48

    def micro_batches(self, trainer: str) -> tuple[int, int]:
        """Documents per micro-batch and micro-batches per step; "shared" has all of a step in one micro-batch."""
        if trainer == "regrouped":
            return (2, 2) if self.accumulation == 1 else (4, 2)
        if trainer == "shared":
            return 1, 1
        return (4 if self.accumulation == 1 else 2), self.accumulation


def conversations(num: int = 48, seed: int = 0) -> Dataset:
    """Prompts and completions of 10 to 80 tokens: within `MAX_LENGTH`, so that no trainer cuts anything."""
    rng = random.Random(seed)
    words = ["alpha", "be", "gamma ray", "d", "epsilon", "zeta", "eta"]
    text = lambda low, high: " ".join(rng.choices(words, k=rng.randint(low, high)))  # noqa: E731
    return Dataset.from_list([{"prompt": text(1, 4), "completion": " " + text(1, 9)} for _ in range(num)])


def train(case: Case, trainer: str) -> tuple[list[float], torch.Tensor, trl.SFTTrainer]:
    """Losses of the five steps, the change of all trained weights in fp64, and the trainer.

    `trainer` is "unpacked" (TRL, padded), "packed" (ours, minibatch), "padding_free" (TRL, flattened), "regrouped"
    (TRL, padded, the same documents per step in other micro-batches), "reversed" (TRL, padded, the same micro-batches
    with their rows in reverse), "shared" (packed, on two ranks that share packs) or "leaking" (packed, and mixers lose
    a boundary).
    """
    model = build_model(MODELS.get(case.model, case.model)).to(case.dtype)
    if case.dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    adapter = OTHER_ADAPTERS.get((case.model, case.adapter), case.adapter.replace("full", ""))
    row = Row(case.model, adapter, shares=case.num_documents * MAX_LENGTH if trainer == "shared" else None)
    batch_size, accumulation = case.micro_batches(trainer)
    settings: dict[str, Any] = {"max_length": MAX_LENGTH, "max_steps": NUM_STEPS, "seed": 11}
    settings |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    # small enough that no loss rises above its start: where a run diverges, so does its rounding
    settings |= {"learning_rate": 0.5 if adapter else 0.2} | (CHECKPOINTED if case.checkpointing else {})
    if trainer == "padding_free":
        settings |= {"max_length": None, "padding_free": True}
    if trainer == "shared":  # the documents are those of one step, and links are so fast that two ranks share its pack
        assert case.num_documents == math.prod(case.micro_batches("unpacked"))
        settings |= FAST
    if case.model == "granitemoehybrid":  # TRL's router loss reads `num_experts`, which this config does not have
        settings |= NO_ROUTER_LOSS
    kind = Packed if trainer in ("packed", "shared", "leaking") else trl.SFTTrainer
    engine = "ddp" if trainer == "shared" else None
    data = conversations(case.num_documents)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        runner = make_trainer(Path(folder), row, engine, kind, data=data, model=model, **settings)
        if trainer == "reversed":
            collate = runner.data_collator
            runner.data_collator = lambda rows: collate(rows[::-1])
        if trainer == "leaking":
            runner.add_callback(Begins(BEHIND_PROOF["boundary_of_mixers"], stack))
        trained = {name: p for name, p in runner.model.named_parameters() if p.requires_grad}
        before = {name: p.detach().double().clone() for name, p in trained.items()}
        runner.train()
        change = torch.cat([(p.detach().double() - before[name]).flatten() for name, p in trained.items()])
    losses = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    return losses, change, runner
