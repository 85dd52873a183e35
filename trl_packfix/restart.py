"""What a restart needs: a small versioned file in every checkpoint, and the checks that it allows.

`packing_state.json` holds the settings and a fingerprint of the documents, the documents of every optimizer step as one
hash, the tokens seen so far, and the size of every file of the checkpoint. It is written when all ranks have written
theirs, so a checkpoint without it, or with a file of another size, is unfinished. On resume the batches of the old and
of the new run are compared before the first step: a run continues exactly or not at all.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, sort_checkpoints

from . import __version__
from .config import SFTConfig
from .epochs import EpochPlanner
from .ledger import Documents
from .reader import TokenReader

logger = logging.getLogger(__name__)

VERSION = 1
FILE = "packing_state.json"
NUM_SAMPLED = 1000  # documents whose tokens enter the fingerprint

# The documents of an optimizer step may be the same for other values of these: that is looked up, not assumed.
ADJUSTABLE = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")


# What is saved


def fingerprint(reader: TokenReader, documents: Documents) -> str:
    """Hash of all spans, of the number of trained tokens in each, and of the tokens of 1000 evenly spaced documents."""
    digest = hashlib.sha256()

    def add(values: np.ndarray) -> None:
        digest.update(np.ascontiguousarray(values, dtype="<i8").data)

    for values in (documents.row, documents.start, documents.stop, documents.trained):
        add(values)
    for i in np.linspace(0, len(documents) - 1, min(len(documents), NUM_SAMPLED)).astype(int):
        span = reader.read(documents.row[i], documents.start[i], documents.stop[i])
        add(span["input_ids"])
        add(span["labels"])
    return digest.hexdigest()


def step_hash(planner: EpochPlanner, epoch: int) -> str:
    """Hash of the documents of every optimizer step of an epoch, whichever rank and micro-batch they are in."""
    schedule, digest = planner.schedule(epoch), hashlib.sha256()
    for step in range(schedule.num_steps):
        documents = np.sort(schedule.step_documents(step))
        digest.update(np.array([len(documents), *documents], dtype="<i8").data)
    return digest.hexdigest()


def settings_of(args: SFTConfig, planner: EpochPlanner, reader: TokenReader, engine: str) -> dict[str, Any]:
    """All that decides which documents are in which batch, by the names that a user knows, and whose files these are.

    `engine` is "deepspeed", "fsdp" or "none": one does not find the optimizer state of another and would say nothing.
    """
    documents = planner.documents
    return {
        "rows of the dataset": len(reader),
        "documents": len(documents),
        "tokens": int(documents.lengths.sum()),
        "fingerprint of the documents": fingerprint(reader, documents),
        "max_length": planner.max_length,
        "packing_strategy": planner.strategy,
        "overlong": args.effective_overlong,
        "truncation_mode": args.truncation_mode,
        "seed": planner.seed,
        "shuffle": planner.shuffle,
        "dataloader_drop_last": planner.drop_last,
        "per_device_train_batch_size": planner.batch_size,
        "gradient_accumulation_steps": planner.accumulation,
        "world_size": planner.world_size,
        "engine": engine,
    }


def save_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the file, with the sizes of all files that are there, whole or not at all."""
    files = {str(file.relative_to(checkpoint)): file.stat().st_size for file in _files(checkpoint)}
    text = json.dumps({"version": VERSION, "trl_packfix": __version__, **state, "files": files}, indent=2)
    unfinished = checkpoint / f"{FILE}.{os.getpid()}"
    with unfinished.open("w") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(checkpoint / FILE)


def _files(checkpoint: Path) -> Iterable[Path]:
    # The two state files follow when all others are there.
    later = (FILE, TRAINER_STATE_NAME)
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name not in later)


# What is read


def damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be whole, or None. One that this package has not written is judged by its state alone."""
    for name in (TRAINER_STATE_NAME, FILE):
        file = checkpoint / name
        if name == FILE and not file.exists():
            return None
        try:
            json.loads(file.read_text())
        except FileNotFoundError:
            return f"it has no `{name}`, which is written last"
        except ValueError:
            return f"its `{name}`, of {file.stat().st_size} bytes, ends too early"
    state = read_state(checkpoint) or {}
    for name, size in state.get("files", {}).items():
        file = checkpoint / name
        if not file.is_file():
            return f"its file `{name}` is missing"
        if file.stat().st_size != size:
            return f"its file `{name}` has {file.stat().st_size} bytes of {size}"
    return None


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """What `save_state` wrote, or None if the checkpoint is not of a packed run of this package."""
    file = checkpoint / FILE
    return json.loads(file.read_text()) if file.is_file() else None


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a folder, and why each newer one is passed over."""
    passed_over: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        problem = damage(Path(path))
        if problem is None:
            return Path(path), passed_over
        passed_over.append(f"{Path(path).name} is passed over, because {problem}")
    return None, passed_over


def choose_checkpoint(given: str | bool, output_dir: str) -> tuple[str, str | None]:
    """The whole checkpoint to resume from, and a warning: for `True` the newest of `output_dir`, else the one named.

    Raises:
        ValueError: what was given is unfinished or damaged; the newest whole checkpoint is named.
    """
    why = "Training cannot continue from a part of its state."
    if given is True:
        whole, passed_over = newest_whole(Path(output_dir))
        if whole is None:
            reasons = f" ({'; '.join(passed_over)})" if passed_over else ""
            raise ValueError(
                f"`resume_from_checkpoint=True` was given, and there is no whole checkpoint in {output_dir!r}"
                f"{reasons}. {why} Leave `resume_from_checkpoint` unset to start anew, or name a checkpoint elsewhere."
            )
        return str(whole), f"Resuming from {whole}: {'; '.join(passed_over)}." if passed_over else None
    problem = damage(Path(str(given)))
    if problem is not None:
        whole, _ = newest_whole(Path(str(given)).parent)
        instead = "None beside it is whole: leave it unset to start anew"
        if whole is not None:
            instead = f'Set `resume_from_checkpoint="{whole}"`, the newest whole one beside it'
        raise ValueError(
            f"`resume_from_checkpoint={str(given)!r}` was given, and {problem}: the run ended while it was written, or "
            f"it was damaged later. {why} {instead}."
        )
    return str(given), None


def check_same_batches(checkpoint: str, state: dict[str, Any], settings: dict[str, Any], planner: EpochPlanner) -> None:
    """Compare the batches of the run that saved `state` with those of this run.

    Raises:
        ValueError: they differ; with the settings that changed.
    """
    before = state["settings"]
    changed = {name: (before.get(name), now) for name, now in settings.items() if before.get(name) != now}
    fixed = {name: values for name, values in changed.items() if name not in ADJUSTABLE}
    if settings["engine"] == "deepspeed" and "world_size" in changed:
        fixed["world_size"] = changed["world_size"]  # ZeRO's files are the shards of so many ranks
    if not fixed and step_hash(planner, state["epoch"]) == state["step_hash"]:
        if changed:
            logger.warning(
                f"Resuming with {_listed(changed)}. Every optimizer step has the documents that it would have had; "
                "random numbers (dropout) and rounding differ."
            )
        return
    if fixed:
        remedy = "Set them back"
    elif changed:
        slots = before["gradient_accumulation_steps"] * before["world_size"]
        remedy = (
            f"Set `per_device_train_batch_size={before['per_device_train_batch_size']}` and "
            f"`gradient_accumulation_steps` so that its product with the number of ranks is {slots} again"
        )
    else:
        changed = {"trl_packfix": (state["trl_packfix"], __version__)}
        remedy = "Install the version that began the run"
    raise ValueError(
        f"`resume_from_checkpoint={checkpoint!r}` was given, which was saved with other settings: {_listed(changed)}. "
        f"After step {state['global_step']} documents of the epoch would be repeated and others left out. {remedy}, "
        "or set `ignore_data_skip=True` to begin the epoch's documents anew on purpose."
    )


