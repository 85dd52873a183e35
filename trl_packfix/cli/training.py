"""Train as `trl sft` does: load the datasets, make the trainer, train, and save the model.

`trl-packfix train` (`train.py`) and `examples/train.py` call `make_trainer` and then `train_and_save`.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import is_liger_kernel_available
from trl import get_peft_config, get_quantization_config

from ..compat import end_training
from ..training.checkpoints import choose_checkpoint
from ..training.choices import text_config
from ..training.config import SFTConfig
from ..training.trainer import SFTTrainer
from .configs import RunConfigs, TrainArguments
from .flags import MODEL_HELP, setting_named
from .mixture import MixtureConfig, load_mixture
from .sources import in_utf8, load_local, load_named


def load_documents(script_args: TrainArguments) -> DatasetDict | IterableDatasetDict:
    """Return the splits of the datasets in `dataset_name`. If there are several, splits with one name are joined.

    A file, or a folder with one table, is the split `dataset_train_split`.
    """
    names = script_args.dataset_name
    streaming = script_args.dataset_streaming
    assert names is not None, "_load_splits refuses a run without datasets"
    datasets: list[Any] = []
    for name in names:
        dataset = load_local(name, streaming)
        if dataset is None:  # there is no such file or folder
            dataset = load_named(name, name=script_args.dataset_config, streaming=streaming)
        is_table = isinstance(dataset, Dataset | IterableDataset)
        datasets.append({script_args.dataset_train_split: dataset} if is_table else dataset)
    dict_class = IterableDatasetDict if streaming else DatasetDict
    if len(datasets) == 1:
        # `concatenate_datasets` would make a new table, for which `datasets` has no cached tokens.
        return dict_class(datasets[0])
    split_names = dict.fromkeys(split for dataset in datasets for split in dataset)
    joined_splits = {}
    for split in split_names:
        joined_splits[split] = concatenate_datasets([dataset[split] for dataset in datasets if split in dataset])
    return dict_class(joined_splits)


def choose_split(dataset: DatasetDict | IterableDatasetDict, flag: str, split: str) -> Dataset | IterableDataset:
    """Return a split of the dataset; the message about a missing split names `flag`."""
    if split not in dataset:
        raise ValueError(
            f"`--{flag} {split}` was given or is the default, and the dataset has {list(dataset)} only. Without that "
            f"split there is nothing to train or evaluate on. Set `--{flag}` to one of these, or `--eval_strategy no`."
        )
    return dataset[split]


def _load_splits(script_args: TrainArguments, training_args: SFTConfig, mixture: MixtureConfig) -> Any:
    """Return the splits of the mixture, if there is one, else of the datasets in `dataset_name`."""
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


def _check_loggers(args: SFTConfig) -> None:
    """Refuse a logger of `report_to` that is not installed. transformers looks only after the model is loaded."""
    installed = get_available_reporting_integrations()
    # This list never has flyte, and has azure_ml only without mlflow. So these two are not checked.
    missing = sorted(set(args.report_to or ()) - {*installed, "azure_ml", "flyte"})
    if missing:
        raise ValueError(
            f"`report_to: {missing[0]}` was given, and transformers has no such logger, or its package is not "
            f"installed. Nothing would be logged there. Install the package (`pip install {missing[0]}`), or set "
            f"`report_to` to `none` or to a logger that is installed ({', '.join(installed) or 'none is installed'})."
        )


def _check_checkpoint(requested: str | bool, output_dir: str) -> None:
    """Refuse a missing or damaged checkpoint on all processes. The main process looks for it."""
    problems: list[ValueError | OSError | None] = [None]
    if PartialState().is_main_process:
        try:
            choose_checkpoint(requested, output_dir)
        except (ValueError, OSError) as error:
            problems = [error]
    (problem,) = broadcast_object_list(problems)
    if problem is not None:
        raise problem


def make_trainer(configs: RunConfigs, dataset: DatasetDict | IterableDatasetDict | None = None) -> SFTTrainer:
    """Return the trainer of a run.

    Args:
        configs: the configs of the run.
        dataset: the splits to train and evaluate on; None: the datasets that the run names.

    Raises:
        ValueError: there is no model, or something that the run names cannot be loaded.
    """
    script_args = configs.script
    training_args = configs.training
    model_args = configs.model
    if not model_args.model_name_or_path:
        raise ValueError(
            "`model_name_or_path` was not given. There is no model to train. Set `--model_name_or_path` to a name on "
            "the hub or a folder."
        )
    # `names_set`: the names of the fields that a flag or the config file sets
    adapter_names = [
        name for name in configs.names_set if name.startswith("lora_") or name in ("use_dora", "use_rslora")
    ]
    if adapter_names and not model_args.use_peft:
        raise ValueError(
            f"`{min(adapter_names)}` was given without `use_peft`. LoRA is off, so it would be ignored and all weights "
            "would be trained. Set `use_peft` to true, or remove the settings of LoRA."
        )
    _check_loggers(training_args)
    # These two would otherwise fail only when training begins.
    if training_args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("`use_liger_kernel` needs liger-kernel, `pip install liger-kernel`")
    if training_args.resume_from_checkpoint:
        # Refuse a missing or damaged checkpoint before anything is loaded
        _check_checkpoint(training_args.resume_from_checkpoint, str(training_args.output_dir))
    dataset_names = configs.names
    if dataset is None:
        with training_args.main_process_first(desc="dataset"):  # only one process of a machine downloads
            dataset = _load_splits(script_args, training_args, configs.mixture)
    PartialState().print(f"Model: {model_args.model_name_or_path}")
    PartialState().print(f"Dataset: {', '.join(dataset_names) or 'given'}")
    assert not isinstance(training_args.model_init_kwargs, str)  # transformers reads JSON
    model_settings = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = model_settings | (training_args.model_init_kwargs or {})
    with setting_named(f"--model_name_or_path {model_args.model_name_or_path}", MODEL_HELP):
        # Only for its error: a model that cannot be loaded is refused with the name of the setting
        text_config(model_args.model_name_or_path, training_args)
    test_split = script_args.dataset_test_split
    with in_utf8(", ".join(dataset_names)):  # the trainer reads the rows; bytes that are no UTF-8 become a ValueError
        evaluates = training_args.eval_strategy != "no"
        return SFTTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=choose_split(dataset, "dataset_train_split", script_args.dataset_train_split),
            eval_dataset=choose_split(dataset, "dataset_test_split", test_split) if evaluates else None,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )


def train_and_save(trainer: SFTTrainer, dataset_names: Sequence[str]) -> None:
    """Train, save the model in `output_dir`, and push it to the hub with `push_to_hub`.

    Args:
        dataset_names: the names of the datasets, for the model card.
    """
    args = trainer.args
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved in {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=list(dataset_names))
    trainer.accelerator.wait_for_everyone()  # with gloo, a rank fails if another rank exits first
    end_training(trainer)  # ends the loggers and the process group
