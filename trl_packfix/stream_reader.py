"""Reading a stream of documents: the share of a rank, chunk by chunk, with the state to go on from each chunk.

Reading is what costs time (files, chat templates, tokenisation), so it may run in worker processes; packing is cheap
and stays in the training process, which therefore always knows what was consumed. Each chunk carries the state of its
reader behind it: what workers have read ahead is in no state and is read again after a restart.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import fsspec.asyn
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import get_worker_info

from . import checks
from .compat import state_is_exact
from .documents import Overlong, make_documents
from .ledger import Ledger
from .reader import BAD_ROW, TokenReader

logger = logging.getLogger(__name__)

CHUNK = 128  # examples that are read, cut and sent together
COLUMNS = ("input_ids", "labels", "seq_lengths", "attention_mask", BAD_ROW)
MANY_RANKS = 8

DocumentTokens = dict[str, np.ndarray]
"""`input_ids` and `labels` of one document, int32, shape (tokens,)."""


@dataclass(frozen=True)
class Share:
    """What one rank reads: its own shards (then it is the only one of `count`), or all, of which it takes a part."""

    dataset: IterableDataset
    index: int
    count: int


def share_of_rank(dataset: IterableDataset, rank: int, world_size: int) -> Share:
    """Whole shards for each rank where they can be shared evenly; else every rank reads everything.

    Raises:
        ValueError: the dataset has been split between ranks already.
    """
    if dataset._distributed is not None:
        raise ValueError(
            f"The dataset was split by node already (`split_dataset_by_node`, {dataset._distributed.world_size} "
            "nodes). Every rank takes its share of a stream by itself, so documents would be lost. Give every rank the "
            "whole dataset."
        )
    if dataset.num_shards % world_size == 0:
        # Not `split_dataset_by_node`: it deals the shards anew in every pass, and ranks end their passes one by one.
        return Share(dataset.shard(world_size, rank, contiguous=False), 0, 1)
    if world_size > MANY_RANKS and rank == 0:
        logger.warning(
            "The stream has %d shards, which %d ranks cannot share evenly: every rank reads and tokenises all "
            "documents and trains on its share of the packs. Give it a multiple of %d shards, or tokenise it once.",
            dataset.num_shards,
            world_size,
            world_size,
        )
    return Share(dataset, rank, world_size)


@dataclass(frozen=True)
class ReaderState:
    """How far one reader has come in a pass over its shards.

    Attributes:
        position: `IterableDataset.state_dict()` behind the last chunk, None at the start or where it is not exact.
        examples: read so far. chunks: handed on so far. done: nothing is left.
    """

    position: dict[str, Any] | None = None
    examples: int = 0
    chunks: int = 0
    done: bool = False


@dataclass(frozen=True)
class Chunk:
    """Documents in order, what their making cost, and the state of reader number `reader` behind them."""

    documents: list[DocumentTokens]
    ledger: Ledger
    reader: int
    state: ReaderState


@dataclass
class StreamReader(torch.utils.data.IterableDataset):
    """One pass over a stream, in chunks; under a `DataLoader` with workers each one reads a part of its own.

    Args:
        parts: for each reader what it reads: examples with `input_ids`, optionally `labels`, `seq_lengths`,
            `attention_mask`. One reader per worker, or one without workers.
        states: where each reader goes on.
        max_length, overlong, truncation_mode: the policy for long documents, see `make_documents`.
        vocab_size: ids outside it are refused; None: not known.
    """

    parts: list[IterableDataset]
    states: list[ReaderState]
    max_length: int
    overlong: Overlong = "truncate"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    vocab_size: int | None = None

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        state, dataset = self.states[number], self.parts[number]
        if state.done:
            return
        if worker:
            fsspec.asyn.reset_lock()  # of the process that this one was forked from: remote files would wait for it
        if state.chunks > min(other.chunks for other in self.states if not other.done):
            # Readers take turns, and this one was a turn ahead when the state was saved.
            yield Chunk([], Ledger(), number, state)
        is_exact = state_is_exact(dataset)
        dataset.load_state_dict(state.position)
        # Not `iter(dataset)`: in a worker that would share out the part once more.
        batches = dataset.iter(batch_size=CHUNK)
        if not is_exact and state.chunks:
            # Shuffle buffers are not part of the dataset's state: read again what they had read.
            next(islice(batches, state.chunks - 1, None), None)
        examples, chunks = state.examples, state.chunks
        for batch in batches:
            table = as_table(batch)
            documents, ledger = self._documents(table, examples)
            examples, chunks = examples + len(table), chunks + 1
            position = dataset.state_dict() if is_exact else None
            yield Chunk(documents, ledger, number, ReaderState(position, examples, chunks))
        yield Chunk([], Ledger(), number, ReaderState(None, examples, chunks + 1, done=True))

    def _documents(self, table: Dataset, first: int) -> tuple[list[DocumentTokens], Ledger]:
        try:
            if "input_ids" in table.column_names:
                checks.check_tokens(table, "train", self.vocab_size)
            reader = TokenReader(table)
            spans = make_documents(reader, self.max_length, self.overlong, self.truncation_mode, may_be_empty=True)
        except ValueError as error:
            raise ValueError(
                f"{error} (A stream: rows are counted from the {first:,}th that this reader read.)"
            ) from error
        documents = [
            # Copies: a view would keep the tokens of the whole chunk in memory.
            {name: values.astype(np.int32) for name, values in reader.read(row, start, stop).items()}
            for row, start, stop in zip(spans.row, spans.start, spans.stop, strict=True)
        ]
        return documents, spans.ledger


def as_table(batch: dict[str, Any]) -> Dataset:
    """Columns of rows (lists, arrays or tensors) as a table in memory, with those that packing reads."""
    columns = {}
    for name in COLUMNS:
        if name in batch:
            rows = [row if isinstance(row, list | str | None) else np.asarray(row) for row in batch[name]]
            columns[name] = pa.array(rows)
    return Dataset(pa.table(columns), fingerprint="chunk")  # its hash would take longer than all the rest


def read_whole(dataset: IterableDataset) -> Dataset:
    """All examples of a stream that ends, as a table in memory."""
    tables = [as_table(batch) for batch in dataset.iter(batch_size=CHUNK)]
    if not tables:
        raise ValueError(
            "The evaluation set is an `IterableDataset` without examples, and no number can be computed from none. "
            "Check that it was not read to its end already, and that its filters leave something."
        )
    return concatenate_datasets(tables)
