"""The version, for the package, its checkpoints and the wheel."""

__version__ = "0.1.0"
