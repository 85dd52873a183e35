"""Input data of the command line: datasets by path or name, files of lengths, and their tokenisation by TRL.

Rows are tokenised by the trainer itself, with a tiny model that is discarded. So tokens and labels, and all numbers
computed from them, are those of a training run with the same settings.
"""

import csv
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..data.collator import IGNORE_INDEX
from ..data.image_rows import ImageRows
from ..data.reader import Rows, TokenReader, applied_masks
from ..samples.checks import IMAGES, check_conversations, has_images
from ..samples.row import BAD_ROW, Cached
from ..samples.turns import AssistantTurns
from .flags import MODEL, named

if TYPE_CHECKING:
    from ..training.trainer import SFTTrainer

logger = logging.getLogger(__name__)

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
LONGEST = 2**31 - 1  # tokens of a row: the largest list of an Arrow table
SUFFIXES = ".jsonl, .json, .parquet, .csv (rows); .txt, .npy, .csv, .json (lengths)"


@dataclass(frozen=True)
class Tokenisation:
    """The settings of `SFTConfig` that decide the tokens and labels of a row, and which other columns are kept."""

    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    eos_token: str | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_num_proc: int | None = None
    bad_rows: Literal["raise", "drop"] = "raise"
    per_turn: bool = False
    message_train_key: str | None = "weight"
    assistant_turns: AssistantTurns = "all"
    train_empty_thinking: bool = True
    weight_column: str | None = None
    source_column: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class LengthRows(Rows):
    """Rows of which only the lengths are known. Every token except the first of a document counts as trained.

    Attributes:
        lengths: tokens of each row, shape (R,).
    """

    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def bad_rows(self) -> None:
        return None

    def count_trained(
        self, row: npt.NDArray[np.int64], start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        return np.maximum(stop - start - 1, 0)

    def first_is_labelled(self, row: npt.NDArray[np.int64], start: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.ones(len(row), dtype=bool)

    def read(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Zeros in place of the unknown tokens and labels, shape (stop - start,)."""
        return dict.fromkeys(("input_ids", "labels"), np.zeros(stop - start, np.int64))


@contextmanager
def in_utf8(name: str) -> Iterator[None]:
    """Name the file, or the files, whose text is not UTF-8. Text of a table is decoded when its rows are read.

    Raises:
        ValueError: instead of a UnicodeDecodeError, which has no name.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` was given. It has bytes that are no text in {error.encoding}: {error.reason} at "
            f"{error.object[error.start : error.start + 4]!r}. Convert it to UTF-8, for example with "
            "`iconv -f latin1 -t utf-8`."
        ) from error


def read_lengths(path: Path) -> npt.NDArray[np.int64] | None:
    """Lengths in tokens, shape (N,), from a file of lengths; None for another file.

    A file of lengths is `.npy` with one array, `.txt` with one number per line, `.json` with a list of numbers, or
    `.csv` with a column named `length` or `lengths` or with one column of numbers without a name.

    Raises:
        ValueError: the file has numbers that cannot be lengths.
    """
    values = LENGTHS[path.suffix](path) if path.is_file() and path.suffix in LENGTHS else None
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


def _values_of_npy(path: Path) -> Any:
    try:
        return np.load(path)
    except (EOFError, ValueError):  # not an array of numbers, or an empty file
        return []


def _values_of_json(path: Path) -> Any:
    text = path.read_text()
    try:
        values = json.loads(text) if text.lstrip()[:1] == "[" else None
    except ValueError:
        return None  # broken JSON: `datasets` reports the error
    return values if values and not isinstance(values[0], dict) else None


def _values_of_csv(path: Path) -> Any:
    csv.field_size_limit(LONGEST)  # of the texts beside the lengths
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = filter(None, csv.reader(file))
        names = [name.strip() for name in next(rows, [])]
        if len(names) == 1 and names[0].isdigit():
            return [*names, *(row[0] for row in rows)]
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


LENGTHS = {
    ".txt": lambda path: path.read_text().split(),
    ".npy": _values_of_npy,
    ".csv": _values_of_csv,
    ".json": _values_of_json,
}


def is_saved(path: Path) -> bool:
    """Whether it is a folder written by `save_to_disk`."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def load_rows(name: str, split: str = "train", config: str | None = None, *, setting: str = "--split ") -> Dataset:
    """The rows of a file, of a folder written by `save_to_disk` or `trl-packfix prepare`, or of a dataset on the hub.

    `setting` is how messages name the split.

    Raises:
        ValueError: an unknown kind of file, a file that cannot be read, a missing file or split.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in FORMATS:
            raise ValueError(
                f"`{name}` was given as a dataset. Files named {path.suffix or 'without a suffix'} are not supported. "
                f"Give one of {SUFFIXES}, a folder written by `save_to_disk`, or a name on the hub."
            )
        check_split(name, split, setting)
        try:
            return load_dataset(FORMATS[path.suffix], data_files=name, split="train")
        except (DatasetGenerationError, ValueError, StopIteration) as error:
            # A StopIteration without a message means that `datasets` found no first row.
            reason = (str(error.__cause__ or error) or "it holds no rows").splitlines()[0].rstrip(".")
            raise ValueError(
                f"`{name}` was given as a dataset of {path.stat().st_size} bytes. It cannot be read: {reason}. Correct "
                "it, or write it again; often writing it was interrupted."
            ) from error
    if is_saved(path):
        loaded = load_from_disk(name)
        if not isinstance(loaded, DatasetDict):
            check_split(name, split, setting)
            return loaded
        if split not in loaded:
            raise ValueError(
                f"`{name}` was given with `{setting}{split}`. It has only the splits {list(loaded)}. Set it to one of "
                "these."
            )
        return loaded[split]
    return load_named(name, name=config, split=split)


def load_named(path: str, **settings: Any) -> Any:
    """What `load_dataset` finds by this name, on the hub or as a folder of files, with these arguments.

    Raises:
        ValueError: a path at which there is nothing, or a dataset, config or split that cannot be read.
    """
    here = Path(path)
    is_path = here.suffix in (*FORMATS, *LENGTHS) or here.is_absolute() or path[:1] in ".~" or path.count("/") > 1
    if is_path and not here.exists():
        raise ValueError(
            f"`{path}` was given as a dataset. There is no such file or folder here, and it cannot be a name on the "
            "hub. Give the path of a file or folder that exists, or the name of a dataset on the hub."
        )
    try:
        return load_dataset(path, **settings)
    except (DatasetGenerationError, ValueError, OSError) as error:
        where = (
            "It is a folder here" if here.is_dir() else "Nothing here has this name, so it was looked for on the hub"
        )
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ValueError(
            f"`{path}` was given as a dataset. {where}, and it cannot be read: {reason}. Give a file, a folder written "
            "by `prepare` or `save_to_disk`, or the name, config and split of a dataset on the hub."
        ) from error


def check_split(name: str, split: str, setting: str = "--split ") -> None:
    """Refuse a split of a dataset that has no splits.

    Raises:
        ValueError: a split other than "train", which is the default.
    """
    if split != "train":
        raise ValueError(
            f"`{setting}{split}` was given with `{name}`. It is one table and has no splits. Omit the split, and "
            "give the file of the split."
        )


def load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a model by its name or folder.

    Raises:
        ValueError: it cannot be loaded, for example because its own code needs `--trust-remote-code`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`{name}` was given as the name of a tokenizer or model. Its tokenizer cannot be loaded: "
            f"{' '.join(str(error).split()).rstrip('.')}. Give a folder with a tokenizer or a name on the hub, and "
            "`--trust-remote-code` where it has its own code that you trust."
        ) from error


def check_template(path: str | None) -> None:
    """Refuse a `chat_template_path` at which TRL finds no template.

    Raises:
        ValueError: neither a file of a template nor a tokenizer that has one.
    """
    from transformers import AutoTokenizer

    if path is None or (Path(path).is_file() and path.endswith((".jinja", ".j2"))):
        return
    what = "a file of a template (.jinja, .j2) that is here, or the name or folder of a tokenizer that has one"
    with named(f"chat_template_path={path}", what):
        AutoTokenizer.from_pretrained(path).get_chat_template()


def tokenised(dataset: Dataset, tokenizer: Any, settings: Tokenisation | None = None) -> Dataset:
    """`input_ids` and `labels` of every row, as `SFTTrainer` makes them; no row is cut, dropped or shuffled.

    With `settings.per_turn` there is one row per assistant turn.

    `datasets` caches the result, so a training run with the same tokenizer and settings does not tokenise again.

    Args:
        dataset: any dataset that TRL accepts. If it is tokenised already, `labels` are computed from the masks that
            apply, and omitted if every token is trained. Rows to drop have no tokens, and the reason in a column
            (`without_bad_rows`).
        tokenizer: object, local path or name on the hub; may be None for a tokenised dataset.

    Raises:
        ValueError: rows that are not tokenised, and no tokenizer.
    """
    settings = settings or Tokenisation()
    if settings.per_turn:
        check_conversations(dataset, "train")
    if tokenizer is None:
        if "input_ids" not in dataset.column_names:
            raise ValueError(
                f"The dataset of {len(dataset)} rows has the columns {dataset.column_names}, and no tokenizer was "
                "given. Lengths count tokens, so text must be tokenised. Set `--tokenizer` or `--model` to the name "
                "or the folder of the tokenizer that you will train with."
            )
        return _with_labels(dataset, settings)

    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, settings.trust_remote_code)
    train_dataset = _trainer(dataset, tokenizer, settings).train_dataset
    assert isinstance(train_dataset, Dataset)
    return _with_labels(train_dataset, settings)


def measured(dataset: Dataset, processor: Any, settings: Tokenisation | None = None) -> ImageRows:
    """The documents of rows with images, as `SFTTrainer` measures them.

    `datasets` caches the lengths, so a training run with the same processor and settings does not measure again.

    Args:
        dataset: in a form of TRL's vision datasets.
        processor: object, local path or name on the hub.

    Raises:
        ValueError: no processor, or a tokenizer in its place.
    """
    from transformers import AutoProcessor, ProcessorMixin

    settings = settings or Tokenisation()
    name = next(name for name in IMAGES if name in dataset.column_names)
    name_of_model = processor
    if isinstance(processor, str):
        with named(processor, MODEL):
            processor = AutoProcessor.from_pretrained(processor, trust_remote_code=settings.trust_remote_code)
    if not isinstance(processor, ProcessorMixin):
        what = "no model was given" if name_of_model is None else f"`{name_of_model}` has a tokenizer only"
        raise ValueError(
            f"The dataset of {len(dataset)} rows has the column `{name}`, and {what}. The number of tokens of an image "
            "depends on the processor. Set `--model` to the name or the folder of the model with a processor that you "
            f"will train, or remove the column `{name}` if the text alone is to be trained."
        )
    reader = _trainer(dataset, processor, settings).data.reader
    assert isinstance(reader, ImageRows)
    return reader


def import_deepspeed() -> None:
    """Import DeepSpeed, if it is installed, before a trainer does: it logs to the stdout of its first import.

    Stdout must hold nothing but the JSON.
    """
    if find_spec("deepspeed"):
        import torch

        if not torch.accelerator.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns
        with redirect_stdout(sys.stderr):
            import_module("deepspeed")


def _trainer(dataset: Dataset, processing_class: Any, settings: Tokenisation) -> "SFTTrainer":
    """A trainer of these rows, with a tiny model that is discarded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..training.config import SFTConfig
    from ..training.trainer import SFTTrainer

    import_deepspeed()
    check_template(settings.chat_template_path)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(len(tokenizer), tokenizer.vocab_size),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=2**40,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, packing=True, max_length=2**40, use_cpu=True, bf16=False, report_to=[], **vars(settings)
        )
        return SFTTrainer(model, args, train_dataset=dataset, processing_class=processing_class)


def _with_labels(dataset: Dataset, settings: Tokenisation) -> Dataset:
    """The columns of tokenised rows that packing reads, with the masks that apply converted to `labels`."""
    masks = [] if "labels" in dataset.column_names else applied_masks(dataset, settings.completion_only_loss)
    for name in masks:
        TokenReader(dataset.select_columns(["input_ids", name]))  # raises if the mask has another length
    if masks:
        dataset = dataset.map(
            Cached(_labels),
            fn_kwargs={"masks": masks},
            num_proc=settings.dataset_num_proc,
            desc=f"Building labels of {' and '.join(masks)}",
        )
    names = ("input_ids", "labels", "seq_lengths", BAD_ROW, settings.weight_column, settings.source_column)
    return dataset.select_columns([name for name in names if name in dataset.column_names])


def _labels(row: dict[str, Any], masks: list[str]) -> dict[str, Any]:
    bits = zip(*(row[name] for name in masks), strict=True)
    return {"labels": [i if all(trained) else IGNORE_INDEX for i, trained in zip(row["input_ids"], bits, strict=True)]}


def open_tables(
    names: Sequence[str],
    tokenizer: Any,
    settings: Tokenisation,
    *,
    split: str = "train",
    config: str | None = None,
) -> Rows:
    """One table of all documents in `names`, which are all datasets or all files of lengths.

    Raises:
        ValueError: datasets and files of lengths together; see also the functions above.
        OSError: a dataset or file does not exist.
    """
    lengths, tables, pictures = [], [], []
    for name in names:
        print(f"Reading {name}", file=sys.stderr)
        with in_utf8(name):
            lengths_in_file = read_lengths(Path(name))
        if lengths_in_file is not None:
            check_split(name, split)
            if settings.per_turn:
                raise ValueError(
                    f"`--per-turn` was given with `{name}`, a file of {len(lengths_in_file):,} lengths. The turns of a "
                    "conversation are not known from its length. Give the conversations and a tokenizer, or omit "
                    "`--per-turn`."
                )
            lengths.append(lengths_in_file)
        else:
            rows = load_rows(name, split, config)
            is_tokenised = "input_ids" in rows.column_names
            shows = has_images(rows) and not is_tokenised
            what = (
                "rows of tokens" if is_tokenised else f"rows, which {tokenizer} {'processes' if shows else 'tokenises'}"
            )
            print(f"Read {name}: {len(rows):,} {what}", file=sys.stderr)
            if shows:
                pictures.append(rows)
            else:
                with in_utf8(name):
                    tables.append(tokenised(rows, tokenizer, settings))
    if lengths and (tables or pictures):
        raise ValueError(
            f"{len(lengths)} files of lengths and {len(tables) + len(pictures)} datasets were given. A file of lengths "
            "has no tokens, so they cannot be joined to one table. Give lengths only, or datasets only."
        )
    if lengths:
        return LengthRows(np.concatenate(lengths))
    if pictures and tables:
        raise ValueError(
            f"{len(pictures)} datasets with images and {len(tables)} without were given. Rows with images are "
            "processed when they are read, and rows of text are tokenised before, so they cannot be joined to one "
            "table. Plan them one by one, or give the rows of text an empty column `images`."
        )
    return measured(joined(pictures), tokenizer, settings) if pictures else TokenReader(joined(tables))


def joined(tables: Sequence[Dataset]) -> Dataset:
    """One table of all rows.

    Raises:
        ValueError: the tables have different columns.
    """
    columns = [sorted(table.column_names) for table in tables]
    if columns != columns[:1] * len(tables):
        one, other = columns[0], next(names for names in columns if names != columns[0])
        raise ValueError(
            f"{len(tables)} datasets were given, one with the columns {one} and another with {other}. To join them, "
            "all need the same columns. Tokenise all of them in the same way, e.g. with `trl-packfix prepare`; of "
            "datasets with images, select the same columns."
        )
    return concatenate_datasets(tables) if len(tables) > 1 else tables[0]
