"""Three rounds of `tests/chaos.py` on two ranks, and some in which each round has its own number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

CHAOS = Path(__file__).parents[1] / "chaos.py"


needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def killed(folder, *flags):
    command = [sys.executable, str(CHAOS), *flags]
    paths = os.pathsep.join([str(CHAOS.parent.parent), str(CHAOS.parent)])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@needs_gloo
def test_killed_runs_resume_with_the_batches_and_weights_of_one_left_alone(tmp_path):
    said = killed(tmp_path, "--rounds", "3", "--ranks", "2", "--seed", "5")
    kills, runs = re.search(r"(\d+) kills, .* (\d+) runs to the end: batches and weights as un", said).groups()
    assert int(kills) == 3 and int(runs) >= 1


@needs_gloo
def test_killed_runs_resume_on_other_ranks_with_every_document_once(tmp_path):
    said = killed(tmp_path, "--rounds", "3", "--elastic", "--seed", "5")
    kills, runs, changed = re.search(r"(\d+) kills, .* (\d+) runs to the end: (\d+) of them on one", said).groups()
    assert int(kills) == 3 and int(runs) >= int(changed) >= 1
