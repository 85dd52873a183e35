"""Does sharing prefixes change learning? Training and validation curves of one small model on one sample per turn.

    python benchmarks/prefix_convergence.py --data DIR --csv prefix_convergence.csv --plot prefix_convergence.png

Each conversation of sgd_tools_train1200.jsonl (else generated ones) becomes one sample per assistant turn: everything
before it, then the turn, of which alone is trained. So the samples of a conversation begin alike, and all conversations
with the same tools do. Every run trains one epoch on the same samples from the same weights:
  off          `share_prefixes="off"`: packs of 8192 tokens, `stream`
  regrouped    the same, its rows padded to a multiple of 1000: the effect of the order of summation alone
  pack         `share_prefixes="pack"`: the same packs
  family       `share_prefixes="family"`: packs of 8192 rows, with more documents and fewer independent ones
  family small the same in packs of 2048 rows, which hold about as many documents as `off`
Curves are compared at equal numbers of documents. Validation is exact, on conversations that are never trained on, and
shares as the run does. Tokens are numbered anew, so that the vocabulary has only those that occur.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CHATS, Row, cpu_seconds, describe, hide_progress, json_rows, make_parser, write_csv
from convergence import curve, differences, learn
from datasets import Dataset
from support.models import build_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MAX_LENGTH = 2048
RUNS: dict[str, dict[str, Any]] = {
    "off": {"share_prefixes": "off"},
    "regrouped": {"share_prefixes": "off", "pad_to_multiple_of": 1000},
    "pack": {"share_prefixes": "pack"},
    "family": {"share_prefixes": "family"},
    "family small": {"share_prefixes": "family", "per_device_train_batch_size": 1},
}

Sample = tuple[list[int], int]  # tokens, and how many of them are trained


def conversations(folder: Path | None, num: int) -> list[list[tuple[str, str]]]:
    """(role, text) of each turn; the tools are in the system turn."""
    if folder is None or not folder.is_dir():
        return [generated(seed) for seed in range(num)]
    found = []
    for row in json_rows(folder / CHATS["sgd"], num):
        tools = row["tools"] if isinstance(row["tools"], str) else json.dumps(row["tools"])
        turns = [(turn["role"], (turn.get("content") or "") + calls(turn)) for turn in row["messages"]]
        role, text = turns[0] if turns[0][0] == "system" else ("system", "")
        found.append([(role, f"{text}\n{tools}"), *turns[role == turns[0][0] :]])
    return found


def calls(turn: dict[str, Any]) -> str:
    return "".join(json.dumps(call) for call in turn.get("tool_calls") or [])


def generated(seed: int) -> list[tuple[str, str]]:
    rng = np.random.default_rng(seed)
    tools = "You can add, subtract and multiply. " * (8 + seed % 3 * 4)
    turns = [("system", tools)]
    for _ in range(int(rng.integers(3, 9))):
        a, b = rng.integers(1, 60, 2)
        turns += [("user", f"{a} + {b}?"), ("assistant", f"{a} + {b} = {a + b}.")]
    return turns


def samples(turns: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """One per assistant turn. Each turn is tokenised by itself, so what two samples have in common is the same."""
    before: list[int] = []
    found = []
    for role, text in turns:
        head, body = (tokenizer(part)["input_ids"] for part in (f"<|im_start|>{role}\n", f"{text}<|im_end|>\n"))
        before = [*before, *head, *body]
        if role == "assistant" and len(before) <= MAX_LENGTH:
            found.append((before, len(body)))
    return found


def tables(folder: Path | None, num: int, num_held_out: int) -> tuple[Dataset, Dataset, int]:
    """Training and validation samples, and the number of different tokens."""
    tokenizer = build_tokenizer()
    if folder is not None and folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2_tokenizer")
    made = [samples(turns, tokenizer) for turns in conversations(folder, num + num_held_out)]
    used = np.unique(np.concatenate([ids for each in made for ids, _ in each]))
    number = {int(token): i + 3 for i, token in enumerate(used)}

    def table(parts: list[list[Sample]]) -> Dataset:
        rows = []
        for ids, trained in (sample for part in parts for sample in part):
            tokens = [number[token] for token in ids]
            rows.append({"input_ids": tokens, "labels": [-100] * (len(tokens) - trained) + tokens[-trained:]})
        return Dataset.from_list(rows)

    return table(made[num_held_out:]), table(made[:num_held_out]), len(used) + 3


def train(name: str, train_set: Dataset, held_out: Dataset, vocab_size: int, learning_rate: float) -> list[Row]:
    """One run; a row for each logged step and each evaluation."""
    settings = {"packing": True, "max_length": MAX_LENGTH, "learning_rate": learning_rate}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4} | RUNS[name]
    trainer, seconds = learn(train_set, held_out, vocab_size, **settings)
    evaluation, _ = cpu_seconds(trainer.evaluate)
    rows, documents = [], 0.0
    for entry in trainer.state.log_history[:-1]:  # without the last evaluation, which is timed
        documents += entry.get("documents_per_step", 0)
        row = {"run": name, "step": entry["step"], "documents": round(documents, 1), "steps": trainer.state.max_steps}
        keys = ("loss", "eval_loss", "computed_share", "documents_per_step")
        row |= {key: entry[key] for key in keys if key in entry}
        rows.append(
            row | {"learning_rate": learning_rate, "cpu_s": round(seconds, 1), "eval_cpu_s": round(evaluation, 2)}
        )
    return [row for row in rows if "loss" in row or "eval_loss" in row]


def tell(rows: list[Row], name: str) -> None:
    documents, _ = curve(rows, name, "loss")
    row = rows[-1]
    shares = [row["computed_share"] for row in rows if row["run"] == name and "computed_share" in row]
    text = f"{name:<13} {documents[-1] / len(documents):6.1f} documents a step, {row['steps']:4} steps, "
    text += f"{np.mean(shares) if shares else 1:.3f} computed, {differences(rows, name, 'off')}, "
    print(f"{text}{row['cpu_s']} CPU s, one evaluation {row['eval_cpu_s']}", flush=True)


def plot(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in (("off", {"lw": 4, "alpha": 0.35}), ("pack", {"lw": 1.2})):
        left.plot(*curve(rows, name, "loss"), label=name, color="C0", **style)
    left.set(title="The same documents per step", xlabel="documents seen", ylabel="training loss per trained token")
    for name in dict.fromkeys(row["run"] for row in rows):
        documents, loss = curve(rows, name, "eval_loss")
        right.plot(documents, loss, label=name, ls="--" if name == "pack" else "-", marker=".")
    right.set(title="Validation", xlabel="documents seen", ylabel="validation loss per trained token")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__, "folder with sgd_tools_train1200.jsonl and smollm2_tokenizer")
    parser.add_argument("--num", type=int, default=32, help="conversations to train on")
    parser.add_argument("--held_out", type=int, default=8, help="conversations to validate on")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS), help="`off` is always run")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    args = parser.parse_args()

    torch.set_num_threads(1)
    hide_progress()
    print(describe())
    train_set, held_out, vocab_size = tables(args.data, args.num, args.held_out)
    tokens = sum(len(ids) for ids in train_set["input_ids"])
    print(f"{len(train_set)} samples, {tokens} tokens, {len(held_out)} held out, {vocab_size} different tokens")
    rows: list[Row] = []
    for name in ["off", *(name for name in args.runs if name != "off")]:
        rows += train(name, train_set, held_out, vocab_size, args.learning_rate)
        tell(rows, name)
        write_csv(args.csv, rows)  # after each run, so that an interrupted benchmark keeps its rows
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
