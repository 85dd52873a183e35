"""transformers: each forward waits for the GPU once per mask, for attention that makes no mask.

Users of flash attention wait in every micro-batch until the GPU has computed all that was queued. Without an attention
mask, `create_causal_mask` compares positions and reads the result on the host, before the mask function of the
attention is asked; that of flash attention ignores it. Nothing can be read on the device `meta`: here it raises.
"""

import traceback

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

AttentionInterface.register("maskless", sdpa_attention_forward)
AttentionMaskInterface.register("maskless", flash_attention_mask)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaModel(LlamaConfig(**sizes, vocab_size=99, attn_implementation="maskless")).to("meta")
positions = torch.tensor([[0, 1, 2, 0, 1]], device="meta")
frames = []
try:
    model(input_ids=positions, position_ids=positions, use_cache=False)
except RuntimeError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
print("positions are read on the host, still there:", "find_packed_sequence_indices" in frames)
