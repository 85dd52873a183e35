"""FLOPs of training on documents, and the peak of the card, of which they are a share (MFU).

Counted are those of the model: forward, and backward as twice the forward. What checkpointing computes again does not
count, nor does padding (arXiv 2204.02311, appendix B). A document costs what it costs alone. A tool that takes a pack
for one sequence counts pairs of tokens of different documents, which are never computed.
"""

import re
from typing import Any

import torch
from torch import nn

from ..planning.costs import CostModel

# Dense TFLOP/s in bfloat16 with sums in float32, by the name that CUDA gives: NVIDIA's data sheets and architecture
# whitepapers. Many sheets give the rate with sparsity, which is twice this one. A name that fits none (a laptop's, a
# MIG slice) has no peak. From other pages: B300 and GB300 (glennklockwood.com/garden/processors/B300,
# verda.com/blog/gb300-nvl72-architecture), RTX A6000 (Microway's table, by llmperf.net), RTX PRO 6000 (hmc-tech.com).
# RTX 5090: nanochat's table and zeroband's tests, after NVIDIA's whitepaper on RTX Blackwell. For RTX 6000 Ada other
# tables have 181 and 364, and no page of NVIDIA's was found: set `peak_tflops`.
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
    """Dense TFLOP/s of a card in bfloat16, by its name in CUDA; None if it is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (989.4, None)
    """
    return next((peak for name, peak in PEAK_TFLOPS if re.fullmatch(name, device_name)), None)


def own_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The same for the card of this process; None for other devices and for dtypes with another peak."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_tflops(torch.cuda.get_device_name(device))


def training_flops(costs: CostModel, lengths: Any, trained_share: float) -> Any:
    """FLOPs of forward and backward by document, of float64 lengths; weights without gradients cost a third less."""
    return 3 * costs(lengths) - (1 - trained_share) * costs.per_token * lengths


def trained_share(model: nn.Module, without: nn.Module | None = None) -> float:
    """Share of the weights that are trained, also where ZeRO-3 has divided them; `without` the vision tower."""
    skipped = set() if without is None else set(without.parameters())
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters() if p not in skipped]
    return sum(size for size, is_trained in sizes if is_trained) / max(sum(size for size, _ in sizes), 1)
