"""Attention and proofs on parts of packs, on four ranks without a trainer."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from support import vision
from support.attention import pack_alone, random_inputs
from support.features import PRESENT, sharing
from support.models import build_tiny_model, select_attention
from support.shared_rows import pack_of
from sweep.image_families import make_examples
from torch import nn
from torch._dynamo.utils import counters

import trl_packfix
from trl_packfix.attention.packed_forward import packed_forward_entered, this_thread
from trl_packfix.attention.varlen import varlen_attention
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.feature import PLAIN
from trl_packfix.group import Group, make_groups
from trl_packfix.isolation.check_isolation import check_packs
from trl_packfix.isolation.probe import Probe

from . import faults

# Turns of a chat: 47 rows and padding, and runs attend to rows in other parts
CHAT = [[*range(20), 30 + n, *range(40, 45)] for n in range(4)]
LENGTHS = [5, 1, 30, 2, 9, 1]  # 48 tokens: parts of 24 and of 12, and the third document lies in several
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (5, 1), (28, 4), (9, 3), (10, 5)]
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 4},
    "sinks": {"sinks": True},
    "window and sinks": {"sliding_window": 4, "sinks": True},
    "value dim": {"value_dim": 6},
    "softcap": {"softcap": 2.0},
}
SHARES = "prefixes" in PRESENT
if SHARES:
    FEATURES |= {"prefixes": {"prefixes": True}, "window and prefixes": {"sliding_window": 4, "prefixes": True}}


def start_ranks(*degrees: int) -> None:
    """Start the process group for scenarios without a trainer, which would start it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))  # turns a hang into an error
    make_groups(degrees)


def on_all_ranks(result: Any) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    return everyone


def largest_of_ranks(gaps: list[torch.Tensor]) -> float:
    largest = torch.stack(gaps).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def attention(folder: Path) -> dict:
    """Return the largest difference of outputs and gradients from the whole pack, by case and by fault; in fp64."""
    start_ranks(2, 4)
    degrees = (2, 4)
    results = {}
    results["cases"] = {
        f"{heads} {name} on {degree}": difference(*heads, degree, **features)
        for heads, name, features in [
            *((heads, "full", {}) for heads in HEADS),
            *((heads, *feature) for heads in [(8, 2), (6, 3)] for feature in FEATURES.items()),
        ]
        for degree in degrees
    }
    results["faults"] = {}
    for name, fault in faults.ATTENTION.items():
        with fault():
            results["faults"][name] = [difference(8, 2, degree, prefixes=name == "prefixes") for degree in degrees]
    torch._dynamo.reset()
    counters.clear()
    shares = {"full": False} | ({"prefixes": True} if SHARES else {})
    results["compiled"] = {name: difference(8, 2, 2, compiled=True, prefixes=on) for name, on in shares.items()}
    results["graphs"] = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()  # else the graphs of the right exchange run
    with faults.ATTENTION["heads"]():
        results["faults"]["compiled"] = [difference(8, 2, 2, compiled=True)]
    return results | {"groups": {n: dist.get_process_group_ranks(Group(n).process_group) for n in degrees}}


def difference(heads, kv_heads, degree, value_dim=4, sinks=False, prefixes=False, compiled=False, **features) -> float:
    """Return the largest difference of outputs and of gradients of queries, keys, values and sinks, on any rank."""
    attend = torch.compile(varlen_attention, backend="aot_eager") if compiled else varlen_attention
    whole_pack = pack_alone(LENGTHS)
    if prefixes:
        collate = sharing().make_collator(PackedDataCollator(pad_to_multiple_of=4))
        batch = collate([{"input_ids": tokens} for tokens in CHAT])
        whole_pack = pack_of(batch)
    num_tokens = whole_pack.num_tokens
    inputs = random_inputs(num_tokens, heads, kv_heads, head_dim=4, value_dim=value_dim, sinks=True)
    generator = torch.Generator().manual_seed(heads)
    weights = torch.randn(1, num_tokens, heads, value_dim, generator=generator, dtype=torch.float64)
    tokens = num_tokens // degree
    group = Group(degree, dist.get_rank() % degree)
    rows_of_rank = group.rows(num_tokens)

    def results_of(attend, forward, own_rows):
        states = [x[:, :, own_rows].detach().requires_grad_() for x in inputs[:3]]
        with packed_forward_entered(forward):
            out, _ = attend(nn.Module(), *states, None, s_aux=inputs[3] if sinks else None, **features)
        leaves = [*states, inputs[3]] if sinks else states
        return out.detach(), torch.autograd.grad(out, leaves, weights[:, own_rows])

    expected, expected_grads = results_of(varlen_attention, whole_pack, slice(None))
    out, grads = results_of(attend, replace(whole_pack, group=group, part_tokens=tokens), rows_of_rank)
    assert out.shape == (1, tokens, heads, value_dim)
    gaps = [out - expected[:, rows_of_rank]]
    gaps += [mine - gradient[:, :, rows_of_rank] for mine, gradient in zip(grads[:3], expected_grads[:3], strict=True)]
    if sinks:  # each rank has the gradient of its own heads
        total = grads[3].clone()
        group.sum(total)
        gaps.append(total - expected_grads[3])
    return largest_of_ranks([gap.abs().max() for gap in gaps])


