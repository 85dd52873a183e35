"""Train from flags and a YAML file, as `trl sft` does: parse them, load the data, train, save.

`examples/train.py` runs the same code.
"""

import argparse
import os
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import yaml
from accelerate import PartialState
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets, load_dataset
from datasets import load_from_disk as load_folder
from transformers.utils import is_liger_kernel_available
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ..compat import end_training
from ..training.checkpoints import choose_checkpoint
from ..training.choices import text_config
from ..training.config import SFTConfig
from ..training.foreign_keys import hints, other_defaults
from ..training.trainer import SFTTrainer
from .flags import MODEL, did_you_mean, named
from .mixture import MixtureConfig, load_mixture
from .sources import FORMATS, check_template, in_utf8, is_saved, load_named, load_rows

# Smallest and largest value that is no error of the run; no field may be "not a number"
RANGES = {"learning_rate": (0, sys.float_info.max), "dataloader_num_workers": (0, inf)}
ZERO3 = Path(__file__).with_name("zero3.json")

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
command line override it. `datasets:` in the file mixes several, with `repeat:` for how often each is seen per epoch.
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
                f"`dataset_name: {names}` was given. It is one name or path, or a list of them. Settings "
                "of each dataset, such as `split` and `repeat`, belong into `datasets`, a list of entries with `path`."
            )


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows every flag with its default, and the description unchanged."""


def machine_settings() -> dict[str, Any]:
    """Defaults for this launcher and machine. A YAML file and flags override them."""
    gpu = torch.cuda.is_available()
    if "CROSS_SIZE" not in os.environ:  # only the deepspeed launcher sets it
        return {} if gpu else {"use_cpu": True, "bf16": multiplies_bf16()}
    # As `accelerate launch --use_deepspeed` does. Unlike a default for `--deepspeed`, this also sets the number of
    # ranks on machines without a GPU, where transformers passes no backend. An explicit `--deepspeed` overrides it.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ZERO3)
    return {} if gpu else {"ddp_backend": "gloo", "bf16": False}  # DeepSpeed allows bf16 on a GPU only


def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bfloat16, which makes training twice as fast. Others emulate it."""
    cpu = torch.cpu.get_capabilities()
    return cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False)


def parse(
    flags: Sequence[str] | None = None,
    prog: str = "trl-packfix train",
    description: str = DESCRIPTION,
    **defaults: Any,
) -> tuple[TrainArguments, SFTConfig, ModelConfig, MixtureConfig]:
    """The configs of a run, from flags (default: those of this process) and the YAML file of `--config`.

    Packing is on unless it is switched off, or `padding_free` chooses to train the unpacked steps without padding.

    Raises:
        ValueError: the file cannot be read, has a value of another type, or a key that is no flag. Keys for TRL's
            launcher are only named: this command is launched.
    """
    kinds: Any = (TrainArguments, SFTConfig, ModelConfig, MixtureConfig)
    parser = TrlParser(
        kinds,
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--FLAG VALUE ...]",
        description=description,
        formatter_class=Help,
        allow_abbrev=False,
    )
    file, words = _split_config(sys.argv[1:] if flags is None else flags, prog)
    settings = {} if file is None else read_settings(file)
    flags_of_run = [action.dest for action in parser._actions]
    _refuse_unknown([name for name in settings if name not in flags_of_run], flags_of_run, given=settings.keys())
    _check_types(settings, kinds)
    names_set = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words} | settings.keys()
    if "tokens_per_rank" in names_set:  # it sets the size of micro-batches
        defaults = {"per_device_train_batch_size": 1} | defaults
    parser.set_defaults(**machine_settings() | {"packing": True} | defaults)
    parser.set_defaults(padding_free=settings.get("padding_free", False))
    is_by_default = "packing" not in names_set
    if is_by_default and parser.parse_known_args(words)[0].padding_free:
        is_by_default = False
        parser.set_defaults(packing=False)
    note = (
        "Packing is on, which is the default of this command and not of `trl sft`. To train without it, set "
        "`--packing false`, or `packing: false` in the config file."
    )
    try:
        *configs, unknown = parser.parse_args_and_config(
            words if file is None else ["--config", file, *words], return_remaining_strings=True
        )
    except ValueError as error:
        if is_by_default and "packing" in str(error):
            error.add_note(note)
        raise
    _check_unknown(unknown, flags_of_run, given=names_set)
    if is_by_default:
        PartialState().print(note)
    script_args, training_args, model_args, mixture = configs
    epochs, steps = training_args.num_train_epochs, training_args.max_steps
    if steps == 0 or (steps < 0 and epochs <= 0):
        raise ValueError(
            f"`num_train_epochs={epochs:g}` and `max_steps={steps}` were given."
            " Nothing would be trained, and the model saved as it is. Set one of them above 0."
        )
    for name, value in vars(training_args).items():
        least, most = RANGES.get(name, (-inf, inf))
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(
                f"`{name}={value}` was given. Training cannot compute with it. Set `{name}` to a finite number"
                f"{f' of {least} or more' if name in RANGES else ''}, or leave it unset."
            )
    return script_args, training_args, model_args, mixture


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
    """The settings of a YAML file by their names.

    Raises:
        ValueError: it cannot be read, is not YAML, or is no mapping of names to values.
    """
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
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the key `{twice}` stands there twice, and one of its values would be lost",
                node.start_mark,
            )
        return super().construct_mapping(node, deep)


