"""The training set of a run, whatever it is: the interface of tables and streams.

A *table* (`table_source.py`) is read into documents when the trainer is constructed, and its packs are planned epoch
by epoch. A *stream* (`stream_source.py`) is read and packed while the model trains. The rest of the trainer uses a
`Source` and does not know which of the two it is: `loading.py` makes it, and takes the loader of packs from it;
`restart.py` saves and continues its position.

A *document* is one training example as the model reads it; a *pack* is one sequence of several documents that the model
reads together. With sequence parallelism several ranks share a pack, and their number is its *degree*.
"""

from abc import ABC, abstractmethod
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..data.documents import make_documents
from ..data.loaders import DocumentDataset
from ..data.row_values import RowValues, StreamSources, read_row_values
from ..group import Group
from ..planning.packing import Packing
from ..planning.schedule import Schedule
from ..reporting.report import PackingReport
from .batches import BatchMaker
from .trainer_view import TrainerPart, TrainerView

NUM_COMPARED_STEPS = 2  # optimizer steps at the start of a run in which ranks check that they got the same packs


class Source(TrainerPart, ABC):
    """The training set of a trainer.

    Attributes:
        kind: what messages call the training set.
        row_values: the weight and the data source (`source_column`) of each row of a table. It is empty for a stream,
            whose documents have these values themselves.
        numbered_sources: for a stream with a `source_column`, the index of each name in this column. The batches have
            the names, and this rank gives a name the next index when it first reads it. None without a `source_column`,
            and for a table, whose batches have indices in place of names.
        longest_document: the tokens of the longest document; infinity if it is not known.
    """

    kind: ClassVar[str]
    row_values: RowValues
    numbered_sources: StreamSources | None = None
    longest_document: float = inf

    def __init__(self, trainer: TrainerView, data: BatchMaker):
        super().__init__(trainer)
        self._data = data

    @abstractmethod
    def read(self, dataset: Any) -> None:
        """Read the training set, which is the `train_dataset` of the trainer.

        Called at construction, and again when training starts if the user has set another `train_dataset`.
        """

    # Packs

    @property
    @abstractmethod
    def packing(self) -> Packing | None:
        """The settings by which the training set is packed; None before training starts, and without packing."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees that packs may have in training, such as (1, 2, 4); () without packing."""
        return () if self.packing is None else self.packing.degrees

    @property
    def num_compared_steps(self) -> int:
        """The number of optimizer steps whose packs are compared between ranks that must read the same packs."""
        return NUM_COMPARED_STEPS

    @property
    def cache_folder(self) -> Path | None:
        """The folder with the cached documents of a table; None if they are not cached."""
        return None

    @abstractmethod
    def packed_loader(self) -> tuple[DataLoader[Any], PackingReport]:
        """Return the loader of packs, and the report as far as it is known before training. All ranks must call it."""

    def first_schedule(self) -> tuple[Schedule | None, np.ndarray | None]:
        """Return which documents are in which optimizer step of the first epoch, and how many tokens each one trains.

        Returns:
            The schedule of the first epoch of this run, and the number of trained tokens of each document, (N,). Both
            are None if no epoch is planned ahead.
        """
        return None, None

    def first_documents(self, num_documents: int) -> tuple[list[dict[str, Any]], Group]:
        """Return up to `num_documents` first documents, and the group of ranks that can share a pack of them.

        The ranks of a group get equal documents. Here, for a training set of which no epoch is planned ahead, every
        rank gets the documents of the first rows. The list is empty if one of these rows has an error.
        """
        args = self.args
        degree = max(self.degrees, default=1)  # the number of ranks in the largest groups
        first_rows = self._trainer.train_dataset.take(num_documents)
        documents = list[dict[str, Any]]()
        try:
            table = self._data.reading.read_whole_stream(first_rows)
            reader = self._data.reading.make_reader(table, "train")  # reads the tokens of a row
            # Data sources are needed for the log only, so weights are read without them
            values = read_row_values(table, args.weight_column, source_column=None, name="train")
            # Where each document begins and ends in its row; `overlong` says what is done with too long documents
            spans = make_documents(reader, args.max_length, overlong=args.effective_overlong)
            document_dataset = DocumentDataset(reader, spans, values=values)
            documents = document_dataset.__getitems__([*range(min(num_documents, len(document_dataset)))])
        except ValueError:
            # A row has an error. The message comes in training, where the stream drops this row or raises the error.
            pass
        return documents, Group(size=degree, rank=self._data.ranks.rank % degree)

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks that the training set needs."""
        return []

    # Steps and restarts. The methods that are not abstract are right for a run whose epochs have equally many steps.

    def restore_plan(self, resumed: tuple[str, dict[str, Any]] | None) -> None:
        """Continue the plan of a checkpoint, or refuse the checkpoint. Called when the loader is made, in every run.

        Here it does nothing, for a training set that is not planned ahead.

        Args:
            resumed: the checkpoint and its state; None for a fresh run, and with `ignore_data_skip`.
        """

    def correct_training_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `values` with the numbers of epochs and optimizer steps that this run has.

        Args:
            values: the result of `Trainer.set_initial_training_values` in transformers. The first value is the number
                of epochs, and the last is the number of optimizer steps, `max_steps`.
        """
        return values

    def resume_position(self, values: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch in which a run begins or resumes, and how many of its micro-batches were trained.

        Args:
            values: the two numbers as transformers has computed them, which are right if no plan is resumed.
        """
        return values

    def num_steps_of_epoch(self, epoch: int) -> int | None:
        """Return the number of optimizer steps of an epoch; None if all epochs have the same number."""
        return None

    def resume_loader(self, checkpoint: str) -> None:
        """Set the loader so that training continues from a checkpoint. Called once transformers knows the step.

        Afterwards transformers reads as many micro-batches as the running epoch had trained at the checkpoint, and
        discards them. The next micro-batch of the loader must be the first that was not trained. Here nothing is set,
        for a loader that follows a plan: it yields the trained micro-batches of the epoch once more.
        """

    @abstractmethod
    def save_position(self, folder: Path) -> dict[str, Any] | None:
        """Write the position of this rank into a checkpoint. All ranks must call it.

        Returns:
            Entries for the state of the checkpoint. None without packing, and with a loader that the user made: then
            there is no position to continue from.
        """
