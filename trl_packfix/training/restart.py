"""Save in each checkpoint which documents were trained, and resume a run exactly, or refuse to resume it.

A resumed run trains every document of its epoch once, also those that were trained before the checkpoint. The trainer
(`trainer.py`) constructs one `Restart`, which acts at three times:

    1. `begin_checkpoint` and `end_checkpoint` write the state into a checkpoint (`checkpoints.py` has its files).
    2. `choose` chooses the checkpoint from which a run resumes, and reads its state.
    3. `check_training_set`, for a table, compares the state with this run before its first step, and sets the planner
       (`data/epochs.py`) to the position of the checkpoint. `resume_stream` does this for a stream (`data/stream.py`).

The state of a table has the settings, a hash of all documents, and a hash of the documents of each optimizer step. If
the hashes are equal, the run continues with the same batches. If they differ only because ranks, accumulation or batch
size changed, the documents that remain of the epoch are planned anew. Everything else is refused. The state of a stream
has the position of each rank in reading and packing.

Words: a *document* is one training example; a *plan* says which documents are in which optimizer step; the *engine* is
DeepSpeed, FSDP or none. A *table* is a `datasets.Dataset`, a *stream* an `IterableDataset`.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset

from ..data.epochs import EpochPlanner, ResumePoint
from ..data.reader import RowReader
from ..data.stream import PackedStream
from ..planning.packing import REPLANNED_SETTINGS, ChangedSettings, compare_settings, describe_changes
from ..version import __version__
from . import checkpoints
from .checkpoints import STATE_FILE, STATE_VERSION, TrainedMask, choose_checkpoint, read_state
from .loading import TrainingData
from .trainer_view import TrainerPart, TrainerView

logger = logging.getLogger(__name__)

# Optimizer steps may have the same documents though these settings changed. The hash of the steps decides.
ADJUSTABLE = REPLANNED_SETTINGS | {"share_prefixes"}
WEIGHTS_LABEL = "weights of the rows"
SAMPLE_LABEL = "sample of every document"


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
    epoch, done = planner.position(step - 1)  # an epoch that is complete is still the running one
    done += 1
    is_start = epoch == planner.start.epoch
    state = {
        "epoch": epoch,
        "first_step": step - done,
        "planned_at": planner.start.num_steps if is_start else 0,
        "steps_left": planner.steps_of(epoch) - done,
        "step_hash": step_hash(planner, epoch),
    }
    return state, (planner.trained_documents(epoch, done), planner.start.trained if is_start else None)


def settings_of(planner: EpochPlanner, reader: RowReader) -> dict[str, Any]:
    """Return the settings and hashes that decide which documents are in which optimizer step.

    The keys are the names under which a user sets them.
    """
    documents = planner.documents
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
    trained, trained_before = state.get("trained", (None, None))
    if not fixed:
        first_step = state.get("first_step", epoch * planner.num_steps)
        planner.resume_at(ResumePoint(epoch, first_step, state.get("planned_at", 0), trained_before))
        if step_hash(planner, epoch) == state["step_hash"]:
            if changed:
                logger.warning(
                    f"Resuming with {describe_changes(changed)}. Every optimizer step has the same documents as "
                    "before; random numbers (dropout) and rounding differ."
                )
            return {}
        if (
            trained is not None
            and changed.keys() & REPLANNED_SETTINGS
            and "family" not in changed.get("share_prefixes", ())
        ):
            step = state["global_step"]
            is_whole = not state["steps_left"]
            planner.resume_at(
                ResumePoint(epoch + 1, step) if is_whole else ResumePoint(epoch, first_step, step - first_step, trained)
            )
            return changed
    if fixed or "family" in changed.get("share_prefixes", ()):
        remedy = "Set them back"
    elif changed.keys() - {"share_prefixes"}:  # "off" and "pack" plan the same steps
        slots = before["gradient_accumulation_steps"] * before["world_size"]
        remedy = (
            f"The checkpoint has no `{checkpoints.TRAINED_FILE}`, from which the rest could be planned anew. "
            f"Set `per_device_train_batch_size={before['per_device_train_batch_size']}` and "
            f"`gradient_accumulation_steps` so that its product with the number of ranks is {slots} again"
        )
    else:
        changed = {"trl_packfix": (state["trl_packfix"], __version__)}
        remedy = "Install the version that began the run"
    raise ValueError(
        f"`resume_from_checkpoint={checkpoint!r}` was given, which was saved with other settings: "
        f"{describe_changes(changed)}. After step {state['global_step']} documents of the epoch would be repeated and "
        f"others left out. {remedy}, or set `ignore_data_skip=True` to start the epoch's documents anew on purpose."
    )


class Restart(TrainerPart):
    """The state that a trainer saves for a restart. A resumed run continues exactly, or is refused."""

    resumed: tuple[str, dict[str, Any]] | None = None  # the checkpoint from which this training resumes, and its state
    settings: dict[str, Any]  # the settings that decide which documents are in which batch, see `settings_of`
    replanned_for: ChangedSettings  # see `continue_planner`
    read_from: str | None  # the checkpoint whose weights were read last

    def __init__(self, trainer: TrainerView, data: TrainingData):
        super().__init__(trainer)
        self._data = data

    def choose(self, requested: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from, and set `resumed` to its state.

        The main process chooses for all ranks. The result is None for a new run.
        """
        self.resumed = None
        if not requested:
            return requested
        outcome: list[Any] = [None, None, None, None]
        if self._trainer.is_world_process_zero():
            try:
                checkpoint, warning = choose_checkpoint(requested, str(self.args.output_dir))
                outcome = [checkpoint, checkpoint and read_state(Path(checkpoint)), warning, None]
            except (ValueError, OSError) as error:  # raised on all ranks, which wait for the broadcast
                outcome[3] = str(error)
        checkpoint, state, warning, problem = broadcast_object_list(outcome)
        if problem is not None:
            raise ValueError(problem)
        if warning is not None:
            logger.warning(warning)
        if checkpoint is None:
            return None
        self._check_origin(checkpoint, state)
        if state is not None:
            self.resumed = checkpoint, state
            self._trainer._total_train_tokens = state["num_tokens"]
        return checkpoint

    def _check_origin(self, checkpoint: str, state: dict[str, Any] | None) -> None:
        if state is not None and state["version"] != STATE_VERSION:
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given, whose `{STATE_FILE}` has version "
                f"{state['version']}. trl_packfix {__version__} reads version {STATE_VERSION}. "
                f"Install trl_packfix {state['trl_packfix']}."
            )
        table_or_stream = "stream" if isinstance(self._trainer.train_dataset, IterableDataset) else "table"
        now = f"with packing a {table_or_stream}" if self.args.packing else "without packing"
        before = "without packing, by another trainer or with `save_only_model=True`"
        if state is not None:
            before = f"with packing a {'table' if 'step_hash' in state else 'stream'}"
        if not before.startswith(now) and not self.args.ignore_data_skip:
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given {now}, and it was saved {before}. So it is "
                f"unknown which documents of its epoch remain. Set `packing={state is not None}` and give the same "
                "dataset to continue that run, or set `ignore_data_skip=True` to start the epoch's documents anew on "
                "purpose."
            )
        if state is not None and state["engine"] != self._engine:
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given, whose `engine` was {state['engine']!r} and is "
                f"{self._engine!r}. An engine does not read the optimizer state of another, and raises no error. "
                "Launch the run as before, or pass the checkpoint as `model` to start a new run with its weights."
            )

    def _check_shards(self, checkpoint: str, state: dict[str, Any]) -> None:
        now = self.args.world_size
        before = state.get("world_size", state.get("settings", {}).get("world_size", now))
        if state["engine"] != "deepspeed" or before == now:
            return
        config = self._trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        is_universal = (Path(checkpoint) / "latest_universal").is_file()
        if is_universal and config.get("checkpoint", {}).get("load_universal"):
            return
        folder = f"{checkpoint}/global_step{state['global_step']}"
        remedy = "Set"
        if not is_universal:
            convert = "python -m deepspeed.checkpoint.ds_to_universal"
            remedy = f"Run `{convert} --input_folder {folder} --output_folder {folder}_universal "
            remedy += "--inject_missing_state`, set"
        raise ValueError(
            f"`resume_from_checkpoint={checkpoint!r}` was given on {now} ranks, and `world_size` was {before}. "
            "DeepSpeed saves one shard per rank, and another number of ranks reads only a universal checkpoint. "
            f'{remedy} `"checkpoint": {{"load_universal": true}}` in the DeepSpeed config, or launch {before} ranks.'
        )

    def _loss_settings(self) -> dict[str, Any]:
        """Return the settings that decide which loss is minimised, with a hash of the rows' weights for a table."""
        args = self.args
        weights = self._data.row_values.weights
        is_dft = args.loss_type == "dft"
        return {
            "document_weighting": args.document_weighting,
            "weight_column": args.weight_column,
            WEIGHTS_LABEL: None if weights is None else hashlib.sha256(weights.astype("<f4").data).hexdigest(),
            "loss_type": "dft" if is_dft else "nll",  # "chunked_nll" is the same loss in less memory
            "label_smoothing_factor": 0.0 if is_dft else args.label_smoothing_factor,
            "router_aux_loss_coef": self._trainer.router_aux_loss_coef if self._trainer.aux_loss_enabled else 0.0,
        }

    def _check_same_loss(self, checkpoint: str, state: dict[str, Any]) -> None:
        settings = self._loss_settings()
        changed = compare_settings(
            settings | state, settings
        )  # checkpoints of earlier versions do not have all entries
        if changed:
            names = [f"`{name}={before!r}`" for name, (before, _) in changed.items() if name != WEIGHTS_LABEL]
            remedy = f"Set {', '.join(names)}" if names else "Give the rows the weights that they had"
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given, which was saved with another loss: "
                f"{describe_changes(changed)}. From step {state['global_step']} on, the new loss would be minimised "
                f"with the optimizer state and the schedule of the old one. {remedy}, or pass the checkpoint as "
                "`model` to start a new run with its weights."
            )

    @property
    def _engine(self) -> str:
        """The engine whose files a checkpoint holds: "deepspeed", "fsdp" or "none"."""
        return (
            "deepspeed" if self._trainer.is_deepspeed_enabled else "fsdp" if self._trainer.is_fsdp_enabled else "none"
        )

    def check_training_set(self) -> None:
        """Refuse a checkpoint if this run has other batches in its epoch, or another loss."""
        planner = self._data.planner
        if self.resumed is not None:
            self._check_shards(*self.resumed)
        if planner is not None:
            self.settings = settings_of(planner, self._data.reader)
            self.replanned_for = {}
            if self.resumed is not None and not self.args.ignore_data_skip:
                self.replanned_for = continue_planner(*self.resumed, self.settings, planner=planner)
        if self.resumed is not None:
            self._check_same_loss(*self.resumed)

    # The numbers of steps, if epochs have different numbers of steps

    @property
    def _uneven(self) -> EpochPlanner | None:
        """The planner, if a part of an epoch was trained under another plan."""
        planner = self._data.planner
        return None if planner is None or planner.is_even else planner

    def training_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of `Trainer.set_initial_training_values`, with the epochs and steps of this run."""
        planner = self._uneven
        if planner is None:
            return values
        epochs, *values_between, max_steps = values
        if self.args.max_steps > 0:
            return planner.position(max_steps - 1)[0] + 1, *values_between, max_steps
        return epochs, *values_between, planner.total_steps(self.args.num_train_epochs)

    def position(self, values: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch in which a run on a table resumes, and how many of its micro-batches were trained.

        Where no plan is resumed, return `values`, which transformers has computed.
        """
        planner = self._data.planner
        if planner is None or self.resumed is None or self.args.ignore_data_skip:
            return values
        step = self._trainer.state.global_step
        total = self._trainer.state.max_steps
        before = self.resumed[1].get("max_steps")
        epoch, done = planner.position(step)
        if self.replanned_for and self._trainer.is_world_process_zero():
            num_remaining = len(planner.documents) - int(planner.trained_documents(epoch, done).sum())
            logger.warning(
                f"Resuming with {describe_changes(self.replanned_for)}: the {num_remaining:,} documents that epoch "
                f"{epoch + 1} has not trained are planned anew, in {planner.steps_of(epoch) - done:,} optimizer steps. "
                f"In all, {max(total - step, 0):,} of {total:,} steps remain (the run was planned with {before:,}), "
                f"and the learning-rate schedule is the one for {total:,} steps. Random numbers (dropout) differ."
            )
        return epoch, done * self.args.gradient_accumulation_steps

    def steps_of(self, epoch: int) -> int | None:
        """Return the number of optimizer steps of an epoch; None if all epochs have the same number."""
        return None if self._uneven is None else self._uneven.steps_of(epoch)

    # Streams

    def resume_stream(self, checkpoint: str | None, max_steps: int) -> None:
        """Let a stream continue from the state saved in `checkpoint`."""
        stream = self._data.stream
        if checkpoint is not None and stream is not None:
            step = self._trainer.state.global_step
            num_skipped = step % max_steps * self.args.gradient_accumulation_steps
            resume_stream_at(
                stream, checkpoint, step, num_skipped=num_skipped, ignore_data_skip=self.args.ignore_data_skip
            )

    def begin_checkpoint(self, trial: object) -> None:
        """Mark the folder of the checkpoint of this step as unfinished. All ranks must call."""
        if not self.args.packing:
            return
        if self.args.should_save:
            run_dir = self._trainer._get_output_dir(trial)
            self._earlier_files = checkpoints.note_times(
                Path(run_dir) / f"checkpoint-{self._trainer.state.global_step}"
            )
        self._trainer.accelerator.wait_for_everyone()  # no rank writes before the files of an earlier run are listed

    def end_checkpoint(self, folder: str) -> None:
        """Write the state of a restart into the checkpoint. All ranks must call it after their other files."""
        step = self._trainer.state.global_step
        planner = self._data.planner
        stream = self._data.stream
        state = {
            "global_step": step,
            "num_tokens": self._trainer._total_train_tokens,
            "engine": self._engine,
            "world_size": self.args.world_size,
            **self._loss_settings(),
        }
        if stream is not None:
            if self._data.ranks.index == 0:
                saved = stream.state_dict(step)
                checkpoints.write_synced(stream_file(folder, stream.rank), partial(torch.save, saved))
        elif planner is not None:
            state |= {"max_steps": self._trainer.state.max_steps, "settings": self.settings}
            if self.args.should_save:  # one rank writes it, and it sorts and hashes all documents of the epoch
                epoch_state, trained = epoch_progress(planner, step)
                state |= epoch_state
                checkpoints.save_trained(Path(folder), *trained)
        else:
            return  # the run does not pack, or the user made the loader
        # Every rank has written its last files. Then the Trainer writes `trainer_state.json`, and after that it deletes
        # older checkpoints. So one checkpoint is whole at every moment.
        self._trainer.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.save_state(Path(folder), state, self._earlier_files)


