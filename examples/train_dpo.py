"""Watch DPO without padding on a CPU: a real pretrained chat model learns to prefer JSON, and the margin grows.

    python examples/train_dpo.py          # SmolLM2-135M-Instruct with LoRA, 32 pairs, about 110 CPU seconds
    python examples/train_dpo.py --tiny   # a tiny random model, in seconds

Pairs are answers to one order in plain English: the order as JSON (chosen), and a friendly sentence (rejected). The
trainer is TRL's own. `pack_forward(trainer)` computes the rows of a batch without padding, and each prompt once.
"""

import argparse
from typing import Any

from trl_packfix.cli.torch_environment import set_torch_environment

if __name__ == "__main__":
    set_torch_environment()  # before torch is imported

import torch
from datasets import Dataset
from demo import random_miniature
from offline import multiplies_bf16, orders, smollm2
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer

from trl_packfix import pack_forward


def pairs(num: int) -> Dataset:
    """Rows with `prompt`, `chosen` and `rejected`, each a list of messages."""
    rows = []
    for row in orders(num):
        order = row["prompt"][0]["content"]
        sentence = f"Thank you for your message! We have read it and will get back to you soon. You wrote: {order}"
        rejected = [{"role": "assistant", "content": sentence}]
        rows.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": rejected})
    return Dataset.from_list(rows)


class Margins(TrainerCallback):
    """A line for each log: the margin of the rewards, and what was computed."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "rewards/margins" in logs:
            padded = logs["packing/rows"]
            computed = logs["packing/computed"]
            print(
                f"step {state.global_step:2d}: margin {logs['rewards/margins']:6.3f}, loss {float(logs['loss']):.3f}, "
                f"{computed:,} of {padded:,} padded tokens computed",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_pairs", type=int, default=32, help="pairs to train on (default: 32)")
    parser.add_argument("--output_dir", default="dpo_output", help="where the adapter is saved (default: dpo_output)")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and 16 pairs")
    args = parser.parse_args()
    num_pairs = min(args.num_pairs, 16) if args.tiny else args.num_pairs
    name = random_miniature(f"{args.output_dir}/miniature") if args.tiny else smollm2()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(name),
        train_dataset=pairs(num_pairs),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=DPOConfig(
            output_dir=args.output_dir,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=4e-3 if args.tiny else 2e-4,
            gradient_checkpointing=False,
            bf16=multiplies_bf16(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Margins)
    packing = pack_forward(trainer)
    trainer.train()
    trainer.save_model()
    print(packing.summary())


if __name__ == "__main__":
    main()
