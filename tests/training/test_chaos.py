"""Three rounds of `make chaos`, on one process and on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

CHAOS = Path(__file__).parents[1] / "chaos.py"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_resume_with_the_batches_and_weights_of_one_left_alone(ranks, tmp_path):
    command = [sys.executable, str(CHAOS), "--rounds", "3", "--ranks", str(ranks), "--seed", "5"]
    paths = os.pathsep.join([str(CHAOS.parent.parent), str(CHAOS.parent)])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    kills, runs = re.search(r"(\d+) kills, .* (\d+) runs to the end: batches and weights as un", done.stdout).groups()
    assert int(kills) == 3 and int(runs) >= 1
