"""Which parallelism packing refuses, and when ranks wait for each other."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from trl_packfix import SFTConfig, SFTTrainer, compat
from trl_packfix.training.checks import synchronisation
from trl_packfix.training.choices import RunSettings
from trl_packfix.training.conflicts import refuse_conflicts

needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


def accelerator(kind: DistributedType = DistributedType.NO, parallelism=None, **deepspeed):
    """Return what the rules look at; engines of many ranks, as they are, are in `test_distributed.py`."""
    plugin = None
    if deepspeed:
        kind = DistributedType.DEEPSPEED
        plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, **deepspeed})
    return SimpleNamespace(
        distributed_type=kind, parallelism_config=parallelism, deepspeed_plugin=plugin, state=SimpleNamespace()
    )


def stage(number: int) -> dict:
    return {"zero_optimization": {"stage": number}}


ARGS = SFTConfig(packing=True, use_cpu=True, bf16=False)


def check(engine) -> None:
    refuse_conflicts(RunSettings(args=ARGS, accelerator=engine))


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_context_parallelism_is_refused_and_the_way_out_named(name, monkeypatch):
    message = f"`{name}=2` was given with packing.*across their boundaries.*Set its size to 1 and `tokens_per_rank`"
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1} | {name: 2}
    with pytest.raises(ValueError, match=message):
        check(accelerator(parallelism=SimpleNamespace(**sizes)))
    check(accelerator(parallelism=ParallelismConfig(dp_shard_size=2, tp_size=2)))
    # Before the accelerator exists: TRL would refuse the first without naming the way out
    with pytest.raises(ValueError, match=message):
        refuse_conflicts(
            RunSettings(
                args=SFTConfig(packing=True, use_cpu=True, bf16=False, parallelism_config=SimpleNamespace(**sizes))
            )
        )
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")
    with pytest.raises(ValueError, match=message):
        refuse_conflicts(RunSettings(args=ARGS))


def test_a_model_that_a_run_had_divided_is_not_divided(tiny_model):
    model = tiny_model("llama")
    model.config.distributed_config = SimpleNamespace(tp_size=1, dp_size=1, pp_size=2)  # it was saved with it
    refuse_conflicts(RunSettings(args=ARGS, model=model, accelerator=Accelerator(cpu=True)))


@needs_deepspeed
@pytest.mark.parametrize(
    "section, name, message",
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "DistributedConfig"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size", "DistributedConfig"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size", "tokens_per_rank"),
    ],
)
def test_tensor_and_sequence_parallelism_of_deepspeed_are_refused(section, name, message):
    with pytest.raises(ValueError, match=f"`{name}=2` was given with packing.*Set its size to 1 .*{message}"):
        check(accelerator(**stage(2), **section))
    check(accelerator(**stage(2)))


@needs_deepspeed
def test_zero_3_on_cpus_is_refused_where_gathers_are_not_awaited(tmp_path, monkeypatch, tokenizer):
    assert [compat.gathers_on_cpus(version) for version in ("0.18.9", "0.19.7", "0.19.8")] == [False, False, True]
    monkeypatch.setattr(compat, "gathers_on_cpus", lambda: False)
    config = HfDeepSpeedConfig(stage(3))  # what `is_deepspeed_zero3_enabled` reads
    with pytest.raises(ValueError, match=r"ZeRO-3 on 2 CPU ranks was given with deepspeed 0.*deepspeed>=0\.19\.8"):
        compat.require_gathers(2, "cpu")
    compat.require_gathers(1, "cpu")  # nothing is gathered
    compat.require_gathers(2, "cuda")
    args = SFTConfig(str(tmp_path), packing=False, max_length=16, use_cpu=True, bf16=False, report_to=[])
    monkeypatch.setattr(SFTConfig, "world_size", 2)
    with pytest.raises(ValueError, match="ZeRO-3 on 2 CPU ranks"):  # before the model is looked for
        SFTTrainer("no such model", args, train_dataset=Dataset.from_dict({"input_ids": [[5, 6]]}))
    monkeypatch.setattr(compat, "gathers_on_cpus", lambda: True)
    compat.require_gathers(2, "cpu")
    del config
    assert not is_deepspeed_zero3_enabled()


@pytest.mark.parametrize("second", [1, "cuda:1", torch.device("cuda:1"), 0, "cpu", None])
def test_a_model_on_several_devices_is_refused(second, tiny_model):
    model = tiny_model("llama")
    model.hf_device_map = None if second is None else {"model.embed_tokens": 0, "model.layers": 0, "lm_head": second}
    message = r"(?i)a `device_map` with 2 devices.*boundaries of a pack are on one device.*Launch one process per GPU"
    for base_model in (model, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
        with nullcontext() if second in (0, "cpu", None) else pytest.raises(ValueError, match=message):
            refuse_conflicts(RunSettings(args=ARGS, model=base_model))


WAITS = {
    "ZeRO-1": (lambda: accelerator(**stage(1)), "step"),
    "ZeRO-2": (lambda: accelerator(**stage(2)), "micro"),
    "ZeRO-3": (lambda: accelerator(**stage(3)), "micro"),
    "DDP": (lambda: accelerator(DistributedType.MULTI_GPU), "step"),
    "DDP on CPUs": (lambda: accelerator(DistributedType.MULTI_CPU), "step"),
    "FSDP": (lambda: accelerator(DistributedType.FSDP), "micro"),
    "one process": (lambda: accelerator(DistributedType.NO), "micro"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_deepspeed] * ("ZeRO" in name)) for name in WAITS])
def test_engines_wait_once_per_step_unless_they_meet_in_every_micro_batch(name):
    engine, expected = WAITS[name]
    assert synchronisation(engine(), nn.Identity()) == expected
