"""What the parts of the trainer read of TRL's trainer, and set: all of it is here, by name."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother

from ..isolation.packed_model import PackedModel
from ..reporting.report import PackingReport
from .config import SFTConfig


class TrainerView(Protocol):
    """A trainer during a run. The model and the datasets are there when it is constructed, and may be replaced."""

    args: SFTConfig
    accelerator: Accelerator
    state: TrainerState
    callback_handler: CallbackHandler
    model: nn.Module
    model_wrapped: nn.Module  # by the engine
    packed_model: PackedModel
    packing_report: PackingReport | None
    user_code: Any  # `UserCode`, which reads this

    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    _tokenizer: Any
    _is_vision_dataset: bool
    padding_free: bool
    completion_only_loss: bool
    _train_batch_size: int  # lowered by `auto_find_batch_size`

    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., Any] | None
    label_smoother: LabelSmoother | None
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    neftune_noise_alpha: float | None
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int
    _loss_shifts_labels: bool
    _total_train_tokens: int
    _metrics: dict[str, Any]  # averaged by TRL's `log`

    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def _get_train_sampler(self) -> Any: ...
    def get_sp_size(self) -> int: ...
    def get_tp_size(self) -> int: ...
    def is_world_process_zero(self) -> bool: ...
    def log(self, logs: dict[str, float]) -> None: ...
    def _get_output_dir(self, trial: object) -> str: ...
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor: ...
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *, num_items_in_batch: Any) -> Any: ...
    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any: ...
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DataRanks:
    """The place of this process among the data-parallel ranks.

    With `DistributedConfig(tp_size=...)` of transformers, `copies` neighbouring processes hold one model between them,
    by heads, features or experts. They run the same batches, so together they are one rank, and what each of them
    counts is counted so many times.
    """

    rank: int
    count: int
    copies: int
    index: int  # of this process among the copies
    may_share: bool  # whether several processes may have the same pack, or parts of it

    @classmethod
    def from_args(cls, args: SFTConfig, copies: int) -> "DataRanks":
        rank, index = divmod(args.process_index, copies)
        may_share = copies > 1 or (args.world_size > 1 and args.tokens_per_rank is not None)
        return cls(rank, args.world_size // copies, copies, index, may_share)


class TrainerPart:
    """What a trainer holds, and reads the trainer."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer

    @property
    def args(self) -> SFTConfig:
        return self._trainer.args
