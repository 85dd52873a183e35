"""Cache what is computed from a dataset, in files beside the dataset.

Before training, the tokenised table is read once to find its documents (`documents.py`), and the documents are planned
into packs (`epochs.py`). Both modules store their arrays here. A second start then reads no token before the first
batch, and all ranks of a node share one copy of the arrays.

What is cached: the spans of the documents with their counts, the range of the token ids, and the plans and schedules of
large datasets. Nothing is cached for a dataset without files, or if caching is disabled (`datasets.disable_caching()`).
Plans and schedules that were not used for a week are deleted.

Words:
    document    one training example: the tokens from `start` to `stop` of one row of the table (a span).
    pack        documents that pass through the model together.
    plan        which documents share a pack. A schedule says which pack belongs to which step and rank.
    trained     said of a token: its label is not -100.
    seal        a hash of the name and the content of a file, written at the end of the file.

A cache file is an Arrow file of named arrays, followed by its seal. If the seal does not match, because the disk lost
data or the file was copied under another name, the content is computed again. The file is memory-mapped, so that all
ranks of a node share one copy in memory. An existing file is never replaced: on network storage, a process that has
mapped the replaced file would be killed (SIGBUS). Only on a file system without hard links a rank may replace the file
that another rank has written at the same time.

Another version of this package or of its libraries may make other documents and plans of the same rows. So the name of
every cache file contains `PREPARATION_SOURCE_HASH` (`samples/row.py`), a hash of all files of the package and of the
versions of the libraries. `HashedMapFunction`, also there, puts it into the names of the files that `datasets` caches.
"""

import contextlib
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ..feature import PLAIN, Feature
from ..planning.packing import Overlong, TruncationMode
from ..samples.row import PREPARATION_SOURCE_HASH
from .documents import Documents, make_documents
from .reader import RowReader, TokenReader

logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]

PREFIX = "cache-packfix"
PACKS_PREFIX = f"{PREFIX}-packs"  # begins the names of the files of plans and schedules
SUFFIX = ".arrays"
PACKS_LIFETIME = 7 * 24 * 3600  # seconds after the last use until a file of plans or schedules is deleted
TEMPORARY_LIFETIME = 3600  # seconds after the last write until a temporary file is deleted
LONGEST_WAIT = 600  # seconds that a process waits for another process to make a file
SEAL_SIZE = hashlib.sha256().digest_size  # bytes at the end of a file

# The fingerprint of the documents
NUM_SAMPLED = 1000  # number of documents that are hashed with all their tokens
NUM_SAMPLED_TOKENS = 16  # number of tokens that are hashed of every document
DOCUMENTS_AT_ONCE = 2**16  # number of documents whose sampled tokens are in memory together


def cached_documents(
    reader: RowReader,
    max_length: int | None,
    overlong: Overlong = "truncate",
    *,
    truncation_mode: TruncationMode = "keep_start",
    cuts_blocks: bool = False,
    keep_untrained: bool = False,
    feature: Feature = PLAIN,
) -> Documents:
    """Return the documents of a table, from the cache if an earlier start has computed them with these settings.

    `make_documents` explains the other arguments.

    Args:
        feature: the feature of the run, such as shared prefixes (`feature.py`). It may sort the documents by their
            tokens, so that documents that begin alike are neighbours (`Documents.token_order`).
    """
    settings: dict[str, Any] = {
        "max_length": max_length,
        "overlong": overlong,
        "truncation_mode": truncation_mode,
        "cuts_blocks": cuts_blocks,
        "keep_untrained": keep_untrained,
    }

    def make_arrays() -> Arrays:
        documents = make_documents(reader, **settings)
        order = feature.sort_tokens(reader, documents)
        return replace(documents, fingerprint=_hash_documents(reader, documents), token_order=order).to_arrays()

    # `sort_tokens` returns None, except for a feature that plans several documents as one (`regroups`). So the name of
    # the file needs nothing of the feature but this flag
    file = _cache_file(reader, "spans", settings | {"sorts_tokens": feature.regroups})
    # The documents know their file, because plans are cached beside it
    return Documents.from_arrays(read_or_make(file, make_arrays), file)


def cached_token_range(reader: TokenReader) -> tuple[int, int]:
    """Return the smallest and the largest token id of a table, from the cache if an earlier start has found them."""
    arrays = read_or_make(_cache_file(reader, "range", {}), lambda: {"range": np.array(reader.token_range())})
    lowest, highest = arrays["range"].tolist()
    return lowest, highest


