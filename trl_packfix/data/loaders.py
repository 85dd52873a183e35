"""Build data loaders that yield the packs of one rank, for the trainer and for other training loops.

The way of a batch: `EpochPlanner` (`epochs.py`) decides which documents each rank trains on in each micro-batch.
`PackedBatchSampler` yields their indices. `DocumentDataset` reads their tokens (`reader.py`). A collator makes the
batch (`PackCollator` in the trainer). `document_loader` puts these together. `packed_dataloader` is the public function
that does all of this for a tokenised dataset.

Words:
    document     one training example: some consecutive tokens of one row of the table.
    pack         the documents of one micro-batch, which pass through the model together: one sequence of T tokens.
    micro-batch  what a rank computes in one forward and backward. An optimizer step has several of them.
    dummy        a document of two untrained tokens, for a rank that has no document in a micro-batch.
    group        the ranks that share a pack (sequence parallelism). Each of them holds a part of its tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig

from ..compat import keep_from_preparing
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.packing import Overlong, Packing
from ..planning.schedule import NO_DOCUMENTS
from ..planning.strategies import STRATEGIES, Strategy
from ..planning.units import Synchronisation
from .cache import cached_documents
from .collator import IGNORE_INDEX, DocumentRun, PackedDataCollator
from .dataset_checks import (
    check_boundaries,
    check_choice,
    check_count,
    check_max_length,
    check_not_padded,
    check_overlong,
    check_rank,
)
from .documents import Documents
from .epochs import EpochPlanner
from .model_costs import make_cost_model
from .rank_share import RankShare, cut_part
from .reader import RowReader, TokenReader
from .row_values import RowValues
from .threads import wait_for_threads_before_forks


@dataclass(eq=False)
class DocumentDataset(torch.utils.data.Dataset[Any]):
    """Dataset of documents by index. The index -1 (`NO_DOCUMENTS`) is the dummy document.

    A document is a dictionary of `input_ids` and `labels`, as views of the table, and the weight and source of its row.
    """

    reader: RowReader  # reads spans of the table
    documents: Documents  # the spans of the documents
    pad_token_id: int = 0  # token of the dummy document
    values: RowValues = field(default_factory=RowValues)  # weights and sources of the rows; by default none

    def __len__(self) -> int:
        return len(self.documents)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the documents of a micro-batch, as a `RankShare`: a list that also has the group of `indices`."""
        # All indices are converted at once, because indexing numpy arrays one by one costs more than reading a short
        # document
        columns = (self.documents.row, self.documents.start, self.documents.stop)
        rows, starts, stops = (column[indices].tolist() for column in columns)
        documents = (
            dummy_document(self.pad_token_id)
            if index == NO_DOCUMENTS
            else self.reader.read(row, start, stop) | self.values.for_row(row)
            for index, row, start, stop in zip(indices, rows, starts, stops, strict=True)
        )
        return RankShare.like(indices, documents)


def dummy_document(pad_token_id: int) -> dict[str, np.ndarray]:
    """Return the document that a rank without documents computes: two tokens without labels."""
    return {"input_ids": np.full(2, pad_token_id), "labels": np.full(2, IGNORE_INDEX)}


