"""Data loaders over documents, inside the Trainer and without it.

`EpochPlanner` turns documents into the schedule of an epoch, `PackedBatchSampler` hands out one rank's micro-batches,
`DocumentDataset` reads them, and the collator of the caller makes the batch. The sampler knows ranks, so nothing may
shard it again: accelerate is told to leave the loader alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader

from .balancing import Synchronisation
from .collator import IGNORE_INDEX, PackedDataCollator
from .costs import LLAMA_7B, CostModel
from .documents import Documents, Overlong
from .planning import PackPlan, plan_bfd, plan_blocks, plan_packs, plan_stream, reordered
from .prepared import prepared_documents
from .reader import TokenReader
from .scheduling import EMPTY, Balance, Schedule, num_optimizer_steps, schedule_minibatches, schedule_packs

Strategy = Literal["stream", "bfd", "bfd_split", "wrapped", "minibatch"]
IMPLIED_OVERLONG: dict[str, Overlong] = {
    "stream": "truncate",
    "bfd": "truncate",
    "bfd_split": "split",
    "wrapped": "split",
    "minibatch": "truncate",
}


class DocumentDataset(torch.utils.data.Dataset):
    """Documents by index, as dictionaries of numpy views on the table; index -1 is the dummy of an empty rank."""

    def __init__(self, reader: TokenReader, documents: Documents, pad_token_id: int = 0):
        self.reader = reader
        self.documents = documents
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index == EMPTY:
            return dummy_document(self.pad_token_id)
        documents = self.documents
        return self.reader.read(documents.row[index], documents.start[index], documents.stop[index])

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        return [self[index] for index in indices]


def dummy_document(pad_token_id: int) -> dict[str, np.ndarray]:
    """What a rank without documents runs: two tokens, none trained."""
    return {"input_ids": np.full(2, pad_token_id), "labels": np.full(2, IGNORE_INDEX)}


@dataclass
class EpochPlanner:
    """Documents -> plan -> schedule, for any epoch, with the number of optimizer steps of the first.

    Args:
        documents: what to pack.
        batch_size, max_length: their product is the capacity of a pack in tokens.
        accumulation, world_size: micro-batches per optimizer step, data-parallel ranks.
        shuffle: False keeps the order of the table (curricula, upsampled mixes).
        synchronisation: when ranks wait for each other, after every micro-batch or after the step.
        cost_model: of the model, for the cost of attention against that of the matrices.
    """

    documents: Documents
    strategy: Strategy
    batch_size: int
    max_length: int
    accumulation: int = 1
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    balance: Balance = "step"
    drop_last: bool = False
    synchronisation: Synchronisation = "micro"
    cost_model: CostModel = LLAMA_7B
    num_steps: int = field(init=False)
    first_plan: PackPlan | None = field(init=False, default=None, repr=False)
    _latest: tuple[int, Schedule] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.strategy == "minibatch":
            self.num_steps = num_optimizer_steps(
                len(self.documents), self.batch_size * self.accumulation, self.world_size, self.drop_last
            )
            unit = f"{len(self.documents)} documents"
        else:
            self.first_plan = self._plan(0)
            self.num_steps = num_optimizer_steps(
                self.first_plan.num_packs, self.accumulation, self.world_size, self.drop_last
            )
            unit = f"{self.first_plan.num_packs} packs"
        if self.num_steps == 0:
            raise ValueError(
                f"The epoch has {unit}, and one optimizer step needs more of them ({self.accumulation} accumulation "
                f"steps x {self.world_size} ranks). With `dataloader_drop_last=True` the only, incomplete step is "
                "dropped and nothing would be trained. Set `dataloader_drop_last=False`, or lower "
                "`gradient_accumulation_steps` or the batch size."
            )

    @property
    def capacity(self) -> int:
        """Most tokens of a pack."""
        return self.batch_size * self.max_length

    def _plan(self, epoch: int) -> PackPlan:
        lengths = self.documents.lengths
        if self.strategy == "wrapped":
            assert self.documents.block is not None
            rng = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
            return plan_blocks(self.documents.block, lengths, self.batch_size, self.capacity, rng)
        if self.strategy == "stream":
            if not self.shuffle:
                return plan_stream(lengths, np.arange(len(lengths)), self.capacity)
            return plan_packs(lengths, self.capacity, "stream", self.seed, epoch)
        if not self.shuffle:
            return plan_bfd(lengths, self.capacity, None)
        return plan_packs(lengths, self.capacity, "bfd", self.seed, epoch)

    def schedule(self, epoch: int) -> Schedule:
        """Documents of every step, micro-batch and rank of one epoch."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._schedule(epoch))
        return self._latest[1]

    def _schedule(self, epoch: int) -> Schedule:
        lengths = self.documents.lengths
        if self.strategy == "minibatch":
            return schedule_minibatches(
                lengths,
                unpacked_order(len(lengths), self.seed, epoch) if self.shuffle else np.arange(len(lengths)),
                self.batch_size,
                self.capacity,
                self.accumulation,
                self.world_size,
                self.cost_model,
                self.balance,
                self.synchronisation,
                self.drop_last,
            )
        assert self.first_plan is not None  # of every strategy but `minibatch`
        plan = self.first_plan if epoch == 0 else self._plan(epoch)
        if plan.num_packs > self.num_steps * self.accumulation * self.world_size and not self.drop_last:
            # The Trainer fixed the number of steps with the first plan; a plan that needs more cannot be used.
            plan = reordered(self.first_plan, np.random.default_rng((self.seed, epoch)))
        return schedule_packs(
            plan,
            lengths,
            self.num_steps,
            self.accumulation,
            self.world_size,
            self.cost_model,
            self.balance,
            self.synchronisation,
            self.drop_last,
        )


