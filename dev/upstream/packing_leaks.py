"""transformers, TRL: packing lets documents see each other on a quarter of the model types, without a warning.

Users who set `packing=True` on one of 50 of 196 causal types (opt, bloom, gpt_oss, mamba, ...) train documents
on the content of other documents. `position_ids` alone separate documents, and these types build no mask from them. The
patch is that of OPT; TRL could refuse types that it has not tested. All types: docs/compatibility.csv.
"""

import torch
from transformers import OPTConfig, OPTForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
model = OPTForCausalLM(OPTConfig(vocab_size=300, **sizes)).eval()
first, other, second = torch.randint(4, 300, (3, 6))
positions = torch.arange(6).repeat(2)[None]  # as TRL's collator gives them
with torch.no_grad():
    one, two = (
        model(torch.cat([before, second])[None], position_ids=positions, use_cache=False).logits[0, 6:]
        for before in (first, other)
    )
print("the first document moves the second, still there:", not torch.allclose(one, two))
