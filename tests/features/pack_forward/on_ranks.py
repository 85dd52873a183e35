"""DPO on ranks with and without `pack_forward`, which `test_pack_forward.py` compares."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from ranks.engines import engine_of, engine_settings, weights_of
from ranks.table import Row
from ranks.training import load_model

from trl_packfix import pack_forward

from .rows import build_trainer

# "regrouped" is the stock run with more padding, which measures rounding
REFERENCES = ("stock", "regrouped", "stock_lora")
RUNS = {"ddp": (*REFERENCES, "packed"), "zero3": ("packed", "packed_lora"), "fsdp2": ("packed", "packed_lora")}


def train(folder: Path, engine: str, name: str) -> dict[str, Any]:
    """Train five steps of four pairs on each rank."""
    settings = engine_settings(engine, folder)
    reference = None
    if name.endswith("_lora"):
        torch.manual_seed(0)
        settings["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    else:
        reference = load_model(folder, Row(), engine)
    if name == "regrouped":
        settings["pad_to_multiple_of"] = 24
    model = load_model(folder, Row(), engine)
    trainer = build_trainer("dpo", model, reference, gradient_checkpointing=True, **settings)
    packing = pack_forward(trainer) if name.startswith("packed") else None
    trainer.train()
    tokens = None if packing is None else packing.tokens
    return {
        "engine": engine_of(trainer.model_wrapped),
        "weights": weights_of(trainer),
        "summary": None if packing is None else packing.summary(),
        "tokens": gather_object([None if tokens is None else (tokens.padded, tokens.real, tokens.computed)]),
        "logged": [entry["packing/computed"] for entry in trainer.state.log_history if "packing/computed" in entry],
    }
