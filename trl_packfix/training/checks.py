"""Checks of the model, collator, datasets and engine: what packing does not support, found before training starts."""

from typing import Any

import trl
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from trl.data_utils import get_dataset_column_names

from ..attention.choice import ATTENTION_DROPOUT
from ..compat import DDP
from ..data.dataset_checks import check_rows, check_tokenised
from ..data.image_rows import has_images
from ..data.row_values import read_row_values
from ..planning.degrees import possible_degrees
from ..planning.strategies import STRATEGIES
from ..planning.units import Synchronisation
from . import images
from .config import SFTConfig

MEDIA = ("video", "videos", "audio", "audios")  # columns of video and sound


def text_config(model: Any, args: SFTConfig) -> PretrainedConfig:
    """The text config of a model, given as an object or by name."""
    if isinstance(model, str):
        init: Any = args.model_init_kwargs or {}
        config = AutoConfig.from_pretrained(
            model, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    else:
        config = model.config
    return config.get_text_config()


def check_overrides(trainer_class: type[trl.SFTTrainer]) -> None:
    """Refuse a method of a subclass that packing never calls."""
    if trainer_class._get_train_sampler is not trl.SFTTrainer._get_train_sampler:
        raise ValueError(
            f"`{trainer_class.__name__}._get_train_sampler` was given with packing. Packs are planned from the lengths "
            "of all documents and no sampler is called, so the method would be ignored. Set `packing=False`, or order "
            'the dataset itself, set `train_sampling_strategy="sequential"` and remove the method.'
        )


def check_before_loading(
    args: SFTConfig, model: Any, train_dataset: Any, data_collator: Any, peft_config: Any, processing_class: Any = None
) -> None:
    """Refuse what packing does not support, before the model is loaded and the dataset is tokenised.

    Raises:
        ValueError: an encoder-decoder, a custom collator, a loss that depends on the number of ranks, video or audio,
            images that cannot be packed, prompt learning, a `max_length` beyond the model's positions. With an iterable
            dataset also a strategy other than `stream`, no `max_steps`, or `dataloader_drop_last`.
    """
    if not isinstance(model, str) and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} was given with packing. It is an encoder-decoder: its encoder reads a whole "
            "document at once, and this trainer trains causal language models. Give one "
            "(`AutoModelForCausalLM.from_pretrained`), or train this model with transformers' `Seq2SeqTrainer`."
        )
    if data_collator is not None:
        raise ValueError(
            f"`data_collator={type(data_collator).__name__}` was given with packing. A pack needs a collator that "
            "keeps document boundaries, and any other would lose them. Leave `data_collator` unset (pad with "
            "`pad_to_multiple_of`), or set `packing=False`."
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            f"`average_tokens_across_devices=False` was given with packing on {args.world_size} ranks. Ranks hold "
            "different numbers of trained tokens, so the mean of their means is not the loss per token (the difference "
            "was 0.7 % in a small run). Leave `average_tokens_across_devices` at its default, True."
        )
    if args.activation_offloading and args.device.type == "cpu":
        raise ValueError(
            "`activation_offloading=True` was given, and the run is on the CPU. It moves activations from an "
            "accelerator to the memory of the CPU, where they are already, and TRL's code for it fails there. Leave "
            "`activation_offloading` unset."
        )
    if isinstance(train_dataset, IterableDataset):
        _check_stream(args)
    if isinstance(train_dataset, Dataset | IterableDataset):
        media = [name for name in train_dataset.column_names or () if name in MEDIA]
        if media:
            raise ValueError(
                f"The dataset has the column `{media[0]}` and packing is on. Video and audio belong to rows, and a "
                "pack has one row for many documents. Set `packing=False` and `padding_free=False` for such data, or "
                "remove the column where the text alone is to be trained."
            )
        if images.packs_images(args, train_dataset):
            images.check_before_loading(args, train_dataset, processing_class)
    for config in _peft_configs(model, peft_config):
        if config.is_prompt_learning:
            raise ValueError(
                f"The adapter is {config.peft_type.value} with {config.num_virtual_tokens} virtual tokens, and packing "
                "is on. Virtual tokens are put once before a row, so the documents of a pack would share them or lose "
                "them. Use LoRA, or set `packing=False`."
            )
    positions = getattr(text_config(model, args), "max_position_embeddings", None)
    if args.max_length is not None and positions is not None and 0 < positions < args.max_length:  # xlnet says -1
        raise ValueError(
            f"`max_length={args.max_length}` was given and the model has {positions} positions "
            "(`max_position_embeddings`). A longer document would reach positions that the model never learned. Set "
            f"`max_length` to {positions} or less, or extend the positions in the model's config."
        )


