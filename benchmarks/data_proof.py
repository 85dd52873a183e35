"""Is the proof of the data right, and what does it cost?

    python benchmarks/data_proof.py --data DIR

Each file of conversations is proved with each chat template of TRL. Beside it stands a search without marks: of every
text of the first rows that no other text of its row contains, is it in the rendered row, as it is or as JSON? A *false
alarm* is a text (by path and role) that the proof says is left out and that the search finds in every row; *missed* is
one that the search does not find and the proof does not name. Then each template is changed so that it loses something
that is known (`MUTANTS` of tests/samples/test_data_proof.py); a change that a template makes itself proves nothing.
Seconds are CPU seconds of the proof of a file, as a share of those of its tokenisation.
"""

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import REAL_DATA, Row, cpu_seconds, hide_progress, json_rows, make_console, make_parser, table_of, write_csv
from datasets import Dataset, disable_caching, load_dataset
from samples.test_data_proof import MUTANTS, lost
from support.chats import TEMPLATES, tokenizer_with
from transformers import AutoTokenizer

from trl_packfix import SFTConfig
from trl_packfix.samples.conversation import Conversation
from trl_packfix.samples.data_proof import prove_data
from trl_packfix.samples.make_samples import make_samples
from trl_packfix.samples.rendering import Rendering
from trl_packfix.samples.text_kinds import leaves

SHORTEST = 12  # characters of a text that is searched for, and of a row in which it is
LONGEST = 50_000


def with_template(name: str) -> Any:
    tokenizer = tokenizer_with(name)
    tokenizer.bos_token = tokenizer.bos_token or "<|im_start|>"
    return tokenizer


def root(path: str) -> str:
    return path.partition("[")[0].removesuffix(" before </think>").removesuffix(" beside tool_calls")


def searched(rows: list[Row], tokenizer: Any) -> dict[tuple[str, str], Counter[bool]]:
    """How often texts of a path and role are in the rendered rows."""
    found: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for row in rows:
        conversation = Conversation.from_row(row)
        try:
            text = conversation.text(conversation.messages, tokenizer)
        except Exception:
            continue
        texts = [(leaf, leaf.holder[leaf.key]) for leaf in leaves(conversation.messages, conversation.arguments)]
        texts = [(leaf, each.strip()) for leaf, each in texts if isinstance(each, str)]
        everything = "\0".join(each for _, each in texts)
        for leaf, each in texts:
            if len(each) >= SHORTEST and everything.count(each) == 1 and "</think>" not in each:
                forms = {each, *(json.dumps(each, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))}
                found[root(leaf.kind.path), leaf.kind.role][any(form in text for form in forms)] += 1
    return found


def compare(file: Path, num_rows: int) -> Iterator[Row]:
    """The proof of a file with each template beside the search."""
    rows = [row for row in json_rows(file, num_rows) if len(str(row)) < LONGEST]
    table = load_dataset("json", data_files=str(file), split="train")
    for path in sorted(TEMPLATES.glob("*.jinja")):
        tokenizer = with_template(path.stem)
        report = prove_data(table, "train", Rendering(tokenizer))
        states = searched(rows, tokenizer)
        said = [each.what.split("`") for each in report.findings if "leaves out" in each.what]
        named = {(root(what[1]), what[3] if len(what) > 3 else "") for what in said}
        yield {
            "file": file.stem,
            "template": path.stem,
            "rendered": report.num_rendered,
            "kinds": report.num_kinds,
            "not tried": report.num_untried,
            "named": len(named),
            "false alarms": sum(key in named and not counts[False] for key, counts in states.items()),
            "missed": sum(key not in named and bool(counts[False]) for key, counts in states.items()),
        }


def mutate(name: str) -> Row:
    """How many changes of a template are found."""
    source = tokenizer_with(name).chat_template
    try:
        before = lost(source)
    except AssertionError:  # it renders no such conversation
        return {"template": name, "changes": 0, "found": 0, "lost before": 0}
    counts: Counter[str] = Counter()
    for change, path, role in MUTANTS.values():
        is_known = (path, role) in before
        counts["lost before"] += is_known
        if not is_known:
            counts["changes"] += 1
            counts["found"] += (path, role) in lost(change + source)
    return {"template": name, **{key: counts[key] for key in ("changes", "found", "lost before")}}


def costs(file: Path, tokenizer: Any) -> Row:
    """CPU seconds of the proof and of tokenisation, without caches."""
    table: Dataset = load_dataset("json", data_files=str(file), split="train")
    prove_data(table.select([0]), "train", Rendering(tokenizer))  # compiles the template
    seconds, report = cpu_seconds(lambda: prove_data(table, "train", Rendering(tokenizer)))
    args = SFTConfig("unused", use_cpu=True, bf16=False, report_to=[], bad_rows="drop")
    settings = {"tokenizer": tokenizer, "completion_only_loss": True, "keeps_bad_rows": True}
    whole, _ = cpu_seconds(lambda: make_samples(table, "train", args, **settings))
    return {
        "file": file.stem,
        "rows": len(table),
        "seconds": round(seconds, 2),
        "per 10,000 rows": round(seconds / len(table) * 1e4, 2),
        "share of tokenisation": round(seconds / (whole - seconds), 3),
        "rendered": report.num_rendered,
    }


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--rows", type=int, default=20, help="rows of each file that are searched (default: 20)")
    args = parser.parse_args()
    hide_progress()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(args.data / "smollm2_tokenizer")
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    files = [file for file in sorted(args.data.glob("*.jsonl")) if "messages" in next(json_rows(file, 1))]
    compared = [row for file in files for row in compare(file, args.rows)]
    console = make_console(140)
    parts = []
    for file in files:
        rows = [row for row in compared if row["file"] == file.stem]
        sums = {key: sum(row[key] for row in rows) for key in ("named", "false alarms", "missed")}
        of_all = {"part": "compared", "file": file.stem, "templates": len(rows)}
        parts.append(of_all | {"rendered by": sum(row["rendered"] > 0 for row in rows)} | sums)
    console.print(table_of(parts))
    mutants = [{"part": "changed"} | mutate(path.stem) for path in sorted(TEMPLATES.glob("*.jinja"))]
    sums = {key: sum(row[key] for row in mutants) for key in ("changes", "found", "lost before")}
    console.print(f"changed templates: {sums}")
    console.print(table_of([row for row in mutants if row["found"] < row["changes"]] or mutants[:1]))
    disable_caching()
    of_costs = [{"part": "costs"} | costs(file, tokenizer) for file in sorted(args.data.glob("*.jsonl"))]
    console.print(table_of(of_costs))
    write_csv(args.csv, [*parts, *mutants, *of_costs])


if __name__ == "__main__":
    main()
