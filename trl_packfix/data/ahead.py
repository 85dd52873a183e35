"""Schedule the next epoch while the current one trains, in a separate process on every node.

A thread would hold the GIL, which the training loop needs. The process is started anew instead of forked, because CUDA
does not survive a fork. It imports little more than numpy and runs at the lowest priority. It ends when the process
that started it ends. Nothing depends on it: a rank that does not find its file when the epoch begins computes the same
schedule itself.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .cache_files import CODE, remove, temporary_file
from .epochs import EpochPlanner

COMMAND = "from trl_packfix.data.epochs import schedule_ahead; schedule_ahead()"


@dataclass(frozen=True)
class NextEpoch:
    """The process that computes a schedule, and the file that it writes."""

    process: subprocess.Popen
    target: Path

    def end(self) -> str | None:
        """Stop the process if it still runs.

        Returns:
            The last line of its error output, if it had failed before; else None.
        """
        failed = self.process.poll()
        self.process.kill()
        _, errors = self.process.communicate()
        remove(temporary_file(self.target, self.process.pid))
        return (errors.decode(errors="replace").splitlines() or [f"exit code {failed}"])[-1] if failed else None


def start(planner: EpochPlanner, epoch: int) -> NextEpoch | None:
    """Start to compute the schedule of `epoch`; None if it cannot be cached or is cached already."""
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
    process.stdin.flush()  # stdin stays open: when this process ends, the other one reads end-of-file and ends too
    return NextEpoch(process, target)
