"""A step of DPO on real pairs on the CPU: stock TRL, with `pack_forward`, and with it but without shared prompts.

    python benchmarks/pack_forward.py --data DIR --quick                  # batch size 8, about 2 minutes
    python benchmarks/pack_forward.py --data DIR --csv pack_forward.csv   # batch sizes 2, 4 and 8

Pairs are answers to the same turn in oasst1, in SmolLM2 tokens. All contenders train on the same batches. The model is
a Llama of 4 layers with hidden size 256. Its vocabulary is 256, and tokens are taken modulo it: on a CPU the loss of
TRL scores every position of the padded rows, on a GPU those of answers only, so a large head would be most of the time.

`padded`, `real` and `computed` are tokens per step, of policy and reference. CPU seconds per step are medians
(`time.process_time`, one thread) without the first step, which has the proof; `proof` is what it and the test of the
models cost. `saved MiB` is what the autograd graph of one step holds.
"""

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import CHATS, MIB, REAL_DATA, Row, describe, hide_progress, make_console, make_parser, table_of, write_csv
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer

from trl_packfix import pack_forward

VOCABULARY = 256
CONTENDERS: dict[str, dict[str, bool] | None] = {
    "stock": None,
    "packed, prompts twice": {"share_prefixes": False},
    "packed": {"share_prefixes": True},
}


def pairs_of(folder: Path) -> Dataset:
    """For each turn of oasst1 with several answers, the first answer against each of the others."""
    answers: dict[str, list[str]] = defaultdict(list)
    for line in (folder / CHATS["oasst1"]).read_text().splitlines():
        messages = json.loads(line)["messages"]
        for turn, message in enumerate(messages):
            before = json.dumps(messages[:turn])
            if message["role"] == "assistant" and message["content"] not in answers[before]:
                answers[before].append(message["content"])

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    return Dataset.from_list(
        [
            {"prompt": json.loads(before), "chosen": answer(first), "rejected": answer(other)}
            for before, (first, *others) in answers.items()
            for other in others
        ]
    )


def build_model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes))


class Clock(TrainerCallback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.start)


def saved_bytes(trainer: DPOTrainer, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that the graph of the loss of one batch holds, without parameters."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = trainer.compute_loss(trainer.model, batch)
    del loss
    return sum(held.values())


def measure(name: str, pairs: Dataset, tokenizer: Any, batch_size: int, args: Any) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            folder,
            per_device_train_batch_size=batch_size,
            max_steps=args.steps,
            max_length=args.max_length,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = DPOTrainer(build_model(), build_model(), config, train_dataset=pairs, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        collate = trainer.data_collator

        def folded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            batch = collate(rows)
            return batch | {"input_ids": batch["input_ids"] % VOCABULARY}

        trainer.data_collator = folded
        trainer.add_callback(clock := Clock())
        start = time.process_time()
        options = CONTENDERS[name]
        packing = None if options is None else pack_forward(trainer, **options)
        proof = time.process_time() - start
        trainer.train()
        first, *rest = clock.seconds
        seconds = statistics.median(rest)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        saved = saved_bytes(trainer, next(iter(trainer.get_train_dataloader())))
    row: Row = {"batch": batch_size, "method": name, "CPU s": seconds, "proof": 0.0, "saved MiB": saved / MIB}
    row["last loss"] = losses[-1]
    if packing is not None:
        tokens = packing.tokens
        passes = args.steps + 1  # one more for `saved`
        row |= {"padded": tokens.padded / passes, "real": tokens.real / passes, "computed": tokens.computed / passes}
        row["proof"] = proof + first - seconds
    return row


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--quick", action="store_true", help="batch size 8, 4 steps")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=1024)
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data is needed: the pairs are real")
    args.steps = 4 if args.quick else args.steps
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    hide_progress()
    console = make_console(140)
    tokenizer = AutoTokenizer.from_pretrained(args.data / "smollm2_tokenizer")
    pairs = pairs_of(args.data)
    console.print(f"{len(pairs)} pairs of oasst1, max_length {args.max_length}; {describe()}")
    rows: list[Row] = []
    for batch_size in (8,) if args.quick else (2, 4, 8):
        group = [measure(name, pairs, tokenizer, batch_size, args) for name in CONTENDERS]
        stock = group[0]
        shared = group[-1]
        for row in group:
            row["times stock"] = stock["CPU s"] / row["CPU s"]
            row |= (
                {key: row.get(key, shared["padded"]) for key in ("padded", "real", "computed")} if row is stock else {}
            )
        stock["real"] = shared["real"]
        losses = [row["last loss"] for row in group]
        assert max(losses) - min(losses) < 1e-4, f"other losses: {losses}"
        rows += group
    columns = (
        "batch",
        "method",
        "padded",
        "real",
        "computed",
        "CPU s",
        "times stock",
        "saved MiB",
        "proof",
        "last loss",
    )
    console.print(table_of(rows, columns, lambda value: f"{value:,.2f}" if isinstance(value, float) else str(value)))
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
