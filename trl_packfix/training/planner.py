"""The packing and the planner of a run, from its config: for the trainer, and for the command line."""

from dataclasses import fields
from typing import Any

from ..data.cache import cached_documents
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import RowReader
from ..planning.costs import CostModel
from ..planning.packing import CONFIG_NAMES, Packing
from ..planning.parallel import Speeds
from ..planning.strategies import STRATEGIES
from .config import SFTConfig


def packing_of(config: SFTConfig, cost_model: CostModel, world_size: int, **settings: Any) -> Packing:
    """The packing of a run with this config on data-parallel ranks; `settings` are what the run changes."""
    speeds: Any = config.exchange_speeds
    settings = {
        "overlong": config.effective_overlong,
        "seed": config.seed if config.data_seed is None else config.data_seed,
        "shuffle": config.train_sampling_strategy != "sequential",
        "speeds": None if speeds is None else Speeds(**speeds),
        "cost_model": cost_model,
        "world_size": world_size,
    } | settings
    of_config = (setting.name for setting in fields(Packing) if setting.name not in settings)
    return Packing(
        **{n: getattr(config, CONFIG_NAMES[n]) for n in of_config if hasattr(config, CONFIG_NAMES[n])} | settings
    )


def documents_of(reader: RowReader, config: SFTConfig) -> Documents:
    return cached_documents(
        reader,
        config.max_length,
        config.effective_overlong,
        truncation_mode=config.truncation_mode,
        wrapped=STRATEGIES[config.packing_strategy].cuts_blocks,
        sorts_tokens=config.share_prefixes == "family",
    )


def make_planner(
    config: SFTConfig, documents: Documents, cost_model: CostModel, *, world_size: int, **settings: Any
) -> EpochPlanner:
    """The planner of a run with this config. Without `max_length`, the longest document sets the capacity."""
    settings = {"max_length": config.max_length or int(documents.lengths.max())} | settings
    return EpochPlanner(documents, packing_of(config, cost_model, world_size, **settings))
