"""Which kinds of parallelism packing runs under, and when their ranks wait for each other."""

from typing import Any

from accelerate.utils import DistributedType
from torch import nn

from .balancing import Synchronisation

WAITS_ONCE_PER_STEP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)


def synchronisation(accelerator: Any) -> Synchronisation:
    """When ranks wait for each other: "step" under DDP and ZeRO-1, "micro" under everything else.

    ZeRO-2 reduces gradients in every backward, ZeRO-3 and FSDP gather parameters in every forward. (TRL's own loss
    gathers metrics in every micro-batch, whatever the engine; `objective` does so once per log.)
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "step" if accelerator.deepspeed_plugin.zero_stage < 2 else "micro"
    return "step" if accelerator.distributed_type in WAITS_ONCE_PER_STEP else "micro"


def check_parallelism(accelerator: Any) -> None:
    """Refuse tensor, context, sequence and pipeline parallelism: the data-parallel rank is not the process index there.

    They are asked for in accelerate's `ParallelismConfig` or in DeepSpeed's config.

    Raises:
        ValueError: a size above 1.
    """
    sizes: dict[str, int] = {}
    if accelerator.parallelism_config is not None:
        sizes |= {name: getattr(accelerator.parallelism_config, name) for name in ("tp_size", "cp_size", "sp_size")}
    plugin = accelerator.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    if plugin is not None:
        config = plugin.deepspeed_config
        tensor = config.get("tensor_parallel", {})
        sizes["tensor_parallel.autotp_size"] = tensor.get("autotp_size", 1)
        sizes["tensor_parallel.tp.tp_size"] = (tensor.get("tp") or tensor.get("tensor_parallel") or {}).get(
            "tp_size", 1
        )
        sizes["sequence_parallel_size"] = config.get("sequence_parallel_size", 1)
    for name, size in sizes.items():
        if isinstance(size, int) and size > 1:
            raise ValueError(
                f"`{name}={size}` was given with packing. Packed batches under this kind of parallelism are not proved "
                f"to keep documents apart. Set `{name}=1` (data parallelism, ZeRO and FSDP are supported), or set "
                "`packing=False`."
            )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ValueError(
            "Megatron-LM was chosen as the engine with packing. It shares one document among ranks and reads data by "
            "its own loader. Use DDP, DeepSpeed or FSDP, or set `packing=False`."
        )


def forget_evaluation(accelerator: Any, model: nn.Module) -> bool:
    """Let accelerate wrap a `model` for DDP that it has prepared for an evaluation; whether it had.

    accelerate marks what it has prepared and leaves it as it is from then on, so that ranks would train a model that
    was evaluated first without DDP, each for itself (docs/upstream.md). Engines prepare a model for both at once.
    """
    is_marked = "_is_accelerate_prepared" in vars(model)
    if accelerator.distributed_type not in WAITS_ONCE_PER_STEP or not is_marked:
        return False
    del model._is_accelerate_prepared
    if "_original_forward" in vars(model):  # autocast is put around it again
        model.forward = vars(model).pop("_original_forward")
    return True


def check_one_device(model: nn.Module) -> None:
    """Refuse a model that `device_map` has split over several devices, as "auto" does with all GPUs that are visible.

    TRL sets "auto" for a model given by name in a single process.

    Raises:
        ValueError: more than one device, modules that are offloaded to "cpu" or "disk" not counted: they run elsewhere.
    """
    parts = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in parts.values()} - {"cpu", "disk"})
    if len(devices) > 1:
        raise ValueError(
            f"The model is split over {len(devices)} devices ({', '.join(devices)}) by its `device_map`, and packing "
            "is on. The boundaries of a pack lie on one device, and modules on the others would not find them there. "
            "Launch one process per GPU (`accelerate launch` or `torchrun`), or make one GPU visible with "
            "`CUDA_VISIBLE_DEVICES`, or set `packing=False`."
        )