# Proofs


class TokenShift(nn.Module):
    """Adds to each token the one before it in its document: right on whole packs, and blind on parts."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        if this_thread.packed_forwards:
            starts = this_thread.packed_forwards[-1].cu_seq_lens_q[:-1].long()
            before = before.index_fill(1, starts[starts < states.shape[1]], 0.0)
        return self.inner(states + before)


# By model with images: the fault, and what is proved
IMAGE_PROOFS: dict[str, list[tuple[str, str]]] = {
    "llava": [("cut_late", "images"), ("features_late", "images"), ("cut_late", "text")],
    "qwen3_vl": [(name, "images") for name in ("positions_of_the_first", "features_of_the_first", "other_images")],
}
if "images" not in PRESENT:
    IMAGE_PROOFS = {}


def check_shared(model: Any, max_length: int | None = None, degree: int = 1, images: Any = None) -> Any:
    """Test packs whose documents share prefixes, with images if they are given."""
    plain = PLAIN if images is None else images
    return check_packs(model, max_length, degree, feature=sharing(plain=plain))


CHECKS: dict[str, Callable] = {
    "images": trl_packfix.check_isolation,
    "text": trl_packfix.check_isolation,
}
if SHARES:
    CHECKS["shared"] = check_shared


def proofs(folder: Path) -> list:
    """Return the verdicts of all ranks on models that are right, and on some that cannot be shared."""
    start_ranks(2, 4)
    verdicts: dict[Any, Any] = {}
    llama = build_tiny_model("llama")
    trl_packfix.prepare_for_packing(llama)
    for degree in (2, 4):
        verdicts["whole", degree] = verdict(trl_packfix.check_isolation(llama, degree=degree))
        if SHARES:
            verdicts["shared", degree] = verdict(CHECKS["shared"](llama, degree=degree))
    shifting = build_tiny_model("llama")
    shifting.model.layers[1].mlp = TokenShift(shifting.model.layers[1].mlp)
    bloom = build_tiny_model("bloom")
    for model in (shifting, bloom):
        select_attention(model)
    for degree in (1, 2):
        verdicts["shift", degree] = verdict(trl_packfix.check_isolation(shifting, degree=degree))
    verdicts["bloom"] = trl_packfix.check_isolation(bloom, degree=2).error
    for family in IMAGE_PROOFS:
        model = vision.build_model(family)
        select_attention(model)
        for name, setting in (("images", "off"), ("shared", "pack")) if SHARES else (("images", "off"),):
            examples = make_examples(family, model)
            verdicts[name, family] = verdict(CHECKS[name](model, 512, 2, images=examples))
            probe = sharing(setting, examples).make_probe_class(Probe)(model, degree=2)
            ids = probe._make_batch(probe.further_examples()[0])["input_ids"][0]
            is_image = ids == probe.images.processor.image_token_id
            verdicts["split", name, family] = bool(is_image[len(ids) // 2 - 1 : len(ids) // 2 + 1].all())
    return on_all_ranks(verdicts)


def verdict(report: Any) -> tuple[bool, float, list[str]]:
    """Whether it passes, the largest change in tolerances, and the modules that are named."""
    size = max(report.max_change, report.max_difference) / report.tolerance
    return report.passed, size, [leak.module for leak in report.leaks]


def faults_of_proofs(folder: Path) -> list:
    start_ranks(2)
    verdicts = {}
    model = build_tiny_model("llama")
    trl_packfix.prepare_for_packing(model)
    for name in faults.ATTENTION:
        with faults.ATTENTION[name]():
            verdicts["unseen" if name == "prefixes" else "whole", name] = verdict(
                trl_packfix.check_isolation(model, degree=2)
            )
            if SHARES and name in ("leak", "prefixes"):
                verdicts["shared", name] = verdict(CHECKS["shared"](model, degree=2))
    for family, planted in IMAGE_PROOFS.items():
        model = vision.build_model(family)
        select_attention(model)
        for name, content in planted:
            images = None if content == "text" else make_examples(family, model)
            with faults.IMAGES[name]():
                verdicts[content, name] = verdict(CHECKS[content](model, 512, 2, images=images))
    return on_all_ranks(verdicts)
