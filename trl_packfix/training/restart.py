"""Save in each checkpoint which documents were trained, and resume a run exactly, or refuse to resume it.

Every document of the epoch is trained once, either before the checkpoint or by the resumed run. The trainer
(`trainer.py`) constructs one `Restart`, which acts at three times:

    1. `begin_checkpoint` and `end_checkpoint` write the state into a checkpoint (`checkpoints.py` has its files).
    2. `choose_checkpoint` chooses the checkpoint from which a run resumes, and reads its state.
    3. `check_training_set` compares the state with this run before its first step.

The position among the documents is saved and continued by the training set itself, a table (`table_source.py`) or a
stream (`stream_source.py`).

Words: a *document* is one training example; the *engine* is DeepSpeed, FSDP or none. A *table* is a `datasets.Dataset`,
a *stream* an `IterableDataset`. The *state* of a checkpoint is the dictionary in its file `packing_state.json`; a run
without packing writes none.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from ..planning.packing import compare_settings, describe_changes
from ..version import __version__
from . import checkpoints
from .checkpoints import STATE_FILE, STATE_VERSION, read_state
from .loading import TrainingData, source_class
from .trainer_view import TrainerPart, TrainerView

logger = logging.getLogger(__name__)

WEIGHTS_LABEL = "weights of the rows"  # the saved key of a hash of the weights


class Restart(TrainerPart):
    """The state that a trainer saves for a restart. A resumed run continues exactly, or is refused.

    Attributes:
        resumed: the checkpoint from which this training resumes, and its state; None for a new run.
        weights_folder: the checkpoint whose weights the trainer has read last. The trainer sets it, and reads it if the
            weights have other names than the parameters of the model.
    """

    resumed: tuple[str, dict[str, Any]] | None = None
    weights_folder: str | None

    def __init__(self, trainer: TrainerView, data: TrainingData):
        super().__init__(trainer)
        self._data = data
        # The files that an earlier run wrote in the folder of the unfinished checkpoint, as `note_times` returns them:
        # the time of the last change of each, by name. If a file still has this time, this run has not written it
        self._earlier_files: dict[str, int] = {}

    def choose_checkpoint(self, requested: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from, and set `resumed` to its folder and state.

        Args:
            requested: `resume_from_checkpoint` of the user, see `checkpoints.choose_checkpoint`.

        Returns:
            The folder of the checkpoint. For a new run None, or `requested` if it is None, False or "".
        """
        self.resumed = None
        if not requested:
            return requested
        # The main process chooses and sends: the checkpoint, its state, a warning, and an error, which all ranks raise
        outcome: list[Any] = [None, None, None, None]
        if self._trainer.is_world_process_zero():
            try:
                checkpoint, warning = checkpoints.choose_checkpoint(requested, str(self.args.output_dir))
                outcome = [checkpoint, checkpoint and read_state(Path(checkpoint)), warning, None]
            except (ValueError, OSError) as error:
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
        """Refuse a checkpoint that another version, another kind of run, or another engine has saved."""
        if state is not None and state["version"] != STATE_VERSION:
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given, whose `{STATE_FILE}` has version "
                f"{state['version']}. trl_packfix {__version__} reads version {STATE_VERSION}. "
                f"Install trl_packfix {state['trl_packfix']}."
            )
        # A checkpoint and a run are of the same kind if both pack a table, both pack a stream, or both do not pack
        kind = source_class(self._trainer.train_dataset).kind if self.args.packing else None
        saved_kind = None
        if state is not None:
            saved_kind = "table" if "step_hash" in state else "stream"  # only a table is planned ahead, step by step
        if saved_kind != kind and not self.args.ignore_data_skip:
            now = f"with packing a {kind}" if kind else "without packing"
            before = "without packing, by another trainer or with `save_only_model=True`"
            if saved_kind is not None:
                before = f"with packing a {saved_kind}"
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
        """Refuse a checkpoint of DeepSpeed that another number of ranks saved, unless DeepSpeed can load it."""
        now = self.args.world_size
        # Earlier versions saved the number of ranks among the settings of a table only
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
        weights = self._data.source.row_values.weights
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
        """Refuse a checkpoint of a run that minimised another loss."""
        settings = self._loss_settings()
        # An entry that the checkpoint of an earlier version does not have counts as equal
        before = settings | state
        changed = compare_settings(before, settings)  # only the entries of `settings`; `state` has others, too
        if changed:
            names = [f"`{name}={saved!r}`" for name, (saved, _) in changed.items() if name != WEIGHTS_LABEL]
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
        if self._trainer.is_deepspeed_enabled:
            return "deepspeed"
        return "fsdp" if self._trainer.is_fsdp_enabled else "none"

    def check_training_set(self) -> None:
        """Let the training set continue the plan of the checkpoint, or begin one. Refuse other batches or losses."""
        if self.resumed is not None:
            self._check_shards(*self.resumed)
        self._data.source.restore_plan(None if self.args.ignore_data_skip else self.resumed)
        if self.resumed is not None:
            self._check_same_loss(*self.resumed)

    def begin_checkpoint(self, trial: object) -> None:
        """Mark the folder of the checkpoint of this step as unfinished. All ranks must call it.

        Args:
            trial: the trial of a search of hyperparameters, which has a folder of its own; else None.
        """
        if not self.args.packing:
            return
        if self.args.should_save:
            run_folder = Path(self._trainer._get_output_dir(trial))
            checkpoint = run_folder / f"checkpoint-{self._trainer.state.global_step}"
            # Removes the two files without which the checkpoint is unfinished, and lists the other files
            self._earlier_files = checkpoints.note_times(checkpoint)
        self._trainer.accelerator.wait_for_everyone()  # no rank writes before the files of an earlier run are listed

    def end_checkpoint(self, folder: str) -> None:
        """Write the state of a restart into the checkpoint. All ranks must call it after their other files."""
        state = {
            "global_step": self._trainer.state.global_step,
            "num_tokens": self._trainer._total_train_tokens,
            "engine": self._engine,
            "world_size": self.args.world_size,
            **self._loss_settings(),
        }
        position = self._data.source.save_position(Path(folder))
        if position is None:
            return  # the run does not pack, or the user made the loader
        state |= position
        # Wait until every rank has written its last files. After the state, transformers writes `trainer_state.json`,
        # and then deletes older checkpoints. So there is a whole checkpoint at every moment.
        self._trainer.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.save_state(Path(folder), state, self._earlier_files)
