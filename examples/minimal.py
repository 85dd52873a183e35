"""The import swap: TRL's own quick start, with `trl` replaced by `trl_packfix` in one line.

    python examples/minimal.py

It needs a GPU and the Hub. Without the Hub use local paths instead of the two names; without a GPU, or to begin with,
`make demo` trains a small model on the CPU.
"""

from datasets import load_dataset

from trl_packfix import SFTConfig, SFTTrainer  # was: from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=SFTConfig(output_dir="output", packing=True),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
