"""transformers: under tensor parallelism the gradients of earlier micro-batches count several times.

torchrun --nproc_per_node 2 dev/upstream/tensor_parallel_norms.py

Users who accumulate gradients of Qwen3, Qwen3-MoE or GLM-4-MoE with `tp_size` train the norms of heads wrongly.
"""

import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
torch.manual_seed(0)
folder = tempfile.mkdtemp()
Qwen3ForCausalLM(Qwen3Config(vocab_size=300, num_key_value_heads=2, **sizes)).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config={"tp_size": int(os.environ["WORLD_SIZE"])})
ids = torch.arange(4, 20)[None]
norms = []
for _ in range(4):
    model(input_ids=ids, labels=ids).loss.backward()
    norms.append(model.model.layers[0].self_attn.q_norm.weight.grad.norm().item())
ratios = [round(norm / norms[0], 3) for norm in norms]
if os.environ["RANK"] == "0":
    print(f"the gradient after 1 to 4 equal micro-batches: {ratios}, still there: {ratios != [1, 2, 3, 4]}")
torch.distributed.destroy_process_group()
