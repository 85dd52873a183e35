"""Data loaders over documents, inside the Trainer and without it.

`PackedBatchSampler` hands out one rank's micro-batches of the schedule, `DocumentDataset` reads them, and the collator
of the caller makes the batch. The sampler knows ranks, so nothing may shard it again: accelerate is told to leave the
loader alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig

from ..planning.balance import Synchronisation
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.schedule import EMPTY
from ..planning.strategies import STRATEGIES, Strategy
from .cache import prepared_documents
from .checks import (
    check_choice,
    check_count,
    check_max_length,
    check_not_padded,
    check_overlong,
)
from .collator import IGNORE_INDEX, PackedDataCollator
from .documents import Documents
from .epochs import EpochPlanner
from .model_costs import make_cost_model
from .reader import TokenReader
from .spans import Overlong
from .threads import wait_for_threads_before_forks


class DocumentDataset(torch.utils.data.Dataset):
    """Documents by index, as dictionaries of numpy views on the table; index -1 is the dummy of an empty rank."""

    def __init__(self, reader: TokenReader, documents: Documents, pad_token_id: int = 0):
        self.reader = reader
        self.documents = documents
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        # Python's own numbers for all at once: numpy's, one by one, cost more than the reading of a short document.
        columns = (self.documents.row, self.documents.start, self.documents.stop)
        rows, starts, stops = (column[indices].tolist() for column in columns)
        return [
            dummy_document(self.pad_token_id) if index == EMPTY else self.reader.read(row, start, stop)
            for index, row, start, stop in zip(indices, rows, starts, stops, strict=True)
        ]


def dummy_document(pad_token_id: int) -> dict[str, np.ndarray]:
    """What a rank without documents runs: two tokens, none trained."""
    return {"input_ids": np.full(2, pad_token_id), "labels": np.full(2, IGNORE_INDEX)}


class PackedBatchSampler:
    """Yields, for one rank, the document indices of each micro-batch of the epoch set by `set_epoch`.

    Its length is the same in every epoch and on every rank.
    """

    def __init__(self, planner: EpochPlanner, rank: int = 0):
        self.planner = planner
        self.rank = rank
        self.epoch = 0

    @property
    def sampler(self) -> "PackedBatchSampler":
        # accelerate, after `skip_first_batches`, reaches `set_epoch` only through `batch_sampler.batch_sampler.sampler`
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.planner.num_steps * self.planner.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for documents in self.planner.schedule(self.epoch).micro_batches(self.rank):
            yield documents.tolist()


class PaddedBatchSampler:
    """Yields, for one rank, `batch_size` documents at a time in table order, for padded evaluation.

    Ranks take turns batch by batch, and all run the same number of batches of the same size: the last ones are filled
    with the dummy document. `batch_size` and `num_processes` tell accelerate how many rows of the last gathered batch
    are real, so that `gather_for_metrics` cuts the dummies off.
    """

    def __init__(self, num_documents: int, batch_size: int, rank: int = 0, world_size: int = 1):
        self.num_documents = num_documents
        self.batch_size = batch_size
        self.rank = rank
        self.num_processes = world_size

    def __len__(self) -> int:
        return -(-self.num_documents // (self.batch_size * self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        for turn in range(len(self)):
            first = (turn * self.num_processes + self.rank) * self.batch_size
            yield [i if i < self.num_documents else EMPTY for i in range(first, first + self.batch_size)]


@dataclass
class PaddedCollator:
    """TRL's collator for rows that the reader made: it keeps their dtype, and losses take labels of int64 only."""

    collate: Callable[[list[dict[str, np.ndarray]]], dict[str, Any]]

    def __call__(self, documents: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        return self.collate([{name: values.astype(np.int64) for name, values in row.items()} for row in documents])


def document_loader(
    dataset: DocumentDataset,
    batch_sampler: PackedBatchSampler | PaddedBatchSampler,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    device: torch.device | None,
    **dataloader_kwargs: Any,
) -> DataLoaderShard:
    """Batches of the documents that the sampler names."""
    if dataloader_kwargs.get("num_workers"):
        wait_for_threads_before_forks()
    return left_alone(DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=collate, **dataloader_kwargs), device)


