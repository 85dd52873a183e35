"""Read a rank's share of a stream of documents, chunk by chunk, with a state to resume from after each chunk.

Reading is slow (files, chat templates, tokenisation), so it may run in worker processes. Packing is cheap and runs in
the training process, so that process has a record of every document consumed. Each chunk comes with the state of its
reader after it. Chunks that workers have read ahead are in no saved state; a restart reads them again.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NoReturn

import fsspec.asyn
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import get_worker_info

from ..compat import state_is_exact
from ..planning.packing import Packing
from ..samples.row import BAD_ROW_COLUMN
from .dataset_checks import check_tokens
from .documents import Documents, Ledger, make_documents
from .reader import TokenReader
from .row_values import SOURCES, read_row_values
from .stream_images import StreamImages

logger = logging.getLogger(__name__)

CHUNK = 128  # examples that are read, cut and sent together, without images
TOKEN_COLUMNS = ("input_ids", "labels", "seq_lengths", "attention_mask", BAD_ROW_COLUMN)
MANY_RANKS = 8

DocumentTokens = dict[str, Any]
"""`input_ids` and `labels` of one document, int32, shape (tokens,); its weight, a scalar, if rows have weights; the
name of its source, if they have sources; with images, what it is made of (`ENCODED`)."""

Path = Sequence[tuple[int, int]]
"""Shards of shards: the number of parts, and the index of the part, for each division. () is the whole stream."""


def part_of(dataset: IterableDataset, path: Path) -> IterableDataset:
    for num, index in path:
        dataset = dataset.shard(num, index, contiguous=False)
    return dataset


def share_of_rank(dataset: IterableDataset, rank: int, world_size: int, *, degree: int = 1) -> tuple[Path, int]:
    """The path of what a rank reads, and the number of ranks that read the same.

    Each group of `degree` ranks reads whole shards if their number is a multiple of the number of groups. Else every
    rank reads everything. Without sequence parallelism each rank is a group.

    Raises:
        ValueError: the dataset has been split between ranks already.
    """
    if dataset._distributed is not None:
        raise ValueError(
            f"The dataset was split by node already (`split_dataset_by_node`, {dataset._distributed.world_size} "
            "nodes). It would be split between the ranks once more, and documents would be lost. Give every rank the "
            "whole dataset."
        )
    num_groups = world_size // degree
    if dataset.num_shards % num_groups == 0:
        # Not `split_dataset_by_node`: it assigns the shards anew in every pass, but ranks end their passes at
        # different times.
        return ((num_groups, rank // degree),), degree
    if world_size > MANY_RANKS and rank == 0:
        logger.warning(
            "The stream has %d shards, which %d %s cannot share evenly: every rank reads and tokenises all "
            "documents and trains on its share of the packs. Give it a multiple of %d shards, or tokenise it once.",
            dataset.num_shards,
            num_groups,
            "ranks" if degree == 1 else f"groups of {degree} ranks",
            num_groups,
        )
    return (), world_size


@dataclass(frozen=True)
class ReaderState:
    """The position of one reader in a pass over its part of the stream."""

    # `IterableDataset.state_dict()` after the last chunk; None at the start or if that state is not exact
    position: dict[str, Any] | None = None
    examples: int = 0  # read so far
    chunks: int = 0  # yielded so far by this run, or by those before it with the same readers
    done: bool = False


@dataclass(frozen=True)
class DocumentChunk:
    """Documents in order, their ledger, and the state of reader number `reader` after them."""

    documents: list[DocumentTokens]
    ledger: Ledger
    reader: int
    state: ReaderState


@dataclass(frozen=True)
class StreamTokens:
    """How the rows of a stream become documents if they have tokens; `StreamImages` for those with images."""

    vocab_size: int | None = None
    process: None = None
    chunk: ClassVar[int] = CHUNK

    def open_stream(self, dataset: IterableDataset) -> tuple[IterableDataset, "StreamTokens"]:
        return dataset, self

    def read(self, batch: dict[str, Any], table: Dataset, packing: Packing) -> tuple[list[Any], Documents, None]:
        """The documents of a batch, whose columns are in `table`, and their spans."""
        if "input_ids" in table.column_names:
            check_tokens(table, "train", self.vocab_size)
        reader = TokenReader(table)
        mode = packing.truncation_mode
        spans = make_documents(reader, packing.max_length, packing.overlong, truncation_mode=mode, may_be_empty=True)
        documents = [
            # Copies, because a view would hold the tokens of the whole chunk in memory.
            {name: tokens.astype(np.int32) for name, tokens in reader.read(row, start, stop).items()}
            for row, start, stop in zip(spans.row, spans.start, spans.stop, strict=True)
        ]
        return documents, spans, None


@dataclass
class StreamReader(torch.utils.data.IterableDataset[Any]):
    """One pass over a stream, in chunks. In a `DataLoader` with workers, each worker reads its own parts.

    Args:
        parts: of the stream: examples with `input_ids`, optionally `labels`, `seq_lengths`, `attention_mask`, or with
            images. There is one for each worker, or one without workers. For the rest of a pass of other ranks there
            may be more or fewer; each worker reads several in turn.
        states: the state from which each part continues.
        weight_column, source_column: columns with the weight and the source of each row, which its documents get.
    """

    parts: list[IterableDataset]
    states: list[ReaderState]
    packing: Packing
    rows: StreamTokens | StreamImages
    weight_column: str | None = None
    source_column: str | None = None

    def __iter__(self) -> Iterator[DocumentChunk]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        unread = [number for number in range(first, len(self.parts), step) if not self.states[number].done]
        if not unread:
            return
        if worker:
            fsspec.asyn.reset_lock()  # inherited from the parent process; reading remote files would wait for it
        by_worker = [self.states[i::step] for i in range(step)]
        turns = [sum(state.chunks for state in states) for states in by_worker]
        reading = [i for i, states in enumerate(by_worker) if not all(state.done for state in states)]
        if turns[first] > min(turns[i] for i in reading):
            # Workers take turns, and this one was one turn ahead when the state was saved.
            yield DocumentChunk([], Ledger(), unread[0], self.states[unread[0]])
        for number in unread:
            state = self.states[number]
            dataset = self.parts[number]
            is_exact = state_is_exact(dataset)
            position = state.position if is_exact else None
            dataset.load_state_dict(position)
            # Not `iter(dataset)`: in a worker that would split the part between the workers once more.
            batches = dataset.iter(batch_size=self.rows.chunk)
            if position is None and state.examples:
                # The dataset's state is not exact, or was not where the run was saved: read this pass from its start.
                next(islice(batches, -(-state.examples // self.rows.chunk) - 1, None), None)
            examples = state.examples
            chunks = state.chunks
            for batch in batches:
                documents, ledger = self._documents(batch, examples)
                examples = examples + len(next(iter(batch.values())))
                chunks = chunks + 1
                position = dataset.state_dict() if is_exact else None
                yield DocumentChunk(documents, ledger, number, ReaderState(position, examples, chunks))
            yield DocumentChunk([], Ledger(), number, ReaderState(None, examples, chunks + 1, done=True))

    def _documents(self, batch: dict[str, Any], first: int) -> tuple[list[DocumentTokens], Ledger]:
        columns = self.weight_column, self.source_column
        try:
            table = as_table(batch, *columns)
            values = read_row_values(table, *columns, name="train")
            documents, spans, conversations = self.rows.read(batch, table, self.packing)
            values = values.select(conversations)
        except ValueError as error:
            raise ValueError(
                f"{error} (A stream: rows are counted from number {first:,} of those that this reader read.)"
            ) from error
        for document, row in zip(documents, spans.row, strict=True):
            document |= values.for_row(row)
            if values.sources is not None:
                document[SOURCES] = values.names[values.sources[row]]
        return documents, spans.ledger


def as_table(batch: dict[str, Any], *others: str | None) -> Dataset:
    """Columns of rows (lists, arrays or tensors) as a table in memory: those that packing reads, and `others`."""
    columns = {}
    for name in (*TOKEN_COLUMNS, *others):
        if name is not None and name in batch:
            # `[()]` makes a scalar of an array without dimensions
            rows = [row if isinstance(row, list | str | None) else np.asarray(row)[()] for row in batch[name]]
            columns[name] = pa.array(rows)
    return Dataset(pa.table(columns), fingerprint="chunk")  # hashing the table would take longer than all the rest


def read_whole(dataset: IterableDataset, *others: str | None) -> Dataset:
    """All examples of a finite stream, as a table in memory, see `as_table`."""
    tables = [as_table(batch, *others) for batch in dataset.iter(batch_size=CHUNK)]
    if not tables:
        refuse_empty()
    return concatenate_datasets(tables)


def refuse_empty() -> NoReturn:
    raise ValueError(
        "The evaluation set is an `IterableDataset` that yielded 0 examples, so there is nothing to evaluate. Check "
        "that it was not read to its end before, and that its filters do not drop every example."
    )
