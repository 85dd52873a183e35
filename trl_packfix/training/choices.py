"""Conditions that a run may meet: settings, arguments, kinds of datasets, models and engines.

A `Condition` looks at the `RunSettings` of a run. Its `describe` returns how a message names what the user has chosen,
or None if the condition is not met. `conflicts.py` says which of these conditions exclude each other.

A condition on one value is made by a helper (`_field_condition`, `_column_condition`, `_argument_condition`). Any other
condition is a function with the decorator `_make_condition`, which makes a `Condition` of the function. A name such as
`NO_PACKING` is a condition that is met if packing is off. `USER_` are conditions on methods of the user's subclass.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import trl
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from datasets import IterableDataset
from transformers import AutoConfig, PretrainedConfig, ProcessorMixin

from ..attention.choice import dropped_weights
from ..attention.mixer_support import mixer_support
from ..planning.strategies import STRATEGIES, StrategyTraits
from ..samples.checks import IMAGES


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that conditions look at: the config, and the arguments of the trainer as far as they are known.

    None stands for an argument that was not given or is not known yet.
    """

    args: trl.SFTConfig
    model: Any = None  # the model, or its name
    train_dataset: object = None
    columns: Collection[str] = ()  # columns of the training set; () for a stream that does not name its columns
    data_collator: object = None
    compute_loss_func: object = None
    formatting_func: object = None
    processing_class: object = None
    peft_config: Any = None
    accelerator: Accelerator | None = None
    # How a message names methods of the user's subclass that replace methods of this package's trainer
    user_sampler: str | None = None
    user_loss: str | None = None
    user_loader: str | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the training set is an `IterableDataset`."""
        return isinstance(self.train_dataset, IterableDataset)

    @property
    def packs(self) -> bool:
        """Whether training is packed."""
        # The configs of other trainers, to which `pack_forward` is applied, have no such fields
        return getattr(self.args, "packing", False) or getattr(self.args, "padding_free", False)


@dataclass(frozen=True)
class Condition:
    """A condition that a run meets if the user has made a choice.

    Attributes:
        name: how docs/combinations.md names the condition.
        describe: returns how a message names the choice in a run; None if the run does not meet the condition.
        undo: what a user does so that the condition is not met, as the end of a sentence.
    """

    name: str
    describe: Callable[[RunSettings], str | None]
    undo: str


def _make_condition(name: str, undo: str) -> Callable[[Callable[[RunSettings], str | None]], Condition]:
    """Return a decorator that makes a `Condition` of its `describe` function."""
    return lambda describe: Condition(name, describe, undo)


def text_config(model: Any, args: trl.SFTConfig) -> PretrainedConfig:
    """Return the config of the text model.

    Args:
        model: the model, or its name; a config that is loaded by name gets the values of `model_init_kwargs`.
        args: the config of the run.
    """
    if isinstance(model, str):
        init_kwargs: Any = args.model_init_kwargs or {}
        config = AutoConfig.from_pretrained(model, **{"trust_remote_code": args.trust_remote_code} | init_kwargs)
    else:
        config = model.config
    return config.get_text_config()


# Fields of the config


def _field_condition(name: str, off: object = None, on: tuple[object, ...] = ()) -> Condition:
    """Return the condition that a field of the config has one of the values `on`, or any value but `off` without `on`.

    Args:
        name: the field.
        off: the value that a user sets to undo the choice; None to leave the field unset.
        on: the values that meet the condition; () if every value but `off` meets it.
    """
    # As users write it: `name=False`, but `name="text"`
    label = ", ".join(f"`{name}={value}`" if isinstance(value, bool) else f'`{name}="{value}"`' for value in on)
    undo = f"leave `{name}` unset" if off is None else f"set `{name}={off!r}`"

    def describe(settings: RunSettings) -> str | None:
        value = getattr(settings.args, name)
        is_met = value in on if on else value != off
        return f"`{name}={value!r}`" if is_met else None

    return Condition(label or f"`{name}`", describe, undo)


def _strategy_condition(has_trait: Callable[[StrategyTraits], bool]) -> Condition:
    """Return the condition that `packing_strategy` is a strategy for which `has_trait` returns True."""
    names = tuple(name for name, traits in STRATEGIES.items() if has_trait(traits))
    return _field_condition("packing_strategy", "stream", names)


PACKING = Condition("packing", lambda settings: "packing" if settings.packs else None, "set `packing=False`")
NO_PACKING = Condition(
    "`packing=False`", lambda settings: None if settings.packs else "`packing=False`", "set `packing=True`"
)
PACKED_EVALUATION = _field_condition("eval_packing", on=(True,))
TOKENS_PER_RANK = _field_condition("tokens_per_rank")
NO_TOKENS_PER_RANK = Condition(
    "no `tokens_per_rank`",
    lambda settings: None if TOKENS_PER_RANK.describe(settings) else "`tokens_per_rank=None`",
    "set `tokens_per_rank`",
)
EXCHANGE_SPEEDS = _field_condition("exchange_speeds")
SHARED_IN_PACKS = _field_condition("share_prefixes", "off", ("pack",))
SHARED_IN_FAMILIES = _field_condition("share_prefixes", "off", ("family",))
PER_TURN = _field_condition("per_turn", False)
SMOOTHING = _field_condition("label_smoothing_factor", 0.0)
NOISE = _field_condition("neftune_noise_alpha")
CONSTANT_SHAPES = _field_condition("pad_documents_to_multiple_of")
DOCUMENT_WEIGHTING = _field_condition("document_weighting", "token")
WEIGHT_COLUMN = _field_condition("weight_column")
SOURCE_COLUMN = _field_condition("source_column")
OVERLONG = _field_condition("overlong")
KEEP_END = _field_condition("truncation_mode", "keep_start", ("keep_end",))
# `enforce_flash_attention=False` keeps the attention that the model has
ATTENTION_OF_MODEL = _field_condition("enforce_flash_attention", True, (False,))
BATCH_SIZE = replace(_field_condition("per_device_train_batch_size", 1), name="`per_device_train_batch_size` above 1")
SAMPLING = _field_condition("train_sampling_strategy", "random", ("group_by_length", "batch_rebalance"))
NOT_OF_STREAMS = _strategy_condition(lambda traits: not traits.packs_streams)
# "wrapped", which joins all documents and cuts them into blocks of `max_length` tokens
CUT_BLOCKS = _strategy_condition(lambda traits: traits.cuts_blocks)
# Strategies that limit packs by `max_length` or by the batch size, and not by `tokens_per_rank`. The public function
# `plan_packs` refuses the same strategies, because they need more than the lengths of documents. `alternative` says
# what a user does in place of calling it, and is None for the strategies that it takes
NOT_PLANNED_BY_TOKENS = _strategy_condition(lambda traits: traits.alternative is not None)
DROP_LAST = _field_condition("dataloader_drop_last", False)
ASSISTANT_ONLY = _field_condition("assistant_only_loss", False)
LAST_TURN = _field_condition("assistant_turns", "all", ("last",))
NO_EMPTY_THINKING = _field_condition("train_empty_thinking", True, (False,))
EVERY_TURN = Condition(  # assistant turns are trained like all other tokens
    "neither `assistant_only_loss` nor `per_turn`",
    lambda settings: (
        None if ASSISTANT_ONLY.describe(settings) or PER_TURN.describe(settings) else "`assistant_only_loss=False`"
    ),
    "set `assistant_only_loss=True` or `per_turn=True`",
)
# Without the restriction to completions, the prompt and the turns before the last are trained, too
HISTORY_TRAINED = _field_condition("completion_only_loss", None, (False,))
CHUNKED = _field_condition("loss_type", "nll", ("chunked_nll",))
LIGER = _field_condition("use_liger_kernel", False)
NO_MAX_STEPS = Condition(
    "no `max_steps`",
    lambda settings: f"`max_steps={settings.args.max_steps}`" if settings.args.max_steps <= 0 else None,
    "set `max_steps` to the optimizer steps to train (a stream begins again when it ends)",
)


@_make_condition(
    "a strategy or `overlong` that does not truncate",
    undo='set `overlong="truncate"` (with "stream", "bfd" or "minibatch")',
)
def NO_TRUNCATION(settings: RunSettings) -> str | None:
    # What happens to documents longer than `max_length` is decided by `overlong` or, if it is unset, by the strategy.
    # `decider` is the text by which a message names this setting; None for a strategy that truncates
    splitting_strategy = _strategy_condition(lambda traits: traits.overlong == "split")
    decider = OVERLONG.describe(settings) or splitting_strategy.describe(settings)
    truncates = getattr(settings.args, "overlong", None) == "truncate"  # a config of TRL has no such field
    return decider if settings.packs and not truncates else None


@_make_condition("`activation_offloading` on the CPU", undo="leave `activation_offloading` unset")
def OFFLOADING_ON_CPU(settings: RunSettings) -> str | None:
    is_on_cpu = settings.args.activation_offloading and settings.args.device.type == "cpu"
    return "`activation_offloading=True` on the CPU" if is_on_cpu else None


@_make_condition(
    "`fused_linear_cross_entropy`, `cross_entropy` in `liger_kernel_config`",
    undo="leave the losses out of `liger_kernel_config`",
)
def LIGER_LOSS(settings: RunSettings) -> str | None:
    kernels = settings.args.liger_kernel_config or {}
    name = next((name for name in ("fused_linear_cross_entropy", "cross_entropy") if kernels.get(name)), None)
    return None if name is None else f"`{name}={kernels[name]}` in `liger_kernel_config`"


@_make_condition("`skip_prepare_dataset`", undo="leave `skip_prepare_dataset` unset")
def UNPREPARED(settings: RunSettings) -> str | None:
    options = settings.args.dataset_kwargs
    is_unprepared = isinstance(options, dict) and options.get("skip_prepare_dataset")
    return "`dataset_kwargs={'skip_prepare_dataset': True}`" if is_unprepared else None


@_make_condition("`split_batches`, `dispatch_batches`", undo="set both to False in `accelerator_config`")
def DIVIDED_BATCHES(settings: RunSettings) -> str | None:
    for name in ("split_batches", "dispatch_batches"):
        if getattr(settings.args.accelerator_config, name, None):
            return f"`accelerator_config.{name}=True`"
    return None


@_make_condition(
    "`average_tokens_across_devices=False` on several ranks",
    undo="leave `average_tokens_across_devices` at its default, True",
)
def MEAN_PER_RANK(settings: RunSettings) -> str | None:
    # `world_size` initializes the device when it is first read, so it is read last
    has_own_means = not settings.args.average_tokens_across_devices and settings.args.world_size > 1
    return f"`average_tokens_across_devices=False` on {settings.args.world_size} ranks" if has_own_means else None


# The dataset


def _column_condition(names: tuple[str, ...], label: str, undo: str, *, packs: bool = True) -> Condition:
    """Return the condition that the training set has one of the columns `names`, with packing or without it.

    Args:
        names: names of columns.
        label: how docs/combinations.md names the condition.
        undo: what a user does so that the condition is not met.
        packs: whether the condition is about runs with packing; else it is about runs without packing.
    """

    def describe(settings: RunSettings) -> str | None:
        column = next((name for name in settings.columns if name in names), None)
        return f"the column `{column}`" if column is not None and settings.packs == packs else None

    return Condition(label, describe, undo)


STREAM = Condition(
    "an `IterableDataset`",
    lambda settings: "an `IterableDataset`" if settings.is_stream and settings.packs else None,
    "load the dataset without streaming",
)
# The first two are about runs with packing only, and the third is about runs without it
PACKED_IMAGES = _column_condition(IMAGES, "images", "remove the column of images")
VIDEO_OR_SOUND = _column_condition(
    ("video", "videos", "audio", "audios"),
    "video or audio",
    "remove the column where the text alone is to be trained",
)
UNPACKED_IMAGES = _column_condition(IMAGES, "images and `packing=False`", "set `packing=True`", packs=False)


# Arguments of the trainer, and methods of a subclass


def _argument_condition(name: str) -> Condition:
    """Return the condition that an argument of the trainer is not None."""

    def describe(settings: RunSettings) -> str | None:
        value = getattr(settings, name)
        return None if value is None else f"`{name}={getattr(value, '__name__', type(value).__name__)}`"

    return Condition(f"`{name}`", describe, f"leave `{name}` unset")


COLLATOR = _argument_condition("data_collator")
FORMATTING = _argument_condition("formatting_func")
LOSS_FUNCTION = _argument_condition("compute_loss_func")


@_make_condition(
    "a `processing_class` that is no processor",
    undo="give the processor of the model (`AutoProcessor.from_pretrained`), or leave `processing_class` unset",
)
def NO_PROCESSOR(settings: RunSettings) -> str | None:
    if isinstance(settings.processing_class, ProcessorMixin):
        return None
    return _argument_condition("processing_class").describe(settings)


# The comma at the end of a description continues the message: "`...`, which does not call `...`, was given with ..."
USER_LOSS = Condition(
    "a `compute_loss` that does not call `super().compute_loss`",
    lambda settings: settings.user_loss and f"`{settings.user_loss}`, which does not call `super().compute_loss`,",
    "change what `super().compute_loss` returns",
)
USER_LOADER = Condition(
    "a `get_train_dataloader` that does not call `super().get_train_dataloader`",
    lambda settings: (
        settings.user_loader and f"`{settings.user_loader}`, which does not call `super().get_train_dataloader`,"
    ),
    "change what `super().get_train_dataloader` returns",
)
USER_SAMPLER = Condition(
    "a subclass with `_get_train_sampler`",
    lambda settings: settings.user_sampler and f"`{settings.user_sampler}`",
    "remove it",
)


# The model


@_make_condition("an encoder-decoder", undo="give a causal language model")
def ENCODER_DECODER(settings: RunSettings) -> str | None:
    is_encoder_decoder = getattr(getattr(settings.model, "config", None), "is_encoder_decoder", False)
    return type(settings.model).__name__ if is_encoder_decoder else None


def _adapter_configs(settings: RunSettings) -> list[Any]:
    """Return the configs of the adapters that are on the model, and of the adapter that the trainer adds."""
    configs = [*getattr(settings.model, "peft_config", {}).values(), settings.peft_config]
    return [config for config in configs if config is not None]


@_make_condition("adapters of peft (LoRA)", undo="train all weights")
def ADAPTERS(settings: RunSettings) -> str | None:
    return next((f"an adapter {config.peft_type.value}" for config in _adapter_configs(settings)), None)


@_make_condition("an adapter with virtual tokens (prompt tuning)", undo="use LoRA")
def VIRTUAL_TOKENS(settings: RunSettings) -> str | None:
    adapters = _adapter_configs(settings)
    config = next((adapter for adapter in adapters if getattr(adapter, "is_prompt_learning", False)), None)
    return config and f"an adapter {config.peft_type.value} with {config.num_virtual_tokens} virtual tokens"


@_make_condition("dropout of attention weights", undo="load the model with the rate 0.0")
def DROPPED_WEIGHTS(settings: RunSettings) -> str | None:
    # The rates of dropout in attention that are above 0, by their names in the config of the model
    rates = {} if settings.model is None else dropped_weights(text_config(settings.model, settings.args))
    return next((f"`{name}={rate}` in the config of the model" for name, rate in rates.items()), None)


@_make_condition("`tokens_per_rank` with a [hybrid model](hybrids.md)", undo="set `tokens_per_rank=None`")
def TOKENS_PER_RANK_OF_HYBRIDS(settings: RunSettings) -> str | None:
    tokens_per_rank = TOKENS_PER_RANK.describe(settings)
    if tokens_per_rank is None or settings.model is None:
        return None
    config = text_config(settings.model, settings.args)
    is_hybrid = mixer_support().config_has_mixers(config)  # mixers: recurrent layers, such as Mamba's
    return f"{tokens_per_rank} for the recurrent layers of {config.model_type}" if is_hybrid else None


@_make_condition(
    "a model on several devices (`device_map`)",
    undo="launch one process per GPU (`accelerate launch` or `torchrun`), or make one GPU visible with "
    "`CUDA_VISIBLE_DEVICES`",
)
def SEVERAL_DEVICES(settings: RunSettings) -> str | None:
    # `device_map="auto"` uses all visible GPUs. Modules that are offloaded to "cpu" or "disk" run on one of them.
    devices_of_modules = (getattr(settings.model, "hf_device_map", None) or {}).values()
    devices = sorted({str(device) for device in devices_of_modules} - {"cpu", "disk"})
    return f"a `device_map` with {len(devices)} devices ({', '.join(devices)})" if len(devices) > 1 else None


# The engine


@_make_condition(
    "context or sequence parallelism of accelerate or DeepSpeed",
    undo="set its size to 1 and `tokens_per_rank`, by which ranks share long packs exactly",
)
def CONTEXT_PARALLELISM(settings: RunSettings) -> str | None:
    accelerator = settings.accelerator  # None before TRL has constructed it
    config = settings.args.parallelism_config if accelerator is None else accelerator.parallelism_config
    is_in_environment = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"
    if config is None and accelerator is None and is_in_environment:
        # The sizes are read from the environment, as the accelerator will read them. TRL would refuse them with a
        # message of its own.
        config = ParallelismConfig()
    sizes = {name: getattr(config, name, 1) for name in ("cp_size", "sp_size")}  # 1 without a config
    sizes["sequence_parallel_size"] = _deepspeed_config(settings).get("sequence_parallel_size", 1)
    return _describe_size_above_one(sizes)


@_make_condition(
    "tensor parallelism of DeepSpeed",
    undo="set its size to 1 and load the model with `DistributedConfig(tp_size=...)` of transformers",
)
def DEEPSPEED_TENSORS(settings: RunSettings) -> str | None:
    config = _deepspeed_config(settings).get("tensor_parallel", {})
    training_config = config.get("tp") or config.get("tensor_parallel") or {}  # DeepSpeed accepts either key
    return _describe_size_above_one(
        {
            "tensor_parallel.autotp_size": config.get("autotp_size", 1),
            "tensor_parallel.tp.tp_size": training_config.get("tp_size", 1),
        }
    )


def _deepspeed_config(settings: RunSettings) -> dict[str, Any]:
    """Return the config of DeepSpeed; empty under another engine, or if the engine is not known yet."""
    accelerator = settings.accelerator
    if accelerator is None or accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {}
    return accelerator.deepspeed_plugin.deepspeed_config


def _describe_size_above_one(sizes: dict[str, Any]) -> str | None:
    """Return how a message names the first of these settings that is a number above 1; None if there is none.

    Args:
        sizes: the values of settings, by name.
    """
    return next((f"`{name}={size}`" for name, size in sizes.items() if isinstance(size, int) and size > 1), None)


def _distributed_size(name: str) -> Callable[[RunSettings], str | None]:
    """Return a function that describes a size above 1 in the `DistributedConfig` with which the model was loaded."""

    def describe(settings: RunSettings) -> str | None:
        # The config of a saved model has the sizes, too, but a model that is loaded without them is not divided
        is_divided = getattr(settings.model, "is_distributed_loading_by_transformers", False)
        size = getattr(settings.model.config.distributed_config, name) if is_divided else 1
        return f"`DistributedConfig({name}={size})`" if size > 1 else None

    return describe


@_make_condition(
    "tensor or expert parallelism of transformers (`tp_size`)",
    undo="load the model without `tp_size` in `DistributedConfig`",
)
def TENSOR_PARALLELISM(settings: RunSettings) -> str | None:
    size = getattr(settings.model, "_tp_size", None) or 1
    return f"`DistributedConfig(tp_size={size})`" if size > 1 else None


@_make_condition("`tp_size` with `fsdp_size` of transformers", undo="load the model with one of the two sizes")
def TENSORS_AND_SHARDS(settings: RunSettings) -> str | None:
    # FSDP wraps the layers if `dp_size` is above 1. It is `fsdp_size` times `dp_replicate_size`, and either may be 1
    if not (TENSOR_PARALLELISM.describe(settings) and _distributed_size("dp_size")(settings)):
        return None
    config = settings.model.config.distributed_config
    is_only_replicated = getattr(config, "dp_replicate_size", 1) == config.dp_size
    name = "dp_replicate_size" if is_only_replicated else "fsdp_size"
    return f"`tp_size` with `{name}` in `DistributedConfig`"


@_make_condition("Megatron-LM", undo="use DDP, DeepSpeed or FSDP")
def MEGATRON(settings: RunSettings) -> str | None:
    accelerator = settings.accelerator
    uses_megatron = accelerator is not None and accelerator.distributed_type == DistributedType.MEGATRON_LM
    return "Megatron-LM" if uses_megatron else None


@_make_condition("`sp_size` of accelerate and `packing=False`", undo="set `sp_size=1`")
def UNPACKED_SEQUENCES(settings: RunSettings) -> str | None:
    config = None if settings.accelerator is None else settings.accelerator.parallelism_config
    size = 1 if config is None else config.sp_size
    return f"`sp_size={size}` and `packing=False`" if size > 1 and not settings.packs else None


PIPELINE = Condition(
    "pipeline parallelism of transformers", _distributed_size("pp_size"), "load the model with `pp_size=1`"
)
