"""Compute in fp64 throughout, so that an error of an algorithm can be told from rounding."""

from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def in_double():
    """Within this context every request for fp32, such as those of norms and losses, is one for fp64."""
    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
