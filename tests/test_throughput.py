"""The benchmark for a GPU, exercised on the CPU: every part runs, every contender is counted alike."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]


def test_every_part_of_the_gpu_benchmark_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "throughput_gpu.py", "--smoke", "--csv", tmp_path / "rows.csv"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    exact = next(row for row in rows if row["part"] == "exactness")
    # packing adds nothing to the error that bf16 has anyway, and there is one
    assert float(exact["alone_logits"]) > 1e-4
    assert float(exact["packed_over_alone_logits"]) < 1.5 and float(exact["packed_over_alone"]) < 1.5
    trained = [row for row in rows if row["part"] == "train"]
    assert len(trained) == 2 * 5 and not any(row["reason"] for row in rows if "reason" in row)
    for row in trained:
        assert (float(row["computed_over_real"]) > 1) == (row["method"] == "padded"), row
        assert float(row["documents_per_s"]) > 0 and "smoke" in row["card"]
    assert {row["attention"] for row in trained if row["method"] == "TRL bfd"} == {"sdpa"}
    assert {row["attention"] for row in trained if "ours" in row["method"]} == {"packfix_varlen"}
    for row in trained:
        if "ours" in row["method"]:
            said = [row[name] for name in ("isolated", "equal", "unpacked", "repaired_modules")]
            assert said == ["True", "True", "False", "0"]
            assert float(row["max_difference"]) <= float(row["tolerance"]) and float(row["probe_s"]) > 0
        padded = next(other for other in trained if (other["model"], other["method"]) == (row["model"], "padded"))
        gain = float(row["tokens_per_s"]) / float(padded["tokens_per_s"])
        assert float(row["share"]) == pytest.approx(gain / float(padded["computed_over_real"]))
