"""A stream as the training set: it is read and packed while the model trains.

`PackedStream` (`data/stream.py`) reads and packs. `StreamSource` makes it and its loader when training starts, and
saves and continues its position in checkpoints. `StreamCallback` refuses ranks whose streams differ, and updates the
packing report with each checkpoint.

A *pass* is one reading of the whole stream. Each rank reads its own shards (files) of the stream; if these cannot be
divided evenly, several neighbouring ranks, or all ranks, read the same rows.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl

from ..data.loaders import document_loader
from ..data.row_values import RowValues, StreamSources
from ..data.stream import FinishedPacks, PackedStream, StreamCounts
from ..planning.packing import Packing
from ..reporting.build import make_stream_report
from ..reporting.report import PackingReport
from . import checkpoints
from .batches import BatchMaker
from .planner import packing_of
from .same_data import check_same_stream
from .source import Source
from .trainer_view import TrainerView, complete_report

logger = logging.getLogger(__name__)

# Fields of the packing report that are set before training and in its first steps, and do not change later
FIRST_FINDINGS = (
    "model",
    "attention",
    "isolation",
    "first_step",
    "trained",
    "data",
    "experimental",
    "compiled",
    "memory",
)


class StreamSource(Source):
    """A stream as the training set.

    Attributes:
        stream: yields the packs of this rank; None before training, and with a loader that the user made.
    """

    kind = "stream"

    def __init__(self, trainer: TrainerView, data: BatchMaker):
        super().__init__(trainer, data)
        self.stream: PackedStream | None = None

    def read(self, dataset: IterableDataset) -> None:
        """Prepare for a new training set. Its rows, with their weights and sources, are read only in training."""
        # The number of each name in `source_column`; none is known yet
        self.numbered_sources = None if self.args.source_column is None else StreamSources()
        self.row_values = RowValues()  # empty: each document of a stream has its own weight and source

    # Packs

    @property
    def packing(self) -> Packing | None:
        """The settings by which the stream is packed; None before training starts, and without packing."""
        return None if self.stream is None else self.stream.packing

    @property
    def num_compared_steps(self) -> int:
        """The number of optimizer steps in which ranks compare their packs.

        Each rank reads by itself, so ranks may read different packs in any step.
        """
        return super().num_compared_steps if self.stream is None else self.args.max_steps

    def packed_loader(self) -> tuple[DataLoader[Any], PackingReport]:
        """Make the stream of packs; return its loader, and the report, in which nothing is counted yet."""
        args = self.args
        data = self._data
        stream = self.stream = PackedStream(
            self._trainer.train_dataset,
            packing_of(args, **data.packing_arguments),
            rank=data.ranks.rank,
            rows=data.reading.stream_rows(data.vocab_size),  # a `StreamRows`, which makes documents of rows
            pad_token_id=self._trainer._tokenizer.pad_token_id,
            num_workers=args.dataloader_num_workers,
            worker_kwargs=data.worker_kwargs,
            weight_column=args.weight_column,
            source_column=args.source_column,
        )
        # Batches have the names of sources, and the trainer numbers them (`numbered_sources`)
        collate = data.training_collator(data.value_columns, names_sources=True)
        # The stream has workers that read its rows. If the rows have images (`finishes`), the loader has other workers,
        # which turn the images of a pack into pixels (`FinishedPacks`)
        settings = data.loader_settings  # a new dictionary
        if not stream.rows.finishes:
            settings["num_workers"] = 0
        if settings["num_workers"]:
            settings |= data.worker_kwargs
        is_in_order = settings.pop("in_order", True)
        if not is_in_order and stream.rank == 0:
            logger.warning(
                "dataloader_in_order=False was given; packs with images of a stream stay in order, because a restart "
                "goes on behind the last one."
            )
        elif not args.dataloader_in_order and stream.num_workers and stream.ranks_per_share > 1 and stream.rank == 0:
            logger.warning(
                "dataloader_in_order=False was given; rows of a stream that several ranks share stay in order, because "
                "these ranks must make the same packs."
            )
        # Workers take packs before they are trained. The stream remembers its state at this number of packs, so that
        # the state of the last trained pack can be saved
        stream.num_ahead = settings["num_workers"] * (settings.get("prefetch_factor") or 2)
        # The stream is the batch sampler. In place of indices it yields the documents of a pack, and the loader passes
        # them to the dataset `FinishedPacks`, which completes them
        loader = document_loader(FinishedPacks(stream.rows), stream, collate, **settings)
        return loader, make_stream_report(stream, args.max_steps)

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callback that compares the streams of ranks and updates the report."""
        return [StreamCallback(self._trainer, self._data, self)]

    # Restarts

    def resume_loader(self, checkpoint: str) -> None:
        """Set the stream to its position in a checkpoint."""
        if self.stream is None:
            return
        step = self._trainer.state.global_step
        # transformers discards the micro-batches of the running epoch that were trained, so the stream first yields as
        # many empty ones. The loader of a stream has no length, so for transformers an epoch has `max_steps` steps
        num_skipped = step % self.args.max_steps * self.args.gradient_accumulation_steps
        resume_stream_at(
            self.stream, checkpoint, step, num_skipped=num_skipped, ignore_data_skip=self.args.ignore_data_skip
        )

    def save_position(self, folder: Path) -> dict[str, Any] | None:
        """Write the position of this rank into a file of a checkpoint.

        Returns:
            {}: `packing_state.json` needs no entry, because the file has the whole position. None without packing, and
            with a loader that the user made: then there is no position to continue from.
        """
        if self.stream is None:
            return None
        if self._data.ranks.copy_index == 0:  # processes that divide a model between them have equal positions
            saved = self.stream.state_dict(self._trainer.state.global_step)
            checkpoints.write_synced(stream_file(folder, self.stream.rank), partial(torch.save, saved))
        return {}


