"""The configs of a run, from flags and a YAML file, as `trl sft` reads them: for every command."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence, Set
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import PartialState
from accelerate.commands.launch import launch_command_parser
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser

from ..training.config import SFTConfig, lacks_devices, with_settings
from ..training.foreign_keys import describe_foreign_keys, other_defaults
from .flags import SHORT_FLAGS, did_you_mean, setting_named
from .mixture import BOOLEAN_TEXTS, MixtureConfig, check_types

# Smallest and largest value that is no error of the run; no field may be "not a number"
RANGES = {
    "learning_rate": (0, sys.float_info.max),
    "dataloader_num_workers": (0, inf),
    "dataset_num_proc": (1, inf),
}
ZERO3 = Path(__file__).with_name("zero3.json")
# Packs are planned without a GPU and without an engine, by the file of a run that has both
ON_CPU = {"use_cpu": "true", "bf16": "false", "fp16": "false", "tf32": "false", "deepspeed": "", "fsdp": ""}
ON_CPU |= {"report_to": "none"}
NOTE = (
    "Packing is on, which is the default of this command and not of `trl sft`. To train without it, set "
    "`--packing false`, or `packing: false` in the config file."
)

DESCRIPTION = """\
Fine-tune a language model on packed documents: the flags of `trl sft`, and the fields of packing.

On one GPU, or on the CPU of a machine without one:
    trl-packfix train --model_name_or_path MODEL --dataset_name DATA --output_dir output
    trl-packfix train --config FILE.yaml

On every GPU of a machine:
    accelerate launch -m trl_packfix train --config FILE.yaml
    torchrun --nproc_per_node 8 -m trl_packfix train --config FILE.yaml
    deepspeed --num_gpus=8 --module trl_packfix train --config FILE.yaml    (ZeRO-3 unless `--deepspeed` is given)

