"""Three rounds of `tests/chaos.py` on two ranks, and some in which each round has its own number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]
CHAOS = Path(__file__).parents[1] / "chaos.py"
ENDS = {  # by flag: what is said of the runs that came to their end
    "--ranks=2": "batches and weights as uninterrupted",
    "--elastic": r"[1-9]\d* of them on one rank and on two, every document once",
}


@pytest.mark.parametrize("flag", ENDS)
def test_killed_runs_resume(flag, tmp_path):
    command = [sys.executable, str(CHAOS), "--rounds", "3", flag, "--seed", "5"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHAOS.parent.parent), str(CHAOS.parent)])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(rf"3 kills, .* [1-9]\d* runs to the end: {ENDS[flag]}", done.stdout), done.stdout
