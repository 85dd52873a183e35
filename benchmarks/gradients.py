"""Same gradients: how far packed training is from unpacked training, compared with stock TRL and with rounding.

    python benchmarks/gradients.py                          # every case, about 5 minutes
    python benchmarks/gradients.py --quick                  # a dozen cases, half a minute
    python benchmarks/gradients.py --csv gradients.csv

Training: tiny random models, five steps of SGD through the trainers, the same documents in every optimizer step
(`benchmarks/equivalence.py`). The reference is TRL's unpacked, padded run. It is compared with
  ours         trl_packfix, packed with `minibatch`
  TRL          TRL with `padding_free=True`: the same documents per micro-batch, flattened
  regrouped    TRL unpacked, the same documents per step in other micro-batches: the size of rounding errors
`loss` is the largest relative difference of the five losses (which the Trainer sums in float32, so that 1e-7 is their
resolution for every dtype), `weights` the norm of the difference of the weight change over the norm of that change.
`4 x 1` means 4 documents per micro-batch, 1 micro-batch per step.
DoRA on gpt_oss and mixtral adapts attention only: PEFT refuses it for experts.

Documents: one pack in float64, each document's logits and gradients against the document alone on eager attention;
`TRL` is the stock model on its default attention, fed by TRL's own collator. Differences are norms relative to the
document's own, the largest over the documents. transformers' softmax and routers, float32 whatever the model's dtype,
are kept in float64.
"""

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for a second thread

import itertools

import torch
from common import Row, describe, hide_progress, make_console, make_parser, scientific, table_of, write_csv
from equivalence import ADAPTERS, MODELS, NUM_STEPS, Case, train
from rich.console import Console
from rich.progress import track
from support.models import build_tiny_model, select_attention
from sweep.double import in_double
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.data.collator import PackedDataCollator

COMPARED = {"packed": "ours", "padding_free": "TRL", "regrouped": "regrouped"}
LOSS_TARGET = 1e-6
DOCUMENT_TARGET = 1e-10
WEIGHT_TARGETS = {torch.float32: 1e-5, torch.float64: 1e-6}
LENGTHS = (1, 40, 7, 100, 16, 33)  # tokens; some are longer than the windows of 16


def all_cases() -> list[Case]:
    return [
        Case(*settings, dtype)
        for dtype in WEIGHT_TARGETS
        for settings in itertools.product(MODELS, ADAPTERS, (1, 4), (False, True))
    ]


def quick_cases() -> list[Case]:
    """Every model in both dtypes. Each adapter, accumulation and checkpointing is used with half or a third of them."""
    return [
        Case(model, ADAPTERS[(i + j) % 3], (1, 4)[(i + j) % 2], (i // 2 + j) % 2 == 1, dtype)
        for j, dtype in enumerate(WEIGHT_TARGETS)
        for i, model in enumerate(MODELS)
    ]


def training_errors(case: Case) -> Row:
    """One row: the errors of all three runs against the unpacked one."""
    losses, change, _ = train(case, "unpacked")
    assert change.norm() > 0.1, f"{case}: nothing was trained, so nothing is compared"
    assert losses[-1] < losses[0], f"{case}: training diverges, so rounding grows without bound"
    row: Row = {
        "part": "training",
        "model": case.model,
        "adapter": case.adapter,
        "micro_batches": "{} x {}".format(*case.micro_batches("unpacked")),
        "checkpointing": case.checkpointing,
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    for trainer, name in COMPARED.items():
        found, moved, _ = train(case, trainer)
        assert len(found) == len(losses) == NUM_STEPS
        loss = max(abs(a - b) for a, b in zip(found, losses, strict=True))
        weights = ((moved - change).norm() / change.norm()).item()
        row |= {f"{name}_loss": loss / min(losses), f"{name}_weights": weights}
    row["in_target"] = row["ours_loss"] <= LOSS_TARGET and row["ours_weights"] <= WEIGHT_TARGETS[case.dtype]
    return row


def logits_and_gradients(model: PreTrainedModel, batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Per document of the batch: its logits (tokens, vocabulary) and the gradient of its summed loss, flattened."""
    labels = batch.pop("labels")[0]
    found = []
    parameters = list(model.parameters())
    logits = model(**batch, use_cache=False).logits[0]
    for start, stop in itertools.pairwise(batch["cu_seq_lens_q"].tolist()):
        loss = functional.cross_entropy(logits[start : stop - 1], labels[start + 1 : stop], reduction="sum")
        # a document of one token has no target: its logits get a gradient here
        loss = loss + logits[stop - 1].logsumexp(0)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        found.append((logits[start:stop].detach(), torch.cat([g.flatten() for g in gradients])))
    return found


def document_errors(model_type: str) -> Row:
    """One row: each document in a pack compared with the document alone, for our attention and for stock sdpa."""
    generator = torch.Generator().manual_seed(0)
    documents = [{"input_ids": torch.randint(3, 300, (n,), generator=generator).tolist()} for n in LENGTHS]
    models = {
        name: build_tiny_model(model_type, dtype=torch.float64, attn_implementation=attention).train()
        for name, attention in (("alone", "eager"), ("ours", None), ("TRL", None))
    }
    for model in models.values():
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    select_attention(models["ours"])
    mark_packed_forwards(models["ours"])
    flattening = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batches = {"ours": PackedDataCollator()(documents), "TRL": flattening(documents)}
    batches["ours"].pop("use_cache")

    row: Row = {"part": "documents", "model": model_type, "dtype": "float64"}
    with in_double():
        alone = [logits_and_gradients(models["alone"], flattening([document]))[0] for document in documents]
        for name, batch in batches.items():
            packed = logits_and_gradients(models[name], batch)
            for index, what in enumerate(("logits", "gradients")):
                pairs = [(ours[index], reference[index]) for ours, reference in zip(packed, alone, strict=True)]
                row[f"{name}_{what}"] = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    row["in_target"] = max(row["ours_logits"], row["ours_gradients"]) <= DOCUMENT_TARGET
    return row


def worst(rows: list[Row]) -> list[Row]:
    """One row per model and dtype: the largest of every figure."""
    groups: dict[tuple[str, str], list[Row]] = {}
    figures = [name for name, value in rows[0].items() if isinstance(value, float)]
    for row in rows:
        groups.setdefault((row["dtype"], row["model"]), []).append(row)
    return [
        {"dtype": dtype, "model": model, "cases": len(group), "in_target": all(row["in_target"] for row in group)}
        | {name: max(row[name] for row in group) for name in figures}
        for (dtype, model), group in groups.items()
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a dozen cases that still contain every setting")
    args = parser.parse_args()

    torch.set_num_threads(1)
    hide_progress()
    console = make_console(160)
    console.print(describe())

    documents = [document_errors(model) for model in MODELS]
    console.print("[bold]Documents[/], packed against alone in float64, relative; target 1e-10")
    console.print(table_of(documents, text=scientific))

    cases = quick_cases() if args.quick else all_cases()
    cases = track(cases, "training", console=Console(stderr=True), transient=True)
    training = list(map(training_errors, cases))
    console.print("[bold]Training[/], against the unpacked run; targets: loss 1e-6, weights 1e-5, in float64 1e-6")
    console.print(table_of(training, text=scientific))
    console.print("[bold]Largest error[/] over the cases")
    console.print(table_of(worst(training), text=scientific))
    console.print(f"{sum(row['in_target'] for row in training)} of {len(training)} cases within the targets")
    write_csv(args.csv, documents + training)


if __name__ == "__main__":
    main()
