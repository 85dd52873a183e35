"""What the benchmarks share: options, real lengths, clocks, tables, and the circumstances of a run in its CSV.

Benchmarks use the tiny models and runs of the tests: `from support.models import ...` after an import of this module.
Those of every model type are in `tools/sweep`: `from sweep import zoo`.
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "pyarrow")
REAL_DATA = "folder of JSONL files with smollm2_tokenizer/ in it"
CHATS = {
    "tau-bench": "taubench_airline_gpt4o.jsonl",
    "sgd": "sgd_tools_train1200.jsonl",
    "oasst1": "oasst1_en_val_threads.jsonl",
}
MIB = 2**20
Row = dict[str, Any]


# Options and output


def make_parser(description: str | None, data: str = "") -> argparse.ArgumentParser:
    """A parser with the option `--csv FILE` and, if `data` describes the folder, `--data DIR`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, metavar="DIR", help=data)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    return parser


def make_console(width: int) -> Console:
    """As wide as the terminal, else `width`."""
    return Console(width=None if sys.stdout.isatty() else width)


def hide_progress() -> None:
    """No progress bars of datasets, no warnings of transformers."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()


def tell(row: Row, float_format: str = "") -> None:
    """Print a row on one line, at once."""
    texts = (f"{k} {v:{float_format}}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print(", ".join(texts), flush=True)


def columns_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def scientific(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def table_of(rows: list[Row], columns: tuple[str, ...] = (), text: Callable[[Any], str] = str) -> Table:
    """A line for each row, with all columns or with these. What a row lacks stays empty."""
    table = Table()
    names = columns or columns_of(rows)
    for name in names:
        table.add_column(name, justify="right" if isinstance(rows[0].get(name), int | float) else "left")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else text(row[name]) for name in names))
    return table


# The circumstances of a run


def cpu_model() -> str:
    """The CPU's name, and whether it has AVX-512. Both decide the speed of matrix products."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    text = path.read_text()
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return (names[0] if names else platform.processor()) + (" with AVX-512" if "avx512f" in text else "")


def about() -> dict[str, str]:
    """Columns that are the same in every row of one run."""
    script = Path(sys.argv[0])
    allocator = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        # only the last part of a data folder: its full path is specific to this machine
        "command": shlex.join(
            [*allocator, "python", f"{script.parent.name}/{script.name}"]
            + [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        ),
    }


def describe() -> str:
    """The same on one line, for printing."""
    return ", ".join(f"{name} {value}" for name, value in about().items())


def write_csv(path: Path | None, rows: list[Row]) -> None:
    """Write every row with the columns of `about`; nothing without a path or rows. What a row lacks stays empty."""
    if path is None or not rows:
        return
    rows = [row | about() for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows), restval="")
        writer.writeheader()
        writer.writerows(rows)


# Clocks and memory


def cpu_seconds(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Median CPU seconds of this process, and the last result of the function."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def peak_mib(function: Callable[[], Any]) -> float:
    """Memory that Python and numpy allocate at the peak of the function, by tracemalloc."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / MIB


def resident_mib() -> float:
    """Memory of this process, with pages of mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def run_again(*arguments: str, **environment: str) -> Any:
    """The last line, as JSON, of this script in a process of its own, with these arguments after its own."""
    command = [sys.executable, *sys.argv, *arguments]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# Real data


def json_rows(file: Path, most: int | None = None) -> Iterator[Row]:
    """The rows of a JSONL file, or the first of them."""
    with file.open() as lines:
        yield from map(json.loads, islice(lines, most))


def file_lengths(folder: Path, pattern: str = "*.jsonl") -> Iterator[tuple[str, np.ndarray]]:
    """Tokens of every row of every JSONL file: `prompt` + `completion` + EOS, or `messages` under the chat template.

    The template has no tools, so a row's tool definitions become a system message, and calls are added to the text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2_tokenizer")

    def text(row: Row) -> str:
        if "prompt" in row:
            return row["prompt"] + row["completion"] + tokenizer.eos_token
        messages = [{"role": "system", "content": row["tools"]}] if row.get("tools") else []
        for message in row["messages"]:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            messages.append({"role": message["role"], "content": (message.get("content") or "") + calls})
        return tokenizer.apply_chat_template(messages, tokenize=False)

    for file in sorted(folder.glob(pattern)):
        texts = [text(row) for row in json_rows(file)]
        yield file.stem, np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids])
