"""Write and read the package's own files in a checkpoint, and tell whole checkpoints from damaged ones.

A checkpoint is a folder that the Trainer writes. `restart.py` adds two files to it with this module:

- `packing_state.json` holds the state of the training data, and lists all other files of the checkpoint with sizes and
  hashes. It is written after every rank has written its part, and before the Trainer's own last file,
  `trainer_state.json`.
- `trained_documents.npy` says which documents of the running epoch were trained, as a bit for each document.

A checkpoint is *whole* if it has `trainer_state.json`, and each file that `packing_state.json` lists is as it was
written. Any other checkpoint is unfinished or damaged, and is not loaded. After a power cut a file may have its full
size and contain zeros, so the package's own files are synced to the disk.
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
HASHED_WHOLE = 2**26  # bytes; all of a file of at most this size is hashed
NUM_BLOCKS = 16  # number of evenly spaced blocks of a larger file that are hashed
BLOCK = 2**16  # bytes of a block

TrainedMask = npt.NDArray[np.bool_]  # for each of the N documents of the epoch, whether it was trained; (N,)


# Writing a checkpoint


def note_times(checkpoint: Path) -> dict[str, int]:
    """Mark a checkpoint folder as unfinished, and return the times of the files that are in it already.

    It is called before a run writes the checkpoint. The folder has files if an earlier run has written a checkpoint
    there. `save_state` compares the times, and so knows which files have been written since.

    Returns:
        The time of the last change of each file in nanoseconds, by its path relative to the folder.
    """
    # `trainer_state.json` is removed first, because without it the checkpoint counts as unfinished at once
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
    return {name: stat.st_mtime_ns for name, stat in _list_files(checkpoint)}


def save_state(checkpoint: Path, state: dict[str, Any], earlier_files: dict[str, int]) -> None:
    """Write `packing_state.json` atomically, with sizes and hashes of all files written since `note_times`.

    Args:
        checkpoint: the folder of the checkpoint.
        state: the state of the training data, which `read_state` returns.
        earlier_files: the result of `note_times` for this folder.
    """
    # Only files that were written since `note_times` are listed. A callback may still overwrite a file of an earlier
    # run after this, so the final size of such a file is not known yet.
    files = {
        name: [stat.st_size, _hash_file(checkpoint / name)]
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
        os.fsync(folder)  # so that the new name of the file is on the disk, too
    finally:
        os.close(folder)


def write_synced(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file with the function `write`, and wait until it is on the disk."""
    with file.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, or of `NUM_BLOCKS` blocks of a file larger than `HASHED_WHOLE`.

    Hashing all bytes of a large model would take as long as writing the model.
    """
    digest = hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= HASHED_WHOLE:
            digest.update(stream.read())
        else:
            for offset in np.linspace(0, size - BLOCK, NUM_BLOCKS).astype(int).tolist():
                stream.seek(offset)
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _hash_of_state(state: dict[str, Any]) -> str:
    """Return the SHA-256 of the contents of `packing_state.json`, without its own hash."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _list_files(checkpoint: Path) -> Iterable[tuple[str, os.stat_result]]:
    """Yield the path of each file of a checkpoint, relative to its folder, and the file's status (`os.stat`)."""
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(checkpoint)), file.stat()


# Reading a checkpoint


def find_damage(checkpoint: Path) -> str | None:
    """Return the reason why a checkpoint is not whole, as a part of a sentence; None if no damage is found.

    In a checkpoint without `packing_state.json`, from a run that was not packed, only `trainer_state.json` is checked.
    """
    _, problem = _read_json(checkpoint / TRAINER_STATE_NAME)
    if problem is not None or not (checkpoint / STATE_FILE).exists():
        return problem
    state, problem = _read_json(checkpoint / STATE_FILE)
    if problem is not None:
        return problem
    # Earlier versions wrote no hash of the state, and listed sizes without hashes of files
    saved_hash = state.pop("hash", None)
    has_wrong_hash = saved_hash is not None and saved_hash != _hash_of_state(state)
    if "files" not in state or has_wrong_hash:
        return f"its `{STATE_FILE}` does not hold what was saved"
    for name, entry in state["files"].items():
        size, saved_digest = entry if isinstance(entry, list) else (entry, None)
        file = checkpoint / name
        if not file.is_file():
            return f"its file `{name}` is missing"
        if file.stat().st_size != size:
            return f"its file `{name}` has {file.stat().st_size} bytes of {size}"
        if saved_digest is not None and _hash_file(file) != saved_digest:
            return f"its file `{name}` is not as it was written"
    return None


