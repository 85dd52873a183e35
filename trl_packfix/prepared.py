"""What one start leaves for the next: spans and token ranges, in small files beside the dataset.

`datasets` keeps what it tokenised next to the data and finds it again by a fingerprint. The same is done here with what
is computed from the tokens, so that a second start reads no token before the first batch. A dataset without files, or
with caching disabled (`datasets.disable_caching()`), leaves nothing behind.
"""

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import is_caching_enabled

from .documents import Documents, Ledger, Overlong, make_documents
from .reader import TokenReader

logger = logging.getLogger(__name__)

VERSION = 1  # to be raised when the same settings give other spans

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
        arrays = {name: getattr(documents, name) for name in ("row", "start", "stop", "trained", "block")}
        arrays["ledger"] = np.array(json.dumps(documents.ledger.to_dict()))
        return {name: values for name, values in arrays.items() if values is not None}

    arrays = _found_or_made(reader, "spans", settings, make)
    ledger = Ledger.from_dict(json.loads(str(arrays.pop("ledger"))))
    return Documents(ledger=ledger, **arrays)


def prepared_token_range(reader: TokenReader) -> tuple[int, int]:
    """`reader.token_range()`, or what an earlier start found in the same table."""
    low, high = _found_or_made(reader, "range", {}, lambda: {"range": np.array(reader.token_range())})["range"]
    return int(low), int(high)


def _found_or_made(reader: TokenReader, name: str, settings: dict[str, Any], make: Callable[[], Arrays]) -> Arrays:
    files = reader.files
    if not files or not is_caching_enabled():
        return make()
    # Sizes and times, too: a fingerprint does not see that a file was written again by hand.
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([VERSION, reader.fingerprint, stats, settings], sort_keys=True)
    path = files[0].parent / f"cache-packfix-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        with np.load(path) as found:
            return dict(found)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read (%s) and is made again.", path, error)
    arrays = make()
    _write(path, arrays)
    return arrays


def _write(path: Path, arrays: Arrays) -> None:
    """Whole or not at all: ranks of one job write the same file at the same time."""
    temporary = path.with_name(f"{path.stem}-{os.uname().nodename}-{os.getpid()}.tmp.npz")
    try:
        np.savez(temporary, allow_pickle=False, **arrays)
        os.replace(temporary, path)
    except OSError as error:  # a dataset on a read-only disk is none the worse for it
        logger.info("%s is not kept for the next start: %s", path.name, error)
        temporary.unlink(missing_ok=True)
