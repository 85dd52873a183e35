"""The data of a training run: documents, planner, loaders, and the model that takes their packs."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from ..attention.forwards import ModelHooks
from ..attention.models import base_model
from ..compat import declare_whole_sizes, require_gathers
from ..data.by_length import ByLength
from ..data.collator import PackedDataCollator
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.image_rows import ImageRows
from ..data.loaders import DocumentDataset, PackedBatchSampler, PaddedBatchSampler, document_loader
from ..data.model_costs import make_cost_model, vision_tower, with_tower
from ..data.pack_collator import PackCollator
from ..data.prefix_collator import PrefixCollator
from ..data.reader import TokenReader, without_ignored_mask
from ..data.row_values import (
    SOURCES,
    WEIGHTS,
    RowValues,
    RowValuesCollator,
    StreamSources,
    check_row_values,
    read_row_values,
)
from ..data.spans import drop_untrained, make_documents
from ..data.stream import PackedStream
from ..data.stream_loading import stream_loader
from ..data.threads import wait_for_threads_at_exit
from ..isolation.packed_model import PackedModel
from ..planning.costs import CostModel
from ..reporting.build import make_report, make_stream_report
from ..samples.apply import Made
from ..samples.checks import has_images, what_is_trained
from ..samples.row import Trained, TurnCounts
from . import checks
from .choices import Setup, text_config
from .config import SFTConfig
from .data_ranks import DataRanks
from .features import refuse
from .images import ImageData, measure_rows, packs_images
from .lora_inputs import LoraInputs
from .noise import DocumentNoise
from .planner import documents_of, make_planner, packing_of
from .progress import status
from .remembered import RememberedProofs
from .run import Run


class TrainingData:
    """The data of a trainer, from its training set to batches.

    With packing, a table becomes documents when the trainer is constructed, and packs when training starts. If
    `train_dataset` was replaced by then, the new one is read first. What datasets were given is checked before the
    model is loaded. `attach` does what needs the model.

    Args:
        run: sets its `data_collator`, `packed_model` and `packing_report`.

    Attributes:
        reader: the rows of the training set; with packing of a table.
        documents: the documents of the training set; with packing of a table.
        row_values: weights and sources of the rows of the training set.
        turns: what was counted when conversations were split, with `per_turn`.
        trained: what the loss is computed on.
        planner: the planner of the epochs, from when training starts; None for a stream.
        stream: the packs of a stream, from when training starts.
        stream_sources: the sources of a stream that this rank has met; None without.
        images: what packs need of images; None without.
        packs_images: whether packs have images.
        padded_collator: the collator of an unpacked run.
        ranks: which ranks read data of their own.
        unpacked_counts_first: whether TRL would divide an unpacked loss by the first label of each row, too, which is
            not a target.
    """

    reader: TokenReader | ImageRows
    documents: Documents
    row_values: RowValues
    padded_collator: Callable[..., Any]
    unpacked_counts_first: bool
    ranks: DataRanks

    def __init__(self, run: Run, args: SFTConfig, model: Any, *, train_dataset: Any, eval_dataset: Any):
        require_gathers(args.world_size, args.device.type)  # before weights are loaded, and without packing, too
        self._run = run
        self.vocab_size: int | None = getattr(text_config(model, args), "vocab_size", None)
        checks.check_prepared_sets(args, train_dataset, eval_dataset, vocab_size=self.vocab_size)
        self.images: ImageData | None = None
        self.turns: TurnCounts | None = None
        self.trained = Trained(what_is_trained(args, train_dataset), args.message_train_key)
        self.planner: EpochPlanner | None = None
        self.stream: PackedStream | None = None
        self.stream_sources: StreamSources | None = None
        self.packs_images = packs_images(args, train_dataset)
        self._shares_prefixes = False

    def attach(self) -> None:
        """Read the training set, and prepare the model for packs. The trainer has its model."""
        run = self._run
        refuse(Setup(args=self.args, model=run.model, accelerator=run.accelerator))
        self.ranks = DataRanks.of(self.args, run.get_tp_size())
        declare_whole_sizes(run.model)
        if self.args.world_size > 1:
            wait_for_threads_at_exit()
        self.unpacked_counts_first = run.model_accepts_loss_kwargs and not run._loss_shifts_labels
        self.padded_collator = run.data_collator
        if self.args.packing:
            self._prepare_packing()
        else:
            self._read_training_set()
        self.constructed_with = checks.Constructed(self.args, run.model)

    @property
    def args(self) -> SFTConfig:
        return self._run.args

    # Weights and sources of rows

    @property
    def _value_columns(self) -> dict[str, str]:
        """The columns of weights and sources, by their keys in a batch."""
        columns = {WEIGHTS: self.args.weight_column, SOURCES: self.args.source_column}
        return {key: column for key, column in columns.items() if column is not None}

    def with_row_values(self, collate: Callable[..., Any], values: RowValues) -> Callable[..., Any]:
        """`collate`, with the weights and sources that its documents have."""
        has = {WEIGHTS: values.weights is not None, SOURCES: values.sources is not None}
        keys = {key: key for key, is_given in has.items() if is_given}
        return RowValuesCollator(collate, keys) if keys else collate

    def _prepare_packing(self) -> None:
        args = self.args
        self._shares_prefixes = args.share_prefixes != "off"
        checks.check_quantisation(self._run.model, args.device.type)
        self._run.padding_free = True
        if self.packs_images:
            self.images = ImageData(self._run.data_collator, self._run.model, args.per_turn)
        self._run.data_collator = self.packed_collator(args.per_device_train_batch_size, self.shares_prefixes)
        self._read_training_set()
        self._run.packed_model = self.make_packed_model()

    # Tables

    def _read_training_set(self) -> None:
        """Weights and sources of the rows of `train_dataset` and, with packing, its documents."""
        args, dataset = self.args, self._run.train_dataset
        if isinstance(dataset, IterableDataset):
            self.stream_sources = None if args.source_column is None else StreamSources()
            self.row_values = RowValues()  # a stream is read, and checked, later
        else:  # prepared, so that rows may be shuffled or fewer than those given
            self.row_values = read_row_values(dataset, args.weight_column, args.source_column, name="train")
        if not args.packing:
            if keys := self._value_columns:  # rows have the two columns themselves
                index = {value: i for i, value in enumerate(self.row_values.column_values)}
                names_sources = self.stream_sources is not None
                self._run.data_collator = RowValuesCollator(self.padded_collator, keys, index, names_sources)
        elif not isinstance(dataset, IterableDataset):
            self.reader = self.read(dataset, "train")
            self.row_values = self.row_values.taken(self.reader.conversations)
            self.turns = self.reader.turns or self.turns
            with status(args, f"Cutting {len(self.reader):,} rows into documents"):
                self.documents = documents_of(self.reader, args)
        self._dataset_read = dataset

    def _read_replaced_training_set(self) -> None:
        """Read `train_dataset` if it is not the one that was read before: a user may set it between two trainings."""
        before, dataset, args = self._dataset_read, self._run.train_dataset, self.args
        if dataset is before:
            return
        if args.packing:
            checks.check_replacement(dataset, before, self.vocab_size)
            if isinstance(dataset, Dataset):
                self._run.train_dataset = without_ignored_mask(dataset, self._run.completion_only_loss)
        given = {"args": args, "model": self._run.model, "train_dataset": dataset}
        refuse(checks.setup_of(type(self._run), given))
        checks.check_weights(args, self._run.train_dataset)
        self.turns, self.trained = None, replace(self.trained, counts=None)
        self._read_training_set()

    def counted(self, made: Made, is_training_set: bool) -> Dataset | IterableDataset:
        """The rows of samples; of the training set the counts are taken."""
        if is_training_set:
            self.turns = made.turns
            self.trained = replace(self.trained, counts=made.masked)
        return made.rows

    def trained_line(self) -> str:
        """What is trained without packing, with the share of the tokens of a table."""
        dataset = self._run.train_dataset
        if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
            return self.trained.line(0, 0)
        counts = make_documents(TokenReader(dataset), max_length=None).ledger.given
        return self.trained.line(counts.trained_tokens, counts.tokens)

    def read(self, dataset: Any, name: str) -> TokenReader | ImageRows:
        """The rows of a table: tokens, or images and text, which are measured once."""
        if self.images is None or ("input_ids" in dataset.column_names and not has_images(dataset)):
            return TokenReader(dataset)
        return measure_rows(dataset, self.images.process, name, args=self.args, marks=name == "train")

    def start(self) -> None:
        """Refuse what was changed since construction, and read the training set if it was replaced."""
        run = self._run
        model = run.accelerator.unwrap_model(run.model, keep_torch_compile=False)
        self.constructed_with.check(self.args, model, trains=True)
        self._read_replaced_training_set()

    def packed_loader(self) -> DataLoader[Any]:
        """The loader of packs of the training set. Plans the first epoch, and makes the report."""
        if isinstance(self._run.train_dataset, IterableDataset):
            return self._make_stream_loader()
        with status(self.args, f"Planning packs of {len(self.documents):,} documents") as show:
            planner = self.planner = self.make_planner()
            show(f"Planned packs of {len(self.documents):,} documents; making the report")
            reports: list[Any] = [None]
            if self.args.process_index == 0:  # of many documents it takes as much memory as the plan
                reports[0] = make_report(
                    planner,
                    self.reader,
                    unpacked_counts_first=self.unpacked_counts_first,
                )
            self._run.packing_report = replace(
                broadcast_object_list(reports)[0], trained=self.trained, turns=self.turns
            )
        rows = DocumentDataset(self.reader, self.documents, self._run._tokenizer.pad_token_id, values=self.row_values)
        collate = self._by_length(self.with_row_values(self._training_collator, self.row_values))
        return self.make_loader(rows, PackedBatchSampler(planner, self.ranks.rank), collate)

    def collate_without_sources(self, documents: Any) -> dict[str, Any]:
        """A batch of training, with the weights of its documents: what its loss and gradients depend on."""
        collate = self._training_collator
        if self.args.weight_column is not None:
            collate = RowValuesCollator(collate, {WEIGHTS: WEIGHTS})
        return self._by_length(collate)(documents)

    @property
    def degrees(self) -> tuple[int, ...]:
        """How many ranks may share a pack in training; () without sequence parallelism."""
        packs = self.planner or self.stream
        return () if packs is None else packs.packing.degrees

    def make_planner(self) -> EpochPlanner:
        settings = {"world_size": self.ranks.count} | self._settings_of_run
        return make_planner(self.args, self.documents, self.cost_model, **settings)

    @property
    def _settings_of_run(self) -> dict[str, Any]:
        """What the engine and the run decide of the packing."""
        return {
            "synchronisation": checks.synchronisation(self._run.accelerator, base_model(self._run.model)),
            "batch_size": self._run._train_batch_size,  # lowered by `auto_find_batch_size`
        }

    @cached_property
    def cost_model(self) -> CostModel:
        model = base_model(self._run.model)
        costs = make_cost_model(model.config, type(model))
        tower = vision_tower(model) if self.packs_images else None
        if tower is None:
            return costs
        return with_tower(costs, model.config, type(model), is_trained=any(p.requires_grad for p in tower.parameters()))

    def make_loader(
        self, dataset: DocumentDataset, sampler: PackedBatchSampler | PaddedBatchSampler, collate: Callable[..., Any]
    ) -> DataLoader[Any]:
        args = self.args
        return document_loader(
            dataset,
            sampler,
            collate,
            device=self._run.accelerator.device,
            num_workers=args.dataloader_num_workers,
            pin_memory=self._pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            **self._worker_kwargs,
        )

    def _by_length(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """On CUDA documents of a pack come by length, in launches of their own; a compiler would trace each anew."""
        on_kernels = self.args.device.type == "cuda" and not self.args.torch_compile
        return ByLength(collate) if on_kernels else collate

    @property
    def _training_collator(self) -> Callable[..., Any]:
        if self.args.pad_documents_to_multiple_of is None:
            return self._run.data_collator
        # lowered by `auto_find_batch_size`
        return self.packed_collator(self._run._train_batch_size, self.shares_prefixes)

    def packed_collator(self, batch_size: int, shares: bool) -> PackCollator:
        images = None if self.images is None else self.images.of_packs(self.args, self._run.accelerator)
        return PackCollator(self._make_row_collator(batch_size, shares), images)

    def _make_row_collator(self, batch_size: int, shares: bool) -> PackedDataCollator:
        args, pad_token_id = self.args, self._run._tokenizer.pad_token_id
        if shares:
            return PrefixCollator(
                args.pad_to_multiple_of,
                pad_token_id,
                # A router sees every token, also one on whose output no document is trained
                keeps_last_rows=self._run.aux_loss_enabled,
                compare=None if self.images is None else self.images.process.compare,
            )
        if args.pad_documents_to_multiple_of is None:
            return PackedDataCollator(args.pad_to_multiple_of, pad_token_id)
        assert args.max_length is not None  # `SFTConfig` refuses it without
        multiple = args.pad_to_multiple_of or 1
        most = args.tokens_per_rank or batch_size * args.max_length  # of a rank
        num_tokens = -(-most // multiple) * multiple
        return PackedDataCollator(num_tokens, pad_token_id, args.pad_documents_to_multiple_of, args.max_length)

    @property
    def shares_prefixes(self) -> bool:
        """Whether packs share the common beginnings of their documents.

        Set it to False where the model cannot, before the first batch is collated: loaders read it when they begin to
        iterate, because only then do their workers start.
        """
        return self._shares_prefixes

    @shares_prefixes.setter
    def shares_prefixes(self, shares: bool) -> None:
        self._shares_prefixes = shares
        collate = self._run.data_collator
        if isinstance(collate, PackCollator) and isinstance(collate.rows, PrefixCollator):
            collate.rows.shares = shares

    @property
    def _pin_memory(self) -> bool:
        return self.args.dataloader_pin_memory and self._run.accelerator.device.type != "cpu"

    @property
    def _worker_kwargs(self) -> dict[str, Any]:
        return {
            "multiprocessing_context": self.args.dataloader_multiprocessing_context,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            "in_order": self.args.dataloader_in_order,
        }

    # Streams

    def _make_stream_loader(self) -> DataLoader[Any]:
        args = self.args
        stream = self.stream = PackedStream(
            self._run.train_dataset,
            packing_of(args, self.cost_model, self.ranks.count, **self._settings_of_run),
            rank=self.ranks.rank,
            vocab_size=self.vocab_size,
            pad_token_id=self._run._tokenizer.pad_token_id,
            num_workers=args.dataloader_num_workers,
            worker_kwargs=self._worker_kwargs,
            weight_column=args.weight_column,
            source_column=args.source_column,
            images=None if self.images is None else self.images.of_stream(args),
        )
        self._run.packing_report = replace(make_stream_report(stream, args.max_steps), trained=self.trained)
        collate = self._training_collator
        if keys := {key: key for key in self._value_columns}:
            collate = RowValuesCollator(collate, keys, names_sources=True)
        return stream_loader(
            stream,
            self._by_length(collate),
            self._run.accelerator.device,
            pin_memory=self._pin_memory,
            num_workers=args.dataloader_num_workers,
            worker_kwargs=self._worker_kwargs,
        )

    def first_of_stream(self) -> Any:
        """What tells the first row of the stream from others: its tokens, or a hash of it with its images."""
        if self.images is not None:
            return self.images.first_of_stream(self._run.train_dataset, self.args)
        return np.asarray(next(iter(self._run.train_dataset))["input_ids"]).tolist()

    # The model

    def make_packed_model(self) -> PackedModel:
        args = self.args
        hooks: list[ModelHooks] = [LoraInputs(self._run.model)]
        if args.neftune_noise_alpha is not None:
            model = base_model(self._run.model)
            hooks.append(DocumentNoise(model, args.neftune_noise_alpha, sorts_rows=not self.packs_images))
        packed_model = PackedModel(
            self._run.model,
            self.attention_dtype,
            args.device.type,
            args.max_length,
            on_leak=args.on_leak,
            enforce_flash_attention=args.enforce_flash_attention,
            own_hooks=hooks,
            shares_packs=args.tokens_per_rank is not None,
            shares_prefixes=args.share_prefixes != "off",
            images=None if self.images is None else self.images.examples,
        )
        if args.packing and isinstance(self._run.train_dataset, Dataset) and self.documents.file is not None:
            plugin = self._run.accelerator.state.deepspeed_plugin
            engine = self._run.accelerator.distributed_type, plugin and plugin.deepspeed_config
            packed_model.recall = RememberedProofs(self.documents.file.parent, (engine, args.torch_compile)).recall
        return packed_model

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype that reaches the attention kernel: that of autocast, else that of the weights."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else base_model(self._run.model).dtype


def unpacked_rows(dataset: Dataset | IterableDataset, name: str, args: SFTConfig) -> Dataset | IterableDataset:
    """The rows of an unpacked training set that have a trained token, with their weights and sources checked."""
    if isinstance(dataset, Dataset):
        return drop_untrained(dataset)
    if args.weight_column is None and args.source_column is None:
        return dataset
    kwargs = {"weight_column": args.weight_column, "source_column": args.source_column, "name": name}
    return dataset.map(check_row_values, with_indices=True, fn_kwargs=kwargs)
