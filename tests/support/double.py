"""Compute in fp64 throughout, so that an error of an algorithm can be told from rounding."""

from contextlib import contextmanager

import torch


@contextmanager
def in_double():
    """Within this context a model in fp64 computes in fp64 what it computes in fp32 otherwise, such as norms."""
    names = [(torch, "float32", torch.float64), (torch.Tensor, "float", torch.Tensor.double)]
    before = [getattr(owner, name) for owner, name, _ in names]
    try:
        for owner, name, value in names:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(names, before, strict=True):
            setattr(owner, name, value)