@dataclass(eq=False)
class PackedBatchSampler:
    """Batch sampler that yields the document indices of each micro-batch of one rank in the current epoch.

    A `RankShare` is the list of these indices with the `Group` of ranks that share the micro-batch. The length of the
    sampler, the number of micro-batches, is equal on all ranks and in all epochs.
    """

    planner: EpochPlanner
    rank: int = 0
    epoch: int = 0

    @property
    def sampler(self) -> "PackedBatchSampler":
        """This batch sampler itself, because accelerate calls `set_epoch` on `sampler` after `skip_first_batches`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose micro-batches the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.planner.num_steps * self.planner.packing.accumulation  # optimizer steps x micro-batches of a step

    def __iter__(self) -> Iterator[RankShare]:
        return RankShare.of_schedule(self.planner.schedule(self.epoch), self.rank)


@dataclass
class PaddedBatchSampler:
    """Batch sampler for padded evaluation: yields `batch_size` documents at a time to one rank, in table order.

    Ranks take turns batch by batch. All ranks have the same number of batches of the same size: the last batches are
    filled with the dummy document. From `batch_size` and `num_processes` accelerate computes how many rows of the last
    gathered batch are real, so that `gather_for_metrics` cuts the dummies off. Accelerate decides the names of both.
    """

    num_documents: int
    batch_size: int  # number of documents in each batch of one rank
    rank: int
    num_processes: int  # number of ranks

    def __len__(self) -> int:
        return -(-self.num_documents // (self.batch_size * self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        for turn in range(len(self)):
            first = (turn * self.num_processes + self.rank) * self.batch_size
            yield [i if i < self.num_documents else NO_DOCUMENTS for i in range(first, first + self.batch_size)]


class PackContent:
    """Adds what a pack holds beside tokens to its batch, such as images. This class adds nothing, for packs of text."""

    # If several ranks share a pack: whether the batch holds all tokens, and each rank cuts out its part inside the
    # model, before the decoder. Otherwise the batch holds the part of the rank
    is_cut_in_model: ClassVar[bool] = False

    def with_placeholder(self, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the documents of a pack, and one with an image if the model needs an image and none has one."""
        return documents

    def __call__(
        self, documents: list[dict[str, Any]], runs: list[DocumentRun], position_ids: Tensor
    ) -> dict[str, Any]:
        """Return entries to add to the batch of a pack, or to replace in it.

        Args:
            documents: the documents of the pack.
            runs: for each document, which of the T tokens of the pack belong to it, in the order of the pack. If
                documents share a common beginning, the pack has its tokens once, and they belong to the first of these
                documents.
            position_ids: position of each token in its document, shape (1, T), with padding.
        """
        return {}

    def checksum_tensors(self, batch: dict[str, Any]) -> list[Tensor]:
        """Return tensors of the added entries. Ranks that share a pack hash them, to check that their packs agree."""
        return []


TEXT_CONTENT = PackContent()  # adds nothing


@dataclass
class PackCollator:
    """Collator of the trainer: makes the batch of a pack that a rank computes.

    First the tokens become one sequence of T tokens, padded so that T is a multiple of the number of ranks that share
    the pack. Then the content beside tokens is added, and the part of the rank is cut out.
    """

    text_collator: PackedDataCollator  # a `PrefixCollator` if documents share common beginnings
    content: PackContent = TEXT_CONTENT

    def __call__(self, pack: list[dict[str, Any]]) -> dict[str, Any]:
        share = RankShare.like(pack, pack)  # for a plain list, a group of this rank alone
        documents = self.content.with_placeholder(share)
        batch, runs = self.text_collator.collate(documents, share.group.size)
        batch |= self.content(documents, runs, batch["position_ids"])
        # `labels_only`: whether only the labels are cut to the part of the rank, and the batch keeps all tokens
        return cut_part(
            batch,
            share.group,
            labels_only=self.content.is_cut_in_model,
            checksum_tensors=self.content.checksum_tensors,
        )


@dataclass
class PaddedCollator:
    """Converts documents to int64 for a collator of TRL, which keeps their dtype. Losses need int64 labels."""

    collate: Callable[[list[dict[str, np.ndarray]]], dict[str, Any]]  # the collator of TRL

    def __call__(self, documents: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        return self.collate(
            [{name: values.astype(np.int64) for name, values in document.items()} for document in documents]
        )


def document_loader(
    dataset: torch.utils.data.Dataset[Any],
    batch_sampler: Iterable[list[Any]],
    collate: Callable[[Any], dict[str, Any]],
    *,
    device: torch.device | None,
    **dataloader_kwargs: Any,
) -> DataLoaderShard:
    """Return a data loader for one rank, prepared by accelerate so that its batches are moved to the device.

    The sampler yields the batches of one rank already, so accelerate must not divide them between the ranks again. It
    would do so without an error, and training would miss documents.

    Args:
        dataset: returns the documents for the indices of a batch (`__getitems__`).
        batch_sampler: yields the indices of each micro-batch of this rank.
        collate: makes the batch of the documents. If ranks share packs, it contains a `PackCollator`.
        device: the device of the batches, or None to leave them on the CPU.
        dataloader_kwargs: further arguments of `DataLoader`.
    """
    if dataloader_kwargs.get("num_workers"):  # worker processes are forked, and gloo has threads
        wait_for_threads_before_forks()
    loader = prepare_data_loader(
        DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=collate, **dataloader_kwargs),
        device=device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        rng_types=None,
        dispatch_batches=False,
        non_blocking=dataloader_kwargs.get("pin_memory", False),
    )
    keep_from_preparing(loader)
    return loader


