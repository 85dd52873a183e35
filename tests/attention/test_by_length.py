"""Packs by length, and their launches: fewer blocks without work, and the same outputs to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.attention import take_path_of_cuda
from support.models import attend_packs, build_tiny_model
from support.strict_varlen import StrictVarlen

from trl_packfix.data import by_length
from trl_packfix.data.by_length import ByLength, plan_launches
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.loaders import PackCollator
from trl_packfix.data.rank_share import RankShare
from trl_packfix.data.row_values import WEIGHTS, RowValuesCollator
from trl_packfix.group import Group
from trl_packfix.layout import LAYOUT_KEY, layout_of
from trl_packfix.training.loading import TrainingData


@pytest.fixture
def small_classes(monkeypatch):
    monkeypatch.setattr(by_length, "LENGTH_CLASSES", (8, 40))
    monkeypatch.setattr(by_length, "TILE_QUERIES", 4)


LENGTHS = [5, 70, 3, 20, 1, 8, 2, 33, 7]


def documents(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(1, 30, n), WEIGHTS: float(n)} for n in lengths]


def collator(**settings):
    return ByLength(RowValuesCollator(PackCollator(PackedDataCollator(**settings)), {WEIGHTS: WEIGHTS}))


def test_documents_come_by_length_with_their_values(small_classes):
    batch = collator()(documents())
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert lengths == sorted(LENGTHS, reverse=True)
    assert batch[WEIGHTS].tolist() == lengths
    assert layout_of(batch).attention_fields()["launches"] == (
        (0, 1, 0, 70, 70), (1, 3, 70, 123, 33), (3, 9, 123, 149, 8)
    )  # fmt: skip
    part = collator()(RankShare(documents(), Group(2, 1)))
    assert part[LAYOUT_KEY].attention_fields()["launches"][0] == (0, 1, 0, 70, 70)
    assert part[LAYOUT_KEY].group.rank == 1
    moved = layout_of(batch).to("meta")
    assert moved.launches == layout_of(batch).launches
    assert moved.seq_idx.device.type == "meta"


def test_launches_hold_every_token_once_and_no_empty_document(small_classes):
    batch = collator(pad_to_multiple_of=200, pad_documents_to_multiple_of=16, max_length=70)(documents())
    launches = layout_of(batch).attention_fields()["launches"]
    assert [start for _, _, start, _, _ in launches] == [0, *(stop for _, _, _, stop, _ in launches[:-1])]
    assert launches[-1][3] == batch["input_ids"].shape[1] == 200
    assert launches[-1][1] < 16
    lengths = batch["cu_seq_lens_q"].diff()
    assert all(lengths[first:last].max() == longest for first, last, *_, longest in launches)


def test_one_launch_where_nothing_is_gained():
    assert plan_launches(np.arange(0, 3000, 100), longest=100) == ()
    assert LAYOUT_KEY not in collator()(documents([90, 100, 70]))
    zigzag = np.cumsum([0, *[8000, 10] * 20])
    assert plan_launches(zigzag, longest=8000) == ()  # too many launches, as neighbours differ


def trained(batch, monkeypatch):
    take_path_of_cuda(monkeypatch)
    model = build_tiny_model("gpt_oss", dtype=torch.bfloat16, seed=0).train()  # windows and sinks
    attend_packs(model, device_type="cuda")
    batch = {name: x for name, x in batch.items() if name not in (WEIGHTS, "labels")}
    with StrictVarlen() as strict:
        logits = model(**batch).logits
        (logits.float().sin().sum()).backward()
    return strict, logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_outputs_and_gradients_are_those_of_one_launch_to_the_bit(small_classes, monkeypatch):
    batch = collator()(documents())
    layers = 2
    strict, logits, grads = trained(batch, monkeypatch)
    assert len(strict.forwards) == len(strict.backwards) == 3 * layers
    del batch[LAYOUT_KEY]
    strict, wanted, wanted_grads = trained(batch, monkeypatch)
    assert len(strict.forwards) == layers
    assert torch.equal(logits, wanted)
    assert all(map(torch.equal, grads, wanted_grads))
    assert len(grads) > 10


@pytest.mark.parametrize(
    ("device", "compiles", "orders"), [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)]
)
def test_the_trainer_orders_packs_for_the_kernels(device, compiles, orders):
    args = SimpleNamespace(device=torch.device(device), torch_compile=compiles, pad_documents_to_multiple_of=None)
    data = object.__new__(TrainingData)
    collate = object()
    data._trainer = SimpleNamespace(args=args, data_collator=collate)
    assert (data.training_collator([]) is collate) is not orders
