"""Documents of the command line: rows of datasets, tokenised as a trainer tokenises them, or lengths alone."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets, load_from_disk
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from ..data.cache import cached_token_range
from ..data.collator import IGNORE_INDEX
from ..data.documents import Ledger, make_documents
from ..data.image_rows import ImageRows
from ..data.model_costs import make_cost_model, with_tower
from ..data.reader import RowReader, TokenReader, mask_columns, without_ignored_mask
from ..planning.costs import CostModel
from ..samples.checks import IMAGES, check_conversations, has_images
from ..samples.make_samples import without_bad_rows
from ..samples.named_images import with_named_images
from ..samples.row import BAD_ROW_COLUMN, HashedMapFunction
from ..training.config import SFTConfig
from ..training.preparation import prepare_images, prepare_rows
from .configs import RunConfigs
from .flags import MODEL_HELP, setting_named
from .lengths import LengthRows, read_lengths
from .mixture import load_mixture
from .sources import check_split, in_utf8, load_rows

MOST_IDS = 2**24  # the largest vocabularies have 2**18 to 2**20
TOKENIZER = "a folder with a tokenizer or its name on the hub, and `--trust-remote-code` if it has code that you trust"


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    with setting_named(name, TOKENIZER):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase | None, config: SFTConfig) -> Dataset:
    """`input_ids` and `labels` of every row, as `SFTTrainer` makes them; no row is cut, dropped or shuffled.

    `datasets` caches the result, also for a training run with the same tokenizer and settings. Of a tokenised dataset,
    `labels` are made of the masks that apply. Rows to drop have no tokens, and the reason in a column.
    """
    if config.per_turn:
        check_conversations(dataset, "train")
    if tokenizer is not None:
        dataset = prepare_rows(dataset, tokenizer, config)
    elif "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset of {len(dataset)} rows has the columns {dataset.column_names}, and no tokenizer was "
            "given. Lengths count tokens, so text must be tokenised. Set `--tokenizer` or `--model` to the name "
            "or the folder of the tokenizer that you will train with."
        )
    else:
        check_id_range(dataset)
    masks = mask_columns(without_ignored_mask(dataset, config.completion_only_loss))
    masks = [] if "labels" in dataset.column_names else masks
    for name in masks:
        TokenReader(dataset.select_columns(["input_ids", name]))  # raises if the mask has another length
    if masks:
        what = f"Building labels of {' and '.join(masks)}"
        given = {"masks": masks}
        dataset = dataset.map(
            HashedMapFunction(_labels_from_masks), fn_kwargs=given, num_proc=config.dataset_num_proc, desc=what
        )
    names = ("input_ids", "labels", "seq_lengths", BAD_ROW_COLUMN, config.weight_column, config.source_column)
    return dataset.select_columns([name for name in names if name in dataset.column_names])


def check_id_range(dataset: Dataset) -> None:
    """Refuse token ids that no vocabulary has: below 0, or `MOST_IDS` and above."""
    low, high = cached_token_range(TokenReader(dataset.select_columns("input_ids")))
    if low < 0 or high >= MOST_IDS:
        raise ValueError(
            f"The dataset of {len(dataset)} rows has token ids from {low} to {high}. Ids are rows of the embedding of "
            f"a model, so they begin with 0, and no vocabulary has {MOST_IDS:,} of them. Correct the column "
            "`input_ids`; with `--model` ids are compared with those of its tokenizer."
        )


def _labels_from_masks(row: dict[str, Any], masks: list[str]) -> dict[str, Any]:
    bits = zip(*(row[name] for name in masks), strict=True)
    return {"labels": [i if all(trained) else IGNORE_INDEX for i, trained in zip(row["input_ids"], bits, strict=True)]}


def measure_images(dataset: Dataset, name: str | None, config: SFTConfig) -> ImageRows:
    """The documents of rows with images, as `SFTTrainer` measures them with the processor of this model."""
    processor = None
    if name is not None:
        with setting_named(name, MODEL_HELP):
            processor = AutoProcessor.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    if not isinstance(processor, ProcessorMixin):
        column = next(column for column in IMAGES if column in dataset.column_names)
        what = "no model was given" if name is None else f"`{name}` has a tokenizer only"
        raise ValueError(
            f"The dataset of {len(dataset)} rows has the column `{column}`, and {what}. The number of tokens of an "
            "image depends on the processor. Set `--model` to the name or the folder of the model with a processor "
            f"that you will train, or remove the column `{column}` if the text alone is to be trained."
        )
    return prepare_images(dataset, processor, config)


def read_documents(run: RunConfigs, tokenizer: str | None) -> RowReader:
    """One table of the documents of a run; `tokenizer` is its name or folder, if it is not that of the model."""
    config = run.training
    model = tokenizer or run.model.model_name_or_path
    lengths = []
    tables = []
    pictures = []
    for name in run.parts:
        print(f"Reading {name}", file=sys.stderr)
        with in_utf8(name):
            lengths_in_file = None if run.mixture.datasets else read_lengths(Path(name))
        if lengths_in_file is not None:
            check_split(name, run.script.dataset_train_split)
            if config.per_turn:
                raise ValueError(
                    f"`--per-turn` was given with `{name}`, a file of {len(lengths_in_file):,} lengths. The turns of a "
                    "conversation are not known from its length. Give the conversations and a tokenizer, or omit "
                    "`--per-turn`."
                )
            if config.share_prefixes != "off":
                raise ValueError(
                    f"`--share-prefixes {config.share_prefixes}` was given with the lengths of "
                    f"{len(lengths_in_file):,} documents. Which of them begin alike is known from their tokens. Give a "
                    "dataset, or set `--share-prefixes off`."
                )
            lengths.append(lengths_in_file)
            continue
        rows = load_part(run, name)
        what = "rows of tokens"
        is_tokenised = "input_ids" in rows.column_names
        shows = has_images(rows) and not is_tokenised
        if not is_tokenised:
            what = "rows" if model is None else f"rows, which {model} {'processes' if shows else 'tokenises'}"
        print(f"Read {name}: {len(rows):,} {what}", file=sys.stderr)
        if shows:
            pictures.append(rows)
            continue
        loaded = None if model is None else load_tokenizer(model, config.trust_remote_code)
        with in_utf8(name):
            tables.append(tokenise(rows, loaded, config))
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
    return (
        measure_images(concatenate_tables(pictures), model, config)
        if pictures
        else TokenReader(concatenate_tables(tables))
    )


def load_part(run: RunConfigs, name: str) -> Dataset:
    """The rows of one of the `parts` of a run."""
    if run.mixture.datasets:
        rows: Dataset = load_mixture(run.mixture, run.training.seed, run.training.source_column)["train"]
    else:
        rows = load_rows(name, run.script.dataset_train_split, run.script.dataset_config)
    return with_named_images(rows, name)


def read_parts(run: RunConfigs) -> tuple[list[Dataset], bool]:
    """The rows of all of them, and whether they have images."""
    parts = [load_part(run, name) for name in run.parts]
    with_images = sum(map(has_images, parts))
    if 0 < with_images < len(parts):
        raise ValueError(
            f"{len(parts)} datasets were given, and {with_images} of them have images. Rows of text are tokenised, and "
            "rows with images keep their images, so one folder cannot hold both. Prepare them one by one, or give the "
            "rows of text an empty column `images`."
        )
    return parts, bool(with_images)


def concatenate_tables(tables: Sequence[Dataset]) -> Dataset:
    columns = [sorted(table.column_names) for table in tables]
    if columns != columns[:1] * len(tables):
        one = columns[0]
        other = next(names for names in columns if names != columns[0])
        raise ValueError(
            f"{len(tables)} datasets were given, one with the columns {one} and another with {other}. To join them, "
            "all need the same columns. Tokenise all of them in the same way, e.g. with `trl-packfix prepare`; of "
            "datasets with images, select the same columns."
        )
    return concatenate_datasets(tables) if len(tables) > 1 else tables[0]


def load_model_config(run: RunConfigs) -> PreTrainedConfig | None:
    name = run.model.model_name_or_path
    if name is None:
        return None
    with setting_named(f"--model {name}", MODEL_HELP):
        return AutoConfig.from_pretrained(name, trust_remote_code=run.training.trust_remote_code)


def make_costs(model_config: PreTrainedConfig | None, reader: RowReader) -> CostModel:
    """The cost model of a config, of a Llama with 7B parameters without one; with the costs of images if there are."""
    costs = make_cost_model(model_config)
    return costs if reader.image_counts is None else with_tower(costs, model_config)


def save_tokens(
    given: RunConfigs, parts: list[Dataset], tokenizer: PreTrainedTokenizerBase, *, output: Path
) -> tuple[int, int, Ledger]:
    """Write one table of tokens and labels. Returns its rows, the rows given, and what they hold."""
    tables = []
    for name, part in zip(given.parts, parts, strict=True):
        with in_utf8(name):
            tables.append(tokenise(part, tokenizer, given.training))
    table = concatenate_datasets([without_bad_rows(part) for part in tables])
    ledger = make_documents(TokenReader(table), max_length=None).ledger
    table.save_to_disk(output, num_proc=given.training.dataset_num_proc)
    return len(table), sum(map(len, tables)), ledger


def save_measured(parts: list[Dataset], processor: str, config: SFTConfig, *, output: Path) -> tuple[int, int, Ledger]:
    """Write the rows as they are, and the lengths of their documents beside them, where training looks for them."""
    table = concatenate_tables(parts)
    num_given = len(table)
    if config.bad_rows == "drop":
        reader = measure_images(table, processor, config)
        bad = reader.bad_rows()
        rows = reader.conversations
        if bad.any():  # of a conversation, the turns that can be rendered are kept
            table = table.select(np.flatnonzero(~bad) if rows is None else np.unique(rows[~bad]))
    table.save_to_disk(output, num_proc=config.dataset_num_proc)
    reader = measure_images(load_from_disk(str(output)), processor, config)
    ledger = make_documents(reader, max_length=None).ledger
    return len(table), num_given, ledger