def cached_label_range(reader: TokenReader) -> tuple[int, int]:
    """Return the smallest and the largest label of a table, as `TokenReader.label_range`, from the cache if it can."""
    arrays = read_or_make(_cache_file(reader, "labels", {}), lambda: {"range": np.array(reader.label_range())})
    lowest, highest = arrays["range"].tolist()
    return lowest, highest


def _hash_documents(reader: RowReader, documents: Documents) -> str:
    """Return the fingerprint of the documents: two hashes, joined by "-".

    The first hash covers all spans, the number of trained tokens in each span, and the tokens and labels of 1,000
    evenly spaced documents. The second hash covers 16 evenly spaced tokens of every document. Checkpoints of earlier
    versions have only the first, so a restart compares the two separately. If rows have images, both hashes cover
    `RowReader.digests`, the hashes of the tokens and pixels of every row, in place of tokens and labels.
    """
    values_to_hash = [documents.row, documents.start, documents.stop, documents.trained]
    image_digests = reader.digests(documents.row)
    hash_of_all = hashlib.sha256(image_digests or b"")  # the second hash
    if image_digests is None:
        assert isinstance(reader, TokenReader)
        for i in np.linspace(0, len(documents) - 1, min(len(documents), NUM_SAMPLED)).astype(int):
            span = reader.read(documents.row[i], documents.start[i], documents.stop[i])
            values_to_hash += [span["input_ids"], span["labels"]]
        for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
            block = slice(first, first + DOCUMENTS_AT_ONCE)
            sampled_tokens = reader.read_spaced_tokens(
                documents.row[block], documents.start[block], documents.stop[block], num=NUM_SAMPLED_TOKENS
            )
            hash_of_all.update(sampled_tokens.data)
    hash_of_some = hashlib.sha256()  # the first hash
    for values in values_to_hash:
        hash_of_some.update(np.ascontiguousarray(values, dtype="<i8").data)
    hash_of_some.update(image_digests or b"")
    return f"{hash_of_some.hexdigest()}-{hash_of_all.hexdigest()}"


