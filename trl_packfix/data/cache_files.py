"""Cache files beside the dataset, written atomically. Plans and schedules unused for a week are deleted.

Every cache of this package depends on its code: another version may cut, measure, plan or estimate differently. So
`CODE` is part of every file name, also of those that `datasets` makes (`Cached`).

A plan or a schedule is one `.npy` file. It is memory-mapped, so all ranks of a node share one copy in memory. An
existing file is never replaced: on network storage, a process that has mapped the replaced file would be killed.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from ..planning.arrays import Int64Array

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "cache-packfix"
PACKS_LIFETIME = 7 * 24 * 3600  # seconds after the last use until cached packs are deleted
MAPPED_FROM = 2**20  # bytes of an array of a `.npz` file from which on it is mapped
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
    """All arrays of a `.npz` file; those with many values are mapped, so processes share one copy."""
    with np.load(path) as members, zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        arrays = {}
        for name in members.files:
            member = archive.getinfo(f"{name}.npy")
            is_mapped = member.file_size >= MAPPED_FROM and member.compress_type == zipfile.ZIP_STORED
            arrays[name] = _mapped(archive, member, stream) if is_mapped else members[name]
        return arrays


def _mapped(archive: zipfile.ZipFile, member: zipfile.ZipInfo, stream: BinaryIO) -> np.ndarray:
    """The array of an uncompressed member of the `.npz` file that `stream` reads, mapped into memory."""
    with archive.open(member) as content:  # read once, which compares its checksum
        while content.read(2**24):
            pass
    stream.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", stream.read(4))
    stream.seek(name + extra, os.SEEK_CUR)
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape))


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


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Run the block in one process of this node at a time, for the same `file`: the others wait.

    The system unlocks when a process ends, however it does. Where nothing can be locked, no process waits.
    """
    name = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"{PREFIX}-{name}.lock"  # here, because not every network storage has locks
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context(path.open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            stack.callback(remove, path)  # who comes later finds `file`
        yield


def read_or_make(file: Path, *, read: Callable[[], T | None], make: Callable[[], T], write: Callable[[T], bool]) -> T:
    """What `read` finds in the file; if that is None, what `make` makes, which `write` has tried to write there.

    One process of a node makes it, and the others wait. It is read again once it is written, since reading maps it.
    """
    if (cached := read()) is not None:
        return cached
    with one_at_a_time(file):
        if (cached := read()) is not None:  # another process was first
            return cached
        value = make()
        is_cached = write(value)
    cached = read() if is_cached else None
    return value if cached is None else cached


def cached_packs(
    file: Path | None, make: Callable[[], CachedPacks], num_documents: int, *, num_degrees: int = 0
) -> CachedPacks:
    """The packs in `file`; if it does not hold them, those that `make` makes, which are written there.

    Args:
        file: None: they are not cached.
        num_documents, num_degrees: that the packs have.
    """
    if file is None:
        return make()
    return read_or_make(
        file,
        read=lambda: read_cached_packs(file, num_documents, num_degrees),
        make=make,
        write=lambda packs: cache_packs(file, packs),
    )


def read_cached_packs(path: Path, num_documents: int, num_degrees: int = 0) -> CachedPacks | None:
    """The packs that `cache_packs` wrote there, if they hold `num_documents` documents; else None."""
    try:
        flat = np.asarray(np.load(path, mmap_mode="r"))
        start = 2 + int(flat[0])
        stop = start + num_degrees
        packs = CachedPacks(flat[stop:], flat[2:start], int(flat[1]), flat[start:stop] if num_degrees else None)
        problem = _problem(packs, num_documents)
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
    return packs


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
    if order.min(initial=0) < 0:
        return "it has documents with numbers below 0"
    has = np.zeros(num_documents, dtype=bool)
    has[order] = True
    return None if has.sum() == len(order) else f"{len(order) - has.sum()} documents are in it twice"


def cache_packs(path: Path, packs: CachedPacks) -> bool:
    """Write packs for `read_cached_packs`, and delete those in the same folder that were unused for a week.

    Returns:
        Whether the file exists now.
    """
    degrees = np.zeros(0, np.int64) if packs.degrees is None else packs.degrees
    flat = np.concatenate([[len(packs.offsets), packs.num_skipped], packs.offsets, degrees, packs.order])
    is_cached = write_atomically(path, lambda file: np.save(file, flat, allow_pickle=False))
    for pattern, age in ((f"{PREFIX}-packs-*.npy", PACKS_LIFETIME), (f"{PREFIX}-*.tmp.*", TEMPORARY_LIFETIME)):
        for file in path.parent.glob(pattern):
            with contextlib.suppress(OSError):  # another rank was faster
                if time.time() - file.stat().st_mtime > age:
                    file.unlink()
    return is_cached