def stream_file(checkpoint: str | Path, rank: int) -> Path:
    """Return the file of a checkpoint that holds the position of a rank in a stream."""
    return Path(checkpoint) / f"packed_stream_{rank}.pt"


def resume_stream_at(
    stream: PackedStream, checkpoint: str, num_steps: int, *, num_skipped: int, ignore_data_skip: bool
) -> None:
    """Set the stream to the position that a checkpoint has after `num_steps` optimizer steps.

    Args:
        stream: the stream of this rank, which has not been read.
        checkpoint: the folder of the checkpoint.
        num_steps: the number of optimizer steps that were trained; only read with `ignore_data_skip`.
        num_skipped: the number of micro-batches that transformers discards before it trains.
        ignore_data_skip: whether to begin with the first row in place of the position.
    """
    if ignore_data_skip:
        # The stream reads from its first row. Its states are found by the optimizer step of the run, so it must know
        # how many steps were trained before
        stream.begin(num_steps)
        return
    # First, continue from the file of this rank, if it was saved with the same settings and number of ranks
    state = None
    if stream_file(checkpoint, stream.rank).is_file():
        state = _read_saved_stream(checkpoint, stream.rank, stream)
    # Otherwise, divide what all ranks of the earlier run have not trained between the ranks of this run.
    # `can_continue`: the state was saved by the same rank, with the same settings
    if state is None or not stream.can_continue(state):
        first_state = _read_saved_stream(checkpoint, 0, stream)
        num_ranks_before = first_state["settings"]["world_size"]
        states = [_read_saved_stream(checkpoint, rank, stream) for rank in range(num_ranks_before)]
        state = stream.merge_states(states)
        if stream.rank == 0:
            # "count" in a state is the number of neighbouring ranks that read the same rows. The earlier states of such
            # ranks are equal, so the waiting documents of one of them are counted
            different_states = states[:: first_state["count"]]
            num_waiting = sum(len(rank_state["documents"]["lengths"]) for rank_state in different_states)
            # `merge_states` divides the rest of the stream between groups of `ranks_per_share` ranks. If the rest
            # cannot be divided evenly, every rank reads all of it, and "count" is the number of all ranks
            all_read_it = state["count"] > stream.ranks_per_share
            division = "every rank reads all of it" if all_read_it else "divided between the ranks"
            logger.warning(
                f"Resuming a stream of {len(states)} ranks on {stream.packing.world_size}: {num_waiting:,} documents "
                f"that wait for a pack, and the rest of pass {state['num_passes'] + 1}, are packed anew ({division}). "
                "Random numbers (dropout) differ."
            )
    stream.load_state_dict(state, num_skipped)