def _check_stream(args: SFTConfig) -> None:
    """Refuse settings that need all documents, or their number, before training: an iterable dataset has neither."""
    if not STRATEGIES[args.packing_strategy].packs_streams:
        raise ValueError(
            f"`packing_strategy={args.packing_strategy!r}` was given with an `IterableDataset`. It plans with all "
            "documents of an epoch, and a stream is known only as far as it has been read. Set "
            '`packing_strategy="stream"`, or load the dataset without streaming.'
        )
    if args.share_prefixes == "family":
        raise ValueError(
            '`share_prefixes="family"` was given with an `IterableDataset`. Documents that begin alike are found by '
            "sorting all of them, and a stream is known only as far as it has been read. Set "
            '`share_prefixes="pack"`, which shares among the documents of a pack, or load the dataset without '
            "streaming."
        )
    if args.max_steps <= 0:
        raise ValueError(
            f"`max_steps={args.max_steps}` was given with an `IterableDataset`. A stream does not say how long it is, "
            "so the number of steps and the learning-rate schedule cannot be computed. Set `max_steps` to the "
            "optimizer steps to train; the stream begins again when it ends."
        )
    if args.dataloader_drop_last:
        raise ValueError(
            "`dataloader_drop_last=True` was given with an `IterableDataset`. The last packs of a pass are split "
            "between the micro-batches of one more step, so nothing is incomplete and there is nothing to drop. Set "
            "`dataloader_drop_last=False`."
        )


def check_row_columns(args: SFTConfig, train_dataset: Any, data_collator: Any) -> None:
    """Refuse columns of weights and sources that cannot be used, before the dataset is tokenised.

    Raises:
        ValueError: a custom collator, a stream of which the column cannot be read ahead, or what `read_row_values`
            refuses; all weights are 0.
    """
    given = [name for name in ("weight_column", "source_column") if getattr(args, name) is not None]
    if not given:
        return
    setting = f"`{given[0]}={getattr(args, given[0])!r}`"
    if data_collator is not None:
        raise ValueError(
            f"{setting} was given with `data_collator={type(data_collator).__name__}`. Weights and sources belong to "
            "documents, and where documents are in a batch of this collator is not known. Leave `data_collator` unset, "
            f"or `{given[0]}`."
        )
    if isinstance(train_dataset, IterableDataset):
        if args.source_column is not None:
            raise ValueError(
                f"`source_column={args.source_column!r}` was given with an `IterableDataset`. All ranks sum the losses "
                "of the same sources, and the sources of a stream are not known before it is read. Leave "
                "`source_column` unset, or load the dataset without streaming."
            )
        if not args.packing:
            raise ValueError(
                f"{setting} was given with an `IterableDataset` and `packing=False`. Unpacked streams are read by "
                "TRL's own loader, in which weights are not checked. Set `packing=True`, or load the dataset without "
                "streaming."
            )
    if isinstance(train_dataset, Dataset):
        values = read_row_values(train_dataset, args.weight_column, args.source_column, "train")
        if values.weights is not None and not values.weights.any():
            raise ValueError(
                f"{setting} was given, and all {len(values.weights)} rows of the train dataset have weight 0. A row of "
                "weight 0 trains nothing, so nothing would be trained. Give some rows a weight above 0."
            )