DATA is a name on the hub, a file (.jsonl, .json, .parquet, .csv), or a folder written by `trl-packfix prepare` or
`save_to_disk`; several are joined. A file that `trl sft --config` takes may set any of the flags below; flags on the
command line override it. `datasets:` in the file mixes several, with `fraction:` for the share of each.
`--resume_from_checkpoint newest` continues from the newest whole checkpoint in output_dir, or starts anew if output_dir
has no checkpoint. Defaults are those of TRL, except that packing is on; `--packing false`, or `packing: false` in the
file, switches it off. Exit code 0 if the model was trained and saved, 2 if what was given cannot be read or used."""


@dataclass
class TrainArguments(ScriptArguments):
    """TRL's `ScriptArguments`, with several datasets."""

    dataset_name: list[str] | None = field(  # type: ignore[assignment]  # TRL has one
        default=None,
        metadata={
            "help": "Name on the hub, file (.jsonl, .json, .parquet, .csv) or folder of the dataset; several are "
            "joined. Not used if the config file has `datasets`."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.dataset_name, str):  # from a YAML file
            self.dataset_name = [self.dataset_name]
        names = self.dataset_name
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(
                f"`dataset_name: {names}` was given. It is one name or path, or a list of them. Settings of "
                "each dataset, such as `split` and `fraction`, belong into `datasets`, a list of entries with `path`."
            )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows every flag with its default, and the description unchanged."""


def machine_settings() -> dict[str, Any]:
    """Defaults for this launcher and machine. A YAML file and flags override them.

    Nothing is set for several processes without a GPU: `check_devices` refuses them.
    """
    gpu = torch.cuda.is_available()
    is_on_cpu = not gpu and not lacks_devices()
    if "CROSS_SIZE" not in os.environ:  # only the deepspeed launcher sets it
        # bf16 is twice as fast where it is not emulated, which older versions of torch do not say
        cpu: dict[str, Any] = {} if gpu else getattr(torch.cpu, "get_capabilities", dict)()
        is_fast = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16"))
        return {} if gpu else {"bf16": is_fast} | ({"use_cpu": True} if is_on_cpu else {})
    # As `accelerate launch --use_deepspeed` does. Unlike a default for `--deepspeed`, this also sets the number of
    # ranks on machines without a GPU, where transformers passes no backend. An explicit `--deepspeed` overrides it.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ZERO3)
    # DeepSpeed allows bf16 on a GPU only
    return {} if gpu else {"bf16": False} | ({"ddp_backend": "gloo"} if is_on_cpu else {})


class RunConfigs(NamedTuple):
    """What a user has set of a run."""

    script: TrainArguments
    training: SFTConfig
    model: ModelConfig
    mixture: MixtureConfig
    given: Set[str]  # names of the fields that a flag or the file sets
    words: list[str]  # that belong to no flag

    @property
    def names(self) -> list[str]:
        """Name or path of each dataset."""
        return [source.path for source in self.mixture.datasets] or self.script.dataset_name or []

    @property
    def parts(self) -> list[str]:
        """What is read as one table each: every dataset, or the mixture."""
        return [", ".join(self.names)] if self.mixture.datasets else self.names


def parse_configs(
    flags: Sequence[str] | None = None,
    prog: str = "trl-packfix train",
    description: str = DESCRIPTION,
    *,
    others: argparse.Namespace | None = None,
    **defaults: Any,
) -> RunConfigs:
    """The configs of a run, from flags (default: those of this process) and the YAML file of `--config`.

    Packing is on unless it is switched off, or `padding_free` chooses to train the unpacked steps without padding. A
    command that trains nothing has `others` flags, and takes words without a flag, too. Keys for TRL's launcher are
    only named: this command is launched.
    """
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
    kinds: Any = (TrainArguments, SFTConfig, ModelConfig, MixtureConfig)
    usage = f"{prog} [--config FILE.yaml] [--FLAG VALUE ...]"
    parser = TrlParser(
        kinds, prog=prog, usage=usage, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    file, words = _split_config(sys.argv[1:] if flags is None else flags, prog)
    settings = {} if file is None else read_settings(file)
    known = [action.dest for action in parser._actions]
    suggested = known if others is None else [*known, *vars(others)]
    if others is not None:
        words = _with_values(words, parser)
        parser.add_argument("words", nargs="*")
    _refuse_unknown([name for name in settings if name not in known], suggested, settings.keys())
    check_types(settings, kinds, "in the config file", texts=True)
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words} | settings.keys()
    if "tokens_per_rank" in given:  # it sets the size of micro-batches
        defaults = {"per_device_train_batch_size": 1} | defaults
    of_file = {"packing": True, "padding_free": settings.get("padding_free", False)}
    parser.set_defaults(**machine_settings() | of_file | defaults)
    is_by_default = "packing" not in given and not parser.parse_known_args(words)[0].padding_free
    parser.set_defaults(packing=is_by_default)
    try:
        *configs, unknown = parser.parse_args_and_config(
            words if file is None else ["--config", file, *words], return_remaining_strings=True
        )
    except ValueError as error:
        if is_by_default and "packing" in str(error):
            error.add_note(NOTE)
        raise
    names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
    _refuse_unknown(names or unknown, suggested, given)
    if names:
        PartialState().print(
            f"Not used: {', '.join(names)}. `trl sft` passes this to `accelerate launch`. Here, give it to the "
            "launcher: `accelerate launch ... -m trl_packfix train ...`."
        )
    if others is None and is_by_default:
        PartialState().print(NOTE)
    script_args, training_args, model_args, mixture = configs[:4]
    _check_values(training_args)
    return RunConfigs(
        script_args, training_args, model_args, mixture, given, [] if others is None else configs[4].words
    )


def read_run(args: argparse.Namespace, *words: str) -> RunConfigs:
    """The run that a command was given, whose packs are planned and not trained: on a CPU, and packed in any case."""
    on_cpu = (f"--{name}={value}" for name, value in ON_CPU.items())
    words = (*args.more_flags, *words, *(f"--config={file}" for file in args.config), *on_cpu)
    with redirect_stdout(sys.stderr):  # which holds the result only
        run = parse_configs(words, f"trl-packfix {args.command}", others=args)
    if not run.training.packing:
        if "packing" in run.given and args.command in ("plan", "show"):
            said = f"`packing` is off in this run; `{args.command}` shows the packs that it would have."
            print(said, file=sys.stderr)
        strategy = {"packing_strategy": "minibatch"} if run.training.padding_free else {}
        run = run._replace(training=with_settings(run.training, packing=True, padding_free=False, **strategy))
    if run.words and args.command != "check":
        run.script.dataset_name = run.words
        run.mixture.datasets = []
    if not run.names and args.command in ("show", "prepare"):
        raise ValueError(
            f"`{args.command}` was given without DATA. There is nothing to read. Give files, folders or names on the "
            "hub, or `--config` with a file that names them."
        )
    return run


def _with_values(words: Sequence[str], parser: TrlParser) -> list[str]:
    """Names of fields for short names of flags; and `true` for a switch, which would take the DATA behind it."""
    switches = [name for action in parser._actions if action.const is True for name in action.option_strings]
    full = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        lacks_value = name in switches and not equals and following.lower() not in BOOLEAN_TEXTS
        full.append(SHORT_FLAGS.get(name, name) + ("=true" if lacks_value else equals + value))
    return full


def _check_values(args: SFTConfig) -> None:
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ValueError(
            f"`num_train_epochs={args.num_train_epochs:g}` and `max_steps={args.max_steps}` were given."
            " Nothing would be trained, and the model saved as it is. Set one of them above 0."
        )
    for name, value in vars(args).items():
        least, most = RANGES.get(name, (-inf, inf))
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(
                f"`{name}={value}` was given. Training cannot compute with it. Set `{name}` to a finite number"
                f"{f' of {least} or more' if name in RANGES else ''}, or leave it unset."
            )
    path = args.chat_template_path
    if path is not None and not (Path(path).is_file() and path.endswith((".jinja", ".j2"))):
        what = "a file of a template (.jinja, .j2) that is here, or the name or folder of a tokenizer that has one"
        with setting_named(f"chat_template_path={path}", what):
            AutoTokenizer.from_pretrained(path).get_chat_template()


def _split_config(words: Sequence[str], prog: str) -> tuple[str | None, list[str]]:
    """The file of `--config`, which TRL takes as two words only, and the other words."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", metavar="FILE.yaml", default=[])
    files, others = parser.parse_known_args(words)
    if len(files.config) > 1:
        raise ValueError(
            f"`--config` was given {len(files.config)} times ({', '.join(files.config)}). One file sets the flags of a "
            "run. Put all settings into one file, or give the others as flags."
        )
    return next(iter(files.config), None), others


