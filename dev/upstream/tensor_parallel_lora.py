"""transformers: LoRA on a layer that tensor parallelism divides by its input fails in its first forward.

torchrun --nproc_per_node 2 dev/upstream/tensor_parallel_lora.py

Users of LoRA with `tp_size` cannot adapt `o_proj` and `down_proj`.
"""

import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
folder = tempfile.mkdtemp()
LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config={"tp_size": int(os.environ["WORLD_SIZE"])})
model = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
error = None
try:
    model(input_ids=torch.arange(4, 20)[None])
except RuntimeError as raised:
    error = raised
if os.environ["RANK"] == "0":
    print(f"the forward raises {error}, still there: {error is not None}")
torch.distributed.destroy_process_group()
