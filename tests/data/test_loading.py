"""`packed_dataloader`: the same plan, sampler and collator for any training loop."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from support.models import build_tiny_model, select_attention
from support.paths import ROOT
from support.runs import interrupt_forward
from transformers import LlamaConfig

from trl_packfix import PackingLeakError, packed_dataloader, plan_packs, prepare_for_packing
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.data.loaders import PaddedBatchSampler
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.planning.schedule import NO_DOCUMENTS

LENGTHS = np.random.default_rng(0).integers(2, 30, 97)


def dataset():
    # the first token names the row
    return Dataset.from_dict({"input_ids": [[row] * int(n) for row, n in enumerate(LENGTHS)]})


def rows(batch):
    return batch["input_ids"][0][batch["cu_seq_lens_q"][:-1].long()].tolist()


@pytest.mark.parametrize("strategy", ["stream", "bfd", "bfd_split", "wrapped", "minibatch"])
def test_all_ranks_together_hold_every_document_once(strategy):
    rows_seen = []
    for rank in range(3):
        loader = packed_dataloader(
            dataset(), 32, 2, strategy=strategy, gradient_accumulation_steps=2, rank=rank, world_size=3
        )
        batches = list(loader)
        assert len(batches) == len(loader)
        assert len(loader) % 2 == 0
        assert all(batch["input_ids"].shape[1] <= 64 for batch in batches)
        # a rank without documents trains two tokens, none of them a target
        rows_seen += [row for batch in batches if (batch["labels"] != -100).any() for row in rows(batch)]
    if strategy == "wrapped":
        rows_seen = sorted(set(rows_seen))  # a cut document comes in fragments
    assert sorted(rows_seen) == list(range(97))


@pytest.mark.parametrize("num_documents", [1, 12, 17])
def test_padded_batches_gathered_from_all_ranks_are_in_table_order(num_documents):
    """`gather_for_metrics` joins the batches of ranks 0, 1, 2 and cuts off what is behind the table."""
    samplers = [PaddedBatchSampler(num_documents, batch_size=2, rank=rank, num_processes=3) for rank in range(3)]
    gathered = [row for turn in zip(*samplers, strict=True) for batch in turn for row in batch]
    assert gathered[:num_documents] == list(range(num_documents))
    assert set(gathered[num_documents:]) <= {NO_DOCUMENTS}
    assert len(gathered) - num_documents < 2 * 3


def test_every_pass_is_a_new_epoch_and_set_epoch_chooses_one():
    loader = packed_dataloader(dataset(), 32, 2)
    passes = [[row for batch in loader for row in rows(batch)] for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    loader.set_epoch(1)
    assert [row for batch in loader for row in rows(batch)] == passes[1]


def test_the_plan_is_that_of_plan_packs():
    plan = plan_packs(LENGTHS, 64, "stream", seed=5, epoch=0)
    loader = packed_dataloader(dataset(), 32, 2, seed=5)
    expected = [plan.order[a:b].tolist() for a, b in zip(plan.offsets, plan.offsets[1:], strict=False)]
    assert [rows(batch) for batch in loader] == expected


def test_rows_shuffled_in_blocks_are_read_block_by_block():
    """Reading by the recipe for network storage in docs/gpus.md goes block by block."""
    num = 12_000
    size = 2_000
    table = Dataset.from_dict({"input_ids": [[row] * 3 for row in range(num)]})
    rng = np.random.default_rng(0)
    blocks = np.array_split(np.arange(num), num // size)
    order = np.concatenate([rng.permutation(blocks[i]) for i in rng.permutation(len(blocks))])

    def touched(loader):
        return [len({row // size for row in rows(batch)}) for batch in loader]

    assert max(touched(packed_dataloader(table.select(order), 256, shuffle=False))) <= 2
    assert sorted(touched(packed_dataloader(table, 256)))[1] == 6, (
        "blocks make no difference"
    )  # [0] may be a short pack


PADDED = Dataset.from_dict({"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]})
RESTARTING = Dataset.from_dict({"input_ids": [[5, 6, 7]], "position_ids": [[0, 0, 1]]})
REFUSED = [
    ({"rank": 2, "world_size": 2}, r"`rank=2` was given with `world_size=2`.*from 0 to 1.*Set `rank`"),
    ({"rank": -1}, r"`rank=-1` was given with `world_size=1`"),
    ({"world_size": 0}, r"`world_size=0` was given.*1 or more"),
    ({"batch_size": 0}, r"`batch_size=0` was given.*1 or more"),
    ({"batch_size": 2.0}, r"`batch_size=2\.0` was given\. It is a count.*a whole number.*Set `batch_size`"),
    ({"gradient_accumulation_steps": 0}, r"`gradient_accumulation_steps=0` was given.*fewer than one.*1 or more"),
    ({"max_length": None}, r"`max_length=None` was given.*needs a length.*Set `max_length`"),
    ({"max_length": 32.5}, r"`max_length=32\.5` was given.*counts tokens, so it is a whole number"),
    ({"max_length": 1}, r"`max_length=1` was given.*needs two tokens.*2 or more"),
    ({"strategy": "bfdd"}, r"`strategy='bfdd'` was given.*no such choice.*'stream', 'bfd'"),
    ({"overlong": "foo"}, r"`overlong='foo'` was given.*no such choice.*'truncate', 'split'"),
    ({"synchronisation": "all"}, r"`synchronisation='all'` was given.*'micro', 'step'"),
    ({"strategy": "wrapped", "overlong": "truncate"}, r"`strategy='wrapped'` was given with `overlong='truncate'`"),
    ({"dataset": RESTARTING}, r"Row 0 of the given dataset has `position_ids` that begin again.*`seq_lengths`"),
    ({"dataset": PADDED}, r"Row 0 of the given dataset is padded.*zeros.*`padding=False`"),
]


@pytest.mark.parametrize("given, message", REFUSED, ids=[str(next(iter(given.items()))) for given, _ in REFUSED])
def test_wrong_arguments_are_refused_as_the_config_refuses_them(given, message):
    with pytest.raises(ValueError, match=message):
        packed_dataloader(**{"dataset": dataset(), "max_length": 32} | given)


@pytest.mark.parametrize("positions", [[], [5, 6]])
def test_a_row_without_a_zero_hides_no_row_that_begins_again(positions):
    table = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "position_ids": [[0, 0, 1], positions]})
    with pytest.raises(ValueError, match="Row 0 of the given dataset has `position_ids` that begin again"):
        packed_dataloader(table, max_length=32)


def test_a_row_may_lack_positions():
    table = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "position_ids": [[0, 1, 2], None]})
    (batch,) = packed_dataloader(table, max_length=32)
    assert batch["input_ids"].numel() == 5


def test_prepare_for_packing_refuses_or_says_what_it_repaired():
    model = build_tiny_model("bloom")
    with pytest.raises(PackingLeakError, match="(?s)changed others by .*Information crosses in .*self_attention"):
        prepare_for_packing(model, on_leak="raise")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert "; repaired: 2 BloomAttention" in prepare_for_packing(model).reason
    model = build_tiny_model("bloom")
    assert prepare_for_packing(model, on_leak="unpack").reason.startswith("UNPACKED, ")


def test_prepare_for_packing_refuses_an_unknown_choice():
    with pytest.raises(ValueError, match="`on_leak='error'`.*no such choice.*'raise'"):
        prepare_for_packing(build_tiny_model("bloom"), on_leak="error")


def test_prepare_for_packing_leaves_nothing_after_an_interruption():
    model = build_tiny_model("bloom")
    interrupt_forward(model)
    with pytest.raises(KeyboardInterrupt):
        prepare_for_packing(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_prepare_for_packing_tests_the_dtype_of_autocast():
    model = build_tiny_model()
    dtypes = set()
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    prepare_for_packing(model, dtype=torch.bfloat16)
    assert dtypes == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


def test_prepare_for_packing_starts_nothing_of_accelerate(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    prepare_for_packing(build_tiny_model("bloom"))
    assert not PartialState._shared_state


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_without_a_guard_names_prepare_for_packing(is_training):
    model = build_tiny_model().train(is_training)
    select_attention(model)
    batch = next(iter(packed_dataloader(dataset(), 32, 4)))
    with pytest.raises(ValueError, match=r"transformers built it: call trl_packfix.prepare_for_packing\(model\)"):
        model(**batch)
    mark_packed_forwards(model)
    model(**batch)


def run_script(folder, text, *words):
    (folder / "script.py").write_text(text)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "script.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORKS = """
