"""Does packing change learning? Training and validation curves of one small model on the same documents.

    python benchmarks/convergence.py --data DIR --csv convergence.csv --plot convergence.png   # some minutes

Every run trains one epoch on the same documents of gsm8k_train.jsonl (else on generated sums), as bytes, from the same
weights:
  padded      `packing=False`, 8 documents per step: TRL's unpacked training
  regrouped   the same in two micro-batches of 4: the effect of the order of summation alone
  minibatch   `padding_free=True`: the documents of every step are those of `padded`, without padding
  stream, bfd packs of 2048 tokens per step; `wrapped` cuts the concatenation instead
  density     `stream` with packs of 1024 to 16384 tokens: more documents per step, fewer steps, the same learning rate
Curves are compared at equal numbers of documents. Validation is exact (total loss / total trained tokens), on documents
that are never trained on.
The differences are the largest over all steps (training loss, logged every step) and over all evaluations.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import Row, cpu_seconds, describe, hide_progress, json_rows, make_parser, write_csv
from datasets import Dataset
from support.models import build_tiny_model, build_tokenizer

from trl_packfix import SFTConfig, SFTTrainer

MAX_LENGTH = 1024
NUM_HELD_OUT = 32
RUNS: dict[str, dict[str, Any]] = {
    "padded": {"per_device_train_batch_size": 8},
    "regrouped": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "minibatch": {"per_device_train_batch_size": 8, "padding_free": True},
    "bfd": {"per_device_train_batch_size": 2, "packing": True, "packing_strategy": "bfd"},
    "wrapped": {"per_device_train_batch_size": 2, "packing": True, "packing_strategy": "wrapped"},
    "stream 1024": {"per_device_train_batch_size": 1, "packing": True},
    "stream 2048": {"per_device_train_batch_size": 2, "packing": True},
    "stream 4096": {"per_device_train_batch_size": 4, "packing": True},
    "stream 8192": {"per_device_train_batch_size": 8, "packing": True},
    "stream 16384": {"per_device_train_batch_size": 16, "packing": True},
}


def texts(folder: Path | None, num: int) -> Dataset:
    if folder is not None and folder.is_dir():
        turns = [row["messages"] for row in json_rows(folder / "gsm8k_train.jsonl", num)]
        return Dataset.from_dict({"text": ["\n".join(turn["content"] for turn in row) for row in turns]})
    rng = np.random.default_rng(0)
    sums = [rng.integers(1, 60, (int(n), 2)) for n in rng.integers(8, 80, num)]
    return Dataset.from_dict({"text": ["; ".join(f"{a}+{b}={a + b}" for a, b in pairs) for pairs in sums]})


def learn(train_set: Dataset, held_out: Dataset, vocab_size: int, **settings: Any) -> tuple[SFTTrainer, float]:
    """The trainer of one epoch of a small Llama, which logs each step and six evaluations, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            num_train_epochs=1,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=0.2,
            eval_on_start=True,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            packing_report=False,
            disable_tqdm=True,
            **settings,
        )
        sizes = {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 2048}

        def run() -> SFTTrainer:
            trainer = SFTTrainer(
                build_tiny_model(vocab_size=vocab_size, **sizes),
                args,
                train_dataset=train_set,
                eval_dataset=held_out,
                processing_class=build_tokenizer(),
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            return trainer

        seconds, trainer = cpu_seconds(run)
    return trainer, seconds


def train(name: str, train_set: Dataset, held_out: Dataset, learning_rate: float) -> list[Row]:
    """One run; a row for each logged step and each evaluation."""
    settings = {"max_length": MAX_LENGTH, "learning_rate": learning_rate, "per_device_eval_batch_size": 8}
    trainer, seconds = learn(train_set, held_out, 300, **settings, **RUNS[name])
    rows = []
    for entry in trainer.state.log_history:
        row = {"run": name, "step": entry["step"], "documents": entry["step"] / trainer.state.max_steps}
        row["documents"] = round(row["documents"] * len(trainer.train_dataset), 1)
        row |= {"steps": trainer.state.max_steps, "documents_per_step": len(train_set) / trainer.state.max_steps}
        row |= {key: entry[key] for key in ("loss", "eval_loss") if key in entry}
        rows.append(row | {"learning_rate": learning_rate, "cpu_s": round(seconds, 1)})
    return [row for row in rows if "loss" in row or "eval_loss" in row]


def curve(rows: list[Row], name: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["documents"], row[value]) for row in rows if row["run"] == name and value in row]
    return tuple(np.array(points).T)


