"""Liger's kernels on packs: those that work row by row are accepted and proved.

Its entry point is played (`support.liger`). Where it is installed, `on_liger.py` runs its Triton kernels by Triton's
interpreter.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.liger import liger_played
from support.rounding import weight_difference
from support.runs import build_trainer, plain_sgd, run_training, stock, texts, weights
from support.versions import trl_trains

from trl_packfix import PackingLeakError

SETTINGS = plain_sgd(0.1, max_steps=3)
pytestmark = pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")


@pytest.fixture
def played():
    with liger_played() as entry:
        yield entry


@trl_trains
def test_kernels_of_layers_train_packs_as_unpacked_and_are_proved(played, tmp_path):
    unpacked = stock(tmp_path, texts(24), **SETTINGS)
    start_weights = weights(unpacked)
    unpacked.train()
    settings = SETTINGS | {"packing_strategy": "minibatch", "use_liger_kernel": True}
    kernels = {"rope": True, "swiglu": False}
    trainer = run_training(tmp_path, texts(24), liger_kernel_config=kernels, **settings)
    assert played.given == kernels | {"fused_linear_cross_entropy": False}
    assert kernels == {"rope": True, "swiglu": False}, "the user's own settings were changed"
    assert played.calls > 0
    assert trainer.packed_model.isolation.isolated
    assert not trainer.packed_model.repaired
    assert weight_difference(weights(trainer), weights(unpacked), start_weights) < 1e-5


def test_evaluation_is_as_without(played, tmp_path):
    rows = {"eval_dataset": texts(12, seed=1), "max_steps": 1, "learning_rate": 0.0}
    losses = []
    for settings in ({}, {"use_liger_kernel": True}, {"use_liger_kernel": True, "eval_packing": False}):
        trainer = run_training(tmp_path, texts(12), **rows, **settings)
        losses.append(trainer.evaluate()["eval_loss"])
    assert played.calls > 0
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)


def test_a_kernel_that_mixes_rows_is_found(played, tmp_path):
    played.mixes = True
    trainer = build_trainer(tmp_path, texts(24), use_liger_kernel=True, on_leak="raise", **SETTINGS)
    with pytest.raises(PackingLeakError, match="norm"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_the_triton_kernels_train_packs_as_unpacked(model_type):
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: `tools/kernels.sh` has an environment with them")
    command = [sys.executable, Path(__file__).parents[1] / "on_liger.py", model_type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["isolated"]
    assert facts["equal"]
    assert not facts["repaired"]
    assert facts["kernels"]
    assert facts["error"] < 2e-6 < facts["change"]
