"""Read the documents of DATA on the command line: rows that are tokenised as a trainer does it, or lengths alone.

`plan` and `show` call `read_documents` (through `dry_run.py`) and get a `RowReader`, from which packs are planned.
`prepare` calls `read_tables`, then `save_tokens` or `save_measured`, which write a dataset for training. A run has one
table for each of its datasets, or one for its whole mixture of datasets. Rows with images are not tokenised but
*measured*: their processor runs once, so that their numbers of tokens are known. A *bad* row is one that cannot be
rendered; with `bad_rows="drop"` bad rows are dropped, else they are refused. A `Ledger` has the counts of documents and
tokens that are kept or dropped.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
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

from ..data.collator import IGNORE_INDEX
from ..data.dataset_checks import check_id_range
from ..data.documents import Ledger, make_documents
from ..data.reader import RowReader, TokenReader, mask_columns, without_ignored_mask
from ..feature import features_of
from ..samples.checks import IMAGES, check_conversations, has_images
from ..samples.image_support import image_support
from ..samples.make_samples import without_bad_rows
from ..samples.row import BAD_ROW_COLUMN, HashedMapFunction, PerTurnCounts
from ..training.config import SFTConfig
from ..training.preparation import prepare_rows
from ..wording import count_of
from .configs import RunConfigs
from .flags import MODEL_HELP, setting_named
from .lengths import LengthRows, read_lengths
from .mixture import load_mixture
from .sources import check_split, in_utf8, load_rows

TOKENIZER = "a folder with a tokenizer or its name on the hub, and `--trust-remote-code` if it has code that you trust"


def load_tokenizer(name: str, configs: RunConfigs) -> PreTrainedTokenizerBase:
    """Return the tokenizer with this name or folder; raise ValueError if it cannot be loaded."""
    with setting_named(name, TOKENIZER):  # errors become a ValueError with this name and with the advice `TOKENIZER`
        return AutoTokenizer.from_pretrained(name, **configs.tokenizer_settings(name))


def tokenise(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase | None, config: SFTConfig
) -> tuple[Dataset, PerTurnCounts | None]:
    """Return `input_ids` and `labels` of every row, as `SFTTrainer` makes them. No row is cut, dropped or shuffled.

    With `per_turn`, the second value counts the conversations, and the turns of which the rows are made; else it is
    None.

    `datasets` caches the result, also for a training run with equal tokenizer and settings. If the dataset is tokenised
    already, `labels` are made from its masks of trained tokens. A bad row has no tokens, and its reason in the column
    `BAD_ROW_COLUMN`.

    Args:
        tokenizer: None if the dataset must be tokenised already. If a tokenised dataset comes with a tokenizer, its
            ids are checked against the vocabulary.

    Raises:
        ValueError: text comes without a tokenizer, or the tokens cannot be right.
    """
    if config.per_turn:
        check_conversations(dataset, name="train")
    turns = None
    if tokenizer is not None:
        dataset, turns = prepare_rows(dataset, tokenizer, config)
    elif "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset of {count_of(len(dataset), 'row')} has the columns {dataset.column_names}, and no tokenizer "
            "was given. Lengths count tokens, so text must be tokenised. Set `--tokenizer` or `--model` to the name or "
            "the folder of the tokenizer that you will train with."
        )
    else:
        check_id_range(dataset)  # refuses negative token ids and ids too large for any vocabulary
    # There are three cases. If the dataset has labels, they are kept. If it has masks of trained tokens, labels are
    # made from the masks, except from a `completion_mask` that `completion_only_loss` tells TRL not to read. Otherwise
    # all tokens are trained
    masks = []  # names of the columns of masks from which labels are made
    if "labels" not in dataset.column_names:
        masks = mask_columns(without_ignored_mask(dataset, config.completion_only_loss))
    for name in masks:
        # Constructed only for its check: it refuses a mask that is not as long as the tokens
        TokenReader(dataset.select_columns(["input_ids", name]))
    if masks:
        dataset = dataset.map(
            HashedMapFunction(_labels_from_masks),  # a cached result is used while the code is the same
            fn_kwargs={"masks": masks},
            num_proc=config.dataset_num_proc,
            desc=f"Building labels of {' and '.join(masks)}",
        )
    # Rows that TRL has packed have a column `seq_lengths` with the lengths of their documents. It is kept, because
    # otherwise the documents of a row would be joined. `weight_column` and `source_column` name columns with the
    # weights of rows, and with the names of their datasets
    names = ("input_ids", "labels", "seq_lengths", BAD_ROW_COLUMN, config.weight_column, config.source_column)
    return dataset.select_columns([name for name in names if name in dataset.column_names]), turns


def _labels_from_masks(row: dict[str, Any], masks: list[str]) -> dict[str, Any]:
    """Return the labels of a row. A token is trained if all masks, columns of the row, have a 1 for it."""
    bits = zip(*(row[name] for name in masks), strict=True)
    return {"labels": [i if all(trained) else IGNORE_INDEX for i, trained in zip(row["input_ids"], bits, strict=True)]}


def measure_images(dataset: Dataset, model: str | None, configs: RunConfigs) -> RowReader:
    """Return the documents of rows with images, as `SFTTrainer` measures them: with the processor of a model.

    Args:
        model: the name or folder of the model; None if none was given.

    Raises:
        ValueError: there is no model, or it has no processor.
    """
    processor = None
    if model is not None:
        with setting_named(model, MODEL_HELP):
            processor = AutoProcessor.from_pretrained(model, **configs.tokenizer_settings(model))
    if not isinstance(processor, ProcessorMixin):
        column = next(column for column in IMAGES if column in dataset.column_names)
        cause = "no model was given" if model is None else f"`{model}` has a tokenizer only"
        raise ValueError(
            f"The dataset of {count_of(len(dataset), 'row')} has the column `{column}`, and {cause}. The number of "
            "tokens of an image depends on the processor. Set `--model` to the name or the folder of the model with a "
            f"processor that you will train, or remove the column `{column}` if the text alone is to be trained."
        )
    reader: RowReader = image_support().read_table(dataset, processor, configs.training)
    return reader


def read_documents(configs: RunConfigs, tokenizer: str | None) -> RowReader:
    """Return the documents of a run, as one table.

    Args:
        tokenizer: the name or folder of the tokenizer; None for the tokenizer of the model.

    Raises:
        ValueError: the datasets cannot be read, or cannot be joined to one table.
    """
    training_config = configs.training
    # The name of a tokenizer or of a model. Its tokenizer is loaded for rows of text, and its processor for images
    processor_name = tokenizer or configs.model.model_name_or_path
    lengths = []  # of the documents of each file of lengths, in tokens
    text_tables = []  # tables of tokens
    image_tables = []  # tables of rows with images, as they were read
    turn_counts = None  # of all tables together
    for name in configs.table_names:
        print(f"Reading {name}", file=sys.stderr)
        with in_utf8(name):  # the error for bytes that are no UTF-8 names the file
            # None if the file is no file of lengths, or if `name` is a dataset on the hub or a mixture
            lengths_in_file = None if configs.mixture.datasets else read_lengths(Path(name))
        if lengths_in_file is not None:
            check_split(name, configs.script.dataset_train_split)
            if training_config.per_turn:
                raise ValueError(
                    f"`--per-turn` was given with `{name}`, a file of {len(lengths_in_file):,} lengths. The turns of a "
                    "conversation are not known from its length. Give the conversations and a tokenizer, or omit "
                    "`--per-turn`."
                )
            # Each feature may refuse lengths: `share_prefixes` does, because it compares tokens
            features_of(training_config).refuse_lengths(len(lengths_in_file))
            lengths.append(lengths_in_file)
            continue
        rows = load_table(configs, name)
        is_tokenised = "input_ids" in rows.column_names
        needs_processor = has_images(rows) and not is_tokenised
        description = " of tokens" if is_tokenised else ""
        if not is_tokenised and processor_name is not None:
            description = f", which {processor_name} {'processes' if needs_processor else 'tokenises'}"
        print(f"Read {name}: {count_of(len(rows), 'row')}{description}", file=sys.stderr)
        if needs_processor:
            image_tables.append(rows)
            continue
        # Also for a tokenised dataset, whose ids are checked against the vocabulary
        loaded_tokenizer = None
        if processor_name is not None:
            loaded_tokenizer = load_tokenizer(processor_name, configs)
        with in_utf8(name):  # the text of a file is decoded only now
            table, turns = tokenise(rows, loaded_tokenizer, training_config)
        text_tables.append(table)
        if turns is not None:
            turn_counts = turns if turn_counts is None else turn_counts + turns
    num_tables = len(text_tables) + len(image_tables)
    if lengths and num_tables:
        raise ValueError(
            f"{count_of(len(lengths), 'file')} with lengths and {count_of(num_tables, 'dataset')} were given. A file "
            "of lengths has no tokens, so they cannot be joined to one table. Give lengths only, or datasets only."
        )
    if lengths:
        return LengthRows(np.concatenate(lengths))
    if image_tables and text_tables:
        raise ValueError(
            f"{count_of(len(image_tables), 'dataset')} with images and {len(text_tables)} without were given. Rows "
            "with images are processed when they are read, and rows of text are tokenised before, so they cannot be "
            "joined to one table. Plan them one by one, or give the rows of text an empty column `images`."
        )
    if image_tables:
        return measure_images(concatenate_tables(image_tables), processor_name, configs)
    reader = TokenReader(concatenate_tables(text_tables))
    reader.turns = turn_counts  # for the report
    return reader


def load_table(configs: RunConfigs, name: str) -> Dataset:
    """Return the rows of one table of a run: of its whole mixture of datasets if it has one, else of one dataset.

    Args:
        name: the entry of the table in `configs.table_names`.
    """
    if configs.mixture.datasets:
        mixture = replace(configs.mixture, streaming=False)  # lengths are counted in a table, as for one dataset
        rows: Dataset = load_mixture(mixture, configs.training.seed, configs.training.source_column)["train"]
    else:
        rows = load_rows(name, configs.script.dataset_train_split, configs.script.dataset_config)
    # Move the images that messages name by their paths into a column `images`; other rows stay as they are
    return image_support().with_named_images(rows, name)


def read_tables(configs: RunConfigs) -> tuple[list[Dataset], bool]:
    """Return the tables of a run, and whether their rows have images; refuse tables with images beside others."""
    tables = [load_table(configs, name) for name in configs.table_names]
    with_images = sum(map(has_images, tables))
    if 0 < with_images < len(tables):
        raise ValueError(
            f"{len(tables)} datasets were given, and {with_images} of them {'has' if with_images == 1 else 'have'} "
            "images. Rows of text are tokenised, and rows with images keep their images, so one folder cannot hold "
            "both. Prepare them one by one, or give the rows of text an empty column `images`."
        )
    return tables, bool(with_images)


def concatenate_tables(tables: Sequence[Dataset]) -> Dataset:
    """Join tables to one table; refuse tables with different columns."""
    columns = [sorted(table.column_names) for table in tables]
    different_columns = next((names for names in columns if names != columns[0]), None)
    if different_columns is not None:
        raise ValueError(
            f"{len(tables)} datasets were given, one with the columns {columns[0]} and another with "
            f"{different_columns}. To join them, all need the same columns. Tokenise all of them in the same way, e.g. "
            "with `trl-packfix prepare`; of datasets with images, select the same columns."
        )
    return concatenate_datasets(tables) if len(tables) > 1 else tables[0]


def load_model_config(configs: RunConfigs) -> PreTrainedConfig | None:
    """Return the config of the model of a run; None if it names no model."""
    name = configs.model.model_name_or_path
    if name is None:
        return None
    training = configs.training
    settings = {"revision": configs.model.model_revision, "trust_remote_code": training.trust_remote_code}
    init_kwargs: Any = training.model_init_kwargs or {}
    with setting_named(f"--model {name}", MODEL_HELP):
        return AutoConfig.from_pretrained(name, **settings | init_kwargs)


def save_tokens(
    configs: RunConfigs, tables: list[Dataset], tokenizer: PreTrainedTokenizerBase, *, output: Path
) -> tuple[int, int, Ledger]:
    """Tokenise the tables of a run and write them to `output` as one table, without bad rows.

    Returns:
        The number of rows that are written, the number of rows before, and the counts of documents and tokens.
    """
    token_tables = []
    for name, table in zip(configs.table_names, tables, strict=True):
        with in_utf8(name):
            tokens, _ = tokenise(table, tokenizer, configs.training)
        token_tables.append(tokens)
    joined = concatenate_tables([without_bad_rows(tokens) for tokens in token_tables])
    ledger = make_documents(TokenReader(joined), max_length=None).ledger
    joined.save_to_disk(output, num_proc=configs.training.dataset_num_proc)
    return len(joined), sum(map(len, token_tables)), ledger


def save_measured(
    tables: list[Dataset], processor: str, configs: RunConfigs, *, output: Path
) -> tuple[int, int, Ledger]:
    """Write rows with images to `output` as they are, and measure their documents. Bad rows are dropped or refused.

    The lengths are cached beside the table, where training looks for them.

    Args:
        processor: the model whose processor measures the images.

    Returns:
        The number of rows that are written, the number of rows before, and the counts of documents and tokens.
    """
    config = configs.training
    table = concatenate_tables(tables)
    num_rows = len(table)
    if config.bad_rows == "drop":
        reader = measure_images(table, processor, configs)
        is_bad = reader.bad_rows()  # for each document, whether it could not be rendered
        row_of_document = reader.conversations  # None if each row is one document
        if is_bad.any():
            # A row may be a conversation, whose documents are turns. It stays if one of them can be rendered.
            is_good = ~is_bad
            good_rows = np.flatnonzero(is_good) if row_of_document is None else np.unique(row_of_document[is_good])
            table = table.select(good_rows)
    table.save_to_disk(output, num_proc=config.dataset_num_proc)
    # Measure the saved table, so that the lengths are cached beside it
    reader = measure_images(load_from_disk(str(output)), processor, configs)
    ledger = make_documents(reader, max_length=None).ledger
    return len(table), num_rows, ledger
