"""Pack a stream: a bounded buffer in arrival order, whole optimizer steps for every rank, and the state to resume from.

For a table, whose lengths are known, `epochs.py` and `loaders.py` do this. Documents are packed as they arrive, oldest
first. Each pack is closed by an exact fill from at most `buffer_size` waiting documents. As at the end of an epoch, the
packs of the last step of a pass are split between the micro-batches of all ranks, so every document is in exactly one
pack of a pass. Then the next pass begins. Passes do not end: `max_steps` ends the run.
"""

import logging
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
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
from ..samples.processor import EncodedImage
from .collator import IGNORE_INDEX
from .documents import Ledger, refuse_no_documents
from .loaders import dummy_document
from .rank_share import RankShare
from .row_values import SOURCES, WEIGHTS
from .stream_images import ENCODED, TOKENS_ALONE, EncodedRow, StreamImages
from .stream_reader import (
    DocumentChunk,
    DocumentTokens,
    ReaderState,
    StreamReader,
    StreamTokens,
    part_of,
    share_of_rank,
)
from .threads import wait_for_threads_before_forks

logger = logging.getLogger(__name__)

TEXT_READER = StreamTokens()
MOST_BYTES = 2**28  # of the rows with images of these documents: encoded images, and text
STATE_COLUMNS = ("input_ids", "labels")  # of the documents in a state
STATE_VERSION = 4  # raise it when the contents of the state change
# With other values of these and of `REPLANNED_SETTINGS`, the rest of a pass is divided anew. `num_shards` is that of a
# rank.
READER_SETTINGS = ("rank", "num_workers", "num_shards")
SAVED_FIELDS = ("num_steps", "num_passes", "num_arrived", "counts", "micro_steps", "parts", "rest", "count", "digest")
StreamPack = list[DocumentTokens]
StreamPart = tuple[list[tuple[int, int]], int]  # of the stream: its path, see `part_of`, and the epoch of its order


@dataclass(frozen=True)
class StreamCounts:
    """Totals of all passes."""

    ledger: Ledger = field(default_factory=Ledger)  # of the documents read; all else is of trained packs
    packs: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    with_images: int = 0  # documents
    most_images: int = 0  # in a pack
    tower_flops: float = 0.0
    language_flops: float = 0.0

    def __add__(self, other: "StreamCounts") -> "StreamCounts":
        totals = {name: mine + getattr(other, name) for name, mine in vars(self).items()}
        return StreamCounts(**totals | {"most_images": max(self.most_images, other.most_images)})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StreamCounts":
        return cls(**values | {"ledger": Ledger.from_dict(values["ledger"])})


