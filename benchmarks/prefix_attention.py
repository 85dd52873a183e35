"""A training step on the CPU with common beginnings computed once, against the same documents in plain packs.

    python benchmarks/prefix_attention.py --data DIR --csv prefix_attention.csv    # about 5 minutes
    python benchmarks/prefix_attention.py                                          # generated chats

whole    the chats of a file in ChatML, tools in the system turn
turns    one sample per assistant turn: the history and the turn; `+ n` puts a block of n tokens before its answer, as a
         template that removes earlier thinking does

Documents are sorted by their tokens, so neighbours begin alike. Both contenders fill packs of --capacity rows with the
same documents and take turns: `PackedDataCollator` and `PrefixCollator`, forward and backward of a Llama of 2 layers
with hidden size 192. CPU seconds are `time.process_time`, medians over --rounds, on one thread.

`rows` and `FLOPs` are ratios, too: rows over tokens, and the cost model of this Llama. `loss gap` is the relative
difference of the two losses. `keys/row` are the keys that one launch on CUDA copies; `GB` are what it copies of one
layer of a Llama 3 8B (8 key/value heads of 128, bfloat16) for the largest pack, and `GB back` what its backward
adds: gradients per query head as the kernel makes them, and sums in fp32. Both are computed, not measured. Above
1 GiB with their gradients nothing is copied twice; then `launches` is their number.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CHATS, REAL_DATA, describe, json_rows, make_parser, table_of, write_csv
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_packfix import PackedDataCollator, prepare_for_packing
from trl_packfix.attention.runs import SharedRuns, most_copied_keys
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.data.prefix_collator import PrefixCollator
from trl_packfix.layout import LAYOUT
from trl_packfix.planning.families import sort_key

# (file, conversations, tokens of thinking per turn or None for whole chats)
CASES = [
    ("oasst1", 40, None),
    ("sgd", 16, None),
    ("tau-bench", 4, None),
    ("tau-bench", 1, 0),
    ("tau-bench", 1, 400),
    ("sgd", 3, 0),
    ("sgd", 3, 100),
    ("sgd", 3, 400),
]
VOCABULARY = 2048  # of the tokenizer's, modulo: else the LM head of so small a model is most of the time
QUERY_HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128  # of Llama 3 8B
Turn = tuple[str, list[int]]


def conversations(folder: Path | None, name: str, num: int) -> list[list[Turn]]:
    """(role, tokens) of each turn of the first conversations in the order of their tokens."""
    rng = np.random.default_rng(0)
    if folder is None:
        system = rng.integers(5, 2000, 600).tolist()
        roles = ["user", "assistant"] * 8
        return [
            [("system", system), *((role, rng.integers(5, 2000, 80).tolist()) for role in roles)] for _ in range(num)
        ]
    tokenizer = AutoTokenizer.from_pretrained(next(folder.glob("*tokenizer*")))
    found = []
    for row in json_rows(folder / CHATS[name], max(10 * num, 200)):
        turns = [
            (turn["role"], (turn.get("content") or "") + _json(turn.get("tool_calls"))) for turn in row["messages"]
        ]
        if row.get("tools"):
            role, text = turns[0] if turns[0][0] == "system" else ("system", "")
            turns = [(role, text + _json(row["tools"])), *turns[1 if turns[0][0] == "system" else 0 :]]
        texts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
        tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
        found.append([(role, own) for (role, _), own in zip(turns, tokens, strict=True)])
    found.sort(key=lambda turns: sort_key(np.array([token for _, own in turns for token in own])))
    return found[:num]


def _json(value: Any) -> str:
    return "" if not value else value if isinstance(value, str) else json.dumps(value)


def documents_of(chats: list[list[Turn]], thinking: int | None) -> list[list[int]]:
    rng = np.random.default_rng(1)
    documents = []
    for turns in chats:
        history: list[int] = []
        for role, own in turns:
            if thinking is not None and role == "assistant":
                block = rng.integers(5, 2000, int(rng.exponential(thinking))).tolist() if thinking else []
                documents.append(history + own[:3] + block + own[3:])
            history = history + own
        if thinking is None:
            documents.append(history)
    return sorted(documents, key=lambda tokens: sort_key(np.array(tokens)))


def packs(documents: list[list[int]], capacity: int, collator: Any) -> list[dict[str, Any]]:
    """Neighbours, as many as have at most `capacity` rows; a longer document is a pack by itself."""
    groups: list[list[dict[str, Any]]] = []
    for tokens in documents:
        document = {"input_ids": tokens}
        if groups and _rows(collator([*groups[-1], document])) <= capacity:
            groups[-1].append(document)
        else:
            groups.append([document])
    return [collator(group) for group in groups]


def _rows(batch: dict[str, Any]) -> int:
    return batch["input_ids"].shape[1]


def loss_of(model: LlamaForCausalLM, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over all tokens of all documents but the first of each."""
    labels, shared = batch["labels"][0], batch.get(LAYOUT)
    at = torch.nonzero(labels != -100)[:, 0] if shared is None else shared.target_rows
    logits = model(**{name: given for name, given in batch.items() if name != "labels"}).logits[0]
    rows = torch.unique(at)  # several documents may be trained on one row
    losses = torch.nn.functional.cross_entropy(logits[rows - 1], labels[rows], reduction="none")
    return (losses * torch.bincount(at, minlength=len(labels))[rows]).sum()


