"""Which checkpoints are whole: `packing_state.json` lists all other files of a checkpoint with sizes and hashes.

It is written after every rank has written its part, and before the Trainer's own last file. A checkpoint without these
two files, or with a file that is missing or is not as it was written, is unfinished or damaged, and is not loaded.
After a power cut a file may have its size and hold zeros, so the package's own files are synced to the disk.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from ..version import __version__

STATE_VERSION = 2
STATE_FILE = "packing_state.json"
TRAINED_FILE = "trained_documents.npy"
HASHED_WHOLE = 2**26  # bytes of the largest file of which all are hashed
NUM_BLOCKS = 16  # of a larger file these are hashed, evenly spaced; bytes of a block
BLOCK = 2**16

TrainedMask = npt.NDArray[np.bool_]


# What is written


def note_times(checkpoint: Path) -> dict[str, int]:
    """Mark a checkpoint folder as unfinished; returns the files that an earlier run wrote there, with their ns."""
    for name in (
        TRAINER_STATE_NAME,
        STATE_FILE,
    ):  # in this order: without the first file it counts as unfinished at once
        (checkpoint / name).unlink(missing_ok=True)
    return {name: stat.st_mtime_ns for name, stat in _list_files(checkpoint)}


def save_state(checkpoint: Path, state: dict[str, Any], earlier_files: dict[str, int]) -> None:
    """Write `packing_state.json` atomically, with sizes and hashes of all files written since `note_times`."""
    # Files of an earlier run are not listed: callbacks overwrite them later, and their size is not known yet.
    files = {
        name: [stat.st_size, _hash(checkpoint / name)]
        for name, stat in _list_files(checkpoint)
        if stat.st_mtime_ns != earlier_files.get(name)
    }
    content = {"version": STATE_VERSION, "trl_packfix": __version__, **state, "files": files}
    text = json.dumps(content | {"hash": _hash_of_state(content)}, indent=2) + "\n"
    unfinished = checkpoint / f"{STATE_FILE}.{os.getpid()}"
    write_synced(unfinished, lambda stream: stream.write(text.encode()))
    unfinished.replace(checkpoint / STATE_FILE)
    folder = os.open(checkpoint, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def write_synced(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file, and wait until the disk has it."""
    with file.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _hash(file: Path) -> str:
    """Return the SHA-256 of a file; of a large file only some blocks are read.

    Hashing all of a model would take as long as writing it.
    """
    digest = hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= HASHED_WHOLE:
            digest.update(stream.read())
        else:
            for place in np.linspace(0, size - BLOCK, NUM_BLOCKS).astype(int).tolist():
                stream.seek(place)
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _hash_of_state(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _list_files(checkpoint: Path) -> Iterable[tuple[str, os.stat_result]]:
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(checkpoint)), file.stat()


# What is read


def damage(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be whole, or None if no damage is seen.

    Without `packing_state.json` only the Trainer's own state is read.
    """
    _, problem = _read_json(checkpoint / TRAINER_STATE_NAME)
    if problem is not None or not (checkpoint / STATE_FILE).exists():
        return problem
    state, problem = _read_json(checkpoint / STATE_FILE)
    if problem is not None:
        return problem
    written = state.pop("hash", None)  # earlier checkpoints have none, and list sizes only
    if "files" not in state or written not in (None, _hash_of_state(state)):
        return f"its `{STATE_FILE}` does not hold what was saved"
    for name, listed in state["files"].items():
        size, digest = listed if isinstance(listed, list) else (listed, None)
        file = checkpoint / name
        if not file.is_file():
            return f"its file `{name}` is missing"
        if file.stat().st_size != size:
            return f"its file `{name}` has {file.stat().st_size} bytes of {size}"
        if digest is not None and _hash(file) != digest:
            return f"its file `{name}` is not as it was written"
    return None


def _read_json(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return what a JSON file of a checkpoint holds, and why it cannot be read, or None."""
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
    """Return what `save_state` and `save_trained` wrote, or None if the checkpoint is not from a packed run."""
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return None
    state: dict[str, Any] = json.loads(file.read_text())
    if "settings" in state:
        state["trained"] = read_trained(checkpoint, state["settings"]["documents"])
    return state


# Which documents of the running epoch were trained: a bit for each, in a file of its own


def save_trained(checkpoint: Path, now: TrainedMask, before: TrainedMask | None) -> None:
    """Write which documents of the epoch were trained, and which before the running plan was made, (N,)."""
    bits = np.packbits([now] if before is None else [now, before], axis=1)
    write_synced(checkpoint / TRAINED_FILE, lambda stream: np.save(stream, bits))


def read_trained(checkpoint: Path, num_documents: int) -> tuple[TrainedMask | None, TrainedMask | None]:
    """Read the two masks that `save_trained` wrote, (N,) each; None for a mask that was not saved.

    Earlier versions saved neither.
    """
    file = checkpoint / TRAINED_FILE
    if not file.is_file():
        return None, None
    rows = np.unpackbits(np.load(file), axis=1, count=num_documents).astype(bool)
    return rows[0], rows[1] if len(rows) > 1 else None


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a folder, and the reason why each newer checkpoint is skipped."""
    skipped: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        problem = damage(Path(path))
        if problem is None:
            return Path(path), skipped
        skipped.append(f"{Path(path).name} is skipped, because {problem}")
    return None, skipped


def choose_checkpoint(requested: str | bool, output_dir: str) -> tuple[str | None, str | None]:
    """Return the whole checkpoint to resume from, and a warning or None.

    `requested` is a folder, True for the newest whole checkpoint in `output_dir`, or "newest", for job scripts that
    restart by themselves: like True, but without a whole checkpoint training starts anew.
    """
    why = "Training cannot continue from a part of its state."
    if requested is True or requested == "newest":
        whole, skipped = newest_whole(Path(output_dir))
        reasons = "; ".join(skipped)
        if whole is not None:
            return str(whole), f"Resuming from {whole}: {reasons}." if skipped else None
        if requested == "newest":
            return None, f"Starting anew: {reasons}." if skipped else None
        raise ValueError(
            f"`resume_from_checkpoint=True` was given, and there is no whole checkpoint in {output_dir!r}"
            f"{reasons and f' ({reasons})'}. {why} Leave `resume_from_checkpoint` unset to start anew, or name a "
            "checkpoint elsewhere."
        )
    problem = damage(Path(str(requested)))
    if problem is None:
        return str(requested), None
    whole, _ = newest_whole(Path(str(requested)).parent)
    instead = "No other checkpoint in its folder is whole: leave it unset to start anew"
    if whole is not None:
        instead = f'Set `resume_from_checkpoint="{whole}"`, the newest whole one in the same folder'
    if not Path(str(requested)).is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={str(requested)!r}` was given, and there is no such folder here (the newest in "
            f'{output_dir!r} is `True` in Python and "newest" on a command line). {why} {instead}.'
        )
    raise ValueError(
        f"`resume_from_checkpoint={str(requested)!r}` was given, and {problem}. The run ended while it was written, or "
        f"it was damaged later. {why} {instead}."
    )
