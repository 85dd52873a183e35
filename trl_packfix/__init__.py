"""trl_packfix: TRL's `SFTTrainer` with packing that is right, proved, balanced and fast.

    from trl_packfix import SFTConfig, SFTTrainer   # drop-in for trl's two

Each name is imported at its first use, so `plan_packs` needs numpy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

_MODULE_OF = {
    "SFTConfig": "training.config",
    "SFTTrainer": "training.trainer",
    "PackPlan": "planning.packs",
    "plan_packs": "planning.strategies",
    "PackedDataCollator": "data.collator",
    "prepare_for_packing": "isolation.packed_model",
    "IsolationReport": "isolation.isolation_report",
    "PackingLeakError": "isolation.isolation_report",
    "check_isolation": "isolation.check_isolation",
    "StepReport": "isolation.check_step",
    "check_step": "isolation.check_step",
    "PackingReport": "reporting.report",
    "packed_dataloader": "data.loaders",
    "pack_forward": "training.pack_forward",
}

__all__ = [
    "IsolationReport",
    "PackPlan",
    "PackedDataCollator",
    "PackingLeakError",
    "PackingReport",
    "SFTConfig",
    "SFTTrainer",
    "StepReport",
    "check_isolation",
    "check_step",
    "pack_forward",
    "packed_dataloader",
    "plan_packs",
    "prepare_for_packing",
]

if TYPE_CHECKING:
    from .data.collator import PackedDataCollator
    from .data.loaders import packed_dataloader
    from .isolation.check_isolation import check_isolation
    from .isolation.check_step import StepReport, check_step
    from .isolation.isolation_report import IsolationReport, PackingLeakError
    from .isolation.packed_model import prepare_for_packing
    from .planning.packs import PackPlan
    from .planning.strategies import plan_packs
    from .reporting.report import PackingReport
    from .training.config import SFTConfig
    from .training.pack_forward import pack_forward
    from .training.trainer import SFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("SFTConfig", "SFTTrainer"):
        from .compat import require_trl

        require_trl()
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
