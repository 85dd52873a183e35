"""Cache files beside the dataset, written atomically. Plans and schedules unused for a week are deleted.

A second start reads no token before the first batch. Nothing is cached for a dataset without files, or with caching
disabled (`datasets.disable_caching()`).

Every cache of this package depends on its code and on that of its libraries: another version may cut, measure, plan or
estimate differently. So `PREPARATION_SOURCE_HASH` (`samples/row.py`), a hash of all files of the package and of the
versions of these libraries, is part of every file name, also of those that `datasets` makes (`HashedMapFunction`).

A file holds named arrays as an Arrow file, and behind them a hash of its name and content: what a disk lost, or what
was copied under another name, is made again. It is memory-mapped, so all ranks of a node share one copy in memory. An
existing file is never replaced: on network storage, a process that has mapped the replaced file would be killed.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import is_caching_enabled

from ..samples.row import PREPARATION_SOURCE_HASH
from .documents import Documents, Overlong, TruncationMode, make_documents, token_order
from .image_rows import ImageRows
from .reader import RowReader, TokenReader

logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]

PREFIX = "cache-packfix"
PACKS = f"{PREFIX}-packs"
SUFFIX = ".arrays"
PACKS_LIFETIME = 7 * 24 * 3600  # seconds after the last use until cached packs are deleted
TEMPORARY_LIFETIME = 3600  # seconds after the last write until a temporary file is deleted
LONGEST_WAIT = 600  # seconds for another process of the node that makes a file
NUM_SEALED = hashlib.sha256().digest_size  # bytes
NUM_SAMPLED = 1000  # documents of which all tokens enter the fingerprint
NUM_OF_DOCUMENT = 16  # tokens of every document that enter it
SAMPLED_AT_ONCE = 2**16  # documents, in memory


def cached_documents(
    reader: RowReader,
    max_length: int | None,
    overlong: Overlong = "truncate",
    *,
    truncation_mode: TruncationMode = "keep_start",
    wrapped: bool = False,
    keep_untrained: bool = False,
    sorts_tokens: bool = False,
) -> Documents:
    """`make_documents`, with `sorts_tokens` also sorted by their tokens; or its result from an earlier start."""
    settings: dict[str, Any] = {"max_length": max_length, "overlong": overlong, "truncation_mode": truncation_mode}
    settings |= {"wrapped": wrapped, "keep_untrained": keep_untrained}

    def make() -> Arrays:
        documents = make_documents(reader, **settings)
        tokens = None
        if sorts_tokens:
            assert isinstance(reader, TokenReader | ImageRows)
            tokens = token_order(reader, documents)
        return replace(documents, fingerprint=_hash_documents(reader, documents), tokens=tokens).to_arrays()

    file = _cache_file(reader, "spans", settings | ({"sorts_tokens": True} if sorts_tokens else {}))
    return Documents.from_arrays(read_or_make(file, make), file)


def cached_token_range(reader: TokenReader) -> tuple[int, int]:
    arrays = read_or_make(_cache_file(reader, "range", {}), lambda: {"range": np.array(reader.token_range())})
    lowest, highest = arrays["range"].tolist()
    return lowest, highest


def _hash_documents(reader: RowReader, documents: Documents) -> str:
    """Two hashes, joined by "-".

    The first is of all spans, of the number of trained tokens in each, and of the tokens of 1,000 evenly spaced
    documents. The second is of 16 evenly spaced tokens of every document. Of images both have all pixels.
    """
    hashed = [documents.row, documents.start, documents.stop, documents.trained]
    hashes = reader.digests(documents.row)  # those with images are not read again
    samples = hashlib.sha256(hashes or b"")
    if hashes is None:
        assert isinstance(reader, TokenReader)
        for i in np.linspace(0, len(documents) - 1, min(len(documents), NUM_SAMPLED)).astype(int):
            span = reader.read(documents.row[i], documents.start[i], documents.stop[i])
            hashed += [span["input_ids"], span["labels"]]
        for first in range(0, len(documents), SAMPLED_AT_ONCE):
            part = slice(first, first + SAMPLED_AT_ONCE)
            columns = documents.row[part], documents.start[part], documents.stop[part]
            samples.update(reader.read_evenly(*columns, num=NUM_OF_DOCUMENT).data)
    digest = hashlib.sha256()
    for values in hashed:
        digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    digest.update(hashes or b"")
    return f"{digest.hexdigest()}-{samples.hexdigest()}"


def _cache_file(reader: RowReader, name: str, settings: dict[str, Any]) -> Path | None:
    """The file for what is made of the table with these settings; None if nothing is cached."""
    files = reader.files
    if not files or not is_caching_enabled():
        return None
    # Sizes and times are part of the key: the fingerprint does not change when a file is overwritten by hand. A tool
    # that copies may set the time of the last write (mtime), but not that of the last change (ctime).
    found = [(file.name, file.stat()) for file in files]
    stats = [(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in found]
    key = json.dumps([PREPARATION_SOURCE_HASH, reader.fingerprint, stats, settings], sort_keys=True)
    return files[0].parent / f"{PREFIX}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{SUFFIX}"


def read_or_make(file: Path | None, make: Callable[[], Arrays]) -> Arrays:
    """The arrays in the file; if it does not exist or is damaged, what `make` makes, which is written there.

    One process of a node makes it, and the others wait. Where it cannot be written, each process makes its own.
    """
    if file is None:
        return make()
    if (cached := read_arrays(file)) is not None:
        return cached
    if not os.access(file.parent, os.W_OK):
        return make()
    with one_first(file):
        if (cached := read_arrays(file)) is not None:  # another process was first
            return cached
        arrays = make()
        write_arrays(file, arrays)
    cached = read_arrays(file)  # mapped
    return arrays if cached is None else cached


def read_arrays(file: Path) -> Arrays | None:
    """The arrays in the file, mapped; None if it does not exist, or is damaged and now deleted."""
    try:
        content = np.memmap(file, np.uint8, "r")
        body = content[:-NUM_SEALED]
        if _compute_seal(file, body) != content[-NUM_SEALED:].tobytes():
            raise ValueError("it is not as it was written")
        batch = pa.ipc.open_file(pa.py_buffer(body)).get_batch(0)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s: %s) and is made again.", file, type(error).__name__, error)
        _remove_file(file)
        return None
    if file.name.startswith(PACKS):
        with contextlib.suppress(OSError):  # another user's file: that user's runs set its time
            os.utime(file)  # the time of the last use
    return {name: column.values.to_numpy() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Write flat arrays of numbers, and delete old packs in the same folder."""
    columns = [pa.LargeListArray.from_arrays([0, len(values)], pa.array(values)) for values in arrays.values()]
    batch = pa.RecordBatch.from_arrays(columns, names=list(arrays))

    def write(temporary: Path) -> None:
        with temporary.open("xb") as stream, pa.ipc.new_file(stream, batch.schema) as writer:
            writer.write(batch)
        seal = _compute_seal(file, np.memmap(temporary, np.uint8, "r"))
        with temporary.open("ab") as stream:
            stream.write(seal)

    write_atomically(file, write)
    for pattern, age in ((f"{PACKS}-*", PACKS_LIFETIME), (f"{PREFIX}-*.tmp", TEMPORARY_LIFETIME)):
        for old in file.parent.glob(pattern):
            with contextlib.suppress(OSError):  # another rank was faster
                if time.time() - old.stat().st_mtime > age:
                    old.unlink()


