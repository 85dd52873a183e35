"""Helpers of tests and benchmarks: tiny models, runs, comparisons, launches. No network, one thread.

Imported before torch, transformers, datasets and loggers, which read the environment once, and before `sweep`, the tool
in `tools/` whose tiny models of all types and comparisons the tests share.
"""

import importlib.metadata
import os
import sys
from functools import cache

from .paths import ROOT

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    TRACKIO_DISABLED="1",
)
sys.path.append(str(ROOT / "tools"))
# Tiny matrices: threads that wait for each other make the suite many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# accelerate reads the files of packages each time that it unwraps a model: a tenth of a training in tests.
importlib.metadata.metadata = cache(importlib.metadata.metadata)
importlib.metadata.version = cache(importlib.metadata.version)

from trl_packfix.cli.torch_environment import set_torch_environment

set_torch_environment()  # with several GPUs the Trainer would wrap the model in DataParallel, which TRL refuses
