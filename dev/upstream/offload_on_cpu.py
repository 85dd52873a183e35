"""transformers: activation checkpointing with `offload` raises on a CPU, where it should do nothing.

Users who test a long-context run on a CPU before they rent GPUs, or in CI, get an error about pinned memory. The code
says that on a host there is nothing to copy, and asks torch to pin it all the same.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).to("cpu").train()
model.activation_checkpointing_enable(offload=True)
tokens = torch.arange(8)[None]
raised = False
try:
    model(input_ids=tokens, labels=tokens).loss.backward()
except RuntimeError:
    raised = not torch.cuda.is_available()
print("the forward raises, still there:", raised)