def _check_types(settings: dict[str, Any], kinds: Sequence[type]) -> None:
    """Refuse values that their fields cannot hold; argparse converts and checks those that are text.

    Raises:
        ValueError: a list or a mapping for a number, a fraction for a whole number, or no value where one is needed.
    """
    for name, wanted in {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}.items():
        plain = set(get_args(wanted) or [wanted])
        if name not in settings or not plain <= {int, float, bool, str, type(None)}:
            continue
        value, allowed = settings[name], (plain | {str}) | ({int} if plain & {float, bool} else set())
        if type(value) not in allowed:
            expected = " or ".join(
                "nothing" if kind is type(None) else kind.__name__ for kind in get_args(wanted) or [wanted]
            )
            raise ValueError(
                f"`{name}: {value}` was given in the config file. It has the type {type(value).__name__}, and the "
                f"field holds {expected}. Correct it, or remove it for the default."
            )


def _check_unknown(unknown: list[str], known: list[str], given: Set[str]) -> None:
    names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
    _refuse_unknown(names or unknown, known, given=given)
    if names:
        PartialState().print(
            f"Not used: {', '.join(names)}. `trl sft` passes this to `accelerate launch`. Here, give it to the "
            "launcher: `accelerate launch ... -m trl_packfix train ...`."
        )


def _refuse_unknown(names: list[str], known: list[str], *, given: Set[str]) -> None:
    """Refuse names that are neither a field nor a flag of TRL's launcher.

    Raises:
        ValueError: with what keys of other trainers are called here, and what those do where nothing is `given`.
    """
    launcher = {action.dest for action in launch_command_parser()._actions} | {"accelerate_config"}
    wrong = [name for name in names if name not in launcher]
    if wrong:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in wrong)} was given, as a flag or in the config file"
            f"{did_you_mean([name for name in wrong if not hints([name])], known)}. No field of SFTConfig, "
            f"ModelConfig, ScriptArguments or the dataset mixture has this name, so it would be ignored.{hints(wrong)}"
            f"{other_defaults(given)} Correct or remove it; `trl-packfix train --help` lists all flags."
        )


# Data


def load_documents(script_args: ScriptArguments) -> DatasetDict | IterableDatasetDict:
    """The splits of the datasets in `dataset_name`; of several, splits of the same name are joined.

    A file or a folder with one table has the split `dataset_train_split`.
    """
    paths: Any = script_args.dataset_name
    datasets = [_splits(path, script_args) for path in ([paths] if isinstance(paths, str) else paths)]
    if len(datasets) == 1:
        return datasets[0]
    names = dict.fromkeys(name for splits in datasets for name in splits)
    kind = IterableDatasetDict if script_args.dataset_streaming else DatasetDict
    return kind({name: concatenate_datasets([splits[name] for splits in datasets if name in splits]) for name in names})


