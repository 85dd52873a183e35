"""A strict stand-in for flash-linear-attention 0.6 on the CPU, for tests. See `strict.py` in the folder above."""

__version__ = "0.6.0"
