"""The tools for a GPU without one: tests/gpu/run.sh and benchmarks/evidence.py. They test themselves on the CPU with
tiny sizes, too: `tests/gpu/run.sh --evidence`."""

import csv
import importlib
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.launch import run_python, run_to_end

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"


@pytest.mark.parametrize(
    "flags, python, status, states, phrase",
    [
        (["--steps", "0 2"], "/bin/false", 1, ["FAILED"], "exit status 1; see 0_environment.log"),
        (["--steps", "0 2 3 5", "--limit", "1"], sys.executable, 1, ["no time"], 'run.sh --steps "0 2 3 5"\n'),
        (["--fast"], sys.executable, 2, [], "[--quick]"),
    ],
)
def test_it_ends_with_what_remains(flags, python, status, states, phrase, tmp_path):
    done = run_to_end(
        SCRIPT, "--out", tmp_path, *flags, succeeds=False, seconds=900, PYTHON=python, CUDA_VISIBLE_DEVICES=""
    )
    path = tmp_path / "steps.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    assert done.returncode == status
    assert [row["state"] for row in rows] == states
    assert phrase in f"{done.stdout}{done.stderr}{rows}"


FIRST_LOOK = """
import os, sys

class Importing:
    def find_spec(self, name, *rest):
        if name == "torch":
            names = "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY"
            print(*map(os.environ.get, names), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Importing())
"""
TRAIN = "import runpy; sys.argv = ['train.py', '--help']; runpy.run_path('examples/train.py', run_name='__main__')"
DEMO = TRAIN.replace("train.py", "demo.py")
DPO, VISION = (TRAIN.replace("train.py", f"train_{name}.py") for name in ("dpo", "vision"))
IMPORTS = ["import conftest", TRAIN, DEMO, DPO, VISION]
IMPORTS += ["from trl_packfix.cli import main; main(['train', '--help'])"]
LAUNCHED = {"CUDA_VISIBLE_DEVICES": "4,5", "RANK": "0", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
LOOKS = [(code, {"CUDA_VISIBLE_DEVICES": "4,5"}, "4 expandable_segments:True PASSIVE") for code in IMPORTS]
# What is timed on a GPU leaves the threads of the CPU as they are
TIMED = ("import throughput_gpu", "import evidence_parts")
LOOKS += [(code, {"CUDA_VISIBLE_DEVICES": "4,5"}, "4 expandable_segments:True None") for code in TIMED]
LOOKS += [
    (TRAIN, {}, "0 expandable_segments:True PASSIVE"),
    (DEMO, {"OMP_WAIT_POLICY": "ACTIVE"}, "0 expandable_segments:True ACTIVE"),
    (TRAIN, LAUNCHED, "4,5 None PASSIVE"),
]


@pytest.mark.parametrize("code, variables, printed_value", LOOKS)
def test_torch_is_imported_in_the_environment_that_we_set(code, variables, printed_value):
    """We set one GPU, segments that grow and threads that sleep in waiting. What a launcher or user has set stays."""
    folders = [str(ROOT / name) for name in ("tests", "benchmarks", ".")]
    set_here = ("LOCAL_RANK", "RANK", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY")  # by these tests
    env = {key: value for key, value in os.environ.items() if key not in set_here}
    env |= {"PYTHONPATH": os.pathsep.join(folders)} | variables
    command = [sys.executable, "-c", FIRST_LOOK + code]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{printed_value}\n", done.stdout + done.stderr


# Evidence: parts without figures


def opened(folder):
    """Return (table, rows) of the archive, which is all that a run leaves."""
    assert [path.name for path in folder.iterdir()] == ["evidence.tar.gz"]
    with tarfile.open(folder / "evidence.tar.gz") as archive:
        assert archive.getnames()[:2] == ["table.txt", "evidence.csv"]
        table, text = (archive.extractfile(name).read().decode() for name in archive.getnames()[:2])
    return table, list(csv.DictReader(io.StringIO(text)))


PLAYED = """
import json, pathlib, sys, time
folder, names = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--parts") + 1 :]

def write(name, **record):
    path = folder / f"{name}.new"
    path.write_text(json.dumps({"began": time.time(), **record}))
    path.rename(folder / f"{name}.json")

for name in names:
    write(name, state="running", rows=[{"case": "first", "x": 1.0}])
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        sys.exit(7)
    rows = [{"case": "first", "x": 1.0}, {"case": "second", "x": float("nan") if name == "not a number" else 2.0}]
    write(name, state="passed", rows=rows, ended=time.time())
"""


@pytest.fixture
def evidence(monkeypatch):
    """Return the module of the benchmark."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))  # the import sets it
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("evidence")


def test_a_part_that_fails_is_named_and_the_others_go_on(evidence, tmp_path, monkeypatch, capfd):
    """Without figures, or because it hangs or crashes; what it gave before is kept."""
    states = {"not a number": "failed", "hangs": "stopped", "crashes": "failed", "last": "passed"}
    (child := tmp_path / "child.py").write_text(PLAYED)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(evidence, "CHILD", [sys.executable, str(child)])
    monkeypatch.setattr(evidence, "PARTS", {n: evidence.Part(1 if n == "hangs" else 60, ("x",)) for n in states})
    monkeypatch.setattr(evidence, "is_available", lambda: True)
    assert evidence.main(["--out", str(tmp_path / "out"), "--limit", "100", "--parts", *states]) == 1
    table, rows = opened(tmp_path / "out")
    assert {row["part"]: row["state"] for row in rows} == states
    assert {row["x"] for row in rows if row["part"] in ("hangs", "crashes")} == {"1.0"}
    assert "no figures: second" in table
    assert "exceeded its limit of 1 s" in table
    assert "ended with status 7" in table
    assert "hangs, crashes" in capfd.readouterr().out


def test_the_parts_of_the_headline_have_time(evidence):
    """`make gpu-evidence` ends within its limit, with half a minute for imports."""
    limit, part_names = re.search(
        r"--evidence --limit (\d+) --parts \"(.*)\"", (ROOT / "Makefile").read_text()
    ).groups()
    assert int(limit) <= 300
    table = evidence.time_table(part_names.split(), int(limit))
    planned = sum(evidence.PARTS[name].seconds for name in part_names.split())
    assert table.startswith(f"At most {planned} s, by the limit of all ({limit} s) and of each part: machine 5, ")
    assert planned + 30 <= int(limit)


def test_parts_run_on_the_cpu(tmp_path):
    """Run the parts that take seconds; `make bench` runs others. They call much of the package that changes."""
    part_names = ["machine", "kernels", "8b-lora", "memory", "million", "exactness", "launches", "prefixes"]
    flags = ["--smoke", "--out", tmp_path, "--parts", *part_names]
    done = run_python(ROOT / "benchmarks" / "evidence.py", *flags, seconds=900)
    table, rows = opened(tmp_path)
    assert {row["part"] for row in rows} == set(part_names)
    assert "TINY SIZES" in table
    assert "pyarrow" in done.stdout
    assert "At most" in done.stdout
    trained = {row["case"] for row in rows if row["tokens_per_s"]}
    assert trained == {"ours stream", "no checkpointing", "dropout 0.05", "liger", "as NeMo AutoModel"}
