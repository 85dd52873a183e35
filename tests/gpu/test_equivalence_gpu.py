"""The table of equivalences in bf16: packs, as on a GPU, against unpacked training in fp32.

    pytest tests/gpu/test_equivalence_gpu.py -n 5     # 75 seconds on an H200

With GPU_TESTS_ON_CPU=1 on a CPU; that tests the tests only.
"""

from dataclasses import replace

import pytest
import torch
from ranks.table import IN_ONE, ROWS
from ranks.training import train, train_unpacked
from support.rounding import weight_difference

pytestmark = pytest.mark.gpu
NAMES = [name for name in IN_ONE if ROWS[name].data != "screens"]  # whose reference is unpacked by hand, in fp32


@pytest.mark.parametrize("name", NAMES)
def test_packs_are_as_far_from_fp32_as_unpacked_training_is(name, tmp_path, monkeypatch):
    use_cpu = not torch.cuda.is_available()
    monkeypatch.setattr("ranks.training.engine_settings", lambda engine, folder: {"use_cpu": use_cpu})
    settings = ROWS[name].given
    in_fp32, in_bf16 = (replace(ROWS[name], given=settings | {"bf16": bf16}, evaluates=False) for bf16 in (False, True))
    exact = train_unpacked(tmp_path, in_fp32)
    unpacked = train_unpacked(tmp_path, in_bf16)
    packed = train(tmp_path, in_bf16)
    error, rounding = (
        weight_difference(result["end"], exact["end"], exact["start"], least_change=0.1)
        for result in (packed, unpacked)
    )
    assert packed["proof"][:2] == (True, True)
    assert rounding > 1e-4
    assert error <= 3 * rounding + 1e-3
