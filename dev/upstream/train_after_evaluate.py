"""accelerate: after `Trainer.evaluate()` the ranks train without DDP.

torchrun --nproc_per_node 2 dev/upstream/train_after_evaluate.py

Users who evaluate a model before they train it, to have a baseline, get a model of rank 0's share of the data.
"""

import os
import tempfile

import torch
from accelerate.utils import gather_object
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 300, (64, 16)).tolist()]
args = TrainingArguments(tempfile.mkdtemp(), max_steps=5, learning_rate=0.5, optim="sgd", use_cpu=True, report_to=[])
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8])
trainer.evaluate()
trainer.train()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
ranks = gather_object([weights])
gap = (ranks[0] - ranks[-1]).abs().max().item()
if os.environ["RANK"] == "0":
    print(f"weights of the ranks differ by {gap:.3f}, still there: {gap > 0}")
torch.distributed.destroy_process_group()
