"""The cost model counts what a real forward pass does, for any config; defaults and limits by hand."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix.planning.costs import LLAMA_7B, CostModel, cost_model

SIZE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # the counter does not see fused kernels
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": {},
    "llama, wide heads": {"head_dim": 32},
    "gemma3_text": {"sliding_window": 32},
    "mistral": {"sliding_window": 32},
    "starcoder2": {"sliding_window": None},  # its feed-forward layer is not gated
    "gpt_neox": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**MOE, "mlp_only_layers": [0]},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 80},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16},
        **{"qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    },
}


def counted(config: object, num_tokens: int) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 90, (1, num_tokens)), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_pairs_cost_what_torch_counts(name):
    config = AutoConfig.for_model(name.split(",")[0], **{**SIZE, **MODELS[name]})
    short, long = 32, 64
    one, two = counted(config, short), counted(config, long)
    # eager attention computes all n * n pairs of every layer, those that a mask hides too
    per_pair = (two - 2 * one) / (long**2 - 2 * short**2)
    per_token = (one - per_pair * short**2) / short
    model = cost_model(config)
    assert per_pair == model.per_pair + sum(flops for _, flops in model.windows)
    assert model.per_token == pytest.approx(per_token, rel=0.002)  # qwen2_moe has a gate for its shared expert
    assert bool(model.windows) == (name in ("gemma3_text", "mistral", "gpt_oss"))


def test_pairs_by_hand():
    assert CostModel(10, 2)([1, 3]).tolist() == [10 + 2, 30 + 12]
    # a window of 2 in 4 tokens: 1 + 2 + 2 + 2 pairs; chunks of 3 in 4 tokens: 1 + 2 + 3 + 1
    assert CostModel(0, 0, windows=((2, 1.0),))([1, 2, 4]).tolist() == [1, 3, 7]
    assert CostModel(0, 0, chunks=((3, 1.0),))([3, 4, 6]).tolist() == [6, 7, 12]


def test_layers_by_kind():
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
    window, pair = 4096, 4.0 * 64
    kinds = ["linear_attention", "full_attention", "sliding_attention", "chunked_attention"]
    config = SimpleNamespace(**sizes, layer_types=kinds, sliding_window=window, attention_chunk_size=8192)
    model = cost_model(config)
    assert (model.per_pair, model.windows, model.chunks) == (pair, ((window, pair),), ((8192, pair),))
    # Qwen2 has a `sliding_window` that it does not use
    config = SimpleNamespace(**sizes, sliding_window=window, use_sliding_window=False)
    assert cost_model(config).per_pair == 4 * pair
    # a state space model has no pairs at all
    mamba = cost_model(SimpleNamespace(hidden_size=64, num_hidden_layers=4, vocab_size=99, expand=2))
    assert mamba.per_pair == 0 and not mamba.windows and mamba.per_token > 0


def test_without_a_config_it_is_a_llama_of_7b():
    assert cost_model(SimpleNamespace()) == LLAMA_7B
    llama = AutoConfig.for_model("llama")  # transformers' defaults are Llama 2 7B
    assert cost_model(llama) == LLAMA_7B
    # attention costs as much as all matrices at 50,400 tokens
    n = np.array([50_400])
    assert LLAMA_7B(n)[0] == pytest.approx(2 * LLAMA_7B.per_token * n[0], rel=1e-3)


def test_planning_costs_and_balance_need_no_torch():
    heavy = {"torch", "transformers", "datasets"}
    code = f"import sys, trl_packfix.planning.imbalance; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
