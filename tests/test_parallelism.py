"""Which parallelism packing refuses, and when ranks wait for each other."""

import importlib.util
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedType

from trl_packfix.parallelism import check_parallelism, synchronisation

needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


def accelerator(kind: DistributedType = DistributedType.NO, parallelism=None, **deepspeed):
    """What the rules look at; engines of many ranks, as they are, are in `test_distributed.py`."""
    plugin = None
    if deepspeed:
        kind = DistributedType.DEEPSPEED
        plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, **deepspeed})
    return SimpleNamespace(distributed_type=kind, parallelism_config=parallelism, deepspeed_plugin=plugin)


def stage(number: int) -> dict:
    return {"zero_optimization": {"stage": number}}


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_a_parallelism_config_is_refused(name):
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1} | {name: 2}
    with pytest.raises(ValueError, match=f"`{name}=2` was given with packing.*not proved.*Set `{name}=1`"):
        check_parallelism(accelerator(parallelism=SimpleNamespace(**sizes)))
    check_parallelism(accelerator(parallelism=ParallelismConfig(dp_shard_size=2)))


@needs_deepspeed
@pytest.mark.parametrize(
    "section, name",
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    ],
)
def test_tensor_and_sequence_parallelism_of_deepspeed_are_refused(section, name):
    with pytest.raises(ValueError, match=f"`{name}=2` was given with packing.*not proved.*Set `{name}=1`"):
        check_parallelism(accelerator(**stage(2), **section))
    check_parallelism(accelerator(**stage(2)))


def test_megatron_is_refused_and_one_process_is_not():
    with pytest.raises(ValueError, match="Megatron-LM was chosen.*Use DDP"):
        check_parallelism(accelerator(DistributedType.MEGATRON_LM))
    check_parallelism(Accelerator(cpu=True))


@needs_deepspeed
@pytest.mark.parametrize("number, expected", [(0, "step"), (1, "step"), (2, "micro"), (3, "micro")])
def test_zero_waits_in_every_micro_batch_from_stage_2(number, expected):
    assert synchronisation(accelerator(**stage(number))) == expected


@pytest.mark.parametrize(
    "kind, expected",
    [
        (DistributedType.MULTI_GPU, "step"),
        (DistributedType.MULTI_CPU, "step"),
        (DistributedType.FSDP, "micro"),
        (DistributedType.NO, "micro"),
    ],
)
def test_ddp_waits_once_per_step_unless_metrics_are_gathered(kind, expected):
    assert synchronisation(accelerator(kind)) == expected
