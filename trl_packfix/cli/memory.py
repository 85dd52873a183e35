"""`trl-packfix plan --memory GIB`: the peak on each GPU by method, and the largest `max_length` that fits."""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from trl import ModelConfig, get_peft_config

from ..attention.runs import COPIED_BYTES
from ..data.model_memory import (
    GIB,
    LORA,
    METHODS,
    ModelSizes,
    PeakMemory,
    TrainingMethod,
    count_model,
    largest_tokens,
    predict_peak,
)
from ..reporting.columns import Column
from ..training.config import SFTConfig
from .configs import RunConfigs

MOST_TOKENS = 2**24
RESERVED_GIB = 1.0  # GiB of the CUDA context and of what the allocator cannot use; an estimate
PEAK_PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "head", "layer", "attention", "peak")
GPU_COUNTS = tuple(2**power for power in range(11))  # of GPUs, among which the fewest that fit are looked for
KEYS = (
    Column("training", itemgetter("method"), text=""),
    Column("ckpt", lambda row: "yes" if row["checkpointing"] else "no", text=""),
)
COLUMNS = (
    *KEYS,
    Column("peak", itemgetter("peak"), ".1f"),
    Column("largest", lambda row: row["largest"] or None),
    Column("plain loss", lambda row: row["largest_plain_loss"] or None),
    *(Column(name, itemgetter(name), ".1f") for name in PEAK_PARTS if name != "peak"),
)
NOTES = """\
GiB on each GPU, of {memory:g}, less {aside:g} for the CUDA context and fragments. ckpt: gradient_checkpointing. \
largest: the {unit} that fits; plain loss: the same with all logits in memory, as with compute_loss_func.
LoRA on 8,192 tokens: within 4 % of what one H200 took; the rest was not measured. Counted: weights, gradients, \
optimizer (AdamW), activations{but}. Modelled: gathered, head (LM head and TRL's fused loss), layer (temporaries of \
backward, and with checkpointing what is computed again), attention (its work space{copied}). head is not in memory \
together with layer and attention.
LoRA: {lora}, of a bfloat16 model. Each communicator of NCCL takes 0.1 to 0.4 GiB more, an \
estimate; tokens_per_rank needs one for each degree."""


def check_memory_flags(args: argparse.Namespace, given: RunConfigs) -> None:
    """Refuse flags that contradict each other."""
    if args.memory is None:
        if args.offload:
            raise ValueError(
                "`--offload` was given without `--memory`. It changes the predicted memory only. Give `--memory` too."
            )
        if not given.names:
            raise ValueError(
                "`plan` was given without DATA and without `--memory`. Packs are planned from documents, and memory is "
                "predicted from a model. Give a dataset, or `--model MODEL --memory GIB`."
            )
        return
    if given.model.model_name_or_path is None:
        raise ValueError(
            f"`--memory {args.memory:g}` was given without `--model`. The peak is predicted from the model's config. "
            "Give `--model` too."
        )
    if not RESERVED_GIB < args.memory < inf:
        raise ValueError(
            f"`--memory {args.memory:g}` was given. {RESERVED_GIB:g} GiB is set aside for the CUDA context, so it must "
            f"be a number above {RESERVED_GIB:g}. Set the memory of one GPU in GiB, such as 80."
        )


class PredictedMemory(NamedTuple):
    """What is predicted, in GiB."""

    rows: list[dict[str, Any]]  # for each number of GPUs, each method, with and without checkpointing
    verdict: str  # on how many GPUs it fits
    notes: str  # what the columns mean


