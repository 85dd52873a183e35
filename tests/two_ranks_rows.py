"""DPO with and without `pack_forward` on two ranks; `test_pack_forward.py` launches it.

    python tests/two_ranks_rows.py FOLDER ENGINE ...

An engine is one of `RUNS`, and has a pair of forks, of which the main process saves the results as
FOLDER/ENGINE/NAME.pt.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from ranks.engines import deepspeed_config, engine_of, engine_settings, gathered
from support.launch import fork_ranks
from support.models import build_tiny_model
from support.rows import build_trainer
from support.versions import run_deepspeed_on_cpus
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trl_packfix import pack_forward

# "regrouped" is the stock run with more padding, which measures rounding
REFERENCES = ("stock", "regrouped", "stock_lora")
RUNS = {"ddp": (*REFERENCES, "packed"), "zero3": ("packed", "packed_lora"), "fsdp2": ("packed", "packed_lora")}


class Engine(TrainerCallback):
    name = ""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.name = engine_of(self.trainer.model_wrapped)


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name, gathered from all ranks."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            with gathered(parameter):
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                found[name] = value.detach().double().clone()
    return found


def run(name: str, model: Any, reference: Any, **settings: Any) -> dict[str, Any]:
    """Five steps of four pairs on each rank."""
    lora = name.endswith("_lora")
    if lora:
        torch.manual_seed(0)
        settings["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if name == "regrouped":
        settings["pad_to_multiple_of"] = 24
    trainer = build_trainer("dpo", model, None if lora else reference, gradient_checkpointing=True, **settings)
    trainer.add_callback(engine := Engine(trainer))
    packing = pack_forward(trainer) if name.startswith("packed") else None
    trainer.train()
    tokens = None if packing is None else packing.tokens
    return {
        "engine": engine.name,
        "weights": whole(trainer),
        "summary": None if packing is None else packing.summary(),
        "tokens": gather_object([None if tokens is None else (tokens.padded, tokens.real, tokens.computed)]),
        "logged": [entry["packing/computed"] for entry in trainer.state.log_history if "packing/computed" in entry],
    }


def run_rank(engine: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    if engine.startswith("zero"):
        run_deepspeed_on_cpus()
        (folder / f"{engine}.json").write_text(json.dumps(deepspeed_config(engine)))
    # Before the first config: under ZeRO-3 each rank would draw its part of the weights.
    models = {name: (build_tiny_model(), build_tiny_model()) for name in RUNS[engine]}
    for name in RUNS[engine]:
        settings = {} if engine == "ddp" else engine_settings(engine, folder)  # resets what the run before has set
        result = run(name, *models[name], **settings)
        if os.environ["RANK"] == "0":
            torch.save(result, folder / engine / f"{name}.pt")
    torch.distributed.destroy_process_group()


def main(folder: Path, engines: list[str]) -> int:
    ended = []
    for engine in engines:
        (folder / engine).mkdir()
        ended.append(fork_ranks(2, partial(run_rank, engine, folder)))
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
