"""What torch reads of the environment when it is imported, for a process that trains."""

import os

# Set by torchrun, accelerate, deepspeed, and by MPI's launchers
LAUNCHED = ("LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_torch_environment() -> None:
    """Call it before torch is imported. What the user set stays.

    A process that no launcher started sees the first GPU only: TRL would spread a model given by name over all that are
    visible. The allocator grows its segments: micro-batches of other lengths would leave gaps in fixed ones. OpenMP's
    threads on the CPU sleep while they wait: beside other work they would spin for most of the time that they take.
    """
    if not any(name in os.environ for name in LAUNCHED):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
