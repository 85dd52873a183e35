"""The command line: `trl-packfix COMMAND`, also `python -m trl_packfix COMMAND`.

Each command is a module `command_<name>` with `add_parser(subparsers)` and `run(args) -> int`, the exit code. These
modules import what is heavy only when they run, so that `--help` is quick.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("plan", "show", "check")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. A ValueError is the user's to read: its message, and exit code 2."""
    parser = argparse.ArgumentParser(prog="trl-packfix", description="Packing that is right, proved and balanced.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: import_module(f".command_{name}", __package__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):
        # DeepSpeed, where it is installed, logs to stdout from its first import on; results stand there, and `--json`
        # must be nothing else.
        import_module(".trainer", __package__)
    try:
        return modules[args.command].run(args)
    except (ValueError, OSError) as error:  # OSError: no such model, no such file
        print(f"trl-packfix {args.command}: {error}", file=sys.stderr)
        return 2
