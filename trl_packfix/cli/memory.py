"""`trl-packfix plan --memory GIB`: predict the peak memory of a GPU by method, and the largest `max_length` that fits.

`forecast.py` calls `predict_memory` with the config of a run. For each number of GPUs, each method of training (LoRA or
full, under DDP, ZeRO-2 or ZeRO-3), with and without gradient checkpointing, it asks `data/model_memory.py` for the
peak of a micro-batch. Memory is in GiB in rows and texts, and in bytes in between. The *fused loss* is TRL's, which
never has the logits of all tokens in memory.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby, product
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from trl import get_peft_config

from ..data.model_memory import (
    GIB,
    LORA,
    METHODS,
    RESERVED,
    ModelSizes,
    PeakMemory,
    TrainingMethod,
    count_model,
    describe_unneeded_checkpointing,
    largest_tokens,
    predict_peak,
)
from ..feature import features_of
from ..reporting.columns import Column
from ..training.config import with_settings
from ..wording import count_of
from .configs import RunConfigs
from .tokens import load_model_config

MAX_TOKENS = 2**24  # the most tokens of a micro-batch that are tried
RESERVED_GIB = RESERVED / GIB
PEAK_PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "head", "layer", "attention", "peak")
GPU_COUNTS = tuple(2**power for power in range(11))  # numbers of GPUs among which the fewest that fit are searched
# The columns that every printed table begins with. Each is a function of a row of `PredictedMemory`
KEYS = (
    Column("training", itemgetter("method"), text=""),
    Column("ckpt", lambda row: "yes" if row["checkpointing"] else "no", text=""),
)
COLUMNS = (  # all columns
    *KEYS,
    Column("peak", itemgetter("peak"), ".1f"),
    Column("largest", lambda row: row["largest"] or None),
    Column("plain loss", lambda row: row["largest_plain_loss"] or None),
    *(Column(name, itemgetter(name), ".1f") for name in PEAK_PARTS if name != "peak"),
)
NOTES = """\
GiB on each GPU, of {memory:g}, less {aside:g} for the CUDA context and fragments. ckpt: gradient_checkpointing. \
largest: the {unit} that fits; plain loss: the same with all logits in memory, as with compute_loss_func.
LoRA on 8,192 and 16,384 tokens took within 5 % of this on an H200 and an H100, full training of 1.5B parameters 14 % \
less; the rest was not measured. Counted: weights, gradients, optimizer (AdamW), activations{but}. Modelled: \
gathered, head (LM head and TRL's fused loss), layer (temporaries of backward, and with checkpointing what is computed \
again), attention (its work space{copied}). head is not in memory together with layer and attention.
LoRA: {lora}, of a bfloat16 model. Each communicator of NCCL takes 0.1 to 0.4 GiB more, an \
estimate; tokens_per_rank needs one for each degree."""


def check_memory_flags(args: argparse.Namespace, configs: RunConfigs) -> None:
    """Refuse `--memory` and `--offload` where they lack a flag that they need, and `plan` without anything to plan."""
    if args.memory is None:
        if args.offload:
            raise ValueError(
                "`--offload` was given without `--memory`. It changes the predicted memory only. Give `--memory` too."
            )
        if not configs.names:
            raise ValueError(
                "`plan` was given without DATA and without `--memory`. Packs are planned from documents, and memory is "
                "predicted from a model. Give a dataset, or `--model MODEL --memory GIB`."
            )
        return
    if configs.model.model_name_or_path is None:
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
    """The predicted memory of a run.

    Attributes:
        rows: for each number of GPUs and each method, with and without checkpointing, the parts of the peak in GiB, and
            the largest numbers of tokens that fit. The keys are those of the JSON output.
        verdict: a text that says on how many GPUs the run fits.
        notes: a text that explains the columns.
    """

    rows: list[dict[str, Any]]
    verdict: str
    notes: str


def predict_memory(
    args: argparse.Namespace, configs: RunConfigs, num_documents: int, *, max_length: int | None
) -> PredictedMemory:
    """Predict the memory of a run.

    Args:
        args: the flags of `plan`.
        configs: the configs of the run.
        num_documents: the most documents of a pack: FlashAttention-2 adds rows to its work space for each.
        max_length: replaces the `max_length` of the run.

    Raises:
        ValueError: the model can be trained by no method.
    """
    # 1. The tokens of a micro-batch, the setting that decides them, and the largest value of it that is printed
    config = with_settings(configs.training, max_length=max_length)
    model_config: Any = load_model_config(configs)
    assert config.max_length is not None  # `SFTConfig` refuses packing without it
    assert model_config is not None  # `check_memory_flags` refuses memory without a model
    batch_size = config.per_device_train_batch_size
    setting = "max_length"
    tokens = batch_size * config.max_length
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or MAX_TOKENS
    if config.tokens_per_rank is not None:  # the batch size is 1
        setting = "tokens_per_rank"
        tokens = config.tokens_per_rank
        limit = MAX_TOKENS
    # A feature of the run, such as shared prefixes, may copy keys in attention. `copied_bytes` is the most bytes of
    # such copies that a layer holds at a time, 0 for no copies
    feature = features_of(config)
    copies_text = f", with {feature.copies_text}" if feature.copied_bytes else ""
    lora: Any = get_peft_config(configs.model) or LORA  # `LORA`: the settings of our example
    modules = lora.target_modules or "of PEFT"
    modules = modules if isinstance(modules, str) else ", ".join(sorted(modules))
    lora_text = f"rank {lora.r}, dropout {lora.lora_dropout:g}, target_modules {modules}"

    # 2. A row for each number of GPUs and each method, with and without checkpointing. `sizes` has what weights take,
    # and what a forward saves for the backward
    sizes, failures = _count_methods(model_config, lora)
    options = {"documents": num_documents, "copied_keys": float(feature.copied_bytes), "offload": args.offload}
    # By method, the function that predicts its peak from the other arguments of `predict_peak`
    peaks = {method: partial(predict_peak, sizes[method], method, **options) for method in sizes}
    rows = []
    memory = (args.memory - RESERVED_GIB) * GIB
    for gpus, method, checkpointing in product(args.world_size, peaks, (True, False)):
        saved = sizes[method].saved  # what a forward saves for the backward, mostly in bytes per token
        predict_row = partial(peaks[method], gpus=gpus, checkpointing=checkpointing)
        prediction = predict_row(tokens=tokens)
        row = {"gpus": gpus, "method": method.name, "checkpointing": checkpointing, "tokens": tokens}
        if method.lora:
            row["lora"] = lora_text
        # With checkpointing only the inputs of layers are saved, and offloading moves them to the host. `saved.inputs`
        # has an entry for each layer, in bytes per token
        row["host"] = sum(saved.inputs) * tokens / GIB if args.offload and checkpointing else 0.0
        row |= {name: getattr(prediction, "total" if name == "peak" else name) / GIB for name in PEAK_PARTS}
        # Whether a part of the activations is not counted, but computed from the number of weights
        row["modelled_activations"] = saved.is_modelled
        for name, fused in (("largest", True), ("largest_plain_loss", False)):
            # The most tokens of a micro-batch whose predicted peak is at most `memory`
            most_tokens = largest_tokens(partial(predict_row, fused_loss=fused), memory, MAX_TOKENS)
            row[name] = min(most_tokens // batch_size, limit)
        rows.append(row)

    # 3. The texts
    lora_peaks = {method: peak for method, peak in peaks.items() if method.lora}
    full_peaks = {method: peak for method, peak in peaks.items() if not method.lora}
    lora_gpus = _describe_fewest_gpus(lora_peaks, tokens, memory)
    full_gpus = _describe_fewest_gpus(full_peaks, tokens, memory)
    verdict = [f"fits with {tokens:,} tokens in a micro-batch: LoRA {lora_gpus}; full {full_gpus}"]
    if config.gradient_checkpointing:
        # A run with LoRA is not compared with full training
        compared_peaks = [lora_peaks] if configs.model.use_peft else [lora_peaks, full_peaks]
        # `describe_unneeded_checkpointing` sets `RESERVED` aside itself, so it gets the whole memory
        for gpus, peaks_of_methods in product(args.world_size, compared_peaks):
            verdict += _describe_first_without_checkpointing(
                peaks_of_methods, tokens, gpus=gpus, memory=args.memory * GIB
            )
    has_modelled = any(row["modelled_activations"] for row in rows)
    notes = NOTES.format(
        memory=args.memory,
        aside=RESERVED_GIB,
        unit=f"largest {setting}",
        but=" (those of full training under DDP without autocast)" if has_modelled else "",
        copied=copies_text,
        lora=next((row["lora"] for row in rows if "lora" in row), "left out"),
    )
    if args.offload:
        host = max(row["host"] for row in rows)
        notes += f"\n--offload: with checkpointing up to {host:.1f} GiB of each GPU's activations lie on the host."
    return PredictedMemory(rows, "\n".join([*verdict, *failures]), notes)


def _count_methods(config: PreTrainedConfig, lora: Any) -> tuple[dict[TrainingMethod, ModelSizes], list[str]]:
    """Count the sizes of a model under each method of training.

    Returns:
        The sizes by method, and a line of text for each group of methods under which the model cannot be run.

    Raises:
        ValueError: the model can be run under no method.
    """
    sizes: dict[TrainingMethod, ModelSizes] = {}
    errors = []
    failures = []
    # Both stages of ZeRO have equal sizes, and are neighbours in `METHODS`, so they are counted once. DDP differs
    # because it trains under autocast
    for _, group in groupby(METHODS, lambda method: (method.lora, method.engine == "DDP")):
        methods = list(group)
        method = methods[0]
        try:
            sizes |= dict.fromkeys(methods, count_model(config, method, lora))
        except ValueError as error:
            cause = error.__cause__ or error
            autocast = "with" if method.engine == "DDP" else "without"
            training = f"{'LoRA' if method.lora else 'full'} training {autocast} autocast"
            failures.append(f"left out: {training}, in which the model raises {type(cause).__name__}: {cause}")
            errors.append(error)
    if not sizes:
        raise errors[0]
    return sizes, failures


def _describe_first_without_checkpointing(
    peaks: Mapping[TrainingMethod, Callable[..., PeakMemory]], tokens: int, *, gpus: int, memory: float
) -> list[str]:
    """Return a text that names the first method that fits on `gpus` GPUs without checkpointing; [] if none does.

    Args:
        peaks: by method, in the order of preference, the function that predicts its peak.
        tokens: of a micro-batch.
        gpus: their number.
        memory: of one GPU, in bytes.
    """
    for method, peak in peaks.items():
        total = peak(tokens=tokens, gpus=gpus, checkpointing=False).total
        beginning = f"{method.name} on {count_of(gpus, 'GPU')} "
        if text := describe_unneeded_checkpointing(total, memory, prefix=beginning):  # "" if it does not fit
            return [text]
    return []


def _describe_fewest_gpus(peaks: Mapping[TrainingMethod, Callable[..., PeakMemory]], tokens: int, memory: float) -> str:
    """Return a text that says on how few GPUs a run fits, by which method, and whether with checkpointing.

    Args:
        peaks: by method, in the order of preference, the function that predicts its peak.
        tokens: of a micro-batch.
        memory: of one GPU, in bytes.
    """
    for gpus, (method, peak), checkpointing in product(GPU_COUNTS, peaks.items(), (False, True)):
        if peak(tokens=tokens, gpus=gpus, checkpointing=checkpointing).total <= memory:
            manner = "with checkpointing" if checkpointing else "without checkpointing"
            if gpus > 1 or method.engine != "DDP":
                manner = f"with {method.engine} and {manner.removeprefix('with ')}"
            return f"on {count_of(gpus, 'GPU')} {manner}"
    return f"on no number of GPUs up to {GPU_COUNTS[-1]:,}"
