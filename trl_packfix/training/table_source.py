"""A table as the training set: its documents, the plan of their packs, and what a checkpoint says of the plan.

The rows are cut into documents when the trainer is constructed. When training starts, `EpochPlanner` plans the packs of
the first epoch, and the report is made.

A resumed run trains every document of the epoch once, or it is refused. To decide this, the state of a checkpoint holds
the settings, a hash of all documents, and a hash of the documents of every optimizer step. They are compared before the
first step. If only ranks, accumulation or batch size changed, the remaining documents of the epoch are planned anew.
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
from .checkpoints import TrainedMask
from .planner import documents_of, make_planner
from .progress import status_shown
from .same_data import check_same_documents
from .source import LoadingView, Source
from .trainer_view import TrainerView

logger = logging.getLogger(__name__)

# If only these settings changed, the values of `step_hash` are compared. If they are equal, the run resumes with the
# same batches. If not, the remaining documents are planned anew, or the run is refused.
ADJUSTABLE = REPLANNED_SETTINGS | FIELDS.keys()
SAMPLE_LABEL = "sample of every document"  # the saved key of a hash of sampled tokens of each document


class TableSource(Source):
    """A table. With packing it has a reader and documents; from when training starts, a planner.

    Attributes:
        planner: plans the packs; None before training, and with a loader that the user made.
        settings: what `settings_of` returns, to save and to compare in restarts; {} before the loader is made.
    """

    kind = "table"

    reader: RowReader
    documents: Documents

    def __init__(self, trainer: TrainerView, data: LoadingView):
        super().__init__(trainer, data)
        self.planner: EpochPlanner | None = None
        self.settings: dict[str, Any] = {}
        self._replanned_for: ChangedSettings = {}  # see `continue_planner`

    def read(self, dataset: Dataset) -> None:
        args = self.args
        # TRL has prepared the table, so its rows may be shuffled, and fewer than the rows that the user gave
        self.row_values = read_row_values(dataset, args.weight_column, args.source_column, name="train")
        if args.packing:
            self.reader = self._data.images.read(dataset, "train")
            self.row_values = self.row_values.select(self.reader.conversations)
            # Rows with images are cut into turns by their reader, which then has the counts. Text was cut before
            self._data.turn_counts = self.reader.turns or self._data.turn_counts
            with status_shown(args, f"Cutting {len(self.reader):,} rows into documents"):
                self.documents = documents_of(self.reader, args)
            check_same_documents(self.documents, "The training set", args.world_size)

    # Packs

    @property
    def packing(self) -> Packing | None:
        return None if self.planner is None else self.planner.packing

    @property
    def cache_folder(self) -> Path | None:
        file = self.documents.file if self.args.packing else None
        return None if file is None else file.parent

    def make_planner(self) -> EpochPlanner:
        """Return a planner of the packs of this run."""
        return make_planner(self.args, self.documents, **self._data.packing_arguments)

    def packed_loader(self) -> tuple[DataLoader[Any], PackingReport]:
        with status_shown(self.args, f"Planning packs of {len(self.documents):,} documents") as show:
            planner = self.planner = self.make_planner()
            show(f"Planned packs of {len(self.documents):,} documents; making the report")
            reports: list[Any] = [None]
            # The report of many documents takes as much memory as their plan, so only one rank makes it
            if self.args.process_index == 0:
                reports[0] = make_report(planner, self.reader, unpacked_counts_first=self._data.unpacked_counts_first)
            max_steps = self.args.max_steps if self.args.max_steps > 0 else None
            report = replace(broadcast_object_list(reports)[0], turns=self._data.turn_counts, max_steps=max_steps)
        sampler = PackedBatchSampler(planner, self._data.ranks.rank)
        collate = self._data.training_collator(self._data.value_columns)
        return self._data.make_loader(self._document_dataset(), sampler, collate), report

    def _document_dataset(self) -> DocumentDataset:
        """Return the dataset from which the loader takes the documents of packs."""
        pad_token_id = self._trainer._tokenizer.pad_token_id
        return DocumentDataset(self.reader, self.documents, pad_token_id, values=self.row_values)

    def first_schedule(self) -> tuple[Schedule | None, np.ndarray | None]:
        if self.planner is None:
            return None, None
        return self.planner.schedule(self.planner.start.epoch), self.documents.trained

    def first_documents(self, num_documents: int) -> tuple[list[dict[str, Any]], Group]:
        if self.planner is None:
            return super().first_documents(num_documents)
        sampler = PackedBatchSampler(self.planner, self._data.ranks.rank)
        packs = list(islice(sampler, self.args.gradient_accumulation_steps))
        # Packs of one step may be shared by different numbers of ranks; documents are taken from the most widely shared
        group = max((pack.group for pack in packs), key=attrgetter("size"))
        # In place of the number of a document, `NO_DOCUMENTS` stands for the dummy document of an empty pack
        numbers = [number for pack in packs if pack.group == group for number in pack if number != NO_DOCUMENTS]
        return self._document_dataset().__getitems__(numbers[:num_documents]), group

    # Restarts

    def restore_plan(self, resumed: tuple[str, dict[str, Any]] | None) -> None:
        if self.planner is None:
            return
        self.settings = settings_of(self.planner, self.reader)
        self._replanned_for = {}
        if resumed is not None:
            self._replanned_for = continue_planner(*resumed, self.settings, planner=self.planner)

    @property
    def _planner_if_uneven(self) -> EpochPlanner | None:
        """The planner, if epochs differ in steps, because one was trained in part under another plan; else None."""
        return None if self.planner is None or self.planner.is_even else self.planner

    def correct_training_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        planner = self._planner_if_uneven
        if planner is None:
            return values
        epochs, *values_between, max_steps = values
        if self.args.max_steps > 0:
            # After all steps but the last, the position is in the epoch that has the last step
            last_epoch, _ = planner.position(max_steps - 1)
            return last_epoch + 1, *values_between, max_steps
        return epochs, *values_between, planner.total_steps(self.args.num_train_epochs)

    def resume_position(self, values: tuple[int, int], state: dict[str, Any]) -> tuple[int, int]:
        planner = self.planner
        if planner is None:
            return values
        step = self._trainer.state.global_step
        total = self._trainer.state.max_steps
        before = state.get("max_steps")
        epoch, done = planner.position(step)
        if self._replanned_for and self._trainer.is_world_process_zero():
            num_remaining = len(planner.documents) - int(planner.trained_documents(epoch, done).sum())
            logger.warning(
                f"Resuming with {describe_changes(self._replanned_for)}: the {num_remaining:,} documents that epoch "
                f"{epoch + 1} has not trained are planned anew, in {planner.steps_of(epoch) - done:,} optimizer steps. "
                f"In all, {max(total - step, 0):,} of {total:,} steps remain (the run was planned with {before:,}), "
                f"and the learning-rate schedule is the one for {total:,} steps. Random numbers (dropout) differ."
            )
        return epoch, done * self.args.gradient_accumulation_steps

    def num_steps_of_epoch(self, epoch: int) -> int | None:
        planner = self._planner_if_uneven
        return None if planner is None else planner.steps_of(epoch)

    def resume_loader(self, checkpoint: str, num_skipped: int) -> None:
        """Do nothing: `restore_plan` has continued the plan, and the loader follows the plan."""

    def save_position(self, folder: Path) -> dict[str, Any] | None:
        if self.planner is None:
            return None
        state = {"max_steps": self._trainer.state.max_steps, "settings": self.settings}
        if self.args.should_save:  # one rank writes it, and it sorts and hashes all documents of the epoch
            epoch_state, trained = epoch_progress(self.planner, self._trainer.state.global_step)
            state |= epoch_state
            checkpoints.save_trained(folder, *trained)
        return state


# What is saved


def step_hash(planner: EpochPlanner, epoch: int) -> str:
    """Return a hash of the documents of every optimizer step of an epoch, whatever their rank and micro-batch."""
    schedule = planner.schedule(epoch)
    digest = hashlib.sha256()
    for step in range(schedule.num_steps):
        documents = np.sort(schedule.step_documents(step))
        digest.update(np.array([len(documents), *documents], dtype="<i8").data)
    return digest.hexdigest()


def epoch_progress(planner: EpochPlanner, step: int) -> tuple[dict[str, Any], tuple[TrainedMask, TrainedMask | None]]:
    """Return the state of the running epoch after `step` optimizer steps, and what `save_trained` writes.

    Returns:
        The state, and a pair for `checkpoints.save_trained`: the documents of the epoch that are trained now, and those
        that were trained before the epoch was planned (None if it was planned at its beginning).
    """
    # After all steps but the last, the position is in the epoch that has the last step. So at the end of an epoch this
    # epoch is saved, and not the next.
    epoch, last_step = planner.position(step - 1)
    done = last_step + 1
    is_resumed_epoch = epoch == planner.start.epoch
    state = {
        "epoch": epoch,
        "first_step": step - done,
        # Steps of the epoch that were trained under earlier plans, when the running plan was made
        "planned_at": planner.start.num_steps if is_resumed_epoch else 0,
        "steps_left": planner.steps_of(epoch) - done,
        "step_hash": step_hash(planner, epoch),
    }
    return state, (planner.trained_documents(epoch, done), planner.start.trained if is_resumed_epoch else None)


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
        **planner.packing.settings("table"),
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
    before = dict(state["settings"])
    if SAMPLE_LABEL in settings:  # a checkpoint of an earlier version does not have this entry
        before.setdefault(SAMPLE_LABEL, settings[SAMPLE_LABEL])
    changed = compare_settings(before, settings)
    fixed = {name: values for name, values in changed.items() if name not in ADJUSTABLE}
    epoch = state["epoch"]
    # `checkpoints.read_state` has added the entry "trained", from `TRAINED_FILE`
    trained, trained_before = state.get("trained", (None, None))
    if not fixed:
        first_step = state.get("first_step", epoch * planner.num_steps)
        num_earlier = state.get("planned_at", 0)
        planner.resume_at(ResumePoint(epoch, first_step=first_step, num_steps=num_earlier, trained=trained_before))
        if step_hash(planner, epoch) == state["step_hash"]:
            if changed:
                logger.warning(
                    f"Resuming with {describe_changes(changed)}. Every optimizer step has the same documents as "
                    "before; random numbers (dropout) and rounding differ."
                )
            return {}
        # A change from or to `share_prefixes="family"` changes the units that are planned, so it is refused
        if trained is not None and changed.keys() & REPLANNED_SETTINGS and not regroups(changed):
            step = state["global_step"]
            epoch_is_complete = not state["steps_left"]
            if epoch_is_complete:
                point = ResumePoint(epoch + 1, first_step=step)
            else:
                point = ResumePoint(epoch, first_step=first_step, num_steps=step - first_step, trained=trained)
            planner.resume_at(point)
            return changed
    if fixed or regroups(changed):
        remedy = "Set them back"
    elif changed.keys() - FIELDS.keys():  # values that do not regroup plan the same steps
        micro_batches_per_step = before["gradient_accumulation_steps"] * before["world_size"]
        remedy = (
            f"The checkpoint has no `{checkpoints.TRAINED_FILE}`, from which the rest could be planned anew. "
            f"Set `per_device_train_batch_size={before['per_device_train_batch_size']}` and "
            "`gradient_accumulation_steps` so that its product with the number of ranks is "
            f"{micro_batches_per_step} again"
        )
    else:  # all settings that decide the steps are equal, so another version of this package has planned them
        changed = {"trl_packfix": (state["trl_packfix"], __version__)}
        remedy = "Install the version that began the run"
    raise ValueError(
        f"`resume_from_checkpoint={checkpoint!r}` was given, which was saved with other settings: "
        f"{describe_changes(changed)}. After step {state['global_step']} documents of the epoch would be repeated and "
        f"others left out. {remedy}, or set `ignore_data_skip=True` to start the epoch's documents anew on purpose."
    )
