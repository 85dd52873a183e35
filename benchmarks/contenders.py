"""Trainers that take turns: ours, stock TRL's, and TRL's with transformers' flattening collator, step by step.

A step is what the trainers do: the next batches of the trainer's own dataloader (collation included), its
`get_batch_samples` and `training_step` (forward, loss, metrics, backward), then SGD. The loop is in this module, so
that contenders can take turns in one process. What a trainer does once before its first step is not measured. Gradient
checkpointing is off. The model is a random Llama with heads of 64 and a small vocabulary (512), so that attention and
layers dominate the time, not the LM head.
"""

import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trl
from common import Row, file_lengths
from datasets import Dataset
from support.models import build_tiny_model, build_tokenizer
from transformers import DataCollatorWithFlattening, PreTrainedModel

import trl_packfix

VOCAB_SIZE = 512

# file -> median and mean of its lengths, for the lognormal that replaces it without a folder
LENGTHS = {"t0_p3_sample": (114, 255), "gsm8k_train": (176, 187), "qmsum_train": (13_293, 14_529)}

# name -> package, settings; all have the same `max_length`, except TRL's padding_free, which does not accept one
CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ours stream": (trl_packfix, {"packing": True, "packing_report": False}),
    "ours minibatch": (trl_packfix, {"packing": True, "packing_strategy": "minibatch", "packing_report": False}),
    "TRL unpacked": (trl, {}),
    "TRL packing bfd": (trl, {"packing": True}),
    "TRL padding_free": (trl, {"padding_free": True, "max_length": None}),
    "flattening": (trl, {}),  # with transformers' `DataCollatorWithFlattening`
}
ONE_ROW = ("TRL packing bfd", "TRL padding_free", "flattening")  # their mask covers all pairs of tokens in the batch


@dataclass(frozen=True)
class Size:
    """The config of a Llama with heads of 64 and the feed-forward proportions of Llama-2-7B (11008 / 4096)."""

    hidden: int
    layers: int

    def build(self) -> PreTrainedModel:
        heads = self.hidden // 64
        return build_tiny_model(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 43 // 16,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=131_072,
        )

    def __str__(self) -> str:
        return f"Llama {self.hidden} x {self.layers} layer(s)"


class Contender:
    """A trainer whose epochs are run step by step."""

    def __init__(self, name: str, size: Size, documents: list[list[int]], batch_size: int, max_length: int):
        self.name = name
        package, settings = CONTENDERS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = package.SFTConfig(
                tempfile.gettempdir(),
                **{"max_length": max_length} | settings,
                per_device_train_batch_size=batch_size,
                optim="sgd",
                learning_rate=1e-3,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
            )
            self.trainer = package.SFTTrainer(
                size.build(),
                args,
                data_collator=DataCollatorWithFlattening() if name == "flattening" else None,
                train_dataset=Dataset.from_dict({"input_ids": documents}),
                processing_class=build_tokenizer(),
            )
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.create_optimizer()
        self.loader = self.trainer.get_train_dataloader()
        # as `train()` does; without them ours ends at once and refuses packs
        self.trainer.state.max_steps = len(self.loader)
        if package is trl_packfix:
            self.trainer.packed_model.attend()

    def epoch(self) -> Row:
        """CPU seconds (total and in the kernel), tokens without and with padding, and steps of one epoch."""
        trainer = self.trainer
        row: Row = {"cpu_seconds": 0.0, "system_seconds": 0.0, "tokens": 0, "padded_tokens": 0, "steps": 0}
        start, system = time.process_time(), os.times().system
        batches = iter(self.loader)
        while True:
            samples, num_items = trainer.get_batch_samples(batches, 1, trainer.args.device)
            if not samples:
                break
            (batch,) = samples
            padded = batch["input_ids"].numel()
            row["padded_tokens"] += padded
            row["tokens"] += int(batch["attention_mask"].sum()) if "attention_mask" in batch else padded
            row["steps"] += 1
            trainer.training_step(trainer.model, batch, num_items)
            trainer.optimizer.step()
            trainer.model.zero_grad()
        row["cpu_seconds"], row["system_seconds"] = time.process_time() - start, os.times().system - system
        assert row["steps"], f"{self.name}: no step was made"
        return row


def document_lengths(name: str, folder: Path | None, seed: int = 0) -> np.ndarray:
    """Tokens per document of one file of `LENGTHS`, in random order: from the file if a folder is given."""
    rng = np.random.default_rng(seed)
    if folder is not None and folder.is_dir():
        ((_, lengths),) = file_lengths(folder, f"{name}.jsonl")
        return np.maximum(rng.permutation(lengths), 2)
    median, mean = LENGTHS[name]
    # mean / median = exp(sigma^2 / 2)
    return np.maximum(rng.lognormal(np.log(median), np.sqrt(2 * np.log(mean / median)), 4_000), 2).astype(int)


def make_documents(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in lengths]


def fill(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """The first lengths with num_tokens in total. The last one is cut to fit."""
    ends = np.minimum(lengths.cumsum(), num_tokens)
    assert ends[-1] == num_tokens, f"{len(lengths)} documents have {ends[-1]} tokens, fewer than {num_tokens}"
    # a last document of one token has no target
    return [int(n) for n in np.diff(ends, prepend=0) if n > 1]
