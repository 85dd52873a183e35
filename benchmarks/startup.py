"""From `trainer = SFTTrainer(...)` to the first batch: ours and TRL's, first and second start, and the collators.

    python benchmarks/startup.py                                  # 10 and 100 thousand tokenised documents, 3 minutes
    python benchmarks/startup.py --num 1000000 --csv startup.csv  # a million, where TRL takes minutes
    python benchmarks/startup.py --parts collator                 # only batches per second of the loaders

Tokenisation is not measured: the documents are token ids already, int32 in Arrow files as `datasets` writes them
(`plain`; with a `completion_mask` as for prompt and completion, `masked`). Every start runs in a separate process. Its
clock starts after the imports and the construction of the model, so it measures the preparation, the plan and the first
batch:
  first    nothing is cached
  second   the same again, with the files that the first start cached next to the dataset
`wall s` and `CPU s` are the times, `peak MiB` the largest growth of the resident memory, with pages of mapped files,
and `written MiB` the size of the files that the start wrote. Ratios are CPU seconds of TRL's start over ours.

Part collator: batches of the train loaders of both trainers in one process, in CPU microseconds per batch (median of
rounds, ours and TRL's in turn), T tokens of documents of 2048/64 to 2048/1 tokens. TRL's loader reads a pack that was
written to disk as one row; ours gathers documents from many places in the table.

Part epoch: the second epoch's schedule of each strategy on 1, 8 and 64 ranks with 4 accumulation steps, in CPU seconds:
made by the rank itself, and read from the cache after that.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import pyarrow as pa
import torch
import trl
from common import Row, describe, make_parser, resident_mib, run_again, tell, write_csv
from support.models import build_tiny_model
from support.planners import make_epochs
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import trl_packfix
from trl_packfix.data.cache import cached_documents
from trl_packfix.data.reader import TokenReader

VOCABULARY = 32_000
MAX_LENGTH = 2048
LENGTHS = (4.6, 0.9)  # lognormal: median 100, mean 150 tokens


def write_documents(folder: Path, lengths: np.ndarray, masked: bool) -> None:
    """A tokenised dataset as `map` writes it: record batches of 1000 rows."""
    rng = np.random.default_rng(0)

    def parts() -> Any:
        for begin in range(0, len(lengths), 1000):
            part = lengths[begin : begin + 1000]
            offsets = pa.array(np.append(0, np.cumsum(part)), pa.int32())
            ids = rng.integers(3, VOCABULARY, part.sum(), dtype=np.int32)
            columns = {"input_ids": pa.ListArray.from_arrays(offsets, ids)}
            if masked:  # the second half of each document is trained
                inside = np.arange(part.sum()) - np.repeat(np.cumsum(part) - part, part)
                mask = (inside >= np.repeat(part // 2, part)).astype(np.int8)
                columns["completion_mask"] = pa.ListArray.from_arrays(offsets, mask)
            yield pa.table(columns)

    datasets.Dataset(pa.concat_tables(parts())).save_to_disk(folder)


def tiny_model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_tiny_model(vocab_size=VOCABULARY, max_position_embeddings=65536, **sizes)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_trainer(method: str, dataset: datasets.Dataset, model: PreTrainedModel, max_length: int = MAX_LENGTH) -> Any:
    """`method` is "trl" (its packing, bfd) or one of our strategies."""
    library = trl if method == "trl" else trl_packfix
    args = library.SFTConfig(
        tempfile.gettempdir(),
        packing=True,
        packing_strategy="bfd" if method == "trl" else method,
        completion_only_loss="completion_mask" in dataset.column_names,
        max_length=max_length,
        per_device_train_batch_size=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    return library.SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer())


def size_mib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


def one_start(method: str, folder: Path) -> Row:
    """Measured in this process, which does nothing else."""
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    model = tiny_model()
    dataset = datasets.load_from_disk(folder)
    few = datasets.Dataset.from_dict(dataset[:8])  # in memory; triggers the imports on first use
    next(iter(make_trainer(method, few, tiny_model()).get_train_dataloader()))
    peaks = [resident_mib()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peaks.append(resident_mib())

    before = size_mib(folder)
    watcher = threading.Thread(target=watch, daemon=True)  # a start that fails must be able to exit
    watcher.start()
    wall = time.perf_counter()
    cpu = time.process_time()
    trainer = make_trainer(method, dataset, model)
    made = time.perf_counter() - wall
    batch = next(iter(trainer.get_train_dataloader()))
    row = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "trainer_wall_s": made}
    done.set()
    watcher.join()
    assert batch["input_ids"].shape[0] == 1
    return row | {"peak_mib": max(peaks) - peaks[0], "written_mib": size_mib(folder) - before}


def starts(num: int, masked: bool, methods: list[str], folder: Path) -> list[Row]:
    """Two starts of each method on a fresh copy of the same documents."""
    lengths = np.clip(np.random.default_rng(0).lognormal(*LENGTHS, num), 2, MAX_LENGTH).astype(np.int64)
    write_documents(folder / "documents", lengths, masked)
    rows = []
    for method in methods:
        copy = folder / "copy"
        shutil.copytree(folder / "documents", copy)
        for start in ("first", "second"):
            measured = run_again("--one", method, str(copy))
            kind = "masked" if masked else "plain"
            row = {"part": "start", "documents": num, "tokens": int(lengths.sum()), "kind": kind, "start": start}
            rows.append(row | {"method": method} | measured)
            tell(rows[-1], ".2f")
        shutil.rmtree(copy)
    shutil.rmtree(folder / "documents")
    for row in rows:
        row["trl_over_this"] = cpu_of(rows, "trl", row["start"]) / row["cpu_s"]
    return rows


def cpu_of(rows: list[Row], method: str, start: str) -> float:
    return next((row["cpu_s"] for row in rows if (row["method"], row["start"]) == (method, start)), float("nan"))


def collators(folder: Path, rounds: int) -> list[Row]:
    """Microseconds of CPU for each batch of the two train loaders, documents of a few lengths."""
    rows = []
    for max_length in (2048, 8192):
        for length in (max_length // 64, max_length // 8, max_length):
            num = 200 * max_length // length
            lengths = np.random.default_rng(0).integers(length * 3 // 4, length + 1, num)
            documents = folder / f"{max_length}-{length}"
            write_documents(documents, lengths, masked=False)
            table = datasets.load_from_disk(documents)
            names = ("stream", "trl")
            loaders = [make_trainer(name, table, tiny_model(), max_length).get_train_dataloader() for name in names]
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                for name, loader in zip(names, loaders, strict=True):
                    start = time.process_time()
                    batches = sum(1 for _ in loader)
                    seconds[name].append((time.process_time() - start) / batches)
            ours, theirs = (statistics.median(seconds[name]) * 1e6 for name in names)
            row = {"part": "collator", "max_length": max_length, "document": length, "ours_us": ours, "trl_us": theirs}
            rows.append(row | {"trl_over_this": theirs / ours})
            tell(rows[-1], ".2f")
    return rows


def epochs(num: int, methods: list[str], folder: Path) -> list[Row]:
    """Cost of the change to the second epoch, planned and read from the cache."""
    lengths = np.clip(np.random.default_rng(0).lognormal(*LENGTHS, num), 2, MAX_LENGTH).astype(np.int64)
    write_documents(folder / "documents", lengths, masked=False)
    documents = cached_documents(TokenReader(datasets.load_from_disk(folder / "documents")), MAX_LENGTH)
    rows = []
    for method in methods:
        for ranks in (1, 8, 64):
            settings = {"batch_size": 1, "max_length": MAX_LENGTH, "accumulation": 4, "world_size": ranks}
            made = make_epochs(dataclasses.replace(documents, file=None), method, **settings)
            kept = make_epochs(documents, method, **settings)
            start = time.process_time()
            made.schedule(1)
            row = {"part": "epoch", "documents": num, "method": method, "ranks": ranks}
            row["made_cpu_s"] = time.process_time() - start
            make_epochs(documents, method, **settings).schedule(1)
            file = kept.cache_file("schedule", 1)
            assert file is not None, f"{num} documents are too few to be cached"
            assert file.exists(), f"{num} documents are too few to be cached"
            start = time.process_time()
            found = kept.schedule(1)
            row["found_cpu_s"] = time.process_time() - start
            assert np.array_equal(found.order, made.schedule(1).order)
            rows.append(row)
            tell(row, ".2f")
    shutil.rmtree(folder / "documents")
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, nargs="*", default=[10_000, 100_000], help="tokenised documents")
    parser.add_argument("--parts", nargs="*", default=["start", "collator"], choices=["start", "collator", "epoch"])
    parser.add_argument("--kinds", nargs="*", default=["plain", "masked"], choices=["plain", "masked"])
    parser.add_argument(
        "--methods", nargs="*", default=["stream", "bfd", "minibatch", "trl"], help="strategies, or trl"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the collators, of which the median is taken")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_start(args.one[0], Path(args.one[1]))))
        return

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    print(describe())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        if "start" in args.parts:
            for num in args.num:
                for kind in args.kinds:
                    rows += starts(num, kind == "masked", args.methods, Path(temporary))
                    write_csv(args.csv, rows)  # an interrupted benchmark keeps its rows
        if "epoch" in args.parts:
            methods = [method for method in args.methods if method != "trl"]
            rows += [row for num in args.num for row in epochs(num, methods, Path(temporary))]
        if "collator" in args.parts:
            rows += collators(Path(temporary), args.rounds)
    for row in rows:
        tell(row, ".2f")
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
