"""Read the configs of a run from flags and a YAML file, as `trl sft` does.

`parse_configs` does it for `train`, with defaults for this machine (`machine_settings`). `read_run` does it for the
commands that only plan, measure or check: they take every flag of `train` beside their own, and DATA as positional
arguments. Both return `RunConfigs`.
"""

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

from ..compat import loads_tokenizer_of_revision
from ..training.config import SFTConfig, lacks_devices, with_settings
from ..training.foreign_keys import describe_foreign_keys, other_defaults
from .flags import SHORT_FLAGS, HelpFormatter, complete_flags, did_you_mean, setting_named
from .mixture import MixtureConfig, check_types
from .torch_environment import cpu_computes_bf16

# By field, the smallest and the largest valid value. Fields without an entry take any number.
# NaN is refused for all fields.
RANGES = {
    "learning_rate": (0, sys.float_info.max),
    "dataloader_num_workers": (0, inf),
    "dataset_num_proc": (1, inf),
    "seed": (0, inf),
    "data_seed": (0, inf),
}
ZERO3 = Path(__file__).with_name("zero3.json")
# Flags of commands that do not train. They override the config file, so that no GPU, DeepSpeed or FSDP is needed
ON_CPU = {
    "use_cpu": "true",
    "bf16": "false",
    "fp16": "false",
    "tf32": "false",
    "deepspeed": "",
    "fsdp": "",
    "report_to": "none",
}
PACKING_NOTE = (
    "Packing is on, which is the default of this command and not of `trl sft`. To train without it, set "
    "`--packing false`, or `packing: false` in the config file."
)

DESCRIPTION = """\
Fine-tune a language model on packed documents: the flags of `trl sft`, and the fields of packing.

On one GPU, or on the CPU of a machine without one:
  trl-packfix train --model_name_or_path MODEL --dataset_name DATA \\
      --output_dir output
  trl-packfix train --config FILE.yaml

On every GPU of a machine, with DeepSpeed as ZeRO-3 unless `--deepspeed` is given:
  accelerate launch -m trl_packfix train --config FILE.yaml
  torchrun --nproc_per_node 8 -m trl_packfix train --config FILE.yaml
  deepspeed --num_gpus=8 --module trl_packfix train --config FILE.yaml

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


class TrainHelpFormatter(HelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows every flag with its default."""


def machine_settings() -> dict[str, Any]:
    """Return defaults for this launcher and machine, by field. A YAML file and flags override them.

    Under the launcher of DeepSpeed, ZeRO-3 is set in the environment too. Several processes that have no GPU get no
    defaults for the CPU, because `check_devices` refuses them.
    """
    has_gpu = torch.cuda.is_available()
    is_on_cpu = not has_gpu and not lacks_devices()  # `lacks_devices`: there are several processes and no GPU
    settings: dict[str, Any] = {}
    if "CROSS_SIZE" not in os.environ:  # only the launcher of DeepSpeed sets this variable
        if not has_gpu:
            # bf16 is twice as fast as fp32 where the CPU does not emulate it
            settings["bf16"] = bool(cpu_computes_bf16())
        if is_on_cpu:
            settings["use_cpu"] = True
        return settings
    # `accelerate launch --use_deepspeed` sets these two variables too. A default for `--deepspeed` would not be enough:
    # without a GPU transformers passes no backend to accelerate, which then does not learn the number of ranks. An
    # explicit `--deepspeed` overrides the variables.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ZERO3)
    if not has_gpu:
        settings["bf16"] = False  # DeepSpeed supports bf16 on GPUs only
    if is_on_cpu:
        settings["ddp_backend"] = "gloo"
    return settings


