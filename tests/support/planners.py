"""The planner of the epochs of a run, from the settings that a test changes."""

from pathlib import Path
from typing import Any

from trl_packfix.data.cache_files import Arrays, write_arrays
from trl_packfix.data.documents import Documents
from trl_packfix.data.epochs import EpochPlanner
from trl_packfix.planning.costs import LLAMA_7B, CostModel
from trl_packfix.planning.degrees import SequenceParallel, Speeds
from trl_packfix.planning.families import SharePrefixes
from trl_packfix.planning.plans import RunPlans
from trl_packfix.planning.units import Bins


def make_epochs(  # noqa: PLR0913 - a stand-in for a config
    documents: Documents,
    strategy: str,
    batch_size: int = 1,
    max_length: int = 256,
    accumulation: int = 1,
    world_size: int = 1,
    *,
    seed: int = 0,
    shuffle: bool = True,
    tokens_per_rank: int | None = None,
    degrees: tuple[int, ...] = (),
    speeds: Speeds | None = None,
    cost_model: CostModel = LLAMA_7B,
    share_prefixes: SharePrefixes = "off",
    **of_bins: Any,
) -> EpochPlanner:
    """Documents -> planner. `of_bins`: `balance`, `synchronisation`, `drop_last`."""
    capacity, parallel = batch_size * max_length, None
    if tokens_per_rank is not None:
        parallel = SequenceParallel.of_run(
            tokens_per_rank, max_length, world_size, heads=cost_model.heads, degrees=degrees, speeds=speeds
        )
        capacity = parallel.capacity
    plans = RunPlans(
        strategy=strategy,
        bins=Bins(capacity=capacity, accumulation=accumulation, world_size=world_size, **of_bins),
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
        shuffle=shuffle,
        parallel=parallel,
    )
    return EpochPlanner(documents, plans, cost_model, share_prefixes)


def rewrite(file: Path, arrays: Arrays) -> None:
    """A cache file with these arrays in its place, and with their seal; who has mapped the old one keeps it."""
    file.unlink()
    assert write_arrays(file, arrays)