def _peft_configs(model: Any, peft_config: Any) -> list[Any]:
    given = list(getattr(model, "peft_config", {}).values()) if not isinstance(model, str) else []
    return given + ([peft_config] if hasattr(peft_config, "is_prompt_learning") else [])


def check_prepared_sets(args: SFTConfig, train_dataset: Any, eval_dataset: Any, vocab_size: int | None) -> None:
    """With `skip_prepare_dataset`, check the datasets here. Otherwise this happens when TRL prepares them."""
    if not (isinstance(args.dataset_kwargs, dict) and args.dataset_kwargs.get("skip_prepare_dataset")):
        return
    eval_packing = args.packing if args.eval_packing is None else args.eval_packing
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    sets = [("train", train_dataset, args.packing), *((name, each, eval_packing) for name, each in eval_sets.items())]
    for name, dataset, packing in sets:
        check_rows(dataset, name)
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
            check_tokenised(dataset, name, vocab_size, packing)


def check_share_prefixes(args: SFTConfig, compute_loss_func: Any) -> None:
    """Refuse what cannot work on shared rows, before the model is loaded. `SFTConfig` refuses settings that contradict.

    Raises:
        ValueError: a loss of the user with `share_prefixes`.
    """
    if args.share_prefixes == "off":
        return
    if compute_loss_func is not None:
        raise ValueError(
            f"`share_prefixes={args.share_prefixes!r}` was given with `compute_loss_func`. It gets one label per row, "
            "and a shared row is a target of several documents, so it would count once and not once for each. Leave "
            '`compute_loss_func` unset, or set `share_prefixes="off"`.'
        )


def check_sequence_parallelism(args: SFTConfig, model: Any, compute_loss_func: Any) -> None:
    """Refuse what cannot work on parts of packs, before the model is loaded. Does nothing without `tokens_per_rank`.

    Raises:
        ValueError: a loss that shifts labels itself, dropout of attention weights, an attention that does not exchange
            tokens, `torch.compile`, a `max_length` that needs more ranks than there are.
    """
    if args.tokens_per_rank is None:
        return
    losses = {
        "`compute_loss_func`": compute_loss_func is not None,
        f"`label_smoothing_factor={args.label_smoothing_factor}`": args.label_smoothing_factor > 0,
    }
    for loss, is_set in losses.items():
        if is_set:
            raise ValueError(
                f"`tokens_per_rank={args.tokens_per_rank}` was given with {loss}. "
                "Such a loss shifts labels itself, and the label of the last token of a part lies on "
                "the next rank, so it would be lost. Leave the loss at its default, or `tokens_per_rank` unset."
            )
    for name, rate in vars(text_config(model, args)).items():
        if ATTENTION_DROPOUT.match(name) and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"`tokens_per_rank={args.tokens_per_rank}` was given with a model whose config has `{name}={rate}`. "
                "The ranks of a group compute different heads and "
                f"draw the same random numbers, so the heads would drop the same weights. Load the model with "
                f"`{name}=0.0`, or leave `tokens_per_rank` unset."
            )
    if not args.enforce_flash_attention:
        raise ValueError(
            f"`tokens_per_rank={args.tokens_per_rank}` was given with `enforce_flash_attention=False`. "
            "That keeps the attention of the model, which does not exchange "
            "tokens between the ranks of a group. Set `enforce_flash_attention=True`, or leave `tokens_per_rank` unset."
        )
    if args.torch_compile:
        raise ValueError(
            f"`tokens_per_rank={args.tokens_per_rank}` was given with `torch_compile=True`. "
            "The exchange between ranks was not tested in compiled models. Set "
            "`torch_compile=False`, or leave `tokens_per_rank` unset."
        )
    assert args.max_length is not None  # `SFTConfig` refuses packing without it
    num_heads = getattr(text_config(model, args), "num_attention_heads", None)
    possible_degrees(args.max_length, args.tokens_per_rank, args.world_size, num_heads)


