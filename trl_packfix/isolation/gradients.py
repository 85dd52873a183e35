"""Compare gradients without copies of them: products with fixed random vectors stand for a parameter's gradient.

The products are linear in the gradient. So the products of documents, micro-batches and ranks may be added, and two
gradients are compared by their products alone (a random projection; Johnson and Lindenstrauss, 1984). `check_step.py`
and the comparison before the first step (`training/first_step.py`) use them.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

NUM_VECTORS = 8  # random vectors, and products, of a parameter
# The difference of a parameter's gradient is relative to its norm, or to this share of the norm of the whole gradient
# if that is larger
SMALL_SHARE = 1e-3


def gradient_products(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the products of each parameter's gradient with random vectors, (parameters, NUM_VECTORS), in fp64.

    A parameter without a gradient has zeros. If a parameter is sharded (`DTensor`), its whole gradient is gathered, so
    all ranks must call this function.
    """
    products = torch.zeros(len(parameters), NUM_VECTORS, dtype=torch.float64)
    for i, parameter in enumerate(parameters):
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradient = gradient.detach().float()
        gradient = gradient.flatten(1) if gradient.dim() > 1 else gradient[None]  # a matrix G, (rows, columns)
        # Each product is u^T G v with two random vectors: u has a number per row of G, and v a number per column.
        num_rows, num_columns = gradient.shape
        rows = _random_vectors(num_rows, 2 * i).to(gradient)
        columns = _random_vectors(num_columns, 2 * i + 1).to(gradient)
        products[i] = ((gradient @ columns) * rows).sum(0, dtype=torch.float64).cpu()
    return products


def _random_vectors(size: int, seed: int) -> Tensor:
    """Return random vectors of `size` numbers, (size, NUM_VECTORS), the same for the same seed."""
    return torch.randn(size, NUM_VECTORS, generator=torch.Generator().manual_seed(seed))


def largest_gap(actual: Tensor, expected: Tensor, *, small: float = SMALL_SHARE) -> float:
    """Return the largest relative difference of a parameter's gradient; infinity if one is not finite."""
    return max(relative_gaps(actual, expected, small=small).tolist(), default=0.0)


def relative_gaps(actual: Tensor, expected: Tensor, *, small: float = SMALL_SHARE) -> Tensor:
    """Return the relative difference of each parameter's gradient, (parameters,), from products of two gradients.

    A difference is relative to the size of the expected gradient, which counts as at least the share `small` of the
    whole gradient.
    """
    size = expected.norm(dim=1).clamp(min=small * float(expected.norm())).clamp(min=torch.finfo(torch.float64).tiny)
    return ((actual - expected).norm(dim=1) / size).nan_to_num(nan=inf, posinf=inf)
