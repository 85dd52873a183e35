"""The command line: `trl-packfix COMMAND`, also `python -m trl_packfix COMMAND`.

Each command is a module of this folder with `add_parser(subparsers)` and `run(args) -> int`, the exit code. They import
heavy libraries only when they run, so that `--help` is quick.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

COMMANDS = ("plan", "show", "prepare", "check")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. A ValueError is the user's to read: its message, and exit code 2.

    What the terminal has no characters for is printed as escapes. Where the reader of a pipe has seen enough, the
    command ends as other programs do, with 141 (128 + SIGPIPE).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="trl-packfix", description="Packing that is right, proved and balanced.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: import_module(f".{name}", __package__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    if find_spec("deepspeed"):
        # It logs to what is stdout at its first import, and the Trainer imports it. `--json` must be alone there.
        with contextlib.redirect_stdout(sys.stderr):
            import_module("deepspeed")
    try:
        code: int = modules[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141
    except (ValueError, OSError) as error:  # OSError: no such model, no such file
        print(f"trl-packfix {args.command}: {error}", file=sys.stderr)
        return 2
