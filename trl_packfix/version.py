"""The version, for the package, its checkpoints and the wheel. Between two releases it is that of the next, `.dev0`."""

__version__ = "0.2.0.dev0"
