"""`trl-packfix train`: fine-tune with the flags of `trl sft` and those of packing, under any launcher."""

import argparse
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .flags import Subparsers, setting_named


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "train",
        help="fine-tune on packed documents: the flags and config files of `trl sft`, and the fields of packing",
        add_help=False,  # the flags are those of TRL's config classes, which are imported only when it runs
        allow_abbrev=False,
    )


def run(args: argparse.Namespace) -> int:
    if find_spec("deepspeed"):
        _import_deepspeed()
    from .configs import parse_configs
    from .training import make_trainer, train_and_save

    # A launcher of DeepSpeed puts this flag before the command.
    rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    configs = parse_configs([*rank, *args.more_flags])
    trainer: Any = make_trainer(configs)
    with setting_named(f"--optim {trainer.args.optim.value}", "another optimizer, or install its package"):
        trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)  # the run does so only when it is proved
    args.shows_traceback = True  # what was given is read and checked: from here on errors are those of the run
    train_and_save(trainer, configs.names)
    return 0


def _import_deepspeed() -> None:
    """Import DeepSpeed, which logs to stdout when it is first imported, and warns where there is no GPU."""
    import torch

    names_cpu = "DS_ACCELERATOR" not in os.environ and not torch.accelerator.is_available()
    if names_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with redirect_stdout(sys.stderr):
        import_module("deepspeed")
    if names_cpu:  # it says that the user wants to train on CPUs, see `check_devices`
        del os.environ["DS_ACCELERATOR"]
