"""Cache spans of documents and ranges of token ids, in small files beside the dataset.

A second start reads no token before the first batch. Nothing is cached for a dataset without files, or with caching
disabled (`datasets.disable_caching()`).
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import is_caching_enabled

from ..samples.row import CODE
from .cache_files import PREFIX, SUFFIX, Arrays, read_or_make
from .documents import Documents, Overlong, make_documents, token_order
from .image_rows import ImageRows
from .reader import Rows, TokenReader

NUM_SAMPLED = 1000  # documents whose tokens enter the fingerprint


def cached_documents(
    reader: Rows,
    max_length: int | None,
    overlong: Overlong = "truncate",
    *,
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start",
    wrapped: bool = False,
    keep_untrained: bool = False,
    sorts_tokens: bool = False,
) -> Documents:
    """`make_documents`, with `sorts_tokens` also sorted by their tokens; or its result from an earlier start."""
    settings: dict[str, Any] = {"max_length": max_length, "overlong": overlong, "truncation_mode": truncation_mode}
    settings |= {"wrapped": wrapped, "keep_untrained": keep_untrained}

    def make() -> Arrays:
        documents, tokens = make_documents(reader, **settings), None
        if sorts_tokens:
            assert isinstance(reader, TokenReader | ImageRows)
            tokens = token_order(reader, documents)
        return replace(documents, fingerprint=_fingerprint(reader, documents), tokens=tokens).to_arrays()

    file = _file(reader, "spans", settings | ({"sorts_tokens": True} if sorts_tokens else {}))
    return Documents.from_arrays(read_or_make(file, make), file)


def cached_token_range(reader: TokenReader) -> tuple[int, int]:
    arrays = read_or_make(_file(reader, "range", {}), lambda: {"range": np.array(reader.token_range())})
    lowest, highest = arrays["range"].tolist()
    return lowest, highest


def _fingerprint(reader: Rows, documents: Documents) -> str:
    """Hash of all spans, of the number of trained tokens in each, and of the tokens of 1000 evenly spaced documents."""
    hashed = [documents.row, documents.start, documents.stop, documents.trained]
    hashes = reader.digests(documents.row)  # those with images are not read again
    if hashes is None:
        for i in np.linspace(0, len(documents) - 1, min(len(documents), NUM_SAMPLED)).astype(int):
            span = reader.read(documents.row[i], documents.start[i], documents.stop[i])
            hashed += [span["input_ids"], span["labels"]]
    digest = hashlib.sha256()
    for values in hashed:
        digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    digest.update(hashes or b"")
    return digest.hexdigest()


def _file(reader: Rows, name: str, settings: dict[str, Any]) -> Path | None:
    """The file for what is made of the table with these settings; None if nothing is cached."""
    files = reader.files
    if not files or not is_caching_enabled():
        return None
    # Sizes and times are part of the key: the fingerprint does not change when a file is overwritten by hand.
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([CODE, reader.fingerprint, stats, settings], sort_keys=True)
    return files[0].parent / f"{PREFIX}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{SUFFIX}"
