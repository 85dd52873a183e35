"""A mixture of datasets: TRL's `datasets:`, also of files, with a name for each source."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import trl
from datasets import Dataset, DatasetDict, concatenate_datasets
from trl.scripts.utils import DatasetConfig, get_dataset

from ..training.foreign_keys import describe_foreign_keys
from .flags import did_you_mean
from .sources import FORMATS, load_named, load_rows

TRUTHS = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")  # texts of switches


@dataclass
class SourceConfig(DatasetConfig):
    """One entry of `datasets`, with TRL's fields."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Two entries with the same value are the same dataset, listed twice."""
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
    """TRL's `DatasetMixtureConfig`, with checks."""

    datasets: list[SourceConfig] = field(  # type: ignore[assignment]  # narrower than TRL's
        default_factory=list,
        metadata={"help": "Datasets of the mixture, as a list in the config file; `fraction` sets the share of each."},
    )

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, list):
            raise ValueError(
                f"`datasets: {getattr(self.datasets, 'path', self.datasets)}` was given. A mixture is a list, also of "
                "one dataset. Write an entry `- path: ...` for each, or set `dataset_name` instead."
            )
        self.datasets = [_make_entry(entry) for entry in self.datasets]
        rows, count = next(iter(Counter(source.rows for source in self.datasets).most_common(1)), ((), 0))
        if self.test_split_size is not None and count > 1:
            path = next(entry.path for entry in self.datasets if entry.rows == rows)
            raise ValueError(
                f"The dataset `{path}` is listed {count} times in `datasets`, and `test_split_size: "
                f"{self.test_split_size}` was given. A test row of one entry would be trained as a row of another. "
                "List it once, or remove `test_split_size`."
            )

    def labels(self) -> list[str]:
        """For `source_column` a name for each dataset, with as many folders as make different datasets differ."""
        names = [list(source.names()) for source in self.datasets]
        while True:
            datasets_of = defaultdict(set)
            for (first, *_), source in zip(names, self.datasets, strict=True):
                datasets_of[first].add(source.rows)
            shared = [each for each in names if len(datasets_of[each[0]]) > 1 and len(each) > 1]
            if not shared:
                return [first for first, *_ in names]
            for each in shared:
                del each[0]


def check_types(settings: dict[str, Any], kinds: Iterable[type], where: str, *, texts: bool) -> None:
    """Refuse values that their fields cannot hold; `texts` are allowed where argparse converts and checks them."""
    for name, hint in {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}.items():
        types = get_args(hint) or (hint,)
        if name not in settings or not {*types} <= {int, float, bool, str, type(None)}:
            continue
        allowed = {*types} | ({str} if texts else set()) | ({int} if {*types} & {float, bool} else set())
        value = settings[name]
        is_unreadable = isinstance(value, str) and not any(_parses_as(value, kind) for kind in types)
        if type(value) not in allowed or is_unreadable:
            expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(
                f"`{name}: {value}` was given {where}. It has the type {type(value).__name__}, and the field holds "
                f"{expected}. Correct it, or remove it for the default."
            )


def _parses_as(text: str, kind: type) -> bool:
    """Whether argparse makes a value of this type of the text."""
    if kind is bool:
        return text.lower() in TRUTHS
    try:
        kind(text)
    except (TypeError, ValueError):  # the type of None takes no text
        return False
    return True


def _make_entry(entry: object) -> SourceConfig:
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
            f"read, and an unknown key would be ignored.{describe_foreign_keys(wrong)} The keys are {', '.join(known)}."
        )
    check_types(entry, [SourceConfig], f"for the dataset `{entry['path']}`", texts=False)
    return SourceConfig(**entry)


def load_mixture(mixture: MixtureConfig, seed: int, source_column: str | None = None) -> Any:
    """The splits "train" and, with `test_split_size`, "test". A `source_column` that a dataset lacks is added."""
    if mixture.streaming:
        return get_dataset(mixture)
    parts = [
        _load_source(source, source_column, label)
        for source, label in zip(mixture.datasets, mixture.labels(), strict=True)
    ]
    fractions = [source.fraction for source in mixture.datasets if source.fraction is not None]
    if fractions and len(fractions) < len(parts):
        raise ValueError(
            f"`fraction` was given for {len(fractions)} of {len(parts)} datasets. It is a share of the mixture, so all "
            "datasets need one. Set it for each, or for none."
        )
    if fractions:  # the first rows of each part, as many as TRL takes: no dataset is oversampled
        shares = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
        parts = [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
    together = concatenate_datasets(parts)
    size = mixture.test_split_size
    if size is None:
        return DatasetDict({"train": together})
    if not (0 < size < 1 or (isinstance(size, int) and 1 <= size < len(together))):
        raise ValueError(
            f"`test_split_size: {size}` was given with {len(together):,} rows. It is a share of the rows, and both the "
            "training and the test split need some. Set it to a number between 0 and 1, or in the config file to a "
            "whole number of rows."
        )
    return together.train_test_split(size, seed=seed)


def _load_source(source: SourceConfig, source_column: str | None, label: str) -> Dataset:
    files = {"data_dir": source.data_dir, "data_files": source.data_files}
    if any(files.values()):
        dataset = load_named(source.path, name=source.name, split=source.split, **files)
    else:
        dataset = load_rows(source.path, source.split, source.name, setting="split: ")
    missing = [name for name in source.columns or () if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"`columns: {source.columns}` was given for the dataset `{source.path}`, which has the columns "
            f"{dataset.column_names}{did_you_mean(missing, dataset.column_names)}. Columns that do not exist cannot be "
            "selected. List those to keep, or remove `columns`."
        )
    dataset = dataset if source.columns is None else dataset.select_columns(source.columns)
    if source_column is not None and source_column not in dataset.column_names:
        dataset = dataset.add_column(source_column, [label] * len(dataset))
    return dataset
