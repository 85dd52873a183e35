"""Tests that need what only some of the supported versions have."""

import importlib.util

import pytest
import transformers
import trl
from packaging.version import Version

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
# transformers below 5.20 loads an optimizer of several ranks to "cpu:0", a device that torch does not have
restarts_on_cpus = pytest.mark.skipif(
    Version("5.20") > TRANSFORMERS, reason="transformers below 5.20 loads no optimizer on several CPU ranks"
)


def enable_checkpointing(model, reentrant):
    """transformers' checkpointing, which has another name from 5.20 on."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
