"""Tests that need what only some of the supported versions have."""

import importlib.metadata
import importlib.util

import datasets
import pytest
import torch
import transformers
import trl
from packaging.version import Version

from trl_packfix import compat

TRL = Version(trl.__version__)
TRANSFORMERS = Version(transformers.__version__)

# What our loss is compared with to the bit. Before, TRL computes it in another way (`training/lm_head.py`).
scores_tokens = pytest.mark.skipif(Version("1.16") > TRL, reason="TRL has its fused LM head on every device from 1.16")
# TRL's own training, which some tests compare with
trl_trains = pytest.mark.skipif(
    Version("1.15") <= TRL < Version("1.16") and not importlib.util.find_spec("triton"),
    reason="the fused LM head of TRL 1.15 needs Triton",
)
evaluates_own_losses = pytest.mark.skipif(
    Version("1.15") > TRL, reason="the default loss of TRL below 1.15 cannot be combined with a loss of the user"
)
# Architectures and their masks as in the versions of constraints.txt
current_models = pytest.mark.skipif(
    Version("5.20") > TRANSFORMERS, reason="transformers below 5.20 lacks this model type, or builds it differently"
)
newest_models = pytest.mark.skipif(Version("5.24") > TRANSFORMERS, reason="this model type came with transformers 5.24")
# "Output 0 of Split is a view and is being modified inplace", in DeepSpeed's gather of the weights after a step
SHARDS_GRADIENTS_ON_CPUS = not importlib.util.find_spec("deepspeed") or Version("0.19") <= Version(
    importlib.metadata.version("deepspeed")
)
# Launches of our command, in which `run_deepspeed_on_cpus` is not called
gathers_on_cpus = pytest.mark.skipif(
    bool(importlib.util.find_spec("deepspeed")) and not compat.gathers_on_cpus(),
    reason="DeepSpeed below 0.19.8 does not wait for gathered parameters on CPUs",
)
continues_streams = pytest.mark.skipif(
    Version("5.1") > Version(datasets.__version__), reason="datasets below 5.1 loses rows in a restart of a stream"
)
# Images of gemma3 in a pack
GEMMA3_LEAKS = Version("5.20") <= TRANSFORMERS
gemma3_leaks = pytest.mark.skipif(not GEMMA3_LEAKS, reason="transformers 5.16 and 5.17 keep the images of gemma3 apart")
sanitises_control_tokens = pytest.mark.skipif(
    not compat.sanitises_control_tokens(), reason="this transformers cannot keep control tokens in texts as text"
)
# In packs of stock TRL, Falcon and the images of PaliGemma are isolated there, and Inkling 2 needs no repair here
IS_5_24 = Version("5.24") <= TRANSFORMERS
# transformers' hook on the embedded tokens, under checkpointing of frozen or trained models
compiles_inputs = pytest.mark.skipif(
    Version("2.11") > Version(torch.__version__), reason="torch 2.10 cannot compile `requires_grad_` of a layer's input"
)
# What is kept for backward can be chosen there
selects_checkpoints = pytest.mark.skipif(
    Version("5.20") > TRANSFORMERS, reason="transformers below 5.20 has no selective activation checkpointing"
)


def load_on_cpu_ranks():
    """Let torch load to "cpu:0", to which transformers below 5.20 loads the optimizer of several CPU ranks."""
    on_cpu = lambda storage, location: storage.cpu() if location.startswith("cpu:") else None  # noqa: E731
    torch.serialization.register_package(100, lambda storage: None, on_cpu)


def run_deepspeed_on_cpus():
    """Let DeepSpeed run on CPUs without its shared-memory all-reduce, which is compiled for minutes; gloo has one, too.

    And let it wait, below 0.19.8, for every gather of ZeRO-3, which the trainer refuses on CPUs otherwise.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if compat.gathers_on_cpus():
        return
    gather = deepspeed.comm.all_gather_into_tensor

    def waiting(*args, **settings):
        handle = gather(*args, **settings)
        if handle is not None:
            handle.wait()
        return handle

    deepspeed.comm.all_gather_into_tensor = waiting
    compat.gathers_on_cpus = lambda: True


def enable_checkpointing(model, reentrant):
    """Enable transformers' checkpointing, which has another name from 5.20 on."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


def is_checkpointing(model):
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next(getattr(model, name) for name in names if hasattr(type(model), name))
