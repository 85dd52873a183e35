"""A whole training step on the CPU: ours against stock TRL, packed, padded and flattened.

    python benchmarks/step_cpu.py --quick                        # one length, about 2 minutes
    python benchmarks/step_cpu.py --data DIR --csv step_cpu.csv  # about 30 minutes

A step is what the trainers do: the next batches of the trainer's own dataloader (collation included), its
`get_batch_samples` and `training_step` (forward, loss, metrics, backward), then SGD. The loop is in this module, so
that contenders can take turns in one process. What a trainer does once before its first step is not measured. Gradient
checkpointing is off. The model is a random Llama with heads of 64 and a small vocabulary (512), so that attention and
layers dominate the time, not the LM head. The contenders take turns in every round.

pack   One pack of T tokens of t0_p3_sample, batch size 1: ours (`stream`) against TRL's packing (`bfd`, sdpa with its
       (T, T) mask), on the same documents. Llama 512 x 8 layers, T = 8192, 3 rounds (--quick: 2 layers, 1 round); the
       target is 4 times TRL. Before it, every tensor that a step makes is checked for the shape (T, T).
table  Batch sizes 1 and 8, max_length 512 to 16384, three files of --data. All contenders run one epoch over the same
       documents, which fill a batch of packs and have at least 8192 tokens. Llama 256 x 1 layer: the smaller the
       model, the larger the share of attention. 3 rounds, fewer for a contender that has used 6 CPU seconds in a cell.
       `padded/real` is tokens of unpacked batches over tokens of the documents: about the largest possible speed-up.
       TRL's `bfd` and `padding_free` and transformers' flattening collator put all documents of a batch in one row,
       and sdpa builds a mask over all pairs of its tokens: one byte per pair, and four more as an fp32 bias.
       Cells in which the mask needs more than half of --memory are not run; they are listed with this need.

Lengths without --data are lognormal with the same median and mean. CPU seconds are `time.process_time`, medians over
the rounds, on one thread. (On a busy machine, several threads spend CPU seconds on waiting for each other.) The
kernel's part, which is mostly the allocator fetching memory again, is listed separately; the MALLOC_ variables of `make
demo` make it small.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import trl
from common import REAL_DATA, Row, describe, file_lengths, hide_progress, make_console, make_parser, write_csv
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from support.models import build_tiny_model, build_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening, PreTrainedModel

import trl_packfix

PACK_TARGET = 4.0
PACK_LENGTH = 8192
BATCH_SIZES = (1, 8)
MAX_LENGTHS = (512, 2048, 8192, 16384)
QUICK = {"files": ["t0_p3_sample"], "max_lengths": (1024,)}
FEWEST_TOKENS = 8192
ROUNDS = 3
SECONDS = 6.0
BYTES_OF_A_PAIR = 5
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
            self.trainer.packed_model.attach_packed_attention()

    def epoch(self) -> Row:
        """CPU seconds (total and in the kernel), tokens without and with padding, and steps of one epoch."""
        trainer = self.trainer
        row: Row = {"cpu_seconds": 0.0, "system_seconds": 0.0, "tokens": 0, "padded_tokens": 0, "steps": 0}
        start = time.process_time()
        system = os.times().system
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


class LargestTensor(TorchDispatchMode):
    """The largest tensor that any operation fills, forward and backward, and how many were (..., T, T).

    Scratch memory of `empty` and views of it do not count: TRL's LM head allocates tiles of 32,768 columns for any
    vocabulary.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self.num_tokens, self.shape, self.squares = num_tokens, torch.Size([0]), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format or func.is_view:
            return result
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.shape = max(self.shape, tensor.shape, key=torch.Size.numel)
                self.squares += tensor.shape[-2:] == (self.num_tokens, self.num_tokens)
        return result


def median_epoch(rows: list[Row]) -> Row:
    """Medians over the rounds; the padding of the shuffled unpacked batches differs between rounds."""
    seconds = [row["cpu_seconds"] for row in rows]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return middle | {"fastest": min(seconds), "slowest": max(seconds), "rounds": len(rows)}


