"""The trainer: TRL's, with the rooms of this package wired in. It has no rule of its own."""

import copy
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import trl
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch.utils.data import DataLoader
from transformers import (
    DataCollator,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from trl.trainer.utils import get_config_model_id

from ..attention.models import base_model
from ..compat import forget_evaluation
from ..data import checks as dataset_checks
from ..data.cache import cached_documents
from ..data.collator import PackedDataCollator
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.loading import (
    DocumentDataset,
    PackedBatchSampler,
    PaddedBatchSampler,
    document_loader,
)
from ..data.model_costs import cost_model
from ..data.reader import TokenReader, applied_masks, mask_columns
from ..data.spans import drop_untrained
from ..data.stream import PackedStream, resume, stream_loader
from ..data.threads import wait_for_threads_at_exit
from ..isolation.packed_model import PackedModel
from ..planning.costs import CostModel
from ..planning.strategies import STRATEGIES, Strategy
from ..reporting.build import make_report, make_stream_report
from ..reporting.report import PackingReport, add_to_card
from . import bad_rows, checks
from .callbacks import BeforeFirstStep, BeforeTraining, PlanAhead, StreamCallback
from .config import SFTConfig, adopt
from .evaluation import ExactEvaluation
from .noise import DocumentNoise
from .restart import ExactRestart

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDataset: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)


