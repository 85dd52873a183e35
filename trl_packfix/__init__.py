"""trl_packfix: TRL's `SFTTrainer` with packing that is right, proved, balanced and fast.

    from trl_packfix import SFTConfig, SFTTrainer   # drop-in for trl's two

A test before training proves on the model itself that the documents of a pack do not change each other. The work is
balanced over micro-batches and ranks. Each name is imported at its first use, so `plan_packs` needs numpy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

# The module in which each public name is defined
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
    "DataReport": "samples.data_report",
    "check_data": "training.preparation",
    "PackingReport": "reporting.report",
    "packed_dataloader": "data.loaders",
    "pack_forward": "features.pack_forward.trainers",
}

__all__ = sorted(_MODULE_OF)

if TYPE_CHECKING:
    from .data.collator import PackedDataCollator as PackedDataCollator
    from .data.loaders import packed_dataloader as packed_dataloader
    from .features.pack_forward.trainers import pack_forward as pack_forward
    from .isolation.check_isolation import check_isolation as check_isolation
    from .isolation.check_step import StepReport as StepReport
    from .isolation.check_step import check_step as check_step
    from .isolation.isolation_report import IsolationReport as IsolationReport
    from .isolation.isolation_report import PackingLeakError as PackingLeakError
    from .isolation.packed_model import prepare_for_packing as prepare_for_packing
    from .planning.packs import PackPlan as PackPlan
    from .planning.strategies import plan_packs as plan_packs
    from .reporting.report import PackingReport as PackingReport
    from .samples.data_report import DataReport as DataReport
    from .training.config import SFTConfig as SFTConfig
    from .training.preparation import check_data as check_data
    from .training.trainer import SFTTrainer as SFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("SFTConfig", "SFTTrainer"):
        from .compat import require_trl

        require_trl()
    module_name = _MODULE_OF[name]
    if module_name.startswith("features."):  # an installation may be without the folder of a feature
        from .feature import require_folder

        require_folder(module_name.split(".")[1], name)
    value = getattr(import_module(f".{module_name}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
