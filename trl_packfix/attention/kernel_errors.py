"""Errors of attention kernels, and how they are told from those of a model, of a device and of communication."""

import re

import torch
import torch.distributed as dist

# Texts of errors of a device and of communication, which libraries also raise as plain RuntimeError
DEVICE_ERROR = re.compile(
    r"out of memory|\b(CUDA|HIP) (driver |runtime )?error|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS|MIOPEN)_STATUS"
    r"|device-side assert|illegal memory access|can't allocate memory|\b(NCCL|RCCL|HCCL)\b|ProcessGroup|\[.*gloo/"
)
# How flash-attn and torch say that a kernel cannot compute something ("FlashAttention only supports Ampere GPUs ...")
KERNEL_REFUSAL = re.compile(
    r"flash[ _-]?att(ention|n)|No available kernel|Deterministic backward not supported", re.IGNORECASE
)
NO_DRIVER = "0 active drivers"  # how Triton says that there is no GPU


class KernelError(ValueError):
    """An attention kernel cannot compute this: heads, dtype, device or a feature. It says nothing about isolation."""


class OwnAttentionError(KernelError):
    """The model needs its own attention: the kernels of this package would compute something else.

    Attributes:
        cause: why, without the remedy of the message.
    """

    def __init__(self, cause: str, remedy: str):
        super().__init__(f"{cause}. {remedy}")
        self.cause = cause


def is_device_error(error: Exception) -> bool:
    """Whether the device or communication failed, as with a full memory. It says nothing about the model."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)) is not None


def raise_refusal(error: Exception) -> None:
    """Raise `KernelError` for what a kernel says that it cannot compute; nothing for every other error."""
    if not isinstance(error, RuntimeError) or is_device_error(error):
        return
    if NO_DRIVER in str(error):
        raise KernelError(
            f"A kernel in Triton ran without a GPU ({error}). transformers uses flash-linear-attention and mamba_ssm "
            "wherever they are installed, also on a CPU. Uninstall `flash-linear-attention` and `mamba_ssm` here (the "
            "model then runs on torch), or train on a GPU."
        ) from error
    if KERNEL_REFUSAL.search(str(error)):
        raise KernelError(str(error)) from error