class SFTTrainer(ExactRestart, ExactEvaluation):
    """
    Drop-in replacement for [`trl.SFTTrainer`]: the same arguments, the same dataset forms, packing that keeps documents
    apart. With `packing=False` and `padding_free=False` it trains to the same parameters.

    With `packing=True` (or `padding_free=True`) the tokenised table stays as it is, one row per example; packs are
    planned from lengths, read as spans and flattened to one row of at most `per_device_train_batch_size * max_length`
    tokens that carries its boundaries. See [`SFTConfig`] for the fields of packing.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): as in TRL.
        args ([`SFTConfig`], [`trl.SFTConfig`] or [`~transformers.TrainingArguments`], *optional*):
            TRL's `SFTConfig` keeps its meaning: its default `packing_strategy="bfd"` is bfd. It is not changed.

    All other arguments are those of [`trl.SFTTrainer`]. A `data_collator` is refused with packing.

    Attributes:
        packing_report ([`PackingReport`] or None): what packing did; made when training starts.

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
            # Before TRL's own guard, which refuses `padding_free` with a `max_length`
            args.packing, args.packing_strategy = True, "minibatch"
        if args.packing:
            args.padding_free = False  # a pack has no padding anyway; TRL's branch for it builds another collator
            checks.check_overrides(type(self))
            checks.check_before_loading(args, model, train_dataset, data_collator, peft_config)
        dataset_checks.check_rows(train_dataset, "train")
        self._vocab_size = getattr(checks.model_config(model, args), "vocab_size", None)
        checks.check_prepared_sets(args, train_dataset, eval_dataset, self._vocab_size)
        self.packing_report: PackingReport | None = None
        self._has_own_collator = data_collator is not None
        self._prepares_training_set = True  # TRL prepares it first; an evaluation set may be called "train", too

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

        if self.args.world_size > 1:
            wait_for_threads_at_exit()
        self._padded_collator = self.data_collator
        self.add_callback(BeforeTraining(self))
        if self.args.packing:
            checks.check_parallelism(self.accelerator)
            checks.check_one_device(self.model)
            self.padding_free = True
            self.data_collator = self._packed_collator()
            if isinstance(self.train_dataset, IterableDataset):
                self.add_callback(StreamCallback(self))
            else:
                self._reader = TokenReader(self.train_dataset)
                self._documents = cached_documents(
                    self._reader,
                    args.max_length,
                    args.effective_overlong,
                    args.truncation_mode,
                    wrapped=STRATEGIES[args.packing_strategy].cuts_blocks,
                )
                self.add_callback(PlanAhead(self))
            self.packed_model = self._packed_model()
            self.add_callback(BeforeFirstStep(self))

    # Preparation: TRL tokenises and builds labels; cutting and packing are ours, on spans.

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: SFTConfig,  # type: ignore[override]  # that of this trainer
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
                    masks = applied_masks(dataset, self.completion_only_loss)
                    if masks != mask_columns(dataset):
                        dataset = dataset.remove_columns("completion_mask")
                    if len(masks) < 2:
                        # TRL would write all tokens once more as labels, row by row; the reader makes them
                        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            else:
                dataset_checks.check_raw_dataset(
                    dataset, dataset_name, self._tokenizer, args, is_formatted=formatting_func is not None
                )
        is_evaluated_as_documents = not is_training_set and not self._has_own_collator
        if packing or is_evaluated_as_documents:
            args = copy.copy(args)
            # TRL would cut tokens here, and drop rows in which none is left to train; documents are cut as spans
            args.max_length = None

        def prepare(rows: Any, args: SFTConfig, is_formatted: bool = True) -> Any:
            function = formatting_func if is_formatted else None
            return super(SFTTrainer, self)._prepare_dataset(rows, processing_class, args, False, function, dataset_name)

        # Where documents are counted, rows that are dropped stay as documents without tokens.
        dataset = bad_rows.prepared(dataset, dataset_name, args, prepare, marks=packing and is_training_set)
        if not packing and is_training_set and isinstance(dataset, Dataset):
            dataset = drop_untrained(dataset)
        return dataset

    # Loading

    def _packed_collator(self) -> PackedDataCollator:
        return PackedDataCollator(self.args.pad_to_multiple_of, self._tokenizer.pad_token_id)

    def get_train_dataloader(self) -> DataLoader:
        if not self.args.packing:
            return super().get_train_dataloader()
        if isinstance(self.train_dataset, IterableDataset):
            return self._stream_loader()
        planner = self._planner(self._documents, self.args.packing_strategy)
        self._check_restart(planner)
        self.packing_report = make_report(
            planner, self.args.effective_overlong, self._reader, self.unpacked_counts_first
        )
        dataset = DocumentDataset(self._reader, self._documents, self._tokenizer.pad_token_id)
        return self._loader(dataset, PackedBatchSampler(planner, self.args.process_index), self.data_collator)

    @cached_property
    def _cost_model(self) -> CostModel:  # type: ignore[override]  # declared as an attribute by the part that evaluates
        model = base_model(self.model)
        return cost_model(model.config, type(model))

    def _planner(self, documents: Documents, strategy: Strategy) -> EpochPlanner:
        args = self.args
        return EpochPlanner(
            documents,
            strategy,
            batch_size=self._train_batch_size,  # what `auto_find_batch_size` has arrived at
            max_length=args.max_length or int(documents.lengths.max()),
            accumulation=args.gradient_accumulation_steps,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy != "sequential",
            balance=args.balance,
            drop_last=args.dataloader_drop_last,
            synchronisation=checks.synchronisation(self.accelerator),
            cost_model=self._cost_model,
            writes_cache=args.local_process_index == 0,
        )

    def _loader(
        self, dataset: DocumentDataset, sampler: PackedBatchSampler | PaddedBatchSampler, collate: Callable
    ) -> DataLoader:
        args = self.args
        return document_loader(
            dataset,
            sampler,
            collate,
            self.accelerator.device,
            num_workers=args.dataloader_num_workers,
            pin_memory=self._pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            **self._worker_kwargs,
        )

    @property
    def _pin_memory(self) -> bool:
        return self.args.dataloader_pin_memory and self.accelerator.device.type != "cpu"

    @property
    def _worker_kwargs(self) -> dict[str, Any]:
        return {
            "multiprocessing_context": self.args.dataloader_multiprocessing_context,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            "in_order": self.args.dataloader_in_order,
        }

    # Streams

    def _stream_loader(self) -> DataLoader:
        args = self.args
        assert args.max_length is not None  # a stream is packed by length, and the config was refused without
        stream = PackedStream(
            self.train_dataset,
            batch_size=self._train_batch_size,
            max_length=args.max_length,
            accumulation=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
            overlong=args.effective_overlong,
            truncation_mode=args.truncation_mode,
            balance=args.balance,
            cost_model=self._cost_model,
            synchronisation=checks.synchronisation(self.accelerator),
            vocab_size=self._vocab_size,
            pad_token_id=self._tokenizer.pad_token_id,
            num_workers=args.dataloader_num_workers,
            worker_kwargs=self._worker_kwargs,
        )
        self.packing_report = make_stream_report(stream, args.max_steps)
        return stream_loader(stream, self.data_collator, self.accelerator.device, self._pin_memory)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        if forget_evaluation(self.accelerator, self.model):
            self.model_wrapped = self.model
        # The only place that knows the checkpoint and the loader: a stream goes on from the state saved there.
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        stream = getattr(train_dataloader, "dataset", None)
        if resume_from_checkpoint is not None and isinstance(stream, PackedStream):
            args, step = self.args, self.state.global_step
            num_skipped = step % max_steps * args.gradient_accumulation_steps
            resume(stream, resume_from_checkpoint, step, num_skipped, args.ignore_data_skip)
        return model, loader

    def create_model_card(  # type: ignore[override]  # TRL's signature, which is not transformers'
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        if self.packing_report is not None and self.is_world_process_zero():
            add_to_card(Path(str(self.args.output_dir)) / "README.md", self.packing_report)

    # Attention

    def _packed_model(self) -> PackedModel:
        args = self.args
        return PackedModel(
            self.model,
            self._compute_dtype(),
            args.device.type,
            args.max_length,
            args.on_leak,
            args.enforce_flash_attention,
            []
            if args.neftune_noise_alpha is None
            else [DocumentNoise(base_model(self.model), args.neftune_noise_alpha)],
        )

    def _compute_dtype(self) -> torch.dtype:
        """The dtype that reaches the attention kernel: that of autocast, else that of the weights."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else base_model(self.model).dtype
