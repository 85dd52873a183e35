"""One model, one dataset, one number? `eval_loss` computed in many ways: ours and stock TRL's.

    python benchmarks/evaluation.py --data DIR                       # 3 CPU minutes
    python benchmarks/evaluation.py --data DIR --csv evaluation.csv

packed and unpacked x batch sizes 1, 4, 16 x 1 and 2 ranks (gloo) x three ways to pass the evaluation set:

dict      evaluate({"a": raw}), rows that are not tokenised
raw       evaluate(raw)
prepared  evaluate(trainer.eval_dataset), the rows that the trainer has tokenised

Data: the last documents of gsm8k_train.jsonl and qmsum_train.jsonl in --data. The loss is on the assistant's turns. Of
a meeting of qmsum every 100th character is used, so that it fits. The model is a tiny Llama on bytes, trained for half
a minute first, because an untrained model has the same loss on every document. The reference is computed here, document
by document: total loss / total trained tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import torch
import trl
from common import Row, describe, hide_progress, make_parser, write_csv
from datasets import Dataset, load_dataset
from rich.console import Console
from rich.table import Table
from support.models import build_tiny_model, build_tokenizer
from support.runs import config
from transformers import AutoModelForCausalLM

import trl_packfix

MAX_LENGTH = 768
NUM_TRAINED = 120
NUM_EVALUATED = {"gsm8k": 40, "qmsum": 24}
BATCH_SIZES = (1, 4, 16)
RANKS = (1, 2)
WAYS = ("dict", "raw", "prepared")
TRAINERS = {"ours": (trl_packfix.SFTTrainer, trl_packfix.SFTConfig), "trl": (trl.SFTTrainer, trl.SFTConfig)}


def shortened(row: Row) -> Row:
    messages = [dict(message) for message in row["messages"]]
    for message in messages:
        if message["role"] != "assistant":
            message["content"] = message["content"][: len(message["content"]) // 100]
    return {"messages": messages}


def documents(data: Path, name: str) -> tuple[Dataset, Dataset]:
    """Rows for training and rows for evaluation, with the column `messages` only."""
    rows = load_dataset("json", data_files=str(data / f"{name}_train.jsonl"), split="train").select_columns("messages")
    if name == "qmsum":
        rows = rows.map(shortened)
    held_out = NUM_EVALUATED[name]
    num = min(NUM_TRAINED, len(rows) - held_out)
    return rows.select(range(num)), rows.select(range(len(rows) - held_out, len(rows)))


def make_trainer(kind: str, folder: Path, train: Dataset, evaluated: Dataset, **settings: Any) -> trl.SFTTrainer:
    cls, config_class = TRAINERS[kind]
    settings |= {"max_length": MAX_LENGTH, "assistant_only_loss": True, "logging_strategy": "no"}
    return cls(
        str(folder / "model") if (folder / "model").is_dir() else build_tiny_model(),
        config(folder / "out", config_class, **settings),
        train_dataset=train,
        eval_dataset=evaluated,
        processing_class=build_tokenizer(),
    )


def train_model(folder: Path, data: Path) -> None:
    """Train a model and save it in `folder / "model"`."""
    rows = datasets.concatenate_datasets([documents(data, name)[0] for name in NUM_EVALUATED])
    trainer = make_trainer(
        "ours", folder, rows, rows.select(range(2)), packing=True, max_steps=40, learning_rate=5e-3, warmup_steps=5
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


def truth(folder: Path, data: Path, name: str) -> tuple[float, int]:
    """Loss and trained tokens of the evaluation set, with every document computed separately."""
    train, evaluated = documents(data, name)
    prepared = make_trainer("trl", folder, train.select(range(2)), evaluated, packing=False).eval_dataset
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    total = 0.0
    count = 0
    for row in prepared:
        tokens, labels = (torch.tensor(row[key][:MAX_LENGTH]) for key in ("input_ids", "labels"))
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        trained = labels[1:] != -100
        total -= log_probs[trained, labels[1:][trained]].sum().item()
        count += int(trained.sum())
    return total / count, count


def evaluate_all(folder: Path, data: Path) -> list[Row]:
    """Evaluate in every way on the ranks of this process group."""
    rows: list[Row] = []
    for name, kind, packing in product(NUM_EVALUATED, TRAINERS, (True, False)):
        train, evaluated = documents(data, name)
        trainer = make_trainer(kind, folder, train.select(range(20)), evaluated, packing=packing)
        for batch_size, way in product(BATCH_SIZES, WAYS):
            trainer.args.per_device_eval_batch_size = batch_size
            given = {"dict": {"a": evaluated}, "raw": evaluated, "prepared": trainer.eval_dataset}[way]
            metrics = trainer.evaluate(given)
            rows.append(
                {
                    "data": name,
                    "trainer": kind,
                    "packing": packing,
                    "ranks": trainer.args.world_size,
                    "batch_size": batch_size,
                    "way": way,
                    "eval_loss": metrics.get("eval_loss", metrics.get("eval_a_loss")),
                }
            )
    return rows


def launch(folder: Path, data: Path, ranks: int) -> list[Row]:
    result = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    log = (folder / f"{ranks}.log").open("w")
    code = subprocess.call(
        [*command, "--data", str(data), "--worker", str(folder)], stdout=log, stderr=log, timeout=1800
    )
    if code:
        raise SystemExit(f"{ranks} ranks ended with {code}:\n{Path(log.name).read_text()[-3000:]}")
    return json.loads(result.read_text())


def show(console: Console, rows: list[Row], truths: dict[str, tuple[float, int]]) -> None:
    for name, (loss, count) in truths.items():
        title = f"{name}: {NUM_EVALUATED[name]} documents, {count:,} trained tokens, true loss {loss:.7f}"
        table = Table(title=title, title_justify="left")
        for column in ("trainer", "packing", "ranks", "batch size", *WAYS):
            table.add_column(column, justify="right")
        for kind, packing, ranks, batch_size in product(TRAINERS, (True, False), RANKS, BATCH_SIZES):
            wanted = {"data": name, "trainer": kind, "packing": packing, "ranks": ranks, "batch_size": batch_size}
            found = {row["way"]: row["eval_loss"] for row in rows if wanted.items() <= row.items()}
            digits = 7 if kind == "ours" else 3
            cells = [f"{found[way]:.{digits}f}" for way in WAYS]
            table.add_row(kind, "packed" if packing else "unpacked", str(ranks), str(batch_size), *cells)
        console.print(table)
    for kind in TRAINERS:
        errors = [abs(row["eval_loss"] / truths[row["data"]][0] - 1) for row in rows if row["trainer"] == kind]
        console.print(f"{kind}: {len(errors)} evaluations, relative error at most {max(errors):.1e}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_train.jsonl and qmsum_train.jsonl")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    hide_progress()
    if args.worker:
        rows = evaluate_all(args.worker, args.data)
        if os.environ["RANK"] == "0":
            (args.worker / f"{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(rows))
        torch.distributed.destroy_process_group()
        return
    console = Console(width=120)
    console.print(describe(), highlight=False)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = args.data.resolve()
        train_model(folder, data)
        truths = {name: truth(folder, data, name) for name in NUM_EVALUATED}
        rows = [row for ranks in RANKS for row in launch(folder, data, ranks)]
    show(console, rows, truths)
    console.print(f"{time.perf_counter() - start:.0f} seconds")
    write_csv(args.csv, [row | {"true_loss": truths[row["data"]][0]} for row in rows])


if __name__ == "__main__":
    main()