class PackedStream(torch.utils.data.IterableDataset[Any]):
    """Endless micro-batches of one rank from a stream of tokenised documents; each is a list of documents.

    If the number of shards is a multiple of the number of ranks, each rank reads its own shards, and begins its next
    pass when it has read them. Otherwise every rank reads the whole stream. All ranks then make the same packs, and
    each trains on its slots of every optimizer step, as with a table.

    With sequence parallelism, a rank may hold a part of a micro-batch. If the number of shards is a multiple of the
    number of groups of the smallest degree that holds `max_length`, each group reads its own shards, and this is the
    only degree. Otherwise every rank reads the whole stream, and each micro-step has its own degree.

    A run that resumes with other ranks, see `merge_states`, first reads the rest of the pass: the parts of the stream
    that the old ranks have not read. If they cannot be divided evenly, every rank reads all of them.

    Args:
        dataset, rows, weight_column, source_column: see `StreamReader`.
        num_workers: processes that read, at most one per shard of this rank. They share its shards.
        worker_kwargs: for the `DataLoader` of these processes.
        most_bytes: with images, of the rows of waiting documents; when they have so many, no other is read.

    Raises:
        ValueError: a pass over the stream has no document to train on; what `StreamReader` refuses.
    """

    num_ahead = 0  # micro-batches that a loader with processes takes before they are trained
    rows: StreamTokens | StreamImages
    # What a snapshot holds beside the documents and the readers: `SAVED_FIELDS`
    num_steps: int
    num_passes: int
    num_arrived: int  # documents of this pass
    counts: StreamCounts
    micro_steps: dict[int, int]  # number of them so far by degree
    parts: list[StreamPart]
    rest: bool  # of a pass of other ranks
    count: int  # ranks, neighbours, that read the same in this pass
    digest: int  # checksum of the tokens of all documents so far, in the order of the packs

    def __init__(
        self,
        dataset: IterableDataset,
        packing: Packing,
        *,
        rows: StreamTokens | StreamImages = TEXT_READER,
        rank: int = 0,
        pad_token_id: int = 0,
        num_workers: int = 0,
        worker_kwargs: dict[str, Any] | None = None,
        weight_column: str | None = None,
        source_column: str | None = None,
        most_bytes: int = MOST_BYTES,
    ):
        self.dataset, self.rows = rows.open_stream(dataset)
        smallest = packing.parallel.smallest
        self.path, self.num_alike = share_of_rank(self.dataset, rank, packing.world_size, degree=smallest)
        self.num_shards = part_of(self.dataset, self.path).num_shards
        if self.num_alike != packing.world_size:
            packing = replace(packing, degrees=(smallest,))  # a group knows nothing of the documents of the others
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
        if self.num_workers:
            wait_for_threads_before_forks()
        self.worker_kwargs = worker_kwargs or {} if self.num_workers else {}
        self.begin()

    def begin(self, num_steps: int = 0) -> None:
        """Begin with the first document of the stream; `num_steps` optimizer steps were trained before."""
        self._closed, self._waiting = deque[StreamPack](), dict[int, DocumentTokens]()
        self.num_steps, self.num_passes, self.counts, self.micro_steps = num_steps, 0, StreamCounts(), {}
        self.digest = 0
        self._begin_pass()
        self._start = self._snapshot()
        self._num_skipped = 0
        self._snapshots = {num_steps: self._start}

    def _begin_pass(self) -> None:
        num = max(self.num_workers, 1)
        self.parts = [([*self.path, (num, reader)], self.num_passes) for reader in range(num)]
        self._readers = [ReaderState()] * num  # of each part
        self.num_arrived = 0
        self.rest = False
        self.count = self.num_alike

    def __iter__(self) -> Iterator[StreamPack]:
        self._restore(self._start)
        yield from repeat([], self._num_skipped)
        while True:
            for step in self._one_pass():
                self.num_steps += 1
                self._snapshots[self.num_steps] = self._snapshot()
                # The loader takes micro-batches ahead, at least one, so the latest trained step may be an earlier one.
                oldest = self.num_steps - -(-(1 + self.num_ahead) // self.packing.accumulation)
                self._snapshots = {step: state for step, state in self._snapshots.items() if step >= oldest}
                yield from step
            if not self.num_arrived and not self.rest:
                refuse_no_documents(
                    self.counts.ledger, f"Rank {self.rank} read the stream to its end", self.packing.max_length
                )
            if self.count > self.num_alike and self.rank >= self.num_alike:
                self.counts = StreamCounts()  # those of the first ranks go on
            self.num_passes += 1
            self._begin_pass()

    def _one_pass(self) -> Iterator[list[RankShare]]:
        """The rest of the current pass: this rank's micro-batches, one optimizer step after the other."""
        packing = replace(self.packing, world_size=self.count)

        def bytes_of(position: int) -> int:
            return self._waiting[position].get(ENCODED, TOKENS_ALONE).num_bytes

        packs = packing.pack_stream(self._arriving_lengths(), bytes_of, self.most_bytes)
        self._has_ended = False
        while True:
            # After the last arrival, the packs of the remaining buffer are closed together and wait for their steps.
            for positions in packs:
                self._closed.append([self._waiting.pop(position) for position in positions])
                if len(self._closed) >= packing.packs_per_step and not self._has_ended:
                    break
            if not self._closed:
                return
            step = [self._closed.popleft() for _ in range(min(packing.packs_per_step, len(self._closed)))]
            yield self._micro_batches(step, packing)

    def _micro_batches(self, packs: list[StreamPack], packing: Packing) -> list[RankShare]:
        """Packs of one optimizer step, for all ranks that read the same -> micro-batches of this rank; counts them."""
        documents = [document for pack in packs for document in pack]
        lengths = np.array([len(document["input_ids"]) for document in documents])
        for document in documents:
            self.digest = zlib.crc32(np.ascontiguousarray(document["input_ids"]).data, self.digest)
        offsets = np.cumsum([0] + [len(pack) for pack in packs])
        of_images = [document.get(ENCODED, TOKENS_ALONE).counts for document in documents]
        num_images, values, squares = np.array(of_images).T
        image_costs = packing.cost_model.tower(values, squares)
        targets = np.array([np.count_nonzero(each["labels"][1:] != IGNORE_INDEX) for each in documents])
        self.counts += StreamCounts(
            packs=len(packs),
            documents=len(documents),
            tokens=int(lengths.sum()),
            trained_tokens=int(targets.sum()),
            images=int(num_images.sum()),
            with_images=int(np.count_nonzero(num_images)),
            most_images=int(np.add.reduceat(num_images, offsets[:-1]).max()),
            tower_flops=float(image_costs.sum()),
            language_flops=float(packing.cost_model(lengths).sum()),
        )
        plan = PackPlan(np.arange(len(documents)), offsets, lengths, packing.capacity)
        units = Units(lengths, packing.cost_model, image_costs, targets=targets)
        schedule = packing.schedule(plan, units, 1)
        self.micro_steps = dict(Counter(self.micro_steps) + Counter(schedule.degrees.tolist()))
        dummy = dummy_document(self.pad_token_id)
        rank = self.rank % self.count
        return [
            RankShare((dummy if i == NO_DOCUMENTS else documents[i] for i in indices.tolist()), *part)
            for indices, part in zip(schedule.micro_batches(rank), schedule.parts_of_rank(rank), strict=True)
        ]

    def _arriving_lengths(self) -> Iterator[int]:
        """Number of tokens of each document, in arrival order. `_waiting` holds it by its position in this order."""
        position = len(self._waiting)
        yield from [len(document["input_ids"]) for document in self._waiting.values()]
        parts = [part_of(self.dataset, path) for path, _ in self.parts]
        for part, (_, epoch) in zip(parts, self.parts, strict=True):
            part.set_epoch(epoch)  # a shuffled dataset gets a new order
        columns = self.weight_column, self.source_column
        reader = StreamReader(parts, list(self._readers), self.packing, self.rows, *columns)
        # Without a generator the loader would draw from torch's global one, and dropout would change.
        generator = torch.Generator().manual_seed(self.num_passes)
        how = {"collate_fn": _identity, "num_workers": self.num_workers} | self.worker_kwargs
        for chunk in DataLoader(reader, batch_size=None, generator=generator, **how) if parts else ():
            self._readers[chunk.reader] = chunk.state
            self.counts += StreamCounts(chunk.ledger)
            self.num_arrived += len(chunk.documents)
            self._waiting.update(enumerate(chunk.documents, position))
            position += len(chunk.documents)
            yield from [len(document["input_ids"]) for document in chunk.documents]
        self._has_ended = True

    # State: every document that was read and not trained yet, and the positions of the readers.

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be the same after a restart."""
        own = {name: getattr(self, name) for name in (*READER_SETTINGS, "weight_column", "source_column")}
        own["image processor"] = self.rows.process and self.rows.process.settings.decode()
        return self.packing.settings("stream") | own

    def _snapshot(self) -> dict[str, Any]:
        """The current state. It shares the documents, which are never changed."""
        return {name: getattr(self, name) for name in SAVED_FIELDS} | {
            "closed": [len(pack) for pack in self._closed],
            "documents": [document for pack in self._closed for document in pack] + list(self._waiting.values()),
            "readers": list(self._readers),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        documents = iter(state["documents"])
        self._closed = deque([next(documents) for _ in range(size)] for size in state["closed"])
        self._waiting = dict(enumerate(documents))
        self.num_passes = state["num_passes"]
        self._begin_pass()
        # An earlier version has not saved all of them
        vars(self).update({name: state[name] for name in SAVED_FIELDS if name in state})
        self._readers = list(state["readers"])
        self._snapshots = {self.num_steps: self._snapshot()}

    def state_after(self, num_steps: int) -> dict[str, Any]:
        """The state after so many optimizer steps: the latest step that was yielded, or one that is still trained.

        It has the `counts`, those of the ranks that read the same, `count` neighbours; and `micro_steps`, the number of
        them by degree.
        """
        return self._snapshots[num_steps]

    def state_dict(self, num_steps: int) -> dict[str, Any]:
        """The state `state_after` so many steps, for `torch.save`.

        It holds the documents that were read and not trained yet: at most `buffer_size`, and a chunk per reader. With
        images it holds their rows, images encoded.
        """
        state = self._snapshots[num_steps]
        return state | {
            "documents": encode_documents(state["documents"]),
            "readers": [asdict(reader) for reader in state["readers"]],
            "counts": asdict(state["counts"]),
            "share": self.path,
            "settings": self.settings,
            "version": STATE_VERSION,
        }

    def _compare_settings(self, state: dict[str, Any]) -> ChangedSettings:
        return compare_settings(
            state["settings"] | {"version": state["version"]}, self.settings | {"version": STATE_VERSION}
        )

    def can_continue(self, state: dict[str, Any]) -> bool:
        """Whether this rank goes on from `state` alone: it was saved by the same rank with the same settings."""
        return not self._compare_settings(state)

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank in place of those of all ranks of a run with other ranks, for `load_state_dict`.

        Ranks may be in different passes. Those that are behind read the passes up to the last one, too. So every
        document is in each pass once.

        Args:
            states: the `state_dict()` of every rank after the same step, as saved.

        Raises:
            ValueError: settings differ that decide which documents there are.
        """
        first = states[0]
        changed = self._compare_settings(first)  # of all ranks
        num_shards = self.dataset.num_shards
        fixed = {
            name: values
            for name, values in changed.items()
            if name not in REPLANNED_SETTINGS and name not in READER_SETTINGS
        }
        if "parts" not in first:
            fixed = changed  # saved by an earlier version
        elif (before := first["settings"]["num_shards"] * prod(num for num, _ in first["share"])) != num_shards:
            fixed["num_shards"] = (before, num_shards)
        if fixed:
            raise ValueError(
                f"The checkpoint's stream was packed with other settings: {describe_changes(fixed)}. The new settings "
                "give other packs, so the documents not trained yet are unknown. Set them back, or set "
                "`ignore_data_skip=True` to start the stream from its beginning."
            )
        readers = states[:: first["count"]]
        last = max(state["num_passes"] for state in readers)
        parts = []
        for state in readers:
            unread = zip(state["parts"], state["readers"], strict=True)
            parts += [(part, reader | {"chunks": 0}) for part, reader in unread if not reader["done"]]
            passes = range(state["num_passes"] + 1, last + 1)
            parts += [(([*state["share"]], epoch), asdict(ReaderState())) for epoch in passes]
        num_groups = self.packing.world_size // self.num_alike
        is_shared = num_groups > 1 and len(parts) % num_groups > 0
        own = slice(None)  # of the documents that wait, and of what has been counted
        counted = readers
        if num_groups > 1 and not is_shared:
            own = slice(self.rank // self.num_alike, None, num_groups)
            parts = parts[own]
            counted = readers[own]
        return first | {
            "documents": encode_documents(
                [document for state in readers for document in decode_documents(state["documents"])][own]
            ),
            "closed": [],
            "readers": [reader for _, reader in parts],
            "parts": [part for part, _ in parts],
            "rest": True,
            "count": self.packing.world_size if is_shared else self.num_alike,
            "counts": asdict(sum([StreamCounts.from_dict(state["counts"]) for state in counted], StreamCounts())),
            "num_passes": last,
            "num_arrived": 0,
            "settings": self.settings,
        }

    def load_state_dict(self, state: dict[str, Any], num_skipped: int = 0) -> None:
        """Continue from a `state_dict()` that this rank `can_continue`, or from what `merge_states` makes.

        Args:
            num_skipped: micro-batches that the caller discards first, as the Trainer does after a restart. They are
                yielded as empty lists.
        """
        assert self.can_continue(state)
        self._start = state | {
            "documents": decode_documents(state["documents"]),
            "readers": [ReaderState(**reader) for reader in state["readers"]],
            "counts": StreamCounts.from_dict(state["counts"]),
        }
        self._num_skipped = num_skipped
        self._restore(self._start)


def _identity(chunk: DocumentChunk) -> DocumentChunk:
    return chunk


def encode_documents(documents: Sequence[DocumentTokens]) -> dict[str, Any]:
    """Documents as few values that `torch.load` reads with `weights_only`."""
    first = documents[0] if documents else {}
    state: dict[str, Any] = {"lengths": torch.tensor([len(document["input_ids"]) for document in documents])}
    for name in STATE_COLUMNS if documents else ():
        state[name] = torch.from_numpy(np.concatenate([document[name] for document in documents]))
    if WEIGHTS in first:
        state[WEIGHTS] = torch.tensor([document[WEIGHTS] for document in documents], dtype=torch.float32)
    if SOURCES in first:
        state[SOURCES] = [document[SOURCES] for document in documents]
    if ENCODED in first:
        rows = [document[ENCODED] for document in documents]
        state[ENCODED] = [(row.text, row.start, row.stop, row.counts) for row in rows]
        # Each image once. By identity: comparing images would compare their bytes
        different = {id(image): image for row in rows for image in row.images}
        places = {key: i for i, key in enumerate(different)}
        images = different.values()
        data = b"".join(image.data or b"" for image in images)
        state["images"] = {
            "numbers": [[places[id(image)] for image in row.images] for row in rows],
            "paths": [image.path for image in images],
            "modes": [image.mode for image in images],
            "sizes": [-1 if image.data is None else len(image.data) for image in images],
            "data": torch.from_numpy(np.frombuffer(data, np.uint8).copy()),
        }
    return state


def decode_documents(state: dict[str, Any]) -> list[DocumentTokens]:
    lengths = state["lengths"].tolist()
    columns = {name: [part.numpy().copy() for part in state[name].split(lengths)] for name in STATE_COLUMNS if lengths}
    if WEIGHTS in state:
        columns[WEIGHTS] = list(state[WEIGHTS].numpy())
    if SOURCES in state:
        columns[SOURCES] = state[SOURCES]
    if ENCODED in state:
        given = state["images"]
        images = []
        start = 0
        data = given["data"].numpy().tobytes()
        for path, mode, size in zip(given["paths"], given["modes"], given["sizes"], strict=True):
            images.append(EncodedImage(path, None if size < 0 else data[start : start + size], mode))
            start += max(size, 0)
        columns[ENCODED] = [
            EncodedRow(text, tuple(images[number] for number in numbers), first, stop, tuple(counts))
            for (text, first, stop, counts), numbers in zip(state[ENCODED], given["numbers"], strict=True)
        ]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
