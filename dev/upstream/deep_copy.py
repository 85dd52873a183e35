"""TRL: a deep copy of a trained model runs the weights of the original.

Users who average, perturb or compare copies of a model (EMA, model soups, a reference model for DPO) after `SFTTrainer`
get the logits of the original from every copy.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
add_fused_lm_head(model)  # as SFTTrainer does
duplicate = copy.deepcopy(model)
with torch.no_grad():
    for p in duplicate.parameters():
        p.zero_()
    logits = duplicate(input_ids=torch.arange(8)[None]).logits
print("all weights are 0 and logits are not, still there:", logits.any().item())
