"""Pack the documents of a stream while they arrive, and save the state from which a run resumes.

A stream is a `datasets.IterableDataset`: its lengths are not known in advance, so it cannot be planned as a table is
(`epochs.py`). `StreamReader` (`stream_reader.py`) reads documents in chunks, in worker processes or in this one.
`PackedStream` packs them here, in the training process, and yields the micro-batches of one rank. A waiting document
holds its images encoded; `FinishedPacks` processes them when their micro-batch is made. The trainer saves the state
with each checkpoint (`training/restart.py`).

Documents are packed in the order of their arrival. The oldest waiting document begins a pack, and the pack is filled
exactly, if possible, from at most `buffer_size` waiting documents. Then it is closed. All packs of an optimizer step
are scheduled together, as for a table. If there are too few packs for the last step of a pass, they are split, so that
all its micro-batches get documents. So every document is in exactly one pack of a pass. Then the next pass begins,
without end: `max_steps` ends the run.

Words:
    pass     one reading of the whole stream: an epoch.
    shard    one of the pieces into which the dataset can be divided, such as a file.
    share    what a rank reads in a pass: some shards, or the whole stream. Several ranks may have the same share.
    part     what one reader reads in a pass: the share of the rank, or a piece of it for each worker.
    chunk    documents that a reader reads and sends together.
    degree   number of ranks that share a pack (sequence parallelism). These neighbouring ranks are a group.
    state    what a run needs to resume after an optimizer step: the documents that were read and not trained yet, the
             positions of the readers, and the counts.
"""

import logging
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from math import prod
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from ..planning.packing import REPLANNED_SETTINGS, ChangedSettings, Packing, compare_settings, describe_changes
from ..planning.packs import PackPlan
from ..planning.schedule import NO_DOCUMENTS
from ..planning.units import Units
from .collator import IGNORE_INDEX
from .documents import Ledger, refuse_no_documents
from .loaders import dummy_document
from .rank_share import RankShare
from .row_values import SOURCES, WEIGHTS
from .stream_reader import (
    DocumentChunk,
    DocumentTokens,
    ReaderState,
    StreamReader,
    StreamRows,
    part_of,
    share_of_rank,
)
from .threads import wait_for_threads_before_forks

logger = logging.getLogger(__name__)

TEXT_ROWS = StreamRows()  # makes documents of rows that have tokens
MOST_BYTES = 2**28  # largest size of what waiting documents hold beside tokens, such as encoded images
STATE_COLUMNS = ("input_ids", "labels")  # keys of a document that are arrays of tokens in a state
STATE_VERSION = 4  # raise it when the contents of the state change
# Settings that may change when a run resumes; the settings of packing in `REPLANNED_SETTINGS` may change, too. If one
# has changed, the remaining documents of the pass are divided anew. `num_shards` is the number of shards of a rank
READER_SETTINGS = ("rank", "num_workers", "num_shards")
# A state holds the documents, the positions of the readers, and these attributes of `PackedStream`: name -> key in the
# state. Two keys differ from the names, because checkpoints of earlier versions have them
SAVED_FIELDS = {
    **{name: name for name in ("num_steps", "num_passes", "num_arrived", "counts", "micro_steps", "parts", "digest")},
    "is_rest_of_pass": "rest",
    "ranks_reading": "count",
}
StreamPack = list[DocumentTokens]  # the documents of a pack
# A part of the stream: its path (`StreamPath`), and the epoch, which decides the order of a shuffled stream. For each
# division of the stream, the path has the number of pieces and the index of the piece that is used
StreamPart = tuple[list[tuple[int, int]], int]


@dataclass(frozen=True)
class StreamCounts:
    """Totals of all passes: the ledger counts documents that were read, all other fields count packs that were made."""

    ledger: Ledger = field(default_factory=Ledger)  # counts of all documents that were read
    packs: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    with_images: int = 0  # number of documents with at least one image
    most_images: int = 0  # largest number of images in a pack
    tower_flops: float = 0.0  # predicted cost of the vision tower
    language_flops: float = 0.0  # predicted cost of the language model

    def __add__(self, other: "StreamCounts") -> "StreamCounts":
        totals = {name: count + getattr(other, name) for name, count in vars(self).items()}
        totals["most_images"] = max(self.most_images, other.most_images)
        return StreamCounts(**totals)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StreamCounts":
        """Return the counts whose `asdict` is `values`."""
        return cls(**values | {"ledger": Ledger.from_dict(values["ledger"])})