def one_pack(size: Size, num_tokens: int, lengths: np.ndarray, rounds: int, console: Console) -> list[Row]:
    names = ("ours stream", "TRL packing bfd")
    rows: list[Row] = []

    documents = make_documents(fill(lengths, num_tokens))
    contenders = [Contender(name, size, documents, 1, num_tokens) for name in names]
    for contender in contenders:  # warms up
        with LargestTensor(num_tokens) as watch:
            contender.epoch()
        figures = {"square_tensors": watch.squares, "largest_tensor": "x".join(map(str, watch.shape))}
        rows.append({"part": "masks", "method": contender.name, "max_length": num_tokens, **figures})
    table = Table("method", "T", "(T, T) tensors in a step", "largest tensor")
    for row in rows:
        table.add_row(row["method"], str(row["max_length"]), str(row["square_tensors"]), row["largest_tensor"])
    console.print("[bold]Masks[/]: every tensor made in one step, forward and backward", table)
    assert rows[1]["square_tensors"] > 0, "the watch is blind: it saw no mask in TRL's step"

    epochs = take_turns(contenders, rounds)
    table = Table("method", "documents", "CPU s per step", "of these system", "tokens per CPU s", "times TRL")
    medians = {name: median_epoch(epochs[name]) for name in names}
    for name, row in medians.items():
        assert row["tokens"] == num_tokens, "not one pack"
        assert row["steps"] == 1, "not one pack"
        speed = medians[names[1]]["cpu_seconds"] / row["cpu_seconds"]
        rate = row["tokens"] / row["cpu_seconds"]
        seconds = [f"{row['cpu_seconds']:.2f}", f"{row['system_seconds']:.2f}"]
        table.add_row(name, str(len(documents)), *seconds, f"{rate:.0f}", f"{speed:.2f}")
        row |= {"tokens_per_cpu_second": rate, "times_bfd": speed, "documents": len(documents)}
        row |= {"batch_size": 1, "max_length": num_tokens, "hidden": size.hidden, "layers": size.layers}
        rows.append({"part": "pack", "method": name, **row})
    title = f"[bold]One pack[/] of {num_tokens} tokens, {size}, {rounds} rounds"
    console.print(f"{title}; target {PACK_TARGET:.0f} times TRL", table)
    return [row | {"lengths": "t0_p3_sample"} for row in rows]


