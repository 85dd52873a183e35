"""`PlanningSettings`: what planning reads of a config, without TRL and torch, which take seconds to import.

`trl-packfix plan` and `show` construct it in place of an `SFTConfig` if their flags set no other field
(`cli/dry_run.py`), and `planner.py` takes either of the two. A test compares the defaults with those of `SFTConfig`.
"""

from dataclasses import dataclass
from typing import Any, get_args

from ..data.dataset_checks import check_choice, check_count, check_max_length, check_overlong
from ..planning.packing import Overlong, SharePrefixes, TruncationMode
from ..planning.strategies import STRATEGIES, Strategy
from ..planning.units import Balance


@dataclass(frozen=True)
class PlanningSettings:
    """The fields of `SFTConfig` that planning reads, with the same defaults. `SFTConfig` describes them.

    The checks are a part of those of `SFTConfig`. Where they fail, the command line constructs an `SFTConfig`, whose
    messages it shows.

    Raises:
        ValueError: a value is unknown, or contradicts another value.
    """

    max_length: int = 1024
    packing_strategy: Strategy = "stream"
    overlong: Overlong | None = None
    truncation_mode: TruncationMode = "keep_start"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    balance: Balance = "step"
    seed: int = 42
    data_seed: int | None = None
    train_sampling_strategy: str = "random"
    dataloader_drop_last: bool = False
    tokens_per_rank: int | None = None
    share_prefixes: SharePrefixes = "off"
    exchange_speeds: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("packing_strategy", self.packing_strategy, STRATEGIES)
        check_choice("overlong", self.overlong, (None, *get_args(Overlong)))
        check_choice("balance", self.balance, get_args(Balance))
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            check_count(name, getattr(self, name))
        check_max_length(self.max_length, self.per_device_train_batch_size)
        check_overlong("packing_strategy", self.packing_strategy, self.overlong)

    @property
    def effective_overlong(self) -> Overlong:
        """The policy for documents longer than `max_length`, as in `SFTConfig`."""
        return self.overlong or STRATEGIES[self.packing_strategy].overlong
