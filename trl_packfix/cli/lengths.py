"""Files of lengths: documents of which only the number of tokens is known."""

import csv
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..data.reader import RowReader
from ..planning.arrays import BoolArray, Int64Array
from .sources import check_header

logger = logging.getLogger(__name__)

LONGEST = 2**31 - 1  # tokens of a row: the largest list of an Arrow table


@dataclass(frozen=True)
class LengthRows(RowReader):
    """Rows of which only the lengths are known. Every token has a label."""

    lengths: Int64Array  # of each row, shape (R,)

    files: ClassVar[list[Path]] = []  # nothing is cached beside them

    def __len__(self) -> int:
        return len(self.lengths)

    def bad_rows(self) -> BoolArray:
        return np.zeros(len(self), dtype=bool)

    def digests(self, rows: Int64Array) -> bytes:
        return b""  # there are no tokens

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        return stop - start

    def read(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        return dict.fromkeys(("input_ids", "labels"), np.zeros(stop - start, np.int64))


def read_lengths(path: Path) -> Int64Array | None:
    """Lengths in tokens, shape (N,), from a file of lengths; None for another file.

    A file of lengths is `.npy` with one array, `.txt` with one number per line, `.json` with a list of numbers, or
    `.csv` with a column named `length` or `lengths` or with one column of numbers without a name.
    """
    values = _read_values(path) if path.is_file() else None
    if values is None:
        return None
    try:
        lengths = np.asarray(values)
        if lengths.dtype.kind not in "iu":
            lengths = lengths.astype(np.str_).astype(np.int64)
    except (ValueError, OverflowError):  # not numbers, or above int64
        lengths = np.zeros((0, 0))
    if lengths.ndim == 1 and len(lengths) and lengths.max() > LONGEST:
        raise ValueError(
            f"`{path}` was given as a file of lengths, and document {lengths.argmax()} has {lengths.max():,} tokens. "
            f"A row of a table holds {LONGEST:,} at most. Check that the numbers count tokens, one for each document."
        )
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise ValueError(
            f"`{path}` was given as a file of lengths. A length is a whole number of tokens from 1 to {LONGEST:,}, and "
            "the file has other values or none. Write one number per line (.txt), a one-dimensional array of integers "
            "(.npy), a list (.json) or a column named `length` (.csv)."
        )
    return lengths.astype(np.int64)


def _read_values(path: Path) -> Any:
    if path.suffix == ".txt":
        return path.read_text().split()
    if path.suffix == ".npy":
        try:
            return np.load(path)
        except (EOFError, ValueError):  # not an array of numbers, or an empty file
            return []
    if path.suffix == ".json":
        text = path.read_text()
        try:
            values = json.loads(text) if text.lstrip()[:1] == "[" else None
        except ValueError:
            return None  # broken JSON: `datasets` reports the error
        return values if values and not isinstance(values[0], dict) else None
    if path.suffix != ".csv":
        return None
    csv.field_size_limit(LONGEST)  # of the texts beside the lengths
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = filter(None, csv.reader(file))
        names = [name.strip() for name in next(rows, [])]
        if len(names) == 1 and names[0].isdigit():
            return [*names, *(row[0] for row in rows)]
        check_header(str(path), names)
        column = next((i for i, name in enumerate(names) if name in ("length", "lengths")), None)
        if column is None:
            return None
        others = names[:column] + names[column + 1 :]
        if others:
            logger.warning(
                f"{path}: lengths are read from its column {names[column]!r}; the other columns "
                f"({', '.join(others)}) are not read. To tokenise its rows instead, rename that column."
            )
        return [row[column] if column < len(row) else "" for row in rows]