def step(model: LlamaForCausalLM, batches: list[dict[str, Any]]) -> tuple[float, float]:
    """(CPU seconds, loss)."""
    model.zero_grad(set_to_none=True)
    start, total = time.process_time(), 0.0
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        total += loss.item()
    return time.process_time() - start, total


def copied(batches: list[dict[str, Any]]) -> dict[str, float]:
    """Keys that launches on CUDA copy, and their memory."""
    rows = sum(_rows(batch) for batch in batches)
    keys = sum(int(batch["cu_seq_lens_k"][-1]) for batch in batches)
    largest = max(batches, key=lambda batch: int(batch["cu_seq_lens_k"][-1]))
    most, launches = int(largest["cu_seq_lens_k"][-1]), 1
    heads = [torch.empty(1, heads, 0, HEAD_DIM) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
    if most > most_copied_keys(*heads):
        bounds = largest["cu_seq_lens_q"], largest["cu_seq_lens_k"]
        longest = largest["max_length_q"], largest["max_length_k"]
        shared = largest[LAYOUT]
        launches += len(SharedRuns(bounds, longest, shared.kv_index, shared.run_lengths).levels)
        most = _rows(largest)
    key_bytes = 2 * KEY_HEADS * HEAD_DIM * 2  # key and value
    back = 2 * HEAD_DIM * (QUERY_HEADS * 2 + KEY_HEADS * (2 + 4))  # per query head, their sums, and in fp32
    return {"keys/row": keys / rows, "launches": launches, "GB": most * key_bytes / 1e9, "GB back": most * back / 1e9}


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=32_768, **sizes)
    model = LlamaForCausalLM(config).train()
    prepare_for_packing(model)
    cost = make_cost_model(config)
    rows = []
    for name, num, thinking in CASES:
        documents = documents_of(conversations(arguments.data, name, num), thinking)
        documents = [[token % VOCABULARY for token in tokens] for tokens in documents]
        contenders = [
            packs(documents, arguments.capacity, collator) for collator in (PackedDataCollator(), PrefixCollator())
        ]
        rounds = [[step(model, batches) for batches in contenders] for _ in range(arguments.rounds)]
        plain, shared = (statistics.median(found[i][0] for found in rounds) for i in (0, 1))
        losses = [found[1] for found in rounds[0]]
        num_tokens = sum(len(tokens) for tokens in documents)
        saved = [int(n) for batch in contenders[1] if LAYOUT in batch for n in batch[LAYOUT].shared]
        flops = sum(float(cost(len(tokens))) for tokens in documents)
        rows.append(
            {
                "documents": f"{name}, {num} {'whole' if thinking is None else f'by turns + {thinking}'}",
                "number": len(documents),
                "tokens": num_tokens,
                "rows": sum(_rows(batch) for batch in contenders[1]) / num_tokens,
                "FLOPs": 1 - sum(float(cost(n)) for n in saved) / flops,
                "plain s": plain,
                "shared s": shared,
                "shared/plain": shared / plain,
                "loss gap": abs(losses[0] - losses[1]) / losses[0],
                **copied(contenders[1]),
            }
        )
        print(rows[-1], flush=True)
        write_csv(arguments.csv, rows)  # after each case, as all of them take a while
    table = table_of(rows, text=lambda x: f"{x:.3g}" if isinstance(x, float) else str(x), title=describe())
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
