"""Sequence parallelism on four real ranks (gloo, CPU): the exchange, its proof, and training equal to one process.

`shared_packs.py` holds the scenarios, and one process forks the ranks of all launches.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import shared_packs
import torch
from support.launch import LAUNCH_SECONDS, environment
from torch import nn

from trl_packfix.attention.exchange import group_of, head_ranges, make_groups
from trl_packfix.attention.forwards import PackedForward, entered
from trl_packfix.attention.varlen import _device_boundaries, varlen_attention

ROOT = Path(__file__).parent.parent
BOUNDS = torch.tensor([0, 5, 8], dtype=torch.int32)
WHOLE = PackedForward(BOUNDS, BOUNDS, 5, 5)

on_ranks = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.processes,
]


class Launch:
    """The results of all launches: `launch[name, scenario]`."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log"
        with self.log.open("w") as log:
            command = [sys.executable, str(ROOT / "tests" / "shared_packs.py"), str(folder)]
            process = subprocess.Popen(
                command, cwd=folder, env=environment(folder), stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(LAUNCH_SECONDS)
            except subprocess.TimeoutExpired:
                log.write(f"\nkilled after {LAUNCH_SECONDS} s\n")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def __getitem__(self, key: tuple[str, str]) -> dict:
        launch, name = key
        file = self.folder / launch / f"{name}.pt"
        if not file.is_file():
            pytest.fail(f"{launch}: {name} did not end. The log ends with:\n{self.log.read_text()[-6000:]}")
        return torch.load(file)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Launch:
    return Launch(tmp_path_factory.mktemp("shared_packs"))


# Attention


class TestAttention:
    pytestmark = on_ranks

    def test_parts_give_the_outputs_and_gradients_of_the_whole_pack(self, launch):
        cases = launch["ddp", "attention"]["cases"]
        assert len(cases) == 2 * len(shared_packs.HEADS) * len(shared_packs.FEATURES)
        assert max(cases.values()) < 1e-13, cases

    @pytest.mark.parametrize("fault", shared_packs.FAULTS)
    def test_faults_are_seen(self, launch, fault):
        assert min(launch["ddp", "attention"]["faults"][fault]) > 1

    def test_groups_are_aligned_neighbours(self, launch):
        assert launch["ddp", "attention"]["groups"] == {2: [0, 1], 4: [0, 1, 2, 3]}


@pytest.mark.parametrize("heads, kv_heads", shared_packs.HEADS)
@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_every_head_is_computed_once_with_the_keys_that_it_reads(heads, kv_heads, degree):
    ranges = head_ranges(heads, kv_heads, degree)
    assert [head for queries, _ in ranges for head in range(queries.start, queries.stop)] == [*range(heads)]
    sizes = [queries.stop - queries.start for queries, _ in ranges]
    assert max(sizes) - min(sizes) <= 1
    for queries, keys in ranges:
        read = {head * kv_heads // heads for head in range(queries.start, queries.stop)}
        assert read == set(range(keys.start, keys.stop))


def test_fewer_heads_than_ranks_are_refused():
    with pytest.raises(ValueError, match=r"2 head\(s\) got a part of a pack on 4 ranks.*at least one head.*Set `tok"):
        head_ranges(2, 1, 4)


def test_groups_need_ranks():
    make_groups([1])  # nothing to make
    with pytest.raises(ValueError, match=r"Groups of 2 ranks .* 1 rank\(s\).*Every rank needs a group.*divides"):
        make_groups([2])
    with pytest.raises(RuntimeError, match=r"no process group of 2 ranks.*cannot exchange.*`SFTTrainer`"):
        group_of(2)


def attend(tokens, forward, **given):
    q = k = v = torch.randn(1, 2, tokens, 4)
    with entered(forward):
        return varlen_attention(nn.Module(), q, k, v, None, **given)[0]


def test_a_part_with_other_tokens_is_refused():
    part = replace(WHOLE, degree=2, part_tokens=4)
    with pytest.raises(ValueError, match=r"got 8 tokens.*each of the 2 ranks .* holds 4.*Set tokens_per_rank=None"):
        attend(8, part)
    with pytest.raises(ValueError, match=r"dropout=0.1 on a part of a pack.*same random numbers.*attention_dropout"):
        attend(4, part, dropout=0.1)
    with pytest.raises(ValueError, match=r"repaired module got a part of a pack that 2 ranks share.*whole documents"):
        part.documents(1.0)


def test_boundaries_beyond_the_pack_are_refused_from_shapes_alone():
    """On a GPU a kernel would read beyond the tensor, and comparing the values would wait for the device."""
    _device_boundaries({}, WHOLE, 8)
    for longest, num_tokens in ((5, 4), (1, 1)):
        forward = replace(WHOLE, max_length_q=longest, max_length_k=longest)
        with pytest.raises(ValueError, match=r"2 documents of up to \d tokens.*pack has \d tokens.*read beyond"):
            _device_boundaries({}, forward, num_tokens)
