"""Runs hybrid models through transformers' path with kernels on the CPU, with strict stand-ins for the packages.

    HYBRIDS=tests/features/hybrids PYTHONPATH=.:tests
    python $HYBRIDS/on_kernels.py judge qwen3_next bamba   # a JSON line per model type: probe, judge, what was recorded
    python $HYBRIDS/on_kernels.py column docs bamba        # the column `with_kernels` of docs/compatibility.csv
    python $HYBRIDS/on_kernels.py rounding bamba            # the probe where Mamba-2's kernel rounds most
    python $HYBRIDS/on_kernels.py reads lfm2 bamba    # tensors that the host reads in a packed micro-batch, by place
    python $HYBRIDS/on_kernels.py train FOLDER bamba       # a JSON line per training

A process of its own: transformers looks for causal_conv1d, flash-linear-attention and mamba_ssm when it is imported.
What the stand-ins (`support/kernel_site`) can and cannot show is said in their `strict.py`.
"""

import sys
from functools import partial
from pathlib import Path

import support  # isort: skip - sets the environment before torch is imported

sys.path.insert(0, str(Path(support.__file__).parent / "kernel_site"))

import tempfile
import time
from unittest import mock

import strict
import torch
from pytest import MonkeyPatch
from support.attention import take_path_of_cuda
from support.host_reads import ReadsOfSteps
from support.launch import print_rows, seen_by
from support.runs import build_trainer, checkpointing, packed_model, plain_sgd, proved, random_lora, texts
from support.strict_varlen import StrictVarlen
from sweep import page, zoo
from sweep.judge import Judge, PrefixJudge
from sweep.model_types import MAX_LENGTH

from trl_packfix.features.hybrids.support import HybridMixers
from trl_packfix.isolation.check_isolation import check_isolation

recorded = partial(seen_by, strict)  # since the last call


def judge(model_type: str) -> dict:
    """Return the result of the probe for a tiny model in fp32, and those of the judge in fp32 and fp64."""
    started = time.process_time()
    truth = Judge(zoo.build_model(model_type))
    model = zoo.build_model(model_type)
    packed, report = proved(model, max_length=MAX_LENGTH)
    row = {"type": model_type, "attention": packed.attention.name, "unpacked": packed.is_unpacked}
    row |= {"proved": report.passed, "repairs": list(map(str, packed.repaired))}
    recorded()
    judgement = truth.judge(model)
    row |= {"right": judgement.right, "error": judgement.error, "refusal": judgement.refusal} | recorded()
    exact = truth.compare(model, torch.float64)
    shared = PrefixJudge(zoo.build_model(model_type)).compare(model, torch.float64)
    row |= {"shared": shared.error, "shared_refusal": shared.refusal, "shared_calls": recorded()["calls"]}
    return row | {"exact": exact.decisive, "seconds": round(time.process_time() - started, 1)}


def change(folder: Path, model_type: str, lora: bool, **settings) -> tuple[torch.Tensor, dict]:
    """Return the change of the trained weights in three steps of SGD, and what the run did."""
    model = zoo.build_model(model_type, vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    settings |= plain_sgd(0.2, max_steps=3, seed=3)
    trainer = build_trainer(folder, texts(), model, peft_config=random_lora() if lora else None, **settings)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    recorded()
    trainer.train()
    moved = {name: (p.detach() - before[name]).flatten() for name, p in trained.items()}
    still = sorted(name for name, move in moved.items() if not move.any())
    repaired = list(map(str, trainer.packed_model.repaired)) if settings.get("packing", True) else []
    return torch.cat(list(moved.values())), {"still": still, "repaired": repaired} | recorded()


def trainings(folder: Path, model_type: str):
    """Packed training with kernels, beside TRL's padded rows without packing, also through the kernels."""
    for lora, kinds in ((False, (None, True)), (True, (None, False))):
        refusal = None
        try:
            expected = change(folder, model_type, lora, packing=False)[0]
        except ValueError as error:  # a fused kernel leaves adapters out
            expected = torch.ones(1)
            refusal = str(error)
        for reentrant in kinds:
            settings = checkpointing(reentrant)
            moved, row = change(folder, model_type, lora, packing_strategy="minibatch", **settings)
            row |= {"moved": moved.norm().item(), "error": ((moved - expected).norm() / expected.norm()).item()}
            yield {"type": model_type, "lora": lora, "reentrant": reentrant, "refusal": refusal} | row


def rounding(model_type: str) -> dict:
    """Return the numbers of the probe for a model with large decays, with and without what Mamba-2's kernel rounds."""
    model = zoo.build_model(model_type)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data += 40
    packed_model(model, max_length=MAX_LENGTH).attach_packed_attention()
    report = check_isolation(model, MAX_LENGTH)
    row = {"type": model_type, "isolated": report.isolated, "equal": report.equal, "gradient": report.max_gradient}
    row |= {"change": max(report.max_change, report.max_difference), "tolerance": report.tolerance}
    with mock.patch.object(HybridMixers, "tokens_summed_in_common", lambda self, model: 0):
        report = check_isolation(model, MAX_LENGTH)
    return row | {"strictly": report.passed, "strict_gradient": report.max_gradient}


def reads(model_type: str) -> dict:
    """Return what the host reads in a packed micro-batch, on the path of CUDA for attention, too."""
    model = zoo.build_model(model_type, vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    watch = ReadsOfSteps()
    settings = {"gradient_accumulation_steps": 2, "max_steps": 7, "logging_steps": 100, "bf16": True}
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch, StrictVarlen():
        take_path_of_cuda(patch)
        trainer = build_trainer(Path(folder), texts(120), model, callbacks=[watch], **settings)
        watch.switch = lambda is_on: recorded() if is_on else reads_of_run.update(recorded())
        reads_of_run: dict = {}
        trainer.train()
    repaired = list(map(str, trainer.packed_model.repaired))
    return {"type": model_type, "reads": watch.per_micro_batch, "repaired": repaired} | reads_of_run


def column(folder: Path, model_types: list[str]) -> dict:
    """Return the verdict of each type, and write it into the table in `folder`."""
    column_values = {}
    for name in model_types:
        row = judge(name)
        is_changed = bool(row["repairs"]) or row["unpacked"]
        column_values[name] = ("repaired" if is_changed else "native") if row["proved"] and row["right"] else "refused"
    page.write(page.filled(page.read(folder), "with_kernels", column_values), folder)
    return column_values


if __name__ == "__main__":
    strict.options["aligned"] = False
    strict.dtypes.add(torch.float64)
    print_rows(
        judge=lambda *types: map(judge, types),
        rounding=lambda *types: map(rounding, types),
        reads=lambda *types: map(reads, types),
        column=lambda folder, *types: [column(Path(folder), types)],
        train=lambda folder, *types: (row for model_type in types for row in trainings(Path(folder), model_type)),
    )
