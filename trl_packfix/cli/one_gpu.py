"""One process trains on one GPU: TRL would spread a model given by name over all that are visible."""

import os

# Set by torchrun, accelerate, deepspeed, and by MPI's launchers
LAUNCHED = ("LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def show_one_gpu() -> None:
    """Hide all GPUs but the first from a process that no launcher started. Call it before torch is imported."""
    if not any(name in os.environ for name in LAUNCHED):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
