"""The CUDA branch of `packfix_varlen` on meta tensors: whole models forward and backward, no read on the host, graphs.

A meta tensor has a shape, a dtype and strides, and no values. So a read on the host, which on a GPU would wait for it,
is seen here; shapes and dtypes of every call of the kernels are checked by torch's own meta functions of them; autograd
and checkpointing run as they are. Not seen: the kernels' numbers, alignment, streams, memory, speed, and inductor.
"""

import importlib
import traceback
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from support.attention import MODELS, take_path_of_cuda
from support.features import needs, sharing
from support.models import attend_packs, build_tiny_model
from support.runs import build_trainer, texts
from support.versions import enable_checkpointing, selects_checkpoints
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from trl_packfix.attention import choice, runs
from trl_packfix.compat import VARLEN_KERNEL
from trl_packfix.data import by_length
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.loaders import PackCollator
from trl_packfix.training import trainer as sft_trainer

pytestmark = pytest.mark.slow

# The masks of transformers compare positions once per mask and forward, although no mask is made for packs.
NOT_OURS = {"masking_utils.py:find_packed_sequence_indices"}
TYPES = [name for name in MODELS if name not in {"gemma2", "opt"}]  # softcap, own masks
ATEN = torch.ops.aten


class Calls(TorchDispatchMode):
    """Record calls of the kernels, and reads on the host with the place in the code that reads."""

    def __init__(self):
        super().__init__()
        self.kernels = {"forward": 0, "backward": 0}
        self.reads = []
        self.heads = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATEN._local_scalar_dense.default:
            self.reads.append(_reader())
            return False
        out = func(*args, **(kwargs or {}))
        if func in (ATEN._flash_attention_forward.default, ATEN._flash_attention_backward.default):
            self.kernels["forward" if func is ATEN._flash_attention_forward.default else "backward"] += 1
            tensors = args[: 3 if func is ATEN._flash_attention_forward.default else 5]
            assert {x.dtype for x in tensors} == {torch.bfloat16}
            assert all(x.stride(-1) == 1 for x in tensors)
            self.heads |= {x.shape[-1] for x in tensors}
        return out


def _reader():
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    return next(
        f"{Path(f.filename).name}:{f.name}" for f in reversed(frames) if f.name not in ("_reader", "__torch_dispatch__")
    )


@pytest.fixture
def as_on_cuda(monkeypatch):
    take_path_of_cuda(monkeypatch, "meta")
    monkeypatch.setattr(choice, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device_type: False)  # it does not know "meta"


def prepared(model_type):
    model = build_tiny_model(model_type, dtype=torch.bfloat16, **MODELS[model_type]).to("meta").train()
    attend_packs(model, device_type="cuda")
    return model


def collated(collate, documents):
    batch = collate([{"input_ids": tokens} for tokens in documents])
    return {name: x.to("meta") if hasattr(x, "to") else x for name, x in batch.items() if name != "labels"}


def pack(lengths, **settings):
    return collated(PackedDataCollator(**settings), [[5] * n for n in lengths])


def shared_pack(num_documents):
    """Return a pack whose documents share more with the one before than with earlier ones, as turns of a chat do."""
    return collated(
        sharing().make_collator(PackedDataCollator()), [[5] * (80 - 3 * i) + [6 + i] * 8 for i in range(num_documents)]
    )


def pack_by_length(monkeypatch):
    monkeypatch.setattr(by_length, "LENGTH_CLASSES", (8, 40))
    monkeypatch.setattr(by_length, "TILE_QUERIES", 4)
    collate = by_length.ByLength(PackCollator(PackedDataCollator()))
    return collated(collate, [[5] * n for n in (5, 70, 3, 20, 1, 8, 2, 33, 7)])


# Calls of the kernels in each layer, forward and backward; None: several
READS = {"": (1, 1), "reentrant": (2, 1), "non-reentrant": (2, 1), "prefixes": (1, 1), "launches of prefixes": None}


def marks_of(case):
    return needs("prefixes") if "prefixes" in case else ()


CASES = [pytest.param(kind, case, marks=marks_of(case)) for kind, case in product(TYPES, READS)]


@pytest.mark.parametrize("model_type, case", [*CASES, ("llama", "by length")])
def test_a_step_reads_nothing_on_the_host(model_type, case, as_on_cuda, monkeypatch):
    model = prepared(model_type)
    if "reentrant" in case:
        enable_checkpointing(model, case == "reentrant")
        model.enable_input_require_grads()
    batch = shared_pack(8) if "prefixes" in case else pack([1, 40, 7, 100])
    if case == "launches of prefixes":
        monkeypatch.setattr(runs, "COPIED_BYTES", 1)
    elif case == "by length":
        batch = pack_by_length(monkeypatch)
    with Calls() as calls:
        model(**batch).logits.sum().backward()
    assert set(calls.reads) <= NOT_OURS, calls.reads
    assert len(calls.reads) <= 2, calls.reads
    forwards, backwards = (count / model.config.num_hidden_layers for count in calls.kernels.values())
    if expected := (READS | {"by length": (3, 3)})[case]:
        assert (forwards, backwards) == expected
    else:
        assert forwards == backwards > 2
    assert all(head % 8 == 0 for head in calls.heads)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@selects_checkpoints
@pytest.mark.parametrize("is_listed", [True, False])
def test_selective_checkpointing_runs_the_kernels_once(is_listed, as_on_cuda, tmp_path, monkeypatch):
    """Kernels whose name is not in TRL's list run again in the backward, so the trainer adds it."""
    selective = importlib.import_module("trl.models.selective_activation_checkpointing")
    names = tuple(name for name in selective._ATEN_ATTENTION_PACKET_NAMES if name != VARLEN_KERNEL)
    monkeypatch.setattr(selective, "_ATEN_ATTENTION_PACKET_NAMES", names)
    if not is_listed:
        monkeypatch.setattr(sft_trainer, "saves_varlen_attention", nullcontext)
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"selective": True}}
    build_trainer(tmp_path, texts(9), model, bf16=True, **settings)
    model.to("meta").train().activation_checkpointing_enable()
    attend_packs(model, device_type="cuda")
    with Calls() as calls:
        model(**pack([1, 40, 7, 100])).logits.sum().backward()
    layers = model.config.num_hidden_layers
    assert calls.kernels == {"forward": layers * (1 if is_listed else 2), "backward": layers}


def test_packs_of_one_shape_have_one_graph(as_on_cuda):
    torch._dynamo.reset()
    model = prepared("llama")
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    static = {"pad_to_multiple_of": 256, "pad_documents_to_multiple_of": 16, "max_length": 60}
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(2, 60, (int(torch.randint(2, 5, (), generator=rng)),), generator=rng).tolist()
        compiled(**pack(lengths, **static)).logits.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "model_type, shares",
    [("gpt_oss", False), pytest.param("llama4_text", True, marks=needs("prefixes"))],
)
def test_other_documents_need_no_other_graph_and_no_break(model_type, shares, as_on_cuda):
    """`fullgraph=True` raises at a graph break; other documents need no other graph."""
    torch._dynamo.reset()
    model = prepared(model_type)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    packs = map(shared_pack, (3, 5, 12, 4)) if shares else map(pack, ([5, 40], [31, 2, 9], [17, 20, 4, 50], [30, 8, 8]))
    counts = []
    for batch in packs:
        compiled(**batch).logits.sum().backward()
        counts.append(counter.frame_count)
    # one for the first pack, one when torch sees that lengths change, with shared prefixes one of the guard's hook
    assert counts[0] == 1, counts
    assert counts[1] == counts[-1] <= 3, counts
