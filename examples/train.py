"""Fine-tune a language model on packed documents: full or LoRA, on one process or many.

On one GPU, or on the CPU of a machine without one:
    python examples/train.py
    python examples/train.py --use_peft --learning_rate 2e-4 --config examples/configs/lora.yaml

On every GPU of a machine (DeepSpeed ZeRO-3 unless another config is given; FSDP2):
    deepspeed --num_gpus=8 examples/train.py
    deepspeed --num_gpus=8 examples/train.py --use_peft --learning_rate 2e-4
    deepspeed --num_gpus=8 examples/train.py --deepspeed deepspeed_configs/zero2.json
    accelerate launch examples/train.py
    accelerate launch --config_file examples/configs/accelerate_fsdp2.yaml examples/train.py
On several nodes: examples/launch.

Documents longer than one GPU holds, each shared by several GPUs (docs/long_context.md):
    deepspeed --num_gpus=8 examples/train.py --max_length 131072 --tokens_per_rank 16384

Your own model and data:
    python examples/train.py --model_name_or_path MODEL --dataset_name NAME_FILE_OR_PREPARED --output_dir output

Both names accept local paths. Without --model_name_or_path or --dataset_name it uses a small one from the Hub or, if
the Hub is unreachable, that of the demo (examples/offline.py), and prints its name. `--config FILE.yaml` may set any
of the flags below; flags on the command line override it. `--resume_from_checkpoint newest` continues from the newest
whole checkpoint in output_dir, or starts anew if there is none. Packing is on, with micro-batches of
per_device_train_batch_size * max_length tokens. With --tokens_per_rank the batch size is 1 unless a file or a flag sets
it.
"""

import argparse
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from huggingface_hub import constants
from offline import multiplies_bf16, smollm2, word_problems
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_packfix import SFTConfig, SFTTrainer

HUB_MODEL = "Qwen/Qwen3-0.6B"
HUB_DATASET = "trl-lib/Capybara"
ZERO3 = Path(__file__).parent.parent / "deepspeed_configs" / "zero3.json"


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows every flag with its default, and the docstring of this file unchanged."""


def machine_settings() -> dict:
    """Defaults for this launcher and machine. A YAML file and flags override them."""
    gpu = torch.cuda.is_available()
    if "CROSS_SIZE" not in os.environ:  # only the deepspeed launcher sets it
        return {} if gpu else {"use_cpu": True, "bf16": multiplies_bf16()}
    # As `accelerate launch --use_deepspeed` does. Unlike a default for `--deepspeed`, this also sets the number of
    # ranks on machines without a GPU, where transformers passes no backend. An explicit `--deepspeed` overrides it.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ZERO3)
    return {} if gpu else {"ddp_backend": "gloo", "bf16": False}  # DeepSpeed allows bf16 on a GPU only


def hub_answers() -> bool:
    """Whether the Hub is reachable from the main process. All ranks use its answer, so that they choose the same."""
    answer = False
    if PartialState().is_main_process and not constants.HF_HUB_OFFLINE:
        try:
            urllib.request.urlopen(constants.ENDPOINT, timeout=5).close()
            answer = True
        except (urllib.error.URLError, TimeoutError):
            pass
    return broadcast_object_list([answer])[0]


def load_documents(script_args: ScriptArguments) -> DatasetDict:
    name = script_args.dataset_name
    if name is None:
        return word_problems(1000).train_test_split(test_size=50, seed=0)
    if (Path(name) / "prepared.json").is_file():  # of `trl-packfix prepare`
        return DatasetDict({script_args.dataset_train_split: load_from_disk(name)})
    if Path(name).is_file():
        rows = load_dataset(str(Path(name).resolve().parent), data_files=Path(name).name, split="train")
        return DatasetDict({script_args.dataset_train_split: rows})
    return load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)


def choose_split(dataset: DatasetDict, flag: str, split: str) -> Dataset | IterableDataset:
    if split not in dataset:
        raise SystemExit(
            f"`--{flag} {split}` was given or is the default, and the dataset has {list(dataset)} only. Without that "
            f"split there is nothing to train or evaluate on. Set `--{flag}` to one of these, or `--eval_strategy no`."
        )
    return dataset[split]


def main(script_args: ScriptArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    if None in (model_args.model_name_or_path, script_args.dataset_name) and hub_answers():
        model_args.model_name_or_path = model_args.model_name_or_path or HUB_MODEL
        script_args.dataset_name = script_args.dataset_name or HUB_DATASET
    # One process on each machine downloads or unpacks; the others wait for it.
    with training_args.main_process_first(desc="model and dataset"):
        model_args.model_name_or_path = model_args.model_name_or_path or smollm2()
        dataset = load_documents(script_args)
    PartialState().print(f"Model: {model_args.model_name_or_path}")
    PartialState().print(f"Dataset: {script_args.dataset_name or 'word problems from reasoning-gym'}")

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    evaluates = training_args.eval_strategy != "no"
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=choose_split(dataset, "dataset_train_split", script_args.dataset_train_split),
        eval_dataset=choose_split(dataset, "dataset_test_split", script_args.dataset_test_split) if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Saved in {training_args.output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.wait_for_everyone()  # with gloo, a rank fails if another one exits before it
    trainer.end()


if __name__ == "__main__":
    parser = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig),
        usage="train.py [--config FILE.yaml] [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=Help,
    )
    parser.set_defaults(packing=True, num_train_epochs=1, output_dir="output", **machine_settings())
    if any(word.partition("=")[0] == "--tokens_per_rank" for word in sys.argv):  # it sets the size of micro-batches
        parser.set_defaults(per_device_train_batch_size=1)
    main(*parser.parse_args_and_config())