def take_turns(contenders: list[Contender], rounds: int, seconds: float = float("inf")) -> dict[str, list[Row]]:
    """Epochs by name, `rounds` of each, fewer for a contender that has used that many CPU seconds.

    The order changes in every round, because the first contender uses the caches of the previous one.
    """
    epochs: dict[str, list[Row]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            done = epochs[contender.name]
            if sum(row["cpu_seconds"] for row in done) < seconds:
                done.append(contender.epoch())
    return epochs


def longest_row(name: str, lengths: list[int], batch_size: int, max_length: int) -> int:
    """Tokens of the longest row that a contender of `ONE_ROW` can get."""
    if name == "TRL packing bfd":
        return min(sum(lengths), batch_size * max_length)
    return sum(sorted(lengths)[-batch_size:])


def cell(size: Size, name: str, batch_size: int, max_length: int, lengths: np.ndarray, memory: float) -> list[Row]:
    """One row for each contender, in the order of `CONTENDERS`."""
    num_tokens = max(batch_size * max_length, FEWEST_TOKENS)
    some = np.minimum(lengths, max_length)
    if some.sum() < num_tokens:  # a small file, read again
        some = np.tile(some, -(-num_tokens // int(some.sum())))
    chosen = fill(some, num_tokens)
    pairs = {method: longest_row(method, chosen, batch_size, max_length) ** 2 for method in ONE_ROW}
    possible = [method for method in CONTENDERS if pairs.get(method, 0) * BYTES_OF_A_PAIR <= memory / 2]
    documents = make_documents(chosen)
    contenders = [Contender(method, size, documents, batch_size, max_length) for method in possible]
    if num_tokens <= FEWEST_TOKENS * 2:  # a longer epoch needs no warm-up
        take_turns(contenders, 1)
    medians = {method: median_epoch(epochs) for method, epochs in take_turns(contenders, ROUNDS, SECONDS).items()}

    rows = []
    for method in CONTENDERS:
        row: Row = {"part": "table", "lengths": name, "batch_size": batch_size, "max_length": max_length}
        row |= {"method": method, "documents": len(chosen), "hidden": size.hidden, "layers": size.layers}
        if method in ONE_ROW:
            row["mask_gb"] = pairs[method] * BYTES_OF_A_PAIR / 1e9
        if method in medians:
            row |= medians[method]
            assert row["tokens"] == sum(chosen), f"{method}: {row['tokens']} of {sum(chosen)} tokens"
            row["tokens_per_cpu_second"] = row["tokens"] / row["cpu_seconds"]
            row["padded_over_real"] = row["padded_tokens"] / row["tokens"]
            for ours in ("stream", "minibatch"):  # more than 1: ours is faster
                row[f"times_{ours}"] = row["cpu_seconds"] / medians[f"ours {ours}"]["cpu_seconds"]
        rows.append(row)
    return rows


def all_cells(args: argparse.Namespace, console: Console) -> Iterator[list[Row]]:
    size = Size(256, 1)
    columns = [*CONTENDERS, "padded/real"]
    table = Table("lengths", "batch", "max_length", "documents", *columns)
    for name in args.files:
        lengths = document_lengths(name, args.data)
        for batch_size in args.batch_sizes:
            for max_length in args.max_lengths:
                rows = cell(size, name, batch_size, max_length, lengths, args.memory * 1e9)
                yield rows
                texts = []
                for row in rows:
                    if "cpu_seconds" not in row:
                        texts.append(f"mask of {row['mask_gb']:.0f} GB")
                    elif row["method"] == "ours stream":
                        texts.append(f"{row['cpu_seconds']:.2f} s")
                    else:
                        texts.append(f"{row['times_stream']:.2f}")
                padding = next(row["padded_over_real"] for row in rows if row["method"] == "TRL unpacked")
                cells = [name, str(batch_size), str(max_length), str(rows[0]["documents"]), *texts, f"{padding:.2f}"]
                console.print(*cells, style="dim")
                table.add_row(*cells)
                gc.collect()
        table.add_section()
    console.print(
        f"[bold]Table[/], {size}: CPU seconds of an epoch with our `stream`, and how many times as many the others "
        "take; more than 1 is slower than ours",
        table,
    )


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--quick", action="store_true", help="a small table of one file, a pack of two layers")
    parser.add_argument("--parts", nargs="+", choices=("pack", "table"), default=["pack", "table"])
    parser.add_argument("--files", nargs="+", choices=LENGTHS, help="whose lengths the table has")
    parser.add_argument("--max_lengths", nargs="+", type=int, help=f"of the table, default {MAX_LENGTHS}")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=BATCH_SIZES, help="of the table")
    parser.add_argument("--threads", type=int, default=1, help="of the matrix products")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    parser.add_argument("--memory", type=float, default=memory, help="GB of this machine, default %(default).0f")
    args = parser.parse_args()
    args.files = args.files or (QUICK["files"] if args.quick else list(LENGTHS))
    args.max_lengths = args.max_lengths or (QUICK["max_lengths"] if args.quick else MAX_LENGTHS)

    torch.set_num_threads(args.threads)
    hide_progress()
    datasets.disable_caching()
    console = make_console(190)
    source = "files" if args.data else "lognormal"
    console.print(describe(), f"lengths: {source}, threads: {args.threads}", sep=", ")

    rows: list[Row] = []

    def keep(some: list[Row]) -> None:
        rows.extend(row | {"threads": args.threads, "source": source} for row in some)
        write_csv(args.csv, rows)  # after each cell, so that an interrupted benchmark keeps its rows

    if "pack" in args.parts:
        lengths = document_lengths("t0_p3_sample", args.data)
        keep(one_pack(Size(512, 2 if args.quick else 8), PACK_LENGTH, lengths, 1 if args.quick else 3, console))
    if "table" in args.parts:
        for some in all_cells(args, console):
            keep(some)


if __name__ == "__main__":
    main()
