"""The part of the trainer that makes batches: documents, planner, loaders, and the model that takes their packs."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader

from ..attention.models import base_model
from ..compat import require_gathers
from ..data.cache import cached_documents
from ..data.collator import PackedDataCollator
from ..data.epochs import EpochPlanner
from ..data.image_collator import PackedImageCollator
from ..data.image_rows import ImageRows, has_images
from ..data.loaders import DocumentDataset, PackedBatchSampler, PaddedBatchSampler, document_loader
from ..data.model_costs import make_cost_model, vision_tower, with_tower
from ..data.prefix_collator import PrefixCollator
from ..data.reader import TokenReader, without_ignored_mask
from ..data.row_values import SOURCES, WEIGHTS, RowValues, RowValuesCollator, read_row_values
from ..data.stream import PackedStream, stream_loader
from ..data.threads import wait_for_threads_at_exit
from ..data.turns import TurnCounts
from ..isolation.packed_model import PackedModel
from ..planning.costs import CostModel
from ..planning.strategies import STRATEGIES
from ..reporting.build import make_report, make_stream_report
from ..reporting.report import PackingReport
from . import checks
from .config import SFTConfig
from .images import ImageData, packs_images
from .noise import DocumentNoise
from .planner import make_planner, speeds
from .progress import shown


class PackedLoading(trl.SFTTrainer):
    """The part of the trainer that makes batches.

    With packing, a table becomes documents when the trainer is constructed, and packs when training starts. If
    `train_dataset` was replaced by then, the new one is read first.

    Attributes:
        packing_report: what packing did; None until the training loader is made, and without packing.
        packed_model: what packed batches run on; only with packing.
        packs_images: whether packs have images.
        unpacked_counts_first: whether TRL would divide an unpacked loss by the first label of each row, too, which is
            not a target.
    """

    args: SFTConfig
    model: nn.Module
    _shares_prefixes = False

    def __init__(self, *, model: Any, args: SFTConfig, train_dataset: Any, eval_dataset: Any, **kwargs: Any):
        require_gathers(args.world_size, args.device.type)  # before weights are loaded, and without packing, too
        self._vocab_size: int | None = getattr(checks.text_config(model, args), "vocab_size", None)
        checks.check_prepared_sets(args, train_dataset, eval_dataset, self._vocab_size)
        self.packing_report: PackingReport | None = None
        self._images: ImageData | None = None
        self._turns: TurnCounts | None = None  # of the training set, with `per_turn`
        self._train_planner: EpochPlanner | None = None
        self._stream: PackedStream | None = None
        self.packs_images = packs_images(args, train_dataset)
        if self.packs_images:
            args.packing = False  # TRL would refuse it; all that it does with packing is replaced here
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        args.packing |= self.packs_images
        if self.args.world_size > 1:
            wait_for_threads_at_exit()
        self.unpacked_counts_first = self.model_accepts_loss_kwargs and not self._loss_shifts_labels
        self._padded_collator = self.data_collator  # of an unpacked run
        if self.args.packing:
            self._prepare_packing()
        else:
            self._read_training_set()
        self._constructed_with = checks.Constructed(self.args, self.model)

    # Weights and sources of rows

    @property
    def _has_row_values(self) -> bool:
        return self.args.weight_column is not None or self.args.source_column is not None

    def _read_row_values(self) -> RowValues:
        """Of the prepared training set, whose rows may be shuffled or fewer than those given."""
        if isinstance(self.train_dataset, IterableDataset):
            return RowValues()  # a stream is read, and checked, later
        return read_row_values(self.train_dataset, self.args.weight_column, self.args.source_column, "train")

    def _collate_row_values(self) -> Callable:
        """The collator of unpacked rows, which have the two columns themselves."""
        index = {value: i for i, value in enumerate(self._row_values.column_values)}
        columns = {WEIGHTS: self.args.weight_column, SOURCES: self.args.source_column}
        keys = {key: column for key, column in columns.items() if column is not None}
        return RowValuesCollator(self._padded_collator, keys, index)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: list[str] = self._signature_columns or []
        given = (self.args.weight_column, self.args.source_column)
        columns: Any = known + [column for column in given if column is not None and column not in known]
        self._signature_columns = columns

    def _with_row_values(self, collate: Callable, values: RowValues | None = None) -> Callable:
        """`collate`, with the weights and sources that its documents have."""
        values = values or self._row_values
        has = {WEIGHTS: values.weights is not None, SOURCES: values.sources is not None}
        keys = {key: key for key, is_given in has.items() if is_given}
        return RowValuesCollator(collate, keys) if keys else collate

    def _prepare_packing(self) -> None:
        args = self.args
        self._shares_prefixes = args.share_prefixes != "off"
        checks.check_parallelism(self.accelerator)
        checks.check_recomputation(args, self.accelerator)
        checks.check_one_device(self.model)
        checks.check_quantisation(self.model, args.device.type)
        self.padding_free = True
        self._images = ImageData(self._padded_collator, self.model) if self.packs_images else None  # type: ignore[arg-type]
        self.data_collator = self._make_packed_collator(args.per_device_train_batch_size, self.shares_prefixes)
        self._read_training_set()
        self.packed_model = self._make_packed_model()

    # Tables

    def _read_training_set(self) -> None:
        """Weights and sources of the rows of `train_dataset` and, with packing, its documents."""
        args, dataset = self.args, self.train_dataset
        self._row_values = self._read_row_values()
        if not args.packing:
            if self._has_row_values:
                self.data_collator = self._collate_row_values()
        elif not isinstance(dataset, IterableDataset):
            self._reader = self._read(dataset, "train")
            with shown(args, f"Cutting {len(self._reader):,} rows into documents"):
                self._documents = cached_documents(
                    self._reader,
                    args.max_length,
                    args.effective_overlong,
                    args.truncation_mode,
                    wrapped=STRATEGIES[args.packing_strategy].cuts_blocks,
                    sorts_tokens=args.share_prefixes == "family",
                )
        self._dataset_read = dataset

    def _read_replaced_training_set(self) -> None:
        """Read `train_dataset` if it is not the one that was read before: a user may set it between two trainings."""
        before, dataset, args = self._dataset_read, self.train_dataset, self.args
        if dataset is before:
            return
        if args.packing:
            checks.check_replacement(dataset, before, self._vocab_size)
            if isinstance(dataset, Dataset):
                self.train_dataset = without_ignored_mask(dataset, self.completion_only_loss)
        if self._has_row_values:
            checks.check_row_columns(args, self.train_dataset, None)
        self._turns = None
        self._read_training_set()

    def _read(self, dataset: Any, name: str) -> TokenReader | ImageRows:
        """The rows of a table: tokens, or images and text, which are measured once."""
        if self._images is None or ("input_ids" in dataset.column_names and not has_images(dataset)):
            return TokenReader(dataset)
        return self._images.rows(dataset, name, self.args, marks=name == "train")

    def get_train_dataloader(self) -> DataLoader:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self._constructed_with.check(self.args, model, trains=True)
        self._read_replaced_training_set()
        if not self.args.packing:
            return super().get_train_dataloader()
        if isinstance(self.train_dataset, IterableDataset):
            return self._make_stream_loader()
        with shown(self.args, f"Planning packs of {len(self._documents):,} documents") as show:
            planner = self._train_planner = self._make_planner()
            show(f"Planned packs of {len(self._documents):,} documents; making the report")
            self.packing_report = make_report(
                planner, self.args.effective_overlong, self._reader, self.unpacked_counts_first, self._turns
            )
        dataset = DocumentDataset(self._reader, self._documents, self._tokenizer.pad_token_id, self._row_values)
        collate = self._with_row_values(self._training_collator)
        return self._make_loader(dataset, PackedBatchSampler(planner, self.args.process_index), collate)

    @property
    def _training_degrees(self) -> tuple[int, ...]:
        """How many ranks may share a pack in training; () without sequence parallelism."""
        packs = self._train_planner or self._stream
        return () if packs is None else packs.degrees or ()

    def _make_planner(self) -> EpochPlanner:
        return make_planner(
            self.args,
            self._documents,
            self._cost_model,
            self.args.world_size,
            checks.synchronisation(self.accelerator),
            batch_size=self._train_batch_size,  # lowered by `auto_find_batch_size`
            writes_cache=self.args.local_process_index == 0,
        )

    @cached_property
    def _cost_model(self) -> CostModel:
        model = base_model(self.model)
        costs = make_cost_model(model.config, type(model))
        tower = vision_tower(model) if self.packs_images else None
        if tower is None:
            return costs
        return with_tower(costs, model.config, type(model), any(p.requires_grad for p in tower.parameters()))

    def _make_loader(
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
    def _training_collator(self) -> Callable:
        if self.args.pad_documents_to_multiple_of is None:
            return self.data_collator
        # lowered by `auto_find_batch_size`
        return self._make_packed_collator(self._train_batch_size, self.shares_prefixes)

    def _make_packed_collator(self, batch_size: int, shares: bool) -> Callable:
        pack = self._make_row_collator(batch_size, shares)
        return pack if self._images is None else self._images.packed_collator(self.args, pack, self.accelerator)

    def _make_row_collator(self, batch_size: int, shares: bool) -> PackedDataCollator:
        args, pad_token_id = self.args, self._tokenizer.pad_token_id
        if shares:
            return PrefixCollator(
                args.pad_to_multiple_of,
                pad_token_id,
                # A router sees every token, also one on whose output no document is trained
                keeps_last_rows=self.aux_loss_enabled,
                compare=None if self._images is None else self._images.process.compare,
            )
        if args.pad_documents_to_multiple_of is None:
            return PackedDataCollator(args.pad_to_multiple_of, pad_token_id)
        assert args.max_length is not None  # `SFTConfig` refuses it without
        multiple = args.pad_to_multiple_of or 1
        num_tokens = -(-batch_size * args.max_length // multiple) * multiple
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
        collate: Any = self.data_collator
        pack = collate.pack if isinstance(collate, PackedImageCollator) else collate
        if isinstance(pack, PrefixCollator):
            pack.shares = shares

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

    def _make_stream_loader(self) -> DataLoader:
        args = self.args
        assert args.max_length is not None  # `SFTConfig` refuses packing without it
        stream = self._stream = PackedStream(
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
            weight_column=args.weight_column,
            tokens_per_rank=args.tokens_per_rank,
            speeds=speeds(args),
        )
        self.packing_report = make_stream_report(stream, args.max_steps)
        collate = self._training_collator
        if args.weight_column is not None:
            collate = RowValuesCollator(collate, {WEIGHTS: WEIGHTS})
        return stream_loader(stream, collate, self.accelerator.device, self._pin_memory)

    # The model

    def _make_packed_model(self) -> PackedModel:
        args = self.args
        hooks = []
        if args.neftune_noise_alpha is not None:
            hooks.append(DocumentNoise(base_model(self.model), args.neftune_noise_alpha))
        return PackedModel(
            self.model,
            self._attention_dtype,
            args.device.type,
            args.max_length,
            args.on_leak,
            args.enforce_flash_attention,
            hooks,
            shares_packs=args.tokens_per_rank is not None,
            shares_prefixes=args.share_prefixes != "off",
            images=None if self._images is None else self._images.examples,
        )

    @property
    def _attention_dtype(self) -> torch.dtype:
        """The dtype that reaches the attention kernel: that of autocast, else that of the weights."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else base_model(self.model).dtype