def _read_json(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return the dictionary in a JSON file, and the reason why it cannot be read, or None if it can be read."""
    try:
        state = json.loads(file.read_text())
    except FileNotFoundError:
        return {}, f"it has no `{file.name}`, which is written last"
    except OSError as error:
        return {}, f"its `{file.name}` cannot be read ({error})"
    except ValueError as error:
        return {}, f"its `{file.name}`, of {file.stat().st_size} bytes, is cut off or damaged ({error})"
    return (state, None) if isinstance(state, dict) else ({}, f"its `{file.name}` does not hold what was saved")


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """Return the state that `save_state` wrote, or None if the checkpoint has no `packing_state.json`.

    If the training set was a table and not a stream, the two masks that `save_trained` wrote are added as the entry
    "trained".
    """
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return None
    state: dict[str, Any] = json.loads(file.read_text())
    # Only the state of a table has the entry "settings" (`settings_of` in `table_source.py`). It has the number of
    # documents, which tells how many bits of each mask are used
    if "settings" in state:
        state["trained"] = read_trained(checkpoint, state["settings"]["documents"])
    return state


# The trained documents of the running epoch


def save_trained(checkpoint: Path, now: TrainedMask, before: TrainedMask | None) -> None:
    """Write which documents of the running epoch were trained, in `trained_documents.npy`.

    Args:
        checkpoint: the folder of the checkpoint.
        now: whether each document was trained in this epoch up to now.
        before: if a resumed run has planned the packs of the rest of the epoch anew, whether each document was trained
            before that. Such documents are in `now`, too. None if the plan has the whole epoch.
    """
    bits = np.packbits([now] if before is None else [now, before], axis=1)
    write_synced(checkpoint / TRAINED_FILE, lambda stream: np.save(stream, bits))


def read_trained(checkpoint: Path, num_documents: int) -> tuple[TrainedMask | None, TrainedMask | None]:
    """Read the masks `now` and `before` that `save_trained` wrote; None stands for a mask that was not saved.

    Checkpoints of earlier versions have no masks.
    """
    file = checkpoint / TRAINED_FILE
    if not file.is_file():
        return None, None
    masks = np.unpackbits(np.load(file), axis=1, count=num_documents).astype(bool)
    return masks[0], masks[1] if len(masks) > 1 else None


# Choosing a checkpoint


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint in a folder, or None, and for each newer checkpoint why it is skipped."""
    skipped: list[str] = []
    for path in reversed(sort_checkpoints(str(folder))):
        problem = find_damage(Path(path))
        if problem is None:
            return Path(path), skipped
        skipped.append(f"{Path(path).name} is skipped, because {problem}")
    return None, skipped


def choose_checkpoint(requested: str | bool, output_dir: str) -> tuple[str | None, str | None]:
    """Return the folder of the checkpoint to resume from, or None to start anew, and a warning or None.

    Args:
        requested: the folder of a checkpoint; or True for the newest whole checkpoint in `output_dir`; or "newest", for
            job scripts that restart by themselves. "newest" is like True, but training starts anew if there is no
            whole checkpoint.
        output_dir: the folder in which the run writes checkpoints.

    Raises:
        ValueError: the requested checkpoint is not whole, or True was given and there is no whole checkpoint.
    """
    consequence = "Training cannot continue from a part of its state."
    if requested is True or requested == "newest":
        newest, skipped = newest_whole(Path(output_dir))
        reasons = "; ".join(skipped)  # why newer checkpoints are skipped; "" if there are none
        if newest is not None:
            return str(newest), f"Resuming from {newest}: {reasons}." if skipped else None
        if requested == "newest":
            return None, f"Starting anew: {reasons}." if skipped else None
        raise ValueError(
            f"`resume_from_checkpoint=True` was given, and there is no whole checkpoint in {output_dir!r}"
            f"{reasons and f' ({reasons})'}. {consequence} Leave `resume_from_checkpoint` unset to start anew, or name "
            "a checkpoint elsewhere."
        )
    problem = find_damage(Path(str(requested)))
    if problem is None:
        return str(requested), None
    newest, _ = newest_whole(Path(str(requested)).parent)
    advice = "No other checkpoint in its folder is whole: leave it unset to start anew"
    if newest is not None:
        advice = f'Set `resume_from_checkpoint="{newest}"`, the newest whole one in the same folder'
    if not Path(str(requested)).is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={str(requested)!r}` was given, and there is no such folder here (the newest in "
            f'{output_dir!r} is `True` in Python and "newest" on a command line). {consequence} {advice}.'
        )
    raise ValueError(
        f"`resume_from_checkpoint={str(requested)!r}` was given, and {problem}. The run ended while it was written, or "
        f"it was damaged later. {consequence} {advice}."
    )