def left_alone(loader: DataLoader, device: torch.device | None) -> DataLoaderShard:
    """A loader that accelerate moves to the device and otherwise leaves alone: it knows the ranks already.

    (accelerate's own sharding of a rank-aware sampler trained 53 of 97 documents on 2 ranks, silently.)
    """
    loader = prepare_data_loader(
        loader,
        device=device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        rng_types=None,
        dispatch_batches=False,
        non_blocking=loader.pin_memory,
    )
    loader._is_accelerate_prepared = True
    return loader


def packed_dataloader(  # noqa: PLR0913 - the arguments of a plan, a sampler and a collator
    dataset: Dataset,
    max_length: int,
    batch_size: int = 1,
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
) -> DataLoader:
    """Packed batches of a tokenised dataset for any training loop: plan, sampler and collator in one `DataLoader`.

    Each pass over the loader is the next epoch, with a plan of its own; `loader.set_epoch(epoch)` chooses one. The
    batches of all ranks together hold every kept document once per epoch. Call `prepare_for_packing(model)` once, so
    that the model reads the boundaries, and prove it with `check_isolation(model)`.

    Args:
        dataset: a `datasets.Dataset` with `input_ids` and optionally `labels`, `seq_lengths`.
        max_length, batch_size: most tokens of a document; a pack holds `batch_size * max_length` tokens.
        strategy: "stream", "bfd", "bfd_split", "wrapped" or "minibatch".
        overlong: "truncate", "split", "drop" or "raise"; None: what the strategy implies.
        gradient_accumulation_steps, rank, world_size: micro-batches per optimizer step; this data-parallel rank of all.
        synchronisation: "step" where ranks wait for each other only at the end of a step (DDP, ZeRO-1).
        cost_model: the config of the model, from which costs follow; the default is the costs of a Llama of 7B.
        collate: default `PackedDataCollator()`.
        dataloader_kwargs: for `torch.utils.data.DataLoader` (`num_workers`, `pin_memory`, ...).

    Returns:
        A `DataLoader` with `len()` micro-batches, a multiple of `gradient_accumulation_steps`.

    Raises:
        ValueError: arguments that do not exist or contradict each other, a rank that is none, padded rows.

    >>> dataset = Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]})
    >>> sorted(batch["input_ids"].shape for batch in packed_dataloader(dataset, max_length=7))
    [torch.Size([1, 7]), torch.Size([1, 7])]
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("overlong", overlong, (None, *get_args(Overlong)))
    check_choice("synchronisation", synchronisation, get_args(Synchronisation))
    check_overlong("strategy", strategy, overlong)
    counts = {"batch_size": batch_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    for name, count in (counts | {"world_size": world_size}).items():
        check_count(name, count)
    check_max_length(max_length, batch_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"`rank={rank}` was given with `world_size={world_size}`. Ranks count from 0 to {world_size - 1}; any "
            "other would get documents of another rank, or none. Set `rank` to the data-parallel rank of this process."
        )
    reader = TokenReader(dataset)
    check_not_padded(dataset, "given")
    documents = prepared_documents(
        reader, max_length, overlong or STRATEGIES[strategy].overlong, wrapped=STRATEGIES[strategy].cuts_blocks
    )
    planner = EpochPlanner(
        documents,
        strategy,
        batch_size,
        max_length,
        gradient_accumulation_steps,
        world_size,
        seed,
        shuffle,
        synchronisation=synchronisation,
        cost_model=cost_model if isinstance(cost_model, CostModel) else make_cost_model(cost_model),
        keeps=rank == 0,
    )
    return document_loader(
        DocumentDataset(reader, documents),
        PackedBatchSampler(planner, rank),
        collate or PackedDataCollator(),
        device=None,  # the caller moves batches
        **dataloader_kwargs,
    )
