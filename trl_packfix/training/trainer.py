"""`SFTTrainer`: the outline of a training run, from the constructor to the model card.

The class overrides methods of TRL's `SFTTrainer` and of transformers' `Trainer`. Each override calls one of the parts
below and then, in most cases, the method that it overrides. The parts hold the trainer and do the work:

    data                 `loading.py`     the documents of the training set, the loaders, the packed model
    training_objective   `objective.py`   the loss of a micro-batch, the counts of an optimizer step, the log
    user_code            `user_code.py`   which batches the losses and steps of the user's own code get
    evaluation           `evaluation.py`  every document once, metrics from the totals of a whole set
    restart              `restart.py`     what a checkpoint says of the trained documents, and how a run continues

A training run goes from top to bottom through this file:

    1. The constructor checks the settings and lets TRL load the model. TRL calls `_prepare_dataset` for each dataset,
       which tokenises the rows. Rows are cut into documents later, and documents are packed later.
    2. `train` chooses the checkpoint. transformers calls `get_train_dataloader`, which plans the packs.
    3. Before the first optimizer step the callbacks prove on the user's model that documents in packs do not influence
       each other (`callbacks.py`).
    4. For each optimizer step transformers fetches micro-batches and counts their trained tokens (`get_batch_samples`).
       For each micro-batch it calls `training_step`, which calls `compute_loss`.
    5. Evaluation and checkpoints come between optimizer steps.

Words: a *row* is an example of the user's dataset; a *document* is one training example as the model reads it, a row or
a part of a row; a *pack* is one sequence of several documents that the model reads together.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
    compiles_layers_of_packs,
    forget_evaluation,
    load_renamed_weights,
    name_wrapped_layers,
    saves_varlen_attention,
    summed_once,
    train_mode_kept,
    whole_model_saved,
)
from ..data.dataset_checks import check_tokenised
from ..data.reader import mask_columns, without_ignored_mask
from ..isolation.packed_model import PackedModel
from ..reporting.report import PackingReport, complete_card, is_on_hub
from ..samples.checks import check_rows, has_transform, without_format
from ..samples.image_support import image_support
from ..samples.make_samples import make_samples
from ..samples.turns import TurnRule, trains_only_completions
from . import checks
from .callbacks import BeforeFirstStep, BeforeTraining, CheckAdapterGradients
from .compiled_layers import CompileLayers
from .config import SFTConfig, adopt_args
from .evaluation import Evaluation
from .first_step import FirstStep
from .foreign_keys import with_hints
from .loading import TrainingData, unpacked_rows
from .memory import MeasureMemory
from .objective import Objective, refuse_shared_prefixes
from .progress import announce_deepspeed_offloading
from .restart import Restart
from .trainer_view import attributes_set
from .user_code import UserCode

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDataset: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)


class SFTTrainer(trl.SFTTrainer):
    """
    Drop-in replacement for [`trl.SFTTrainer`]. It takes the same arguments and the same forms of datasets, and its
    packing keeps documents apart. With `packing=False` and `padding_free=False` it trains to the same parameters.

    With `packing=True` (or `padding_free=True`) the tokenised table stays as it is, one row per example. Packs are
    planned from the lengths of its documents. A pack becomes a batch of shape (1, T) with the boundaries of its
    documents, where T is at most `per_device_train_batch_size * max_length`. See [`SFTConfig`] for the fields of
    packing.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): as in TRL.
        args ([`SFTConfig`], [`trl.SFTConfig`] or [`~transformers.TrainingArguments`], *optional*):
            The settings, which are not modified. In TRL's `SFTConfig`, fields that the user leaves unset keep TRL's
            defaults (`packing_strategy="bfd"`).

    All other arguments are those of [`trl.SFTTrainer`]. A `data_collator` is refused with packing.

    Attributes:
        packing_report ([`PackingReport`] or None): what packing did. None until training starts, and without packing.
        packed_model: makes the model compute the documents of a pack separately; only with packing.

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

    # `with_hints` wraps the constructor: if it gets an argument that only another trainer has, it raises a TypeError
    # that says what to set here
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
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}

        # 1. Settings and datasets are checked before anything is loaded or tokenised.
        model_name = model if isinstance(model, str) else get_config_model_id(model.config)
        # An `SFTConfig` of this package with the values of the given config, which is not changed
        args = adopt_args(args, default_output_dir=f"{model_name.split('/')[-1]}-SFT")
        if args.padding_free and not args.packing:
            # TRL's own check would refuse `padding_free` with a `max_length`. With "minibatch" the documents of each
            # micro-batch of unpacked training make one pack, as with `padding_free` in TRL
            args.packing = True
            args.packing_strategy = "minibatch"
        train_dataset = without_format(train_dataset)  # rows of Python objects, whatever `set_format` has set
        eval_dataset = without_format(eval_dataset)
        may_have_processor = processing_class is None or isinstance(processing_class, ProcessorMixin)
        if may_have_processor and formatting_func is None:
            # Images that messages name by a path become a column of images, as TRL's vision collator reads it
            train_dataset = image_support().with_named_images(train_dataset, "train")
            eval_dataset = image_support().with_named_images(eval_dataset, "eval")
        arguments |= {"args": args, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
        # The class is checked, too, because a subclass may have a sampler of its own
        checks.check_before_loading(checks.settings_of_trainer(type(self), arguments))
        if args.use_liger_kernel:
            # This package computes the loss, so Liger must not replace the model's forward by one that computes it, as
            # it does by default. TRL does the same from 1.16 on
            args.liger_kernel_config = (args.liger_kernel_config or {}) | {"fused_linear_cross_entropy": False}
        checks.check_datasets(args, train_dataset, eval_dataset, is_formatted=formatting_func is not None)
        if args.packing:
            # For `padding_free` TRL would build its own collator of packs
            args.padding_free = False

        # 2. The parts are made before TRL is constructed, because TRL prepares the datasets in its constructor.
        self.packing_report = None
        self.data = data = TrainingData(self, args, model, train_dataset=train_dataset, eval_dataset=eval_dataset)
        self.training_objective = Objective(self, data, compute_loss_func)
        # `UserCode` compares the trainer with `SFTTrainer` to find the methods that the user has replaced. It keeps
        # dummies from the user's code. A dummy is a batch without a trained token: a rank that has no document in a
        # micro-batch runs it, because all ranks must run the model. `dummy_loss` computes its loss, which is 0
        self.user_code = UserCode(self, SFTTrainer, self.training_objective.dummy_loss)
        self.evaluation = Evaluation(self, data, self.training_objective)
        self.restart = Restart(self, data)
        self._has_user_collator = data_collator is not None
        self._flops_per_token: int | None = None  # by transformers' rule; None: not counted in this training
        # Whether the next dataset that TRL prepares is the training set, which comes first. The name of a dataset does
        # not say it, because the user may give an evaluation set the name "train".
        self._is_training_set_next = True
        self._assistant_only_loss = args.assistant_only_loss

        # 3. TRL loads the model, adds adapters and prepares the datasets. It would refuse packs with images, and
        # `assistant_only_loss` with most chat templates. This package does both itself, and hides the settings.
        values_for_trl: dict[str, Any] = {
            "packing": args.packing and data.reading_class.is_text_only,
            "assistant_only_loss": False,
        }
        if args.packing:
            # Without these two values, accelerate does not compile the whole model. `CompileLayers` compiles its
            # layers.
            values_for_trl |= {"torch_compile_backend": None, "torch_compile_mode": None}
        # In the first context `args` has the values for TRL in place of the true ones. In the second one, TRL adds the
        # attention of packs to the operators whose outputs its selective checkpointing saves. So it runs once.
        with attributes_set(args, **values_for_trl), saves_varlen_attention():
            super().__init__(**arguments)

        # 4. The model is loaded and the datasets are tokenised. The parts prepare both for this run. Some models name
        # layers for FSDP that they do not have; `name_wrapped_layers` leaves these out.
        name_wrapped_layers(getattr(self.accelerator.state, "fsdp_plugin", None), self.model)
        if self._assistant_only_loss and isinstance(self.data_collator, DataCollatorForVisionLanguageModeling):
            # Rows with images are tokenised by the collator, so the collator masks what is not trained.
            trained_turns = TurnRule.from_args(args)  # says which turns of a conversation are trained
            self.data_collator = image_support().masking_collator(self.data_collator, trained_turns)
            counts_of_turns = image_support().count_turns(train_dataset, trained_turns)
            data.trained_summary = replace(data.trained_summary, counts=counts_of_turns)  # for the packing report
        data.prepare_run()  # reads the training set, and makes the collators and the packed model
        self.training_objective.prepare_model()  # adds the fused LM head, and makes the totals for the log

        # 5. Callbacks run the proofs before training and before the first optimizer step.
        self.add_callback(BeforeTraining(self, data, self.training_objective, evaluation=self.evaluation))
        self._adapter_check = CheckAdapterGradients()
        self.add_callback(self._adapter_check)
        if args.packing:
            # `source` is the training set, a table or a stream. A stream has a callback of its own
            for callback in data.source.callbacks():
                self.add_callback(callback)
            # The comparison runs the method of this class. What a subclass adds, such as counters, must not run in it.
            training_step = partial(SFTTrainer.training_step, self)
            self.first_step = FirstStep(self, data, self.training_objective, training_step=training_step)
            self.add_callback(BeforeFirstStep(self, data, self.first_step))
            self._compile_layers = CompileLayers(self)
            self.add_callback(self._compile_layers)
            self.add_callback(MeasureMemory(self, data))

    # Datasets. TRL calls these in its constructor, and for a dataset that is given to `evaluate`.

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: SFTConfig,  # type: ignore[override]  # narrower than TRL's
        packing: bool,
        formatting_func: Callable[[dict[str, Any]], str] | None,
        dataset_name: str,
    ) -> AnyDataset:
        """Tokenise a dataset and build its labels, without packing it, and without cutting rows that will be packed.

        Rows are cut into documents later (`data/documents.py`), so that what is cut can be counted.

        Returns:
            The rows with `input_ids` and `labels`. With packing, a table that is tokenised already and has no labels is
            returned without labels, shuffled if `shuffle_dataset` is set. The reader of the table makes them.

        Raises:
            ValueError: a row or a column cannot be trained; the message names the first rows.
        """
        is_training_set = self._is_training_set_next
        self._is_training_set_next = False
        args = copy.copy(args)
        args.assistant_only_loss = self._assistant_only_loss  # the constructor has hidden it from TRL
        dataset = without_format(dataset)  # the constructor has not seen a dataset that is given to `evaluate`
        check_rows(dataset, dataset_name)
        is_tokenised = "input_ids" in get_dataset_column_names(dataset)

        # A tokenised table is checked.
        if is_tokenised and isinstance(dataset, Dataset):
            check_tokenised(dataset, dataset_name, self.data.vocab_size, packing=packing)
            if packing and formatting_func is None and "labels" not in dataset.column_names:
                # TRL would write the tokens a second time as labels, row by row. With packing this is not needed: the
                # reader of the table makes the same labels from the tokens and one mask.
                dataset = without_ignored_mask(dataset, self.completion_only_loss)  # a mask that TRL would not read
                # Two masks (`completion_mask` and `assistant_masks`) are left to TRL, which combines them.
                if len(mask_columns(dataset)) < 2:
                    return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

        # Other rows are tokenised here. A dataset with a transform is not: TRL gets it below, and raises the error.
        if not is_tokenised and not has_transform(dataset):
            # Whether only the completion of a row is trained, if the row has one. In a training set each row decides by
            # its own columns. `self.completion_only_loss` is TRL's decision for all rows, by the first row
            only_completions = trains_only_completions(args) if is_training_set else self.completion_only_loss
            prepared = make_samples(
                dataset,
                dataset_name,
                args,
                tokenizer=processing_class,
                completion_only_loss=only_completions,
                formatting_func=formatting_func,
                # With packing, dropped training rows stay as documents without tokens, so that they are counted.
                keeps_bad_rows=packing and is_training_set,
                is_training_set=is_training_set,
            )
            self.chat_template = prepared.recipe.chat_template or self.chat_template  # TRL's attribute
            dataset = prepared.rows
            formatting_func = None
            if is_training_set:
                # Three findings for the packing report: whether all texts are in the tokens, into how many samples
                # conversations were split, and how many assistant turns are trained.
                self.data.data_report = prepared.data
                self.data.turn_counts = prepared.turns
                self.data.trained_summary = replace(self.data.trained_summary, counts=prepared.assistant_turns)

        # TRL shuffles the rows. With a `max_length` it would also truncate them, and drop rows without a trained token.
        # This package does so later, when it cuts rows into documents: with packing, and in evaluation with its own
        # collator.
        is_evaluated_as_documents = not is_training_set and not self._has_user_collator
        if packing or is_evaluated_as_documents:
            args.max_length = None
        prepared_by_trl = super()._prepare_dataset(
            dataset, processing_class, args, False, formatting_func, dataset_name
        )
        if packing or not is_training_set:
            return prepared_by_trl
        # Drop the rows of a table without a trained token. From `uncut` only the number of rows is read: the warning
        # also counts the rows that TRL has dropped
        return unpacked_rows(prepared_by_trl, uncut=dataset, name=dataset_name, args=args)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns with weights and sources of rows, which transformers would remove."""
        super()._set_signature_columns_if_needed()
        known: Any = self._signature_columns or []
        values = [self.args.weight_column, self.args.source_column]
        self._signature_columns = known + [name for name in values if name is not None and name not in known]

    # The start of training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as [`~transformers.Trainer.train`] does; resume only from a whole checkpoint with the same documents.

        Args:
            resume_from_checkpoint: a folder, `True` for the newest whole checkpoint in `output_dir`, or "newest",
                which starts a new run if `output_dir` has no checkpoint.
            trial, ignore_keys_for_eval: as in transformers.

        Raises:
            ValueError: the checkpoint is unfinished or damaged, or the remaining batches of its epoch would differ.
        """
        checkpoint = self.restart.choose_checkpoint(resume_from_checkpoint)
        # Print a line if DeepSpeed is going to compile its optimizer, which may take minutes
        announce_deepspeed_offloading(self.accelerator)
        try:
            # First context: settings with which torch can compile layers that read the boundaries of packs. Second: a
            # loss or step of the user must not get dummies, because a mean over their trained tokens would be 0 / 0.
            compiles = self.args.packing and self.args.torch_compile
            with compiles_layers_of_packs(compiles), self.user_code.without_dummies():
                return super().train(checkpoint, trial, ignore_keys_for_eval)
        finally:
            # Not in a callback, because transformers calls none for a run that fails
            self._adapter_check.undo()
            if self.args.packing:
                self.packed_model.restore_own_attention()
                self._compile_layers.undo()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights, and note the folder for `_issue_warnings_after_load`."""
        self.restart.weights_folder = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load weights that transformers has saved under other names than the model has. transformers only warns."""
        if load_result.unexpected_keys:
            load_renamed_weights(base_model(self.model), str(self.restart.weights_folder))
        else:
            super()._issue_warnings_after_load(load_result)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of packs, or TRL's loader without packing. Plans the packs of the first epoch."""
        self.data.refresh_training_set()  # reads `train_dataset` again if the user has replaced it
        loader = self.data.packed_loader() if self.args.packing else super().get_train_dataloader()
        # After a restart, continue the plan of packs of the checkpoint. Batches or a loss that would differ are refused
        self.restart.check_training_set()
        return loader

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader[Any]]:
        """Let transformers wrap the model in its engine, and set a stream to the position of the checkpoint.

        transformers has no other method that gets both the checkpoint and the loader.
        """
        # accelerate marks a model that it has prepared for evaluation, and would then not wrap it for DDP. So the mark
        # is removed, and with it the wrapper of the evaluation.
        was_marked = forget_evaluation(self.accelerator, self.model)
        if was_marked:
            self.model_wrapped = self.model
        self.training_objective.start_training()
        self._flops_per_token = None
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self.data.source.resume_loader(resume_from_checkpoint)
        return model, loader

    # The three methods below tell transformers the number of optimizer steps of each epoch. transformers assumes that
    # all epochs have the same number. An epoch that resumes on another number of ranks has another number, because its
    # remaining documents are planned anew.

    def set_initial_training_values(self, *arguments: Any) -> tuple[Any, ...]:
        """Return the values that transformers computes, with the numbers of epochs and steps of the planned packs."""
        values = super().set_initial_training_values(*arguments)  # first the number of epochs, last that of steps
        return self.data.source.correct_training_values(values)

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        """Return the epoch in which a run resumes, and how many of its micro-batches were trained."""
        epoch, num_micro_batches = super()._init_training_state(*arguments)
        return self.data.source.resume_position((epoch, num_micro_batches))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch with the number of optimizer steps that its plan has."""
        num_steps = self.data.source.num_steps_of_epoch(kwargs["epoch"])
        if num_steps is not None:  # the epoch has another number of steps than transformers assumes
            micro_batches = num_steps * self.args.gradient_accumulation_steps
            kwargs |= {"num_update_steps_per_epoch": num_steps, "steps_in_epoch": micro_batches}
        super()._run_epoch(*args, **kwargs)

    # One optimizer step. transformers fetches its micro-batches and counts their tokens. Then, for each micro-batch, it
    # calls `training_step`, which prepares the inputs and computes the loss.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Fetch the micro-batches of an optimizer step.

        Returns:
            The micro-batches, and the number of trained tokens in them over all ranks; None if the loss needs no such
            number.
        """
        if self.args.packing and self.state.global_step >= self.state.max_steps:
            # The run was resumed after its last step. transformers compares `max_steps` only after a step.
            self.control.should_training_stop = True
            return [], None
        self.training_objective.totals.start_fetch_timer()  # the log says how long training waits for batches
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        # First, ranks that share a pack check that they have read the same pack. Then the batches on which the user's
        # code will run are counted, all but dummies. At last, `compare_longer` looks for a document that is at least
        # twice as long as any that it has compared. It computes this document in a pack and by itself, and compares.
        self.training_objective.compare_packs(batches)
        self.user_code.count_batches_for_user_code(batches)
        if self.args.packing:
            self.first_step.compare_longer(batches)
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Count the trained tokens of an optimizer step over all ranks; None if transformers does not count them."""
        count_by_transformers = super()._get_num_items_in_batch
        return self.training_objective.count_step(
            batch_samples, device, lambda batches: count_by_transformers(batches, device)
        )

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch as transformers does; return its loss.

        Under tensor parallelism transformers sums the gradients of some parameters over ranks after each backward
        (`summed_by_ranks`). Gradients of micro-batches add up, so the second backward would sum the gradient of the
        first micro-batch again. `summed_once` prevents this.
        `train_mode_kept` saves the time of setting all modules to train mode again.
        """
        with summed_once(self.training_objective.summed_by_ranks), train_mode_kept(model):
            return super().training_step(model, *args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a micro-batch to the device.

        The weights of its documents and the names of their data sets (`weight_column`, `source_column`) are taken out
        for the loss, because no model accepts them.
        """
        self.training_objective.pop_row_values(inputs)
        return super()._prepare_inputs(inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the loss of a micro-batch, its share of the optimizer step; with `return_outputs` the outputs, too.

        TRL's own loss is called in evaluation, and where a setting needs it (`Objective.replaces_trl_loss`).
        """
        if self.model.training and self.training_objective.replaces_trl_loss:
            return self.training_objective.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # With `share_prefixes`, several documents may share a token. TRL's loss would count it once, not for each of
        # them
        refuse_shared_prefixes(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _defer_fsdp_gradient_reduction(self) -> Any:
        """Return a context in which FSDP reduces gradients in every micro-batch if `summed_once` is needed, else once.

        A gradient whose reduction FSDP defers is in a buffer that `summed_once` cannot reach.
        """
        return nullcontext() if self.training_objective.summed_by_ranks else super()._defer_fsdp_gradient_reduction()

    # Numbers for the log

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Leave the count of tokens to `Objective` where it counts them.

        transformers gathers over ranks in every micro-batch, and takes a pad token inside a document for padding.
        """
        if not self.training_objective.replaces_trl_loss:
            super()._track_num_input_tokens(inputs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the FLOPs of a micro-batch as transformers computes them, but count the parameters once per run."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if tokens is None:
            return super().floating_point_ops(inputs)
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // tokens.numel()
        return self._flops_per_token * tokens.numel()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what transformers logs, with the numbers of packing and the exact counts of tokens."""
        self.training_objective.add_metrics(logs, start_time)
        super().log(logs, start_time)

    # Evaluation. transformers fetches a loader, runs its loop over it, and calls `prediction_step` for each batch.

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        """Return the loader of an evaluation set, in which every document is once.

        TRL's loader is returned for batches that this package cannot make, as with a collator of the user's.

        Args:
            eval_dataset: a dataset, the name of one of the evaluation sets, or None for the set of the constructor.
        """
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # Refuse another model than the constructor has prepared, or another value of `packing` than it has read
        self.data.constructed_with.refuse_changes(self.args, model)
        evaluation_sets: Any = self.eval_dataset  # a dataset, or several by name
        dataset = evaluation_sets if eval_dataset is None else eval_dataset
        dataset = evaluation_sets[dataset] if isinstance(dataset, str) else dataset
        needs_logits = self.compute_metrics is not None
        # `must_be_prepared`: refuse rows that TRL has not tokenised in the constructor
        loader = self.evaluation.make_loader(dataset, needs_logits=needs_logits, must_be_prepared=True)
        return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader[Any]:
        """Return the loader of `predict`, in which every document is once, or TRL's loader as for an evaluation set."""
        loader = self.evaluation.make_loader(test_dataset, needs_logits=True, must_be_prepared=False)
        return super().get_test_dataloader(test_dataset) if loader is None else loader

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run transformers' loop, and replace its loss and metrics by those of the whole set (`evaluation.py`)."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        run_loop = partial(super().evaluation_loop, dataloader, description, loss_only, ignore_keys, metric_key_prefix)
        return self.evaluation.evaluate_set(run_loop, dataloader, loss_only, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return loss, logits and labels of a batch; logits and labels are None with `prediction_loss_only`."""
        if self.evaluation.replaces_trl_metrics:  # the user has not defined the loss
            return self.evaluation.evaluate_batch(model, inputs, prediction_loss_only)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return self.evaluation.count_user_loss(loss, inputs), logits, labels

    # Checkpoints. transformers calls these methods in this order; the best checkpoint is loaded after training.

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save a checkpoint. Its folder is marked as unfinished until `_save_rng_state` has written the last files."""
        self.restart.begin_checkpoint(trial)
        self.training_objective.gather_totals()  # the checkpoint counts the tokens since the last log, too
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as [`~transformers.Trainer.save_model`] does. All ranks must call it.

        The whole model is saved, also if FSDP saves sharded checkpoints.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        with nullcontext() if _internal_call else whole_model_saved(plugin):
            super().save_model(output_dir, _internal_call)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states, the last files that every rank writes, and then the state of the plan."""
        super()._save_rng_state(output_dir)
        self.restart.end_checkpoint(output_dir)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, and note its folder for `_issue_warnings_after_load`."""
        self.restart.weights_folder = self.state.best_model_checkpoint
        super()._load_best_model()

    # After training

    def create_model_card(  # type: ignore[override]  # TRL's signature, which is not transformers'
        self, model_name: str | None = None, dataset_name: Any = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card as TRL does, and complete it with what packing did."""
        datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or ())
        folder = Path(str(self.args.output_dir))
        published: Any = [name for name in datasets if is_on_hub(name)] or None
        super().create_model_card(model_name or folder.name, published, tags)
        if self.is_world_process_zero():
            complete_card(
                folder / "README.md", self.model, datasets, report=self.packing_report, log=self.state.log_history
            )
