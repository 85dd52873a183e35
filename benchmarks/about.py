"""The circumstances of a benchmark: command, date, machine and versions, printed and in every row of its CSV."""

import csv
import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

# Benchmarks use the tiny models and runs of the tests: `from support.models import ...` after this import.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


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


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write every row with the columns of `about`. Columns missing in a row stay empty."""
    rows = [row | about() for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
