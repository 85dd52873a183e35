"""A strict stand-in for flash-attn 2.8 on the CPU, for tests: its functions, their signatures, and their limits.

The folder above it on `sys.path` makes transformers and this package find "flash-attn 2.8.3". See `strict.py`.
"""

from .flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__version__ = "2.8.3"
__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
