"""Pack a stream: a bounded buffer in arrival order, whole optimizer steps for every rank, and the state to resume from.

For a table, whose lengths are known, `planning/packs.py`, `planning/schedule.py` and `loading.py` do this. Documents
are packed as they arrive, oldest first. Each pack is closed by an exact fill from at most `buffer_size` waiting
documents. As at the end of an epoch, the packs of the last step of a pass are split between the micro-batches of all
ranks, so every document is in exactly one pack of a pass. Then the next pass begins. Passes do not end: `max_steps`
ends the run.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import repeat
from math import prod
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from ..planning.packing import ELASTIC, Changes, Packing, changes
from ..planning.packs import PackPlan
from ..planning.plans import schedule_plan
from ..planning.schedule import EMPTY
from ..planning.units import Units
from ..samples.encoded_images import undecoded
from .collator import IGNORE_INDEX
from .documents import Ledger
from .loaders import dummy_document
from .parts import PartOf
from .spans import refuse_no_documents
from .stream_images import ENCODED, StreamImages
from .stream_reader import Chunk, DocumentTokens, ReaderState, StreamReader, part_of, share_of_rank
from .stream_state import StreamCounts, packed, refuse_other_settings, unpacked
from .threads import wait_for_threads_before_forks

logger = logging.getLogger(__name__)

MOST_BYTES = 2**28  # of the rows with images of these documents: encoded images, and text
STATE_VERSION = 4  # raise it when the contents of the state change
# With other values of these and of `ELASTIC`, the rest of a pass is divided anew. `num_shards` is that of a rank.
READ = ("rank", "num_workers", "num_shards")
Pack = list[DocumentTokens]


class PackedStream(torch.utils.data.IterableDataset[Any]):
    """Endless micro-batches of one rank from a stream of tokenised documents; each is a list of documents.

    If the number of shards is a multiple of the number of ranks, each rank reads its own shards, and begins its next
    pass when it has read them. Otherwise every rank reads the whole stream. All ranks then make the same packs, and
    each trains on its slots of every optimizer step, as with a table.

    With sequence parallelism, a micro-batch of which this rank holds a part is a `PartOf`. If the number of shards is a
    multiple of the number of groups of the smallest degree that holds `max_length`, each group reads its own shards,
    and this is the only degree. Otherwise every rank reads the whole stream, and each micro-step has its own degree, as
    with a table.

    Args:
        dataset: see `StreamReader`.
        packing: how documents become packs. At most `buffer_size` of them wait; 128 more are read at a time.
        rank: this data-parallel rank.
        num_workers: processes that read, at most one per shard of this rank. They share its shards.
        worker_kwargs: for the `DataLoader` of these processes.
        weight_column, source_column: see `StreamReader`.
        images: how rows with images become documents; None: they have tokens.
        most_bytes: with images, of the rows of waiting documents; when they have so many, no other is read.

    Attributes:
        num_ahead: micro-batches that a loader with processes takes before they are trained.

    Raises:
        ValueError: a pass over the stream has no document to train on; what `StreamReader` refuses.

    A run that resumes with other ranks, see `merged`, first reads the rest of the pass: the parts of the stream that
    the old ranks have not read. If they cannot be divided evenly, every rank reads all of them.
    """

    num_steps: int
    num_passes: int
    _num_arrived: int
    _counts: StreamCounts
    _readers: list[ReaderState]
    _rest: dict[str, Any] | None  # `parts` in the rest of a pass of other ranks, and whether all ranks read all of it
    _micro_steps: dict[int, int]  # number of them so far by degree
    _snapshots: dict[int, dict[str, Any]]

    def __init__(  # noqa: PLR0913 - settings, by keyword
        self,
        dataset: IterableDataset,
        packing: Packing,
        *,
        rank: int = 0,
        vocab_size: int | None = None,
        pad_token_id: int = 0,
        num_workers: int = 0,
        worker_kwargs: dict[str, Any] | None = None,
        weight_column: str | None = None,
        source_column: str | None = None,
        images: StreamImages | None = None,
        most_bytes: int = MOST_BYTES,
    ):
        if images is not None:
            dataset, mode = undecoded(dataset)
            images = replace(images, mode=mode)
        self.dataset, self.images, self.most_bytes, self.num_ahead = dataset, images, most_bytes, 0
        smallest = 1 if packing.parallel is None else packing.parallel.smallest
        self.share = share_of_rank(dataset, rank, packing.world_size, degree=smallest)
        if packing.parallel is not None and self.share.count != packing.world_size:
            packing = replace(packing, degrees=(smallest,))  # a group knows nothing of the documents of the others
        self.packing, self.rank = packing, rank
        self.vocab_size, self.pad_token_id = vocab_size, pad_token_id
        self.weight_column, self.source_column = weight_column, source_column
        self.num_workers = min(num_workers, self.share.dataset.num_shards)
        if self.num_workers < num_workers and rank == 0:
            message = "dataloader_num_workers=%d was given; %d workers read, because each needs its own shard."
            logger.warning(message, num_workers, self.num_workers)
        if self.num_workers:
            wait_for_threads_before_forks()
        self.worker_kwargs = worker_kwargs or {} if self.num_workers else {}
        self._num_skipped = 0
        self.begin()

    @property
    def _count(self) -> int:
        """Ranks that read the same in the current pass."""
        return self.packing.world_size if self._rest is not None and self._rest["is_shared"] else self.share.count

    @property
    def _packing_of_pass(self) -> Packing:
        """The packing of the ranks that read the same."""
        return replace(self.packing, world_size=self._count)

    def counts(self, num_steps: int) -> StreamCounts:
        """Totals after `num_steps` optimizer steps: the latest step that was yielded, or the step before it.

        They are those of the ranks that read the same, see `readers_alike`.
        """
        return self._snapshots[num_steps]["counts"]

    def readers_alike(self, num_steps: int) -> int:
        """Ranks, neighbours, that had read the same after so many steps, see `counts`."""
        return self._snapshots[num_steps]["count"]

    def micro_steps(self, num_steps: int) -> dict[int, int]:
        """Number of micro-steps by degree after so many steps, see `counts`; empty without sequence parallelism."""
        return self._snapshots[num_steps]["micro_steps"]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be the same after a restart."""
        own = {name: getattr(self, name) for name in ("rank", "num_workers", "weight_column", "source_column")}
        own["num_shards"] = self.share.dataset.num_shards
        own["image processor"] = None if self.images is None else self.images.process.settings.decode()
        return self.packing.settings("stream") | own

    def __iter__(self) -> Iterator[Pack | PartOf]:
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
            if not self._num_arrived and self._rest is None:
                refuse_no_documents(
                    self._counts.ledger, f"Rank {self.rank} read the stream to its end", self.packing.max_length
                )
            self.num_passes += 1
            self._num_arrived = 0
            self._readers = [ReaderState()] * max(self.num_workers, 1)
            if self._count > self.share.count and self.rank >= self.share.count:
                self._counts = StreamCounts()  # those of the first ranks go on
            self._rest = None

    def _one_pass(self) -> Iterator[list[Pack | PartOf]]:
        """The rest of the current pass: this rank's micro-batches, one optimizer step after the other."""
        slots = self._packing_of_pass.num_bins
        bytes_of = None if self.images is None else lambda position: self._waiting[position][ENCODED].num_bytes
        packs = self.packing.pack_stream(self._arrivals(), bytes_of, self.most_bytes)
        self._has_ended = False
        while True:
            # After the last arrival, the packs of the remaining buffer are closed together and wait for their steps.
            while len(self._closed) < slots or self._has_ended:
                pack = next(packs, None)
                if pack is None:
                    break
                self._closed.append([self._waiting.pop(position) for position in pack])
            if not self._closed:
                return
            step = [self._closed.popleft() for _ in range(min(slots, len(self._closed)))]
            documents = [document for pack in step for document in pack]
            tokens = sum(len(document["input_ids"]) for document in documents)
            trained = sum(int(np.count_nonzero(document["labels"][1:] != IGNORE_INDEX)) for document in documents)
            self._counts += StreamCounts(Ledger(), len(step), len(documents), tokens, trained)
            if self.images is not None:
                self._counts += self._counts_of_images(step)
            yield self._micro_batches(step)

    def _counts_of_images(self, packs: list[Pack]) -> StreamCounts:
        counts = [[document[ENCODED].counts[0] for document in pack] for pack in packs]
        documents = [document for pack in packs for document in pack]
        lengths, tower = np.array([len(document["input_ids"]) for document in documents]), self._image_costs(documents)
        return StreamCounts(
            images=sum(map(sum, counts)),
            with_images=sum(count > 0 for pack in counts for count in pack),
            most_images=max(map(sum, counts)),
            tower_flops=0.0 if tower is None else float(tower.sum()),
            language_flops=float(self.packing.cost_model(lengths).sum()),
        )

    def _image_costs(self, documents: list[DocumentTokens]) -> np.ndarray | None:
        """FLOPs of the images of each document, shape (N,); None without images, or if they cannot be counted."""
        tower = self.packing.cost_model.tower
        if self.images is None or tower is None:
            return None
        _, values, squares = np.array([document[ENCODED].counts for document in documents]).T
        return tower(values, squares)

    def _arrivals(self) -> Iterator[int]:
        """Number of tokens of each document, in arrival order. `_waiting` holds it by its position in this order."""
        position = len(self._waiting)
        yield from [len(document["input_ids"]) for document in self._waiting.values()]
        for chunk in self._chunks():
            self._readers[chunk.reader] = chunk.state
            self._counts += StreamCounts(chunk.ledger)
            self._num_arrived += len(chunk.documents)
            self._waiting.update(enumerate(chunk.documents, position))
            position += len(chunk.documents)
            yield from [len(document["input_ids"]) for document in chunk.documents]
        self._has_ended = True

    def _chunks(self) -> Iterator[Chunk]:
        parts = []
        for path, epoch in self._parts(self._rest, self.num_passes):
            part = part_of(self.dataset, path)
            part.set_epoch(epoch)  # a shuffled dataset gets a new order
            parts.append(part)
        if not parts:
            return
        reader = StreamReader(
            parts,
            list(self._readers),
            self.packing,
            self.vocab_size,
            self.weight_column,
            self.source_column,
            self.images,
        )
        # Without a generator the loader would draw from torch's global one, and dropout would change.
        generator = torch.Generator().manual_seed(self.num_passes)
        how = {"collate_fn": _identity, "num_workers": self.num_workers} | self.worker_kwargs
        yield from DataLoader(reader, batch_size=None, generator=generator, **how)

    def _parts(self, rest: dict[str, Any] | None, num_passes: int) -> list[tuple[list[tuple[int, int]], int]]:
        """The path and the epoch of what each reader reads in a pass."""
        if rest is not None:
            return rest["parts"]
        num = max(self.num_workers, 1)
        return [([*self.share.path, (num, reader)], num_passes) for reader in range(num)]

    def _micro_batches(self, packs: list[Pack]) -> list[Pack | PartOf]:
        """Packs of one optimizer step, for all ranks that share the stream -> micro-batches of this rank."""
        documents = [document for pack in packs for document in pack]
        lengths = np.array([len(document["input_ids"]) for document in documents])
        offsets = np.cumsum([0] + [len(pack) for pack in packs])
        plan = PackPlan(np.arange(len(documents)), offsets, lengths, self.packing.capacity)
        units = Units(lengths, self.packing.cost_model, self._image_costs(documents))
        schedule = schedule_plan(plan, units, 1, packing=self._packing_of_pass)
        if self.packing.parallel is not None:
            self._micro_steps = dict(Counter(self._micro_steps) + Counter(schedule.degrees.tolist()))
        dummy = dummy_document(self.pad_token_id)
        rank, micro_batches = self.rank % self._count, []
        for indices, (degree, index) in zip(schedule.micro_batches(rank), schedule.parts(rank), strict=True):
            micro_batch = [dummy if i == EMPTY else documents[i] for i in indices.tolist()]
            micro_batches.append(micro_batch if degree == 1 else PartOf(micro_batch, degree, index))
        return micro_batches

    # State: every document that was read and not trained yet, and the positions of the readers.

    def _snapshot(self) -> dict[str, Any]:
        """The current state. It shares the documents, which are never changed."""
        return {
            "closed": [len(pack) for pack in self._closed],
            "documents": [document for pack in self._closed for document in pack] + list(self._waiting.values()),
            "readers": list(self._readers),
            "counts": self._counts,
            "micro_steps": self._micro_steps,
            "num_steps": self.num_steps,
            "num_passes": self.num_passes,
            "num_arrived": self._num_arrived,
            "rest": self._rest,
            "count": self._count,
        }

    def begin(self, num_steps: int = 0) -> None:
        """Begin with the first document of the stream; `num_steps` optimizer steps were trained before."""
        self._closed, self._waiting = deque[Pack](), dict[int, DocumentTokens]()
        self._readers = [ReaderState()] * max(self.num_workers, 1)
        self._counts, self._micro_steps, self._rest = StreamCounts(), {}, None
        self.num_steps, self.num_passes, self._num_arrived = num_steps, 0, 0
        self._start = self._snapshot()
        self._restore(self._start)

    def _restore(self, state: dict[str, Any]) -> None:
        documents = iter(state["documents"])
        self._closed = deque([next(documents) for _ in range(size)] for size in state["closed"])
        self._waiting = dict(enumerate(documents))
        self._readers = list(state["readers"])
        self._counts, self._num_arrived = state["counts"], state["num_arrived"]
        self._micro_steps = state["micro_steps"]
        self.num_steps, self.num_passes = state["num_steps"], state["num_passes"]
        self._rest = state.get("rest")
        self._snapshots = {self.num_steps: {"count": self._count} | state}

    def state_dict(self, num_steps: int) -> dict[str, Any]:
        """The state after `num_steps` optimizer steps, the latest step that was yielded or one that is still trained.

        It can be saved with `torch.save`. It holds the documents that were read and not trained yet: at most
        `buffer_size`, and a chunk per reader. With images it holds their rows, images encoded.
        """
        state = self._snapshots[num_steps]
        return state | {
            "documents": packed(state["documents"]),
            "readers": [asdict(reader) for reader in state["readers"]],
            "counts": asdict(state["counts"]),
            "parts": self._parts(state["rest"], state["num_passes"]),
            "share": self.share.path,
            "settings": self.settings,
            "version": STATE_VERSION,
        }

    def _changed(self, state: dict[str, Any]) -> Changes:
        """The settings that differ from those that the state was saved with."""
        return changes(state["settings"] | {"version": state["version"]}, self.settings | {"version": STATE_VERSION})

    def continues(self, state: dict[str, Any]) -> bool:
        """Whether this rank goes on from `state` alone: it was saved by the same rank with the same settings."""
        return not self._changed(state)

    def merged(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank in place of those of all ranks of a run with other ranks, for `load_state_dict`.

        Ranks may be in different passes. Those that are behind read the passes up to the last one, too. So every
        document is in each pass once.

        Args:
            states: the `state_dict()` of every rank after the same step, as saved.

        Raises:
            ValueError: settings differ that decide which documents there are.
        """
        first = states[0]
        changed, num_shards = self._changed(first), _all_shards(self.share.dataset.num_shards, self.share.path)
        fixed = {name: values for name, values in changed.items() if name not in ELASTIC and name not in READ}
        if "parts" not in first:
            fixed = changed  # saved by an earlier version
        elif _all_shards(first["settings"]["num_shards"], first["share"]) != num_shards:
            fixed["num_shards"] = (_all_shards(first["settings"]["num_shards"], first["share"]), num_shards)
        if fixed:
            refuse_other_settings(fixed)
        readers = states[:: first["count"]]
        last, parts = max(state["num_passes"] for state in readers), []
        for state in readers:
            unread = zip(state["parts"], state["readers"], strict=True)
            parts += [(part, reader | {"chunks": 0}) for part, reader in unread if not reader["done"]]
            passes = range(state["num_passes"] + 1, last + 1)
            parts += [(([*state["share"]], epoch), asdict(ReaderState())) for epoch in passes]
        num_groups = self.packing.world_size // self.share.count
        is_shared = num_groups > 1 and len(parts) % num_groups > 0
        own, counted = slice(None), readers  # of the documents that wait, and of what has been counted
        if num_groups > 1 and not is_shared:
            own = slice(self.rank // self.share.count, None, num_groups)
            parts, counted = parts[own], readers[own]
        return first | {
            "documents": packed([document for state in readers for document in unpacked(state["documents"])][own]),
            "closed": [],
            "readers": [reader for _, reader in parts],
            "rest": {"parts": [part for part, _ in parts], "is_shared": is_shared},
            "count": self.packing.world_size if is_shared else self.share.count,
            "counts": asdict(sum([StreamCounts.from_dict(state["counts"]) for state in counted], StreamCounts())),
            "num_passes": last,
            "num_arrived": 0,
            "settings": self.settings,
        }

    def load_state_dict(self, state: dict[str, Any], num_skipped: int = 0) -> None:
        """Continue from `state_dict()`.

        Args:
            num_skipped: micro-batches that the caller discards first, as the Trainer does after a restart. They are
                yielded as empty lists.

        Raises:
            ValueError: the settings differ from those that the state was saved with.
        """
        changed = self._changed(state)
        if changed:
            refuse_other_settings(changed)
        self._start = state | {
            "documents": unpacked(state["documents"]),
            "readers": [ReaderState(**reader) for reader in state["readers"]],
            "counts": StreamCounts.from_dict(state["counts"]),
        }
        self._num_skipped = num_skipped
        self._restore(self._start)


def _all_shards(num_shards: int, path: Sequence[tuple[int, int]]) -> int:
    """Shards of a stream of which the part at `path` has so many."""
    return num_shards * prod(num for num, _ in path)


def _identity(chunk: Chunk) -> Chunk:
    return chunk
