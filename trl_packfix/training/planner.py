"""The planner of a training run, from its config: for the trainer, and for the forecasts of the command line."""

from typing import Any

from ..data.documents import Documents
from ..data.epochs import EpochPlanner
from ..planning.costs import CostModel
from ..planning.degrees import SequenceParallel, Speeds
from ..planning.plans import RunPlans
from ..planning.units import Bins, Synchronisation
from .config import SFTConfig


def make_planner(
    config: SFTConfig,
    documents: Documents,
    cost_model: CostModel,
    *,
    world_size: int,
    synchronisation: Synchronisation,
    batch_size: int,
) -> EpochPlanner:
    """The planner of a run with this config.

    Args:
        documents: cut to the `max_length` of the config. If it is None, the longest document sets the capacity.
        world_size: data-parallel ranks.
        synchronisation: when ranks wait for each other, "micro" or "step".
        batch_size: documents of `max_length` that a pack holds. It is `per_device_train_batch_size`, or less where
            `auto_find_batch_size` has lowered it.
    """
    max_length = config.max_length or int(documents.lengths.max())
    parallel = None
    if config.tokens_per_rank is not None:
        parallel = SequenceParallel.of_run(
            config.tokens_per_rank, max_length, world_size, heads=cost_model.heads, speeds=speeds(config)
        )
    bins = Bins(
        capacity=batch_size * max_length if parallel is None else parallel.capacity,
        accumulation=config.gradient_accumulation_steps,
        world_size=world_size,
        balance=config.balance,
        synchronisation=synchronisation,
        drop_last=config.dataloader_drop_last,
    )
    plans = RunPlans(
        strategy=config.packing_strategy,
        bins=bins,
        batch_size=batch_size,
        max_length=max_length,
        seed=config.seed if config.data_seed is None else config.data_seed,
        shuffle=config.train_sampling_strategy != "sequential",
        parallel=parallel,
    )
    return EpochPlanner(documents, plans, cost_model, config.share_prefixes)


def speeds(config: SFTConfig) -> Speeds:
    """What devices and links reach, by `exchange_speeds` of the config."""
    speeds_of_config: Any = config.exchange_speeds or {}
    return Speeds(**speeds_of_config)
