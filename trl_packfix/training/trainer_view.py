"""The attributes and methods of TRL's trainer that this package reads, sets and calls.

`SFTTrainer` holds objects that do the work of a run: data, training objective, user code, evaluation and restart. Each
is a `TrainerPart`, which holds the trainer. Such an object sees the trainer as a `TrainerView`, so this protocol lists
everything that may break with another version of TRL or transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother

from ..attention.models import base_model
from ..isolation.packed_model import PackedModel
from ..reporting.report import PackingReport
from .config import SFTConfig


class TrainerView(Protocol):
    """A trainer during a run. The user may replace its model and its datasets after it is constructed."""

    args: SFTConfig
    accelerator: Accelerator
    state: TrainerState
    callback_handler: CallbackHandler
    model: nn.Module
    model_wrapped: nn.Module  # the model as the engine has wrapped it
    packed_model: PackedModel  # sets the model up for packs, and tests it
    packing_report: PackingReport | None
    # A `UserCode`, which knows the methods of the user's subclass. Its class cannot be named here, because its module
    # imports this one
    user_code: Any

    # Data
    train_dataset: Any
    eval_dataset: Any  # a dataset, or several by name
    data_collator: Any
    processing_class: Any  # a tokenizer or a processor
    _tokenizer: Any  # the tokenizer, or that of the processor
    _is_vision_dataset: bool  # whether the first row of the training set has images
    padding_free: bool  # by it methods of TRL know whether batches are packs
    completion_only_loss: bool
    _train_batch_size: int  # `auto_find_batch_size` lowers it

    # Loss
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., Any] | None  # the metrics of the user, from predictions
    label_smoother: LabelSmoother | None
    aux_loss_enabled: bool  # whether the router loss of a mixture of experts is added to the loss
    router_aux_loss_coef: float
    neftune_noise_alpha: float | None
    model_accepts_loss_kwargs: bool  # whether the loss gets the number of trained tokens of an optimizer step
    current_gradient_accumulation_steps: float
    _loss_shifts_labels: bool  # whether TRL's loss leaves out the first label of a row, which no token predicts
    _total_train_tokens: int  # logged as `num_tokens`
    _metrics: dict[str, Any]  # lists of values by mode ("train" or "eval") and name; TRL's `log` averages them

    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def _get_train_sampler(self) -> Any: ...
    def get_sp_size(self) -> int: ...  # ranks of TRL's sequence parallelism
    def get_tp_size(self) -> int: ...  # ranks of tensor parallelism
    def is_world_process_zero(self) -> bool: ...
    def log(self, logs: dict[str, float]) -> None: ...
    def _get_output_dir(self, trial: object) -> str: ...
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor: ...
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *, num_items_in_batch: Any) -> Any: ...
    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any: ...
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...


def complete_report(trainer: TrainerView, **findings: Any) -> PackingReport:
    """Add findings to the packing report of a trainer and return it. If `args.packing_report` is set, rank 0 saves it.

    Args:
        trainer: the trainer. It must have a report, which is made with its loader of packs.
        findings: values of fields of `PackingReport`.
    """
    assert trainer.packing_report is not None
    report = trainer.packing_report = replace(trainer.packing_report, **findings)
    if trainer.args.packing_report and trainer.is_world_process_zero():
        report.save(str(trainer.args.output_dir))
    return report


@contextmanager
def attributes_set(owner: object, **values: object) -> Iterator[None]:
    """Set attributes of an object of this package in this context. They hide those of its class with the same names.

    On exit the object has the attributes that it had before, also if code in the context has set them again.
    """
    attributes = vars(owner)
    previous = {name: attributes[name] for name in values if name in attributes}  # without those of the class
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(previous)


@dataclass(frozen=True)
class DataRanks:
    """The place of this process among the data-parallel ranks.

    With `DistributedConfig(tp_size=...)` of transformers, several neighbouring processes divide one model by heads,
    features or experts. They run the same batches, so together they are one data-parallel rank. A sum over all
    processes counts each of their tokens `copies` times.

    Attributes:
        rank: the data-parallel rank of this process.
        count: the number of data-parallel ranks.
        copies: the number of processes of a data-parallel rank.
        copy_index: the index of this process among the `copies` processes of its data-parallel rank.
        may_share_packs: whether several processes may have the same pack (tensor parallelism), or parts of one pack
            (sequence parallelism, `tokens_per_rank`).
    """

    rank: int
    count: int
    copies: int
    copy_index: int
    may_share_packs: bool

    @classmethod
    def from_args(cls, args: SFTConfig, copies: int) -> "DataRanks":
        """Return the place of this process if `copies` neighbouring processes divide each model."""
        rank, copy_index = divmod(args.process_index, copies)
        may_share_packs = copies > 1 or (args.world_size > 1 and args.tokens_per_rank is not None)
        return cls(rank, args.world_size // copies, copies, copy_index, may_share_packs)


class TrainerPart:
    """Base class of the objects that a trainer holds for a part of its work. Each of them holds the trainer."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer

    @property
    def args(self) -> SFTConfig:
        """The config of the trainer."""
        return self._trainer.args

    @property
    def base_model(self) -> Any:
        """The model without the wrappers of peft and of the engine."""
        return base_model(self._trainer.model)
