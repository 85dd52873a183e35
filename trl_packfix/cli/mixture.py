"""Load a mixture of datasets: TRL's `datasets:` in a config file, extended by files and by a name for each source.

`configs.py` reads the file into a `MixtureConfig`, which checks it. `load_mixture` loads the datasets and joins them to
one table. With `source_column` each row gets the name of its dataset, so that losses can be reported by dataset.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import trl
from datasets import Dataset, DatasetDict, concatenate_datasets
from trl.scripts.utils import DatasetConfig, get_dataset

from ..training.foreign_keys import describe_foreign_keys
from .flags import BOOLEAN_TEXTS, did_you_mean
from .sources import FORMATS, load_named, load_rows


@dataclass
class SourceConfig(DatasetConfig):
    """One entry of `datasets`, with TRL's fields."""

    @property
    def identity(self) -> tuple[str, ...]:
        """What identifies the rows of the entry: two entries with one identity are one dataset, listed twice."""
        path = str(Path(self.path).resolve()) if Path(self.path).exists() else self.path
        return path, str(self.name), str(self.data_dir), str(self.data_files), self.split

    def names(self) -> Iterator[str]:
        """Yield names of the dataset for `source_column`, from the shortest to the longest.

        The longest names of two entries differ, unless they have one identity.

        >>> list(SourceConfig("data/math/train.jsonl").names())
        ['train', 'math/train', 'data/math/train', 'data/math/train.jsonl:split=train']
        """
        file = Path(self.path)
        folders = file.with_suffix("").parts if file.suffix in FORMATS else (self.path,)
        config_name = () if self.name is None else (self.name,)
        for count in range(1, len(folders) + 1):
            yield "/".join((*folders[-count:], *config_name))
        settings = {name: getattr(self, name) for name in ("name", "data_dir", "data_files", "split")}
        yield ":".join([self.path, *(f"{name}={value}" for name, value in settings.items() if value is not None)])


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
        fractions = [source.fraction for source in self.datasets if source.fraction is not None]
        # A comparison with NaN is false, so NaN is refused
        if fractions and not (all(0 <= fraction < inf for fraction in fractions) and any(fractions)):
            raise ValueError(
                f"`fraction` was given as {', '.join(map(str, fractions))} for the datasets of a mixture. Fractions "
                "are divided by their sum, which gives the share of each dataset, so none is below 0 and one is above "
                "0. Set each to a number above 0, or remove datasets without a share."
            )
        if self.streaming and self.test_split_size is not None:
            raise ValueError(
                f"`test_split_size: {self.test_split_size}` was given with `streaming: true`. How many rows a stream "
                "has is not known before they are read, so no share of them can be held out. Remove one of the two."
            )
        counts = Counter(source.identity for source in self.datasets)
        if self.test_split_size is not None and len(counts) < len(self.datasets):
            repeated = max(self.datasets, key=lambda source: counts[source.identity])
            raise ValueError(
                f"The dataset `{repeated.path}` is listed {counts[repeated.identity]} times in `datasets`, and "
                f"`test_split_size: {self.test_split_size}` was given. A test row of one entry would be trained as a "
                "row of another. List it once, or remove `test_split_size`."
            )

    def labels(self) -> list[str]:
        """Return a name for each dataset, for `source_column`: the shortest that distinguishes different datasets."""
        candidates = [list(source.names()) for source in self.datasets]  # of each dataset, the shortest first
        # As long as two different datasets have the same first candidate, both go on to their next one
        while True:
            identities_by_name = defaultdict(set)
            for names, source in zip(candidates, self.datasets, strict=True):
                identities_by_name[names[0]].add(source.identity)
            ambiguous = [names for names in candidates if len(identities_by_name[names[0]]) > 1 and len(names) > 1]
            if not ambiguous:
                return [names[0] for names in candidates]
            for names in ambiguous:
                del names[0]


def check_types(settings: dict[str, Any], config_classes: Iterable[type], where: str, *, texts: bool) -> None:
    """Refuse values that their fields cannot hold.

    Args:
        settings: the values by name of the field.
        config_classes: the dataclasses that have the fields. Fields of other types than numbers, switches and texts are
            not checked.
        where: where the values come from, for the message.
        texts: whether a text is allowed in place of a value, because argparse converts it.
    """
    hints = {name: hint for config_class in config_classes for name, hint in get_type_hints(config_class).items()}
    for name, hint in hints.items():
        types = get_args(hint) or (hint,)
        if name not in settings or not {*types} <= {int, float, bool, str, type(None)}:
            continue
        allowed = {*types}
        if texts:
            allowed.add(str)
        if allowed & {float, bool}:
            allowed.add(int)  # a whole number is a number, and 0 and 1 are switches
        value = settings[name]
        # Even where texts are allowed, a text is refused if it can be converted to none of the types, such as "fast"
        # for a number
        is_unreadable = isinstance(value, str) and not any(_parses_as(value, field_type) for field_type in types)
        if type(value) not in allowed or is_unreadable:
            expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(
                f"`{name}: {value}` was given {where}. It has the type {type(value).__name__}, and the field holds "
                f"{expected}. Correct it, or remove it for the default."
            )