class RunConfigs(NamedTuple):
    """The configs of a run.

    Attributes:
        script: the datasets, as in `trl sft`.
        training: the config of the trainer.
        model: the model, with LoRA and quantisation.
        mixture: the field `datasets` of the file, and what belongs to it.
        names_set: the names of the fields that a flag or the file sets.
        positionals: the words on the command line that belong to no flag: DATA, or MODEL of `check`.
    """

    script: TrainArguments
    training: SFTConfig
    model: ModelConfig
    mixture: MixtureConfig
    names_set: Set[str]
    positionals: list[str]

    @property
    def names(self) -> list[str]:
        """The name or path of each dataset."""
        return [source.path for source in self.mixture.datasets] or self.script.dataset_name or []

    @property
    def table_names(self) -> list[str]:
        """The names of the tables that are read one by one: each dataset, or the whole mixture as one table."""
        return [", ".join(self.names)] if self.mixture.datasets else self.names

    def tokenizer_settings(self, name: str) -> dict[str, Any]:
        """Return the arguments with which a tokenizer or processor is loaded: for that of the model those of training.

        Args:
            name: the name or folder of the tokenizer or of the model.
        """
        settings: dict[str, Any] = {"trust_remote_code": self.training.trust_remote_code}
        if name == self.model.model_name_or_path and loads_tokenizer_of_revision():
            init_kwargs: Any = self.training.model_init_kwargs or {}
            settings["revision"] = init_kwargs.get("revision", self.model.model_revision)
        return settings


def parse_configs(
    flags: Sequence[str] | None = None,
    prog: str = "trl-packfix train",
    description: str = DESCRIPTION,
    *,
    command_args: argparse.Namespace | None = None,
    **defaults: Any,
) -> RunConfigs:
    """Read the configs of a run from flags and from the YAML file of `--config`.

    Packing is on, unless `packing` is set to false, or `padding_free` is set: TRL's mode that keeps the steps of
    unpacked training and only joins the rows of each batch to one row.

    Args:
        flags: the words of the command line; None: the command line of this process.
        prog: the name of the command, for messages.
        description: of the command, for `--help`.
        command_args: the parsed flags of a command that does not train; None for `train`. Other commands take short
            flags, and words without a flag.
        defaults: further defaults, by field.

    Raises:
        ValueError: a setting is unknown, or has a value that cannot be used.
    """
    # Do not show the user this warning of transformers: peft causes it, and only peft can avoid it
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    config_classes: Any = (TrainArguments, SFTConfig, ModelConfig, MixtureConfig)
    usage = f"{prog} [--config FILE.yaml] [--FLAG VALUE ...]"
    parser = TrlParser(
        config_classes,
        prog=prog,
        usage=usage,
        description=description,
        formatter_class=TrainHelpFormatter,
        allow_abbrev=False,
    )

    # 1. Read the file, and refuse unknown names and wrong types in it.
    file, words = _split_config(sys.argv[1:] if flags is None else flags, prog)
    settings = {} if file is None else read_settings(file)
    known = [action.dest for action in parser._actions]
    suggestions = known  # names that the message about an unknown name may suggest
    if command_args is not None:
        suggestions = [*known, *vars(command_args), *(flag.removeprefix("--") for flag in SHORT_FLAGS)]
        words = complete_flags(words, parser)  # short flags become flags of fields, and a switch gets its value `true`
        parser.add_argument("positionals", nargs="*")
    _refuse_unknown([name for name in settings if name not in known], suggestions, settings.keys())
    # `texts`: argparse converts texts, so a text is right for a field of another type if it can be converted
    check_types(settings, config_classes, "in the config file", texts=True)

    # 2. Set the defaults. Whether packing is on by default depends on `padding_free`.
    # The value of a flag may be the name of a field, as in `--output_dir packing`
    given_flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    flag_names = {flag.removeprefix("--").replace("-", "_") for flag in given_flags}
    # `--no_NAME` sets the field NAME
    fields = {flag.removeprefix("--"): action.dest for action in parser._actions for flag in action.option_strings}
    names_set = {fields.get(name, name) for name in flag_names} | settings.keys()
    if "tokens_per_rank" in names_set:
        defaults = {"per_device_train_batch_size": 1} | defaults  # `tokens_per_rank` is the size of micro-batches
    packing_defaults = {"packing": True, "padding_free": settings.get("padding_free", False)}
    parser.set_defaults(**machine_settings() | packing_defaults | defaults)
    # The flags are parsed once only to read `padding_free`, and again in step 3 with the default that follows from it
    is_packed_by_default = "packing" not in names_set and not parser.parse_known_args(words)[0].padding_free
    parser.set_defaults(packing=is_packed_by_default)

    # 3. Parse the flags, and refuse unknown ones.
    try:
        *configs, unknown = parser.parse_args_and_config(
            words if file is None else ["--config", file, *words], return_remaining_strings=True
        )
    except ValueError as error:
        if is_packed_by_default and "packing" in str(error):
            error.add_note(PACKING_NOTE)
        raise
    names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
    # If no flag is unknown, `unknown` has only words that belong to no flag, which `train` refuses. The parser of other
    # commands takes such words as `positionals`
    _refuse_unknown(names or unknown, suggestions, names_set)
    if names:
        # These are flags of TRL's launcher. This command has been launched already.
        PartialState().print(
            f"Not used: {', '.join(names)}. `trl sft` passes this to `accelerate launch`. Here, give it to the "
            "launcher: `accelerate launch ... -m trl_packfix train ...`."
        )
    if command_args is None and is_packed_by_default:
        PartialState().print(PACKING_NOTE)
    script_args, training_args, model_args, mixture = configs[:4]  # one for each of `config_classes`
    _check_values(training_args)
    # The parser returns arguments that are no field of a config, here `positionals`, behind the configs
    positionals = [] if command_args is None else configs[4].positionals
    return RunConfigs(script_args, training_args, model_args, mixture, names_set, positionals)


