"""The benchmark for a GPU on the CPU: what has no figures is missed. Its parts run in test_evidence.py."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "throughput_gpu.py"
METHODS = ["padded", "ours", "TRL bfd", "TRL bfd flash", "ours stream"]


COUNT = """
import sys; sys.path.insert(0, "benchmarks")
from throughput_gpu import without_figures as count

parts = [{"part": "ceiling", "tflops": 1.0}, {"part": "exactness", "tokens": 9}]
rows = parts + [{"part": "train", "method": name, "tokens_per_s": 1.0} for name in METHODS]
failed = [row | {"reason": "TypeError"} for row in rows]
print([count(rows, False), count(failed + rows, False), count(failed, False), count(rows[:3] + failed, False)])
print([count(rows, True), count(failed[:1] + rows, True), count(rows[1:], True)])
"""


def test_a_part_or_method_without_figures_is_missed():
    code = COUNT.replace("METHODS", repr(METHODS))
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    everything = ["ceiling", "exactness", *METHODS]
    assert run.stdout == f"{[[], [], everything, METHODS[1:]]}\n{[[], ['ceiling'], ['ceiling']]}\n", run.stderr


def test_a_run_without_figures_fails(tmp_path):
    command = [sys.executable, SCRIPT, "--smoke", "--minutes", "0", "--csv", tmp_path / "rows.csv"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and "12 rows, 12 without figures" in run.stdout, run.stdout
    assert run.stderr.endswith(f"no figures of: ceiling, exactness, {', '.join(METHODS)}\n"), run.stderr
    with (tmp_path / "rows.csv").open() as file:
        assert {row["reason"] for row in csv.DictReader(file)} == {"not measured: out of time"}


def test_benchmarks_use_the_field_that_all_versions_have():
    """`activation_checkpointing` came with transformers 5.20. `make test VERSIONS=oldest` runs this file, too."""
    texts = {file.name: file.read_text() for file in (ROOT / "benchmarks").glob("*.py")}
    assert len(re.findall(r"\bgradient_checkpointing=", "".join(texts.values()))) > 2
    assert not [name for name, text in texts.items() if "activation_checkpointing" in text]


@pytest.mark.slow
def test_every_contender_on_the_cpu_makes_its_steps(monkeypatch):
    """They run outside of `train()`, where our trainer makes no step and refuses packs unless it is prepared."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contenders import CONTENDERS, Contender, Size, make_documents

    assert len(CONTENDERS) == 6
    documents = make_documents([40, 7, 60, 21])
    for name in CONTENDERS:
        row = Contender(name, Size(64, 1), documents, batch_size=2, max_length=64).epoch()
        assert row["steps"] >= 1 and row["tokens"] == 128, name
