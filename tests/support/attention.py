"""Models with every kind of attention, states for attention functions, and what their results are compared by."""

import pytest
import torch

from trl_packfix.attention import choice, varlen
from trl_packfix.attention.kernels import KernelLaunch
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.group import ALONE

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3": {},  # sliding window
    "gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},  # softcap
    "gpt_oss": {},  # sinks, sliding window
    "opt": {},  # its mask ignores position_ids
    "mixtral": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 16},
    "stablelm": {},  # hands position_ids only to its attention
    "qwen2_moe": MOE  # its windows exist in the mask only
    | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "llama4_text": {  # its chunks exist in the mask only
        "head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0],
    },
    "deepseek_v3": {  # value heads smaller than query heads
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "num_key_value_heads": 4, "head_dim": 4,
    },
}  # fmt: skip


def take_path_of_cuda(patch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Let packs on this device take the path of CUDA, with the kernels of torch, for which a test has a stand-in."""
    patch.setattr(choice, "cuda_varlen_problem", lambda: None)
    patch.setattr(varlen, "FLASH_DEVICES", {"cuda", device})


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def one_launch(lengths):
    """Return the launch of a kernel for all documents of a pack."""
    return KernelLaunch((bounds_of(lengths),) * 2, (max(lengths),) * 2, slice(None), slice(None))


def pack_alone(lengths, **more):
    """Return what attention reads of a pack that no ranks share."""
    return PackedForward(bounds_of(lengths), bounds_of(lengths), max(lengths), max(lengths), **{"group": ALONE} | more)


def random_inputs(num_tokens, heads=4, kv_heads=2, head_dim=8, value_dim=None, sinks=False, dtype=torch.float64):
    """Return queries, keys and values of one row, and the logits of sinks."""
    generator = torch.Generator().manual_seed(0)
    value_dim = head_dim if value_dim is None else value_dim
    shapes = [(heads, num_tokens, head_dim), (kv_heads, num_tokens, head_dim), (kv_heads, num_tokens, value_dim)]
    tensors = [torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors += [torch.randn(heads, generator=generator, dtype=torch.float64)] if sinks else []
    return [x.to(dtype).requires_grad_() for x in tensors]


def outputs_and_gradients(attend, inputs, *arguments, **options):
    """Return the output, and the gradients of queries, keys, values, and logits of sinks if `inputs` has them."""
    query, key, value, *sinks = inputs
    out = attend(query, key, value, *arguments, **options | dict(zip(["sinks"], sinks, strict=False)))
    weights = torch.linspace(-1, 1, out.numel()).sin().bfloat16()  # the same in every dtype
    return [out.detach(), *torch.autograd.grad(out, inputs, weights.view(out.shape).to(out.dtype))]


def in_float64(inputs):
    """Return the same numbers in fp64, as leaves."""
    return [x.detach().double().requires_grad_() for x in inputs]


def largest_difference(these, those):
    return max((a - b).abs().max().item() for a, b in zip(these, those, strict=True))
