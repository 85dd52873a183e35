"""Documents of the command line: rows of datasets, tokenised as a trainer tokenises them, or lengths alone.

Tokens and labels, and all numbers computed from them, are those of a training run with the same settings.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from ..data.collator import IGNORE_INDEX
from ..data.image_rows import ImageRows
from ..data.model_costs import make_cost_model, with_tower
from ..data.reader import Rows, TokenReader, applied_masks
from ..planning.costs import CostModel
from ..samples.checks import IMAGES, check_conversations, has_images
from ..samples.row import BAD_ROW, Cached
from ..training.choices import Setup
from ..training.config import SFTConfig
from ..training.features import refuse
from ..training.preparation import prepare_images, prepare_rows
from .configs import Configs
from .flags import MODEL, named
from .lengths import LengthRows, read_lengths
from .mixture import load_mixture
from .sources import check_split, in_utf8, load_rows

# Fields of the config that decide the tokens and labels of a row, and which other columns are kept
TOKENISATION = (
    "assistant_only_loss",
    "completion_only_loss",
    "eos_token",
    "chat_template_path",
    "dataset_text_field",
    "dataset_num_proc",
    "bad_rows",
    "per_turn",
    "message_train_key",
    "assistant_turns",
    "train_empty_thinking",
    "weight_column",
    "source_column",
    "trust_remote_code",
)


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model by its name or folder.

    Raises:
        ValueError: it cannot be loaded, for example because its own code needs `--trust-remote-code`.
    """
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
    if path is None or (Path(path).is_file() and path.endswith((".jinja", ".j2"))):
        return
    what = "a file of a template (.jinja, .j2) that is here, or the name or folder of a tokenizer that has one"
    with named(f"chat_template_path={path}", what):
        AutoTokenizer.from_pretrained(path).get_chat_template()


def tokenised(dataset: Dataset, tokenizer: PreTrainedTokenizerBase | str | None, config: SFTConfig) -> Dataset:
    """`input_ids` and `labels` of every row, as `SFTTrainer` makes them; no row is cut, dropped or shuffled.

    With `per_turn` there is one row per assistant turn.

    `datasets` caches the result, so a training run with the same tokenizer and settings does not tokenise again.

    Args:
        dataset: any dataset that TRL accepts. If it is tokenised already, `labels` are computed from the masks that
            apply, and omitted if every token is trained. Rows to drop have no tokens, and the reason in a column
            (`without_bad_rows`).
        tokenizer: object, local path or name on the hub; may be None for a tokenised dataset.

    Raises:
        ValueError: rows that are not tokenised, and no tokenizer.
    """
    if config.per_turn:
        check_conversations(dataset, "train")
    if tokenizer is None:
        if "input_ids" not in dataset.column_names:
            raise ValueError(
                f"The dataset of {len(dataset)} rows has the columns {dataset.column_names}, and no tokenizer was "
                "given. Lengths count tokens, so text must be tokenised. Set `--tokenizer` or `--model` to the name "
                "or the folder of the tokenizer that you will train with."
            )
        return _with_labels(dataset, config)

    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, config.trust_remote_code)
    check_template(config.chat_template_path)
    return _with_labels(prepare_rows(dataset, tokenizer, config), config)


def measured(dataset: Dataset, processor: ProcessorMixin | str | None, config: SFTConfig) -> ImageRows:
    """The documents of rows with images, as `SFTTrainer` measures them.

    `datasets` caches the lengths, so a training run with the same processor and settings does not measure again.

    Args:
        dataset: in a form of TRL's vision datasets.
        processor: object, local path or name on the hub.

    Raises:
        ValueError: no processor, or a tokenizer in its place.
    """
    name = next(name for name in IMAGES if name in dataset.column_names)
    name_of_model = processor
    if isinstance(processor, str):
        with named(processor, MODEL):
            processor = AutoProcessor.from_pretrained(processor, trust_remote_code=config.trust_remote_code)
    if not isinstance(processor, ProcessorMixin):
        what = "no model was given" if name_of_model is None else f"`{name_of_model}` has a tokenizer only"
        raise ValueError(
            f"The dataset of {len(dataset)} rows has the column `{name}`, and {what}. The number of tokens of an image "
            "depends on the processor. Set `--model` to the name or the folder of the model with a processor that you "
            f"will train, or remove the column `{name}` if the text alone is to be trained."
        )
    check_template(config.chat_template_path)
    return prepare_images(dataset, processor, config)


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


