"""What one start leaves for the next: spans and token ranges, in small files beside the dataset.

`datasets` keeps what it tokenised next to the data and finds it again by a fingerprint. The same is done here with what
is computed from the tokens, so that a second start reads no token before the first batch. A dataset without files, or
with caching disabled (`datasets.disable_caching()`), leaves nothing behind.
"""

import hashlib
import json
import logging
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import is_caching_enabled

from .cache_files import PREFIX, read_arrays, remove, write_whole
from .documents import Documents
from .reader import TokenReader
from .spans import Overlong, make_documents

logger = logging.getLogger(__name__)

VERSION = 2  # to be raised when the same settings give other spans, or files of another form
NUM_SAMPLED = 1000  # documents whose tokens enter the fingerprint

Arrays = dict[str, np.ndarray]


def prepared_documents(
    reader: TokenReader,
    max_length: int | None,
    overlong: Overlong = "truncate",
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start",
    wrapped: bool = False,
    keep_untrained: bool = False,
) -> Documents:
    """`make_documents` with the same arguments, or what an earlier start made of the same table with them."""
    settings: dict[str, Any] = {
        "max_length": max_length,
        "overlong": overlong,
        "truncation_mode": truncation_mode,
        "wrapped": wrapped,
        "keep_untrained": keep_untrained,
    }

    def make() -> Arrays:
        documents = make_documents(reader, **settings)
        return replace(documents, fingerprint=_fingerprint(reader, documents)).to_arrays()

    arrays, file = _found_or_made(reader, "spans", settings, make)
    return Documents.from_arrays(arrays, file)


def prepared_token_range(reader: TokenReader) -> tuple[int, int]:
    """`reader.token_range()`, or what an earlier start found in the same table."""
    low, high = _found_or_made(reader, "range", {}, lambda: {"range": np.array(reader.token_range())})[0]["range"]
    return int(low), int(high)


def _fingerprint(reader: TokenReader, documents: Documents) -> str:
    """Hash of all spans, of the number of trained tokens in each, and of the tokens of 1000 evenly spaced documents."""
    digest = hashlib.sha256()

    def add(values: np.ndarray) -> None:
        digest.update(np.ascontiguousarray(values, dtype="<i8").data)

    for values in (documents.row, documents.start, documents.stop, documents.trained):
        add(values)
    for i in np.linspace(0, len(documents) - 1, min(len(documents), NUM_SAMPLED)).astype(int):
        span = reader.read(documents.row[i], documents.start[i], documents.stop[i])
        add(span["input_ids"])
        add(span["labels"])
    return digest.hexdigest()


def _found_or_made(
    reader: TokenReader, name: str, settings: dict[str, Any], make: Callable[[], Arrays]
) -> tuple[Arrays, Path | None]:
    """The arrays, and the file that has them."""
    files = reader.files
    if not files or not is_caching_enabled():
        return make(), None
    # Sizes and times, too: a fingerprint does not see that a file was written again by hand.
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([VERSION, reader.fingerprint, stats, settings], sort_keys=True)
    path = files[0].parent / f"{PREFIX}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        return read_arrays(path), path
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read (%s) and is made again.", path, error)
        remove(path)
    arrays = make()
    is_kept = write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    return arrays, path if is_kept else None
