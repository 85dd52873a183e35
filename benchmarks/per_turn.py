"""One sample per assistant turn: how many samples and tokens conversations become, and what preparing them costs.

    python benchmarks/per_turn.py --data DIR                       # about 6 CPU minutes
    python benchmarks/per_turn.py --data DIR --num 50              # the first 50 conversations of each set
    python benchmarks/per_turn.py --data DIR --compare             # the same turns prepared by TRL, too
    python benchmarks/per_turn.py --data DIR --csv per_turn.csv

Conversations of taubench_airline_gpt4o.jsonl, sgd_tools_train1200.jsonl and oasst1_en_val_threads.jsonl in --data, with
the tokenizer in DIR/smollm2_tokenizer and the template of Qwen3, which strips thinking from all but the last turns.
`thinking` is the mean number of words that every assistant turn thinks. The sets have no thinking: 0 is the data as
they are, and otherwise it is put in, random words with exponential lengths.

whole        tokens of the conversations, with TRL's training template of Qwen3, which keeps all thinking
samples      tokens of the samples of `per_turn=True`; `ratio` = samples / whole
trained      tokens with a label, of the samples and (`assistant_only_loss=True`) of the whole conversations
seen         share of the assistant turns whose history in the whole conversation is what generation sees at this turn
CPU s        to tokenise: `per_turn=True`; TRL on the conversations; and with --compare TRL on one row per turn, with a
             `prompt` and a `completion`. These rows must have the same tokens and labels in number.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import trl
from common import CHATS, Row, cpu_seconds, describe, hide_progress, make_parser, table_of, write_csv
from datasets import Dataset, load_dataset
from rich.console import Console
from support.models import build_tiny_model
from support.runs import config
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import trl_packfix
from trl_packfix.data.documents import Count
from trl_packfix.data.reader import TokenReader
from trl_packfix.data.spans import make_documents

SETS = {name.removesuffix("-bench"): file for name, file in CHATS.items()}
TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
WORDS = ("we", "should", "look", "at", "the", "flight", "first", "then", "answer", "because", "user", "asked")


def conversations(data: Path, name: str, num: int | None, thinking: int) -> Dataset:
    """Rows with `messages` and, where the set has them, `tools`; with thoughts of `thinking` words on average."""
    rows = load_dataset("json", data_files=str(data / SETS[name]), split="train")
    rows = rows.select_columns([column for column in ("messages", "tools") if column in rows.column_names])
    rows = rows.select(range(min(num or len(rows), len(rows))))
    if not thinking:
        return rows
    rng, found = np.random.default_rng(0), []
    for row in rows.to_list():
        for message in row["messages"]:
            if message["role"] == "assistant":
                message["reasoning_content"] = " ".join(rng.choice(WORDS, 1 + int(rng.exponential(thinking))))
        found.append(row)
    return Dataset.from_list(found)


def as_prompts(rows: Dataset) -> Dataset:
    """The same turns as rows of TRL with a prompt and a completion."""
    found = []
    for row in rows.to_list():
        messages = row.pop("messages")
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                found.append(row | {"prompt": messages[:k], "completion": [message]})
    return Dataset.from_list(found)


def prepared(kind: Any, rows: Dataset, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> tuple[Dataset, float]:
    """The rows as a trainer prepares them, unpacked and not truncated, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        args = config(folder, kind.SFTConfig, packing=False, max_length=None, **settings)
        model = build_tiny_model(vocab_size=len(tokenizer))
        seconds, trainer = cpu_seconds(
            lambda: kind.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
        )
    return trainer.train_dataset, seconds


def count(table: Dataset) -> Count:
    return make_documents(TokenReader(table), max_length=None).ledger.given


def share_seen(samples: Dataset, whole: Dataset, rows: Dataset) -> float:
    """Share of the assistant turns whose prompt is a beginning of the tokens of their whole conversation."""
    reader, wholes = TokenReader(samples), TokenReader(whole)
    same, sample = [], 0
    for number, messages in enumerate(rows["messages"]):
        conversation = wholes.read(number, 0, int(wholes.lengths[number]))["input_ids"]
        for _ in (message for message in messages if message["role"] == "assistant"):
            document = reader.read(sample, 0, int(reader.lengths[sample]))
            prompt = document["input_ids"][: int((document["labels"] == -100).sum())]
            same.append(np.array_equal(prompt, conversation[: len(prompt)]))
            sample += 1
    assert sample == len(samples)
    return float(np.mean(same))


def measure(
    data: Path, name: str, num: int | None, thinking: int, compares: bool, tokenizer: PreTrainedTokenizerBase
) -> Row:
    rows = conversations(data, name, num, thinking)
    samples, seconds = prepared(trl_packfix, rows, tokenizer, per_turn=True)
    whole, seconds_of_whole = prepared(trl, rows, tokenizer, assistant_only_loss=True)
    row = {
        "set": name,
        "thinking": thinking,
        "conversations": len(rows),
        "samples": len(samples),
        "whole": count(whole).tokens,
        "tokens": count(samples).tokens,
        "ratio": round(count(samples).tokens / count(whole).tokens, 2),
        "trained": count(samples).trained_tokens,
        "trained whole": count(whole).trained_tokens,
        "seen": round(share_seen(samples, whole, rows), 3),
        "CPU s": round(seconds, 1),
        "CPU s whole": round(seconds_of_whole, 1),
    }
    if compares:
        stock, seconds_of_prompts = prepared(trl, as_prompts(rows), tokenizer)
        assert count(samples) == count(stock), "the samples are not TRL's rows"
        row["CPU s prompts"] = round(seconds_of_prompts, 1)
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument("--thinking", nargs="+", type=int, default=[0, 100], metavar="WORDS")
    parser.add_argument("--num", type=int, help="conversations of each set (default: all)")
    parser.add_argument("--compare", action="store_true", help="prepare the same turns with TRL, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    hide_progress()
    datasets.disable_caching()
    print(describe())
    tokenizer = AutoTokenizer.from_pretrained(args.data / "smollm2_tokenizer")
    tokenizer.chat_template = TEMPLATE
    found = []
    for thinking in args.thinking:
        for name in args.sets:
            found.append(measure(args.data, name, args.num, thinking, args.compare, tokenizer))
            print(found[-1], flush=True)
            write_csv(args.csv, found)
    Console(width=160).print(table_of(found, text=lambda x: f"{x:,}" if isinstance(x, int | float) else x))


if __name__ == "__main__":
    main()
