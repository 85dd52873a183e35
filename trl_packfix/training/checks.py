"""Checks of the model, the datasets and the engine, before training starts.

The checks here look at one thing at a time; `conflicts.py` refuses pairs of settings that cannot be combined. The
constructor of `SFTTrainer` calls them before the model is loaded (`check_before_loading`, `check_datasets`) and after
TRL has constructed itself (`check_prepared_sets`). Each start of training or evaluation calls
`ConstructedWith.refuse_changes`, and a dataset that the user sets later passes `check_replacement`.
"""

import warnings
from dataclasses import fields, replace
from typing import Any

import trl
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch import nn
from torch.distributed.fsdp import FSDPModule
from trl.data_utils import get_dataset_column_names

from ..attention.models import base_model, head_counts
from ..compat import DDP
from ..data.dataset_checks import check_tokenised
from ..data.row_values import read_row_values
from ..planning.packing import compare_settings, describe_changes
from ..planning.parallel import possible_degrees
from ..planning.units import Synchronisation
from ..samples.checks import check_rows, check_turns, columns_of, has_images, warn_if_all_is_trained
from .choices import UNPREPARED, RunSettings, text_config
from .config import SFTConfig
from .conflicts import refuse_conflicts
from .trainer_view import TrainerView

# TRL's method is read when this module is imported, because a script may later replace the class in `trl`
sampler_of_trl: object = trl.SFTTrainer._get_train_sampler


def settings_of_trainer(trainer_class: type[TrainerView], arguments: dict[str, Any]) -> RunSettings:
    """Return the config and the arguments of a trainer as `RunSettings`, which `refuse_conflicts` reads.

    Args:
        trainer_class: the class of the trainer, which may be a subclass with methods of the user's.
        arguments: arguments of its constructor, by name.
    """
    dataset = arguments["train_dataset"]
    sampler: object = trainer_class._get_train_sampler
    return RunSettings(
        columns=getattr(dataset, "column_names", None) or (),
        user_sampler=None if sampler is sampler_of_trl else f"{trainer_class.__name__}._get_train_sampler",
        **{setting.name: arguments[setting.name] for setting in fields(RunSettings) if setting.name in arguments},
    )


def check_before_loading(settings: RunSettings) -> None:
    """Refuse what cannot work, and warn of smoothing without effect, before the model is loaded."""
    refuse_conflicts(settings)
    args = settings.args
    assert isinstance(args, SFTConfig)  # the trainer has converted its config with `adopt_args`
    if args.packing:
        _check_lengths(settings, args)
    if settings.is_stream and not settings.columns:
        # A stream names its columns only in its first row, which is read after all other checks
        refuse_conflicts(replace(settings, columns=columns_of(settings.train_dataset)))
    if args.loss_type == "dft" and args.label_smoothing_factor:
        warnings.warn(
            f"`label_smoothing_factor={args.label_smoothing_factor}` was given with `loss_type='dft'`. TRL computes "
            "that loss without smoothing, and so does this trainer. Set `loss_type='nll'` to smooth labels, or "
            "`label_smoothing_factor=0.0`.",
            stacklevel=3,
        )


def _check_lengths(settings: RunSettings, args: SFTConfig) -> None:
    """Refuse a `max_length` beyond the positions of the model, or that the ranks cannot hold together."""
    config = text_config(settings.model, args)
    positions = getattr(config, "max_position_embeddings", None) or 0  # xlnet has no limit, and its config says -1
    rope = getattr(config, "rope_parameters", None)
    # A dynamic rotary embedding stretches its positions over longer documents
    stretches_positions = isinstance(rope, dict) and rope.get("rope_type") == "dynamic"
    has_limit = positions > 0 and not stretches_positions
    if has_limit and args.max_length is not None and args.max_length > positions:
        raise ValueError(
            f"`max_length={args.max_length}` was given and the model has {positions} positions "
            "(`max_position_embeddings`). A longer document would reach positions that the model never learned. Set "
            f"`max_length` to {positions} or less, or extend the positions in the model's config."
        )
    if args.tokens_per_rank is not None:
        assert args.max_length is not None  # `SFTConfig` refuses packing without it
        num_heads = min(head_counts(config), default=None)
        # Called for its ValueError, if no number of ranks that may share a pack can hold a document of `max_length`
        possible_degrees(args.max_length, args.tokens_per_rank, args.world_size, num_heads=num_heads)


