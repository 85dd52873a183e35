"""Count the FLOPs of training on documents, and look up the peak of the GPU, for MFU in the log.

Model FLOPs utilization (MFU, arXiv 2204.02311, appendix B) is the FLOPs per second of the model over the peak of the
GPU. It counts the FLOPs of a forward, and twice as many for a backward. It does not count padding, nor what
checkpointing computes again. The FLOPs of a document do not depend on its pack. A tool that takes a pack for one
sequence would also count pairs of tokens of different documents, which are never computed. `objective.py` calls these
functions for the log.
"""

import re
from typing import Any

import torch
from torch import nn

from ..planning.costs import CostModel

# Dense TFLOP/s in bfloat16 with sums in float32, by a pattern of the name that CUDA gives to the GPU. A name that no
# pattern matches (a GPU of a laptop, a MIG slice) has no peak here. Names of GH200, A100 and A800 end with a size or
# form, so their patterns accept any end without "MIG". The numbers are from NVIDIA's data sheets and architecture
# whitepapers. Many sheets give the rate with sparsity, which is twice as high. From other pages: B300 and GB300
# (glennklockwood.com/garden/processors/B300, verda.com/blog/gb300-nvl72-architecture), RTX A6000 (Microway's table, as
# llmperf.net cites it), RTX PRO 6000 (hmc-tech.com). RTX 5090: nanochat's table and zeroband's tests, after NVIDIA's
# whitepaper on RTX Blackwell. RTX 6000 Ada has no entry, because other tables have 181 and 364, and no page of NVIDIA's
# was found. Its users set the field `peak_tflops` of the config.
PEAK_TFLOPS = (
    (r"NVIDIA GB300", 2500.0),
    (r"NVIDIA B300( SXM6 AC)?", 2250.0),
    (r"NVIDIA GB200", 2500.0),
    (r"NVIDIA B200", 2250.0),
    (r"NVIDIA GH200\b(?!.*MIG).*", 989.4),
    (r"NVIDIA (H200|H100|H800) NVL", 835.5),
    (r"NVIDIA (H100|H800) PCIe", 756.0),
    (r"NVIDIA (H200|H100( \d+GB HBM\w*)?|H800( \d+GB HBM\w*)?)", 989.4),
    (r"NVIDIA H20", 148.0),
    (r"NVIDIA (A100|A800)[- ](?!.*MIG).*", 312.0),
    (r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
    (r"NVIDIA RTX A6000", 154.8),
    (r"NVIDIA A40", 149.7),
    (r"NVIDIA A30", 165.0),
    (r"NVIDIA A10", 125.0),
    (r"NVIDIA A10G", 70.0),
    (r"NVIDIA L40S", 362.0),
    (r"NVIDIA L40", 181.0),
    (r"NVIDIA L4", 121.0),
    (r"NVIDIA GeForce RTX 5090", 209.5),
    (r"NVIDIA GeForce RTX 4090", 165.2),
    (r"NVIDIA GeForce RTX 3090", 71.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense TFLOP/s in bfloat16 of a GPU by its name in CUDA; None if it is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (989.4, None)
    """
    return next((peak for pattern, peak in PEAK_TFLOPS if re.fullmatch(pattern, device_name)), None)


def own_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense TFLOP/s of the GPU of this process; None if it is not known, or the dtype has not 16 bits."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_tflops(torch.cuda.get_device_name(device))


def training_flops(costs: CostModel, lengths: Any, trained_share: float) -> Any:
    """Return the FLOPs of forward and backward of each document.

    A backward costs two forwards: one for the gradients of activations, and one for the gradients of weights. The
    second is not computed for a weight that is not trained.

    Args:
        costs: computes the FLOPs of a forward from lengths.
        lengths: the tokens of each document, float64, (N,).
        trained_share: the share of the weights that are trained.
    """
    weight_flops = costs.per_token * lengths  # a forward through all weights, without attention
    return 3 * costs(lengths) - (1 - trained_share) * weight_flops


def trained_share(model: nn.Module, without: nn.Module | None = None) -> float:
    """Return the share of the weights of a model that are trained.

    Args:
        model: the model. ZeRO-3 may have divided its weights.
        without: a module of the model whose weights do not count, or None.
    """
    skipped = set() if without is None else set(without.parameters())
    num_weights = 0
    num_trained = 0
    for parameter in model.parameters():
        if parameter not in skipped:
            size = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 keeps the size before the division
            num_weights += size
            num_trained += size if parameter.requires_grad else 0
    return num_trained / max(num_weights, 1)