def _parses_as(text: str, field_type: type) -> bool:
    """Return whether argparse can convert the text to this type."""
    if field_type is bool:
        return text.lower() in BOOLEAN_TEXTS
    try:
        field_type(text)
    except (TypeError, ValueError):  # TypeError: the type of None takes no text
        return False
    return True


def _make_entry(entry: object) -> SourceConfig:
    """Return an entry of `datasets` as a `SourceConfig`; refuse unknown keys, wrong types and a missing path."""
    if isinstance(entry, SourceConfig):  # argparse has made it of a word behind the flag `--datasets`
        return entry
    if not isinstance(entry, dict):
        raise ValueError(
            f"`{entry}` was given as an entry of `datasets`. An entry is a mapping with a `path`. Write "
            f"`- path: {entry}`."
        )
    known = [setting.name for setting in fields(SourceConfig)]
    unknown = [str(name) for name in entry if name not in known]
    if unknown or "path" not in entry:
        problem = f"the unknown keys {', '.join(f'`{name}`' for name in unknown)}" if unknown else "no `path`"
        raise ValueError(
            f"An entry of `datasets` has {problem}: {entry}{did_you_mean(unknown, known)}. Without a path nothing can "
            f"be read, and an unknown key would be ignored.{describe_foreign_keys(unknown)} The keys are "
            f"{', '.join(known)}."
        )
    check_types(entry, [SourceConfig], f"for the dataset `{entry['path']}`", texts=False)
    return SourceConfig(**entry)


def load_mixture(mixture: MixtureConfig, seed: int, source_column: str | None = None) -> Any:
    """Load the datasets of a mixture and join them.

    Args:
        mixture: the datasets, and how they are joined and split.
        seed: of the division into training and test rows.
        source_column: the column with the name of each row's dataset. Datasets without this column get it.

    Returns:
        The splits "train" and, with `test_split_size`, "test".
    """
    if mixture.streaming:
        # TRL's function refuses fractions and adds no `source_column`, without which the trainer refuses the stream. It
        # looks for the path of a file on the hub
        return get_dataset(replace(mixture, datasets=[_for_trl(source) for source in mixture.datasets]))
    tables = [
        _load_source(source, source_column, label)
        for source, label in zip(mixture.datasets, mixture.labels(), strict=True)
    ]
    fractions = [source.fraction for source in mixture.datasets if source.fraction is not None]
    if fractions and len(fractions) < len(tables):
        raise ValueError(
            f"`fraction` was given for {len(fractions)} of {len(tables)} datasets. It is a share of the mixture, so "
            "all datasets need one. Set it for each, or for none."
        )
    if fractions:
        # Take the first rows of each dataset, as TRL does. The mixture has the most rows with which
        # share x `num_rows` <= rows of the dataset holds for every dataset.
        shares = [fraction / sum(fractions) for fraction in fractions]
        num_rows = min(len(table) / share for table, share in zip(tables, shares, strict=True) if share > 0)
        tables = [table.select(range(round(share * num_rows))) for table, share in zip(tables, shares, strict=True)]
    joined = concatenate_datasets(tables)
    test_size = mixture.test_split_size
    if test_size is None:
        return DatasetDict({"train": joined})
    is_share = 0 < test_size < 1
    is_number_of_rows = isinstance(test_size, int) and 1 <= test_size < len(joined)
    if not (is_share or is_number_of_rows):
        raise ValueError(
            f"`test_split_size: {test_size}` was given with {len(joined):,} rows. It is a share of the rows, and both "
            "the training and the test split need some. Set it to a number between 0 and 1, or in the config file to a "
            "whole number of rows."
        )
    return joined.train_test_split(test_size, seed=seed)


def _for_trl(source: SourceConfig) -> SourceConfig:
    """Return an entry with which TRL loads the same dataset: a file is one of the `data_files` of its format."""
    path = Path(source.path)
    if not path.is_file() or path.suffix not in FORMATS:
        return source
    return replace(source, path=FORMATS[path.suffix], data_files=source.path)


def _load_source(source: SourceConfig, source_column: str | None, label: str) -> Dataset:
    """Load one dataset of a mixture, with its selected columns, and with `label` in the `source_column`."""
    files = {"data_dir": source.data_dir, "data_files": source.data_files}
    if any(files.values()):
        dataset = load_named(source.path, name=source.name, split=source.split, **files)
    else:
        # `setting`: a message about a missing split says `split: NAME`, as the config file does
        dataset = load_rows(source.path, source.split, source.name, setting="split: ")
    missing = [name for name in source.columns or () if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"`columns: {source.columns}` was given for the dataset `{source.path}`, which has the columns "
            f"{dataset.column_names}{did_you_mean(missing, dataset.column_names)}. Columns that do not exist cannot be "
            "selected. List those to keep, or remove `columns`."
        )
    if source.columns is not None:
        dataset = dataset.select_columns(source.columns)
    if source_column is not None and source_column not in dataset.column_names:
        dataset = dataset.add_column(source_column, [label] * len(dataset))
    return dataset
