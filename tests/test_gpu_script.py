"""tests/gpu/run.sh without a GPU: the script itself, with tiny sizes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "gpu" / "run.sh"


def run(folder, *flags, python=sys.executable):
    env = os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([SCRIPT, "--out", folder, *flags], env=env, capture_output=True, text=True, timeout=900)
    path = folder / "steps.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    return done, rows


@pytest.mark.slow
def test_steps_run_in_order_and_say_that_there_is_no_gpu(tmp_path):
    done, rows = run(tmp_path, "--quick", "--steps", "0 1 2 3 8", "--limit", "800")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["step"], row["state"]) for row in rows] == [
        ("0", "passed"), ("1", "skipped"), ("2", "passed"), ("3", "passed"), ("8", "skipped")
    ]  # fmt: skip
    assert {row["device"] for row in rows} == {"CPU (proves nothing about CUDA)"}
    assert done.stdout.startswith("NO GPU") and "nothing was shown about CUDA" in done.stdout
    assert "2 passed" in rows[3]["reason"], rows
    shapes = list(csv.DictReader((tmp_path / "shapes.csv").open()))
    assert len(shapes) == 6 and {row["finite"] for row in shapes} == {"True"}
    assert {row["torch"] for row in shapes} == {torch.__version__}
    assert "torch " in (tmp_path / "0_environment.log").read_text()


def test_it_stops_at_the_first_failure(tmp_path):
    done, rows = run(tmp_path, "--steps", "0 2", python="/bin/false")
    assert done.returncode == 1
    assert [(row["step"], row["state"]) for row in rows] == [("0", "FAILED")]
    assert "exit status 1; see 0_environment.log" in rows[0]["reason"]


def test_it_ends_at_its_limit(tmp_path):
    done, rows = run(tmp_path, "--steps", "2", "--limit", "1")
    assert done.returncode == 1 and [row["state"] for row in rows] == ["no time"]
    assert "the limit of 1 s is reached" in rows[0]["reason"]


def test_an_unknown_flag_shows_the_usage(tmp_path):
    done, rows = run(tmp_path, "--fast")
    assert done.returncode == 2 and "[--quick]" in done.stderr and not rows
