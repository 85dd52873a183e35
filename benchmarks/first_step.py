"""What two starts prove before the first step, in CPU seconds and in forwards and backwards on 1,024 tokens.

    python benchmarks/first_step.py --csv first_step.csv    # about five minutes

A random model in the shape of SmolLM2-135M with LoRA, one thread. `compare_longer` is of a document of 500 tokens.
"""

import time
from statistics import median
from tempfile import mkdtemp
from unittest import mock

import torch
from common import make_parser, write_csv
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from support.models import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.training import callbacks
from trl_packfix.training.first_step import FirstStep

SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
PARTS = {"check_fused_head": callbacks, "prove": PackedModel, "compare": FirstStep, "compare_longer": FirstStep}
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False}
SETTINGS = {"max_length": 1024, "max_steps": 1, "per_device_train_batch_size": 1} | QUIET


def measure(bf16: bool, folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=9, num_key_value_heads=3))
    args = SFTConfig(mkdtemp(), packing=True, bf16=bf16, **SETTINGS)
    own = {"processing_class": build_tokenizer(), "peft_config": LoraConfig(target_modules="all-linear")}
    trainer = SFTTrainer(model, args, train_dataset=load_from_disk(folder), **own)
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(name, right):
        def run(*given):
            start = time.process_time()
            result = right(*given)
            seconds[name] += time.process_time() - start
            return result

        return run

    for name, owner in PARTS.items():
        mock.patch.object(owner, name, timed(name, getattr(owner, name))).start()
    trainer.train()
    mock.patch.stopall()
    ids = torch.randint(3, 200, (1, 1024))
    times = []
    for _ in range(3):
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = trainer.model(input_ids=ids, labels=ids).loss
        loss.backward()
        times.append(time.process_time() - start)
    return {"step on 1,024 tokens": median(times), **seconds, "together": sum(seconds.values()) / median(times)}


if __name__ == "__main__":
    arguments = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    data = Dataset.from_list([{"input_ids": torch.randint(3, 200, (n,)).tolist()} for n in (300, 120, 500, 90) * 8])
    data.save_to_disk(folder := mkdtemp())
    starts = [(name, start) for name in ("fp32", "bf16") for start in (1, 2)]
    table = [{"dtype": name, "start": start} | measure(name == "bf16", folder) for name, start in starts]
    for row in table:
        print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
    write_csv(arguments.csv, table)
