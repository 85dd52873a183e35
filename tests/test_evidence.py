"""One call, most evidence: every part runs on the CPU, and none passes without figures."""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["padded", "ours", "TRL bfd", "TRL bfd flash", "ours stream"]


def opened(folder):
    """(table, rows) of the archive, which is all that a run leaves."""
    assert [path.name for path in folder.iterdir()] == ["evidence.tar.gz"]
    with tarfile.open(folder / "evidence.tar.gz") as archive:
        assert archive.getnames()[:2] == ["table.txt", "evidence.csv"]
        table, text = (archive.extractfile(name).read().decode() for name in archive.getnames()[:2])
    return table, list(csv.DictReader(io.StringIO(text)))


@pytest.mark.slow
def test_every_part_gives_figures_on_a_cpu(tmp_path):
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [ROOT / "tests" / "gpu" / "run.sh", "--evidence", "--out", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("NO GPU") and "13 parts" in done.stdout and "all passed" in done.stdout
    table, rows = opened(tmp_path)
    assert "TINY SIZES" in table and "nothing about a GPU" in table
    assert {row["state"] for row in rows} == {"passed"}
    parts = {}
    for row in rows:
        parts.setdefault(row["part"], {})[row["case"]] = row
    assert len(parts) == 13 and len(parts["kernels"]) == 12
    _check_trainings(parts)
    # packing adds nothing to the error that bf16 has anyway, and there is one
    (exact,) = parts["exactness"].values()
    assert float(exact["alone_logits"]) > 1e-4
    assert float(exact["packed_over_alone_logits"]) < 1.5 and float(exact["packed_over_alone"]) < 1.5
    blocks = {case: int(row["idle_blocks"]) for case, row in parts["launches"].items()}
    assert all((number == 0) == ("by length" in case) for case, number in blocks.items()), blocks
    assert float(parts["prefixes"]["levels"]["difference"]) < 0.01
    assert float(parts["reads"]["ours stream"]["reads"]) == 1 < float(parts["reads"]["TRL unpacked"]["reads"])
    calls = [int(row["attention_calls"]) for row in parts["towers"].values()]
    assert calls[1] == 2 < calls[0]  # one per layer
    assert {row["failed"] for row in parts["tests"].values()} == {"0"}
    without = [row["case"] for row in rows if row["reason"]]  # what is not installed, and TRL's older LM head
    assert set(without) <= {"FA3, 64 tokens", "FA3, 128 tokens", "ours stream, liger", "7B, LoRA"}, without


def _check_trainings(parts):
    for name in ("7b-flan", "7b-orcamath", "1.5b-flan"):
        trained = {method: parts[name][method] for method in METHODS}
        for method, row in trained.items():
            assert (float(row["computed_over_real"]) > 1) == (method == "padded"), row
            assert float(row["host_bound"]) == 1  # no kernel of a GPU ran
            gain = float(row["tokens_per_s"]) / float(trained["padded"]["tokens_per_s"])
            assert float(row["share"]) == pytest.approx(gain / float(trained["padded"]["computed_over_real"]))
            assert row["attention"] == ("sdpa" if method in ("padded", "TRL bfd") else "packfix_varlen")
            if "ours" in method:
                said = [row[column] for column in ("isolated", "equal", "unpacked", "repaired_modules")]
                assert said == ["True", "True", "False", "0"]
                assert float(row["max_difference"]) <= float(row["tolerance"]) and float(row["probe_s"]) > 0
    assert float(parts["1.5b-flan"]["ours stream, static shapes"]["tokens_per_s"]) > 0


PLAYED = """
import json, pathlib, sys, time
folder, names = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--parts") + 1 :]

def write(name, **record):
    path = folder / f"{name}.new"
    path.write_text(json.dumps({"began": time.time(), **record}))
    path.rename(folder / f"{name}.json")

print("a process begins with", *names)
for name in names:
    write(name, state="running", rows=[{"case": "first", "x": 1.0}])
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        sys.exit(7)
    rows = json.loads(ROWS)[name]
    write(name, state="passed", rows=rows, ended=time.time())
    if name == "breaks the GPU":
        sys.exit(3)
"""
ROWS = {
    "right": [{"case": "first", "x": 1.0}, {"case": "second", "optional": True, "reason": "not installed"}],
    "breaks the GPU": [{"case": "first", "x": 2}],
    "empty": [],
    "not a number": [{"case": "first", "x": 1.0}, {"case": "second", "x": float("nan")}],
    "without the column": [{"case": "first", "y": 1.0, "reason": "TypeError"}],
    "skipped": [{"case": "first", "optional": True, "reason": "not installed"}],
    "last": [{"case": "first", "x": 3.0}],
}


@pytest.fixture
def played(tmp_path, monkeypatch):
    """`evidence.main` with parts that behave as their names say: (exit status, table, rows) of a run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("signal.signal", lambda *args: None)
    import evidence

    child = tmp_path / "child.py"
    child.write_text(f"ROWS = {json.dumps(ROWS)!r}\n{PLAYED}")
    monkeypatch.setattr(evidence, "CHILD", [sys.executable, str(child)])

    def run(*names, limit=100):
        parts = {name: evidence.Part(1 if name == "hangs" else 60, ("x",)) for name in names}
        monkeypatch.setattr(evidence, "PARTS", parts)
        status = evidence.main(["--out", str(tmp_path / "out"), "--limit", str(limit), "--parts", *names])
        return status, *opened(tmp_path / "out")

    return run


def test_a_part_without_figures_has_failed_and_the_others_go_on(played):
    status, table, rows = played(*ROWS)
    states = {row["part"]: row["state"] for row in rows}
    passed = {"right", "breaks the GPU", "last"}
    assert status == 1 and states == {name: "passed" if name in passed else "failed" for name in ROWS}
    reasons = {row["part"]: row["part_reason"] for row in rows if row["part_reason"]}
    assert reasons == {
        "empty": "no figures: of anything",
        "not a number": "no figures: second (not measured)",
        "without the column": "no figures: first (TypeError)",
        "skipped": "no figures: of anything",
    }
    assert "no figures: second" in table
    assert played("right", "last")[0] == 0


def test_a_part_that_hangs_or_crashes_is_named_and_the_others_go_on(played, capfd):
    status, table, rows = played("right", "hangs", "crashes", "last")
    assert status == 1
    states = {row["part"]: (row["state"], row["x"]) for row in rows if row["case"] == "first"}
    assert states == {
        "right": ("passed", "1.0"),
        "hangs": ("stopped", "1.0"),  # what it gave before is kept
        "crashes": ("failed", "1.0"),
        "last": ("passed", "3.0"),
    }
    assert "it exceeded its limit of 1 s" in table and "ended with status 7" in table
    assert "2 not passed: hangs, crashes" in capfd.readouterr().out


def test_what_has_no_time_is_named(played):
    status, _, rows = played("right", "last", limit=0)
    assert status == 1 and {row["state"] for row in rows} == {"no time"}
