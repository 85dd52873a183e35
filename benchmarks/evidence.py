"""One call, most evidence: everything that a first GPU can show in 10 minutes, as one archive with a table at its top.

    tests/gpu/run.sh --evidence                                  # or: make gpu ARGS=--evidence
    make gpu-evidence                                            # the parts of the headline, in 300 s
    tests/gpu/run.sh --evidence --parts "million kernels"        # in a second call, with FlashAttention-3 installed
    python benchmarks/evidence.py --out DIR --parts kernels      # some of the parts
    python benchmarks/evidence.py --out DIR --smoke              # tiny sizes on the CPU: runs every part, shows nothing

The parts run one after another in one process (`evidence_parts.py`), those that decide most first. Limits are
what an H200 or an H100 took, with some room; a part of which a package is missing leaves out its rows, and says so:

    machine       rates of matrix products and of copies
    kernels       12 cases of our attention against the CPU in fp64: heads of 64 and 128, windows, sinks
    7b-flan       LoRA on Llama-2-7B on FLAN-like lengths, 16 and 4 documents in a step, the same for all: TRL padded on
                  sdpa and on the kernels of packs, ours, TRL's packing on these kernels; tokens/s, documents/s, MFU,
                  memory, milliseconds of each step, and the share of a step in which the GPU waited
    7b-orcamath   the same on OrcaMath-like lengths, all without checkpointing
    compile       LoRA on Llama-3-8B in packs of 2 x 4,096 on OASST1-like lengths, with and without `torch_compile`
    8b-lora       the same without it, 12 steps: with and without checkpointing, with Liger's kernels, with dropout, and
                  with the settings of NeMo AutoModel's benchmark
    1.5b-flan     all weights of Qwen2.5-1.5B in bf16, 12 steps: with and without checkpointing, also with constant
                  shapes (whose padding counts as tokens)
    tests         training and repair (tests/gpu)
    memory        the predicted peak against the peak that torch counts
    million       attention of a rank of 8 in a layer of Qwen3-8B on one document of 1,048,576 tokens, on
                  FlashAttention-2, on cuDNN, and on FlashAttention-3 where it is installed (docs/gpus.md)
    exactness     packs in bf16 against fp32, over the error of each document alone in bf16
    reads         reads on the host per micro-batch, of TRL and of ours
    launches      a pack with one long document, and with most documents empty, in one launch and by length
    wide          heads of 512 dimensions document by document, and on ffpa-attn where it is installed
    prefixes      shared prefixes in one launch and in several, beside whole documents; peak memory

A part that exceeds its limit, or whose process ends, is stopped and named; what it gave is kept, and the others go on
in a new process. A part with a row without its figures has failed, and the exit status is then 1. NCCL, DeepSpeed and
flash-attn are left out: `tests/gpu/run.sh` without flags.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import Row, describe, write_csv
from torch.cuda import is_available

CHILD = [sys.executable, str(Path(__file__).with_name("evidence_parts.py"))]
ON_CPU = 20  # times the limits: a loaded CPU is slow, and no figure depends on it
IMPORTS = 90  # seconds until a process begins its first part, at most
# Not `host_bound`: a contender that reaches its limit has no step left for the profiler
TRAINED = ("tokens_per_s", "documents_per_s", "computed_over_real", "real_tflops", "ms")


# Columns of the CSV that are not in the table
HIDDEN = {"part", "state", "part_seconds", "part_reason", "case", "optional", "method"}
HIDDEN |= {"isolated", "equal", "unpacked", "repaired_modules", "max_difference", "tolerance"}
HIDDEN |= {"step_ms", "step_tokens"}  # each step; the table has the median and the range


class Part(NamedTuple):
    """Its limit on a GPU, in seconds, and the columns in which every row has a number."""

    seconds: int
    figures: tuple[str, ...]


PARTS = {
    "machine": Part(5, ("rate",)),
    "kernels": Part(10, ("error", "rounding")),
    "7b-flan": Part(150, TRAINED),
    "7b-orcamath": Part(110, TRAINED),
    "compile": Part(90, TRAINED),
    "8b-lora": Part(110, TRAINED),
    "1.5b-flan": Part(90, TRAINED),
    "tests": Part(50, ("passed",)),
    "memory": Part(40, ("predicted_gib", "counted_gib", "ratio")),
    "million": Part(30, ("ms", "seconds_of_36_layers")),
    "exactness": Part(10, ("alone_gradient", "packed_over_alone", "packed_over_alone_logits")),
    "reads": Part(15, ("reads",)),
    "launches": Part(5, ("ms", "idle_blocks")),
    "wide": Part(30, ("ms", "tokens")),
    "prefixes": Part(10, ("ms", "tokens")),
}


def time_table(names: list[str], limit: float) -> str:
    """Return a line with the most seconds that a run takes, and with the limits of its parts."""
    limits = [PARTS[name].seconds for name in names]
    parts = ", ".join(f"{name} {seconds}" for name, seconds in zip(names, limits, strict=True))
    return f"At most {min(sum(limits), limit):g} s, by the limit of all ({limit:g} s) and of each part: {parts}"


class Record(NamedTuple):
    """What a part has given. `state` is running, passed, failed, stopped, or no time."""

    state: str
    rows: list[Row]
    reason: str = ""
    began: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def has_figures(row: Row, figures: tuple[str, ...]) -> bool:
    """Whether all of them are finite numbers."""
    values = [row.get(name) for name in figures]
    return all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in values)


def judged(name: str, record: Record) -> Record:
    """A part that came to its end has passed if every row has its figures. Rows may be `optional`, with a reason."""
    needed = [row for row in record.rows if not row.get("optional")]
    missing = [
        f"{row.get('case')} ({row.get('reason', 'not measured')})"
        for row in needed
        if not has_figures(row, PARTS[name].figures)
    ]
    if not needed or missing:
        return record._replace(state="failed", reason=f"no figures: {'; '.join(missing) or 'of anything'}")
    return record._replace(state="passed")


class Run:
    """The parts of a run, in processes that are replaced when they end or exceed a limit."""

    def __init__(self, names: list[str], folder: Path, total: float, smoke: bool, data: Path | None):
        self.names = names
        self.folder = folder
        self.smoke = smoke
        self.data = data
        self.records: dict[str, Record] = {}
        self.began = time.time()
        self.deadline = self.began + total
        self.child: subprocess.Popen[bytes] | None = None

    def parts(self) -> Any:
        """Run all of them. Yields the name of each part that is finished."""
        while waiting := [name for name in self.names if name not in self.records]:
            if time.time() > self.deadline:
                self.records |= {name: Record("no time", [], "the limit of all parts is reached") for name in waiting}
                yield from waiting
                return
            flags = [*(["--smoke"] if self.smoke else []), *(["--data", self.data] if self.data else [])]
            with (self.folder / "log.txt").open("ab") as log:
                command = [*CHILD, "--out", str(self.folder), *flags, "--parts", *waiting]
                self.child = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                yield from self._follow(waiting)
            finally:
                self.stop()

    def stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()

    def _follow(self, waiting: list[str]) -> Any:
        """The parts that this process finishes, and the one at which it has to be replaced."""
        started = time.time()
        factor = ON_CPU if self.smoke else 1
        for name in waiting:
            limit = PARTS[name].seconds * factor
            while True:
                has_ended = self.child.poll() is not None  # before the file is read: it is written before
                record = self._read(name)
                now = time.time()
                begun, most = (started, IMPORTS * factor) if record is None else (record.began, limit)
                if record is not None and record.state != "running":
                    self.records[name] = judged(name, record) if record.state == "passed" else record
                    break
                if has_ended and record is None and name != waiting[0]:
                    return  # it gave up after the part before
                state, reason = self._why_not(has_ended, now - begun, most)
                if state:
                    self.records[name] = Record(state, [] if record is None else record.rows, reason, begun, now)
                    yield name
                    return
                time.sleep(0.05)
            yield name
            started = time.time()  # the next part may not have begun yet

    def _why_not(self, has_ended: bool, seconds: float, most: float) -> tuple[str, str]:
        """(state, reason) of a part that cannot go on, else empty."""
        if has_ended:
            return "failed", f"its process ended with status {self.child.returncode}: see log.txt"
        if time.time() > self.deadline:
            return "stopped", "the limit of all parts is reached"
        if seconds > most:
            return "stopped", f"it exceeded its limit of {most} s"
        return "", ""

    def _read(self, name: str) -> Record | None:
        path = self.folder / f"{name}.json"
        return Record(**json.loads(path.read_text())) if path.exists() else None


def rows_of(records: dict[str, Record]) -> list[Row]:
    """The rows of all parts, each with its part and the state of it; a part without rows has one."""
    rows = []
    for name, record in records.items():
        head = {"part": name, "state": record.state, "part_seconds": round(record.seconds, 1)}
        why = {"part_reason": record.reason} if record.reason else {}
        rows += [head | why | row | head for row in record.rows or [{}]]
    products = [row["rate"] for row in rows if row["part"] == "machine" and "products" in row.get("case", "")]
    for row in rows:
        if products and "real_tflops" in row:
            row["mfu_of_ceiling"] = row["real_tflops"] / products[0]
    return rows


def table(records: dict[str, Record], smoke: bool) -> str:
    """A line for each part and each of its rows."""
    lines = [describe()]
    every = rows_of(records)
    if smoke:
        lines.append("CPU, TINY SIZES: this shows that the parts run, and nothing about a GPU")
    for name, record in records.items():
        reason = f"  {record.reason}" if record.reason else ""
        lines.append(f"{name:<13} {record.state:<8} {record.seconds:6.1f} s{reason}")
        for row in every:
            if row["part"] == name and "case" in row:
                shown = [f"{key} {_text(row[key])}" for key in row if key not in HIDDEN and row[key] is not None]
                lines.append(f"    {row['case']:<36} {', '.join(shown)}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_archive(path: Path, folder: Path, records: dict[str, Record], smoke: bool) -> None:
    """The table, then all rows, then what the process printed."""
    (folder / "table.txt").write_text(table(records, smoke))
    write_csv(folder / "evidence.csv", rows_of(records))
    with tarfile.open(path, "w:gz") as archive:
        for name in ("table.txt", "evidence.csv", "log.txt"):
            if (folder / name).exists():
                archive.add(folder / name, arcname=name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="of all parts, on a GPU")
    parser.add_argument("--data", type=Path, metavar="DIR", help="JSONL files and a tokenizer; else lognormal lengths")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; shows nothing about a GPU")
    args = parser.parse_args(arguments)
    if not args.smoke and not is_available():
        parser.error(
            "no --smoke was given, and torch sees no CUDA device here. The parts measure one. Run them on a "
            "machine with a GPU, or set --smoke: tiny sizes on the CPU, which show nothing about a GPU."
        )
    print(f"{describe()}\n{time_table(args.parts, args.limit)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    run = Run(args.parts, folder, args.limit * (ON_CPU if args.smoke else 1), args.smoke, args.data)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the child ends, too
    try:
        for name in run.parts():
            record = run.records[name]
            print(f"{name:<13} {record.state:<8} {record.seconds:6.1f} s  {record.reason}", flush=True)
            write_archive(args.out / "evidence.tar.gz", folder, run.records, args.smoke)
    finally:
        run.stop()
        shutil.rmtree(folder)
    with tarfile.open(args.out / "evidence.tar.gz") as archive:
        print("\n" + archive.extractfile("table.txt").read().decode())
    wrong = [name for name, record in run.records.items() if record.state != "passed"]
    print(f"{len(run.records)} parts in {time.time() - run.began:.0f} s", end="")
    print(f", {len(wrong)} not passed: {', '.join(wrong)}" if wrong else ", all passed")
    return int(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
