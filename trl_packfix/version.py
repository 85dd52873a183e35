"""The version, for the package, its checkpoints and the wheel.

Between two releases, `__version__` is the version of the next release, with `.dev0`.
"""

import importlib.metadata

__version__ = "1.0.0"

# The libraries that decide how documents are packed and trained, in the versions of constraints.txt. Several documents
# are trained in one row, a pack, and must not see each other. In some models a newer release of a library may break
# this, so a run with a newer release says so in its report.
TESTED_VERSIONS = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
}


def installed_version(name: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def libraries_newer_than_tested() -> tuple[str, ...]:
    """Return a sentence for each installed library that is newer than the newest version with which it was tested.

    Another build of the tested version, such as torch 2.13.0+cpu, is not newer.
    """
    # Imported here, because the build of the wheel reads `__version__` where only setuptools is installed
    from packaging.version import Version

    newer = []
    for name, tested in TESTED_VERSIONS.items():
        installed = installed_version(name)  # deepspeed is optional
        if installed and Version(Version(installed).public) > Version(tested):
            newer.append(f"{name} {installed} is newer than the newest tested {tested}")
    return tuple(newer)
