"""Routers of mixtures of experts: whether a model has one, and the load-balancing statistic of a pack on several ranks.

Some configs have the fields of a mixture of experts although no layer has experts.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.exchange import group_of
from ..attention.models import base_model
from ..compat import drops_router_logits, name_num_experts
from .trainer_view import TrainerView


def gives_router_logits(model: PreTrainedModel) -> bool:
    """Whether a layer has a router. True also for a model that does not declare the classes of its routers."""
    classes: list[Any] = []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            recorders = (part._can_record_outputs or {}).get("router_logits", [])
            recorders = recorders if isinstance(recorders, list) else [recorders]
            classes += [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return not classes or any(isinstance(module, tuple(set(classes))) for module in model.modules())


def check_router_loss(trainer: TrainerView) -> None:
    """Switch the router loss off for a model without router logits, or refuse it. (TRL reads the config alone.)"""
    if not trainer.aux_loss_enabled:
        return
    args = trainer.args
    model = base_model(trainer.model)
    text = model.config.get_text_config()
    # Below TRL 1.13 the default is a number, which the user has not given
    is_set = args.router_aux_loss_coef not in (0.0, type(args).__dataclass_fields__["router_aux_loss_coef"].default)
    if not gives_router_logits(model):
        if is_set:
            raise ValueError(
                f"`router_aux_loss_coef={args.router_aux_loss_coef}` was given with {type(model).__name__}. None "
                "of its layers has a router, so there is no router loss to add. Set `router_aux_loss_coef=0.0`, or "
                "leave it at its default."
            )
        _switch_off(trainer, text)
        return
    if drops_router_logits(model):
        problem = (
            f"`router_aux_loss_coef={trainer.router_aux_loss_coef}` is set for {type(model).__name__}. transformers "
            f"{transformers.__version__} does not return the logits of its routers, so there is no router loss to add. "
            "Run `pip install 'transformers>=5.18'`, or set `router_aux_loss_coef=0.0`."
        )
        if is_set:
            raise ValueError(problem)
        warnings.warn(problem, stacklevel=2)
        _switch_off(trainer, text)
        return
    name_num_experts(text)
    checkpointing: Any = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and checkpointing.get("use_reentrant"):
        source = "was given" if is_set else "is in the config of the model"
        problem = (
            f"`router_aux_loss_coef={trainer.router_aux_loss_coef}` {source}, with `use_reentrant=True` in "
            "`gradient_checkpointing_kwargs`. Reentrant checkpointing runs layers without gradients, so the logits of "
            "their routers have none, and the router loss trains nothing. Set `use_reentrant=False`, or "
            "`router_aux_loss_coef=0.0`."
        )
        if is_set:
            raise ValueError(problem)
        warnings.warn(problem, stacklevel=2)


def _switch_off(trainer: TrainerView, config: PreTrainedConfig) -> None:
    """Train without a router loss. `config` is that of the text model."""
    trainer.aux_loss_enabled = False
    trainer.router_aux_loss_coef = 0.0
    config.output_router_logits = False


def group_load_balancing(
    router_logits: list[Tensor], num_experts: int, num_chosen: int, *, row_counts: Tensor, degree: int
) -> Tensor:
    """transformers' load-balancing statistic of a pack that `degree` ranks share; all of them must call it.

    Its value is that of the whole pack, its gradient that of this part. `router_logits` of each layer are
    (T / s, experts), and each row counts `row_counts` times, (T / s,); padding does not.
    """
    routed = probability = torch.zeros(num_experts, device=row_counts.device)
    counts = row_counts.float()
    for layer in router_logits:  # layer by layer: the weights of all layers at once would need much memory
        weights = layer.reshape(-1, num_experts).softmax(dim=-1)
        chosen = weights.topk(num_chosen, dim=-1).indices
        routed = routed.scatter_add(0, chosen.flatten(), counts.repeat_interleave(num_chosen))
        probability = probability + (weights.float() * counts[:, None]).sum(0)
    sums = torch.cat([routed, probability.detach(), counts.sum()[None] * len(router_logits)])
    dist.all_reduce(sums, group=group_of(degree))
    num_rows = sums[-1].clamp(min=1)
    # The value of the whole pack, the gradient of this part
    whole = probability + (sums[num_experts:-1] - probability.detach())
    return num_experts * ((sums[:num_experts] / num_rows) * (whole / num_rows)).sum()
