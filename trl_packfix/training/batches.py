"""Make batches of documents: collators, loaders, and the settings by which documents are packed.

`TrainingData` (`loading.py`) is a `BatchMaker`. The training set, a table or a stream (`source.py`), makes its loader
of packs with it.

Words: a *document* is one training example; a *pack* is one sequence of several documents that the model reads
together. A *feature* (`feature.py`) is an option with a folder of its own, such as `share_prefixes`. Documents *share
token rows* if their common beginning is in a pack once.
"""

import logging
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader

from ..data.by_length import ByLength
from ..data.collator import PackedDataCollator
from ..data.loaders import DocumentDataset, PackCollator, PackedBatchSampler, PaddedBatchSampler, document_loader
from ..data.model_costs import make_cost_model
from ..data.row_values import SOURCES, WEIGHTS, RowValuesCollator
from ..feature import PLAIN, Feature
from ..planning.costs import CostModel
from ..samples.row import PerTurnCounts
from . import checks
from .reading import TextReading
from .trainer_view import DataRanks, TrainerPart, TrainerView

logger = logging.getLogger(__name__)


class BatchMaker(TrainerPart):
    """Makes the batches of a trainer.

    Attributes:
        reading: reads datasets and collates documents.
        ranks: the place of this process among the data-parallel ranks: its `rank` of `count`. `copies` processes are
            one data-parallel rank (tensor parallelism).
        vocab_size: the size of the vocabulary of the model; None if its config has none.
        turn_counts: with `per_turn`, the numbers of conversations and of the samples made of their turns; else None.
        trl_counts_first_labels: whether TRL without packing would count the first label of each row in the divisor of
            its loss. No token predicts the first token of a row, so its label is never trained. If a row has 10 labels,
            TRL then divides the sum of 9 losses by 10. The packing report says by how much this changes the loss.
    """

    ranks: DataRanks
    vocab_size: int | None
    trl_counts_first_labels: bool
    _has_warned_of_order = False  # of `dataloader_in_order`

    def __init__(self, trainer: TrainerView):
        super().__init__(trainer)
        self.reading = TextReading(trainer)  # `prepare_run` replaces it, because images need TRL's collator
        self.turn_counts: PerTurnCounts | None = None
        # The part of `trainer.data_collator` that joins the tokens of a pack. `TrainingData.prepare_run` sets it, with
        # packing. `shares_rows` reads and changes its attribute `shares`
        self._text_collator = PackedDataCollator()

    @property
    def value_columns(self) -> dict[str, str]:
        """The columns of the dataset with weights and sources of rows, by the keys that they have in a batch."""
        columns = {WEIGHTS: self.args.weight_column, SOURCES: self.args.source_column}
        return {key: column for key, column in columns.items() if column is not None}

    @property
    def packing_arguments(self) -> dict[str, Any]:
        """The arguments of `make_planner` and `packing_of` (`planner.py`) that the config does not have."""
        has_user_loss = bool(self._trainer.user_code.loss_code_names)
        return {
            "cost_model": self.cost_model,
            "world_size": self.ranks.count,
            # Whether ranks wait for each other in every micro-batch, or once in an optimizer step
            "synchronisation": checks.synchronisation(self._trainer.accelerator, self.base_model),
            "batch_size": self._trainer._train_batch_size,  # lowered by `auto_find_batch_size`
            # The user's loss may be a mean over a micro-batch, so packs get similar numbers of trained tokens. For
            # this, documents are moved between packs, which `balance="step"` allows, and "none" does not
            "evens_targets": has_user_loss and self.args.balance == "step",
        }

    @cached_property
    def cost_model(self) -> CostModel:
        """The FLOPs that a document of a length, and with images, costs on this model."""
        model = self.base_model
        return self.reading.document_costs(make_cost_model(model.config, type(model)))  # adds what images cost

    def make_loader(
        self, dataset: DocumentDataset, sampler: PackedBatchSampler | PaddedBatchSampler, collate: Callable[..., Any]
    ) -> DataLoader[Any]:
        """Return a loader with the user's settings.

        Args:
            dataset: documents of a table.
            sampler: yields, for each batch, the indices of its documents.
            collate: makes a batch of the documents.
        """
        is_persistent = self.args.dataloader_persistent_workers
        settings = {"persistent_workers": is_persistent, **self.loader_settings, **self.worker_kwargs}
        would_reorder = not settings["in_order"] and settings["num_workers"] > 0
        if would_reorder and not self._has_warned_of_order and self._trainer.is_world_process_zero():
            self._has_warned_of_order = True
            logger.warning(
                "dataloader_in_order=False was given; batches of a table stay in order, because a restart goes on "
                "behind the last one, and predictions have the order of the rows."
            )
        settings["in_order"] = True
        return document_loader(dataset, sampler, collate, **settings)

    def training_collator(self, keys: Collection[str], names_sources: bool = False) -> Callable[..., Any]:
        """Return the collator that turns the documents of a pack into a batch.

        Args:
            keys: the keys of the row values (weights, sources) that the batch also has.
            names_sources: whether documents have the names of their sources and not numbers, as in a stream.
        """
        collate = self._trainer.data_collator
        if self.args.pad_documents_to_multiple_of is not None:
            # The collator pads packs to the capacity, the most tokens of a pack, which `auto_find_batch_size` may have
            # lowered since the collator was made. So it is made again. The settings of a run refuse shared prefixes and
            # images with packs of one length, so such packs have no feature (`PLAIN`)
            collate = self.packed_collator(self._trainer._train_batch_size, PLAIN)
        if keys:
            # Documents hold weights and sources under the keys of the batch, and not under the names of columns
            document_keys = {key: key for key in keys}
            collate = RowValuesCollator(collate, document_keys, names_sources=names_sources)
        # On CUDA the documents of a pack are sorted by length, and attention is launched on groups of similar length.
        # With `torch_compile` they are not sorted, because the compiler would trace each grouping anew.
        sorts_by_length = self.args.device.type == "cuda" and not self.args.torch_compile
        return ByLength(collate) if sorts_by_length else collate

    def packed_collator(self, batch_size: int, feature: Feature) -> PackCollator:
        """Return the collator of packs.

        A pack has at most `batch_size * max_length` tokens on a rank or, if it is set, at most `tokens_per_rank`. With
        `pad_documents_to_multiple_of`, every pack is padded to this capacity, so that all packs have one length.
        If prefixes are shared, `feature.make_collator` returns a collator whose packs have common beginnings once.
        """
        args = self.args
        multiple = args.pad_to_multiple_of
        longest = None  # the length that the batch of each pack names as its longest document
        if args.pad_documents_to_multiple_of is not None:
            longest = args.max_length
            assert longest is not None  # `SFTConfig` requires it
            capacity = args.tokens_per_rank or batch_size * longest  # tokens of a pack on one rank
            unit = multiple or 1
            multiple = -(-capacity // unit) * unit  # the capacity, rounded up
        text_collator = PackedDataCollator(
            pad_to_multiple_of=multiple,
            pad_token_id=self._trainer._tokenizer.pad_token_id,
            pad_documents_to_multiple_of=args.pad_documents_to_multiple_of,
            max_length=longest,
        )
        text_collator = feature.make_collator(
            text_collator,
            # If only the last token of a document is not shared, it can be left out of the pack, because no loss reads
            # its output. A router loss counts every token, so with it the token stays
            keeps_last_rows=self._trainer.aux_loss_enabled,
            # Common beginnings are found in what this function returns of documents, or in their tokens if it is None
            compare=self.reading.compare,
        )
        return PackCollator(text_collator, self.reading.pack_content())  # the content beside tokens, such as images

    @property
    def shares_rows(self) -> bool:
        """Whether documents of packs share token rows.

        It is set to False if the proof shows that the model cannot compute shared token rows. This must be before the
        first batch: the workers of loaders get a copy of the collator when they start, at the first batch.
        """
        return self._text_collator.shares

    @shares_rows.setter
    def shares_rows(self, shares: bool) -> None:
        self._text_collator.shares = shares

    @property
    def loader_settings(self) -> dict[str, Any]:
        """The device, whether memory is pinned, and the number of workers, as arguments of `document_loader`."""
        args = self.args
        device = self._trainer.accelerator.device
        pins = args.dataloader_pin_memory and device.type != "cpu"
        return {"device": device, "pin_memory": pins, "num_workers": args.dataloader_num_workers}

    @property
    def worker_kwargs(self) -> dict[str, Any]:
        """The arguments `multiprocessing_context`, `prefetch_factor` and `in_order` of `document_loader`."""
        args = self.args
        return {
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
