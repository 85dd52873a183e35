"""Read what one rank trains of a stream, chunk by chunk, with a state to resume from after each chunk.

The rows of the stream are tokenised while they are read. `StreamReader` cuts them to documents (`documents.py`) and
yields chunks of documents to `PackedStream` (`stream.py`), which packs them.

Reading is slow (files, chat templates, tokenisation), so it may run in worker processes of a `DataLoader`. Packing is
cheap and runs in the training process, which therefore knows which documents were trained. Each chunk comes with the
state of its reader after this chunk. Chunks that a worker has read ahead are not in a saved state, so a restart reads
them again.

Words:
    shard   one of the pieces into which a dataset can be divided, such as a file.
    share   what one rank reads: some of the shards, or all.
    part    what one reader reads: the share of the rank, or a piece of it for each worker.
    reader  what reads one part and has a position in it. Readers are numbered as their parts.
    chunk   documents that a reader yields together.
    group   neighbouring ranks that share packs (sequence parallelism). Their number is the degree.
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
from datasets import Dataset, IterableDataset
from torch.utils.data import get_worker_info

from ..compat import state_is_exact
from ..planning.arrays import restarts
from ..planning.packing import Packing
from ..samples.row import BAD_ROW_COLUMN
from .dataset_checks import check_tokens, refuse_restart
from .documents import Documents, Ledger, make_documents
from .reader import TokenReader
from .row_values import SOURCES, read_row_values

logger = logging.getLogger(__name__)

CHUNK = 128  # number of rows of text that are read, cut and sent together
TOKEN_COLUMNS = ("input_ids", "labels", "seq_lengths", "attention_mask", BAD_ROW_COLUMN)
MANY_RANKS = 8  # with more ranks, a warning is logged if every rank reads the whole stream

DocumentTokens = dict[str, Any]
"""One document: `input_ids` and `labels`, int32 arrays of shape (tokens,). If rows have weights, also its weight, a
scalar. If rows have sources, also the name of its source. If rows have images, also the images, encoded."""

StreamPath = Sequence[tuple[int, int]]
"""How a part is cut out of a stream. The stream is divided, then one piece of it is divided again, and so on. For each
division the path has the number of pieces and the index of the piece that is used. The empty path is the whole stream;
((4, 1), (2, 0)) is the first half of the second quarter.
"""


def part_of(dataset: IterableDataset, path: StreamPath) -> IterableDataset:
    """Return the part of a stream that a path names."""
    for num_pieces, index in path:
        # Not contiguous: a piece has every `num_pieces`-th shard, as `datasets` divides streams between workers
        dataset = dataset.shard(num_pieces, index, contiguous=False)
    return dataset


def share_of_rank(dataset: IterableDataset, rank: int, world_size: int, *, degree: int = 1) -> tuple[StreamPath, int]:
    """Decide what a rank reads.

    If the number of shards is a multiple of the number of groups of `degree` ranks, each group reads its own shards.
    Otherwise every rank reads the whole stream. Without sequence parallelism each rank is a group.

    Returns:
        The path of the share, and the number of neighbouring ranks that read this share.

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
        # `split_dataset_by_node` is not used: it assigns the shards anew in every pass, but ranks end their passes at
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

    # `IterableDataset.state_dict()` after the last chunk. None at the beginning, or if the dataset cannot continue
    # exactly where it stopped (`state_is_exact`)
    position: dict[str, Any] | None = None
    examples: int = 0  # number of rows that were read
    chunks: int = 0  # number of chunks that were yielded, also before a restart with the same readers
    done: bool = False  # whether the part was read to its end


@dataclass(frozen=True)
class DocumentChunk:
    """Documents that a reader yields together, with what a restart and a report need of them."""

    documents: list[DocumentTokens]
    ledger: Ledger  # counts of the rows that were read for these documents: kept, cut and dropped (`documents.py`)
    reader: int  # number of the reader
    state: ReaderState  # the state of the reader after these documents


