"""What a user may choose, and how a message names it: settings, arguments, kinds of datasets, models and engines.

`features.py` says which of them cannot be combined.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import AutoConfig, PretrainedConfig

from ..attention.choice import dropped_weights
from ..data.image_rows import IMAGES
from ..planning.strategies import STRATEGIES, StrategyTraits

if TYPE_CHECKING:
    from .config import SFTConfig

MEDIA = ("video", "videos", "audio", "audios")  # columns of video and sound


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a run is given. Only the config is always known; what is not known yet counts as not given.

    Attributes:
        columns: those of the training set.
        is_stream: whether the training set is an `IterableDataset`.
        own_sampler, own_loss: methods of a subclass that replace ours, by their names.
    """

    args: "SFTConfig"
    model: Any = None
    columns: Collection[str] = ()
    is_stream: bool = False
    data_collator: Any = None
    compute_loss_func: Any = None
    formatting_func: Any = None
    peft_config: Any = None
    accelerator: Any = None
    own_sampler: str | None = None
    own_loss: str | None = None

    @property
    def packs(self) -> bool:
        return self.args.packing or self.args.padding_free

    @property
    def strategy(self) -> StrategyTraits:
        return STRATEGIES[self.args.packing_strategy]


@dataclass(frozen=True)
class Choice:
    """Something that a user may choose.

    Attributes:
        name: in docs/combinations.md.
        given: how a message names what was given; None if it was not given.
        undo: what to do to be without it.
    """

    name: str
    given: Callable[[Given], str | None]
    undo: str


def text_config(model: Any, args: "SFTConfig") -> PretrainedConfig:
    """The text config of a model, given as an object or by name; by name with the fields of `model_init_kwargs`."""
    if isinstance(model, str):
        init: Any = args.model_init_kwargs or {}
        config = AutoConfig.from_pretrained(model, **{"trust_remote_code": args.trust_remote_code} | init)
    else:
        config = model.config
    return config.get_text_config()


# Fields of the config


def _setting(name: str, off: Any = None, on: tuple[Any, ...] = ()) -> Choice:
    """A field of the config that has one of the values `on`; if there are none, another value than `off`."""
    values = ", ".join(f"`{name}={value}`" if value is False else f'`{name}="{value}"`' for value in on)
    undo = f"leave `{name}` unset" if off is None else f"set `{name}={off!r}`"

    def given(given: Given) -> str | None:
        value = getattr(given.args, name)
        return f"`{name}={value!r}`" if (value in on if on else value != off) else None

    return Choice(values or f"`{name}`", given, undo)


def _strategies(which: Callable[[StrategyTraits], bool]) -> Choice:
    return _setting("packing_strategy", "stream", tuple(name for name, traits in STRATEGIES.items() if which(traits)))


PACKING = Choice("packing", lambda given: "packing" if given.packs else None, "set `packing=False`")
NO_PACKING = Choice("`packing=False`", lambda given: None if given.packs else "`packing=False`", "set `packing=True`")
TOKENS_PER_RANK = _setting("tokens_per_rank")
IN_PACKS, IN_FAMILIES = (_setting("share_prefixes", "off", (value,)) for value in ("pack", "family"))
PER_TURN = _setting("per_turn", False)
SMOOTHING, NOISE = _setting("label_smoothing_factor", 0.0), _setting("neftune_noise_alpha")
CONSTANT_SHAPES = _setting("pad_documents_to_multiple_of")
BY_DOCUMENT = _setting("document_weighting", "token")
WEIGHT_COLUMN, SOURCE_COLUMN = _setting("weight_column"), _setting("source_column")
OVERLONG = _setting("overlong")
OWN_ATTENTION = _setting("enforce_flash_attention", True)
BATCH_SIZE = _setting("per_device_train_batch_size", 1)
SAMPLING = _setting("train_sampling_strategy", "random", ("group_by_length",))
NOT_OF_STREAMS = _strategies(lambda traits: not traits.packs_streams)
CUT_BLOCKS = _strategies(lambda traits: traits.cuts_blocks)
NOT_BY_LENGTHS = _strategies(lambda traits: traits.instead is not None)
DROP_LAST = _setting("dataloader_drop_last", False)
ASSISTANT_ONLY = _setting("assistant_only_loss", False)
LAST_TURN, NO_EMPTY_THINKING = _setting("assistant_turns", "all"), _setting("train_empty_thinking", True)
EVERY_TURN = Choice(
    "neither `assistant_only_loss` nor `per_turn`",
    lambda given: None if given.args.assistant_only_loss or given.args.per_turn else "`assistant_only_loss=False`",
    "set `assistant_only_loss=True` or `per_turn=True`",
)
HISTORY_TRAINED = _setting("completion_only_loss", None, (False,))
CHUNKED = _setting("loss_type", "nll", ("chunked_nll",))
LIGER = _setting("use_liger_kernel", False)
NO_END = Choice(
    "no `max_steps`",
    lambda given: f"`max_steps={given.args.max_steps}`" if given.args.max_steps <= 0 else None,
    "set `max_steps` to the optimizer steps to train (a stream begins again when it ends)",
)


