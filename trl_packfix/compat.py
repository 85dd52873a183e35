"""Every version branch: why it is there, a link, and when it can go."""

import trl
from packaging.version import Version

TRL_FLOOR = "1.16.0"


def require_trl(installed: str = trl.__version__) -> None:
    """Refuse a TRL whose trainer the overrides were not written against.

    TRL 1.16 builds a `labels` column in `_prepare_dataset` and scores through its fused LM head; the trainer stands on
    both. Can go when `pyproject.toml` alone is enough (an environment can be changed after installation).
    """
    if Version(installed) < Version(TRL_FLOOR):
        raise ImportError(
            f"trl {installed} is installed. trl_packfix builds on the dataset preparation and the loss of "
            f"trl {TRL_FLOOR}, which earlier versions do not have. Run `pip install 'trl>={TRL_FLOOR}'`."
        )