def predict_memory(
    args: argparse.Namespace, config: SFTConfig, documents: int, *, model: ModelConfig, model_config: Any
) -> PredictedMemory:
    """Of a run with this config, of whose packs none has more documents."""
    assert config.max_length is not None  # `SFTConfig` refuses packing without it
    assert model_config is not None  # `check_memory_flags` refuses memory without a model
    batch = config.per_device_train_batch_size
    unit = "max_length"
    tokens = batch * config.max_length
    most = getattr(model_config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS
    if config.tokens_per_rank is not None:  # the batch size is 1
        unit = "tokens_per_rank"
        tokens = config.tokens_per_rank
        most = MOST_TOKENS
    copied = 0.0
    of_copies = ""
    if config.share_prefixes != "off":
        copied = float(COPIED_BYTES)
        of_copies = ", with copied keys of shared prefixes"
    lora: Any = get_peft_config(model) or LORA
    modules = lora.target_modules or "of PEFT"
    modules = modules if isinstance(modules, str) else ", ".join(sorted(modules))
    named = f"rank {lora.r}, dropout {lora.lora_dropout:g}, target_modules {modules}"
    sizes, left_out = _count_methods(model_config, lora)
    same = {"documents": documents, "copied_keys": copied, "offload": args.offload}
    peaks = {method: partial(predict_peak, sizes[method], method, **same) for method in sizes}
    rows = []
    memory = (args.memory - RESERVED_GIB) * GIB
    for gpus, method, checkpointing in product(args.world_size, peaks, (True, False)):
        saved = sizes[method].saved
        peak = partial(peaks[method], gpus=gpus, checkpointing=checkpointing)
        prediction = peak(tokens=tokens)
        row = {"gpus": gpus, "method": method.name, "checkpointing": checkpointing, "tokens": tokens}
        row |= {"lora": named} if method.lora else {}
        row["host"] = sum(saved.inputs) * tokens / GIB if args.offload and checkpointing else 0.0
        row |= {name: getattr(prediction, "total" if name == "peak" else name) / GIB for name in PEAK_PARTS}
        row["modelled_activations"] = saved.is_modelled
        for name, fused in (("largest", True), ("largest_plain_loss", False)):
            row[name] = min(largest_tokens(partial(peak, fused_loss=fused), memory, MOST_TOKENS) // batch, most)
        rows.append(row)
    fits = [
        _fewest_gpus({key: peaks[key] for key in peaks if key.lora == lora}, tokens, memory) for lora in (True, False)
    ]
    verdict = f"fits with {tokens:,} tokens in a micro-batch: LoRA {fits[0]}; full {fits[1]}"
    but = " (those of full training under DDP without autocast)" if any(r["modelled_activations"] for r in rows) else ""
    found = {"unit": f"largest {unit}", "but": but, "copied": of_copies}
    found["lora"] = next((row["lora"] for row in rows if "lora" in row), "left out")
    notes = NOTES.format(memory=args.memory, aside=RESERVED_GIB, **found)
    if args.offload:
        host = max(row["host"] for row in rows)
        notes += f"\n--offload: with checkpointing up to {host:.1f} GiB of each GPU's activations lie on the host."
    return PredictedMemory(rows, "\n".join([verdict, *left_out]), notes)


def _count_methods(config: PreTrainedConfig, lora: Any) -> tuple[dict[TrainingMethod, ModelSizes], list[str]]:
    """What is counted of each method, and a line for each that the model cannot run. It can run one, or raises."""
    sizes: dict[TrainingMethod, ModelSizes] = {}
    errors = []
    left_out = []
    # Of both ZeRO stages the same is counted
    for _, group in groupby(METHODS, lambda method: (method.lora, method.engine == "DDP")):
        method, *others = group
        try:
            sizes |= dict.fromkeys([method, *others], count_model(config, method, lora))
        except ValueError as error:
            cause = error.__cause__ or error
            autocast = "with" if method.engine == "DDP" else "without"
            kind = f"{'LoRA' if method.lora else 'full'} training {autocast} autocast"
            left_out.append(f"left out: {kind}, in which the model raises {type(cause).__name__}: {cause}")
            errors.append(error)
    if not sizes:
        raise errors[0]
    return sizes, left_out


def _fewest_gpus(peaks: dict[TrainingMethod, Callable[..., PeakMemory]], tokens: int, memory: float) -> str:
    """The fewest GPUs on which one of these methods fits, and how: the simplest engine, and checkpointing if needed."""
    for gpus, (method, peak), checkpointing in product(GPU_COUNTS, peaks.items(), (False, True)):
        if peak(tokens=tokens, gpus=gpus, checkpointing=checkpointing).total <= memory:
            how = "with checkpointing" if checkpointing else "without checkpointing"
            if gpus > 1 or method.engine != "DDP":
                how = f"with {method.engine} and {how.removeprefix('with ')}"
            return f"on {gpus:,} GPU{'s'[: gpus > 1]} {how}"
    return f"on no number of GPUs up to {GPU_COUNTS[-1]:,}"