def _liger_loss(given: Given) -> str | None:
    kernels = given.args.liger_kernel_config or {}
    name = next((name for name in ("fused_linear_cross_entropy", "cross_entropy") if kernels.get(name)), None)
    return name and f"`{name}={kernels[name]}` in `liger_kernel_config`"


LIGER_LOSS = Choice(
    "`fused_linear_cross_entropy`, `cross_entropy` in `liger_kernel_config`",
    _liger_loss,
    "leave the losses out of `liger_kernel_config`",
)


def _unprepared(given: Given) -> str | None:
    options = given.args.dataset_kwargs
    is_given = isinstance(options, dict) and options.get("skip_prepare_dataset")
    return "`dataset_kwargs={'skip_prepare_dataset': True}`" if is_given else None


UNPREPARED = Choice("`skip_prepare_dataset`", _unprepared, "leave `skip_prepare_dataset` unset")


def _divided(given: Given) -> str | None:
    for name in ("split_batches", "dispatch_batches"):
        if getattr(given.args.accelerator_config, name, None):
            return f"`accelerator_config.{name}=True`"
    return None


DIVIDED = Choice("`split_batches`, `dispatch_batches`", _divided, "set both to False in `accelerator_config`")


def _own_means(given: Given) -> str | None:
    # The number of ranks sets the device up, so it is asked last
    is_given = not given.args.average_tokens_across_devices and given.args.world_size > 1
    return f"`average_tokens_across_devices=False` on {given.args.world_size} ranks" if is_given else None


OWN_MEANS = Choice(
    "`average_tokens_across_devices=False` on several ranks",
    _own_means,
    "leave `average_tokens_across_devices` at its default, True",
)


# The dataset


def _column(names: tuple[str, ...], label: str, undo: str, *, packs: bool = True) -> Choice:
    """A column of the training set, with packing or without."""

    def given(given: Given) -> str | None:
        column = next((name for name in given.columns if name in names), None)
        return f"the column `{column}`" if column is not None and given.packs == packs else None

    return Choice(label, given, undo)


def _stream(packs: bool, label: str) -> Choice:
    def given(given: Given) -> str | None:
        return label if given.is_stream and given.packs == packs else None

    return Choice(label, given, "load the dataset without streaming")


STREAM, UNPACKED_STREAM = _stream(True, "an `IterableDataset`"), _stream(False, "an unpacked `IterableDataset`")
PACKED_IMAGES = _column(IMAGES, "images", "remove the column of images")
VIDEO_OR_SOUND = _column(MEDIA, "video or audio", "remove the column where the text alone is to be trained")
UNPACKED_IMAGES = _column(IMAGES, "images and `packing=False`", "set `packing=True`", packs=False)


# Arguments of the trainer, and methods of a subclass


def _argument(name: str) -> Choice:
    def given(given: Given) -> str | None:
        value = getattr(given, name)
        return None if value is None else f"`{name}={getattr(value, '__name__', type(value).__name__)}`"

    return Choice(f"`{name}`", given, f"leave `{name}` unset")


COLLATOR, FORMATTING, LOSS_FUNCTION = map(_argument, ("data_collator", "formatting_func", "compute_loss_func"))
OWN_LOSS = Choice(
    "a subclass whose `compute_loss` does not call `super().compute_loss`",
    lambda given: given.own_loss and f"`{given.own_loss}`, which does not call `super().compute_loss`,",
    "change what `super().compute_loss` returns",
)
OWN_SAMPLER = Choice(
    "a subclass with `_get_train_sampler`", lambda given: given.own_sampler and f"`{given.own_sampler}`", "remove it"
)


# The model


def _encoder_decoder(given: Given) -> str | None:
    is_one = getattr(getattr(given.model, "config", None), "is_encoder_decoder", False)
    return type(given.model).__name__ if is_one else None


def _adapters(given: Given) -> str | None:
    adapters = [*getattr(given.model, "peft_config", {}).values(), given.peft_config]
    return next((f"an adapter {each.peft_type.value}" for each in adapters if each is not None), None)


def _virtual_tokens(given: Given) -> str | None:
    adapters = [*getattr(given.model, "peft_config", {}).values(), given.peft_config]
    config = next((each for each in adapters if getattr(each, "is_prompt_learning", False)), None)
    return config and f"an adapter {config.peft_type.value} with {config.num_virtual_tokens} virtual tokens"


