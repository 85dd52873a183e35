"""A table as the training set: its documents, the plan of their packs, and what a checkpoint says of the plan.

`loading.py` constructs a `TableSource` and calls its methods. The rows are cut into documents when the trainer is
constructed. When training starts, `EpochPlanner` plans which documents share a pack in the first epoch, and the packing
report is made. The rest of the trainer calls the methods that `Source` (`source.py`) describes.

A resumed run trains every document of the epoch once, or it is refused. To decide this, the state of a checkpoint holds
the settings, a hash of all documents, and a hash of the documents of every optimizer step. They are compared before the
first step. If only ranks, accumulation or batch size changed, the remaining documents of the epoch are planned anew.

A *document* is one training example; a *pack* is one sequence of several documents that the model reads together.
"""

import hashlib
import logging
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch.utils.data import DataLoader

from ..data.documents import Documents
from ..data.epochs import EpochPlanner, ResumePoint
from ..data.loaders import DocumentDataset, PackedBatchSampler
from ..data.reader import RowReader
from ..data.row_values import read_row_values
from ..feature import FIELDS, regroups
from ..group import Group
from ..planning.packing import REPLANNED_SETTINGS, ChangedSettings, Packing, compare_settings, describe_changes
from ..planning.schedule import NO_DOCUMENTS, Schedule
from ..reporting.build import make_report
from ..reporting.report import PackingReport
from ..version import __version__
from . import checkpoints
from .batches import BatchMaker
from .checkpoints import TrainedMask
from .planner import documents_of, make_planner
from .progress import status_shown
from .same_data import check_same_documents
from .source import Source
from .trainer_view import TrainerView

logger = logging.getLogger(__name__)

# A checkpoint with other values of these settings may be resumed: batch size, accumulation and number of ranks
# (`REPLANNED_SETTINGS`), and the fields of features (`share_prefixes`). `continue_planner` compares the documents of
# every optimizer step (`step_hash`). If they are equal, the run continues with the same batches. If not, the remaining
# documents are planned anew, or the run is refused.
ADJUSTABLE = REPLANNED_SETTINGS | FIELDS.keys()
SAMPLE_LABEL = "sample of every document"  # the saved key of a hash of sampled tokens of each document


