"""Engines on ranks of a CPU: what each wants of the settings, how its ranks are forked, and the weights it holds."""

import faulthandler
import json
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from support.launch import LAUNCH_SECONDS, fork_ranks
from support.paths import ROOT
from support.versions import SHARDS_GRADIENTS_ON_CPUS, run_deepspeed_on_cpus
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trl_packfix.cli import recipes

SHARDED = ("zero1", "zero2", "zero3", "zero3_offload")
# Engines by what wraps the model. "ddp4" is DDP on four ranks, "tp_..." are models that ranks divide
ENGINES = {
    "ddp": "DistributedDataParallel",
    "ddp4": "DistributedDataParallel",
    "zero1": "DeepSpeedEngine 1",
    "zero2": "DeepSpeedEngine 2",
    "zero3": "DeepSpeedEngine 3",
    "zero3_offload": "DeepSpeedEngine 3 offload",
    "fsdp2": "FSDP2",
}
# Fields of `DistributedConfig`
DIVIDING = {
    "tp": {"tp_size": 2},
    "tp_ep": {"tp_size": 2, "ep_size": 2},
    "ep_fsdp": {"ep_size": 2, "fsdp_size": 2},
    "tp_fsdp": {"tp_size": 2, "fsdp_size": 2},
    "tp_ep_fsdp": {"tp_size": 2, "ep_size": 2, "fsdp_size": 2},
}
# The engines of one group of forks, in the order in which they run, and the number of ranks
LAUNCHES = {
    "ddp": (2, ["ddp"]),
    "ddp4": (4, ["ddp4"]),
    "deepspeed": (2, [name for name in SHARDED if SHARDS_GRADIENTS_ON_CPUS or name.startswith("zero3")]),
    "fsdp2": (2, ["fsdp2"]),
    "dividing": (2, ["tp", "tp_ep", "ep_fsdp"]),
    "dividing4": (4, ["tp_fsdp", "tp_ep_fsdp"]),
}


def ranks_of(engine: str | None) -> int:
    return next((num for num, engines in LAUNCHES.values() if engine in engines), 1)


def data_ranks_of(engine: str | None) -> int:
    """Return the number of ranks that read data of their own."""
    return DIVIDING[engine].get("fsdp_size", 1) if engine in DIVIDING else ranks_of(engine)


def deepspeed_config(engine: str) -> dict:
    """Return the config that this repository ships, as a CPU can run it; ZeRO-1 is ZeRO-2 with another number."""
    config = json.loads((ROOT / "deepspeed_configs" / f"{engine.replace('zero1', 'zero2')}.json").read_text())
    zero = config["zero_optimization"]
    zero["stage"] = int(engine.removesuffix("_offload")[-1])
    zero["overlap_comm"] = False  # wants streams, which a CPU has not
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            zero[name]["pin_memory"] = False
            config["zero_force_ds_cpu_optimizer"] = False  # which would be compiled for minutes; torch's does
    return config


def engine_settings(engine: str | None, folder: Path) -> dict:
    """Return what `engine` wants of the config, and prepare its surroundings, before the config is made.

    None is one process.
    """
    if engine in SHARDED:
        # Under DeepSpeed `use_cpu` would hide the ranks; its launcher needs the backend named where there is no GPU.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder / f"{engine}.json")
        return {"ddp_backend": "gloo", "use_cpu": False}
    if engine != "fsdp2" and engine not in DIVIDING:
        return {"use_cpu": True}
    # accelerate shards only where it believes in GPUs; the rest of FSDP2 runs on a CPU as it is.
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    settings: dict[str, Any] = {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    shipped = yaml.safe_load((recipes.FOLDER / "accelerate-fsdp2.yaml").read_text())["fsdp_config"]
    sharding = {"version": 2, "state_dict_type": shipped["fsdp_state_dict_type"]}
    return settings | ({"fsdp": True, "fsdp_config": sharding} if engine == "fsdp2" else {})


def engine_of(model: nn.Module) -> str:
    """Return what wraps the model that trains, as the engine itself says it."""
    if isinstance(model, FSDPModule):
        return "FSDP2"
    if hasattr(model, "zero_optimization_stage"):
        offload = " offload" if model.zero_offload_optimizer() else ""
        return f"{type(model).__name__} {model.zero_optimization_stage()}{offload}"
    return type(model).__name__


def gathered(parameter: nn.Parameter, changes: bool = False):
    """Return a context in which ZeRO-3 holds the whole parameter on all ranks; other engines need none."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameter, modifier_rank=0 if changes else None)


def weights_of(trainer: Any) -> torch.Tensor:
    """Return all that is trained, in fp64, gathered from all ranks, which must all call this."""
    tensors = []
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            with gathered(parameter):
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                tensors.append(value.detach().double().flatten().clone())
    return torch.cat(tensors)


Scenarios = dict[str, Callable[[Path], Any]]


def run_rank(launch: str, folder: Path, scenarios: Scenarios) -> None:
    warnings.simplefilter("ignore")
    if launch == "deepspeed":
        run_deepspeed_on_cpus()
    for name, scenario in scenarios.items():
        faulthandler.dump_traceback_later(80)  # a hang says where, before `ddp_timeout` ends it
        result = scenario(folder)
        faulthandler.cancel_dump_traceback_later()
        if os.environ["RANK"] == "0":
            (folder / name).parent.mkdir(exist_ok=True)
            torch.save(result, folder / f"{name}.pt")


def run_all(folder: Path, scenarios: Scenarios) -> bool:
    """Fork the ranks of each launch; rank 0 saves what a scenario "ENGINE/NAME" returns as FOLDER/ENGINE/NAME.pt.

    The first scenario that raises ends its launch. Importing the libraries in each would cost more than most of them.
    """
    for engine in SHARDED:
        (folder / f"{engine}.json").write_text(json.dumps(deepspeed_config(engine)))
    ended = []
    for launch, (num_ranks, engines) in LAUNCHES.items():
        of_launch = {name: scenario for name, scenario in scenarios.items() if name.split("/")[0] in engines}
        if of_launch:
            ordered = dict(sorted(of_launch.items(), key=lambda item: engines.index(item[0].split("/")[0])))
            ended.append(fork_ranks(num_ranks, partial(run_rank, launch, folder, ordered), LAUNCH_SECONDS))
    return all(ended)
