"""Hold the data of a training run: from the tokenised training set to the loader that yields packs.

The trainer (`trainer.py`) constructs one `TrainingData`, which takes these steps:

    1. When it is constructed, before the model is loaded, it notes whether the training set is a table or a stream.
    2. `prepare_run`, once TRL has tokenised them and loaded the model, reads the training set, and makes the collator
       and the packed model (`isolation/packed_model.py`).
    3. When training starts, `refresh_training_set` reads the training set again if the user has replaced it.
       `packed_loader` returns the loader and sets the packing report.

The training set is a `Source` (`source.py`): a table (`table_source.py`) or a stream (`stream_source.py`). Collators
and loaders are made in `batches.py`.

`objective.py`, `evaluation.py`, `restart.py` and `callbacks.py` read what this object holds.

Words: a *row* is an example of the tokenised dataset; a *document* is one training example, a row or a part of a row; a
*pack* is one sequence of several documents that the model reads together. A *table* is a `datasets.Dataset`, a *stream*
an `IterableDataset`. A *feature* (`feature.py`) is an option with a folder of its own, such as `share_prefixes`. The
*engine* is DDP, DeepSpeed or FSDP.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..attention.forwards import ModelHooks
from ..attention.models import base_model
from ..compat import declare_whole_sizes, require_gathers
from ..data.documents import drop_untrained, make_documents
from ..data.reader import TokenReader, without_ignored_mask
from ..data.row_values import (
    RowValuesCollator,
    check_row_values,
)
from ..data.threads import wait_for_threads_at_exit
from ..feature import features_of
from ..isolation.packed_model import PackedModel
from ..reporting.report import is_on_hub
from ..samples.checks import columns_of, has_transform, what_is_trained
from ..samples.data_proof import prove_or_refuse
from ..samples.data_report import DataReport
from ..samples.image_support import image_support
from ..samples.row import TrainedSummary
from . import checks
from .batches import BatchMaker
from .choices import RunSettings, text_config
from .config import SFTConfig
from .conflicts import refuse_conflicts
from .lora_inputs import LoraInputs
from .noise import DocumentNoise
from .reading import reading_class
from .remembered import recall_proof
from .source import Source
from .stream_source import StreamSource
from .table_source import TableSource
from .trainer_view import DataRanks, TrainerView

logger = logging.getLogger(__name__)


class TrainingData(BatchMaker):
    """The data of a trainer, from its training set to batches.

    With packing, the rows of a table become documents when the trainer is constructed, and packs when training starts.

    Args:
        trainer: the trainer, which is not constructed yet.
        args: its config.
        model: the model, or its name.
        train_dataset: the training set as the user gave it.
        eval_dataset: the evaluation set, or several by name.

    Attributes:
        source: the training set.
        reading_class: the class of `reading`, which reads rows of text or rows with images, in a run with packing.
        data_report: whether every text of the training set is in the tokens once; None for tokenised rows.
        trained_summary: which tokens are trained, and by which setting.
        constructed_with: the model and settings of the constructor, and the check that refuses others later.
        padded_collator: TRL's collator, or the user's, which makes padded batches.

    `BatchMaker` has the attributes `reading`, `ranks`, `vocab_size`, `turn_counts` and `trl_counts_first_labels`.
    """

    padded_collator: Callable[..., Any]

    def __init__(
        self, trainer: TrainerView, args: SFTConfig, model: Any, *, train_dataset: object, eval_dataset: object
    ):
        # Refuse, before the model is loaded, a version of DeepSpeed in which ZeRO-3 may read parameters before it has
        # gathered them from all ranks
        require_gathers(args.world_size, args.device.type)
        super().__init__(trainer)
        self.vocab_size = getattr(text_config(model, args), "vocab_size", None)
        checks.check_prepared_sets(args, train_dataset, eval_dataset, vocab_size=self.vocab_size)
        self.reading_class = reading_class(args, train_dataset)
        self.data_report: DataReport | None = None
        rule = what_is_trained(args, train_dataset)
        self.trained_summary = TrainedSummary(rule=rule, key=args.message_train_key)
        self.source: Source = source_class(train_dataset)(trainer, self)

    def prepare_run(self) -> None:
        """Read the training set, and prepare the model for packs."""
        trainer = self._trainer
        args = self.args
        # First, check the engine and find the place of this rank
        checks.check_one_device(args)
        refuse_conflicts(RunSettings(args=args, model=trainer.model, accelerator=trainer.accelerator))
        self.ranks = DataRanks.from_args(args, trainer.get_tp_size())
        # Under tensor parallelism, peft gives an adapter the sizes of the shard on this rank. This sets the whole sizes
        declare_whole_sizes(trainer.model)
        if args.world_size > 1:
            # Threads that exchange data between ranks may abort the process if it ends before them
            wait_for_threads_at_exit()
        # If the model accepts a divisor of its loss, TRL gives it the number of labels that are not -100. This number
        # includes the first label of each row, which no token predicts, unless `_loss_shifts_labels` is True
        self.trl_counts_first_labels = trainer.model_accepts_loss_kwargs and not trainer._loss_shifts_labels

        # Second, make the collators
        collator_of_trl = trainer.data_collator
        self.padded_collator = collator_of_trl
        if args.packing:
            checks.check_quantisation(trainer.model, args.device.type)
            if isinstance(collator_of_trl, DataCollatorForLanguageModeling):
                # With "bfd" and "bfd_split" TRL's constructor makes a collator that joins rows without padding
                self.padded_collator = replace(collator_of_trl, padding_free=False)
            # Methods of TRL read from this attribute that batches are packs. TRL's constructor got False in the config
            trainer.padding_free = True
            self.reading = self.reading_class(trainer)
            collate = self.packed_collator(args.per_device_train_batch_size, features_of(args))
            trainer.data_collator = collate
            self._text_collator = collate.text_collator  # `shares_rows` reads and sets whether it shares rows

        # Third, check all sets, read the training set and make the packed model. TRL does not call `_prepare_dataset`
        # for datasets with images, so what it checks is checked here for them
        eval_sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
        for name, dataset in [("train", trainer.train_dataset), *eval_sets.items()]:
            # Refuse images beside `conversations`, a form of text that TRL's collator cannot read
            image_support().check_texts(dataset, name, per_turn=args.per_turn)
            if trainer._is_vision_dataset and columns_of(dataset) and not has_transform(dataset):
                # Prove that every text is in the tokens once
                report = prove_or_refuse(dataset, name, args=args, tokenizer=trainer.processing_class)
                self.data_report = report if dataset is trainer.train_dataset else self.data_report
        self._read_training_set()
        if args.packing:
            trainer.packed_model = self.make_packed_model()
        self.constructed_with = checks.ConstructedWith(args, trainer.model)

    @property
    def leaves_batches_to_trl(self) -> bool:
        """Whether rows hold more than text and are not packed, so that TRL makes the batches and the loss."""
        return self._trainer._is_vision_dataset and not self.args.packing

    # The training set

    def _read_training_set(self) -> None:
        """Read `train_dataset`: the weights and sources of its rows and, with packing, the documents of a table."""
        args = self.args
        dataset = self._trainer.train_dataset
        self._dataset_read = dataset
        # An error in the middle leaves values of two sets in the source. Then the next training reads its set again
        self._is_read = False
        kind = source_class(dataset)
        if not isinstance(self.source, kind):
            self.source = kind(self._trainer, self)
        self.source.read(dataset)
        keys = self.value_columns
        if keys and not args.packing:
            # Unpacked rows hold the values of the columns of weights and sources. All sources of a table are known
            # before training (`column_values`), so a batch has their numbers. The sources of a stream are numbered as
            # they are read (`numbered_sources`), so there the batch has their names
            source_numbers = {value: number for number, value in enumerate(self.source.row_values.column_values)}
            names_sources = self.source.numbered_sources is not None
            self._trainer.data_collator = RowValuesCollator(
                self.padded_collator, keys, source_numbers, names_sources=names_sources
            )
        self._is_read = True

    def trained_line(self) -> str:
        """Return a line for the log that says what is trained without packing.

        For a table it has the share of trained tokens.
        """
        dataset = self._trainer.train_dataset
        if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
            return self.trained_summary.line(0, 0)
        # `ledger` counts documents and tokens, and `given` are the counts before anything is cut or dropped
        counts = make_documents(TokenReader(dataset), max_length=None).ledger.given
        return self.trained_summary.line(counts.trained_tokens, counts.tokens)

    def refresh_training_set(self) -> None:
        """Refuse settings that were changed since construction, and read the training set if the user replaced it."""
        trainer = self._trainer
        args = self.args
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self.constructed_with.refuse_changes(args, model, trains=True)
        dataset = trainer.train_dataset
        if dataset is self._dataset_read and self._is_read:
            return
        # The constructor checks the first dataset in the same way
        if args.packing:
            checks.check_replacement(dataset, self._dataset_read, self.vocab_size)
            if isinstance(dataset, Dataset):
                # Remove a `completion_mask` that TRL does not read, because `completion_only_loss` is False
                trainer.train_dataset = without_ignored_mask(dataset, trainer.completion_only_loss)
        # The settings that depend on the dataset; `prepare_run` has checked the settings of the engine
        refuse_conflicts(
            checks.settings_of_trainer(type(trainer), {"args": args, "model": trainer.model, "train_dataset": dataset})
        )
        checks.check_weights(args, trainer.train_dataset)
        # Nothing is known of how the tokens of a replaced dataset were made
        self.turn_counts = None
        self.data_report = None
        self.trained_summary = replace(self.trained_summary, counts=None)
        self._read_training_set()

    def packed_loader(self) -> DataLoader[Any]:
        """Return the loader of packs of the training set, and set the packing report of the trainer."""
        loader, report = self.source.packed_loader()
        model = describe_model(self._trainer.model)
        self._trainer.packing_report = replace(report, model=model, trained=self.trained_summary, data=self.data_report)
        return loader

    # The model

    def make_packed_model(self) -> PackedModel:
        """Return the object that makes the model compute the documents of a pack separately, and that proves it."""
        args = self.args
        # Hooks that are on the model in forwards on packs. `LoraInputs` saves the memory of inputs of adapters in fp32,
        # and `DocumentNoise` adds the noise of NEFTune by document
        hooks: list[ModelHooks] = [LoraInputs(self._trainer.model)]
        if args.neftune_noise_alpha is not None:
            # If a model mixes documents of a pack, it may be *unpacked*: it then computes the documents of a pack as
            # rows of padded batches. Documents of text are embedded longest first, and documents with images in the
            # order of the pack. The noise of a row depends on its length, so `DocumentNoise` must know the order
            is_text_only = self.reading.is_text_only
            hooks.append(DocumentNoise(self.base_model, args.neftune_noise_alpha, embeds_longest_first=is_text_only))
        packed_model = PackedModel(
            self._trainer.model,
            self.attention_dtype,
            args.device.type,
            args.max_length,
            on_leak=args.on_leak,
            enforce_flash_attention=args.enforce_flash_attention,
            own_hooks=hooks,
            shares_packs=args.tokens_per_rank is not None,  # sequence parallelism: a pack may be on several ranks
            feature=features_of(args, self.reading.feature),
        )
        # Proofs of an earlier start with an equal model and engine are read from the folder of the cached documents.
        # Saved proofs hold for text only, so none is read for rows with images
        folder = self.source.cache_folder
        if folder is not None and self.reading.is_text_only:
            plugin = self._trainer.accelerator.state.deepspeed_plugin
            engine = (self._trainer.accelerator.distributed_type, plugin and plugin.deepspeed_config)
            packed_model.recall = partial(recall_proof, folder=folder, settings=(engine, args.torch_compile))
        return packed_model

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype that reaches the attention kernel: the dtype of autocast, else of the weights."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.base_model.dtype


def source_class(dataset: object) -> type[TableSource] | type[StreamSource]:
    """Return the subclass of `Source` that reads a training set: for a stream or for a table."""
    return StreamSource if isinstance(dataset, IterableDataset) else TableSource


def unpacked_rows(
    dataset: Dataset | IterableDataset, *, uncut: Dataset | IterableDataset, name: str, args: SFTConfig
) -> Dataset | IterableDataset:
    """Return the rows to train without packing: of a table those with a trained token, of a stream all rows.

    The weights and sources of a stream are checked when its rows are read.

    Args:
        dataset: the rows that TRL has prepared.
        uncut: the rows before TRL has cut them to `max_length` and has dropped rows without a trained token. Their
            number says how many were dropped.
        name: the dataset's name in messages.
        args: the config of the trainer.
    """
    if isinstance(dataset, Dataset):
        assert isinstance(uncut, Dataset)
        return drop_untrained(dataset, len(uncut), args.max_length)
    if args.weight_column is None and args.source_column is None:
        return dataset
    kwargs = {"weight_column": args.weight_column, "source_column": args.source_column, "name": name}
    return dataset.map(check_row_values, with_indices=True, fn_kwargs=kwargs)


def describe_model(model: nn.Module) -> str:
    """Return the name and class of a model, and how many parameters are trained, as a text for the packing report."""
    # ZeRO-3 keeps only a part of each parameter on a rank, and the size of the whole parameter in `ds_numel`
    num_trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    base = base_model(model)
    name = str(getattr(base.config, "name_or_path", ""))
    name = name if is_on_hub(name) else Path(name).name  # of a local path only the last part
    return f"{name + ', ' if name else ''}{type(base).__name__}, {num_trained:,} parameters trained"
