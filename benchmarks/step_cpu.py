"""A whole training step on the CPU: ours against stock TRL, packed and unpacked.

    python benchmarks/step_cpu.py --quick                        # small sizes, about 5 minutes
    python benchmarks/step_cpu.py --data DIR --csv step_cpu.csv  # half an hour

A step is what the trainers do: the next batches of the trainer's own dataloader (collation included), its
`get_batch_samples` and `training_step` (forward, loss, metrics, backward), then SGD. The loop around it is this
script's, so that the contenders take turns, round after round, in one process; what a trainer does once, before its
first step, is not in it. Gradient checkpointing is off. The model is a random Llama with heads of 64 and a small
vocabulary (2048), so that attention and layers decide, not the LM head.

pack     One pack of T tokens, batch size 1: ours (`stream`) against TRL's packing (`bfd`, sdpa with its (T, T) mask),
         on the same documents. Llama 512 x 8 layers, T = 8192, 3 rounds, with --quick 1; the target is 4 times TRL's
         tokens per CPU second. Before it, every tensor that a step makes is looked at: is one of them (T, T)?
batch 8  The default batch size with a shorter `max_length`, and one epoch over the same documents for everyone. Padding
         is `padded/real`, the tokens of unpacked batches over those of the documents. What packing could win at best is
         about that; `share` is the measured speed-up over unpacked TRL divided by it, and the target is 0.9. Default:
         512 x 8 layers, max_length 1024, 128 documents, 3 rounds; --quick: 256 x 4 layers, 64 documents, 2 rounds.

Lengths are those of prompt and completion in t0_p3_sample.jsonl (FLAN-like) of --data, else lognormal with its mean of
255 and median of 114. CPU seconds are `time.process_time`, medians over the rounds, on one thread: with more, on a
busy machine, threads that wait for each other burn CPU seconds in which no work is done. The kernel's part, mostly the
allocator fetching memory anew, stands apart; MALLOC_ variables, as `make demo` sets them, make it small.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import datasets
import numpy as np
import torch
import transformers
import trl
from about import describe, write_csv
from conftest import build_tokenizer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import trl_packfix

VOCAB_SIZE = 2048
PACK_TARGET, SHARE_TARGET = 4.0, 0.9
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Of a Llama with heads of 64 and the proportions of Llama-2-7B (11008 / 4096) in its feed-forward layers."""

    hidden: int
    layers: int

    def build(self) -> LlamaForCausalLM:
        heads = self.hidden // 64
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 43 // 16,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=32768,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


# name -> package, settings; `max_length` is common to all but TRL's padding_free, which takes none
CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ours stream": (trl_packfix, {"packing": True, "packing_report": False}),
    "ours minibatch": (trl_packfix, {"packing": True, "packing_strategy": "minibatch", "packing_report": False}),
    "TRL unpacked": (trl, {}),
    "TRL packing bfd": (trl, {"packing": True}),
    "TRL padding_free": (trl, {"padding_free": True, "max_length": None}),
}


class Contender:
    """One trainer, whose epochs are run step by step."""

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
            table = Dataset.from_dict({"input_ids": documents})
            self.trainer = package.SFTTrainer(
                size.build(), args, train_dataset=table, processing_class=build_tokenizer()
            )
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.create_optimizer()
        self.loader = self.trainer.get_train_dataloader()

    def epoch(self) -> Row:
        """CPU seconds, those of the kernel among them, tokens without and with padding, and steps of one epoch."""
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
        return row


class LargestTensor(TorchDispatchMode):
    """The largest tensor that any operation fills, forward and backward, and how many were (..., T, T).

    Scratch memory of `empty` and views of it do not count: TRL's LM head asks for tiles of 32,768 columns, whatever the
    vocabulary.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self.num_tokens, self.shape, self.squares = num_tokens, torch.Size([0]), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format or func.is_view:
            return result
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.shape = max(self.shape, tensor.shape, key=torch.Size.numel)
                self.squares += tensor.shape[-2:] == (self.num_tokens, self.num_tokens)
        return result


def document_lengths(folder: Path | None, seed: int = 0) -> np.ndarray:
    """Tokens per document, in random order: real ones where there is a folder, else lognormal."""
    rng = np.random.default_rng(seed)
    if folder is None:
        # mean / median = exp(sigma^2 / 2)
        sigma = np.sqrt(2 * np.log(255 / 114))
        return np.maximum(rng.lognormal(np.log(114), sigma, 4_000), 2).astype(int)
    tokenizer = AutoTokenizer.from_pretrained(next(folder.glob("*tokenizer*")))
    with (folder / "t0_p3_sample.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    texts = [rows[i]["prompt"] + rows[i]["completion"] for i in rng.permutation(len(rows))[:4_000]]
    return np.maximum([len(ids) for ids in tokenizer(texts)["input_ids"]], 2)


def make_documents(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in lengths]


def fill(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """The first lengths whose sum is num_tokens, the last one cut to end there."""
    ends = np.minimum(lengths.cumsum(), num_tokens)
    return np.trim_zeros(np.diff(ends, prepend=0)).tolist()


def median_epoch(rows: list[Row]) -> Row:
    """Medians over the rounds; the shuffled unpacked batches have other padding in every one."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {"rounds": len(rows)}