def _cache_file(reader: RowReader, name: str, settings: dict[str, Any]) -> Path | None:
    """Return the cache file for a result that is computed from the table with these settings.

    Returns:
        A path in the folder of the table, whether or not the file exists. None if nothing is cached.
    """
    files = reader.files
    if not files or not is_caching_enabled():
        return None
    # The fingerprint of a table does not change when its file is overwritten by hand, so sizes and times are in the
    # key. A tool that copies files may set the time of the last write (mtime), but not of the last change (ctime).
    stats = []
    for file in files:
        stat = file.stat()
        stats.append((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    # `default`: a `max_length` of numpy is written as a number of Python
    key = json.dumps([PREPARATION_SOURCE_HASH, reader.fingerprint, stats, settings], sort_keys=True, default=int)
    return files[0].parent / f"{PREFIX}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{SUFFIX}"


def read_or_make(file: Path | None, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays in a cache file. If the file is missing or damaged, call `make` and write its result there.

    One process of a node calls `make`, and the other processes wait for the file. If the folder cannot be written to,
    every process calls `make`.

    Args:
        file: the cache file, or None to call `make` without caching.
        make: computes the arrays.
    """
    if file is None:
        return make()
    cached = read_arrays(file)
    if cached is not None:
        return cached
    if not os.access(file.parent, os.W_OK):
        return make()
    with one_process_first(file):
        # Another process may have made the file while this process waited
        cached = read_arrays(file)
        if cached is not None:
            return cached
        arrays = make()
        write_arrays(file, arrays)
    # Read the file back, because mapped arrays are shared between processes
    cached = read_arrays(file)
    return arrays if cached is None else cached


def read_arrays(file: Path) -> Arrays | None:
    """Return the arrays in a cache file, memory-mapped.

    Returns:
        The arrays by name, or None if the file does not exist or is damaged. A damaged file is deleted.
    """
    try:
        content = np.memmap(file, np.uint8, "r")
        body = content[:-SEAL_SIZE]
        if _compute_seal(file, body) != content[-SEAL_SIZE:].tobytes():
            raise ValueError("it is not as it was written")
        batch = pa.ipc.open_file(pa.py_buffer(body)).get_batch(0)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s: %s) and is made again.", file, type(error).__name__, error)
        _remove_file(file)
        return None
    if file.name.startswith(PACKS_PREFIX):
        # Note the time of the last use. This fails on a file of another user, whose own runs set the time.
        with contextlib.suppress(OSError):
            os.utime(file)
    # Each column has one row, a list of the values of an array, see `write_arrays`
    return {name: column.values.to_numpy() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Write flat arrays of numbers to a cache file, and delete outdated cache files in the same folder."""
    # The columns of an Arrow file have equally many rows, and the arrays have different lengths. So each column has one
    # row: a list of all values of its array
    columns = [pa.LargeListArray.from_arrays([0, len(values)], pa.array(values)) for values in arrays.values()]
    batch = pa.RecordBatch.from_arrays(columns, names=list(arrays))

    def write(temporary: Path) -> None:
        with temporary.open("xb") as stream, pa.ipc.new_file(stream, batch.schema) as writer:
            writer.write(batch)
        seal = _compute_seal(file, np.memmap(temporary, np.uint8, "r"))
        with temporary.open("ab") as stream:
            stream.write(seal)

    write_atomically(file, write)
    for pattern, lifetime in ((f"{PACKS_PREFIX}-*", PACKS_LIFETIME), (f"{PREFIX}-*.tmp", TEMPORARY_LIFETIME)):
        for cache_file in file.parent.glob(pattern):
            with contextlib.suppress(OSError):  # another rank may delete the file at the same time
                if time.time() - cache_file.stat().st_mtime > lifetime:
                    cache_file.unlink()


def _compute_seal(file: Path, body: np.ndarray) -> bytes:
    """Return the hash of the name of a file and of its content."""
    digest = hashlib.sha256(file.name.encode())
    digest.update(body.data)
    return digest.digest()


def write_atomically(file: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with the path of a temporary file, then give the temporary file the name `file`.

    So no process ever reads a file that is half written. Several ranks may write the same file at once: the file of the
    first rank to finish stays. An error of the disk is logged, not raised, because training works without the cache.
    """
    if file.is_file():
        return
    # The name is random, so that a link with this name cannot be placed there in advance
    temporary = file.with_name(f"{PREFIX}-{secrets.token_hex(8)}.tmp")
    try:
        write(temporary)
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            temporary.replace(file)
    except OSError as error:  # such as a read-only disk
        logger.info("%s is not cached for the next start: %s", file.name, error)
    finally:
        _remove_file(temporary)


def _remove_file(file: Path) -> None:
    """Delete a file, if it exists and may be deleted."""
    with contextlib.suppress(OSError):
        file.unlink()


def lock_path(file: Path) -> Path:
    """Return the path of the lock for a cache file.

    The lock is in the temporary folder of the node, because not every network storage has locks.
    """
    name = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{PREFIX}-{os.getuid()}-{name}.lock"


@contextlib.contextmanager
def one_process_first(file: Path) -> Iterator[None]:
    """Run the block in one process of this node. The other processes wait for its end, then run the block together.

    The first process holds an exclusive lock, and the waiting processes then share the lock. The system releases a lock
    when its process ends, even if the process is killed. Where nothing can be locked, as on Windows, no process waits,
    and each runs the block.

    Args:
        file: the cache file that the block makes. Only processes with the same file wait for each other.
    """
    if fcntl is None:
        yield
        return
    path = lock_path(file)
    begin_time = time.monotonic()
    is_warned = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be locked
            lock = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            is_first = _try_lock(lock, fcntl.LOCK_EX)
            if is_first:
                # At the end of the block the path of the lock is removed before the lock is closed. A process that
                # waits has the open lock, and a process that comes later finds `file` and needs no lock
                stack.callback(_remove_file, path)
            while not (is_first or _try_lock(lock, fcntl.LOCK_SH)):
                waited = time.monotonic() - begin_time
                if waited > LONGEST_WAIT:
                    message = "%s was not made in %d s by the process that began it. It is made here."
                    logger.warning(message, file, waited)
                    break
                if waited > LONGEST_WAIT / 20 and not is_warned:
                    logger.warning("Waiting for another process, which makes %s.", file)
                    is_warned = True
                time.sleep(0.05)
        yield


def _try_lock(lock: int, kind: int) -> bool:
    """Return whether the lock, an open file, could be taken at once, as `fcntl.LOCK_EX` or `fcntl.LOCK_SH`."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
