"""What documents share: rows and FLOPs with `share_prefixes`, on chats and on one sample per assistant turn.

    python benchmarks/prefix_savings.py --data DIR --tokenizer DIR                # half a minute
    python benchmarks/prefix_savings.py --data DIR --tokenizer DIR --csv savings.csv
    python benchmarks/prefix_savings.py --data DIR --tokenizer DIR --parts 4096   # packs that ranks share

whole    the chats of a file in ChatML, tools in the system turn
turns    one sample per assistant turn: the history and the turn

off      packing_strategy="stream"
pack     the same packs; documents share the beginnings that they have in common with others of their pack
family   packs of pieces: documents that share at least half of the longer one are planned as one
trl bfd  TRL's `pack_dataset(strategy="bfd")`, as its trainer runs it

Documents longer than the capacity are dropped. `rows` are tokens that the model computes, of all packs of the first
epoch; `rows/tokens` is what is left of the tokens of the documents, and `FLOPs` the same by the cost model of a Llama
with 7B parameters. `planned` are the rows by which pieces are packed: two pieces of a pack may begin alike, too. `keys`
are the keys that all packs look up, over their rows, and `most keys` those of one pack over the capacity. A step has 8
packs; `families` are the families of documents of a step, and with "off" its documents are counted. Chats of one
assistant turn have no `turns`.

--parts plans packs of 8 ranks with so many tokens per rank, for documents of up to 32k tokens. `seconds` are those of
an epoch by the model of time of `planning/degrees.py`, a Llama with 7B parameters; `exchange` is the share of it in the
exchange between ranks, and `keys/rank` the most keys that a rank looks up, over its tokens, with all heads.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from common import CHATS, Row, cpu_seconds, describe, json_rows, make_parser, table_of, write_csv
from datasets import Dataset
from rich.console import Console
from support.planners import make_epochs
from transformers import AutoTokenizer
from trl.data_utils import pack_dataset

from trl_packfix.data.documents import Documents, make_documents
from trl_packfix.data.reader import TokenReader
from trl_packfix.features.prefixes.families import shared_by_neighbours
from trl_packfix.features.prefixes.tokens import token_order
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.planning.degrees import GroupTimes
from trl_packfix.planning.packing import SharePrefixes
from trl_packfix.planning.schedule import Schedule

FILES = CHATS | {"gsm8k": "gsm8k_train.jsonl"}
CAPACITIES = (8192, 32768)
PACKS_PER_STEP = 8
PACKED = ("data", "form", "capacity", "documents", "tokens", "method", "packs", "filled", "rows/tokens")
SHOWN = ("data", "form", "capacity", "method", "rows/tokens", "planned/tokens", "flops", "filled")
SHOWN = (*SHOWN, "keys/rows", "most keys/capacity", "documents/step", "families/step")
RANKS = 8  # of the plans that are timed
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the template's, if a chat has none


def rendered(file: Path, tokenizer: Any) -> dict[str, Dataset]:
    """Tokenised rows: whole chats, and one sample per assistant turn."""
    whole = []
    turns = []
    for row in json_rows(file):
        messages = row["messages"]
        tools = row.get("tools")
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        if tools:
            system = (
                messages[0]["content"] + "\n\n# Tools\n\n" + (tools if isinstance(tools, str) else json.dumps(tools))
            )
            messages = [{"role": "system", "content": system}, *messages[1:]]
        tokens: list[int] = []
        for message in messages:
            tokens += tokenizer(chatml(message), add_special_tokens=False)["input_ids"]
            if message["role"] == "assistant":
                turns.append([*tokens])
        whole.append(tokens)
    forms = {"whole": whole} | ({"turns": turns} if len(turns) > len(whole) else {})
    return {name: Dataset.from_dict({"input_ids": rows}) for name, rows in forms.items()}


def chatml(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    text = (message.get("content") or "") + (json.dumps(calls) if calls else "")
    return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


def measured(rows: Dataset, capacity: int) -> Iterator[Row]:
    reader = TokenReader(rows)
    documents = make_documents(reader, capacity, "drop")
    seconds, order = cpu_seconds(lambda: token_order(reader, documents))
    documents = replace(documents, token_order=order)
    lengths, tokens = documents.lengths, int(documents.lengths.sum())
    kept = {"documents": len(documents), "dropped": len(rows) - len(documents), "tokens": tokens}
    for setting in ("off", "pack", "family"):
        planner = make_epochs(documents, "stream", 1, capacity, PACKS_PER_STEP, share_prefixes=setting)
        schedule = planner.schedule(0)
        plan = planner.first_plan
        slot = np.empty(len(documents), dtype=np.int64)
        slot[schedule.order] = np.repeat(np.arange(len(schedule.offsets) - 1), np.diff(schedule.offsets))
        found = documents.token_order.within(slot)
        size = lengths[found.order]
        shared = shared_by_neighbours(found.common, size) if setting != "off" else 0 * size
        run = size - shared
        looked_up = np.bincount(slot[found.order], np.where((run > 1) | (shared == 0), size, 0))
        row = kept | {"method": setting, "packs": plan.num_packs, "rows": int(run.sum()), "sort_s": seconds}
        row |= {"rows/tokens": int(run.sum()) / tokens, "planned/tokens": int(plan.lengths.sum()) / tokens}
        row |= {"flops": float((LLAMA_7B(size) - LLAMA_7B(shared)).sum() / LLAMA_7B(size).sum())}
        row |= {"filled": plan.efficiency, "keys/rows": looked_up.sum() / run.sum()}
        row |= {"most keys/capacity": looked_up.max() / capacity}
        row |= {"documents/step": len(documents) / planner.num_steps}
        row |= {"families/step": row["documents/step"]}
        if setting == "family":
            pieces = planner.units()
            step = slot[schedule.order] // PACKS_PER_STEP
            families = len(np.unique(step * len(documents) + pieces.family[schedule.order]))
            row |= {"pieces": len(pieces), "families": pieces.num_families}
            row |= {"families/step": families / planner.num_steps}
        yield row
    kept_rows = rows.select(documents.row)
    packs = len(pack_dataset(kept_rows, capacity, "bfd"))
    yield (
        kept
        | {"method": "trl bfd", "packs": packs, "rows": tokens, "rows/tokens": 1.0, "flops": 1.0}
        | {"filled": tokens / packs / capacity}
    )


# Packs that ranks share


def on_groups(rows: Dataset, tokens_per_rank: int) -> Iterator[Row]:
    reader = TokenReader(rows)
    longest = CAPACITIES[-1]
    documents = make_documents(reader, longest, "drop")
    documents = replace(documents, token_order=token_order(reader, documents))

    def training(setting: SharePrefixes) -> Schedule:
        parts = {"tokens_per_rank": tokens_per_rank, "share_prefixes": setting}
        return make_epochs(documents, "stream", 1, longest, 2, RANKS, **parts).schedule(0)

    def evaluation(strategy: str, setting: SharePrefixes) -> Schedule:
        parts = {"tokens_per_rank": tokens_per_rank, "share_prefixes": setting, "shuffle": False}
        return make_epochs(documents, strategy, 1, longest, 1, RANKS, **parts).schedule(0)

    schedules = {setting: training(setting) for setting in ("off", "pack", "family")}
    schedules |= {f"evaluation, {name}": evaluation("bfd", name) for name in ("off", "pack", "family")}
    for name, schedule in schedules.items():
        yield {"documents": len(documents), "method": name} | computed(schedule, documents, tokens_per_rank, name)


def computed(schedule: Schedule, documents: Documents, tokens_per_rank: int, name: str) -> Row:
    """What the packs of a schedule compute, and their seconds by the model of time."""
    slots = len(schedule.offsets) - 1
    slot = np.empty(len(documents), dtype=np.int64)
    slot[schedule.order] = np.repeat(np.arange(slots), np.diff(schedule.offsets))
    found = documents.token_order.within(slot)
    size = documents.lengths[found.order]
    shared = shared_by_neighbours(found.common, size) * (not name.endswith("off"))
    times = GroupTimes(LLAMA_7B)
    seconds = 0.0
    exchange = 0.0

    def of_groups(values: np.ndarray) -> np.ndarray:
        return np.bincount(slot[found.order], values, slots).reshape(-1, RANKS)

    rows = of_groups(size - shared)
    for degree in np.unique(schedule.degrees).tolist():
        model = LLAMA_7B.shared_by(degree)
        steps = schedule.degrees == degree
        costs = of_groups(model(size) - model(shared))[steps][:, ::degree]
        seconds += times.seconds(costs, rows[steps][:, ::degree], degree).max(axis=1).sum()
        exchange += times.seconds(0 * costs, rows[steps][:, ::degree], degree).mean(axis=1).sum()
    keys = of_groups(np.where((size - shared > 1) | (shared == 0), size, 0)) / schedule.degrees[:, None]
    return {
        "micro-steps": len(schedule.degrees),
        "rows/tokens": 1 - float(shared.sum() / size.sum()),
        "seconds": float(seconds),
        "exchange": float(exchange / seconds),
        "keys/rank": float(keys.max() / tokens_per_rank),
        "degrees": " ".join(map(str, np.unique(schedule.degrees).tolist())),
    }


def main() -> None:
    parser = make_parser(__doc__, f"folder with {', '.join(FILES.values())}")
    parser.add_argument("--tokenizer", metavar="DIR", help="with the special tokens of ChatML, such as SmolLM2's")
    parser.add_argument("--only", choices=FILES, nargs="+", default=[*FILES], help="these data only")
    parser.add_argument("--parts", type=int, metavar="TOKENS", help="tokens per rank of packs that ranks share")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    console = Console(width=180)
    console.print(describe())
    found: list[Row] = []
    if args.data and args.parts:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        for name in args.only:
            for form, rows in rendered(args.data / FILES[name], tokenizer).items():
                found += [{"data": name, "form": form} | row for row in on_groups(rows, args.parts)]
        console.print(table_of(found, text=text))
    elif args.data:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        for name in args.only:
            for form, rows in rendered(args.data / FILES[name], tokenizer).items():
                for capacity in CAPACITIES:
                    found += [
                        {"data": name, "form": form, "capacity": capacity} | row for row in measured(rows, capacity)
                    ]
        console.print(table_of(found, PACKED, text))
        console.print(table_of([row for row in found if row["method"] != "trl bfd"], SHOWN, text))
    write_csv(args.csv, found)


def text(cell: Any) -> str:
    return f"{cell:,.3f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell


if __name__ == "__main__":
    main()
