"""Every version branch: why it is there, a link, and when it can go. (That of Python's fork is `threads.py`.)"""

from typing import Any

import trl
from accelerate.utils import DistributedType
from datasets import IterableDataset
from datasets.iterable_dataset import BufferShuffledExamplesIterable
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

TRL_FLOOR = "1.16.0"
# What accelerate wraps in DistributedDataParallel
DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)


def require_trl(installed: str = trl.__version__) -> None:
    """Refuse a TRL whose trainer the overrides were not written against.

    TRL 1.16 builds a `labels` column in `_prepare_dataset` and scores through its fused LM head; the trainer stands on
    both. Can go when `pyproject.toml` alone is enough (an environment can be changed after installation).
    """
    if Version(installed) < Version(TRL_FLOOR):
        raise ImportError(
            f"trl {installed} is installed. trl_packfix builds on the dataset preparation and the loss of "
            f"trl {TRL_FLOOR}, which earlier versions do not have. Run `pip install 'trl>={TRL_FLOOR}'`."
        )


def gather_lm_head_with_model(model: PreTrainedModel) -> None:
    """Tell DeepSpeed ZeRO-3 that this transformers model reads the weights of its LM head itself, in TRL's fused loss.

    DeepSpeed finds that out at the first fused forward, but not if forwards that call the head came before, as the
    probe's do: it then fetches the head ahead of its call, TRL gathers it meanwhile, and DeepSpeed 0.19 stops with
    "Cannot partition a param in flight". Can go when TRL's `maybe_gather_lm_head_ctx` waits for such parameters.
    https://deepspeed.readthedocs.io/en/latest/zero3.html#registering-external-parameters
    """
    head = model.get_output_embeddings()
    if head is None or not is_deepspeed_zero3_enabled():
        return
    import deepspeed

    for parameter in head.parameters(recurse=False):
        deepspeed.zero.register_external_parameter(model, parameter)


def state_is_exact(dataset: IterableDataset) -> bool:
    """Whether `state_dict()` of a stream says all that a restart needs.

    It does not hold the contents of shuffle buffers, and a batched map over Arrow tables may skip a batch; datasets has
    no public question for either. Can go when datasets saves the buffers.
    https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration
    """
    if dataset._formatting is not None and dataset._formatting.is_table:
        return False
    sources = [dataset._ex_iterable]
    while sources:
        source = sources.pop()
        if isinstance(source, BufferShuffledExamplesIterable):
            return False
        sources += getattr(source, "ex_iterables", [])
        sources += [source.ex_iterable] if hasattr(source, "ex_iterable") else []
    return True


def forget_evaluation(accelerator: Any, model: nn.Module) -> bool:
    """Let accelerate wrap a `model` for DDP that it has prepared for an evaluation; whether it had.

    accelerate marks what it has prepared and never prepares it again, so ranks that evaluate a model first would train
    it without DDP, each for itself. Engines prepare a model for both at once. Can go when accelerate prepares a model
    for training that it has prepared with `evaluation_mode=True`; see docs/upstream.md.
    """
    is_marked = "_is_accelerate_prepared" in vars(model)
    if accelerator.distributed_type not in DDP or not is_marked:
        return False
    del model._is_accelerate_prepared
    if "_original_forward" in vars(model):  # autocast is put around it again
        model.forward = vars(model).pop("_original_forward")
    return True
