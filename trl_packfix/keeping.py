"""Files that one process leaves for others beside the dataset: whole or not at all, and plans not for ever.

Packs, planned or scheduled, are one `.npy` file, mapped instead of read: the ranks of a node share one copy of it in
memory. Where a file is on a local disk, who has mapped it keeps it when another removes it.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .ledger import Int64Array

logger = logging.getLogger(__name__)

PREFIX = "cache-packfix"
UNUSED = 7 * 24 * 3600  # seconds after which packs that nobody asked for are removed


class Packs(NamedTuple):
    """Documents in packs: pack i is `order[offsets[i]:offsets[i + 1]]`; `num_skipped` documents are in none."""

    order: Int64Array
    offsets: Int64Array
    num_skipped: int = 0


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a `.npz` file."""
    with np.load(path) as found:
        return dict(found)


def write_whole(path: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` make the file, or leave it as it was: ranks of one job make the same file at the same time.

    Returns whether the file is there now.
    """
    temporary = path.with_name(f"{path.stem}-{os.uname().nodename}-{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
        return True
    except OSError as error:  # a dataset on a read-only disk is none the worse for it
        logger.info("%s is not kept for the next start: %s", path.name, error)
        temporary.unlink(missing_ok=True)
        return False


def kept_packs(path: Path) -> Packs | None:
    """What `keep_packs` left there, or None."""
    try:
        flat = np.asarray(np.load(path, mmap_mode="r"))
        start = 2 + int(flat[0])
        found = Packs(flat[start:], flat[2:start], int(flat[1]))
        problem = None if found.offsets[-1] == len(found.order) else "it ends too early"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, IndexError) as error:
        problem = str(error)
    if problem is not None:
        logger.warning("%s cannot be read (%s) and is made again.", path, problem)
        return None
    try:
        os.utime(path)  # it was asked for
    except OSError:
        pass  # someone else's file: then someone else keeps it
    return found


def keep_packs(path: Path, packs: Packs) -> None:
    """Leave packs for `kept_packs`, and remove those that nobody has asked for within a week."""
    flat = np.concatenate([[len(packs.offsets), packs.num_skipped], packs.offsets, packs.order])
    write_whole(path, lambda file: np.save(file, flat, allow_pickle=False))
    for file in [*path.parent.glob(f"{PREFIX}-packs-*.npy"), *path.parent.glob(f"{PREFIX}-*.tmp.*")]:
        try:
            if time.time() - file.stat().st_mtime > UNUSED:
                file.unlink()
        except OSError:
            pass  # another rank was faster