def read_run(args: argparse.Namespace, *words: str) -> RunConfigs:
    """Read the run of a command that does not train: its settings are those for a CPU, and packing is on in any case.

    Args:
        args: the parsed flags of the command. Its `unparsed_words` are the flags of the configs.
        words: further flags.
    """
    on_cpu = (f"--{name}={value}" for name, value in ON_CPU.items())
    config_flags = (f"--config={file}" for file in args.config)
    all_words = (*args.unparsed_words, *words, *config_flags, *on_cpu)
    with redirect_stdout(sys.stderr):  # stdout holds only the result of the command
        configs = parse_configs(all_words, f"trl-packfix {args.command}", command_args=args)
    if not configs.training.packing:
        if "packing" in configs.names_set and args.command in ("plan", "show"):
            print(
                f"`packing` is off in this run; `{args.command}` shows the packs that it would have.", file=sys.stderr
            )
        # The strategy "minibatch" keeps the steps of unpacked training, as `padding_free` does
        strategy = {"packing_strategy": "minibatch"} if configs.training.padding_free else {}
        configs = configs._replace(
            training=with_settings(configs.training, packing=True, padding_free=False, **strategy)
        )
    if configs.positionals and args.command != "check":
        configs.script.dataset_name = configs.positionals
        configs.mixture.datasets = []
    if not configs.names and args.command in ("show", "prepare"):
        raise ValueError(
            f"`{args.command}` was given without DATA. There is nothing to read. Give files, folders or names on the "
            "hub, or `--config` with a file that names them."
        )
    return configs


def _check_values(args: SFTConfig) -> None:
    """Refuse values with which nothing can be trained, and a chat template that cannot be loaded."""
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ValueError(
            f"`num_train_epochs={args.num_train_epochs:g}` and `max_steps={args.max_steps}` were given."
            " Nothing would be trained, and the model saved as it is. Set one of them above 0."
        )
    for name, value in vars(args).items():
        lowest, highest = RANGES.get(name, (-inf, inf))
        # A comparison with NaN is false, so NaN is refused
        if isinstance(value, int | float) and not lowest <= value <= highest:
            raise ValueError(
                f"`{name}={value}` was given. Training cannot compute with it. Set `{name}` to a finite number"
                f"{f' of {lowest} or more' if name in RANGES else ''}, or leave it unset."
            )
    path = args.chat_template_path
    if path is not None and not (Path(path).is_file() and path.endswith((".jinja", ".j2"))):
        advice = "a file of a template (.jinja, .j2) that is here, or the name or folder of a tokenizer that has one"
        with setting_named(f"chat_template_path={path}", advice):  # errors become a ValueError with this advice
            AutoTokenizer.from_pretrained(path).get_chat_template()