class StreamRows:
    """Makes documents of the rows of a stream that have tokens. A subclass makes them of rows with images.

    A document waits in `PackedStream` until its pack is trained, and may be saved in a checkpoint. So it holds its
    images encoded, as in the dataset, until `finish` processes them for a batch.

    Args:
        vocab_size: size of the vocabulary, to refuse other token ids; None does not check them.
    """

    chunk: ClassVar[int] = CHUNK  # number of rows that are read together
    finishes: ClassVar[bool] = False  # whether `finish` processes images. This takes long, so worker processes do it
    processor_settings: str | None = None  # settings of the image processor, which a restart compares

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size

    def open_stream(self, dataset: IterableDataset) -> tuple[IterableDataset, "StreamRows"]:
        """Return the stream to read in place of `dataset`, and the object that makes documents of its rows."""
        return dataset, self

    def read(
        self, batch: dict[str, list[Any]], table: Dataset, packing: Packing
    ) -> tuple[list[DocumentTokens], Documents, np.ndarray | None]:
        """Make the documents of some rows.

        Args:
            batch: the columns of the rows.
            table: the columns of tokens of these rows, which `as_table` has converted.
            packing: the settings that decide how documents are cut.

        Returns:
            The documents; their spans in the table; and None. If the reader divides conversations into turns, each turn
            is a row of the spans, and the third value has the index in the batch for each of these rows.

        Raises:
            ValueError: a row cannot be read, or `make_documents` refuses the rows.
        """
        if "input_ids" in table.column_names:
            check_tokens(table, "train", self.vocab_size)
            positions = [] if "seq_lengths" in batch else batch.get("position_ids", [])
            refuse_restart(next((row for row, values in enumerate(positions) if restarts(values)), None), "train")
        reader = TokenReader(table)
        mode = packing.truncation_mode
        spans = make_documents(reader, packing.max_length, packing.overlong, truncation_mode=mode, may_be_empty=True)
        documents = [
            # Copies, because a view would hold the tokens of the whole chunk in memory.
            {name: tokens.astype(np.int32) for name, tokens in reader.read(row, start, stop).items()}
            for row, start, stop in zip(spans.row, spans.start, spans.stop, strict=True)
        ]
        return documents, spans, None

    def finish(self, document: DocumentTokens) -> dict[str, Any]:
        """Process the images of a waiting document, and return the document for a batch."""
        return document

    def num_bytes(self, document: DocumentTokens) -> int:
        """Return the size in memory of what a waiting document holds beside tokens."""
        return 0

    def count_images(self, documents: Sequence[DocumentTokens]) -> np.ndarray:
        """Return three numbers for each document: its `image_count`, `image_values` and `image_squares`, shape (N, 3).

        `Documents` (`documents.py`) explains them.
        """
        return np.zeros((len(documents), 3), dtype=np.int64)

    def report_section(self, stream: Any, counts: Any) -> Any:
        """Return the section of a report on the images of a stream so far; None if documents have no images.

        Args:
            stream: the `PackedStream` (`stream.py`, which imports this module).
            counts: its `StreamCounts`, added up over all ranks.
        """
        return None

    def encode(self, documents: Sequence[DocumentTokens]) -> dict[str, Any]:
        """Return the entries of a saved state that hold the images of documents (`encode_documents` in `stream.py`)."""
        return {}

    def decode(self, state: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the images of the documents of a saved state, by the key that they have in a document."""
        return {}


@dataclass
class StreamReader(torch.utils.data.IterableDataset[Any]):
    """One pass over what a rank reads of a stream, in chunks. In a `DataLoader`, each worker reads its own parts.

    Args:
        parts: the parts that this rank reads: one part for each worker, or one part without workers. If another number
            of ranks has begun the pass, there may be more or fewer parts than workers, and a worker reads one part
            after the other. Rows have what `rows` needs: `input_ids` and, optionally, `labels`, `seq_lengths` and
            `attention_mask`, or conversations with images.
        states: the state from which the reader of each part continues.
        packing: the settings that decide how documents are cut.
        rows: makes documents of rows.
        weight_column: column with the weight of each row, which its documents get.
        source_column: column with the source of each row, which its documents get.

    Raises:
        ValueError: while iterating, if a row cannot be packed. The message names the row.
    """

    parts: list[IterableDataset]
    states: list[ReaderState]
    packing: Packing
    rows: StreamRows
    weight_column: str | None = None
    source_column: str | None = None

    def __iter__(self) -> Iterator[DocumentChunk]:
        """Yield the chunks of the parts of this worker, one part after the other."""
        worker = get_worker_info()
        worker_id = worker.id if worker else 0
        num_workers = worker.num_workers if worker else 1
        parts_of_worker = range(worker_id, len(self.parts), num_workers)
        unread = [i for i in parts_of_worker if not self.states[i].done]
        if not unread:
            return
        if worker:
            fsspec.asyn.reset_lock()  # inherited from the parent process; reading remote files would wait for it
        # The loader takes a chunk from each worker in turn. When the state was saved, it may have taken one chunk more
        # from the first workers than from the others, for example 3, 3, 2 and 2. Now it begins with the first worker
        # again, but the third worker is next. So each worker that is ahead begins with an empty chunk.
        states_by_worker = [self.states[i::num_workers] for i in range(num_workers)]
        num_chunks = [sum(state.chunks for state in states) for states in states_by_worker]
        workers_with_rows = [i for i, states in enumerate(states_by_worker) if not all(state.done for state in states)]
        if num_chunks[worker_id] > min(num_chunks[i] for i in workers_with_rows):
            yield DocumentChunk([], Ledger(), unread[0], self.states[unread[0]])
        for reader in unread:
            yield from self._read_part(reader)

    def _read_part(self, reader: int) -> Iterator[DocumentChunk]:
        """Yield the remaining chunks of a reader, and finally an empty chunk with its final state.

        Args:
            reader: number of the reader, and of its part.
        """
        state = self.states[reader]
        dataset = self.parts[reader]
        is_exact = state_is_exact(dataset)
        position = state.position if is_exact else None
        dataset.load_state_dict(position)  # None: from the beginning of the part
        # `iter(dataset)` is not used: in a worker it would split the part between the workers once more
        batches = dataset.iter(batch_size=self.rows.chunk)
        if position is None and state.examples:
            # The position is not known exactly, so the part is read from its beginning, and the batches that were read
            # before are discarded. All of them had `chunk` rows, except for the last one of the part
            num_batches = -(-state.examples // self.rows.chunk)
            next(islice(batches, num_batches - 1, None), None)
        num_rows = state.examples
        num_chunks = state.chunks
        for batch in batches:
            documents, ledger = self._make_documents(batch, num_rows)
            num_rows += len(next(iter(batch.values())))
            num_chunks += 1
            position = dataset.state_dict() if is_exact else None
            yield DocumentChunk(documents, ledger, reader, ReaderState(position, num_rows, num_chunks))
        yield DocumentChunk([], Ledger(), reader, ReaderState(None, num_rows, num_chunks + 1, done=True))

    def _make_documents(self, batch: dict[str, Any], num_rows: int) -> tuple[list[DocumentTokens], Ledger]:
        """Make the documents of some rows, with their weights and sources.

        Args:
            batch: the columns of the rows.
            num_rows: number of rows that the reader has read before, which messages name.

        Returns:
            The documents, and their ledger.
        """
        columns = (self.weight_column, self.source_column)
        try:
            table = as_table(batch, *columns)
            values = read_row_values(table, *columns, name="train")
            documents, spans, row_of_turns = self.rows.read(batch, table, self.packing)
            # A turn has the values of its conversation. `row_of_turns` is None if rows are not divided into turns, and
            # then all values stay as they are
            values = values.select(row_of_turns)
        except ValueError as error:
            raise ValueError(
                f"{error} (A stream: rows are counted from number {num_rows:,} of those that this reader read.)"
            ) from error
        for document, row in zip(documents, spans.row, strict=True):
            document |= values.for_row(row)  # its weight, and the number of its source
            if values.sources is not None:  # a stream has names of sources in place of numbers, see `row_values.py`
                document[SOURCES] = values.names[values.sources[row]]
        return documents, spans.ledger


def as_table(batch: dict[str, Any], *further_columns: str | None) -> Dataset:
    """Convert columns of rows (lists, arrays or tensors) to a table in memory.

    Args:
        batch: the rows by column.
        further_columns: names of columns to convert in addition to the columns of tokens. None is skipped.
    """
    columns = {}
    for name in (*TOKEN_COLUMNS, *further_columns):
        if name is not None and name in batch:
            # A row may be a tensor without dimensions, such as a weight; `[()]` makes a scalar of it
            rows = [row if isinstance(row, list | str | None) else np.asarray(row)[()] for row in batch[name]]
            columns[name] = pa.array(rows)
    # A fixed fingerprint, because hashing the table would take longer than all other work on it
    return Dataset(pa.table(columns), fingerprint="chunk")


def read_whole(dataset: IterableDataset, *further_columns: str | None) -> Dataset:
    """Read all rows of a finite stream into a table in memory, see `as_table`.

    Raises:
        ValueError: the stream has no rows.
    """
    tables = []
    for batch in dataset.iter(batch_size=CHUNK):
        # Positions are only checked (`check_boundaries`), and those in several dimensions are not
        has_positions = max(map(np.ndim, batch.get("position_ids", [None]))) == 1
        columns = (*further_columns, "position_ids") if has_positions else further_columns
        tables.append(as_table(batch, *columns).data.table)
    if not tables:
        refuse_empty()
    # The type of a column is found for each chunk: weights may be whole numbers in one chunk, and floats in another
    return Dataset(pa.concat_tables(tables, promote_options="permissive"), fingerprint="chunks")


def refuse_empty() -> NoReturn:
    """Raise the error that a stream for evaluation has no rows.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "The evaluation set is an `IterableDataset` that yielded 0 examples, so there is nothing to evaluate. Check "
        "that it was not read to its end before, and that its filters do not drop every example."
    )