def _dropped_weights(given: Given) -> str | None:
    rates = {} if given.model is None else dropped_weights(text_config(given.model, given.args))
    return next((f"`{name}={rate}` in the config of the model" for name, rate in rates.items()), None)


ENCODER_DECODER = Choice("an encoder-decoder", _encoder_decoder, "give a causal language model")
VIRTUAL_TOKENS = Choice("an adapter with virtual tokens (prompt tuning)", _virtual_tokens, "use LoRA")
ADAPTERS = Choice("adapters of peft (LoRA)", _adapters, "train all weights")
DROPPED_WEIGHTS = Choice("dropout of attention weights", _dropped_weights, "load the model with the rate 0.0")


# The engine


def _context_parallelism(given: Given) -> str | None:
    """Context or sequence parallelism of accelerate, whose config may come from its launcher, or of DeepSpeed."""
    sizes: dict[str, Any] = {}
    config = given.args.parallelism_config if given.accelerator is None else given.accelerator.parallelism_config
    if config is None and given.accelerator is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        config = ParallelismConfig()  # reads the environment; TRL would refuse it with packing before there is ours
    if config is not None:
        sizes |= {name: getattr(config, name) for name in ("cp_size", "sp_size")}
    sizes["sequence_parallel_size"] = _deepspeed_config(given).get("sequence_parallel_size", 1)
    return _above_one(sizes)


def _deepspeed_tensors(given: Given) -> str | None:
    tensor = _deepspeed_config(given).get("tensor_parallel", {})
    of_training = tensor.get("tp") or tensor.get("tensor_parallel") or {}
    return _above_one(
        {
            "tensor_parallel.autotp_size": tensor.get("autotp_size", 1),
            "tensor_parallel.tp.tp_size": of_training.get("tp_size", 1),
        }
    )


def _deepspeed_config(given: Given) -> dict[str, Any]:
    accelerator = given.accelerator
    is_one = accelerator is not None and accelerator.distributed_type == DistributedType.DEEPSPEED
    return accelerator.deepspeed_plugin.deepspeed_config if is_one else {}


def _above_one(sizes: dict[str, Any]) -> str | None:
    return next((f"`{name}={size}`" for name, size in sizes.items() if isinstance(size, int) and size > 1), None)


def _distributed(name: str) -> Callable[[Given], str | None]:
    """A size above 1 in the `DistributedConfig` with which transformers has loaded the model."""

    def given(given: Given) -> str | None:
        # The config of a model that was saved so has it, too
        is_divided = getattr(given.model, "is_distributed_loading_by_transformers", False)
        size = getattr(given.model.config.distributed_config, name) if is_divided else 1
        return f"`DistributedConfig({name}={size})`" if size > 1 else None

    return given


def _tensor_parallelism(given: Given) -> str | None:
    size = getattr(given.model, "_tp_size", None) or 1
    return f"`DistributedConfig(tp_size={size})`" if size > 1 else None


def _tensors_and_shards(given: Given) -> str | None:
    is_both = _tensor_parallelism(given) and _distributed("dp_size")(given)
    return "`tp_size` with `fsdp_size` in `DistributedConfig`" if is_both else None


def _megatron(given: Given) -> str | None:
    is_one = given.accelerator is not None and given.accelerator.distributed_type == DistributedType.MEGATRON_LM
    return "Megatron-LM" if is_one else None


def _unpacked_sequences(given: Given) -> str | None:
    config = None if given.accelerator is None else given.accelerator.parallelism_config
    size = 1 if config is None else config.sp_size
    return f"`sp_size={size}` and `packing=False`" if size > 1 and not given.packs else None


TENSOR_PARALLELISM = Choice(
    "tensor or expert parallelism of transformers (`tp_size`)",
    _tensor_parallelism,
    "load the model without `tp_size` in `DistributedConfig`",
)
TENSORS_AND_SHARDS = Choice(
    "`tp_size` with `fsdp_size` of transformers",
    _tensors_and_shards,
    "load the model with one of the two sizes",
)
PIPELINE = Choice("pipeline parallelism of transformers", _distributed("pp_size"), "load the model with `pp_size=1`")
DEEPSPEED_TENSORS = Choice(
    "tensor parallelism of DeepSpeed",
    _deepspeed_tensors,
    "set its size to 1 and load the model with `DistributedConfig(tp_size=...)` of transformers",
)
CONTEXT_PARALLELISM = Choice(
    "context or sequence parallelism of accelerate or DeepSpeed",
    _context_parallelism,
    "set its size to 1 and `tokens_per_rank`, by which ranks share long packs exactly",
)
UNPACKED_SEQUENCES = Choice("`sp_size` of accelerate and `packing=False`", _unpacked_sequences, "set `sp_size=1`")
MEGATRON = Choice("Megatron-LM", _megatron, "use DDP, DeepSpeed or FSDP")
