"""A strict stand-in for mamba_ssm 2.3 on the CPU, for tests. See `strict.py` in the folder above."""

__version__ = "2.3.2"
