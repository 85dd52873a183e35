"""TRL: under FSDP2 the LM head of image-text models learns from the tokens of one rank.

torchrun --nproc_per_node 2 dev/upstream/sharded_head.py

Users who train such a model with SFT, DPO, KTO, GRPO or RLOO under FSDP2 get rows of the head that saw the tokens of
one rank, without a warning: the first loss is right. The fused loss gathers the head by `full_tensor()`, whose backward
takes the gradient of each rank as that of all. Most models are spared: accelerate shards their head with the last norm.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from trl.trainer.utils import add_fused_lm_head

text = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
torch.manual_seed(0)
model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, image_token_index=299))
add_fused_lm_head(model)
rows = torch.randint(0, 299, (2, 16))
sum(model(input_ids=row[None], labels=row[None], fused_lm_head=True).loss for row in rows).backward()
wanted = model.lm_head.weight.grad / 2  # the mean over ranks
model.zero_grad()
mesh = init_device_mesh("cpu", (2,))
fully_shard(model.lm_head, mesh=mesh)  # as accelerate does if it does not find the last norm
fully_shard(model, mesh=mesh)
row = rows[dist.get_rank()]
model(input_ids=row[None], labels=row[None], fused_lm_head=True).loss.backward()
grad = model.lm_head.weight.grad.full_tensor()
error = ((grad - wanted).norm() / wanted.norm()).item()
if dist.get_rank() == 0:
    print(f"gradient of the head is off by {error:.2f}, still there: {error > 1e-3}")
dist.destroy_process_group()
