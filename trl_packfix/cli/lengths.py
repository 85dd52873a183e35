"""Read files of lengths: documents of which only the number of tokens is known.

`plan` and `show` need no more than lengths to plan packs. `read_lengths` reads a file, and `LengthRows` presents the
lengths like a table of tokens (a `RowReader`), in which every token is 0.
"""

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

MAX_LENGTH = 2**31 - 1  # the most tokens of a row: an Arrow table holds no longer list


@dataclass(frozen=True)
class LengthRows(RowReader):
    """Rows of which only the lengths are known. Every token counts as trained.

    Attributes:
        lengths: tokens of each row, (N,) for N rows.
        files: the files of the table. A planner writes its caches into their folder; without files nothing is cached.
    """

    lengths: Int64Array

    files: ClassVar[list[Path]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def bad_rows(self) -> BoolArray:
        return np.zeros(len(self), dtype=bool)  # would mark rows that could not be tokenised

    def digests(self, rows: Int64Array) -> bytes:
        return b""  # would be hashes of the tokens of rows, and there are no tokens

    def count_labels(self, row: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
        return stop - start

    def read(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        return dict.fromkeys(("input_ids", "labels"), np.zeros(stop - start, np.int64))


def read_lengths(path: Path) -> Int64Array | None:
    """Return the lengths in a file of lengths, (N,), in tokens; None for every other file.

    A file of lengths is `.npy` with one array, `.txt` with numbers separated by whitespace, `.json` with a list of
    numbers, or `.csv` with a column named `length` or `lengths`, or with one column of numbers without a name.

    Raises:
        ValueError: it is a file of lengths, and holds something else than lengths.
    """
    values = _read_values(path) if path.is_file() else None
    if values is None:
        return None
    try:
        lengths = np.asarray(values)
        if lengths.dtype.kind not in "iu":
            # Texts of whole numbers become numbers; the text of a float such as "1.5" is refused
            lengths = lengths.astype(np.str_).astype(np.int64)
    except (ValueError, OverflowError):
        # The values are not numbers, or above int64. This empty array is refused below, as any other bad value.
        lengths = np.zeros((0, 0))
    if lengths.ndim == 1 and len(lengths) and lengths.max() > MAX_LENGTH:
        raise ValueError(
            f"`{path}` was given as a file of lengths, and document {lengths.argmax()} has {lengths.max():,} tokens. "
            f"A row of a table holds {MAX_LENGTH:,} at most. Check that the numbers count tokens, one for each "
            "document."
        )
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise ValueError(
            f"`{path}` was given as a file of lengths. A length is a whole number of tokens from 1 to {MAX_LENGTH:,}, "
            "and the file has other values or none. Write one number per line (.txt), a one-dimensional array of "
            "integers (.npy), a list (.json) or a column named `length` (.csv)."
        )
    return lengths.astype(np.int64)


def _read_values(path: Path) -> Any:
    """Return the values in a file of lengths, which may still be texts; None if the file is a dataset or unknown."""
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
            return None  # `datasets` reports the error in the JSON
        # A list of dictionaries, and an empty list, are left to `datasets`
        return values if values and not isinstance(values[0], dict) else None
    if path.suffix != ".csv":
        return None
    csv.field_size_limit(2**31 - 1)  # the most characters of a field: other columns may have long texts
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = filter(None, csv.reader(file))
        names = [name.strip() for name in next(rows, [])]
        if len(names) == 1 and names[0].isdigit():  # the column has no name: the first line is a number, too
            return [*names, *(row[0] for row in rows)]
        check_header(str(path), names)  # refuses two columns of one name
        column = next((i for i, name in enumerate(names) if name in ("length", "lengths")), None)
        if column is None:
            return None
        unread_names = names[:column] + names[column + 1 :]
        if unread_names:
            logger.warning(
                f"{path}: lengths are read from its column {names[column]!r}; the other columns "
                f"({', '.join(unread_names)}) are not read. To tokenise its rows instead, rename that column."
            )
        # A row that is too short gets "", which `read_lengths` refuses because it is no number
        return [row[column] if column < len(row) else "" for row in rows]