def _split_config(words: Sequence[str], prog: str) -> tuple[str | None, list[str]]:
    """Return the file of `--config`, or None, and the other words. TRL's parser does not take `--config=FILE`."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", metavar="FILE.yaml", default=[])
    args, other_words = parser.parse_known_args(words)
    files = args.config
    if len(files) > 1:
        raise ValueError(
            f"`--config` was given {len(files)} times ({', '.join(files)}). One file sets the flags of a "
            "run. Put all settings into one file, or give the others as flags."
        )
    return next(iter(files), None), other_words


def read_settings(file: str) -> dict[str, Any]:
    """Return the settings in a YAML file, by name; refuse a file that cannot be read or holds something else."""
    try:
        with Path(file).open(encoding="utf-8") as stream:
            settings = yaml.load(stream, _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(
            f"`--config {file}` was given. It cannot be read: {reason}. Give the path of a YAML file in UTF-8 with one "
            "`flag: value` per line."
        ) from error
    if not isinstance(settings, dict):
        content = "nothing" if settings is None else f"a {type(settings).__name__}"
        raise ValueError(
            f"`--config {file}` was given. The file holds {content}, and settings need names. Write one `flag: value` "
            "per line, or omit `--config`."
        )
    odd_names = [name for name in settings if not isinstance(name, str)]
    if odd_names:
        raise ValueError(
            f"`--config {file}` was given, and YAML reads the name of a setting as {odd_names[0]!r}, which is no text "
            "(`no`, `on` and `1` are values there). Write the name of a flag, in quotes if it must be."
        )
    return settings


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that refuses a key that a mapping has twice. YAML itself would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        repeated = next((key for i, key in enumerate(keys) if isinstance(key, str) and key in keys[:i]), None)
        if repeated is not None:
            problem = f"the key `{repeated}` stands there twice, and one of its values would be lost"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _refuse_unknown(names: list[str], known: list[str], names_set: Set[str]) -> None:
    """Refuse names that are neither a field nor a flag of TRL's launcher.

    The message says what keys of other trainers are called here.

    Args:
        names: the names of settings that are no field.
        known: the names of fields and flags that may be meant.
        names_set: the names of all settings of the run.
    """
    if not names:
        return
    launcher_flags = {action.dest for action in launch_command_parser()._actions} | {"accelerate_config"}
    unknown = [name for name in names if name not in launcher_flags]
    if not unknown:
        return
    hints = {name: describe_foreign_keys([name]) for name in unknown}
    # A text with defaults of another trainer, such as axolotl, if the settings have several of its keys; else ""
    defaults = other_defaults(names_set)
    if len(unknown) == 1 and not defaults:
        name = unknown[0]
        suggestion = "" if hints[name] else did_you_mean([name], known)
        raise ValueError(
            f"`{name}` was given, as a flag or in the config file{suggestion}. No field of SFTConfig, ModelConfig, "
            f"ScriptArguments or the dataset mixture has this name, so it would be ignored.{hints[name]} Correct or "
            "remove it; `trl-packfix train --help` lists all flags."
        )
    lines = [hints[name].strip() or f"`{name}` is not known{did_you_mean([name], known)}." for name in unknown]
    raise ValueError(
        f"{len(unknown)} settings were given, as flags or in the config file, that are no field of SFTConfig, "
        "ModelConfig, ScriptArguments or the dataset mixture. They would be ignored. Correct or remove each; "
        "`trl-packfix train --help` lists all flags.\n  " + "\n  ".join(lines) + f"\n{defaults}".rstrip()
    )
