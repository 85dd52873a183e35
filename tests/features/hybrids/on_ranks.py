"""Mixers of hybrid models on parts of packs, on ranks without a trainer: part of the launch of `ranks/__main__.py`."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks.exchange import LENGTHS, largest_of_ranks, start_ranks
from ranks.table import HYBRIDS
from support.models import attend_packs
from support.runs import proved
from sweep import zoo
from sweep.double import in_double

from trl_packfix import PackingLeakError
from trl_packfix.data import rank_share
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.group import Group

from .faults import ON_PARTS

# A type for each kind of scan; `benchmarks/sequence_parallel.py` runs all types
MIXED = ["qwen3_5_text", "kimi_linear", "lfm2", "falcon_h1", "mamba2", "mamba"]
# Three have a scan of their own, and all have one convolution
PLANTED_IN_MIXERS = {name: ["no_states"] for name in HYBRIDS.values()} | {"lfm2": ["no_halo", "no_gradient"]}


def mixers(folder: Path) -> dict:
    """Return the largest difference of parts from the whole pack, in fp64."""
    start_ranks(2, 4)
    with in_double():
        return {kind: mixed_difference(kind, 4) for kind in MIXED}


def faults_of_mixers(folder: Path) -> dict:
    """Return what the proof says of the faults that are planted in mixers."""
    start_ranks(2)
    verdicts = {}
    for model_type, planted in PLANTED_IN_MIXERS.items():
        model = zoo.build_model(model_type)
        packed, _ = proved(model)
        for name in planted:
            with ON_PARTS[name]():
                try:
                    packed.prove_degree(model, 2)
                    verdicts[model_type, name] = True, ""
                except PackingLeakError as error:
                    verdicts[model_type, name] = False, str(error)
    return verdicts


def mixed_difference(kind: str, degree: int) -> float:
    """Return the difference of the logits, and of the gradients of all parameters, which are summed over the parts.

    It is relative to the largest logit and to the largest gradient, and the largest of all ranks.
    """
    model = zoo.build_model(kind).double().train()
    model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    guard = attend_packs(model)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(16, 128, (n,), generator=generator) for n in LENGTHS]
    batch = PackedDataCollator(pad_to_multiple_of=degree)([{"input_ids": ids} for ids in documents])
    weights = torch.randn(1, sum(LENGTHS), 128, generator=generator, dtype=torch.float64)
    group = Group(degree, dist.get_rank() % degree)
    rows = group.rows(sum(LENGTHS))
    results = []
    for is_part in (False, True):
        inputs = rank_share.cut_part(dict(batch), group) if is_part else dict(batch)
        own_rows = rows if is_part else slice(None)
        model.zero_grad()
        logits = model(**{name: x for name, x in inputs.items() if "labels" not in name}).logits
        (logits * weights[:, own_rows]).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        for grad in grads if is_part else ():
            group.sum(grad)
        results.append([logits.detach(), *grads])
    guard.remove()
    results_of_whole = [results[0][0][:, rows], *results[0][1:]]
    scales = [
        results[0][0].abs().max(),
        *[max(x.abs().max() for x in results_of_whole[1:])] * len(results_of_whole[1:]),
    ]
    gaps = [(x - y).abs().max() / scale for x, y, scale in zip(results[1], results_of_whole, scales, strict=True)]
    return largest_of_ranks(gaps)