# What is changed after the trainer is constructed

FIXED = ("packing", "padding_free")  # the constructor decides by these what the trainer is made of
# Settings by which the constructor cuts documents, chooses collators and prepares the model
FIXED_WITH_PACKING = (
    *FIXED,
    "packing_strategy",
    "max_length",
    "overlong",
    "truncation_mode",
    "bad_rows",
    "per_turn",
    "share_prefixes",
    "tokens_per_rank",
    "pad_to_multiple_of",
    "pad_documents_to_multiple_of",
    "document_weighting",
    "weight_column",
    "source_column",
    "on_leak",
    "enforce_flash_attention",
    "neftune_noise_alpha",
)


class Constructed:
    """The settings and the model with which a trainer was constructed, to refuse other ones later."""

    def __init__(self, args: SFTConfig, model: nn.Module):
        self._settings = {name: getattr(args, name) for name in FIXED_WITH_PACKING}
        self._model = _without_adapters(model)

    def check(self, args: SFTConfig, model: nn.Module, trains: bool = False) -> None:
        """Refuse what the trainer would not use.

        Args:
            trains: evaluation reads some of the settings anew, such as `max_length`.

        Raises:
            ValueError: a setting of packing was changed, or the model was replaced.
        """
        names = FIXED_WITH_PACKING if trains and self._settings["packing"] else FIXED
        changed = [
            f"`{name}` was {self._settings[name]!r} and is {getattr(args, name)!r}"
            for name in names
            if getattr(args, name) != self._settings[name]
        ]
        if changed:
            raise ValueError(
                f"`trainer.args` was changed after the trainer was constructed: {', '.join(changed)}. Documents are "
                "cut and the model is prepared by these settings when the trainer is constructed, so the change would "
                "not be honoured. Construct the trainer with the new settings."
            )
        if _without_adapters(model) is not self._model:
            raise ValueError(
                f"`trainer.model` was set to another {type(model).__name__} after the trainer was constructed. The "
                "optimizer would get the parameters of one model and the batches would run on another: the "
                "constructor prepares a model to read packs and to score tokens. Construct a trainer with this model."
            )


def _without_adapters(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_replacement(dataset: Any, before: Dataset | IterableDataset, vocab_size: int | None) -> None:
    """Refuse a `train_dataset` that was set after the trainer was constructed, if packing cannot read it.

    Raises:
        ValueError: another kind of dataset (a table, a stream, images, nothing), rows that are not tokenised, or what
            `check_rows` and `check_tokenised` refuse.
    """
    kinds = [_kind(before), _kind(dataset)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"`trainer.train_dataset` was set to {kinds[1]}, and the trainer was constructed with {kinds[0]}. The "
            "loader, the collator and the checks of the model were chosen for that kind. Construct a trainer with the "
            f"new dataset, or set `train_dataset` to {kinds[0]}."
        )
    check_rows(dataset, "train")
    if not has_images(dataset):
        check_prepared(dataset, "train")
    if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
        check_tokenised(dataset, "train", vocab_size, packing=True)


def _kind(dataset: Any) -> str:
    images = " with images" if has_images(dataset) else ""
    if isinstance(dataset, Dataset):
        return f"a `Dataset`{images}"
    return f"an `IterableDataset`{images}" if isinstance(dataset, IterableDataset) else f"{type(dataset).__name__}"


def check_prepared(dataset: Any, name: str) -> None:
    """Refuse rows that were set as a dataset of the trainer and are not tokenised.

    Raises:
        ValueError: there is no column `input_ids`.
    """
    columns = get_dataset_column_names(dataset)
    if "input_ids" not in columns:
        raise ValueError(
            f"`trainer.{name}_dataset` was set to rows with the columns {columns}, without `input_ids`. Datasets are "
            "formatted and tokenised when the trainer is constructed, and not again later. Set it to rows of the "
            f"prepared dataset (`trainer.{name}_dataset.select(...)`), to tokenised rows, or construct a trainer with "
            "this dataset."
        )


# Engines


def synchronisation(accelerator: Any) -> Synchronisation:
    """When ranks wait for each other: "step" under DDP and ZeRO-1, "micro" under everything else.

    ZeRO-2 reduces gradients in every backward, ZeRO-3 and FSDP gather parameters in every forward. (TRL's own loss
    gathers metrics in every micro-batch under every engine; `objective` gathers them once per log.)
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "step" if accelerator.deepspeed_plugin.zero_stage < 2 else "micro"
    return "step" if accelerator.distributed_type in DDP else "micro"


def check_parallelism(accelerator: Any) -> None:
    """Refuse tensor, context, sequence and pipeline parallelism: the data-parallel rank is not the process index there.

    They are set in accelerate's `ParallelismConfig` or in DeepSpeed's config.

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
            "Megatron-LM was chosen as the engine with packing. It splits a document over ranks and reads data with "
            "its own loader. Use DDP, DeepSpeed or FSDP, or set `packing=False`."
        )