def check_datasets(args: SFTConfig, train_dataset: object, eval_dataset: object, *, is_formatted: bool) -> None:
    """Refuse datasets that cannot be used, before the model is loaded. Warn of columns that TRL does not read.

    Args:
        args: the config of the trainer.
        train_dataset: the training set.
        eval_dataset: the evaluation set, or several by name, or None.
        is_formatted: whether the user's `formatting_func` makes the texts of rows. Then `assistant_only_loss` is not
            checked against the columns, and nothing is warned of.
    """
    check_turns(args, train_dataset, eval_dataset, is_formatted=is_formatted)
    check_rows(train_dataset, "train")
    check_weights(args, train_dataset)
    if not is_formatted:
        warn_if_all_is_trained(args, train_dataset)


def check_weights(args: SFTConfig, train_dataset: object) -> None:
    """Refuse columns of weights and sources that cannot be used, before the dataset is tokenised."""
    if not isinstance(train_dataset, Dataset):
        return
    values = read_row_values(train_dataset, args.weight_column, args.source_column, name="train")
    if values.weights is not None and not values.weights.any():
        raise ValueError(
            f"`weight_column={args.weight_column!r}` was given, and all {len(values.weights)} rows of the train "
            "dataset have weight 0. A row of weight 0 trains nothing, so nothing would be trained. Give some rows a "
            "weight above 0."
        )


def check_prepared_sets(
    args: SFTConfig, train_dataset: object, eval_dataset: object, *, vocab_size: int | None
) -> None:
    """Refuse datasets that cannot be trained, if `skip_prepare_dataset` is set.

    Without this setting, datasets are checked when TRL prepares them.
    """
    # `UNPREPARED` is the condition that `skip_prepare_dataset` is set. `describe` returns None if it is not met
    skips_preparation = UNPREPARED.describe(RunSettings(args=args)) is not None
    if not skips_preparation:
        return
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    prepared_sets = [("train", train_dataset, args.packing)]
    prepared_sets += [(name, dataset, args.packs_evaluation) for name, dataset in eval_sets.items()]
    for name, dataset, packing in prepared_sets:
        check_rows(dataset, name)
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
            check_tokenised(dataset, name, vocab_size, packing=packing)


# Changes after the trainer is constructed

FIXED_FIELDS = ("packing", "padding_free")  # the constructor chooses the parts of the trainer by these settings
# Settings by which the constructor makes labels, cuts documents, chooses collators and prepares the model
FIXED_FIELDS_WITH_PACKING = (
    *FIXED_FIELDS,
    *"""
    packing_strategy max_length overlong truncation_mode bad_rows per_turn share_prefixes tokens_per_rank
    pad_to_multiple_of pad_documents_to_multiple_of document_weighting weight_column source_column on_leak
    enforce_flash_attention neftune_noise_alpha label_smoothing_factor use_liger_kernel
    assistant_only_loss completion_only_loss assistant_turns message_train_key train_empty_thinking
    """.split(),
)


class ConstructedWith:
    """The settings and the model with which a trainer was constructed.

    Args:
        args: the settings of the constructor.
        model: the model that the constructor has prepared.
    """

    def __init__(self, args: SFTConfig, model: nn.Module):
        self._settings = {name: getattr(args, name) for name in FIXED_FIELDS_WITH_PACKING}
        self._model = base_model(model)

    def refuse_changes(self, args: SFTConfig, model: nn.Module, trains: bool = False) -> None:
        """Refuse another model, and changes of settings that the trainer reads only when it is constructed.

        Args:
            args: the settings now.
            model: the model now, without the wrapper of an engine.
            trains: whether training starts. Then all settings that the constructor has read for packing are checked.
                Before an evaluation only `FIXED_FIELDS` are, because evaluation reads settings such as `max_length`
                anew.
        """
        names = FIXED_FIELDS_WITH_PACKING if trains and self._settings["packing"] else FIXED_FIELDS
        # The old and new value of each setting of `names` that was changed
        changed = compare_settings(self._settings, {name: getattr(args, name) for name in names})
        if changed:
            raise ValueError(
                f"`trainer.args` was changed after the trainer was constructed: {describe_changes(changed)}. Labels "
                "are made, documents are cut, and the model and its loss are prepared by these settings when the "
                "trainer is constructed, so the change would not be honoured. Construct the trainer with the new "
                "settings."
            )
        if base_model(model) is not self._model:
            raise ValueError(
                f"`trainer.model` was set to another {type(model).__name__} after the trainer was constructed. The "
                "optimizer would get the parameters of one model and the batches would run on another: the "
                "constructor prepares a model to read packs and to score tokens. Construct a trainer with this model."
            )


