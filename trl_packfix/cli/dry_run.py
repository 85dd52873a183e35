"""Read the inputs of planning without a trainer: the settings of a training run, its documents and their costs.

`plan` and `show` call this module. Documents, planner and costs come from the functions that the trainer calls:
`documents_of` and `make_planner` (`training/planner.py`), `make_cost_model` and `with_tower` (`data/model_costs.py`).
A *document* is one training example; a *pack* is the documents that the model reads together.

A `DryRun` is read in one of two ways. `read_run_without_model` reads lengths or tokens within a second, if planning
needs all given flags. Every other run is read by `read_run` (`configs.py`) and then `read_run_with_configs`, which
import the config classes of TRL, and this takes seconds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from ..data.dataset_checks import check_id_range
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import RowReader, TokenReader
from ..planning.costs import LLAMA_7B, CostModel
from ..training.planner import make_planner
from ..training.planning_settings import PlanningSettings
from .flags import complete_flags
from .lengths import LengthRows, read_lengths
from .sources import check_path, in_utf8, load_local

if TYPE_CHECKING:  # these import TRL
    from transformers import PreTrainedConfig

    from ..training.config import SFTConfig
    from .configs import RunConfigs

TOKEN_COLUMNS = {"input_ids", "labels", "seq_lengths"}  # the columns of a table that `prepare` writes
# The fields of `PlanningSettings` that flags may set without the config classes of TRL
FLAG_TYPES = {
    "max_length": int,
    "seed": int,
    "per_device_train_batch_size": int,
    "gradient_accumulation_steps": int,
    "packing_strategy": str,
    "overlong": str,
    "balance": str,
}
# The most micro-batches of an optimizer step, over all ranks. No cluster has so many, and their plan needs 0.1 GB.
MAX_MICRO_BATCHES = 2**20


@dataclass(frozen=True)
class DryRun:
    """What the packs of a training run are planned from.

    Attributes:
        settings: the config of the run.
        reader: the rows of its datasets, as one table.
        cost_model: computes what a document costs.
        configs: all configs of the run; None if `settings` are all that was read.
    """

    settings: "SFTConfig | PlanningSettings"
    reader: RowReader
    cost_model: CostModel
    configs: "RunConfigs | None" = None


def read_dry_run(args: argparse.Namespace) -> DryRun:
    """Return the run of a command, whichever way it has to be read."""
    dry_run = read_run_without_model(args)
    if dry_run is not None:
        return dry_run
    from .configs import read_run
    from .tokens import load_model_config

    configs = read_run(args)
    return read_run_with_configs(configs, load_model_config(configs), args.tokenizer)


def read_run_without_model(args: argparse.Namespace) -> DryRun | None:
    """Return the run of a command; None if it has to be read with the config classes of TRL.

    These classes are needed for a config file, for a model, for other data than files of lengths or one table of
    tokens, and for flags other than those of `FLAG_TYPES`. None is also returned if a flag has a bad value: these
    classes then refuse it with their own message.

    Args:
        args: the parsed flags of the command. Its `unparsed_words` are DATA and the flags of the run.
    """
    # Only `plan` has `--memory` and `--offload`, for which the config of a model is read
    predicts_memory = getattr(args, "memory", None) is not None or getattr(args, "offload", False)
    if args.config or args.tokenizer or predicts_memory:
        return None
    parser = argparse.ArgumentParser(
        argument_default=argparse.SUPPRESS,  # only flags that are given have a value
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("data", nargs="*")
    for name, field_type in FLAG_TYPES.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, type=field_type)
    try:
        # `complete_flags` replaces short flags by those of fields, as `--strategy` by `--packing_strategy`
        flags, unknown = parser.parse_known_args(complete_flags(args.unparsed_words, parser))
    except argparse.ArgumentError:
        return None
    values = vars(flags)
    data = values.pop("data", [])
    if unknown or not data or values.get("seed", 0) < 0:  # the config classes refuse a negative seed
        return None
    try:
        settings = PlanningSettings(**values)
        # `plan` has these two flags itself, and compares several values of them, all of which have to be good:
        # `replace` refuses a bad one. `show` has them among `unparsed_words`
        compared_lengths = getattr(args, "max_length", None) or [settings.max_length]
        compared_strategies = getattr(args, "strategy", None) or [settings.packing_strategy]
        for length, strategy in product(compared_lengths, compared_strategies):
            replace(settings, max_length=length, packing_strategy=strategy)
    except ValueError:
        return None
    reader = _read_lengths_or_tokens(data)
    if reader is None:
        return None
    for name in data:
        print(f"Reading {name}", file=sys.stderr)
    # Without a model, documents cost what they cost on a Llama with 7B parameters
    return DryRun(settings, reader, cost_model=LLAMA_7B)


def read_run_with_configs(
    configs: "RunConfigs", model_config: "PreTrainedConfig | None", tokenizer: str | None
) -> DryRun:
    """Read the documents of a run whose configs are known, and make its cost model.

    Args:
        configs: all configs of the run.
        model_config: transformers' config of its model; None if it names no model.
        tokenizer: the name or folder of the tokenizer; None for the tokenizer of the model.

    Raises:
        ValueError: the datasets cannot be read, or cannot be joined to one table.
    """
    from trl import get_peft_config

    from ..data.model_costs import make_cost_model, with_tower
    from .tokens import read_documents

    reader = read_documents(configs, tokenizer)
    costs = make_cost_model(model_config)
    if reader.image_counts is not None:  # the rows have images, so the costs of the vision tower are added
        lora: Any = get_peft_config(configs.model)  # None without `--use_peft`
        costs = with_tower(costs, model_config, lora=lora)
    return DryRun(configs.training, reader, cost_model=costs, configs=configs)


def planner_for(
    documents: Documents, config: "SFTConfig | PlanningSettings", world_size: int, **settings: Any
) -> EpochPlanner:
    """Return the planner of a run with this config.

    Args:
        documents: the documents of the run.
        config: the config of the run.
        world_size: the number of data-parallel ranks.
        settings: further arguments of `make_planner`: the cost model, and for `plan` also `synchronisation` ("micro" if
            ranks wait for each other after every micro-batch, "step" if only after a step).

    Raises:
        ValueError: settings contradict each other, or a step has too many micro-batches.
    """
    if documents.image_count is not None:
        from ..training.choices import RunSettings
        from ..training.conflicts import refuse_conflicts

        assert not isinstance(config, PlanningSettings), "lengths have no images"
        # Settings that cannot be combined with images; the column `images` stands for any column of images
        refuse_conflicts(RunSettings(args=config, columns=("images",)))
    num_micro_batches = world_size * config.gradient_accumulation_steps
    if num_micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(
            f"`--world-size {world_size}` and `--accumulation {config.gradient_accumulation_steps}` were given. A plan "
            f"has a place for each of the {num_micro_batches:,} micro-batches of a step, at most "
            f"{MAX_MICRO_BATCHES:,}. Set them to what you will train with."
        )
    return make_planner(config, documents, world_size=world_size, **settings)


def _read_lengths_or_tokens(names: Sequence[str]) -> RowReader | None:
    """Return the rows of files of lengths, or of one table of tokens without other columns; None for other data."""
    lengths = []
    for name in names:
        with in_utf8(name):
            lengths_in_file = read_lengths(Path(name))
        if lengths_in_file is not None:
            lengths.append(lengths_in_file)
    if len(lengths) == len(names):
        return LengthRows(np.concatenate(lengths))
    if len(names) > 1:
        return None
    check_path(names[0])  # refuses a path that does not exist
    table = load_local(names[0])
    if not isinstance(table, Dataset) or not {"input_ids"} <= {*table.column_names} <= TOKEN_COLUMNS:
        return None
    check_id_range(table)  # refuses negative token ids and ids too large for any vocabulary
    return TokenReader(table)
