"""The same plan, sampler and collator with transformers' own Trainer, without TRL.

    python examples/with_transformers.py

A packed batch needs two things: document boundaries, which `packed_dataloader` puts into every batch, and attention
that reads them, which `prepare_for_packing` sets on the model. It also proves on the model that documents are isolated,
and repairs a model on which they are not.
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from trl_packfix import packed_dataloader, prepare_for_packing

MAX_LENGTH = 1024


class PackedTrainer(Trainer):
    def get_train_dataloader(self):
        return packed_dataloader(
            self.train_dataset,
            max_length=MAX_LENGTH,
            batch_size=self.args.train_batch_size,  # 8: micro-batches of 8 x MAX_LENGTH tokens
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
prepare_for_packing(model, max_length=MAX_LENGTH)
trainer = PackedTrainer(model=model, args=args, train_dataset=dataset)
trainer.train()
