"""`trl-packfix train`: fine-tune with the flags of `trl sft` and those of packing, under any launcher.

`cli/__init__.py` parses the command, and passes all further words on as `args.unparsed_words`.
"""

import argparse
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .flags import Subparsers, setting_named


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `train`, without flags. `run_train` imports TRL's config classes, and parses their flags."""
    parser = subparsers.add_parser(
        "train",
        help="fine-tune on packed documents: the flags and config files of `trl sft`, and the fields of packing",
        add_help=False,  # `parse_configs` prints the help
        allow_abbrev=False,
    )
    parser.set_defaults(run_command=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Train and save the model. Return 0."""
    if find_spec("deepspeed"):  # other libraries would import it later, with its log on stdout
        _import_deepspeed()
    from .configs import parse_configs
    from .training import make_trainer, train_and_save

    # A launcher of DeepSpeed puts this flag before the command.
    rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    configs = parse_configs([*rank, *args.unparsed_words])
    trainer: Any = make_trainer(configs)
    # Errors become a ValueError: "`--optim NAME` was given. It cannot be loaded: ... Give another optimizer, or ..."
    with setting_named(f"--optim {trainer.args.optim.value}", "another optimizer, or install its package"):
        # Check now that the optimizer is installed. Training would look for it only after the test that documents of a
        # pack do not see each other, which takes long
        trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    # All settings are read and checked. `cli/__init__.py` raises an error from here on with its traceback.
    args.shows_traceback = True
    train_and_save(trainer, dataset_names=configs.names)
    return 0


def _import_deepspeed() -> None:
    """Import DeepSpeed with its log on stderr, and without its warning where there is no GPU."""
    import torch

    sets_accelerator = "DS_ACCELERATOR" not in os.environ and not torch.accelerator.is_available()
    if sets_accelerator:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with redirect_stdout(sys.stderr):
        import_module("deepspeed")
    if sets_accelerator:
        # `check_devices` takes this variable for the user's wish to train on CPUs.
        del os.environ["DS_ACCELERATOR"]
