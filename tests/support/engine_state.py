"""What an engine knows between two micro-batches, as one dictionary per rank: for a probe that must not change it."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")  # of DeepSpeed


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this rank stores of a parameter, wherever the engine keeps it."""
    if hasattr(parameter, "ds_tensor"):
        parameter = parameter.ds_tensor
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        yield value.to_local().clone() if isinstance(value, DTensor) else value.clone()
    elif isinstance(value, dict | list | tuple):
        for value_inside in value.values() if isinstance(value, dict) else value:
            yield from tensors(value_inside)


def snapshot(trainer: Any) -> dict[str, list]:
    model = trainer.model_wrapped
    parameters = list(trainer.model_wrapped.parameters())
    return {
        "parameters": [local(parameter) for parameter in parameters],
        # A parameter that stays gathered is of another shape (ZeRO-3) or type (FSDP2). ZeRO-3 keeps small ones on
        # purpose, from their first use.
        "placement": [
            (type(p), None if getattr(p, "ds_persist", False) else (p.shape, str(getattr(p, "ds_status", ""))))
            for p in parameters
        ],
        "frozen": [not parameter.requires_grad for parameter in parameters],
        "gathered by": [sorted(getattr(p, "ds_active_sub_modules", ())) for p in parameters],
        "shards": [
            str(parameter.sharded_state)
            for module in model.modules()
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params
        ],
        "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "optimizer": list(tensors(trainer.optimizer.state_dict())),
        "random": [torch.get_rng_state(), random.getstate(), *np.random.get_state()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(vars(module)[name] or ()) for module in model.modules() for name in HOOKS]
        + [len(getattr(parameter, name, None) or ()) for parameter in parameters for name in TENSOR_HOOKS],
        "counters": [getattr(model, name, None) for name in COUNTERS],
    }


def changed(before: dict[str, list], after: dict[str, list]) -> list[str]:
    """Return the names under which two snapshots differ."""

    def same(first: Any, second: Any) -> bool:
        if isinstance(first, torch.Tensor | np.ndarray):
            return type(first) is type(second) and first.shape == second.shape and bool((first == second).all())
        return first == second

    return [
        name
        for name in before
        if len(before[name]) != len(after[name]) or not all(map(same, before[name], after[name]))
    ]