def _compute_seal(file: Path, body: np.ndarray) -> bytes:
    digest = hashlib.sha256(file.name.encode())
    digest.update(body.data)
    return digest.digest()


def write_atomically(file: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with the name of a new file, then give that file the name `file`.

    Several ranks may write the same file at once. The first one to finish wins.
    """
    if file.is_file():
        return
    temporary = file.with_name(f"{PREFIX}-{secrets.token_hex(8)}.tmp")  # nobody can place a link there
    try:
        write(temporary)
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            temporary.replace(file)
    except OSError as error:  # e.g. a read-only disk: training works without the cache
        logger.info("%s is not cached for the next start: %s", file.name, error)
    finally:
        _remove_file(temporary)


def _remove_file(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def lock_of(file: Path) -> Path:
    """In the temporary folder, because not every network storage has locks."""
    name = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{PREFIX}-{os.getuid()}-{name}.lock"


@contextlib.contextmanager
def one_first(file: Path) -> Iterator[None]:
    """Run the block in one process of this node first, for the same `file`; the others wait, then run it at once.

    The system unlocks when a process ends, however it does. Where nothing can be locked, no process waits.
    """
    path = lock_of(file)
    start = time.monotonic()
    is_said = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            is_first = _try_lock(lock, fcntl.LOCK_EX)
            if is_first:
                stack.callback(_remove_file, path)  # who comes later finds `file`
            while not (is_first or _try_lock(lock, fcntl.LOCK_SH)):
                waited = time.monotonic() - start
                if waited > LONGEST_WAIT:
                    message = "%s was not made in %d s by the process that began it. It is made here."
                    logger.warning(message, file, waited)
                    break
                if waited > LONGEST_WAIT / 20 and not is_said:
                    logger.warning("Waiting for another process, which makes %s.", file)
                    is_said = True
                time.sleep(0.05)
        yield


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
