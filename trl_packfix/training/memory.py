"""Measure the memory of the first optimizer steps on a GPU, and say whether gradient checkpointing is needed.

TRL checkpoints by default, which computes the forward of every layer twice. Before a run, `trl-packfix plan --memory`
predicts whether this is needed (`data/model_memory.py`). In the run, only the memory that checkpointing saves is
predicted, and added to the measured memory. If the sum fits on the GPU, a line of the report says that checkpointing is
not needed.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..attention.models import base_model
from ..data.model_memory import GIB, TrainingMethod, count_model, describe_unneeded_checkpointing, predict_peak
from ..isolation.probed_model import gather_values
from .loading import TrainingData
from .trainer_view import TrainerView, complete_report

MEASURED_STEPS = 2  # from the second step on, the states of the optimizer are in memory during forward and backward


class MeasuredMemory(NamedTuple):
    """The memory of a GPU, in bytes."""

    allocated: int  # the most that tensors have taken
    reserved: int  # the most that the allocator of torch has reserved for tensors
    total: int  # the memory that the GPU has


def read_memory(device: torch.device) -> MeasuredMemory | None:
    """Return the most memory that this process has taken of its GPU so far; None if the device is no GPU."""
    if device.type != "cuda":
        return None
    return MeasuredMemory(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        total=torch.cuda.get_device_properties(device).total_memory,
    )


class MeasureMemory(TrainerCallback):
    """Completes the report with the memory of the first steps."""

    def __init__(self, trainer: TrainerView, data: TrainingData):
        self._trainer = trainer
        self._data = data
        self._last_step = 0  # the number of the optimizer step after which memory is read
        self._taken_before: MeasuredMemory | None = None  # when training started, by all that this process has done

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *call: object, **kwargs: object) -> None:
        """Note after which step memory is read, and what was taken before."""
        self._last_step = state.global_step + MEASURED_STEPS
        self._taken_before = read_memory(self._trainer.accelerator.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *call: object, **kwargs: object) -> None:
        """Read the memory of all ranks after the last measured step, and print its line of the report."""
        trainer = self._trainer
        if state.global_step != self._last_step:
            return
        memory_of_ranks = gather_values((read_memory(trainer.accelerator.device), self._taken_before))
        measured = [(memory, before) for memory, before in memory_of_ranks if memory is not None]
        if not measured or not trainer.is_world_process_zero():
            return
        fullest, before = max(measured, key=lambda pair: pair[0].allocated)
        described = f"peak of the first {MEASURED_STEPS} steps"
        if before is not None and fullest.allocated <= before.allocated:
            # The peak is that of an earlier training in this process, or of loading the model
            described = f"the first {MEASURED_STEPS} steps take no more than was taken before:"
        text = (
            f"{described} {fullest.allocated / GIB:.1f} GiB in tensors, {fullest.reserved / GIB:.1f} reserved, "
            f"of {fullest.total / GIB:.0f}"
        )
        saved = self._predict_saving() if trainer.args.gradient_checkpointing else None
        if saved is not None:  # the text is "" if the sum does not fit
            text += describe_unneeded_checkpointing(fullest.allocated + saved, fullest.total, prefix="; ")
        print(f"memory: {text}")
        complete_report(trainer, memory=text)  # the field `memory` of the packing report

    def _predict_saving(self) -> float | None:
        """Return the bytes that checkpointing saves on a GPU, for a full micro-batch; None if that is not predicted."""
        trainer = self._trainer
        model: Any = base_model(trainer.model)
        engine = _engine_of(trainer)
        is_text = self._data.reading.is_text_only and not getattr(model, "is_quantized", False)
        packing = self._data.source.packing  # the settings by which packs are planned
        if engine is None or not is_text or packing is None:
            return None
        adapters = [*getattr(trainer.model, "peft_config", {}).values()]
        method = TrainingMethod(lora=bool(adapters), engine=engine)
        # `count_model` builds a model without memory. Its adapters and dropout draw random numbers, on which the run
        # must not depend
        with torch.random.fork_rng(devices=[]):
            try:
                # The sizes of weights and activations, from the config: no memory is taken
                sizes = count_model(model.config, method, *adapters[:1])
            except ValueError:  # the forward of the model cannot run on fake tensors
                return None
        # The tokens of a full micro-batch on one rank. If the user sets no `tokens_per_rank`, this is the batch size x
        # `max_length`
        num_tokens = packing.parallel.tokens_per_rank
        predict = partial(predict_peak, sizes, method, tokens=num_tokens, gpus=trainer.args.world_size)
        return predict(checkpointing=False).total - predict(checkpointing=True).total


def _engine_of(trainer: TrainerView) -> Any:
    """Return the engine of a run as `TrainingMethod` names it; None if its memory cannot be predicted, as of FSDP.

    One process without an engine has the memory of a rank of DDP.
    """
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stage = trainer.accelerator.deepspeed_plugin.zero_stage
        return f"ZeRO-{stage}" if stage in (2, 3) else None
    return "DDP" if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU) else None