def read_settings(file: str) -> dict[str, Any]:
    try:
        with Path(file).open(encoding="utf-8") as stream:
            settings = yaml.load(stream, _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(
            f"`--config {file}` was given. It cannot be read: {reason}. Give the path of a YAML file in UTF-8 with one "
            "`flag: value` per line."
        ) from error
    if not isinstance(settings, dict):
        what = "nothing" if settings is None else f"a {type(settings).__name__}"
        raise ValueError(
            f"`--config {file}` was given. The file holds {what}, and settings need names. Write one `flag: value` per "
            "line, or omit `--config`."
        )
    if odd := [name for name in settings if not isinstance(name, str)]:
        raise ValueError(
            f"`--config {file}` was given, and YAML reads the name of a setting as {odd[0]!r}, which is no text (`no`, "
            "`on` and `1` are values there). Write the name of a flag, in quotes if it must be."
        )
    return settings


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that a mapping has twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for i, key in enumerate(keys) if isinstance(key, str) and key in keys[:i]), None)
        if twice is not None:
            problem = f"the key `{twice}` stands there twice, and one of its values would be lost"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _refuse_unknown(names: list[str], known: list[str], given: Set[str]) -> None:
    """Refuse names that are neither a field nor a flag of TRL's launcher, with what keys of other trainers are here."""
    launcher = {action.dest for action in launch_command_parser()._actions} | {"accelerate_config"} if names else set()
    wrong = [name for name in names if name not in launcher]
    if wrong:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in wrong)} was given, as a flag or in the config file"
            f"{did_you_mean([name for name in wrong if not describe_foreign_keys([name])], known)}. No field of "
            "SFTConfig, ModelConfig, ScriptArguments or the dataset mixture has this name, so it would be ignored."
            f"{describe_foreign_keys(wrong)}"
            f"{other_defaults(given)} Correct or remove it; `trl-packfix train --help` lists all flags."
        )