def _with_labels(dataset: Dataset, config: SFTConfig) -> Dataset:
    """The columns of tokenised rows that packing reads, with the masks that apply converted to `labels`."""
    masks = [] if "labels" in dataset.column_names else applied_masks(dataset, config.completion_only_loss)
    for name in masks:
        TokenReader(dataset.select_columns(["input_ids", name]))  # raises if the mask has another length
    if masks:
        dataset = dataset.map(
            Cached(_labels),
            fn_kwargs={"masks": masks},
            num_proc=config.dataset_num_proc,
            desc=f"Building labels of {' and '.join(masks)}",
        )
    names = ("input_ids", "labels", "seq_lengths", BAD_ROW, config.weight_column, config.source_column)
    return dataset.select_columns([name for name in names if name in dataset.column_names])


def _labels(row: dict[str, Any], masks: list[str]) -> dict[str, Any]:
    bits = zip(*(row[name] for name in masks), strict=True)
    return {"labels": [i if all(trained) else IGNORE_INDEX for i, trained in zip(row["input_ids"], bits, strict=True)]}


def tokenisation(config: SFTConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in TOKENISATION}


def read_documents(run: Configs, tokenizer: str | None) -> Rows:
    """One table of the documents of a run, whose sources are all datasets or all files of lengths.

    Args:
        tokenizer: name or folder, if it is not that of the model.

    Raises:
        ValueError: datasets and files of lengths together, or settings that need tokens or do not go with images; see
            also the functions above.
        OSError: a dataset or file does not exist.
    """
    config, tokenizer = run.training, tokenizer or run.model.model_name_or_path
    lengths, tables, pictures = [], [], []
    for name in run.parts:
        print(f"Reading {name}", file=sys.stderr)
        with in_utf8(name):
            lengths_in_file = None if run.mixture.datasets else read_lengths(Path(name))
        if lengths_in_file is not None:
            check_split(name, run.script.dataset_train_split)
            _check_lengths(name, len(lengths_in_file), config)
            lengths.append(lengths_in_file)
            continue
        rows = load_part(run, name)
        is_tokenised = "input_ids" in rows.column_names
        shows = has_images(rows) and not is_tokenised
        what = "rows of tokens" if is_tokenised else "rows"
        if tokenizer is not None and not is_tokenised:
            what += f", which {tokenizer} {'processes' if shows else 'tokenises'}"
        print(f"Read {name}: {len(rows):,} {what}", file=sys.stderr)
        if shows:
            pictures.append(rows)
        else:
            with in_utf8(name):
                tables.append(tokenised(rows, tokenizer, config))
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
    return measured(joined(pictures), tokenizer, config) if pictures else TokenReader(joined(tables))


def load_part(run: Configs, name: str) -> Dataset:
    """The rows of one of the `parts` of a run."""
    if run.mixture.datasets:
        return load_mixture(run.mixture, run.training.seed, run.training.source_column)["train"]
    return load_rows(name, run.script.dataset_train_split, run.script.dataset_config)


def _check_lengths(name: str, num: int, config: SFTConfig) -> None:
    if config.per_turn:
        raise ValueError(
            f"`--per-turn` was given with `{name}`, a file of {num:,} lengths. The turns of a conversation are not "
            "known from its length. Give the conversations and a tokenizer, or omit `--per-turn`."
        )
    if config.share_prefixes != "off":
        raise ValueError(
            f"`--share-prefixes {config.share_prefixes}` was given with the lengths of {num:,} documents. Which of "
            "them begin alike is known from their tokens. Give a dataset, or set `--share-prefixes off`."
        )


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


def check_images(config: SFTConfig, reader: Rows) -> None:
    """Refuse settings that do not go with images, if rows have some."""
    if reader.image_counts is not None:
        refuse(Setup(args=config, columns=("images",)))


def load_model_config(run: Configs) -> PreTrainedConfig | None:
    """The config of the model; None without one."""
    name = run.model.model_name_or_path
    if name is None:
        return None
    with named(f"--model {name}", MODEL):
        return AutoConfig.from_pretrained(name, trust_remote_code=run.training.trust_remote_code)


def make_costs(model_config: PreTrainedConfig | None, reader: Rows) -> CostModel:
    """The cost model of a config, of a Llama with 7B parameters without one; with the costs of images if there are."""
    costs = make_cost_model(model_config)
    return costs if reader.image_counts is None else with_tower(costs, model_config)