import ctypes, os, signal, sys, time
from trl_packfix.data import threads
threads.wait_for_threads_before_forks()
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda argument: None)
for _ in range(800):
    for _ in range(4):  # what threads of gloo do after a collective: they enter Python from outside
        if not libc.pthread_create(ctypes.byref(thread), None, enter, None):
            libc.pthread_detach(thread)
    child = os.fork()
    if not child:
        os._exit(0)
    deadline = time.monotonic() + 20
    while not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.001)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            sys.exit("a forked process hangs")
"""


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts threads through glibc")
def test_a_fork_among_threads_that_enter_python_does_not_hang(tmp_path):
    """Without the wait 13 of 516 such forks hung under load in Python 3.11.7, none in 3.12; with it 0 of 5,194."""
    run_script(tmp_path, FORKS)


LATE = """
import sys, threading, time
from trl_packfix.data import threads

def late():
    time.sleep(0.03)
    print("arrived", flush=True)

if sys.argv[1:]:
    threads.wait_for_threads_at_exit()
threading.Thread(target=late, daemon=True).start()
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python no longer ends such threads")
@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_a_process_waits_for_threads_that_enter_python(waits, tmp_path):
    assert run_script(tmp_path, LATE, *["waits"] * waits) == "arrived\n" * waits


def test_costs_follow_from_the_config_of_the_model():
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=9)
    loader = packed_dataloader(dataset(), max_length=32, cost_model=config)
    assert loader.batch_sampler.planner.packing.cost_model == make_cost_model(config) != LLAMA_7B
