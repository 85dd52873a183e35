"""Datasets by path or name: files, folders of `save_to_disk` or `trl-packfix prepare`, and the hub."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES = ".jsonl, .json, .parquet, .csv (rows); .txt, .npy, .csv, .json (lengths)"


@contextmanager
def in_utf8(name: str) -> Iterator[None]:
    """Name the file, or the files, whose text is not UTF-8. Text of a table is decoded when its rows are read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` was given. It has bytes that are no text in {error.encoding}: {error.reason} at "
            f"{error.object[error.start : error.start + 4]!r}. Convert it to UTF-8, for example with "
            "`iconv -f latin1 -t utf-8`."
        ) from error


def load_rows(name: str, split: str = "train", config: str | None = None, *, setting: str = "--split ") -> Dataset:
    """The rows of a file, a folder or a dataset on the hub; messages name the split by `setting`."""
    found = load_local(name)
    if found is None:
        return load_named(name, name=config, split=split)
    if not isinstance(found, DatasetDict):
        check_split(name, split, setting)
        return found
    if split not in found:
        raise ValueError(
            f"`{name}` was given with `{setting}{split}`. It has only the splits {list(found)}. Set it to one of these."
        )
    return found[split]


def load_local(name: str, streaming: bool = False) -> Any:
    """The table of a file, the table or the splits of a folder written by `save_to_disk`; None for other names."""
    path = Path(name)
    if any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        return load_from_disk(name)
    if not path.is_file():
        return None
    if path.suffix not in FORMATS:
        raise ValueError(
            f"`{name}` was given as a dataset. Files named {path.suffix or 'without a suffix'} are not supported. "
            f"Give one of {SUFFIXES}, a folder written by `save_to_disk`, or a name on the hub."
        )
    if path.suffix == ".csv":
        with in_utf8(name), path.open(newline="", encoding="utf-8-sig") as file:
            check_header(name, next(csv.reader(file), []))
    try:
        return load_dataset(FORMATS[path.suffix], data_files=name, split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError, StopIteration) as error:
        # A StopIteration without a message means that `datasets` found no first row.
        reason = (str(error.__cause__ or error) or "it holds no rows").splitlines()[0].rstrip(".")
        raise ValueError(
            f"`{name}` was given as a dataset of {path.stat().st_size} bytes. It cannot be read: {reason}. Correct "
            "it, or write it again; often writing it was interrupted."
        ) from error


def check_header(name: str, columns: Sequence[str]) -> None:
    """Refuse a CSV file in which two columns have the same name."""
    twice = next((column for i, column in enumerate(columns) if column in columns[:i]), None)
    if twice is not None:
        raise ValueError(
            f"`{name}` was given, and {columns.count(twice)} of its {len(columns)} columns have the name {twice!r}. "
            "One of them would be read under this name, and it is not known which is meant. Rename the others, or "
            "remove them."
        )


def check_paths(words: Iterable[str]) -> None:
    """Refuse DATA that is not there, of the words before the first flag: before slower libraries are imported."""
    for name in takewhile(lambda word: not word.startswith("-"), words):
        check_path(name)


def check_path(path: str) -> None:
    """Refuse a path that does not exist and cannot be a name on the hub."""
    here = Path(path)
    is_path = here.suffix in (*FORMATS, ".txt", ".npy") or here.is_absolute() or path[:1] in ".~" or path.count("/") > 1
    if is_path and not here.exists():
        raise ValueError(
            f"`{path}` was given as a dataset. There is no such file or folder here, and it cannot be a name on the "
            "hub. Give the path of a file or folder that exists, or the name of a dataset on the hub."
        )


def load_named(path: str, **settings: Any) -> Any:
    """What `load_dataset` finds by this name, on the hub or as a folder of files, with these arguments."""
    check_path(path)
    try:
        return load_dataset(path, **settings)
    except (DatasetGenerationError, ValueError, OSError) as error:
        where = "Nothing here has this name, so it was looked for on the hub"
        where = "It is a folder here" if Path(path).is_dir() else where
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ValueError(
            f"`{path}` was given as a dataset. {where}, and it cannot be read: {reason}. Give a file, a folder written "
            "by `prepare` or `save_to_disk`, or the name, config and split of a dataset on the hub."
        ) from error


def check_split(name: str, split: str, setting: str = "--split ") -> None:
    """Refuse a split of a dataset that has none; "train" is the default."""
    if split != "train":
        raise ValueError(
            f"`{setting}{split}` was given with `{name}`. It is one table and has no splits. Omit the split, and "
            "give the file of the split."
        )
