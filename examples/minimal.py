"""The import swap: TRL's own quick start, with `trl` replaced by `trl_packfix` in one line.

    python examples/minimal.py

If the Hub is unreachable, use local paths instead of the two names, or start with examples/demo.py.
"""

from datasets import load_dataset

from trl_packfix import SFTConfig, SFTTrainer  # was: from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=SFTConfig(output_dir="output", packing=True),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
