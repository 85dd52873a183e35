"""A strict stand-in for causal_conv1d 1.7 on the CPU, for tests. See `strict.py` in the folder above."""

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = "1.7.0"
__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
