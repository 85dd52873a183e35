"""Cache files beside the dataset, written atomically. Plans and schedules unused for a week are deleted.

Every cache of this package depends on its code: another version may cut, measure, plan or estimate differently. So
`CODE` is part of every file name, also of those that `datasets` makes (`Cached`).

A plan or a schedule is one `.npy` file. It is memory-mapped, so all ranks of a node share one copy in memory. An
existing file is never replaced: on network storage, a process that has mapped the replaced file would be killed.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..planning.arrays import Int64Array

logger = logging.getLogger(__name__)

PREFIX = "cache-packfix"
PACKS_LIFETIME = 7 * 24 * 3600  # seconds after the last use until cached packs are deleted
TEMPORARY_LIFETIME = 3600  # seconds after the last write until a temporary file is deleted


def _hash_of_code() -> str:
    digest = hashlib.sha256(np.__version__.encode())
    package = Path(__file__).parents[1]
    for file in sorted([*(package / "planning").glob("*.py"), *(package / "data").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


CODE = _hash_of_code()  # computed at import: the source files may change during the run


@dataclass(frozen=True)
class Cached:
    """A function for `Dataset.map`, whose result `datasets` finds again only with the same code.

    `datasets` hashes a function of a module by its name, but an object by its attributes.
    """

    function: Callable[..., Any]
    code: str = CODE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class CachedPacks(NamedTuple):
    """Documents in packs: pack i is `order[offsets[i]:offsets[i + 1]]`; `num_skipped` documents are in no pack.

    With sequence parallelism a schedule has `degrees`, one for each micro-step.
    """

    order: Int64Array
    offsets: Int64Array
    num_skipped: int = 0
    degrees: Int64Array | None = None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a `.npz` file."""
    with np.load(path) as found:
        return dict(found)


def write_atomically(path: Path, write: Callable[[Path], None]) -> bool:
    """Call `write` with a temporary file, then give that file the name `path`.

    Several ranks of a job may write the same file at once. The first one to finish wins, and an existing file is not
    replaced. A damaged file is removed by the process that finds it.

    Returns:
        Whether the file exists now.
    """
    if path.is_file():
        return True  # another rank was faster
    temporary = path.with_name(f"{path.stem}-{os.uname().nodename}-{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return path.is_file()
        except OSError:  # a file system without links
            temporary.replace(path)
        return True
    except OSError as error:  # e.g. a read-only disk: training works without the cache
        logger.info("%s is not cached for the next start: %s", path.name, error)
        return False
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove the file, if it exists and this process may remove it."""
    with contextlib.suppress(OSError):
        path.unlink()


def cached_packs(
    file: Path | None, make: Callable[[], CachedPacks], num_documents: int, *, num_degrees: int = 0, writes: bool = True
) -> CachedPacks:
    """The packs in `file`; if it does not hold them, those that `make` makes, written there if this process `writes`.

    Args:
        file: None: they are not cached.
        num_documents, num_degrees: that the packs have.
    """
    packs = None if file is None else read_cached_packs(file, num_documents, num_degrees)
    if packs is None:
        packs = make()
        if file is not None and writes:
            cache_packs(file, packs)
    return packs


def read_cached_packs(path: Path, num_documents: int, num_degrees: int = 0) -> CachedPacks | None:
    """The packs that `cache_packs` wrote there, if they hold `num_documents` documents; else None."""
    try:
        flat = np.asarray(np.load(path, mmap_mode="r"))
        start = 2 + int(flat[0])
        stop = start + num_degrees
        found = CachedPacks(flat[stop:], flat[2:start], int(flat[1]), flat[start:stop] if num_degrees else None)
        problem = _problem(found, num_documents)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, IndexError) as error:
        problem = str(error)
    if problem is not None:
        logger.warning("%s cannot be read (%s) and is made again.", path, problem)
        remove(path)
        return None
    with contextlib.suppress(OSError):  # another user's file: that user's runs set its time
        os.utime(path)  # the time of the last use
    return found


def _problem(packs: CachedPacks, num_documents: int) -> str | None:
    """Why `packs` do not hold each of `num_documents` documents once or as skipped; None if they do.

    The check is needed because a disk may lose a part of a file.
    """
    order, offsets = packs.order, packs.offsets
    if len(order) + packs.num_skipped != num_documents:
        return f"it has {len(order)} documents and {packs.num_skipped} skipped, but there are {num_documents}"
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(order) or (offsets[1:] < offsets[:-1]).any():
        return "its packs do not follow each other"
    if packs.degrees is not None and (packs.degrees < 1).any():
        return "it has degrees below 1"
    has = np.zeros(num_documents, dtype=bool)
    has[order[order >= 0]] = True
    return None if has.sum() == len(order) else f"{len(order) - has.sum()} documents are in it twice"


def cache_packs(path: Path, packs: CachedPacks) -> None:
    """Write packs for `read_cached_packs`, and delete those in the same folder that were unused for a week."""
    degrees = np.zeros(0, np.int64) if packs.degrees is None else packs.degrees
    flat = np.concatenate([[len(packs.offsets), packs.num_skipped], packs.offsets, degrees, packs.order])
    write_atomically(path, lambda file: np.save(file, flat, allow_pickle=False))
    for pattern, age in ((f"{PREFIX}-packs-*.npy", PACKS_LIFETIME), (f"{PREFIX}-*.tmp.*", TEMPORARY_LIFETIME)):
        for file in path.parent.glob(pattern):
            with contextlib.suppress(OSError):  # another rank was faster
                if time.time() - file.stat().st_mtime > age:
                    file.unlink()
