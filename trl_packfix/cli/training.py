"""Train as `trl sft` does: load the data, train, save. `examples/train.py` runs the same code."""

from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets
from transformers.utils import is_liger_kernel_available
from trl import ScriptArguments, get_peft_config, get_quantization_config

from ..compat import end_training
from ..training.checkpoints import choose_checkpoint
from ..training.choices import text_config
from ..training.config import SFTConfig
from ..training.trainer import SFTTrainer
from .configs import RunConfigs, TrainArguments
from .flags import MODEL_HELP, setting_named
from .mixture import MixtureConfig, load_mixture
from .sources import in_utf8, load_local, load_named


def load_documents(script_args: ScriptArguments) -> DatasetDict | IterableDatasetDict:
    """The splits of the datasets in `dataset_name`; of several, splits of the same name are joined.

    A file or a folder with one table has the split `dataset_train_split`.
    """
    names = script_args.dataset_name
    streaming = script_args.dataset_streaming
    assert names is not None, "refused before"
    datasets: list[Any] = []
    for name in [names] if isinstance(names, str) else names:
        found = load_local(name, streaming)
        if found is None:
            found = load_named(name, name=script_args.dataset_config, streaming=streaming)
        is_table = isinstance(found, Dataset | IterableDataset)
        datasets.append({script_args.dataset_train_split: found} if is_table else found)
    kind = IterableDatasetDict if streaming else DatasetDict
    if len(datasets) == 1:  # joined to nothing, it would be a table that is not tokenised yet
        return kind(datasets[0])
    splits = dict.fromkeys(split for dataset in datasets for split in dataset)
    return kind(
        {split: concatenate_datasets([found[split] for found in datasets if split in found]) for split in splits}
    )


def choose_split(dataset: DatasetDict | IterableDatasetDict, flag: str, split: str) -> Dataset | IterableDataset:
    if split not in dataset:
        raise ValueError(
            f"`--{flag} {split}` was given or is the default, and the dataset has {list(dataset)} only. Without that "
            f"split there is nothing to train or evaluate on. Set `--{flag}` to one of these, or `--eval_strategy no`."
        )
    return dataset[split]


def _load_splits(script_args: TrainArguments, training_args: SFTConfig, mixture: MixtureConfig) -> Any:
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


def make_trainer(run: RunConfigs, dataset: DatasetDict | IterableDatasetDict | None = None) -> SFTTrainer:
    """The trainer of a run, on the documents that its arguments name, or on the splits of a dataset."""
    script_args, training_args, model_args, mixture, *_ = run
    if not model_args.model_name_or_path:
        raise ValueError(
            "`model_name_or_path` was not given. There is no model to train. Set `--model_name_or_path` to a name on "
            "the hub or a folder."
        )
    if training_args.use_liger_kernel and not is_liger_kernel_available():  # transformers looks when training begins
        raise ImportError("`use_liger_kernel` needs liger-kernel, `pip install liger-kernel`")
    if training_args.resume_from_checkpoint and PartialState().is_main_process:
        choose_checkpoint(training_args.resume_from_checkpoint, str(training_args.output_dir))  # before it is needed
    names = run.names
    if dataset is None:
        with training_args.main_process_first(desc="dataset"):  # one process of a machine downloads
            dataset = _load_splits(script_args, training_args, mixture)
    PartialState().print(f"Model: {model_args.model_name_or_path}")
    PartialState().print(f"Dataset: {', '.join(names) or 'given'}")
    assert not isinstance(training_args.model_init_kwargs, str)  # transformers reads JSON
    chosen = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    training_args.model_init_kwargs = chosen
    with setting_named(f"--model_name_or_path {model_args.model_name_or_path}", MODEL_HELP):
        text_config(model_args.model_name_or_path, training_args)
    test_split = script_args.dataset_test_split
    with in_utf8(", ".join(names)):
        evaluates = training_args.eval_strategy != "no"
        return SFTTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=choose_split(dataset, "dataset_train_split", script_args.dataset_train_split),
            eval_dataset=choose_split(dataset, "dataset_test_split", test_split) if evaluates else None,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )


def train_and_save(trainer: SFTTrainer, names: Sequence[str]) -> None:
    """Train, save in `output_dir` and, with `push_to_hub`, push; `names` are those of the datasets."""
    args = trainer.args
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved in {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=list(names))
    trainer.accelerator.wait_for_everyone()  # with gloo, a rank fails if another one exits before it
    end_training(trainer)
