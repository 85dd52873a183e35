"""fp64 throughout: what libraries compute in fp32, such as norms, rotary embeddings and losses, is computed in fp64."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def in_float64() -> Iterator[None]:
    """Within this context every request for fp32 is one for fp64, also in recomputed layers."""
    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