class TableSource(Source):
    """A table as the training set.

    Attributes:
        reader: reads the tokens of rows; only with packing.
        documents: the documents of all rows; only with packing.
        planner: plans the packs; None before training, and with a loader that the user made.
        settings: the result of `settings_of`, which checkpoints save; {} before the loader is made.
    """

    kind = "table"

    reader: RowReader
    documents: Documents

    def __init__(self, trainer: TrainerView, data: BatchMaker):
        super().__init__(trainer, data)
        self.planner: EpochPlanner | None = None
        self.settings: dict[str, Any] = {}
        # The state of the checkpoint whose plan is continued; None for a fresh run, and with `ignore_data_skip`
        self._resumed_state: dict[str, Any] | None = None
        # The changed settings because of which the remaining documents are planned anew; {} if they are not
        self._replanned_for: ChangedSettings = {}

    def read(self, dataset: Dataset) -> None:
        """Read the weights and sources of the rows and, with packing, cut the rows into documents."""
        args = self.args
        # TRL has prepared the table, so its rows may be shuffled, and fewer than the rows that the user gave
        self.row_values = read_row_values(dataset, args.weight_column, args.source_column, name="train")
        if not args.packing:
            return
        self.reader = self._data.reading.make_reader(dataset, "train")
        # With `per_turn`, conversations are split into their turns. Where rows have images, the reader splits them:
        # `conversations` has the row of the conversation of each turn, whose weight and source the turn gets, and
        # `turns` has the counts. Otherwise both are None, and all values are kept
        self.row_values = self.row_values.select(self.reader.conversations)
        # Rows without images were split before they were tokenised, and `turn_counts` has the counts. The report reads
        # the counts of both kinds of rows from the reader
        self._data.turn_counts = self.reader.turns or self._data.turn_counts
        self.reader.turns = self._data.turn_counts
        with status_shown(args, f"Cutting {len(self.reader):,} rows into documents"):
            self.documents = documents_of(self.reader, args)
        check_same_documents(self.documents, "The training set", args.world_size)

    # Packs

    @property
    def packing(self) -> Packing | None:
        """The settings by which packs are planned; None before training starts, and without packing."""
        return None if self.planner is None else self.planner.packing

    @property
    def cache_folder(self) -> Path | None:
        """The folder with the cached documents; None if they are not cached, and without packing."""
        file = self.documents.file if self.args.packing else None
        return None if file is None else file.parent

    def make_planner(self) -> EpochPlanner:
        """Return a planner of the packs of this run."""
        return make_planner(self.args, self.documents, **self._data.packing_arguments)

    def packed_loader(self) -> tuple[DataLoader[Any], PackingReport]:
        """Plan the packs of the first epoch; return the loader of packs, and the report of this epoch."""
        with status_shown(self.args, f"Planning packs of {len(self.documents):,} documents") as show_status:
            planner = self.planner = self.make_planner()
            self.longest_document = int(self.documents.lengths.max(initial=0))
            show_status(f"Planned packs of {len(self.documents):,} documents; making the report")
            # The report of many documents takes as much memory as their plan, so only one rank makes it
            reports: list[Any] = [None]
            if self.args.process_index == 0:
                # No token predicts the first label of a row. If TRL counts it, its divisor of the loss is too large,
                # and the report says by how much
                reports[0] = make_report(
                    planner, self.reader, trl_counts_first_labels=self._data.trl_counts_first_labels
                )
            max_steps = self.args.max_steps if self.args.max_steps > 0 else None
            report = replace(broadcast_object_list(reports)[0], max_steps=max_steps)
        sampler = PackedBatchSampler(planner, self._data.ranks.rank)
        collate = self._data.training_collator(self._data.value_columns)
        return self._data.make_loader(self._document_dataset(), sampler, collate), report

    def _document_dataset(self) -> DocumentDataset:
        """Return the dataset from which the loader takes the documents of packs."""
        pad_token_id = self._trainer._tokenizer.pad_token_id
        return DocumentDataset(self.reader, self.documents, pad_token_id, values=self.row_values)

    def first_schedule(self) -> tuple[Schedule | None, np.ndarray | None]:
        """Return the schedule of the first epoch of this run, and the trained tokens of each document, (N,)."""
        if self.planner is None:
            return None, None
        first_epoch = self.planner.resume_point.epoch  # the epoch in which the run starts or resumes
        return self.planner.schedule(first_epoch), self.documents.trained

    def first_documents(self, num_documents: int) -> tuple[list[dict[str, Any]], Group]:
        """Return documents of the first step of the plan on this rank, and the ranks that share a pack of them."""
        if self.planner is None:
            return super().first_documents(num_documents)
        # The sampler yields the packs of this rank: lists of indices of documents, with the group that shares the pack
        point = self.planner.resume_point
        sampler = PackedBatchSampler(self.planner, self._data.ranks.rank, epoch=point.epoch)
        # The steps that were trained under an earlier plan are empty
        accumulation = self.args.gradient_accumulation_steps
        first = point.num_steps * accumulation
        packs = list(islice(sampler, first, first + accumulation))
        # Groups of one step may have different sizes. The documents are taken from the packs of the largest group
        group = max((pack.group for pack in packs), key=attrgetter("size"))
        packs_of_group = [pack for pack in packs if pack.group == group]
        # `NO_DOCUMENTS` stands in an empty pack in place of an index
        indices = [index for pack in packs_of_group for index in pack if index != NO_DOCUMENTS]
        return self._document_dataset().__getitems__(indices[:num_documents]), group

    # Restarts

    def restore_plan(self, resumed: tuple[str, dict[str, Any]] | None) -> None:
        """Continue the plan of a checkpoint, given as its folder and state; None for a fresh run."""
        if self.planner is None:
            return
        self.settings = settings_of(self.planner, self.reader)
        self._resumed_state = None
        self._replanned_for = {}
        if resumed is not None:
            checkpoint, state = resumed
            self._replanned_for = continue_planner(checkpoint, state, self.settings, planner=self.planner)
            self._resumed_state = state

    @property
    def _planner_if_uneven(self) -> EpochPlanner | None:
        """The planner, if an epoch has another number of steps than the others; else None."""
        return None if self.planner is None or self.planner.has_equal_epochs else self.planner

    def correct_training_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result of transformers' `set_initial_training_values`, corrected for a plan of uneven epochs."""
        planner = self._planner_if_uneven
        if planner is None:
            return values
        # The number of epochs is the first value, and the number of steps the last. There are two cases: `max_steps`
        # fixes the steps, and the epochs follow; or the epochs fix the steps
        epochs, *values_between, max_steps = values
        if self.args.max_steps > 0:
            # The epoch, from 0, of the last step of the run: `position(n)` returns the epoch of the step after n steps
            last_epoch, _ = planner.position(max_steps - 1)
            return last_epoch + 1, *values_between, max_steps
        num_steps = planner.total_steps(self.args.num_train_epochs)
        return epochs, *values_between, num_steps

    def resume_position(self, values: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch in which a run begins or resumes, and how many of its micro-batches were trained."""
        planner = self.planner
        if planner is None:
            return values
        step = self._trainer.state.global_step
        if self._resumed_state is None:
            if step:  # `ignore_data_skip`: the documents of this epoch are begun anew
                epoch, _ = values
                num_repeated = step - epoch * planner.num_steps
                planner.resume_at(ResumePoint(epoch, first_step=step, num_repeated=num_repeated))
            return values
        total = self._trainer.state.max_steps
        before = self._resumed_state.get("max_steps")
        epoch, num_trained_steps = planner.position(step)  # the epoch of the next step, and its steps before this one
        if self._replanned_for and self._trainer.is_world_process_zero():
            num_remaining = len(planner.documents) - int(planner.trained_documents(epoch, num_trained_steps).sum())
            num_remaining_steps = planner.steps_of(epoch) - num_trained_steps
            logger.warning(
                f"Resuming with {describe_changes(self._replanned_for)}: the {num_remaining:,} documents that epoch "
                f"{epoch + 1} has not trained are planned anew, in {num_remaining_steps:,} optimizer steps. "
                f"In all, {max(total - step, 0):,} of {total:,} steps remain (the run was planned with {before:,}), "
                f"and the learning-rate schedule is the one for {total:,} steps. Random numbers (dropout) differ."
            )
        return epoch, num_trained_steps * self.args.gradient_accumulation_steps

    def num_steps_of_epoch(self, epoch: int) -> int | None:
        """Return the number of optimizer steps of an epoch; None if all epochs have the same number."""
        planner = self._planner_if_uneven
        return None if planner is None else planner.steps_of(epoch)

    def save_position(self, folder: Path) -> dict[str, Any] | None:
        """Write which documents are trained into a checkpoint, and return the entries for its state."""
        if self.planner is None:
            return None
        state = {"max_steps": self._trainer.state.max_steps, "settings": self.settings}
        if self.args.should_save:  # only the rank that writes, because all documents of the epoch are sorted and hashed
            epoch_state, trained_masks = epoch_progress(self.planner, self._trainer.state.global_step)
            state |= epoch_state
            checkpoints.save_trained(folder, *trained_masks)
        return state


# What is saved


def step_hash(planner: EpochPlanner, epoch: int) -> str:
    """Return a hash that is equal for two plans of an epoch if each optimizer step has the same documents in both.

    The hash does not depend on the ranks and micro-batches that have these documents within a step.
    """
    schedule = planner.schedule(epoch)
    digest = hashlib.sha256()
    for step in range(schedule.num_steps):
        documents = np.sort(schedule.step_documents(step))
        digest.update(np.array([len(documents), *documents], dtype="<i8").data)
    return digest.hexdigest()


def epoch_progress(planner: EpochPlanner, step: int) -> tuple[dict[str, Any], tuple[TrainedMask, TrainedMask | None]]:
    """Describe how far the running epoch is trained after `step` optimizer steps of the run.

    Returns:
        Entries for the state of a checkpoint, and two masks for `checkpoints.save_trained`. The first mask marks the
        documents of the epoch that are trained now. The second marks the documents that were trained before the
        running plan was made; it is None if this plan has the whole epoch.
    """
    # `position` returns the epoch of the next step. One step is taken off, so that at the end of an epoch this epoch is
    # saved, and not the next one.
    epoch, num_steps_before_last = planner.position(step - 1)
    num_trained_steps = num_steps_before_last + 1
    is_resumed_epoch = epoch == planner.resume_point.epoch
    trained_before = planner.resume_point.trained if is_resumed_epoch else None
    state = {
        "epoch": epoch,
        "first_step": step - num_trained_steps,  # optimizer steps of the run before this epoch
        "repeated_steps": planner.resume_point.num_repeated,
        # The number of steps of the epoch that were trained before the running plan was made
        "planned_at": planner.resume_point.num_steps if is_resumed_epoch else 0,
        "steps_left": planner.steps_of(epoch) - num_trained_steps,
        "step_hash": step_hash(planner, epoch),
    }
    return state, (planner.trained_documents(epoch, num_trained_steps), trained_before)


def settings_of(planner: EpochPlanner, reader: RowReader) -> dict[str, Any]:
    """Return the settings and hashes that decide which documents are in which optimizer step.

    The key of a setting is its name in the config. Other keys are words for messages.
    """
    documents = planner.documents
    # The fingerprint (`data/cache.py`) is two hashes joined by "-". The second is of sampled tokens of each document
    fingerprint, _, sample = documents.fingerprint.partition("-")
    return {
        "rows of the dataset": len(reader),
        "documents": len(documents),
        "tokens": int(documents.lengths.sum()),
        "fingerprint of the documents": fingerprint,
        SAMPLE_LABEL: sample,
        **planner.packing.settings("table"),  # the settings of planning that matter for a table
    }


# What is compared


def continue_planner(
    checkpoint: str, state: dict[str, Any], settings: dict[str, Any], *, planner: EpochPlanner
) -> ChangedSettings:
    """Set the planner to continue the run that saved `state`, with the same batches or with a new plan.

    Args:
        checkpoint: the folder of the checkpoint, for messages.
        state: the state that the checkpoint has.
        settings: the settings of this run, as `settings_of` returns them.
        planner: the planner of this run.

    Returns:
        The changed settings because of which the remaining documents of the epoch are planned anew; {} if the batches
        are the same.

    Raises:
        ValueError: documents of the epoch would be repeated or omitted.
    """
    # Entries that a checkpoint of an earlier version does not have get a default: here the hash of sampled tokens, and
    # below the masks, "first_step", "planned_at" and "repeated_steps"
    before = dict(state["settings"])
    if SAMPLE_LABEL in settings:
        before.setdefault(SAMPLE_LABEL, settings[SAMPLE_LABEL])
    changed = compare_settings(before, settings)
    fixed = {name: values for name, values in changed.items() if name not in ADJUSTABLE}
    epoch = state["epoch"]
    # The masks of `epoch_progress`, which `checkpoints.read_state` has read from `TRAINED_FILE`
    trained, trained_before = state.get("trained", (None, None))

    # First, try the plan of the checkpoint. If it has the same documents in every step, the run continues with it.
    if not fixed:
        first_step = state.get("first_step", epoch * planner.num_steps)
        num_earlier = state.get("planned_at", 0)
        point = ResumePoint(epoch, first_step, num_earlier, trained_before, state.get("repeated_steps", 0))
        # The hash is taken of the plan that this makes. If it differs, another plan or an error follows below
        planner.resume_at(point)
        if step_hash(planner, epoch) == state["step_hash"]:
            if changed:
                logger.warning(
                    f"Resuming with {describe_changes(changed)}. Every optimizer step has the same documents as "
                    "before; random numbers (dropout) and rounding differ."
                )
            return {}
        # Second, plan the remaining documents anew, if it is known which documents are trained. A change from or to
        # `share_prefixes="family"` is refused, because it changes which documents are planned together (`regroups`).
        if trained is not None and changed.keys() & REPLANNED_SETTINGS and not regroups(changed):
            step = state["global_step"]
            epoch_is_complete = not state["steps_left"]
            if epoch_is_complete:
                point = replace(point, epoch=epoch + 1, first_step=step, num_steps=0, trained=None)
            else:
                point = replace(point, num_steps=step - first_step, trained=trained)
            planner.resume_at(point)
            return changed

    # Third, refuse the checkpoint, and say what to set
    if fixed or regroups(changed):
        remedy = "Set them back"
    elif changed.keys() - FIELDS.keys():  # ranks, accumulation or batch size, and the masks are missing
        micro_batches_per_step = before["gradient_accumulation_steps"] * before["world_size"]
        remedy = (
            f"The checkpoint has no `{checkpoints.TRAINED_FILE}`, from which the rest could be planned anew. "
            f"Set `per_device_train_batch_size={before['per_device_train_batch_size']}` and "
            "`gradient_accumulation_steps` so that its product with the number of ranks is "
            f"{micro_batches_per_step} again"
        )
    else:
        # The hashes differ, though no setting changed that decides the steps: at most a field of a feature, between
        # values with which documents are planned one by one (`share_prefixes`: "off" and "pack"). So another version
        # of this package has planned the steps, and the message names the versions
        changed = {"trl_packfix": (state["trl_packfix"], __version__)}
        remedy = "Install the version that began the run"
    raise ValueError(
        f"`resume_from_checkpoint={checkpoint!r}` was given, which was saved with other settings: "
        f"{describe_changes(changed)}. After step {state['global_step']} documents of the epoch would be repeated and "
        f"others left out. {remedy}, or set `ignore_data_skip=True` to start the epoch's documents anew on purpose."
    )
