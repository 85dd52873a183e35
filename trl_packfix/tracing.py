"""Where information crosses: the smallest modules that let one document of a pack change another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Leak:
    """A module that lets information cross: what comes in of a document is unchanged, what goes out is not."""

    name: str
    module: str
    change: float


Records = dict[str, tuple[Tensor | None, Tensor | None]]


def find_leaks(
    model: nn.Module,
    run: Callable[[list[Tensor]], Any],
    documents: list[Tensor],
    changed: int,
    variant: list[Tensor],
    tolerance: float,
) -> list[Leak]:
    """The smallest modules whose input outside document `changed` stays while their output does not.

    `run` feeds documents to the model as one pack; `variant` are the documents with one of them changed, of the same
    lengths. Values are compared relative to the largest of each tensor.
    """
    lengths = [len(ids) for ids in documents]
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[sum(lengths[:changed]) : sum(lengths[: changed + 1])] = False
    before, after = _record(model, run, documents), _record(model, run, variant)
    leaks = []
    for name, module in model.named_modules():
        if name in before and name in after:
            came_in, went_out = (_moved(a, b, outside) for a, b in zip(before[name], after[name], strict=True))
            if came_in <= tolerance < went_out:
                leaks.append(Leak(name, type(module).__name__, went_out))
    names = [leak.name for leak in leaks]
    return [leak for leak in leaks if not any(name != leak.name and _inside(name, leak.name) for name in names)]


def _record(model: nn.Module, run: Callable[[list[Tensor]], Any], documents: list[Tensor]) -> Records:
    """First input and first output with a token axis of every module, as (T, rest)."""
    records: Records = {}
    num_tokens = sum(len(ids) for ids in documents)

    def recorder(name: str) -> Callable:
        def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            records[name] = (_by_token([*args, *kwargs.values()], num_tokens), _by_token(output, num_tokens))

        return record

    handles = [module.register_forward_hook(recorder(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        run(documents)
    finally:
        for handle in handles:
            handle.remove()
    return records


def _inside(name: str, parent: str) -> bool:
    return not parent or name.startswith(parent + ".")


def _by_token(values: Any, num_tokens: int) -> Tensor | None:
    """The first floating tensor with a token axis, as (T, rest), in fp32."""
    if isinstance(values, dict):
        values = list(values.values())
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, Tensor) and value.is_floating_point() and num_tokens in value.shape[:3]:
            axis = value.shape.index(num_tokens)
            return value.detach().movedim(axis, 0).reshape(num_tokens, -1).float().cpu()
    return None


def _moved(before: Tensor | None, after: Tensor | None, outside: Tensor) -> float:
    """Largest change outside the changed document, relative to the largest value; 0 where there is nothing to see."""
    if before is None or after is None or before.shape != after.shape:
        return 0.0
    gap = (before[outside] - after[outside]).abs().max().item()
    return gap / max(before.abs().max().item(), 1e-30)
