"""Fine-tune a language model on packed documents: full or LoRA, on one process or many.

On one GPU (the first that is visible), or on the CPU of a machine without one:
    python examples/train.py
    python examples/train.py --use_peft --learning_rate 2e-4 --config examples/configs/lora.yaml

On every GPU of a machine (DeepSpeed ZeRO-3 unless another config is given; FSDP2):
    deepspeed --num_gpus=8 examples/train.py
    deepspeed --num_gpus=8 examples/train.py --use_peft --learning_rate 2e-4 --deepspeed deepspeed_configs/zero2.json
    deepspeed --num_gpus=8 examples/train.py --deepspeed deepspeed_configs/zero2.json
    accelerate launch examples/train.py
    accelerate launch --config_file trl_packfix/cli/recipe_files/accelerate-fsdp2.yaml examples/train.py
On several nodes: examples/launch.

Documents longer than one GPU holds, each shared by several GPUs (docs/long_context.md):
    deepspeed --num_gpus=8 examples/train.py --max_length 131072 --tokens_per_rank 16384

Your own model and data:
    python examples/train.py --model_name_or_path MODEL --dataset_name NAME_FILE_OR_PREPARED --output_dir output

This is `trl-packfix train` with one epoch and `--output_dir output` as defaults. Without
--model_name_or_path or --dataset_name it uses a small one from the Hub or, if the Hub is unreachable, that of the demo
(examples/offline.py), and prints its name. `--config FILE.yaml` may set any of the flags below; flags on the command
line override it. `--resume_from_checkpoint newest` continues from the newest whole checkpoint in output_dir, or starts
anew if output_dir has no checkpoint. With --tokens_per_rank the batch size is 1 unless a file or a flag sets it.
"""

import urllib.error
import urllib.request

from trl_packfix.cli.torch_environment import set_torch_environment

if __name__ == "__main__":
    set_torch_environment()  # before torch is imported

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub import constants
from offline import orders, smollm2

from trl_packfix.cli.configs import parse_configs
from trl_packfix.cli.training import make_trainer, train_and_save

HUB_MODEL = "Qwen/Qwen3-0.6B"
HUB_DATASET = "trl-lib/Capybara"


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


if __name__ == "__main__":
    defaults = {"num_train_epochs": 1, "output_dir": "output"}
    run = parse_configs(prog="train.py", description=__doc__, **defaults)
    script_args, training_args, model_args, mixture, *_ = run
    has_data = bool(script_args.dataset_name or mixture.datasets)
    dataset = None
    if not (model_args.model_name_or_path and has_data) and hub_answers():
        model_args.model_name_or_path = model_args.model_name_or_path or HUB_MODEL
        script_args.dataset_name = script_args.dataset_name or (None if has_data else [HUB_DATASET])
    elif not has_data:
        script_args.dataset_name, dataset = [], orders(1000).train_test_split(test_size=50, seed=0)
    with training_args.main_process_first(desc="model"):  # one process of a machine unpacks it
        model_args.model_name_or_path = model_args.model_name_or_path or smollm2()
    trainer = make_trainer(run, dataset)
    train_and_save(trainer, run.names)
