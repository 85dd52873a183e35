"""Three rounds of `tests/chaos.py` on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_killed_runs_resume(tmp_path):
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(tests / "chaos.py"), "--rounds", "3", "--ranks", "2", "--seed", "5"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = r"3 kills, .* [1-9]\d* runs to the end: batches and weights as uninterrupted"
    assert re.search(summary, done.stdout), done.stdout
