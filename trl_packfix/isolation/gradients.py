"""Gradients without copies of them: products with a few fixed random vectors stand for the gradient of a parameter.

The products are linear in the gradient. So those of documents, micro-batches and ranks may be added, and two gradients
are compared by the products alone (a random projection; Johnson and Lindenstrauss, 1984).
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

NUM_VECTORS = 8
SMALL_SHARE = 1e-3  # of the whole gradient; a parameter with less is compared with this much


def gradient_products(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The products of the gradient of each parameter with `NUM_VECTORS` vectors, (parameters, `NUM_VECTORS`), fp64.

    A parameter without a gradient has zeros. Of a sharded one (`DTensor`) the whole gradient is gathered; all ranks
    must call it.
    """
    found = torch.zeros(len(parameters), NUM_VECTORS, dtype=torch.float64)
    for i, parameter in enumerate(parameters):
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradient = gradient.detach().float().flatten(1) if gradient.dim() > 1 else gradient.detach().float()[None]
        # u^T G v for each pair of vectors: as many numbers as G has rows and columns, not entries
        num_rows, num_columns = gradient.shape
        rows = _random_vectors(num_rows, 2 * i).to(gradient)
        columns = _random_vectors(num_columns, 2 * i + 1).to(gradient)
        found[i] = ((gradient @ columns) * rows).sum(0, dtype=torch.float64).cpu()
    return found


def _random_vectors(size: int, seed: int) -> Tensor:
    return torch.randn(size, NUM_VECTORS, generator=torch.Generator().manual_seed(seed))


def largest_gap(found: Tensor, wanted: Tensor, *, small: float = SMALL_SHARE) -> float:
    """The largest relative difference of the gradient of a parameter; infinite if one is not finite."""
    return max(relative_gaps(found, wanted, small=small).tolist(), default=0.0)


def relative_gaps(found: Tensor, wanted: Tensor, *, small: float = SMALL_SHARE) -> Tensor:
    """The relative difference of the gradient of each parameter, (parameters,)."""
    size = wanted.norm(dim=1).clamp(min=small * float(wanted.norm())).clamp(min=torch.finfo(torch.float64).tiny)
    return ((found - wanted).norm(dim=1) / size).nan_to_num(nan=inf, posinf=inf)