def check_replacement(dataset: object, first_dataset: Dataset | IterableDataset, vocab_size: int | None) -> None:
    """Refuse a `train_dataset` that was set after the trainer was constructed, if packing cannot read it.

    Args:
        dataset: the new training set.
        first_dataset: the training set before.
        vocab_size: the size of the vocabulary of the model, or None.
    """
    constructed_kind = _describe_kind(first_dataset)
    new_kind = _describe_kind(dataset)
    if new_kind != constructed_kind:
        raise ValueError(
            f"`trainer.train_dataset` was set to {new_kind}, and the trainer was constructed with {constructed_kind}. "
            "The loader, the collator and the checks of the model were chosen for that kind. Construct a trainer with "
            f"the new dataset, or set `train_dataset` to {constructed_kind}."
        )
    check_rows(dataset, "train")
    if not has_images(dataset):  # rows with images stay as the user gave them, without `input_ids`
        check_prepared(dataset, "train")
    if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
        check_tokenised(dataset, "train", vocab_size, packing=True)


def _describe_kind(dataset: object) -> str:
    """Return how a message names the class of a dataset, and whether it has images."""
    names: dict[type, str] = {Dataset: "a `Dataset`", IterableDataset: "an `IterableDataset`"}
    name = names.get(type(dataset), type(dataset).__name__)
    return f"{name} with images" if has_images(dataset) else name


def check_prepared(dataset: Dataset | IterableDataset, name: str) -> None:
    """Refuse rows without tokens that were set as a dataset of the trainer after it was constructed."""
    columns = get_dataset_column_names(dataset)
    if "input_ids" not in columns:
        raise ValueError(
            f"`trainer.{name}_dataset` was set to rows with the columns {columns}, without `input_ids`. Datasets are "
            "formatted and tokenised when the trainer is constructed, and not again later. Set it to rows of the "
            f"prepared dataset (`trainer.{name}_dataset.select(...)`), to tokenised rows, or construct a trainer with "
            "this dataset."
        )


# Engines


def synchronisation(accelerator: Accelerator, model: nn.Module) -> Synchronisation:
    """Return how often the engine lets ranks wait for each other.

    Returns:
        "step", once in an optimizer step, under DDP and ZeRO-1 (or 0). "micro", in every micro-batch, under everything
        else: ZeRO-2 reduces gradients in every backward, and ZeRO-3 and FSDP gather parameters in every forward.
    """
    if isinstance(model, FSDPModule):  # transformers sharded the model when it was loaded; accelerate does not know it
        return "micro"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "step" if accelerator.deepspeed_plugin.zero_stage < 2 else "micro"
    return "step" if accelerator.distributed_type in DDP else "micro"


def check_one_device(args: SFTConfig) -> None:
    """Refuse several GPUs in one process, for which transformers wraps the model in `DataParallel`.

    TRL refuses them from 1.15 on, at the end of its constructor.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to a single process, so transformers would train with `DataParallel`. It "
            "cuts each batch into parts, also the boundaries of a pack, and runs copies of the model, whose forward is "
            "that of the original. Launch one process per GPU (`accelerate launch` or `torchrun`), or make one GPU "
            "visible with `CUDA_VISIBLE_DEVICES`."
        )


def check_quantisation(model: nn.Module, device_type: str) -> None:
    """Refuse a model in 4 bits on a CPU with bf16 instructions, where bitsandbytes would prepare it for inference only.

    dev/upstream.md describes the defect of bitsandbytes.
    """
    # bitsandbytes sets this attribute on modules that it would convert
    count = sum(bool(getattr(module, "support_avx512bf16_for_cpu", False)) for module in model.modules())
    if count and device_type == "cpu":
        raise ValueError(
            f"The model has {count} modules in 4 bits, and runs on a CPU with bf16 instructions. There, bitsandbytes "
            "changes their weights to a format for inference in the first forward in evaluation mode, which the test "
            "before the first step makes, and gradients are wrong after it. Train it on a GPU, or load it without "
            "`load_in_4bit`."
        )