def stream_file(checkpoint: str | Path, rank: int) -> Path:
    """Return the file of a checkpoint that has the position of a rank in a stream."""
    return Path(checkpoint) / f"packed_stream_{rank}.pt"


def resume_stream_at(
    stream: PackedStream, checkpoint: str, num_steps: int, *, num_skipped: int, ignore_data_skip: bool
) -> None:
    """Set the stream to its state after `num_steps` steps. The Trainer then discards `num_skipped` batches."""
    if ignore_data_skip:
        stream.begin(num_steps)
        return
    state = (
        _read_saved_stream(checkpoint, stream.rank, stream) if stream_file(checkpoint, stream.rank).is_file() else None
    )
    if state is None or not stream.can_continue(state):
        first = _read_saved_stream(checkpoint, 0, stream)
        states = [_read_saved_stream(checkpoint, rank, stream) for rank in range(first["settings"]["world_size"])]
        state = stream.merge_states(states)
        if stream.rank == 0:
            waiting = sum(len(one["documents"]["lengths"]) for one in states[:: first["count"]])
            how = "every rank reads all of it" if state["count"] > stream.num_alike else "divided between the ranks"
            logger.warning(
                f"Resuming a stream of {len(states)} ranks on {stream.packing.world_size}: {waiting:,} documents that "
                f"wait for a pack, and the rest of pass {state['num_passes'] + 1}, are packed anew ({how}). Random "
                "numbers (dropout) differ."
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
