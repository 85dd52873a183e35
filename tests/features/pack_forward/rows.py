"""Trainers of TRL on rows that share prompts, with and without `pack_forward`."""

import random
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from support.models import ARCHITECTURES, build_tiny_model, build_tokenizer
from support.runs import PLAIN_RUN, plain_sgd
from sweep import zoo
from sweep.double import in_double
from transformers import AutoModelForSequenceClassification, DataCollatorForLanguageModeling, PrinterCallback

from trl_packfix import pack_forward

WORDS = ["alpha", "be", "gamma ray", "d", "epsilon", "zeta", "eta"]
TRAINERS = {  # by name: not every version of TRL has all of them at its top
    "dpo": (trl, "DPOTrainer", "DPOConfig"),
    "reward": (trl, "RewardTrainer", "RewardConfig"),
    "kto": (trl, "KTOTrainer", "KTOConfig"),
    "grpo": (trl, "GRPOTrainer", "GRPOConfig"),
    "rloo": (trl, "RLOOTrainer", "RLOOConfig"),
    "sft": (trl, "SFTTrainer", "SFTConfig"),
    "trainer": (transformers, "Trainer", "TrainingArguments"),
}
HAS_REFERENCE = ("dpo", "kto")


def pairs(num: int = 20, seed: int = 0) -> list[dict[str, str]]:
    """Return prompts of 10 to 100 tokens, two answers each, one of which may be one token."""
    rng = random.Random(seed)
    text = lambda low, high: " ".join(rng.choices(WORDS, k=rng.randint(low, high)))  # noqa: E731
    rows = [{"prompt": text(3, 14), "chosen": " " + text(1, 6), "rejected": " " + text(1, 9)} for _ in range(num)]
    rows[1]["rejected"] = ""
    rows[3] |= {"prompt": rows[2]["prompt"][:-1] + "?"}  # differs from another prompt by its last token
    return rows


def dataset(kind: str) -> Dataset:
    """Return rows as the trainer takes them."""
    rows = pairs()
    if kind == "kto":
        columns = ("chosen", "rejected")
        rows = [{"prompt": r["prompt"], "completion": r[k], "label": k == "chosen"} for r in rows for k in columns]
    elif kind in ("grpo", "rloo"):
        rows = [{"prompt": row["prompt"]} for row in rows]
    elif kind == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    elif kind == "trainer":
        tokenizer = build_tokenizer()
        rows = [
            {"input_ids": tokenizer(row["prompt"] + row[k]).input_ids} for row in rows for k in ("chosen", "rejected")
        ]
    return Dataset.from_list(rows)


def build_model(kind: str, model_type: str, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """Return a tiny causal LM, or for "reward" a model with a score."""
    if model_type in ARCHITECTURES or model_type == "gemma3":
        model = build_tiny_model(model_type, dtype=dtype, **config)
    else:
        special = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = zoo.build_model(model_type, **special, **config).to(dtype)
    if kind == "reward":
        model.config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_config(model.config, dtype=dtype)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    return model


def build_trainer(
    kind: str, model: Any = "llama", reference: Any = None, peft_config: Any = None, **options: Any
) -> Any:
    """Return a trainer of a model, or of tiny ones, the reference included, of the type that has this name."""
    if isinstance(model, str):
        reference = build_tiny_model(model)
        model = build_tiny_model(model)
    library, *names = TRAINERS[kind]
    trainer_class, config = (getattr(library, name) for name in names)
    settings = plain_sgd(0.5) | PLAIN_RUN
    settings |= {"per_device_train_batch_size": 4, "max_steps": 5, "seed": 11, "use_cpu": True}
    extra: dict[str, Any] = {}
    if kind in ("grpo", "rloo"):
        settings |= {"num_generations": 4, "max_completion_length": 12}
        extra["reward_funcs"] = lambda completions, **kwargs: [float(len(set(x))) for x in completions]
        extra |= {name: options.pop(name) for name in ("reward_funcs", "reward_processing_classes") if name in options}
    if kind in HAS_REFERENCE and reference is not None:
        extra["ref_model"] = reference
    if kind == "trainer":
        extra["data_collator"] = DataCollatorForLanguageModeling(build_tokenizer(), mlm=False)
    if peft_config is not None:
        extra["peft_config"] = peft_config
    args = config(output_dir=tempfile.mkdtemp(), **(settings | options))
    trainer = trainer_class(
        model=model, args=args, train_dataset=dataset(kind), processing_class=build_tokenizer(), **extra
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(
    kind: str,
    model_type: str = "llama",
    *,
    packed: bool,
    dtype: torch.dtype = torch.float64,
    config: dict[str, Any] | None = None,
    packing: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any, Any]:
    """Train, and return the change of all trained weights, the trainer, and what `pack_forward` returned.

    `config` is of the model, `packing` has arguments of `pack_forward`, and `options` are settings of the trainer.
    """
    torch.manual_seed(0)
    with in_double() if dtype is torch.float64 else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = build_model(kind, model_type, dtype, **(config or {}))
        has_reference = kind in HAS_REFERENCE and "peft_config" not in options
        reference = build_model(kind, model_type, dtype, **(config or {})) if has_reference else None
        trainer = build_trainer(kind, model, reference, **options)
        record = pack_forward(trainer, **(packing or {})) if packed else None
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        trainer.train()
    change = torch.cat([(p.detach() - old).flatten() for p, old in zip(trained, before, strict=True)])
    return change, trainer, record
