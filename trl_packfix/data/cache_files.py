"""Files that one process leaves for others beside the dataset: whole or not at all, and plans not for ever.

Packs, planned or scheduled, are one `.npy` file, mapped instead of read: the ranks that find it share one copy of it in
memory. A whole file is never replaced, for on network storage those who have mapped it would be killed.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..planning.arrays import Int64Array

logger = logging.getLogger(__name__)

PREFIX = "cache-packfix"
UNUSED = 7 * 24 * 3600  # seconds after which packs that nobody asked for are removed
UNFINISHED = 3600  # seconds after which nobody writes a file any more


class Packs(NamedTuple):
    """Documents in packs: pack i is `order[offsets[i]:offsets[i + 1]]`; `num_skipped` documents are in none."""

    order: Int64Array
    offsets: Int64Array
    num_skipped: int = 0


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a `.npz` file."""
    with np.load(path) as found:
        return dict(found)


def unfinished(path: Path, pid: int) -> Path:
    """What a process of this node writes before it is called `path`."""
    return path.with_name(f"{path.stem}-{os.uname().nodename}-{pid}.tmp{path.suffix}")


def write_whole(path: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` make the file, or leave it as it was: ranks of one job make the same file at the same time.

    The first to finish is believed; a damaged file is removed by who finds it. Returns whether the file is there now.
    """
    if path.is_file():
        return True  # another rank was faster
    temporary = unfinished(path, os.getpid())
    try:
        write(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return path.is_file()
        except OSError:  # a file system without links
            temporary.replace(path)
        return True
    except OSError as error:  # a dataset on a read-only disk is none the worse for it
        logger.info("%s is not kept for the next start: %s", path.name, error)
        return False
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove the file if it is there and may be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def kept_packs(path: Path, num_documents: int) -> Packs | None:
    """What `keep_packs` left there of so many documents, or None."""
    try:
        flat = np.asarray(np.load(path, mmap_mode="r"))
        start = 2 + int(flat[0])
        found = Packs(flat[start:], flat[2:start], int(flat[1]))
        problem = _problem(found, num_documents)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, IndexError) as error:
        problem = str(error)
    if problem is not None:
        logger.warning("%s cannot be read (%s) and is made again.", path, problem)
        remove(path)
        return None
    with contextlib.suppress(OSError):  # someone else's file: then someone else keeps it
        os.utime(path)  # it was asked for
    return found


def _problem(packs: Packs, num_documents: int) -> str | None:
    """Why these are not the packs of so many documents, each once or skipped: a disk may lose a part of a file."""
    order, offsets = packs.order, packs.offsets
    if len(order) + packs.num_skipped != num_documents:
        return f"it has {len(order)} documents and {packs.num_skipped} left out of {num_documents}"
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(order) or (offsets[1:] < offsets[:-1]).any():
        return "its packs do not follow each other"
    has = np.zeros(num_documents, dtype=bool)
    has[order[order >= 0]] = True
    return None if has.sum() == len(order) else f"{len(order) - has.sum()} documents are in it twice"


def keep_packs(path: Path, packs: Packs) -> None:
    """Leave packs for `kept_packs`, and remove those that nobody has asked for within a week."""
    flat = np.concatenate([[len(packs.offsets), packs.num_skipped], packs.offsets, packs.order])
    write_whole(path, lambda file: np.save(file, flat, allow_pickle=False))
    for pattern, age in ((f"{PREFIX}-packs-*.npy", UNUSED), (f"{PREFIX}-*.tmp.*", UNFINISHED)):
        for file in path.parent.glob(pattern):
            with contextlib.suppress(OSError):  # another rank was faster
                if time.time() - file.stat().st_mtime > age:
                    file.unlink()