def differences(rows: list[Row], name: str, reference: str) -> str:
    """The validation loss of a run, and the largest differences of its losses from those of the reference."""
    (documents, loss), (_, validation) = (curve(rows, name, key) for key in ("loss", "eval_loss"))
    (same_documents, same_loss), (_, same) = (curve(rows, reference, key) for key in ("loss", "eval_loss"))
    training = np.abs(loss - same_loss).max() if np.array_equal(documents, same_documents) else float("nan")
    apart = np.abs(validation - same).max() if len(validation) == len(same) else float("nan")
    text = f"eval_loss {validation[0]:.4f} -> {validation[-1]:.4f}, beside {reference}: "
    return f"{text}training {training:.1e}, validation {apart:.1e}"


def plot(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, style in (("padded", {"lw": 4, "alpha": 0.35}), ("minibatch", {"lw": 1.2})):
        left.plot(*curve(rows, name, "loss"), label=f"{name}, training", color="C0", **style)
        left.plot(*curve(rows, name, "eval_loss"), label=f"{name}, validation", color="C1", **style)
    left.set(title="The same documents per step", xlabel="documents seen", ylabel="loss per trained token")
    left.legend(frameon=False)
    for name in ("padded", "minibatch", "stream 2048", "bfd", "wrapped"):
        documents, loss = curve(rows, name, "eval_loss")
        middle.plot(documents[1:], loss[1:], label=name, ls="--" if name == "minibatch" else "-", marker=".")
    middle.set(title="Other documents per step: packs of 2048", xlabel="documents seen", ylabel="validation loss")
    middle.legend(frameon=False)
    ends = {}
    for name in dict.fromkeys(row["run"] for row in rows):
        if name.startswith("stream"):
            density = next(row["documents_per_step"] for row in rows if row["run"] == name)
            ends[density] = curve(rows, name, "eval_loss")[1][-1]
    right.plot(list(ends), list(ends.values()), marker="o", label="stream")
    padded = next(row["documents_per_step"] for row in rows if row["run"] == "padded")
    right.plot(padded, curve(rows, "padded", "eval_loss")[1][-1], "s", color="C3", label="padded, minibatch")
    right.set(title="Density at equal documents seen", xlabel="documents per optimizer step", xscale="log")
    right.set(ylabel="validation loss at the end")
    right.set_xticks(list(ends), [f"{density:.0f}" for density in ends], minor=False)
    right.minorticks_off()
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__, "folder with gsm8k_train.jsonl")
    parser.add_argument("--num", type=int, default=384, help="documents to train on")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS), help="`padded` is always run")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there (all runs are needed)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    hide_progress()
    print(describe())
    documents = texts(args.data, args.num + NUM_HELD_OUT)
    held_out = documents.select(range(NUM_HELD_OUT))
    train_set = documents.select(range(NUM_HELD_OUT, len(documents)))
    rows: list[Row] = []
    for name in ["padded", *(name for name in args.runs if name != "padded")]:
        rows += train(name, train_set, held_out, args.learning_rate)
        row = rows[-1]
        text = f"{name:<13} {row['documents_per_step']:6.1f} documents a step, {row['steps']:4} steps, "
        print(f"{text}{differences(rows, name, 'padded')}, {row['cpu_s']} CPU s", flush=True)
        write_csv(args.csv, rows)  # after each run, so that an interrupted benchmark keeps its rows
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
