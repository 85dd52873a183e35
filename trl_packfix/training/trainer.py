"""`SFTTrainer`, whose overrides of TRL say which of its parts is called, and when TRL's own method is."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import trl
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch import nn
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
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from trl.data_utils import get_dataset_column_names
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from trl.trainer.utils import get_config_model_id

from ..attention.models import base_model
from ..compat import (
    compiles_checkpointed_layers,
    forget_evaluation,
    load_renamed_weights,
    name_wrapped_layers,
    save_varlen_attention,
    summed_once,
    whole_model_saved,
)
from ..data.dataset_checks import check_tokenised
from ..data.reader import mask_columns, without_ignored_mask
from ..isolation.packed_model import PackedModel
from ..reporting.report import PackingReport, complete_card, is_on_hub
from ..samples.apply import make_samples
from ..samples.checks import check_rows, has_transform, without_format
from ..samples.images import count_turns_of_images, masking_collator
from ..samples.named_images import with_named_images
from ..samples.turns import TurnRule
from . import checks
from .callbacks import AdaptersLearn, BeforeFirstStep, BeforeTraining, StreamCallback
from .config import SFTConfig, adopt
from .evaluation import Evaluation
from .first_step import FirstStep
from .foreign_keys import with_hints
from .loading import TrainingData, unpacked_rows
from .objective import Objective, check_one_document_per_row
from .progress import say_deepspeed_offloads
from .restart import Restart
from .user_code import UserCode

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDataset: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)


class SFTTrainer(trl.SFTTrainer):
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
        packing_report ([`PackingReport`] or None): what packing did. None until training starts, and without packing.
        packed_model: what packed batches run on; only with packing.

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
    >>> trainer.packing_report.isolation.passed
    True
    """

    args: SFTConfig
    model: nn.Module
    packing_report: PackingReport | None
    packed_model: PackedModel
    data: TrainingData
    training_objective: Objective  # transformers sets `objective` in a search of hyperparameters
    user_code: UserCode
    evaluation: Evaluation
    restart: Restart

    @partial(with_hints, fields=SFTConfig.__dataclass_fields__)
    def __init__(  # noqa: PLR0913 - the signature of TRL
        self,
        model: "str | PreTrainedModel | PeftModel",
        args: SFTConfig | trl.SFTConfig | TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        given["args"] = args = adopt(args, f"{name.split('/')[-1]}-SFT")
        if args.padding_free and not args.packing:
            # TRL's own check would refuse `padding_free` with a `max_length`
            args.packing, args.packing_strategy = True, "minibatch"
        train_dataset, eval_dataset = without_format(train_dataset), without_format(eval_dataset)
        if formatting_func is None and (processing_class is None or isinstance(processing_class, ProcessorMixin)):
            train_dataset = with_named_images(train_dataset, "train")
            eval_dataset = with_named_images(eval_dataset, "eval")
        given["train_dataset"], given["eval_dataset"] = train_dataset, eval_dataset
        checks.check_before_loading(checks.setup_of(type(self), given))
        if args.use_liger_kernel:  # as TRL does from 1.16 on: its default is a loss that replaces the model's forward
            args.liger_kernel_config = (args.liger_kernel_config or {}) | {"fused_linear_cross_entropy": False}
        checks.check_datasets(args, train_dataset, eval_dataset, is_formatted=formatting_func is not None)
        if args.packing:
            args.padding_free = False  # packs have no padding; TRL would build another collator for it
        self.packing_report = None
        self.data = data = TrainingData(self, args, model, train_dataset=train_dataset, eval_dataset=eval_dataset)
        self.training_objective = Objective(self, data, compute_loss_func)
        self.user_code = UserCode(self, SFTTrainer, self.training_objective.dummy_loss)
        self.evaluation = Evaluation(self, data, self.training_objective, own=SFTTrainer)
        self.restart = Restart(self, data)
        self._has_own_collator = data_collator is not None
        self._prepares_training_set = True  # the first that TRL prepares; an evaluation set may be named "train", too
        self._assistant_only = args.assistant_only_loss
        save_varlen_attention()
        # TRL would refuse packs with images, and most templates; what it does with both is done here
        packing, args.packing, args.assistant_only_loss = args.packing, args.packing and not data.packs_images, False
        super().__init__(**given)
        args.packing, args.assistant_only_loss = packing, self._assistant_only
        name_wrapped_layers(getattr(self.accelerator.state, "fsdp_plugin", None), self.model)
        if self._assistant_only and isinstance(self.data_collator, DataCollatorForVisionLanguageModeling):
            rule = TurnRule.of(args)
            self.data_collator = masking_collator(self.data_collator, rule)
            data.trained = replace(data.trained, counts=count_turns_of_images(train_dataset, rule))
        data.attach()
        self.training_objective.attach()
        self.add_callback(BeforeTraining(self, data, self.training_objective, evaluation=self.evaluation))
        self.add_callback(AdaptersLearn())
        if args.packing:
            if isinstance(self.train_dataset, IterableDataset):
                self.add_callback(StreamCallback(self, data))
            step = partial(SFTTrainer.training_step, self)
            self.first_step = FirstStep(self, data, self.training_objective, training_step=step)
            self.add_callback(BeforeFirstStep(self, data, self.first_step))

    # TRL tokenises and builds labels. Cutting and packing come later, on spans.

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: SFTConfig,  # type: ignore[override]  # narrower than TRL's
        packing: bool,
        formatting_func: Callable[[dict[str, Any]], str] | None,
        dataset_name: str,
    ) -> AnyDataset:
        is_training_set, self._prepares_training_set = self._prepares_training_set, False
        args = copy.copy(args)
        args.assistant_only_loss = self._assistant_only
        dataset = without_format(dataset)  # that of `evaluate` was not given before
        check_rows(dataset, dataset_name)
        is_tokenised = "input_ids" in get_dataset_column_names(dataset)
        if is_tokenised and isinstance(dataset, Dataset):
            check_tokenised(dataset, dataset_name, self.data.vocab_size, packing=packing)
            if packing and formatting_func is None and "labels" not in dataset.column_names:
                dataset = without_ignored_mask(dataset, self.completion_only_loss)
                if len(mask_columns(dataset)) < 2:
                    # TRL would write all tokens a second time as labels, row by row. The reader makes them instead.
                    return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
        if not is_tokenised and not has_transform(dataset):  # TRL refuses a transform
            completion_only_loss = self.completion_only_loss
            if is_training_set and args.completion_only_loss is None:
                completion_only_loss = True  # of each row with a completion; TRL chooses by the first row
            made = make_samples(
                dataset,
                dataset_name,
                args,
                tokenizer=processing_class,
                completion_only_loss=completion_only_loss,
                formatting_func=formatting_func,
                # With packing, dropped training rows stay as documents without tokens, so that they are counted.
                marks=packing and is_training_set,
                is_training_set=is_training_set,
            )
            self.chat_template = made.recipe.chat_template or self.chat_template  # TRL's attribute
            dataset, formatting_func = made.rows, None
            if is_training_set:
                self.data.report = made.data
                self.data.turns, self.data.trained = made.turns, replace(self.data.trained, counts=made.masked)
        if packing or (not is_training_set and not self._has_own_collator):
            # TRL would truncate here, and drop rows without a trained token. Documents are cut later, as spans.
            args.max_length = None
        given = dataset
        dataset = super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)
        return dataset if packing or not is_training_set else unpacked_rows(dataset, given, dataset_name, args=args)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: Any = self._signature_columns or []
        values = [self.args.weight_column, self.args.source_column]
        self._signature_columns = known + [name for name in values if name is not None and name not in known]

    # Training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As [`~transformers.Trainer.train`], but it resumes only from a whole checkpoint with the same documents.

        Args:
            resume_from_checkpoint: a folder, `True` for the newest whole checkpoint in `output_dir`, or "newest",
                which starts a new run if `output_dir` has no checkpoint.
            trial, ignore_keys_for_eval: as in transformers.

        Raises:
            ValueError: the checkpoint is unfinished or damaged, or the remaining batches of its epoch would differ.
        """
        resume_from_checkpoint = self.restart.choose(resume_from_checkpoint)
        say_deepspeed_offloads(self.accelerator)
        try:
            with compiles_checkpointed_layers(self.args), self.user_code.without_dummies():
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:  # transformers calls no callback for a run that fails
            if self.args.packing:
                self.packed_model.rest()  # gives the model back its own attention

    def get_train_dataloader(self) -> DataLoader[Any]:
        self.data.start()
        loader = self.data.packed_loader() if self.args.packing else super().get_train_dataloader()
        self.restart.check_training_set()
        return loader

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader[Any]]:
        if forget_evaluation(self.accelerator, self.model):
            self.model_wrapped = self.model
        self.training_objective.start()
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # The only method that has both the checkpoint and the loader
        self.restart.resume_stream(resume_from_checkpoint, max_steps)
        return model, loader

    # The Trainer assumes that all epochs have the same number of steps.

    def set_initial_training_values(self, *arguments: Any) -> tuple[Any, ...]:
        return self.restart.training_values(super().set_initial_training_values(*arguments))

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        return self.restart.position(super()._init_training_state(*arguments))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        num_steps = self.restart.steps_of(kwargs["epoch"])
        if num_steps is not None:
            micro_batches = num_steps * self.args.gradient_accumulation_steps
            kwargs |= {"num_update_steps_per_epoch": num_steps, "steps_in_epoch": micro_batches}
        super()._run_epoch(*args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.training_objective.take_values(inputs)
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with summed_once(self.training_objective.summed_by_ranks):
            return super().training_step(*args, **kwargs)

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        # Where FSDP defers it, a gradient accumulates out of the reach of `summed_once`
        with nullcontext() if self.training_objective.summed_by_ranks else super()._defer_fsdp_gradient_reduction():
            yield

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if self.model.training and self.training_objective.is_ours:
            return self.training_objective.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        check_one_document_per_row(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        if self.args.packing and self.state.global_step >= self.state.max_steps:
            # Resumed after its last step: transformers checks `max_steps` only after a step
            self.control.should_training_stop = True
            return [], None
        self.training_objective.totals.start_fetch()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.training_objective.same_pack.check(batches)
        self.user_code.begin_step(batches)
        if self.args.packing:
            self.first_step.compare_longer(batches)
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        count = super()._get_num_items_in_batch
        return self.training_objective.count_step(batch_samples, device, lambda batches: count(batches, device))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        # transformers gathers over ranks in every micro-batch, and takes a pad token inside a document for padding
        if not self.training_objective.is_ours:
            super()._track_num_input_tokens(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.training_objective.add_metrics(logs, start_time)
        super().log(logs, start_time)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.data.constructed_with.check(self.args, model)
        sets: Any = self.eval_dataset  # a dataset, or several by name
        dataset = sets if eval_dataset is None else eval_dataset
        dataset = sets[dataset] if isinstance(dataset, str) else dataset
        loader = self.evaluation.loader(dataset, needs_logits=self.compute_metrics is not None, prepares=True)
        return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader[Any]:
        loader = self.evaluation.loader(test_dataset, needs_logits=True, prepares=False)
        return super().get_test_dataloader(test_dataset) if loader is None else loader

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        loop = partial(super().evaluation_loop, dataloader, description, loss_only, ignore_keys, metric_key_prefix)
        return self.evaluation.run(loop, dataloader, loss_only, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        if self.evaluation.is_exact:
            return self.evaluation.predict(model, inputs, prediction_loss_only)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As [`~transformers.Trainer.save_model`], whole under FSDP, too. All ranks must call it."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        with nullcontext() if _internal_call else whole_model_saved(plugin):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.restart.begin_checkpoint(trial)
        self.training_objective.gather_totals()  # tokens since the last log count, too
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.restart.end_checkpoint(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.restart.read_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.restart.read_from = self.state.best_model_checkpoint
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        if load_result.unexpected_keys:  # transformers saves some weights under other names than the model has
            load_renamed_weights(base_model(self.model), str(self.restart.read_from))
        else:
            super()._issue_warnings_after_load(load_result)

    def create_model_card(  # type: ignore[override]  # TRL's signature, which is not transformers'
        self, model_name: str | None = None, dataset_name: Any = None, tags: str | list[str] | None = None
    ) -> None:
        datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or ())
        folder = Path(str(self.args.output_dir))
        published: Any = [name for name in datasets if is_on_hub(name)] or None
        super().create_model_card(model_name or folder.name, published, tags)
        if self.is_world_process_zero():
            complete_card(folder / "README.md", self.model, datasets, report=self.packing_report)
