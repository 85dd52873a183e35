"""A mixture of datasets: TRL's `datasets:`, and how often each is seen per epoch.

`repeat` decides which rows are in the table, not how packs are filled. Every row of the table is trained once per
epoch, so the ratio of the sources is exact, with any packing.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trl
from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets, load_dataset
from trl.scripts.utils import DatasetConfig, get_dataset

from .sources import FORMATS, load_rows


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
    def label(self) -> str:
        """The name of this source for `source_column`: the file's without suffix, or the path, and the config."""
        path = Path(self.path).stem if Path(self.path).suffix in FORMATS else self.path
        return path if self.name is None else f"{path}/{self.name}"


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
        self.datasets = [SourceConfig(**each) if isinstance(each, dict) else each for each in self.datasets]
        for each in self.datasets:
            if each.repeat is not None and not (each.repeat > 0 and math.isfinite(each.repeat)):
                raise ValueError(
                    f"`repeat: {each.repeat}` was given for the dataset `{each.path}`. It says how often a row is seen "
                    "per epoch, so it is a number above 0. Set it to such a number (0.5 keeps half of the rows), or "
                    "remove the dataset."
                )
            if each.repeat is not None and (self.streaming or each.fraction is not None):
                other = "`streaming: true`" if self.streaming else f"`fraction: {each.fraction}`"
                raise ValueError(
                    f"`repeat: {each.repeat}` was given for the dataset `{each.path}`, with {other}. Rows are counted "
                    "to repeat them, which a stream does not allow, and `fraction` sets the same ratio in another way. "
                    "Remove one of the two."
                )


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
    parts = [_with_source(_load(each), each, source_column) for each in mixture.datasets]
    fractions = [each.fraction for each in mixture.datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _in_fractions(parts, fractions)
    together = concatenate_datasets(parts)
    part_of_row = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows, test = np.arange(len(together)), None
    if mixture.test_split_size is not None:
        numbers = Dataset.from_dict({"row": rows}).train_test_split(mixture.test_split_size, seed=seed)
        rows, test = np.sort(np.array(numbers["train"]["row"])), np.array(numbers["test"]["row"])
    chosen = []
    for number, each in enumerate(mixture.datasets):
        own = rows[part_of_row[rows] == number]
        if each.repeat is not None:
            own = own[repeated(len(own), each.repeat, np.random.default_rng((seed, number)))]
        chosen.append(own)
        seen = "once" if each.repeat is None else f"{each.repeat:g} times"
        PartialState().print(f"{each.label}: {len(own):,} rows per epoch ({seen})")
    splits = {"train": together.select(np.concatenate(chosen))}
    if test is not None:
        splits["test"] = together.select(test)
    return DatasetDict(splits)


def _load(each: SourceConfig) -> Dataset:
    path = Path(each.path)
    is_local = path.suffix in FORMATS or any(
        (path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")
    )
    if is_local and each.data_files is None and each.data_dir is None:
        dataset: Any = load_rows(each.path, each.split)
    else:
        dataset = load_dataset(
            each.path, each.name, data_dir=each.data_dir, data_files=each.data_files, split=each.split
        )
    assert not isinstance(dataset, IterableDataset)
    return dataset if each.columns is None else dataset.select_columns(each.columns)


def _with_source(dataset: Dataset, each: SourceConfig, column: str | None) -> Dataset:
    if column is None or column in dataset.column_names:
        return dataset
    return dataset.add_column(column, [each.label] * len(dataset))


def _in_fractions(parts: list[Dataset], fractions: list[float | None]) -> list[Dataset]:
    """The first rows of each part, as many as TRL takes for these fractions: no dataset is oversampled."""
    given = [fraction for fraction in fractions if fraction is not None]
    if len(given) < len(parts):
        raise ValueError(
            f"`fraction` was given for {len(given)} of {len(parts)} datasets. It is a share of the mixture, so all "
            "datasets need one. Set it for each, or use `repeat`, which may be left out."
        )
    shares = [fraction / sum(given) for fraction in given]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
