"""PEFT: adapters on `out_proj` of Mamba-2 layers of hybrid models do not train, without an error.

Users who train LoRA with `target_modules="all-linear"` on bamba, granitemoehybrid or zamba2, with mamba-ssm installed,
get adapters that stay at their initial values: the fused kernel reads the weight and does not call the layer. PEFT
refuses it for a list of types, in which these are missing.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BambaConfig, BambaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
sizes |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "num_key_value_heads": 2}
with torch.device("meta"):
    model = BambaForCausalLM(BambaConfig(vocab_size=99, **sizes))
accepted = True
try:
    get_peft_model(model, LoraConfig(target_modules=["out_proj"]))
except ValueError:
    accepted = False
print("an adapter on out_proj of bamba is accepted, still there:", accepted)