def check_recomputation(args: SFTConfig, accelerator: Any) -> None:
    """Refuse FSDP's own activation checkpointing with sequence parallelism, and with shared prefixes.

    It recomputes layers without telling them which part of a pack they hold, or which rows documents share. That of
    transformers does.

    Raises:
        ValueError: `activation_checkpointing` is set in the config of FSDP.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.activation_checkpointing:
        return
    if args.share_prefixes != "off":
        raise ValueError(
            f"`share_prefixes={args.share_prefixes!r}` was given with `activation_checkpointing` in `fsdp_config`. "
            "FSDP recomputes layers without the rows that documents share. Set `gradient_checkpointing=True` instead, "
            "which keeps them."
        )
    if args.tokens_per_rank is not None:
        raise ValueError(
            f"`tokens_per_rank={args.tokens_per_rank}` was given with `activation_checkpointing` in `fsdp_config`. "
            "FSDP recomputes layers without the boundaries of the pack that the ranks share. Set "
            "`gradient_checkpointing=True` instead, which keeps them."
        )


def check_one_device(model: nn.Module) -> None:
    """Refuse a model that `device_map` has split over several devices, as "auto" does with all visible GPUs.

    TRL sets "auto" for a model given by name in a single process. Modules offloaded to "cpu" or "disk" do not count:
    they run on another device.

    Raises:
        ValueError: the model is on more than one device.
    """
    parts = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in parts.values()} - {"cpu", "disk"})
    if len(devices) > 1:
        raise ValueError(
            f"The model is split over {len(devices)} devices ({', '.join(devices)}) by its `device_map`, and packing "
            "is on. The boundaries of a pack are on one device, and modules on other devices cannot read them. "
            "Launch one process per GPU (`accelerate launch` or `torchrun`), or make one GPU visible with "
            "`CUDA_VISIBLE_DEVICES`, or set `packing=False`."
        )


def check_quantisation(model: nn.Module, device_type: str) -> None:
    """Refuse a model in 4 bits on a CPU for which bitsandbytes has a format for inference.

    The first forward in evaluation mode, such as that of the probe, changes the weights to this format, and gradients
    are wrong after it. The same happens in TRL after an evaluation: see docs/upstream.md.

    Raises:
        ValueError: a module would change its weights.
    """
    count = sum(bool(getattr(module, "support_avx512bf16_for_cpu", False)) for module in model.modules())
    if count and device_type == "cpu":
        raise ValueError(
            f"The model has {count} modules in 4 bits, and runs on a CPU with bf16 instructions. There, bitsandbytes "
            "changes their weights to a format for inference in the first forward in evaluation mode, which the test "
            "before the first step makes, and gradients are wrong after it. Train it on a GPU, or load it without "
            "`load_in_4bit`."
        )
