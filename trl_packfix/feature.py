"""Find the folders of features, which may be missing: a feature is a folder in `features/` that the core never imports.

A feature imports the core. The core asks this module for the package of a feature by its name, and works without it.
"""

from importlib import import_module
from types import ModuleType


def find_folder(name: str) -> ModuleType | None:
    """Import the folder of a feature and return its package; None if the folder is not there."""
    package_name = f"{__package__}.features.{name}"
    try:
        return import_module(package_name)
    except ModuleNotFoundError as error:
        if error.name not in (package_name, f"{__package__}.features"):
            raise  # a module that the feature imports
        return None


def require_folder(feature: str, public_name: str) -> None:
    """Raise ImportError if the folder of a feature is missing, from which a public name is imported."""
    if find_folder(feature) is None:
        raise ImportError(
            f"`{public_name}` was imported, and this installation of trl_packfix is without its folder "
            f"`features/{feature}`, which defines it. Install trl_packfix anew."
        )