def one_pack(size: Size, num_tokens: int, lengths: np.ndarray, rounds: int, console: Console) -> list[Row]:
    names = ("ours stream", "TRL packing bfd")
    rows: list[Row] = []

    documents = make_documents(fill(lengths, num_tokens))
    contenders = [Contender(name, size, documents, 1, num_tokens) for name in names]
    for contender in contenders:  # warms up
        with LargestTensor(num_tokens) as watch:
            contender.epoch()
        figures = {"square_tensors": watch.squares, "largest_tensor": "x".join(map(str, watch.shape))}
        rows.append({"part": "masks", "method": contender.name, "T": num_tokens, **figures})
    table = Table("method", "T", "(T, T) tensors in a step", "largest tensor")
    for row in rows:
        table.add_row(row["method"], str(row["T"]), str(row["square_tensors"]), row["largest_tensor"])
    console.print("[bold]Masks[/]: every tensor made in one step, forward and backward", table)
    assert rows[1]["square_tensors"] > 0, "the watch is blind: it saw no mask in TRL's step"

    epochs: dict[str, list[Row]] = {name: [] for name in names}
    for _ in range(rounds):
        for contender in contenders:
            row = contender.epoch()
            assert row["tokens"] == num_tokens and row["steps"] == 1, "not one pack"
            epochs[contender.name].append(row)
    table = Table("method", "documents", "CPU s per step", "of these system", "tokens per CPU s", "times TRL")
    medians = {name: median_epoch(epochs[name]) for name in names}
    for name, row in medians.items():
        speed = medians[names[1]]["cpu_seconds"] / row["cpu_seconds"]
        rate = row["tokens"] / row["cpu_seconds"]
        seconds = [f"{row['cpu_seconds']:.2f}", f"{row['system_seconds']:.2f}"]
        table.add_row(name, str(len(documents)), *seconds, f"{rate:.0f}", f"{speed:.2f}")
        row |= {"tokens_per_cpu_second": rate, "speed_up": speed, "T": num_tokens, "documents": len(documents)}
        rows.append({"part": "pack", "method": name, "hidden": size.hidden, "layers": size.layers, **row})
    title = f"[bold]One pack[/] of {num_tokens} tokens, Llama {size.hidden} x {size.layers} layers, {rounds} rounds"
    console.print(f"{title}; target {PACK_TARGET:.0f} times TRL", table)
    return rows


def batch_of_8(
    size: Size, max_length: int, num_documents: int, lengths: np.ndarray, rounds: int, console: Console
) -> list[Row]:
    lengths = np.minimum(lengths[:num_documents], max_length)
    documents = make_documents(lengths.tolist())
    contenders = [Contender(name, size, documents, 8, max_length) for name in CONTENDERS]
    epochs: dict[str, list[Row]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for contender in contenders:
            row = contender.epoch()
            assert row["tokens"] == lengths.sum(), f"{contender.name}: {row['tokens']} of {lengths.sum()} tokens"
            epochs[contender.name].append(row)

    medians = {name: median_epoch(epochs[name]) for name in CONTENDERS}
    unpacked = medians["TRL unpacked"]
    padding = unpacked["padded_tokens"] / unpacked["tokens"]
    rows: list[Row] = []
    table = Table("method", "steps", "CPU s", "real tokens per CPU s", "padded/real", "speed-up", "share")
    for name, row in medians.items():
        speed = unpacked["cpu_seconds"] / row["cpu_seconds"]
        row |= {"tokens_per_cpu_second": row["tokens"] / row["cpu_seconds"], "speed_up": speed}
        row |= {"padded_over_real": row["padded_tokens"] / row["tokens"], "share": speed / padding}
        row |= {"T": max_length, "documents": num_documents}
        rows.append({"part": "batch 8", "method": name, "hidden": size.hidden, "layers": size.layers, **row})
        figures = [f"{row['tokens_per_cpu_second']:.0f}"]
        figures += [f"{row[key]:.2f}" for key in ("padded_over_real", "speed_up", "share")]
        table.add_row(name, str(row["steps"]), f"{row['cpu_seconds']:.2f}", *figures)
    console.print(
        f"[bold]Batch size 8[/], max_length {max_length}, Llama {size.hidden} x {size.layers} layers, {num_documents} "
        f"documents of {lengths.mean():.0f} tokens on average, {rounds} rounds; target: share {SHARE_TARGET}",
        table,
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, see above")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with t0_p3_sample.jsonl and a tokenizer")
    parser.add_argument("--parts", nargs="+", choices=["pack", "batch"], default=["pack", "batch"])
    parser.add_argument("--tokens", type=int, default=8192, help="of the one pack; no size of the model")
    parser.add_argument("--max-length", type=int, default=1024, help="with batch size 8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{describe()}, {args.threads} thread(s)")
    lengths = document_lengths(args.data)
    source = "t0_p3_sample" if args.data else "lognormal"

    rows: list[Row] = []
    if "pack" in args.parts:
        rows += one_pack(Size(512, 8), args.tokens, lengths, 1 if args.quick else 3, console)
    if "batch" in args.parts:
        size, num_documents, rounds = (Size(256, 4), 64, 2) if args.quick else (Size(512, 8), 128, 3)
        rows += batch_of_8(size, args.max_length, num_documents, lengths, rounds, console)
    if args.csv:
        write_csv(args.csv, [row | {"lengths": source, "threads": args.threads} for row in rows])
        console.print(f"wrote {args.csv.name}")


if __name__ == "__main__":
    main()
