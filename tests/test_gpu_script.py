"""tests/gpu/run.sh without a GPU: the script itself, with tiny sizes."""

import csv
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "gpu" / "run.sh"


def run(folder, *flags, python=sys.executable, visible=""):
    env = os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([SCRIPT, "--out", folder, *flags], env=env, capture_output=True, text=True, timeout=900)
    path = folder / "steps.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    return done, rows


def log(folder, name):
    with tarfile.open(folder / "logs.tar.gz") as logs:
        return logs.extractfile(f"logs/{name}.log").read().decode()


@pytest.mark.slow
def test_steps_run_in_order_and_say_that_there_is_no_gpu(tmp_path):
    done, rows = run(tmp_path, "--quick", "--steps", "0 1 3 7 8", "--limit", "800")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["step"], row["state"]) for row in rows] == [
        ("0", "passed"), ("1", "skipped"), ("3", "passed"), ("7", "passed"), ("8", "skipped")
    ]  # fmt: skip
    assert {row["device"] for row in rows} == {"CPU (proves nothing about CUDA)"}
    assert done.stdout.startswith("NO GPU") and "nothing was shown about CUDA" in done.stdout
    assert "2 passed" in rows[2]["reason"], rows
    shapes = list(csv.DictReader((tmp_path / "shapes.csv").open()))
    assert len(shapes) == 6 and {row["finite"] for row in shapes} == {"True"}
    assert {row["torch"] for row in shapes} == {torch.__version__}
    assert "torch " in log(tmp_path, "0_environment")
    # a remote machine may give back 8 files and no folders of folders: models and checkpoints are elsewhere
    names = ["logs.tar.gz", "shapes.csv", "steps.csv"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == names


def test_figures_come_first():
    """Throughput is the third step and has half of the time; the case without figures is in test_throughput.py."""
    numbers = re.findall(r"^#   (\d) (\S+) ", SCRIPT.read_text(), re.MULTILINE)
    assert numbers[:3] == [("0", "environment"), ("1", "kernels"), ("2", "throughput")] and len(numbers) == 9


def test_it_stops_at_the_first_failure(tmp_path):
    done, rows = run(tmp_path, "--steps", "0 2", python="/bin/false")
    assert done.returncode == 1
    assert [(row["step"], row["state"]) for row in rows] == [("0", "FAILED")]
    assert "exit status 1; see 0_environment.log" in rows[0]["reason"]


def test_it_ends_at_its_limit(tmp_path):
    done, rows = run(tmp_path, "--steps", "0 2 3 5", "--limit", "1")
    assert done.returncode == 1 and [row["state"] for row in rows] == ["no time"]
    assert "the limit of 1 s is reached" in rows[0]["reason"]
    assert done.stdout.endswith('The steps that remain: tests/gpu/run.sh --steps "0 2 3 5"\n')


def test_an_unknown_flag_shows_the_usage(tmp_path):
    done, rows = run(tmp_path, "--fast")
    assert done.returncode == 2 and "[--quick]" in done.stderr and not rows


@pytest.fixture
def played_gpu(tmp_path):
    """An interpreter that says that there is a GPU, and runs nothing: for the branches of the script itself."""
    path = tmp_path / "python"
    path.write_text(
        """#!/bin/sh
case "$*" in *is_available*|*find_spec*) exit 0 ;; esac
echo "visible: $CUDA_VISIBLE_DEVICES"
case "$*" in *shapes.py*) sleep 30 ;; esac
"""
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("visible, first, flag", [("4,5", "4", False), ("GPU-8932f937", "GPU-8932f937", True)])
def test_one_gpu_of_several_is_used(visible, first, flag, played_gpu, tmp_path):
    """With several, every training fails: the Trainer would wrap the model in DataParallel. `--num_gpus` would take
    the first GPU of the machine, whatever is visible, and the launcher reads numbers only."""
    done, rows = run(tmp_path, "--steps", "0 4", python=played_gpu, visible=visible)
    assert done.returncode == 0 and [row["state"] for row in rows] == ["passed", "passed"], done.stdout
    assert f"visible: {first}\n" in log(tmp_path, "0_environment")
    zero3 = log(tmp_path, "4_zero3")
    assert f"visible: {first}\n" in zero3 and ("--num_gpus" in zero3) == flag


def test_a_step_that_runs_at_the_limit_has_not_failed(played_gpu, tmp_path):
    done, rows = run(tmp_path, "--quick", "--steps", "7 8", "--limit", "7", python=played_gpu, visible="0")
    assert done.returncode == 1 and [(row["name"], row["state"]) for row in rows] == [("shapes", "no time")]
    assert done.stdout.endswith('--steps "0 7 8"\n')
    done, rows = run(tmp_path, "--quick", "--steps", "6", "--limit", "7", python=played_gpu, visible="0")
    assert done.returncode == 1 and [(row["name"], row["state"]) for row in rows] == [("compile", "no time")]


def test_throughput_has_half_of_the_time(played_gpu, tmp_path):
    done, rows = run(tmp_path, "--steps", "2", "--limit", "60", python=played_gpu, visible="0")
    assert done.returncode == 0 and [row["state"] for row in rows] == ["passed"], done.stdout
    assert "--minutes 0.5" in log(tmp_path, "2_throughput")


FIRST_LOOK = """
import os, sys

class Importing:
    def find_spec(self, name, *rest):
        if name == "torch":
            print("visible:", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
            os._exit(0)

sys.meta_path.insert(0, Importing())
import MODULE
"""


@pytest.mark.parametrize("module", ["conftest", "throughput_gpu"])
def test_tests_and_the_benchmark_see_one_gpu_when_torch_is_imported(module):
    root = Path(__file__).parents[1]
    folders = [str(root / name) for name in ("tests", "benchmarks", ".")]
    env = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "RANK")}
    env |= {"CUDA_VISIBLE_DEVICES": "4,5", "PYTHONPATH": os.pathsep.join(folders)}
    code = FIRST_LOOK.replace("MODULE", module)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "visible: 4\n", done.stdout + done.stderr
