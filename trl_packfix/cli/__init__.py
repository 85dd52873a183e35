"""The command line: `trl-packfix COMMAND`, also `python -m trl_packfix COMMAND`.

Each command is a module of this folder with two functions: `add_parser(subparsers)`, and one that runs the command and
returns its exit code, which `add_parser` puts into the parsed arguments as `run_command`. A command imports heavy
libraries only when it runs, so that `--help` is fast.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from .flags import CommandParser, HelpFormatter, did_you_mean
from .torch_environment import set_torch_environment

COMMANDS = ("plan", "show", "prepare", "check", "train", "report", "recipes", "env")
WITHOUT_A_RUN = ("report", "recipes", "env")  # commands that read no config of a run, and so take only their own flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    For a ValueError, an OSError or a missing package, the message is printed without a traceback, and the code is 2.
    After `train` has read its input, it raises these errors with their traceback. The code is 141 (128 + SIGPIPE), as
    for other programs, if the reader of a pipe closes it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Write escapes for characters that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    parser = CommandParser(
        prog="trl-packfix", description="Packing that is right, proved and balanced.", formatter_class=HelpFormatter
    )
    # The launcher of DeepSpeed adds this flag before the command.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f".{name}", __package__).add_parser(subparsers)
    args, unparsed_words = parser.parse_known_args(argv)
    # DATA and the flags of a run are parsed later: their names are known only when the config classes are imported.
    args.unparsed_words = unparsed_words
    if unparsed_words and args.command in WITHOUT_A_RUN:
        names = [word.partition("=")[0] for word in unparsed_words if word.startswith("-")]
        command = subparsers.choices[args.command]
        known = [name for action in command._actions for name in action.option_strings]
        command.error(f"unrecognized arguments: {' '.join(unparsed_words)}{did_you_mean(names, known)}")
    if args.command == "train":
        set_torch_environment()
    try:
        code: int = args.run_command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as error:
        # rich turns a closed pipe into code 1, which here is a bad result. It has redirected stdout already.
        if isinstance(error.__context__, BrokenPipeError):
            return 141
        raise
    except (ValueError, OSError, ImportError) as error:  # transformers raises OSError if there is no such model
        # A check of packages raises an ImportError without a name. With a name, an import has failed.
        has_failed_import = isinstance(error, ImportError) and error.name is not None
        # `run_train` sets `shows_traceback` when all input is read.
        if has_failed_import or hasattr(args, "shows_traceback"):
            raise
        lines = [f"trl-packfix {args.command}: {_message(error)}", *getattr(error, "__notes__", ())]
        print(*lines, sep="\n", file=sys.stderr)
        return 2


def _message(error: Exception) -> str:
    """Return the message of an error. Errors of Python get a message that says what was given and what to do."""
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"`{error.filename}` was given, or is needed for what was given. It cannot be opened or made: "
            f"{error.strerror}. Give a path that exists and that you may read, or for output a folder that you may "
            "write."
        )
    if isinstance(error, ImportError):
        reason = str(error).rstrip(".")
        return (
            f"A setting was given that needs a package that is not here: {reason}. Install it, or change the setting."
        )
    return str(error)


def run_program() -> None:
    """Run the command of this process and exit. After Ctrl-C print one line, and end by the signal."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("trl-packfix: interrupted", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
