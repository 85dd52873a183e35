"""transformers: mixers of hybrid models do not get the boundaries of packs.

Users who install flash-linear-attention or mamba-ssm and pack documents train them on each other's states (kimi_linear:
0.48 of the logits). The convolution of kimi_linear, bailing_hybrid and glm5_next gets `seq_idx`, their scan no
`cu_seqlens`; mamba, falcon_mamba, mamba2 and jamba pass on neither. The patch is that of kimi_linear.
"""

import sys
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
sizes |= {"vocab_size": 99, "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 2, "pad_token_id": 0}
pack = {"cu_seq_lens_q": torch.tensor([0, 3, 8]).int(), "seq_idx": torch.tensor([[0] * 3 + [1] * 5]).int()}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_linear", **sizes)).train()
code = sys.modules[type(model).__module__]
scan, boundaries = code.chunk_kimi_delta_attention, []


def recorded(*args, **kwargs):
    boundaries.append(kwargs.get("cu_seqlens"))
    return scan.__wrapped__(*args, **kwargs)


with mock.patch.multiple(code, chunk_kimi_delta_attention=recorded, causal_conv1d_fn=code.causal_conv1d_fn.__wrapped__):
    model(input_ids=torch.arange(10, 18)[None], use_cache=False, **pack)
print("the scan gets no boundaries, still there:", bool(boundaries) and boundaries[0] is None)
