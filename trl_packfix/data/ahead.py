"""The schedule of the next epoch, made while this one trains, by a process of its own on every node.

A thread would hold the interpreter that feeds the model. The process is a fresh one, for forks and CUDA do not go
together; it imports numpy and little else, runs at the lowest priority and ends with the one that started it. Nothing
depends on it: ranks that do not find its file when the epoch begins make the same schedule themselves.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .cache_files import remove, unfinished
from .epochs import CODE, EpochPlanner

COMMAND = "from trl_packfix.data.epochs import make_ahead; make_ahead()"


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
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
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
