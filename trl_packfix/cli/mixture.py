"""A mixture of datasets: TRL's `datasets:`, and how often each is seen per epoch.

`repeat` decides which rows are in the table, not how packs are filled. Every row of the table is trained once per
epoch, so the ratio of the sources is exact, with any packing.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import trl
from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from trl.scripts.utils import DatasetConfig, get_dataset

from ..training.foreign_keys import hints
from .flags import did_you_mean
from .sources import FORMATS, is_saved, load_named, load_rows

ROW_BYTES = 80  # of memory for each row of a repeated dataset, measured with 20 million


@dataclass
class SourceConfig(DatasetConfig):
    """One entry of `datasets`: TRL's fields, and how often its rows are seen per epoch.

    Parameters:
        repeat (`float`, *optional*):
            With `repeat=2.5`, each row is in the table twice, and half of the rows once more: `round(0.5 * rows)` of
            them, drawn with the seed of the run, the same in every epoch. 0.5 keeps half of the rows. Unset: once.
    """

    repeat: float | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        """Which rows these are: two entries with the same value are the same dataset, listed twice."""
        path = str(Path(self.path).resolve()) if Path(self.path).exists() else self.path
        return path, str(self.name), str(self.data_dir), str(self.data_files), self.split

    def names(self) -> Iterator[str]:
        """Names for `source_column`, from the shortest on; the last one differs unless `rows` are the same.

        >>> list(SourceConfig("data/math/train.jsonl").names())
        ['train', 'math/train', 'data/math/train', 'data/math/train.jsonl:split=train']
        """
        file = Path(self.path)
        parts = file.with_suffix("").parts if file.suffix in FORMATS else (self.path,)
        config = () if self.name is None else (self.name,)
        for count in range(1, len(parts) + 1):
            yield "/".join((*parts[-count:], *config))
        others = {name: getattr(self, name) for name in ("name", "data_dir", "data_files", "split")}
        yield ":".join([self.path, *(f"{name}={value}" for name, value in others.items() if value is not None)])


@dataclass
class MixtureConfig(trl.DatasetMixtureConfig):
    """TRL's `DatasetMixtureConfig`, whose entries may have `repeat`."""

    datasets: list[SourceConfig] = field(  # type: ignore[assignment]  # narrower than TRL's
        default_factory=list,
        metadata={
            "help": "Datasets of the mixture, as a list in the config file; `repeat` sets how often each is seen."
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, list):
            raise ValueError(
                f"`datasets: {getattr(self.datasets, 'path', self.datasets)}` was given. A mixture is a list, also of "
                "one dataset. Write an entry `- path: ...` for each, or set `dataset_name` instead."
            )
        self.datasets = [_entry(entry) for entry in self.datasets]
        for source in self.datasets:
            if source.repeat is not None:
                self._check_repeat(source.repeat, source)
        if self.test_split_size is not None:
            self._check_listed_once()

    def _check_repeat(self, repeat: float, source: SourceConfig) -> None:
        if not (repeat > 0 and math.isfinite(repeat)):
            raise ValueError(
                f"`repeat: {repeat}` was given for the dataset `{source.path}`. It says how often a row is seen per "
                "epoch, so it is a number above 0. Set it to such a number (0.5 keeps half of the rows), or remove the "
                "dataset."
            )
        if self.streaming or source.fraction is not None:
            other = "`streaming: true`" if self.streaming else f"`fraction: {source.fraction}`"
            raise ValueError(
                f"`repeat: {repeat}` was given for the dataset `{source.path}`, with {other}. Rows are counted to "
                "repeat them, which a stream does not allow, and `fraction` sets the same ratio in another way. Remove "
                "one of the two."
            )

    def _check_listed_once(self) -> None:
        for rows, count in Counter(source.rows for source in self.datasets).items():
            if count > 1:
                path = next(entry.path for entry in self.datasets if entry.rows == rows)
                raise ValueError(
                    f"The dataset `{path}` is listed {count} times in `datasets`, and `test_split_size: "
                    f"{self.test_split_size}` was given. A test row of one entry would be trained as a row of another. "
                    f"List it once, with `repeat: {count}`, or remove `test_split_size`."
                )

    def labels(self) -> list[str]:
        """A name for each dataset, for `source_column`: the file's without suffix, or the path, and the config.

        As many folders are added as are needed so that different datasets have different names.
        """
        names = [list(source.names()) for source in self.datasets]
        labels = [source.pop(0) for source in names]
        while any(names):
            datasets_of = defaultdict(set)
            for label, source in zip(labels, self.datasets, strict=True):
                datasets_of[label].add(source.rows)
            shared = [i for i, label in enumerate(labels) if len(datasets_of[label]) > 1 and names[i]]
            if not shared:
                break
            for i in shared:
                labels[i] = names[i].pop(0)
        return labels


TYPES: dict[str, tuple[Any, str]] = {
    "path": (str, "a text"),
    "name": (str, "a text"),
    "split": (str, "a text"),
    "columns": (list, "a list of names, such as `[text, source]`"),
    "repeat": (int | float, "a number"),
    "fraction": (int | float, "a number"),
}


def _entry(entry: Any) -> SourceConfig:
    """One entry of `datasets`.

    Raises:
        ValueError: no mapping, an unknown key, no path, or a value of another type.
    """
    if isinstance(entry, DatasetConfig):
        return entry if isinstance(entry, SourceConfig) else SourceConfig(**vars(entry))
    if not isinstance(entry, dict):
        raise ValueError(
            f"`{entry}` was given as an entry of `datasets`. An entry is a mapping with a `path`. Write "
            f"`- path: {entry}`."
        )
    known = [setting.name for setting in fields(SourceConfig)]
    wrong = [str(name) for name in entry if name not in known]
    if wrong or "path" not in entry:
        problem = f"the unknown keys {', '.join(f'`{name}`' for name in wrong)}" if wrong else "no `path`"
        raise ValueError(
            f"An entry of `datasets` has {problem}: {entry}{did_you_mean(wrong, known)}. Without a path nothing can be "
            f"read, and an unknown key would be ignored.{hints(wrong)} The keys are {', '.join(known)}."
        )
    for name, (wanted, what) in TYPES.items():
        value = entry.get(name)
        if name in entry and not isinstance(value, wanted) and (value is not None or name in ("path", "split")):
            raise ValueError(
                f"`{name}: {value}` was given for the dataset `{entry['path']}`. It has the type "
                f"{type(value).__name__}, which `{name}` cannot be. Write {what}."
            )
    return SourceConfig(**entry)


def repeated(num_rows: int, repeat: float, rng: np.random.Generator) -> np.ndarray:
    """Indices of rows with each row `floor(repeat)` times, and `round` of the remaining share once more, in order.

    >>> repeated(4, 2.5, np.random.default_rng(0)).tolist()
    [0, 1, 2, 3, 0, 1, 2, 3, 2, 3]
    """
    whole = math.floor(repeat)
    rest = np.sort(rng.choice(num_rows, round((repeat - whole) * num_rows), replace=False))
    return np.concatenate([np.tile(np.arange(num_rows), whole), rest])


def load_mixture(mixture: MixtureConfig, seed: int, source_column: str | None = None) -> Any:
    """The splits of a mixture: "train", and "test" with `test_split_size`.

    The test rows are drawn before any row is repeated, so no test row is trained.

    Args:
        seed: of the test split and of the rows that are repeated once more; the same on all ranks.
        source_column: if a dataset has no such column, it is added with the name of the dataset.
    """
    if mixture.streaming:
        return get_dataset(mixture)
    labels = mixture.labels()
    parts = [
        _with_source(_load(source), label, source_column)
        for source, label in zip(mixture.datasets, labels, strict=True)
    ]
    fractions = [source.fraction for source in mixture.datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _in_fractions(parts, fractions)
    together = concatenate_datasets(parts)
    part_of_row = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows, test = np.arange(len(together)), None
    if mixture.test_split_size is not None:
        _check_test_size(mixture.test_split_size, len(rows))
        numbers = Dataset.from_dict({"row": rows}).train_test_split(mixture.test_split_size, seed=seed)
        rows, test = np.sort(np.array(numbers["train"]["row"])), np.array(numbers["test"]["row"])
    chosen = []
    for number, source in enumerate(mixture.datasets):
        own = rows[part_of_row[rows] == number]
        if source.repeat is not None:
            _check_rows(source, len(own))
            own = own[repeated(len(own), source.repeat, np.random.default_rng((seed, number)))]
        chosen.append(own)
        seen = "once" if source.repeat is None else f"{source.repeat:g} times"
        PartialState().print(f"{labels[number]}: {len(own):,} rows per epoch ({seen})")
    splits = {"train": together.select(np.concatenate(chosen))}
    if test is not None:
        splits["test"] = together.select(test)
    return DatasetDict(splits)


def _check_test_size(size: float, num_rows: int) -> None:
    if not (0 < size < 1 or (isinstance(size, int) and 1 <= size < num_rows)):
        raise ValueError(
            f"`test_split_size: {size}` was given with {num_rows:,} rows. It is a share of the rows, and both the "
            "training and the test split need some. Set it to a number between 0 and 1, or in the config file to a "
            "whole number of rows."
        )


def _check_rows(source: SourceConfig, num_rows: int) -> None:
    """Refuse a `repeat` that leaves no row, or more than memory holds: then the system would end the process."""
    assert source.repeat is not None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if source.repeat * num_rows * ROW_BYTES > memory:
        raise ValueError(
            f"`repeat: {source.repeat:g}` was given for the dataset `{source.path}` of {num_rows:,} rows. The numbers "
            f"of {source.repeat * num_rows:,.0f} rows per epoch take more than the {memory / 2**30:,.0f} GiB of this "
            f"machine. Set it to {memory / ROW_BYTES / num_rows:,.0f} or less, and `num_train_epochs` for how often "
            "all datasets are seen."
        )
    if num_rows and not math.floor(source.repeat) and not round(source.repeat * num_rows):
        raise ValueError(
            f"`repeat: {source.repeat:g}` was given for the dataset `{source.path}` of {num_rows:,} rows. That is less "
            f"than half a row, so none would be trained. Set it to {1 / num_rows:.2g} or more, or remove the dataset."
        )


def _load(source: SourceConfig) -> Dataset:
    path = Path(source.path)
    is_local = path.suffix in FORMATS or is_saved(path)
    if is_local and source.data_files is None and source.data_dir is None:
        dataset: Any = load_rows(source.path, source.split, setting="split: ")
    else:
        dataset = load_named(
            source.path, name=source.name, data_dir=source.data_dir, data_files=source.data_files, split=source.split
        )
    assert not isinstance(dataset, IterableDataset)
    missing = [name for name in source.columns or () if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"`columns: {source.columns}` was given for the dataset `{source.path}`, which has the columns "
            f"{dataset.column_names}{did_you_mean(missing, dataset.column_names)}. Columns that do not exist cannot be "
            "selected. List those to keep, or remove `columns`."
        )
    return dataset if source.columns is None else dataset.select_columns(source.columns)


def _with_source(dataset: Dataset, label: str, column: str | None) -> Dataset:
    if column is None or column in dataset.column_names:
        return dataset
    return dataset.add_column(column, [label] * len(dataset))


def _in_fractions(parts: list[Dataset], fractions: list[float | None]) -> list[Dataset]:
    """The first rows of each part, as many as TRL takes for these fractions: no dataset is oversampled."""
    known = [fraction for fraction in fractions if fraction is not None]
    if len(known) < len(parts):
        raise ValueError(
            f"`fraction` was given for {len(known)} of {len(parts)} datasets. It is a share of the mixture, so all "
            "datasets need one. Set it for each, or use `repeat`, which may be left out."
        )
    shares = [fraction / sum(known) for fraction in known]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
