"""Which checkpoints are whole: `packing_state.json` lists all other files of a checkpoint with their sizes.

It is written after every rank has written its part, and before the Trainer's own last file. A checkpoint without these
two files, or with a file that is missing or of another size, is unfinished or damaged. It is reported and not loaded.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from ..version import __version__

VERSION = 2
FILE = "packing_state.json"
TRAINED = "trained_documents.npy"

Trained = npt.NDArray[np.bool_]


# What is written


def begin(checkpoint: Path) -> dict[str, int]:
    """Mark a checkpoint folder as unfinished, and return the files that an earlier run wrote there.

    Returns the time of the last write in ns for each file name. The folder has files if an earlier run got further.
    """
    for name in (TRAINER_STATE_NAME, FILE):  # in this order: without the first file it counts as unfinished at once
        (checkpoint / name).unlink(missing_ok=True)
    return {name: stat.st_mtime_ns for name, stat in _files(checkpoint)}


def save_state(checkpoint: Path, state: dict[str, Any], earlier_files: dict[str, int]) -> None:
    """Write `packing_state.json` atomically, with the sizes of all files written since `begin`."""
    # Files of an earlier run are not listed: callbacks overwrite them later, and their size is not known yet.
    files = {name: stat.st_size for name, stat in _files(checkpoint) if stat.st_mtime_ns != earlier_files.get(name)}
    text = json.dumps({"version": VERSION, "trl_packfix": __version__, **state, "files": files}, indent=2)
    unfinished = checkpoint / f"{FILE}.{os.getpid()}"
    with unfinished.open("w") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(checkpoint / FILE)


def _files(checkpoint: Path) -> Iterable[tuple[str, os.stat_result]]:
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(checkpoint)), file.stat()


# What is read


def damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be whole, or None. Without `packing_state.json` only the Trainer's own state is read."""
    _, problem = _read_json(checkpoint / TRAINER_STATE_NAME)
    if problem is not None or not (checkpoint / FILE).exists():
        return problem
    state, problem = _read_json(checkpoint / FILE)
    if problem is not None:
        return problem
    if "files" not in state:
        return f"its `{FILE}` does not hold what was saved"
    for name, size in state["files"].items():
        file = checkpoint / name
        if not file.is_file():
            return f"its file `{name}` is missing"
        if file.stat().st_size != size:
            return f"its file `{name}` has {file.stat().st_size} bytes of {size}"
    return None


def _read_json(file: Path) -> tuple[dict[str, Any], str | None]:
    """What a file of a checkpoint holds, and why it cannot be read."""
    try:
        state = json.loads(file.read_text())
    except FileNotFoundError:
        return {}, f"it has no `{file.name}`, which is written last"
    except OSError as error:
        return {}, f"its `{file.name}` cannot be read ({error})"
    except ValueError:
        return {}, f"its `{file.name}`, of {file.stat().st_size} bytes, ends too early"
    return (state, None) if isinstance(state, dict) else ({}, f"its `{file.name}` does not hold what was saved")


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """What `save_state` wrote, or None if the checkpoint is not from a packed run of this package."""
    file = checkpoint / FILE
    return json.loads(file.read_text()) if file.is_file() else None


# Which documents of the running epoch were trained: a bit for each, in a file of its own


def save_trained(checkpoint: Path, now: Trained, before: Trained | None) -> None:
    """Write which documents of the epoch were trained, and which before the running plan was made; both (N,)."""
    np.save(checkpoint / TRAINED, np.packbits([now] if before is None else [now, before], axis=1))


def read_trained(checkpoint: Path, num_documents: int) -> tuple[Trained | None, Trained | None]:
    """The inverse of `save_trained`; None for what was not saved, as by earlier versions."""
    file = checkpoint / TRAINED
    if not file.is_file():
        return None, None
    rows = np.unpackbits(np.load(file), axis=1, count=num_documents).astype(bool)
    return rows[0], rows[1] if len(rows) > 1 else None


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a folder, and the reason why each newer one is skipped."""
    skipped: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        problem = damage(Path(path))
        if problem is None:
            return Path(path), skipped
        skipped.append(f"{Path(path).name} is skipped, because {problem}")
    return None, skipped


def choose_checkpoint(requested: str | bool, output_dir: str) -> tuple[str | None, str | None]:
    """The whole checkpoint to resume from, and a warning or None.

    Args:
        requested: a folder; True for the newest whole checkpoint in `output_dir`; or "newest", for job scripts that
            restart by themselves: like True, but without a whole checkpoint the result is None and training starts
            anew.

    Raises:
        ValueError: `requested` is not a folder, or is unfinished or damaged. The message names the newest whole
            checkpoint.
    """
    why = "Training cannot continue from a part of its state."
    if requested is True or requested == "newest":
        whole, skipped = newest_whole(Path(output_dir))
        if whole is None and requested == "newest":
            return None, f"Starting anew: {'; '.join(skipped)}." if skipped else None
        if whole is None:
            reasons = f" ({'; '.join(skipped)})" if skipped else ""
            raise ValueError(
                f"`resume_from_checkpoint=True` was given, and there is no whole checkpoint in {output_dir!r}"
                f"{reasons}. {why} Leave `resume_from_checkpoint` unset to start anew, or name a checkpoint elsewhere."
            )
        return str(whole), f"Resuming from {whole}: {'; '.join(skipped)}." if skipped else None
    problem = damage(Path(str(requested)))
    if problem is not None:
        whole, _ = newest_whole(Path(str(requested)).parent)
        instead = "No other checkpoint in its folder is whole: leave it unset to start anew"
        if whole is not None:
            instead = f'Set `resume_from_checkpoint="{whole}"`, the newest whole one in the same folder'
        if not Path(str(requested)).is_dir():
            raise ValueError(
                f"`resume_from_checkpoint={str(requested)!r}` was given, and there is no such folder here (the newest "
                f'in {output_dir!r} is `True` in Python and "newest" on a command line). {why} {instead}.'
            )
        raise ValueError(
            f"`resume_from_checkpoint={str(requested)!r}` was given, and {problem}. The run ended while it was "
            f"written, or it was damaged later. {why} {instead}."
        )
    return str(requested), None