def _read_saved_stream(checkpoint: str, rank: int, stream: PackedStream) -> dict[str, Any]:
    """Return the position in the stream that a rank has saved, or raise ValueError if its file is missing."""
    file = stream_file(checkpoint, rank)
    if not file.is_file():
        raise ValueError(
            f"`resume_from_checkpoint={checkpoint!r}` was given on {stream.packing.world_size} ranks and has no "
            f"`{file.name}`, the position in the stream of rank {rank}. It is on another node, and another number of "
            "ranks needs the positions of all. Copy all of it to every node, or set `ignore_data_skip=True` to start "
            "the stream from its beginning."
        )
    return torch.load(file, weights_only=True)


class StreamCallback(TrainerCallback):
    """Refuses ranks that read different streams, and reports with each checkpoint what was read and trained."""

    def __init__(self, trainer: TrainerView, data: BatchMaker, source: StreamSource):
        self._trainer = trainer
        self._data = data
        self._source = source

    def on_train_begin(self, *call: object, **kwargs: object) -> None:
        """Raise ValueError on all ranks if the streams of two ranks begin with different rows."""
        args = self._trainer.args
        if args.world_size == 1:
            return
        # The tokens of the first row, or for a row with images a hash
        first_rows = gather_object([self._data.reading.first_stream_row(self._trainer.train_dataset)])
        differing_ranks = [rank for rank in range(args.world_size) if first_rows[rank] != first_rows[0]]
        if differing_ranks:
            raise ValueError(
                f"The stream begins with another row on {len(differing_ranks)} of {args.world_size} ranks than on rank "
                f"0 (the first is rank {differing_ranks[0]}). All ranks share one stream. If they read "
                "different ones, documents are trained twice or never. Give `shuffle` a `seed`, and all ranks the same "
                "files."
            )

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        """Compare what ranks have read, after steps with a log or a checkpoint, for which ranks wait anyway."""
        stream = self._source.stream
        if self._trainer.args.world_size > 1 and stream is not None and (control.should_log or control.should_save):
            check_same_stream(stream, self._trainer.state.global_step)

    def on_save(self, *call: object, **kwargs: object) -> None:
        """Update the report with each checkpoint."""
        self._update_report()

    def on_train_end(self, *call: object, **kwargs: object) -> None:
        """Update and show the report."""
        report = self._update_report()
        if self._trainer.args.packing_report and self._trainer.is_world_process_zero():
            report.show()

    def _update_report(self) -> PackingReport:
        """Update the report with what was read and trained up to now. All ranks must call it."""
        trainer = self._trainer
        stream = self._source.stream
        num_steps = self._trainer.state.global_step
        assert stream is not None  # made with the training loader
        previous_report = trainer.packing_report
        state = stream.state_after(num_steps)
        counts = state["counts"]
        num_alike = state["count"]  # neighbouring ranks that read the same rows, and so have equal counts
        if num_alike < stream.packing.world_size:
            # Each data-parallel rank has `copies` processes, and `num_alike` neighbouring ranks have equal counts. The
            # counts of one process of each such group are added
            counts_of_processes = gather_object([counts])
            different_counts = counts_of_processes[:: num_alike * self._data.ranks.copies]
            counts = sum(different_counts, StreamCounts())
        trainer.packing_report = make_stream_report(
            stream, trainer.args.max_steps, counts, micro_steps=state["micro_steps"]
        )
        return complete_report(trainer, **{name: getattr(previous_report, name) for name in FIRST_FINDINGS})
