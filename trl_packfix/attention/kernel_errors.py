"""Errors of attention kernels, and functions that distinguish them from errors of a device or of communication.

Libraries raise all of them as RuntimeError, so that only their texts differ.
"""

import re

import torch
import torch.distributed as dist

# The texts of errors of a device, and of communication between ranks
DEVICE_ERROR = re.compile(
    r"out of memory|\b(CUDA|HIP) (driver |runtime )?error|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS|MIOPEN)_STATUS"
    r"|device-side assert|illegal memory access|can't allocate memory|\b(NCCL|RCCL|HCCL)\b|ProcessGroup|\[.*gloo/"
)
# The texts by which flash-attn and torch refuse to compute something ("FlashAttention only supports Ampere GPUs ...")
KERNEL_REFUSAL = re.compile(
    r"flash[ _-]?att(ention|n)|No available kernel|Deterministic backward not supported", re.IGNORECASE
)
NO_DRIVER = "0 active drivers"  # Triton's text if there is no GPU


class KernelError(ValueError):
    """Raised if an attention kernel cannot compute a call, because of its heads, dtype, device or options.

    It says that the kernel does not support the call, and not that documents of a packed row change each other.

    Attributes:
        kernel: the name of the attention implementation, if a part of the model that reads no text, such as a vision
            tower, raised the error; None for the part that reads text.
    """

    kernel: str | None = None


class OwnAttentionError(KernelError):
    """Raised if a model needs its own attention, because the kernels of this package would compute something else.

    Attributes:
        cause: the first part of the message, without the remedy.
    """

    def __init__(self, cause: str, remedy: str):
        super().__init__(f"{cause}. {remedy}")
        self.cause = cause


def is_device_error(error: Exception) -> bool:
    """Return whether the device or the communication failed, for instance by full memory, and not the model."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)) is not None


def raise_refusal(error: Exception) -> None:
    """Raise `KernelError` if `error` is the refusal of a kernel; return for every other error."""
    if not isinstance(error, RuntimeError) or is_device_error(error):
        return
    if NO_DRIVER in str(error):
        raise KernelError(  # Liger's kernels are written in Triton, too
            f"A kernel in Triton ran without a GPU ({error}). transformers uses flash-linear-attention and mamba_ssm "
            "wherever they are installed, also on a CPU. Uninstall `flash-linear-attention` and `mamba_ssm` here (the "
            "model then runs on torch), set `use_liger_kernel=False`, or train on a GPU."
        ) from error
    if KERNEL_REFUSAL.search(str(error)):
        raise KernelError(str(error)) from error
