"""FlashAttention-3 behind torch's attention operators, on Hopper.

`torch.nn.attention.activate_flash_attention_impl("FA3")` puts FlashAttention-3 in the place of the FlashAttention-2
kernels built into torch. `kernels.CudaKernel` calls the same operators and runs on it as it is. The switch is one per
process, so it is on while a model takes packs only.

FlashAttention-4 is not activated. torch 2.13 does not pass the longest document to its backward, whose grid then has
blocks for T tokens per document; on Hopper its backward has no windows and no deterministic mode. If the user has
activated it, it stays.
"""

from importlib.util import find_spec

import torch
import torch.nn.attention

FA3 = "FA3"
PACKAGE = "flash_attn_interface"  # the module of the package flash-attn-3


def activated_by_user() -> str | None:
    """The implementation that is activated in torch now, such as "FA4"; None for the kernels built into torch."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def fa3_problem() -> str | None:
    """Why FlashAttention-3 cannot be activated in this environment; None if it can, as far as is known without it."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot activate it"
    if find_spec(PACKAGE) is None:
        return "flash-attn-3 is not installed"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        return f"it needs compute capability 9.0 and the GPU has {'.'.join(map(str, capability))}"
    return None


def activate() -> None:
    """Activate FlashAttention-3. Raises ImportError, OSError or RuntimeError if the installed package does not work."""
    torch.nn.attention.activate_flash_attention_impl(FA3)


def deactivate() -> None:
    """Go back to the kernels built into torch, if FlashAttention-3 is active."""
    if activated_by_user() == FA3:
        torch.nn.attention.restore_flash_attention_impl()