def _splits(name: str, script_args: ScriptArguments) -> Any:
    path = Path(name)
    if path.is_file() and path.suffix in FORMATS:
        if script_args.dataset_streaming:
            rows = load_dataset(FORMATS[path.suffix], data_files=name, split="train", streaming=True)
            return IterableDatasetDict({script_args.dataset_train_split: rows})
        return DatasetDict({script_args.dataset_train_split: load_rows(name)})
    if is_saved(path):
        loaded = load_folder(name)
        return loaded if isinstance(loaded, DatasetDict) else DatasetDict({script_args.dataset_train_split: loaded})
    if path.is_file() or path.suffix in FORMATS:
        load_rows(name)  # refuses the file by its suffix, or because it does not exist
    return load_named(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)


def choose_split(dataset: Any, flag: str, split: str) -> Dataset | IterableDataset:
    if split not in dataset:
        raise ValueError(
            f"`--{flag} {split}` was given or is the default, and the dataset has {list(dataset)} only. Without that "
            f"split there is nothing to train or evaluate on. Set `--{flag}` to one of these, or `--eval_strategy no`."
        )
    return dataset[split]


def _load(script_args: TrainArguments, training_args: SFTConfig, mixture: MixtureConfig) -> Any:
    if mixture.datasets:
        if script_args.dataset_name:
            PartialState().print(f"Not used: dataset_name={script_args.dataset_name}. As in TRL, `datasets` is used.")
        return load_mixture(mixture, training_args.seed, training_args.source_column)
    if mixture.test_split_size is not None:
        raise ValueError(
            f"`test_split_size: {mixture.test_split_size}` was given without `datasets`. Rows are held out of a "
            "mixture only, so all would be trained. List the data in `datasets` of the config file, or remove it."
        )
    if not script_args.dataset_name:
        raise ValueError(
            "Neither `dataset_name` nor `datasets` was given. There is nothing to train on. Set `--dataset_name` to a "
            "file, a folder or a name on the hub, or list `datasets` in the config file."
        )
    return load_documents(script_args)


# Training


def make_trainer(
    script_args: TrainArguments,
    training_args: SFTConfig,
    model_args: ModelConfig,
    *,
    mixture: MixtureConfig,
    dataset: Any = None,
) -> SFTTrainer:
    """The trainer of a run, with its model and its documents.

    Args:
        dataset: splits by name; None: those that the arguments name.

    Raises:
        ValueError, OSError, ImportError: what was given cannot be read or used.
    """
    if not model_args.model_name_or_path:
        raise ValueError(
            "`model_name_or_path` was not given. There is no model to train. Set `--model_name_or_path` to a name on "
            "the hub or a folder."
        )
    if training_args.use_liger_kernel and not is_liger_kernel_available():  # transformers looks when training begins
        raise ImportError("`use_liger_kernel` needs liger-kernel, `pip install liger-kernel`")
    if training_args.resume_from_checkpoint and PartialState().is_main_process:
        choose_checkpoint(training_args.resume_from_checkpoint, str(training_args.output_dir))  # before it is needed
    names = dataset_names(script_args, mixture)
    if dataset is None:
        with training_args.main_process_first(desc="dataset"):  # one process of a machine downloads
            dataset = _load(script_args, training_args, mixture)
    PartialState().print(f"Model: {model_args.model_name_or_path}")
    PartialState().print(f"Dataset: {', '.join(names) or 'given'}")
    chosen: Any = training_args.model_init_kwargs or {}
    chosen = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | chosen
    training_args.model_init_kwargs = chosen
    with named(f"--model_name_or_path {model_args.model_name_or_path}", MODEL):
        text_config(model_args.model_name_or_path, training_args)
    check_template(training_args.chat_template_path)
    test_split = script_args.dataset_test_split
    with in_utf8(", ".join(names)):
        return SFTTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=choose_split(dataset, "dataset_train_split", script_args.dataset_train_split),
            eval_dataset=None
            if training_args.eval_strategy == "no"
            else choose_split(dataset, "dataset_test_split", test_split),
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )


def dataset_names(script_args: TrainArguments, mixture: MixtureConfig) -> list[str]:
    """Name or path of each dataset of a run."""
    return [source.path for source in mixture.datasets] or script_args.dataset_name or []


def train(trainer: SFTTrainer, names: Sequence[str]) -> None:
    """Train, save in `output_dir` and, with `push_to_hub`, push; `names` are those of the datasets."""
    args = trainer.args
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved in {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=list(names))
    trainer.accelerator.wait_for_everyone()  # with gloo, a rank fails if another one exits before it
    end_training(trainer)
