"""Routers of mixtures of experts: the check of the router loss, and its statistic for the documents of packs.

A router chooses the experts that compute a token. The router loss (`router_aux_loss_coef`) adds a load-balancing
statistic of the logits of all routers. `objective.py` calls `check_router_loss` when the trainer is constructed,
because the config of a model may have the fields of a mixture of experts although no layer has experts. In training it
calls `load_balancing` where the statistic of the model would count padding, or shared tokens, or a part of a pack.
"""

import warnings
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.models import base_model
from ..compat import drops_router_logits, name_num_experts
from ..group import Group
from .config import SFTConfig
from .trainer_view import TrainerView


def gives_router_logits(model: PreTrainedModel) -> bool:
    """Return whether a layer of the model has a router; True also if the model declares no class of routers.

    Without a declaration it is not known, and TRL's choice, by the config, is kept.
    """
    # transformers declares in `_can_record_outputs` the classes of modules whose outputs a model can return
    router_classes: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            recorders = (module._can_record_outputs or {}).get("router_logits", [])
            recorders = recorders if isinstance(recorders, list) else [recorders]
            # A declaration is a class, or an `OutputRecorder` that holds the class
            router_classes += [getattr(recorder, "target_class", recorder) for recorder in recorders]
    if not router_classes:
        return True
    return any(isinstance(module, tuple(set(router_classes))) for module in model.modules())


def router_loss_trains(args: SFTConfig) -> bool:
    """Return whether a router loss has a gradient. It has none under reentrant checkpointing.

    Reentrant checkpointing runs layers without gradients, and computes them again in the backward. The logits of their
    routers come from the first run.
    """
    checkpointing: Any = args.gradient_checkpointing_kwargs or {}
    return not (args.gradient_checkpointing and checkpointing.get("use_reentrant"))


def check_router_loss(trainer: TrainerView) -> None:
    """Switch the router loss off for a model that has no router logits, or refuse it if the user has set it.

    TRL switches the loss on by the config of the model, without a look at its layers.
    """
    if not trainer.aux_loss_enabled:
        return
    args = trainer.args
    model = base_model(trainer.model)
    text = model.config.get_text_config()
    # Whether the user has set the coefficient to a number above 0 that is not the default. The default of TRL before
    # 1.13 is above 0
    default = type(args).__dataclass_fields__["router_aux_loss_coef"].default
    is_set = args.router_aux_loss_coef not in (0.0, default)
    if not gives_router_logits(model):
        if is_set:
            raise ValueError(
                f"`router_aux_loss_coef={args.router_aux_loss_coef}` was given with {type(model).__name__}. None "
                "of its layers has a router, so there is no router loss to add. Set `router_aux_loss_coef=0.0`, or "
                "leave it at its default."
            )
        _switch_router_loss_off(trainer, text)
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
        _switch_router_loss_off(trainer, text)
        return
    name_num_experts(text)  # sets `num_experts`, which the statistic reads, in configs with another name for it
    if not router_loss_trains(args):
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


def _switch_router_loss_off(trainer: TrainerView, config: PreTrainedConfig) -> None:
    """Switch the router loss off in the trainer and in the config of the text model."""
    trainer.aux_loss_enabled = False
    trainer.router_aux_loss_coef = 0.0
    config.output_router_logits = False


def load_balancing(
    router_logits: list[Tensor], num_experts: int, num_chosen: int, *, row_counts: Tensor, group: Group
) -> Tensor:
    """Return transformers' load-balancing statistic of the documents of a pack, a scalar; 0 without documents.

    If ranks share the pack, all of them must call it. Its value is the statistic of the whole pack, and its gradient
    flows to the part of the pack on this rank.

    Args:
        router_logits: of each layer, the logits of the tokens on this rank, (T / s, experts), of a pack of T tokens.
        num_experts: the number of experts of a layer.
        num_chosen: the number of experts that compute a token.
        row_counts: how many documents each token of this rank belongs to, (T / s,); 0 for padding. Documents may share
            the tokens of a common prefix.
        group: the s ranks that share the pack; s is 1 for a rank that is alone.
    """
    # Sums over layers and rows of this rank, by expert: how often it was chosen, and its probability
    times_chosen = torch.zeros(num_experts, device=row_counts.device)
    probability = torch.zeros(num_experts, device=row_counts.device)
    counts = row_counts.float()
    for logits in router_logits:  # layer by layer, as the weights of all layers together would need much memory
        # A model whose layers are on several devices has logits on each
        weights = logits.to(row_counts.device).reshape(-1, num_experts).softmax(dim=-1)
        chosen_experts = weights.topk(num_chosen, dim=-1).indices
        times_chosen = times_chosen.scatter_add(0, chosen_experts.flatten(), counts.repeat_interleave(num_chosen))
        probability = probability + (weights.float() * counts[:, None]).sum(0)
    sums = torch.cat([times_chosen, probability.detach(), counts.sum()[None] * len(router_logits)])
    sums = group.sum(sums)
    num_rows = sums[-1].clamp(min=1)  # without documents it is 0, as are all other sums
    # The sum over all ranks as a value. Only the first summand, of this rank, has a gradient
    pack_probability = probability + (sums[num_experts:-1] - probability.detach())
    return num_experts * ((sums[:num_experts] / num_rows) * (pack_probability / num_rows)).sum()