class PackedStream(torch.utils.data.IterableDataset[Any]):
    """Endless micro-batches of one rank, made from a stream of documents. Each micro-batch is a list of documents.

    If the number of shards is a multiple of the number of ranks, each rank reads its own shards, and begins its next
    pass when it has read them. Otherwise every rank reads the whole stream. All ranks then make the same packs, and
    each rank trains on its own micro-batches of every optimizer step, as with a table.

    With sequence parallelism, a group of ranks may share a micro-batch, and each of them trains some of its tokens. The
    ranks are first divided into groups of the smallest degree with which a group can hold `max_length` tokens. If the
    number of shards is a multiple of the number of these groups, each group reads its own shards, and all packs have
    this degree. Otherwise every rank reads the whole stream, and each micro-step has its own degree.

    A run that resumes with another number of ranks, see `merge_states`, first reads the parts of the stream that the
    ranks of the earlier run have not read in their pass. If these parts cannot be divided evenly, every rank reads all
    of them.

    Args:
        dataset: the stream.
        packing: the settings of packing.
        rows: makes documents of rows.
        rank: the rank that trains on the micro-batches.
        pad_token_id: token of the dummy document, which a rank trains on if it has no documents in a micro-step.
        num_workers: number of processes that read. At most one process per shard of this rank is used.
        worker_kwargs: arguments for the `DataLoader` of these processes.
        weight_column: column with the weight of each row.
        source_column: column with the source of each row.
        most_bytes: largest size of what waiting documents hold beside tokens, such as images. When it is reached, packs
            are closed before more documents are read.

    Raises:
        ValueError: while iterating, if a pass over the stream has no document to train on, or if `StreamReader` refuses
            a row.
    """

    # Micro-batches that a data loader takes from this stream before they are trained; whoever makes the loader sets it
    num_ahead = 0
    rows: StreamRows
    # The attributes in `SAVED_FIELDS`
    num_steps: int  # optimizer steps that were yielded
    num_passes: int  # passes that were completed
    num_arrived: int  # documents that were read in this pass
    counts: StreamCounts
    micro_steps: dict[int, int]  # number of micro-steps by their degree
    parts: list[StreamPart]  # the parts of the stream that this rank reads in this pass
    is_rest_of_pass: bool  # whether another number of ranks began this pass, so that this rank reads what they left
    ranks_reading: int  # number of neighbouring ranks that read the same parts in this pass
    digest: int  # checksum of the tokens of all documents that were yielded, in the order of their packs

    def __init__(
        self,
        dataset: IterableDataset,
        packing: Packing,
        *,
        rows: StreamRows = TEXT_ROWS,
        rank: int = 0,
        pad_token_id: int = 0,
        num_workers: int = 0,
        worker_kwargs: dict[str, Any] | None = None,
        weight_column: str | None = None,
        source_column: str | None = None,
        most_bytes: int = MOST_BYTES,
    ):
        self.dataset, self.rows = rows.open_stream(dataset)
        smallest_degree = packing.parallel.smallest
        # The path of the share of this rank, and the number of neighbouring ranks with the same share
        self.path, self.ranks_per_share = share_of_rank(self.dataset, rank, packing.world_size, degree=smallest_degree)
        self.num_shards = part_of(self.dataset, self.path).num_shards
        if self.ranks_per_share != packing.world_size:
            # A group does not know the documents of the other groups, so groups cannot be joined for a long document
            packing = replace(packing, degrees=(smallest_degree,))
        self.packing = packing
        self.rank = rank
        self.pad_token_id = pad_token_id
        self.most_bytes = most_bytes
        self.weight_column = weight_column
        self.source_column = source_column
        self.num_workers = min(num_workers, self.num_shards)
        if self.num_workers < num_workers and rank == 0:
            message = "dataloader_num_workers=%d was given; %d workers read, because each needs its own shard."
            logger.warning(message, num_workers, self.num_workers)
        if self.num_workers:  # workers are forked, and gloo has threads
            wait_for_threads_before_forks()
        self.worker_kwargs = worker_kwargs or {} if self.num_workers else {}
        self.begin()

    def begin(self, num_steps: int = 0) -> None:
        """Begin with the first document of the stream.

        Args:
            num_steps: number of optimizer steps that the run has trained before.
        """
        self._closed_packs = deque[StreamPack]()  # packs that were not yielded yet
        self._waiting = dict[int, DocumentTokens]()  # documents in no closed pack, by position in the order of arrival
        self.num_steps = num_steps
        self.num_passes = 0
        self.counts = StreamCounts()
        self.micro_steps = {}
        self.digest = 0
        self._begin_pass()
        self._first_state = self._snapshot()  # the state with which `__iter__` begins
        self._num_skipped = 0  # number of empty micro-batches that `__iter__` yields first
        self._snapshots = {num_steps: self._first_state}  # states by the number of optimizer steps

    def _begin_pass(self) -> None:
        """Divide the share of this rank into one part for each reader, and begin to read them."""
        num_readers = max(self.num_workers, 1)
        self.parts = [([*self.path, (num_readers, reader)], self.num_passes) for reader in range(num_readers)]
        self._readers = [ReaderState()] * num_readers
        self._all_arrived = False  # whether the last document of the pass has arrived
        self.num_arrived = 0
        self.is_rest_of_pass = False
        self.ranks_reading = self.ranks_per_share

    def __iter__(self) -> Iterator[StreamPack]:
        """Yield the micro-batches of this rank, without end, from the state that was loaded or from the beginning."""
        self._restore(self._first_state)
        yield from repeat([], self._num_skipped)
        while True:
            for micro_batches in self._one_pass():
                self.num_steps += 1
                self._snapshots[self.num_steps] = self._snapshot()
                # Training is up to `1 + num_ahead` micro-batches behind: the one that is trained, and those that the
                # loader takes ahead. The state of the step that was trained last may still be saved, so it stays
                num_steps_ahead = -(-(1 + self.num_ahead) // self.packing.accumulation)
                oldest = self.num_steps - num_steps_ahead
                self._snapshots = {step: state for step, state in self._snapshots.items() if step >= oldest}
                yield from micro_batches
            # After a restart there may be nothing left to read of a pass, which is no error
            if not self.num_arrived and not self.is_rest_of_pass:
                refuse_no_documents(
                    self.counts.ledger, f"Rank {self.rank} read the stream to its end", self.packing.max_length
                )
            # After a restart with another number of ranks, all ranks may have read, and counted, the same parts of this
            # pass. From the next pass on each group of `ranks_per_share` ranks reads its own parts, and reports add up
            # the counts of the groups. So only the first group keeps the counts until now
            all_have_same_counts = self.ranks_reading > self.ranks_per_share
            is_in_first_group = self.rank < self.ranks_per_share
            if all_have_same_counts and not is_in_first_group:
                self.counts = StreamCounts()
            self.num_passes += 1
            self._begin_pass()

    def _one_pass(self) -> Iterator[list[RankShare]]:
        """Yield the micro-batches of this rank for each remaining optimizer step of the current pass."""
        # The ranks that read the same parts make the same packs, and divide these packs as if there were no other ranks
        packing = replace(self.packing, world_size=self.ranks_reading)

        def bytes_of(position: int) -> int:
            return self.rows.num_bytes(self._waiting[position])

        packs = packing.pack_stream(self._arriving_lengths(), bytes_of, self.most_bytes)
        while True:
            # Close packs until there are enough for an optimizer step. To fill a pack, `packs` reads documents by
            # `_arriving_lengths`, which puts them into `_waiting`. The next step continues with the next pack. Once the
            # last document has arrived, there is nothing to wait for, so all remaining packs are closed at once.
            for positions in packs:
                self._closed_packs.append([self._waiting.pop(position) for position in positions])
                if len(self._closed_packs) >= packing.packs_per_step and not self._all_arrived:
                    break
            if not self._closed_packs:
                return
            num_packs = min(packing.packs_per_step, len(self._closed_packs))
            packs_of_step = [self._closed_packs.popleft() for _ in range(num_packs)]
            yield self._micro_batches(packs_of_step, packing)

    def _micro_batches(self, packs: list[StreamPack], packing: Packing) -> list[RankShare]:
        """Schedule the packs of one optimizer step, and count them.

        Args:
            packs: the packs of all ranks that read the same parts.
            packing: the settings, with the number of these ranks as `world_size`.

        Returns:
            The micro-batches of this rank.
        """
        documents = [document for pack in packs for document in pack]
        lengths = np.array([len(document["input_ids"]) for document in documents])
        for document in documents:
            self.digest = zlib.crc32(np.ascontiguousarray(document["input_ids"]).data, self.digest)
        offsets = np.cumsum([0] + [len(pack) for pack in packs])
        # Of each document: the number of its images, the number of values in them (colors of pixels), and the sum over
        # its images of the squared number of values
        num_images, num_values, squares = self.rows.count_images(documents).T
        image_costs = packing.cost_model.tower(num_values, squares)
        num_trained = np.array([np.count_nonzero(document["labels"][1:] != IGNORE_INDEX) for document in documents])
        self.counts += StreamCounts(
            packs=len(packs),
            documents=len(documents),
            tokens=int(lengths.sum()),
            trained_tokens=int(num_trained.sum()),
            images=int(num_images.sum()),
            with_images=int(np.count_nonzero(num_images)),
            most_images=int(np.add.reduceat(num_images, offsets[:-1]).max()),
            tower_flops=float(image_costs.sum()),
            language_flops=float(packing.cost_model(lengths).sum()),
        )
        plan = PackPlan(np.arange(len(documents)), offsets, lengths, packing.capacity)
        units = Units(lengths, packing.cost_model, image_costs, targets=num_trained)
        schedule = packing.schedule(plan, units, num_steps=1)
        self.micro_steps = dict(Counter(self.micro_steps) + Counter(schedule.degrees.tolist()))
        dummy = dummy_document(self.pad_token_id)
        rank = self.rank % self.ranks_reading  # the number of this rank among those that read the same parts
        return [
            RankShare.like(indices, (dummy if i == NO_DOCUMENTS else documents[i] for i in indices))
            for indices in RankShare.of_schedule(schedule, rank)
        ]

    def _arriving_lengths(self) -> Iterator[int]:
        """Yield the number of tokens of each document: first of the documents that wait already, then as they arrive.

        Each document is put into `_waiting` under its position in this order, before its length is yielded. At the end
        of the pass `_all_arrived` is set.
        """
        position = len(self._waiting)
        yield from [len(document["input_ids"]) for document in self._waiting.values()]
        datasets = [part_of(self.dataset, path) for path, _ in self.parts]
        for dataset, (_, epoch) in zip(datasets, self.parts, strict=True):
            dataset.set_epoch(epoch)  # a shuffled dataset gets a new order
        chunks: Iterable[DocumentChunk] = ()
        if datasets:
            reader = StreamReader(
                datasets, list(self._readers), self.packing, self.rows, self.weight_column, self.source_column
            )
            # Without a generator the loader would draw from torch's global generator, and dropout would change.
            generator = torch.Generator().manual_seed(self.num_passes)
            loader_kwargs = {"collate_fn": _return_chunk, "num_workers": self.num_workers} | self.worker_kwargs
            if self.ranks_reading > 1:  # the ranks that read these parts must get the chunks in the same order
                loader_kwargs["in_order"] = True
            chunks = DataLoader(reader, batch_size=None, generator=generator, **loader_kwargs)
        for chunk in chunks:
            self._readers[chunk.reader] = chunk.state
            self.counts += StreamCounts(chunk.ledger)
            self.num_arrived += len(chunk.documents)
            self._waiting.update(enumerate(chunk.documents, position))
            position += len(chunk.documents)
            yield from [len(document["input_ids"]) for document in chunk.documents]
        self._all_arrived = True

    # The state: every document that was read and not trained yet, the positions of the readers, and the counts.

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a state holds, so that a restart can compare them with its own."""
        stream_settings = {name: getattr(self, name) for name in (*READER_SETTINGS, "weight_column", "source_column")}
        stream_settings["image processor"] = self.rows.processor_settings  # no attribute: the key is for messages
        return self.packing.settings("stream") | stream_settings

    def _snapshot(self) -> dict[str, Any]:
        """Return the current state. It holds the documents themselves, because documents are never changed."""
        documents_in_packs = [document for pack in self._closed_packs for document in pack]
        return {key: getattr(self, name) for name, key in SAVED_FIELDS.items()} | {
            "closed": [len(pack) for pack in self._closed_packs],
            "documents": documents_in_packs + list(self._waiting.values()),
            "readers": list(self._readers),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `_snapshot` has made."""
        documents = iter(state["documents"])
        self._closed_packs = deque([next(documents) for _ in range(size)] for size in state["closed"])
        self._waiting = dict(enumerate(documents))
        self.num_passes = state["num_passes"]
        self._begin_pass()
        # A state of an earlier version lacks some of the fields, which then have the values of `_begin_pass`
        vars(self).update({name: state[key] for name, key in SAVED_FIELDS.items() if key in state})
        self._readers = list(state["readers"])
        self._snapshots = {self.num_steps: self._snapshot()}

    def state_after(self, num_steps: int) -> dict[str, Any]:
        """Return the state after `num_steps` optimizer steps.

        It is known for the latest step that was yielded, and for the steps before it that may not be trained yet.

        Returns:
            A dictionary. `counts` are the totals of this rank and its neighbours that read the same parts (`count`
            ranks in all). `micro_steps` has the number of micro-steps for each degree.
        """
        return self._snapshots[num_steps]

    def state_dict(self, num_steps: int) -> dict[str, Any]:
        """Return the state after `num_steps` optimizer steps in a form for `torch.save`.

        It holds the documents that were read and not trained yet: at most `buffer_size` documents, and a chunk for each
        reader.
        """
        state = self._snapshots[num_steps]
        return state | {
            "documents": encode_documents(state["documents"], self.rows),
            "readers": [asdict(reader) for reader in state["readers"]],
            "counts": asdict(state["counts"]),
            "share": self.path,
            "settings": self.settings,
            "version": STATE_VERSION,
        }

    def _compare_settings(self, state: dict[str, Any]) -> ChangedSettings:
        """Return the settings, and the version, that differ between a saved state and this stream."""
        return compare_settings(
            state["settings"] | {"version": state["version"]}, self.settings | {"version": STATE_VERSION}
        )

    def can_continue(self, state: dict[str, Any]) -> bool:
        """Return whether this rank can continue from `state` alone: the same rank saved it with the same settings."""
        return not self._compare_settings(state)

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the state of this rank from the states of all ranks of a run with another number of ranks.

        The ranks of that run may be in different passes. This run continues the latest of these passes. First it reads
        what the ranks have not read in it and in the passes before it. So every document is read once in each pass.

        Args:
            states: the `state_dict()` of every rank after the same step, as saved.

        Returns:
            A state for `load_state_dict`.

        Raises:
            ValueError: a setting that decides which documents there are differs.
        """
        # First check the settings. All ranks of the earlier run have the same settings, except for their number
        first_state = states[0]
        changed = self._compare_settings(first_state)
        num_shards = self.dataset.num_shards
        refused = {
            name: values
            for name, values in changed.items()
            if name not in REPLANNED_SETTINGS and name not in READER_SETTINGS
        }
        if "parts" not in first_state:
            refused = changed  # saved by an earlier version, whose parts are not known
        else:
            # Each division of the path has cut the share to one of `num` equal pieces
            num_shards_before = first_state["settings"]["num_shards"] * prod(num for num, _ in first_state["share"])
            if num_shards_before != num_shards:
                refused["num_shards"] = (num_shards_before, num_shards)
        if refused:
            raise ValueError(
                f"The checkpoint's stream was packed with other settings: {describe_changes(refused)}. The new "
                "settings give other packs, so the documents not trained yet are unknown. Set them back, or set "
                "`ignore_data_skip=True` to start the stream from its beginning."
            )
        # Then collect the parts that no rank has read. `ranks_reading` neighbouring ranks read the same parts and have
        # equal states. Only the first of these states is used
        ranks_reading = first_state[SAVED_FIELDS["ranks_reading"]]
        different_states = states[::ranks_reading]
        last_pass = max(state["num_passes"] for state in different_states)
        unread = []
        for state in different_states:
            for part, reader in zip(state["parts"], state["readers"], strict=True):
                if not reader["done"]:
                    # `chunks` counts the chunks that a reader has yielded, so that a restart continues with the worker
                    # whose turn it is (`StreamReader.__iter__`). This run has other workers, and begins with the first
                    unread.append((part, reader | {"chunks": 0}))
            # A rank that is behind has read nothing of the later passes: its whole share of them is unread
            for epoch in range(state["num_passes"] + 1, last_pass + 1):
                part = ([*state["share"]], epoch)
                unread.append((part, asdict(ReaderState())))
        documents = [
            document for state in different_states for document in decode_documents(state["documents"], self.rows)
        ]
        counts = [StreamCounts.from_dict(state["counts"]) for state in different_states]
        # Finally divide the parts, the waiting documents and the counts between the groups of ranks with one share. If
        # the parts cannot be divided evenly, every rank has all of them
        num_groups = self.packing.world_size // self.ranks_per_share
        is_divisible = len(unread) % num_groups == 0
        if num_groups > 1 and is_divisible:
            every_group_in_turn = slice(self.rank // self.ranks_per_share, None, num_groups)
            unread = unread[every_group_in_turn]
            documents = documents[every_group_in_turn]
            counts = counts[every_group_in_turn]
        return first_state | {
            "documents": encode_documents(documents, self.rows),
            "closed": [],
            "readers": [reader for _, reader in unread],
            "parts": [part for part, _ in unread],
            SAVED_FIELDS["is_rest_of_pass"]: True,
            SAVED_FIELDS["ranks_reading"]: self.ranks_per_share if is_divisible else self.packing.world_size,
            "counts": asdict(sum(counts, StreamCounts())),
            "num_passes": last_pass,
            "num_arrived": 0,
            "settings": self.settings,
        }

    def load_state_dict(self, state: dict[str, Any], num_skipped: int = 0) -> None:
        """Continue from a saved state.

        Args:
            state: a `state_dict()` from which this rank `can_continue`, or a state that `merge_states` has made.
            num_skipped: number of micro-batches that the caller discards first, as the Trainer does after a restart.
                They are yielded as empty lists.
        """
        assert self.can_continue(state)
        self._first_state = state | {
            "documents": decode_documents(state["documents"], self.rows),
            "readers": [ReaderState(**reader) for reader in state["readers"]],
            "counts": StreamCounts.from_dict(state["counts"]),
        }
        self._num_skipped = num_skipped
        self._restore(self._first_state)


def _return_chunk(chunk: DocumentChunk) -> DocumentChunk:
    """Return the chunk unchanged, as `collate_fn` of a loader that would otherwise convert arrays to tensors."""
    return chunk


@dataclass
class FinishedPacks(torch.utils.data.Dataset[Any]):
    """Dataset that finishes documents for their batch: it processes images that waited encoded (`StreamRows.finish`).

    It is the dataset of a data loader whose batch sampler is a `PackedStream`. So its "indices" are the documents.
    """

    rows: StreamRows  # has made the documents

    def __getitems__(self, micro_batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the finished documents of a micro-batch."""
        # The result is a list of documents that also has the group of ranks which shares the micro-batch
        return RankShare.like(micro_batch, map(self.rows.finish, micro_batch))


def encode_documents(documents: Sequence[DocumentTokens], rows: StreamRows) -> dict[str, Any]:
    """Join documents to a few values that `torch.load` reads with `weights_only`. `decode_documents` is the inverse.

    Returns:
        The `lengths` of the documents, the joined values of each of their keys, and what `rows` adds, such as images.
    """
    first_document = documents[0] if documents else {}
    state: dict[str, Any] = {"lengths": torch.tensor([len(document["input_ids"]) for document in documents])}
    if documents:
        for name in STATE_COLUMNS:
            state[name] = torch.from_numpy(np.concatenate([document[name] for document in documents]))
    if WEIGHTS in first_document:
        state[WEIGHTS] = torch.tensor([document[WEIGHTS] for document in documents], dtype=torch.float32)
    if SOURCES in first_document:
        state[SOURCES] = [document[SOURCES] for document in documents]
    state |= rows.encode(documents)
    return state


def decode_documents(state: dict[str, Any], rows: StreamRows) -> list[DocumentTokens]:
    """Return the documents from which `encode_documents` has made `state`."""
    lengths = state["lengths"].tolist()
    columns: dict[str, list[Any]] = {}
    if lengths:
        for name in STATE_COLUMNS:
            columns[name] = [tokens.numpy().copy() for tokens in state[name].split(lengths)]
    if WEIGHTS in state:
        columns[WEIGHTS] = list(state[WEIGHTS].numpy())
    if SOURCES in state:
        columns[SOURCES] = state[SOURCES]
    columns |= rows.decode(state)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
