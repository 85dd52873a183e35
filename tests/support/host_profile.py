"""Operators that the host launches for one micro-batch, and its CPU seconds, through a whole trainer.

The path of CUDA runs on the CPU, on kernels that compute nothing while the host is measured. What a model launches
there it launches on a GPU, too: norms, products, casts, copies. A kernel of attention counts as one operator. Views and
empty tensors do not count, because a GPU is not asked for them. How long a GPU takes is not shown.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, TrainerCallback, modeling_flash_attention_utils

from .attention import take_path_of_cuda
from .models import build_tiny_model
from .runs import build_trainer
from .strict_varlen import StrictVarlen

# Operators of torch that launch nothing on a GPU. `to` and its kind are here, and the copies that they make are not
NO_LAUNCH = set(
    """alias as_strided chunk detach diagonal empty empty_like empty_strided expand expand_as flatten is_nonzero item
    lift_fresh movedim narrow new_empty new_empty_strided permute reshape resolve_conj resolve_neg select set_ slice
    split split_with_sizes squeeze t to transpose unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as
    _local_scalar_dense _reshape_alias _unsafe_view""".split()
)
ATTENTION = {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}
WARM_UP = 2  # steps, with the proof of the model and the comparison of the first one
SIZES = (2, 6)  # numbers of layers, whose difference gives a layer
DOCUMENTS = Dataset.from_dict({"input_ids": [[3 + i % 200, *range(3, 3 + 10 + i % 7)] for i in range(80)]})


def count_launches(event: Any) -> int:
    """Count the operators in an event of the profiler: the innermost ones that are no views."""
    if event.name in ATTENTION:
        return 1
    inner = sum(map(count_launches, event.cpu_children))
    namespace, _, name = event.name.partition("::")
    return inner or int(namespace == "aten" and name not in NO_LAUNCH)


class IdleKernels(StrictVarlen):
    """A stand-in for the kernels that computes attention until `is_idle` is set, and then zeros."""

    is_idle = False

    def forward(self, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        if not self.is_idle:
            return super().forward(q, *args, **options)
        sums = torch.zeros(q.shape[1], len(q))
        seed = torch.zeros(2, dtype=torch.uint64)
        return torch.zeros_like(q), sums, seed, torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(self, grad: Tensor, *states: Any, **options: Any) -> tuple[Tensor, ...]:
        if not self.is_idle:
            return super().backward(grad, *states, **options)
        return tuple(torch.zeros_like(x) for x in states[:3])


class HostProfile(TrainerCallback):
    """Measures forward and backward of micro-batches after the warm-up: launches of one, CPU seconds of others.

    Attributes:
        launches: operators of one micro-batch.
        seconds: CPU seconds of each timed micro-batch, without the profiler.
    """

    def __init__(self, kernels: IdleKernels):
        self.launches = 0
        self.seconds: list[float] = []
        self._kernels = kernels
        self._profiler: profile | None = None
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self._kernels.is_idle = state.global_step >= WARM_UP
        if state.global_step == WARM_UP:
            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.start()
        self._began = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self.launches = sum(count_launches(event) for event in self._profiler.events() if event.cpu_parent is None)
            self._profiler = None
        elif state.global_step > WARM_UP:
            self.seconds.append(time.process_time() - self._began)


@contextmanager
def kernels_in_place() -> Iterator[IdleKernels]:
    """Give torch's operators of FlashAttention, and transformers' path to flash-attn, kernels on the CPU."""
    utils = modeling_flash_attention_utils
    functions = (None, varlen_function, None, utils._pad_input, utils._unpad_input)
    loaded = functions, (utils._lazy_define_process_function(varlen_function), None)
    with pytest.MonkeyPatch.context() as patch, IdleKernels().registered() as kernels:
        take_path_of_cuda(patch)
        patch.setattr(utils, "lazy_import_flash_attention", lambda *args, **options: loaded)
        yield kernels


def varlen_function(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, **options):
    """Compute causal attention as `flash_attn_varlen_func` of flash-attn does, by torch's operator."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    no_window = {"window_size_left": -1, "window_size_right": 0}
    # torch knows the backward of this operator
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, 0.0, True, False, scale=softmax_scale, **no_window
    )[0]


def profile_host(
    package: Any, num_layers: int, *, lora: bool, checkpoints: bool, num_timed: int = 0
) -> tuple[int, float]:
    """Return the launches of one micro-batch, and the fewest CPU seconds of `num_timed` others; inf without others.

    Args:
        package: trl_packfix, or trl for TRL's packing on the path of flash-attn in transformers.
        num_layers: layers of the model.
        lora: whether adapters on all linear layers are trained, and not all weights.
        checkpoints: whether layers are checkpointed.
        num_timed: micro-batches whose seconds are measured.
    """
    model = build_tiny_model("llama", num_hidden_layers=num_layers)
    settings = {"bf16": True, "gradient_checkpointing": checkpoints, "max_steps": WARM_UP + 1 + num_timed}
    settings |= {"packing_strategy": "bfd", "logging_strategy": "no", "config_class": package.SFTConfig}
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    with kernels_in_place() as kernels:
        measured = HostProfile(kernels)
        more = {"callbacks": [measured], "peft_config": adapters}
        trainer = build_trainer(mkdtemp(), DOCUMENTS, model, trainer_class=package.SFTTrainer, **more, **settings)
        if package is trl:
            model.config._attn_implementation = "flash_attention_2"  # without the check whether flash-attn is there
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return measured.launches, min(measured.seconds, default=math.inf)


def profile_layer(package: Any, *, num_timed: int = 0, **case: bool) -> dict[str, float]:
    """Return launches and, if some are timed, CPU milliseconds of a micro-batch, for each layer and for the others.

    The arguments are those of `profile_host`.
    """
    few, many = SIZES
    (few_launches, few_seconds), (many_launches, many_seconds) = (
        profile_host(package, number, num_timed=num_timed, **case) for number in SIZES
    )
    of_layer = (many_launches - few_launches) / (many - few)
    measured = {"launches_per_layer": of_layer, "other_launches": few_launches - few * of_layer}
    if num_timed:
        seconds_of_layer = (many_seconds - few_seconds) / (many - few)
        measured["ms_per_layer"] = 1e3 * seconds_of_layer
        measured["other_ms"] = 1e3 * (few_seconds - few * seconds_of_layer)
    return measured
