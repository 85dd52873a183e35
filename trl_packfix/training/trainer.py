"""`SFTTrainer`: its constructor, the preparation of datasets, and the model card. Its bases hold the rest."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import trl
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from transformers import (
    DataCollator,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from trl.data_utils import get_dataset_column_names
from trl.trainer.utils import get_config_model_id

from ..data import dataset_checks
from ..data.reader import mask_columns, without_ignored_mask
from ..data.spans import drop_untrained
from ..reporting.report import add_to_card
from . import bad_rows, checks, messages, per_turn
from .callbacks import BeforeFirstStep, BeforeTraining, StreamCallback
from .config import SFTConfig, adopt
from .repeats import Repeats
from .restart import ExactRestart

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDataset: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)


class SFTTrainer(ExactRestart):
    """
    Drop-in replacement for [`trl.SFTTrainer`]: the same arguments, the same dataset forms, packing that keeps documents
    apart. With `packing=False` and `padding_free=False` it trains to the same parameters.

    With `packing=True` (or `padding_free=True`) the tokenised table stays as it is, one row per example; packs are
    planned from lengths and read as spans. Each is one row of at most `per_device_train_batch_size * max_length`
    tokens, with its document boundaries. See [`SFTConfig`] for the fields of packing.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): as in TRL.
        args ([`SFTConfig`], [`trl.SFTConfig`] or [`~transformers.TrainingArguments`], *optional*):
            TRL's `SFTConfig` keeps its meaning: its default `packing_strategy="bfd"` is bfd. It is not modified.

    All other arguments are those of [`trl.SFTTrainer`]. A `data_collator` is refused with packing.

    Attributes:
        packing_report ([`PackingReport`] or None): what packing did. None until training starts.

    Example:

    >>> from datasets import load_dataset
    >>> from trl_packfix import SFTConfig, SFTTrainer
    >>> trainer = SFTTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     args=SFTConfig("output", packing=True),
    ...     train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    ... )
    >>> output = trainer.train()  # doctest: +ELLIPSIS
    Packing report
    ...
    >>> trainer.packing_report.isolation.isolated
    True
    """

    def __init__(  # noqa: PLR0913 - the signature of TRL
        self,
        model: "str | PreTrainedModel | PeftModel",
        args: SFTConfig | trl.SFTConfig | TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[dict], str] | None = None,
    ):
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = adopt(args, f"{name.split('/')[-1]}-SFT")
        if args.padding_free and not args.packing:
            # TRL's own check would refuse `padding_free` with a `max_length`
            args.packing, args.packing_strategy = True, "minibatch"
        per_turn.check_per_turn(args, train_dataset, eval_dataset, formatting_func)
        if args.packing:
            args.padding_free = False  # packs have no padding; TRL would build another collator for it
            checks.check_overrides(type(self))
            checks.check_share_prefixes(args, compute_loss_func)
            checks.check_before_loading(args, model, train_dataset, data_collator, peft_config, processing_class)
            checks.check_sequence_parallelism(args, model, compute_loss_func)
        dataset_checks.check_rows(train_dataset, "train")
        checks.check_row_columns(args, train_dataset, data_collator)
        self._has_own_collator = data_collator is not None
        self._prepares_training_set = (
            True  # the first set that TRL prepares; an evaluation set may be named "train", too
        )

        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )

        self.add_callback(BeforeTraining(self))
        if args.packing:
            if isinstance(self.train_dataset, IterableDataset):
                self.add_callback(StreamCallback(self))
            self.add_callback(BeforeFirstStep(self))

    # TRL tokenises and builds labels. Cutting and packing come later, on spans.

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: SFTConfig,  # type: ignore[override]  # narrower than TRL's
        packing: bool,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> AnyDataset:
        is_training_set, self._prepares_training_set = self._prepares_training_set, False
        dataset_checks.check_rows(dataset, dataset_name)
        if isinstance(dataset, Dataset):
            if "input_ids" in dataset.column_names:
                dataset_checks.check_tokenised(dataset, dataset_name, self._vocab_size, packing)
                if packing and formatting_func is None and "labels" not in dataset.column_names:
                    dataset = without_ignored_mask(dataset, self.completion_only_loss)
                    if len(mask_columns(dataset)) < 2:
                        # TRL would write all tokens a second time as labels, row by row. The reader makes them instead.
                        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            else:
                dataset_checks.check_raw_dataset(
                    dataset, dataset_name, self._tokenizer, args, is_formatted=formatting_func is not None
                )
        if formatting_func is None and "input_ids" not in get_dataset_column_names(dataset):
            dataset = messages.with_chat_roles(dataset, dataset_name)
            if is_training_set and args.process_index == 0:
                template = getattr(self, "chat_template", None)
                messages.say_what_is_left_out(dataset, dataset_name, processing_class, template, args.per_turn)
        is_evaluated_as_documents = not is_training_set and not self._has_own_collator
        if args.per_turn and "input_ids" not in get_dataset_column_names(dataset):
            marks = packing and is_training_set
            dataset, counts = per_turn.split_turns(
                dataset, dataset_name, args, processing_class, marks, is_training_set
            )
            self._turns = counts if is_training_set else self._turns
        if packing or is_evaluated_as_documents:
            args = copy.copy(args)
            # TRL would truncate here, and drop rows without a trained token. Documents are cut later, as spans.
            args.max_length = None

        def prepare(rows: Any, args: SFTConfig, is_formatted: bool = True) -> Any:
            function = formatting_func if is_formatted else None
            return super(SFTTrainer, self)._prepare_dataset(rows, processing_class, args, False, function, dataset_name)

        # With packing, dropped training rows stay as documents without tokens, so that they are counted.
        with Repeats() as repeats:
            dataset = bad_rows.prepared(dataset, dataset_name, args, prepare, marks=packing and is_training_set)
        repeats.say(dataset_name)
        if not packing and is_training_set and isinstance(dataset, Dataset):
            dataset = drop_untrained(dataset)
        return dataset

    def create_model_card(  # type: ignore[override]  # TRL's signature, which is not transformers'
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        if self.packing_report is not None and self.is_world_process_zero():
            add_to_card(Path(str(self.args.output_dir)) / "README.md", self.packing_report)
