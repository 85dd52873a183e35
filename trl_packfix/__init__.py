"""trl_packfix: TRL's `SFTTrainer` with packing that is right, proved, balanced and fast.

    from trl_packfix import SFTConfig, SFTTrainer   # drop-in for trl's two

Names are imported when they are first used: `plan_packs` needs numpy and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOM = {
    "SFTConfig": "config",
    "SFTTrainer": "trainer",
    "PackPlan": "planning",
    "plan_packs": "planning",
    "PackedDataCollator": "collator",
    "IsolationReport": "verdict",
    "PackingLeakError": "verdict",
    "check_isolation": "isolation",
    "PackingReport": "report",
    "packed_dataloader": "loading",
}

__all__ = [
    "IsolationReport",
    "PackPlan",
    "PackedDataCollator",
    "PackingLeakError",
    "PackingReport",
    "SFTConfig",
    "SFTTrainer",
    "check_isolation",
    "packed_dataloader",
    "plan_packs",
]

if TYPE_CHECKING:
    from .collator import PackedDataCollator
    from .config import SFTConfig
    from .isolation import check_isolation
    from .loading import packed_dataloader
    from .planning import PackPlan, plan_packs
    from .report import PackingReport
    from .trainer import SFTTrainer
    from .verdict import IsolationReport, PackingLeakError


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("SFTConfig", "SFTTrainer"):
        from .compat import require_trl

        require_trl()
    value = getattr(import_module(f".{_ROOM[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