def packed_dataloader(  # noqa: PLR0913 - the arguments of a plan, a sampler and a collator
    dataset: Dataset,
    max_length: int,
    batch_size: int = 1,
    *,
    strategy: Strategy = "stream",
    overlong: Overlong | None = None,
    gradient_accumulation_steps: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    synchronisation: Synchronisation = "micro",
    cost_model: CostModel | PreTrainedConfig = LLAMA_7B,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    **dataloader_kwargs: Any,
) -> DataLoader[Any]:
    """
    Create a data loader that yields packed batches of a tokenised dataset, for any training loop.

    Each pass over the loader is the next epoch, with a new plan of packs. `loader.set_epoch(epoch)` chooses an epoch.
    In each epoch the batches of all ranks together hold every document once, except for dropped documents. The length
    of the loader is the number of micro-batches of this rank, a multiple of `gradient_accumulation_steps`.

    Call `prepare_for_packing(model)` once before training, so that the model reads the boundaries of the documents, and
    the isolation of documents is proved.

    Args:
        dataset (`Dataset`):
            Tokenised dataset with the column `"input_ids"` and, optionally, `"labels"` and `"seq_lengths"`.
        max_length (`int`):
            Largest number of tokens of a document.
        batch_size (`int`, *optional*, defaults to `1`):
            A pack holds at most `batch_size * max_length` tokens.
        strategy (`str`, *optional*, defaults to `"stream"`):
            Strategy of packing: `"stream"`, `"bfd"`, `"bfd_split"`, `"wrapped"` or `"minibatch"`.
        overlong (`str`, *optional*):
            What to do with documents of more than `max_length` tokens: `"truncate"`, `"split"`, `"drop"` or `"raise"`.
            By default the strategy decides.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Number of micro-batches of an optimizer step.
        rank (`int`, *optional*, defaults to `0`):
            Data-parallel rank of this process.
        world_size (`int`, *optional*, defaults to `1`):
            Number of data-parallel ranks.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the order of documents.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether to shuffle the documents. Otherwise they are packed in the order of the dataset.
        synchronisation (`str`, *optional*, defaults to `"micro"`):
            When the ranks wait for each other: `"step"` for engines that exchange gradients once per optimizer step
            (DDP, ZeRO-1), `"micro"` for all other engines.
        cost_model (`CostModel` or `PreTrainedConfig`, *optional*):
            Config of the model, from which the costs of documents are computed to balance the ranks. By default the
            costs are the costs of a Llama model with 7B parameters.
        collate (`Callable`, *optional*):
            Function that makes a batch of a list of documents. By default a [`PackedDataCollator`].
        **dataloader_kwargs:
            Further arguments of `DataLoader`, such as `num_workers`.

    Returns:
        `DataLoader`: The data loader of this rank.

    Raises:
        ValueError: If an argument is unknown or contradicts another argument, if `rank` is not in [0, world_size), or
            if rows are padded.

    Examples:
    ```python
    >>> from datasets import Dataset
    >>> from trl_packfix import packed_dataloader

    >>> dataset = Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]})
    >>> [batch["input_ids"].shape for batch in packed_dataloader(dataset, max_length=7)]
    [torch.Size([1, 7]), torch.Size([1, 7])]

    ```
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("overlong", overlong, (None, *get_args(Overlong)))
    check_choice("synchronisation", synchronisation, get_args(Synchronisation))
    check_overlong("strategy", strategy, overlong)
    check_count("batch_size", batch_size)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps)
    check_rank(rank, world_size)
    check_max_length(max_length, batch_size)
    reader = TokenReader(dataset)
    traits = STRATEGIES[strategy]
    check_not_padded(dataset, "given")
    check_boundaries(dataset, "given")
    # `cuts_blocks`: whether all documents are concatenated and cut every `max_length` tokens, as by "wrapped"
    documents = cached_documents(reader, max_length, overlong or traits.overlong, cuts_blocks=traits.cuts_blocks)
    packing = Packing(
        max_length=max_length,
        batch_size=batch_size,
        strategy=strategy,
        accumulation=gradient_accumulation_steps,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
        synchronisation=synchronisation,
        cost_model=cost_model if isinstance(cost_model, CostModel) else make_cost_model(cost_model),
    )
    planner = EpochPlanner(documents, packing)
    document_dataset = DocumentDataset(reader, documents)
    sampler = PackedBatchSampler(planner, rank)
    return document_loader(document_dataset, sampler, collate or PackedDataCollator(), device=None, **dataloader_kwargs)
