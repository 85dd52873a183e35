"""Load datasets by path or name: a file, a folder written by `save_to_disk` or `trl-packfix prepare`, or a hub name.

The commands call `load_rows` for DATA on the command line. `load_local` finds files and folders, and `load_named`
everything else. The checks refuse what cannot be read, with a message that says what to give.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

# A file of rows, by suffix, and its name for `load_dataset`. A .json or .csv file may hold lengths instead
# (`lengths.py`)
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# Suffixes of the files that may be given, as messages list them
SUFFIXES = ".jsonl, .json, .parquet, .csv (rows); .txt, .npy, .csv, .json (lengths)"


@contextmanager
def in_utf8(name: str) -> Iterator[None]:
    """Turn the error for text that is not UTF-8 into a ValueError that names the file, within this context.

    `datasets` decodes the text of a table only when its rows are read, so rows must be read within the context, too.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` was given. It has bytes that are no text in {error.encoding}: {error.reason} at "
            f"{error.object[error.start : error.start + 4]!r}. Convert it to UTF-8, for example with "
            "`iconv -f latin1 -t utf-8`."
        ) from error


def load_rows(name: str, split: str = "train", config: str | None = None, *, setting: str = "--split ") -> Dataset:
    """Return the rows of a file, a folder or a dataset on the hub.

    Args:
        name: a path, or a name on the hub.
        split: the split to return, of a dataset that has splits.
        config: the configuration of a dataset on the hub that has several.
        setting: what stands before the value of the split in messages: "--split " for a flag, "split: " for a key of a
            config file.

    Raises:
        ValueError: the dataset cannot be read, or has no such split.
    """
    dataset = load_local(name)
    if dataset is None:
        return load_named(name, name=config, split=split)
    if not isinstance(dataset, DatasetDict):
        check_split(name, split, setting)
        return dataset
    if split not in dataset:
        raise ValueError(
            f"`{name}` was given with `{setting}{split}`. It has only the splits {list(dataset)}. Set it to one of "
            "these."
        )
    return dataset[split]


def load_local(name: str, streaming: bool = False) -> Any:
    """Return the table of a file, or the table or the splits of a folder written by `save_to_disk`.

    For every other name the result is None.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(name)
    if any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        return _load_folder(name, streaming)
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


def _load_folder(name: str, streaming: bool) -> Any:
    """Return the table or the splits of a folder written by `save_to_disk`, as streams if `streaming` is set."""
    try:
        dataset = load_from_disk(name)
    except IndexError as error:  # a table without rows has no files of rows
        raise ValueError(
            f"`{name}` was given as a dataset. It has no rows, or one of its splits has none, and so it cannot be "
            "read. Write it again with rows, and without empty splits."
        ) from error

    def as_given(table: Dataset) -> Dataset | IterableDataset:
        """Return a table, or a stream of it, whose rows are Python objects, whatever `set_format` has set."""
        # A table without a format keeps its fingerprint
        rows = table if table.format["type"] is None else table.with_format(None)
        return rows.to_iterable_dataset() if streaming else rows

    if isinstance(dataset, Dataset):
        return as_given(dataset)
    splits = {split: as_given(table) for split, table in dataset.items()}
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def check_header(name: str, columns: Sequence[str]) -> None:
    """Refuse a CSV file in which two columns have one name."""
    repeated = next((column for i, column in enumerate(columns) if column in columns[:i]), None)
    if repeated is not None:
        raise ValueError(
            f"`{name}` was given, and {columns.count(repeated)} of its {len(columns)} columns have the name "
            f"{repeated!r}. One of them would be read under this name, and it is not known which is meant. Rename "
            "the others, or remove them."
        )


def check_paths(words: Iterable[str]) -> None:
    """Refuse DATA that does not exist. Commands call it before they import their other modules, which takes seconds.

    Args:
        words: the arguments of the command. DATA are the words before the first flag.
    """
    for name in takewhile(lambda word: not word.startswith("-"), words):
        check_path(name)


def check_path(path: str) -> None:
    """Refuse a path that does not exist and cannot be a name on the hub."""
    file = Path(path)
    has_suffix = file.suffix in (*FORMATS, ".txt", ".npy")
    is_path = has_suffix or file.is_absolute() or path[:1] in ".~" or path.count("/") > 1
    if is_path and not file.exists():
        raise ValueError(
            f"`{path}` was given as a dataset. There is no such file or folder here, and it cannot be a name on the "
            "hub. Give the path of a file or folder that exists, or the name of a dataset on the hub."
        )


def load_named(path: str, **settings: Any) -> Any:
    """Return the result of `load_dataset` for a dataset on the hub or a folder of files, with better errors.

    Args:
        settings: further arguments of `load_dataset`.

    Raises:
        ValueError: the dataset cannot be read.
    """
    check_path(path)
    try:
        return load_dataset(path, **settings)
    except (DatasetGenerationError, ValueError, OSError) as error:
        where = "Nothing here has this name, so it was looked for on the hub"
        if Path(path).is_dir():
            where = "It is a folder here"
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ValueError(
            f"`{path}` was given as a dataset. {where}, and it cannot be read: {reason}. Give a file, a folder written "
            "by `prepare` or `save_to_disk`, or the name, config and split of a dataset on the hub."
        ) from error


def check_split(name: str, split: str, setting: str = "--split ") -> None:
    """Refuse a split for a dataset that has no splits. "train" is the default, and stands for the whole table."""
    if split != "train":
        raise ValueError(
            f"`{setting}{split}` was given with `{name}`. It is one table and has no splits. Omit the split, and "
            "give the file of the split."
        )