def _listed(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"`{name}` was {_short(before)} and is {_short(now)}" for name, (before, now) in changed.items())


def _short(value: Any) -> str:
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else repr(value)


class ExactRestart(trl.SFTTrainer):
    """The part of the trainer that saves what a restart needs, and continues exactly or not at all."""

    args: SFTConfig
    _reader: TokenReader
    _train_planner: EpochPlanner | None = None
    _resumed: tuple[str, dict[str, Any]] | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """[`~transformers.Trainer.train`], from a whole checkpoint of the same documents or from none.

        Args:
            resume_from_checkpoint: a folder, or `True` for the newest whole checkpoint in `output_dir`.
            trial, ignore_keys_for_eval: as in transformers.

        Raises:
            ValueError: the checkpoint is unfinished or damaged, or the batches left of its epoch would be others.
        """
        self._resumed = None
        if resume_from_checkpoint:
            resume_from_checkpoint = self._whole_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _whole_checkpoint(self, given: str | bool) -> str:
        """The checkpoint to load, as the main process chooses it for all ranks; `_resumed` becomes its state."""
        found: list[Any] = [None, None, None, None]
        if self.is_world_process_zero():
            try:
                checkpoint, warning = choose_checkpoint(given, str(self.args.output_dir))
                found = [checkpoint, read_state(Path(checkpoint)), warning, None]
            except ValueError as error:
                found[3] = str(error)
        checkpoint, state, warning, problem = broadcast_object_list(found)
        if problem is not None:
            raise ValueError(problem)
        if warning is not None:
            logger.warning(warning)
        self._check_origin(checkpoint, state)
        if state is not None:
            self._resumed = checkpoint, state
            self._total_train_tokens = state["num_tokens"]
        return checkpoint

    def _check_origin(self, checkpoint: str, state: dict[str, Any] | None) -> None:
        if state is not None and state["version"] != VERSION:
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given, whose `{FILE}` has version {state['version']}. "
                f"trl_packfix {__version__} reads version {VERSION}. Install trl_packfix {state['trl_packfix']}."
            )
        # A stream has no plan to compare: `stream_checkpoint.py` brings it back to where it was.
        planned = self.args.packing and not isinstance(self.train_dataset, IterableDataset)
        if (state is None) == planned and not self.args.ignore_data_skip:
            run = "without packing, by another trainer or with `save_only_model=True`"
            run = "with packing" if state is not None else run
            raise ValueError(
                f"`resume_from_checkpoint={checkpoint!r}` was given with `packing={self.args.packing}`, and it was "
                f"saved {run}. Nothing says which documents are left of its epoch. Set `packing={state is not None}` "
                "to continue that run, or set `ignore_data_skip=True` to begin the epoch's documents anew on purpose."
            )

    def _check_restart(self, planner: EpochPlanner) -> None:
        """Remember the planner of this run; if it resumes, compare its batches with those of the run before."""
        self._train_planner = planner
        engine = "deepspeed" if self.is_deepspeed_enabled else "fsdp" if self.is_fsdp_enabled else "none"
        self._settings = settings_of(self.args, planner, self._reader, engine)
        if self._resumed is not None and not self.args.ignore_data_skip:
            check_same_batches(*self._resumed, self._settings, planner)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self.args.should_save:
            # Of an earlier run that came further: while the folder is written again, nothing may vouch for it.
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            for name in (FILE, TRAINER_STATE_NAME):
                (folder / name).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._train_planner is None:
            return
        # These are the last files that every rank writes. `trainer_state.json` follows, and only then older checkpoints
        # are deleted, so at every moment one of them is whole.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            epoch = (self.state.global_step - 1) // self._train_planner.num_steps
            state = {
                "global_step": self.state.global_step,
                "num_tokens": self._total_train_tokens,
                "epoch": epoch,
                "step_hash": step_hash(self._train_planner, epoch),
                "settings": self._settings,
            }
            save_state(Path(output_dir), state)
