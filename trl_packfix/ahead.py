"""The schedule of the next epoch, made while this one trains, by a process of its own on every node.

A thread would hold the interpreter that feeds the model. The process is a fresh one, for forks and CUDA do not go
together; it imports numpy and little else, runs at the lowest priority and ends with the one that started it. Nothing
depends on it: ranks that do not find its file when the epoch begins make the same schedule themselves.
"""

import logging
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .epochs import CODE, EpochPlanner
from .keeping import remove, unfinished

logger = logging.getLogger(__name__)

COMMAND = "from trl_packfix.epochs import make_ahead; make_ahead()"


@dataclass(frozen=True)
class NextEpoch:
    """The process that makes a schedule, and the file that it will leave."""

    process: subprocess.Popen
    target: Path

    def end(self) -> str | None:
        """Stop the process if it still runs; the last line of its error if it ended by itself, with one."""
        failed = self.process.poll()
        self.process.kill()
        _, errors = self.process.communicate()
        remove(unfinished(self.target, self.process.pid))
        return (errors.decode(errors="replace").splitlines() or [f"exit code {failed}"])[-1] if failed else None


def start(planner: EpochPlanner, epoch: int) -> NextEpoch | None:
    """Begin to make the schedule of `epoch`; None where it cannot be kept, or is there already."""
    target = planner.file("schedule", epoch)
    if target is None or target.exists() or not os.access(target.parent, os.W_OK):
        return None
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((planner.documents.file, planner.settings(), epoch, target, CODE)))
    process.stdin.flush()  # and stays open: its end tells the process that this one has ended
    return NextEpoch(process, target)


class PlanAhead(TrainerCallback):
    """Starts the process at the beginning of every epoch but the last, on one rank of each node."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._next: NextEpoch | None = None
        self._has_warned = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()  # what is not there yet is made by the ranks themselves now
        planner = self.trainer._train_planner
        if planner is None:  # the loader is the user's own
            return
        epoch = state.global_step // planner.num_steps + 1
        if args.local_process_index == 0 and planner.shuffle and epoch < state.num_train_epochs:
            try:
                self._next = start(planner, epoch)
            except OSError as error:
                self._warn(str(error))

    def end(self) -> None:
        """To be called when training ends, well or not."""
        if self._next is not None and (problem := self._next.end()) is not None:
            self._warn(problem)
        self._next = None

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            logger.warning("The next epoch could not be planned ahead (%s); each rank plans it as it begins.", problem)
        self._has_warned = True
