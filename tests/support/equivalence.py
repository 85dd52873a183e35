"""Packed against unpacked training through both trainers: the runs behind benchmarks.

One case is one model trained for five steps with SGD, on the same documents in every optimizer step: padded by TRL
(the reference), packed by us with `minibatch`, flattened by TRL with `padding_free`, and padded by TRL in other
micro-batches, which is the scale of rounding. Errors are relative to the weight change of the reference.

Hybrid models also train on two ranks that share packs, and with a fault in their mixers.
"""

import math
import random
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from ranks.faults import Begins, boundary_of_mixers
from transformers import PrinterCallback

import trl_packfix

from . import zoo
from .models import build_tiny_model, build_tokenizer
from .versions import TRL

MODELS = ("llama", "qwen3", "gemma3", "gpt_oss", "opt", "mixtral")
HYBRIDS = ("qwen3_5_text", "nemotron_h", "granitemoehybrid", "lfm2", "kimi_linear", "falcon_h1")
ZOO = (*HYBRIDS, "mamba2", "minimax_m3_vl_text")  # with sizes of their own
ADAPTERS = ("full", "lora", "dora")
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
        """Documents per micro-batch and micro-batches per step: 4 x 1 or 2 x 4, "regrouped" 2 x 2 or 4 x 2.

        "shared" has all documents of a step in one micro-batch.
        """
        if trainer == "regrouped":
            return (2, 2) if self.accumulation == 1 else (4, 2)
        if trainer == "shared":
            return 1, 1
        return (4 if self.accumulation == 1 else 2), self.accumulation

    def __str__(self) -> str:
        name = f"{self.model}-{self.adapter}-accumulation{self.accumulation}{'-checkpointing' * self.checkpointing}"
        return f"{name}-{str(self.dtype)[6:]}"


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
    tokenizer = build_tokenizer()
    if case.model in ZOO:
        model = zoo.build_model(case.model, vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    else:
        model = build_tiny_model(case.model, dtype=case.dtype)
    if case.dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    peft_config = None
    if case.adapter != "full":
        torch.manual_seed(0)
        dora = case.adapter == "dora"
        # PEFT has no DoRA for experts, which are parameters and not modules
        attention_only = dora and case.model in ("gpt_oss", "mixtral")
        target_modules = r".*\.[qkvo]_proj" if attention_only else "all-linear"
        # Jamba reads the weight of `dt_proj` itself, so an adapter of it never learns, which the trainer refuses. PEFT
        # refuses the output projection of some types, whose fused kernel leaves an adapter out
        excluded = {"jamba": "dt_proj", "falcon_h1": "out_proj", "nemotron_h": "out_proj"}
        unread = [excluded[case.model]] if case.model in excluded else None
        peft_config = LoraConfig(
            r=4, target_modules=target_modules, exclude_modules=unread, use_dora=dora, task_type="CAUSAL_LM"
        )
    batch_size, accumulation = case.micro_batches(trainer)
    package = trl_packfix if trainer in ("packed", "shared", "leaking") else trl
    settings = {"max_length": MAX_LENGTH}
    if package is trl_packfix:
        settings |= {"packing": True, "packing_strategy": "minibatch"}
    elif trainer == "padding_free":
        settings = {"max_length": None, "padding_free": True}
    if trainer == "shared":  # the documents are those of one step, and links are so fast that two ranks share its pack
        assert case.num_documents == math.prod(case.micro_batches("unpacked"))
        settings |= {"packing_strategy": "stream", "tokens_per_rank": case.num_documents * MAX_LENGTH // 2}
        settings |= {"exchange_speeds": {"within": 1e18, "latency_within": 1e-18}}
    if package is trl and Version("1.15") > TRL:
        # The default loss, in chunks, reads what mpt, mamba, rwkv and jamba do not have
        settings |= {"loss_type": "nll"}
    if case.model == "granitemoehybrid":  # TRL's router loss reads `num_experts`, which this config does not have
        settings |= {"router_aux_loss_coef": 0.0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        args = package.SFTConfig(
            folder,
            **settings,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=case.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if case.checkpointing else None,
            max_steps=NUM_STEPS,
            optim="sgd",
            # small enough that no loss rises above its start: where a run diverges, so does its rounding
            learning_rate=0.2 if case.adapter == "full" else 0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=11,
        )
        if package is trl_packfix:
            args.packing_report = False
        rows = conversations(case.num_documents)
        runner = package.SFTTrainer(
            model, args, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config
        )
        runner.remove_callback(PrinterCallback)
        if trainer == "reversed":
            collate = runner.data_collator
            runner.data_collator = lambda rows: collate(rows[::-1])
        if trainer == "leaking":
            runner.add_callback(Begins(boundary_of_mixers, stack))
        trained = {name: p for name, p in runner.model.named_parameters() if p.requires_grad}
        before = {name: p.detach().double().clone() for name, p in trained.items()}
        runner.train()
        change = torch.cat([(p.detach().double() - before[name]).flatten() for name, p in trained.items()])
    losses = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    return losses, change, runner


def errors(case: Case, trainer: str, reference: tuple[list[float], torch.Tensor]) -> tuple[float, float]:
    """Largest difference of a loss, and relative difference of the weight change, against the reference run."""
    losses, change, _ = train(case, trainer)
    assert len(losses) == len(reference[0]) == NUM_STEPS
    loss_error = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
    return loss_error, ((change - reference[1]).norm() / reference[1].norm()).item()
