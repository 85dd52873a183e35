"""The same plan, sampler and collator under transformers' own Trainer, for those who do not use TRL.

    python examples/with_transformers.py

Two things make a packed batch right: boundaries, which the collator of `packed_dataloader` puts into every batch, and
attention that reads them, which `select_attention` sets on the model.
"""

from accelerate.data_loader import prepare_data_loader
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from trl_packfix import packed_dataloader
from trl_packfix.attention import mark_packed_forwards, select_attention


class PackedTrainer(Trainer):
    def get_train_dataloader(self):
        loader = packed_dataloader(
            self.train_dataset,
            max_length=1024,
            batch_size=self.args.train_batch_size,  # 8: micro-batches of 8 x 1024 tokens
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            seed=self.args.seed,
        )
        # One process, as far as accelerate knows: the sampler has shared the packs out already, and each goes to one
        # rank only. What accelerate adds is that the sampler hears of every new epoch.
        return prepare_data_loader(loader, num_processes=1, process_index=0, rng_types=None)


def tokenise(row):
    input_ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    return {"input_ids": input_ids, "labels": input_ids}


tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
dataset = load_dataset("trl-lib/Capybara", split="train")
dataset = dataset.map(tokenise, remove_columns=dataset.column_names)
args = TrainingArguments(output_dir="output", bf16=True, learning_rate=2e-5, num_train_epochs=1)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="bfloat16").to(args.device)
select_attention(model)
mark_packed_forwards(model)
trainer = PackedTrainer(model=model, args=args, train_dataset=dataset)
trainer.train()
