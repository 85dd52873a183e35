"""Trainers on tiny models and data, and what their runs are compared by."""

import json

import numpy as np
import torch
import trl
from datasets import Dataset

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.isolation.packed_model import PackedModel

from .models import build_tiny_model, build_tokenizer

PROMPT = [{"role": "user", "content": "how many words"}]
ANSWER = [{"role": "assistant", "content": "four of them"}]
TOOL = json.dumps([{"type": "function", "function": {"name": "count", "parameters": {}}}])


def config(folder, config_class=SFTConfig, **kwargs):
    defaults = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    defaults |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "logging_steps": 1}
    defaults |= {"disable_tqdm": True} | ({"packing_report": False} if config_class is SFTConfig else {})
    return config_class(str(folder), **(defaults | kwargs))


def build_trainer(
    folder, dataset, model="llama", trainer_kwargs=None, trainer_class=SFTTrainer, processing_class=None, **kwargs
):
    model = build_tiny_model(model) if isinstance(model, str) else model
    return trainer_class(
        model,
        config(folder, **kwargs),
        train_dataset=dataset,
        processing_class=processing_class or build_tokenizer(),
        **(trainer_kwargs or {}),
    )


def stock(folder, dataset, model="llama", **kwargs):
    """Return the trainer of TRL that trains the same without packing."""
    return build_trainer(
        folder, dataset, model, trainer_class=trl.SFTTrainer, config_class=trl.SFTConfig, packing=False, **kwargs
    )


def packed_model(model, **settings):
    return PackedModel(model, torch.float32, "cpu", 64, **settings)


def texts(num=40, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset.from_dict({"text": ["".join(rng.choice(list("abcdef "), n)) for n in rng.integers(3, 60, num)]})


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def start_weights(model="llama"):
    return torch.cat([p.detach().flatten() for p in build_tiny_model(model).parameters()])


def all_documents(trainer):
    """Return the documents of all packs of a run, sorted."""
    return sorted(document for batch in trainer.get_train_dataloader() for document in documents_of(batch))


def documents_of(batch):
    """Return (tokens, labels) of each document of a packed batch, sorted; padding is left out."""
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    pairs = zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths), strict=True)
    return sorted((tokens.tolist(), labels.tolist()) for tokens, labels in pairs)
