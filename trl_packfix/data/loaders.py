"""Data loaders over documents, for the Trainer and for other training loops.

`PackedBatchSampler` yields one rank's micro-batches of the schedule, `DocumentDataset` reads their documents, and the
caller's collator makes the batch. The sampler yields the batches of one rank already, so accelerate must not shard the
loader again: see `document_loader`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig

from ..compat import keep_from_preparing
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.packing import Packing
from ..planning.schedule import NO_DOCUMENTS
from ..planning.strategies import STRATEGIES, Strategy
from ..planning.units import Synchronisation
from .cache import cached_documents
from .collator import IGNORE_INDEX, PackedDataCollator
from .dataset_checks import check_choice, check_count, check_max_length, check_not_padded, check_overlong, check_rank
from .documents import Documents, Overlong
from .epochs import EpochPlanner
from .image_collator import NO_IMAGES, PackedImages
from .model_costs import make_cost_model
from .rank_share import RankShare, cut_part
from .reader import RowReader, TokenReader
from .row_values import RowValues
from .threads import wait_for_threads_before_forks


class DocumentDataset(torch.utils.data.Dataset[Any]):
    """Documents by index, as numpy views of the table, with weight and source; -1 is the dummy of an empty rank."""

    def __init__(
        self, reader: RowReader, documents: Documents, pad_token_id: int = 0, *, values: RowValues | None = None
    ):
        self.reader = reader
        self.documents = documents
        self.pad_token_id = pad_token_id
        self.values = values or RowValues()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        # `tolist` for all indices at once: indexing numpy arrays one by one costs more than reading a short document.
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
    """The document that a rank without documents runs: two tokens, neither of them trained."""
    return {"input_ids": np.full(2, pad_token_id), "labels": np.full(2, IGNORE_INDEX)}


class PackedBatchSampler:
    """Yields, for one rank, the document indices of each micro-batch of an epoch.

    The length is the same in every epoch and on every rank.
    """

    def __init__(self, planner: EpochPlanner, rank: int = 0):
        self.planner = planner
        self.rank = rank
        self.epoch = 0

    @property
    def sampler(self) -> "PackedBatchSampler":
        # After `skip_first_batches`, accelerate calls `set_epoch` on `batch_sampler.batch_sampler.sampler` only.
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.planner.num_steps * self.planner.packing.accumulation

    def __iter__(self) -> Iterator[RankShare]:
        schedule = self.planner.schedule(self.epoch)
        for documents, part in zip(schedule.micro_batches(self.rank), schedule.parts_of_rank(self.rank), strict=True):
            yield RankShare(documents.tolist(), *part)


@dataclass
class PaddedBatchSampler:
    """Yields, for one rank, `batch_size` documents at a time in table order, for padded evaluation.

    Ranks take turns batch by batch. All run the same number of batches of the same size: the last ones are filled with
    the dummy document. accelerate reads `batch_size` and `num_processes` to compute how many rows of the last gathered
    batch are real, so that `gather_for_metrics` cuts the dummies off.
    """

    num_documents: int
    batch_size: int
    rank: int
    num_processes: int

    def __len__(self) -> int:
        return -(-self.num_documents // (self.batch_size * self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        for turn in range(len(self)):
            first = (turn * self.num_processes + self.rank) * self.batch_size
            yield [i if i < self.num_documents else NO_DOCUMENTS for i in range(first, first + self.batch_size)]


@dataclass
class PackCollator:
    """Documents -> the batch of a pack that a rank computes: tokens, common beginnings, images, the part of the rank.

    Only the rows pad, in one place: T is a multiple of the setting and of the number of ranks that share the pack.
    """

    rows: PackedDataCollator  # a `PrefixCollator` shares common beginnings
    images: PackedImages = NO_IMAGES

    def __call__(self, pack: list[dict[str, Any]]) -> dict[str, Any]:
        part = RankShare.like(pack, pack)
        documents = self.images.with_placeholder(part)
        batch, runs = self.rows.collate(documents, part.degree)
        batch |= self.images(documents, runs, batch["position_ids"])
        return cut_part(batch, part.degree, part.member, has_images=bool(self.images.layout.images))


@dataclass
class PaddedCollator:
    """TRL's collator for rows of the reader, converted to int64: it keeps their dtype, but losses need int64 labels."""

    collate: Callable[[list[dict[str, np.ndarray]]], dict[str, Any]]

    def __call__(self, documents: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        return self.collate([{name: values.astype(np.int64) for name, values in row.items()} for row in documents])


def document_loader(
    dataset: torch.utils.data.Dataset[Any],
    batch_sampler: Iterable[list[Any]],
    collate: Callable[[Any], dict[str, Any]],
    *,
    device: torch.device | None,
    **dataloader_kwargs: Any,
) -> DataLoaderShard:
    """Batches of one rank, of what `dataset` gives for each that the sampler yields, on the device.

    accelerate moves them there, but does not shard them again. Where ranks share packs, `collate` is a `PackCollator`.
    """
    if dataloader_kwargs.get("num_workers"):
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
    """Packed batches of a tokenised dataset for any training loop: plan, sampler and collator in one `DataLoader`.

    Each pass over the loader is the next epoch and has its own plan; `loader.set_epoch(epoch)` chooses an epoch. The
    batches of all ranks together hold every document that is not dropped once per epoch. `len()` counts micro-batches,
    a multiple of `gradient_accumulation_steps`. Call `prepare_for_packing(model)` once, so that the model reads the
    boundaries and documents are proved isolated.

    Args:
        dataset: a `datasets.Dataset` with `input_ids` and optionally `labels`, `seq_lengths`.
        max_length, batch_size: most tokens of a document; a pack holds at most `batch_size * max_length`.
        strategy: "stream", "bfd", "bfd_split", "wrapped" or "minibatch".
        overlong: "truncate", "split", "drop" or "raise" longer documents; None: what the strategy implies.
        gradient_accumulation_steps: micro-batches per optimizer step.
        rank, world_size: this data-parallel rank, and the number of data-parallel ranks.
        seed, shuffle: of the order of documents; without shuffling it is that of the table.
        synchronisation: "step" if ranks wait for each other only after a step (DDP, ZeRO-1); else "micro".
        cost_model: the config of the model, from which costs are computed; default: those of a 7B Llama.
        collate, dataloader_kwargs: default `PackedDataCollator()`; for `DataLoader` (`num_workers`, ...).

    Raises:
        ValueError: unknown or contradictory arguments, `rank` outside [0, world_size), or padded rows.

    >>> dataset = Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]})
    >>> [batch["input_ids"].shape for batch in packed_dataloader(dataset, max_length=7)]
    [torch.Size([1, 7]), torch.Size([1, 7])]
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
    documents = cached_documents(reader, max_length, overlong or traits.overlong, wrapped=traits.cuts_blocks)
    how: dict[str, Any] = {"strategy": strategy, "seed": seed, "shuffle": shuffle, "synchronisation": synchronisation}
    how |= {"batch_size": batch_size, "accumulation": gradient_accumulation_steps, "world_size": world_size}
    costs = cost_model if isinstance(cost_model, CostModel) else make_cost_model(cost_model)
    planner = EpochPlanner(documents, Packing(max_length=max_length, cost_model=costs, **how))
    rows = DocumentDataset(reader, documents)
    sampler = PackedBatchSampler(planner, rank)
    return document_loader(rows, sampler, collate or PackedDataCollator(), device=None, **dataloader_kwargs)
