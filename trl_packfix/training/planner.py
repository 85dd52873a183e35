"""Make the documents, the packing settings and the planner of a run from its config.

`loading.py` and the command line call these functions. A *document* is one training example as the model reads it; a
*pack* is a row of documents that the model reads together. `documents_of` cuts the rows of a table into documents,
`packing_of` collects the settings by which documents are packed, and `make_planner` returns an `EpochPlanner`, which
plans the packs of each epoch from the two. The *capacity* is the most tokens that a pack may hold.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..data.cache import cached_documents
from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..data.reader import RowReader
from ..feature import features_of
from ..planning.costs import CostModel
from ..planning.packing import CONFIG_NAMES, Packing
from ..planning.parallel import Speeds
from ..planning.strategies import STRATEGIES
from .planning_settings import PlanningSettings

if TYPE_CHECKING:  # `config.py` imports TRL, which takes seconds, and the command line plans without it
    from .config import SFTConfig


def packing_of(
    config: "SFTConfig | PlanningSettings", cost_model: CostModel, world_size: int, **settings: Any
) -> Packing:
    """Return the settings by which a run packs documents.

    Args:
        config: the config of the run.
        cost_model: computes the FLOPs of a forward on a document.
        world_size: the number of data-parallel ranks.
        settings: fields of `Packing` with other values than the config gives.
    """
    # First the fields whose values are computed from the config
    speeds: Any = config.exchange_speeds  # of GPUs and of the links between them, by name; see `SFTConfig`
    settings = {
        "overlong": config.effective_overlong,  # what is done with too long documents: `overlong` or the default
        "seed": config.seed if config.data_seed is None else config.data_seed,
        "shuffle": config.train_sampling_strategy != "sequential",
        "speeds": None if speeds is None else Speeds(**speeds),
        "cost_model": cost_model,
        "world_size": world_size,
    } | settings
    # Then the other fields that the config has. `CONFIG_NAMES` has the config's name of each field of `Packing`. A
    # field that the config does not have keeps its default
    for setting in fields(Packing):
        config_name = CONFIG_NAMES[setting.name]
        if setting.name not in settings and hasattr(config, config_name):
            settings[setting.name] = getattr(config, config_name)
    return Packing(**settings)


def documents_of(reader: RowReader, config: "SFTConfig | PlanningSettings") -> Documents:
    """Return the documents of a table, from the cache of an earlier run if there is one."""
    return cached_documents(
        reader,
        config.max_length,
        config.effective_overlong,
        truncation_mode=config.truncation_mode,
        cuts_blocks=STRATEGIES[config.packing_strategy].cuts_blocks,  # documents are cut where a block of tokens ends
        feature=features_of(config),  # the option of packs that is on, such as `share_prefixes`
    )


def make_planner(
    config: "SFTConfig | PlanningSettings",
    documents: Documents,
    cost_model: CostModel,
    *,
    world_size: int,
    **settings: Any,
) -> EpochPlanner:
    """Return the planner of a run.

    Args:
        config: the config of the run. Without its `max_length`, the longest document sets the capacity of packs.
        documents: the documents of the training set.
        cost_model: computes the FLOPs of a forward on a document.
        world_size: the number of data-parallel ranks.
        settings: fields of `Packing` with other values than the config gives.
    """
    settings = {"max_length": config.max_length or int(documents.lengths.max())} | settings
    return EpochPlanner(documents, packing_of(config, cost_model, world_size, **settings))