def unpacked_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which accelerate's seedable sampler visits the rows of an unpacked run, shape (N,).

    `minibatch` follows it, so that both runs see the same documents in every optimizer step.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_documents, generator=generator).numpy()


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


def document_loader(
    dataset: DocumentDataset,
    batch_sampler: PackedBatchSampler | PaddedBatchSampler,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    device: torch.device | None,
    **dataloader_kwargs: Any,
) -> DataLoaderShard:
    """Batches of the documents that the sampler names."""
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


def packed_dataloader(
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
    cost_model: CostModel = LLAMA_7B,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    **dataloader_kwargs: Any,
) -> DataLoader:
    """Packed batches of a tokenised dataset for any training loop: plan, sampler and collator in one `DataLoader`.

    Each pass over the loader is the next epoch, with a plan of its own; `loader.set_epoch(epoch)` chooses one. The
    batches of all ranks together hold every kept document once per epoch. The model must hear of the boundaries: see
    `trl_packfix.attention.select_attention`, and prove it with `check_isolation`.

    Args:
        dataset: a `datasets.Dataset` with `input_ids` and optionally `labels`, `seq_lengths`.
        max_length, batch_size: most tokens of a document; a pack holds `batch_size * max_length` tokens.
        strategy: "stream", "bfd", "bfd_split", "wrapped" or "minibatch".
        overlong: "truncate", "split", "drop" or "raise"; None: what the strategy implies.
        gradient_accumulation_steps, rank, world_size: micro-batches per optimizer step; this data-parallel rank of all.
        synchronisation: "step" where ranks wait for each other only at the end of a step (DDP, ZeRO-1).
        cost_model: of the model, `trl_packfix.costs.cost_model(config)`; the default is that of a Llama of 7B.
        collate: default `PackedDataCollator()`.
        dataloader_kwargs: for `torch.utils.data.DataLoader` (`num_workers`, `pin_memory`, ...).

    Returns:
        A `DataLoader` with `len()` micro-batches, a multiple of `gradient_accumulation_steps`.

    >>> dataset = Dataset.from_dict({"input_ids": [[1] * 5, [2] * 3, [3] * 4, [4] * 2]})
    >>> sorted(batch["input_ids"].shape for batch in packed_dataloader(dataset, max_length=7))
    [torch.Size([1, 7]), torch.Size([1, 7])]
    """
    reader = TokenReader(dataset)
    documents = prepared_documents(
        reader, max_length, overlong or IMPLIED_OVERLONG[strategy], wrapped=strategy == "wrapped"
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
        cost_model=cost_model,
    )
    return document_loader(
        DocumentDataset(reader, documents),
        PackedBatchSampler(planner, rank),
        collate or PackedDataCollator(),
        device=None,  # the caller moves batches
        **dataloader_kwargs,
    )
