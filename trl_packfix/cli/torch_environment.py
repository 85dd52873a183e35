"""Prepare the environment of torch for a process that trains, and ask torch what this machine's CPU can do."""

import os

# Variables that torchrun, accelerate, deepspeed and the launchers of MPI set
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
# Variables with the settings of torch's memory allocator
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_torch_environment() -> None:
    """Set the variables. Call this function before torch is imported.

    Settings of the user stay, except that a process without a launcher sees only the first of its GPUs, because TRL
    would spread a model that is given by name over all of them. The memory allocator grows its segments, because
    micro-batches of different lengths would leave gaps in fixed segments. The OpenMP threads of the CPU sleep while
    they wait, because beside other work they would spend most of their time spinning.
    """
    if not any(name in os.environ for name in LAUNCHER_VARIABLES):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def cpu_computes_bf16() -> bool | None:
    """Return whether the CPU computes bf16 and does not emulate it; None if this version of torch cannot tell."""
    import torch

    # Older versions of torch lack this function
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if not capabilities:
        return None
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
