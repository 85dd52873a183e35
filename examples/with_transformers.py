"""The same plan, sampler and collator with transformers' own Trainer, without TRL.

    python examples/with_transformers.py

A packed batch needs two things: document boundaries, which `packed_dataloader` puts into every batch, and attention
that reads them, which `prepare_for_packing` sets on the model. `check_isolation` proves that documents are isolated.
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from trl_packfix import check_isolation, packed_dataloader, prepare_for_packing


class PackedTrainer(Trainer):
    def get_train_dataloader(self):
        return packed_dataloader(
            self.train_dataset,
            max_length=1024,
            batch_size=self.args.train_batch_size,  # 8: micro-batches of 8 x 1024 tokens
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            seed=self.args.seed,
        )


def tokenise(row):
    input_ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    return {"input_ids": input_ids, "labels": input_ids}


tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
dataset = load_dataset("trl-lib/Capybara", split="train")
dataset = dataset.map(tokenise, remove_columns=dataset.column_names)
args = TrainingArguments(output_dir="output", bf16=True, learning_rate=2e-5, num_train_epochs=1)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="bfloat16").to(args.device)
prepare_for_packing(model)
check_isolation(model).raise_if_leaking()
trainer = PackedTrainer(model=model, args=args, train_dataset=dataset)
trainer.train()
