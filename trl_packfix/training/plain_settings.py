"""`PlainSettings`: the settings of planning, for commands that must not import TRL and torch, which takes seconds.

`trl-packfix plan` and `show` make `PlainSettings` of their flags if DATA are files of lengths (`cli/plain_run.py`). If
the user sets any other field, the command makes an `SFTConfig`, which also checks its values.
"""

from dataclasses import dataclass
from typing import Any

from ..data.documents import Overlong, TruncationMode
from ..planning.packing import SharePrefixes
from ..planning.strategies import STRATEGIES, Strategy
from ..planning.units import Balance


@dataclass(frozen=True)
class PlainSettings:
    """The fields of `SFTConfig` that planning reads, with the same defaults."""

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

    @property
    def effective_overlong(self) -> Overlong:
        """The policy for documents longer than `max_length`, as in `SFTConfig`."""
        return self.overlong or STRATEGIES[self.packing_strategy].overlong
