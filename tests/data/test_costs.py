"""The cost model counts what a real forward pass does, for any config; published sizes and limits by hand."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.runs import build_trainer
from support.versions import current_models
from sweep.zoo import causal_types, image_text_types, shrink
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.planning.costs import LLAMA_7B, CostModel, ScanCosts

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
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": {},
    "llama, wide heads": {"head_dim": 32},
    "gemma3_text": {"sliding_window": 32},
    "mistral": {"sliding_window": 32},
    "starcoder2": {"sliding_window": None},  # its feed-forward layer is not gated
    "gpt_neox": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": MOE | {"mlp_only_layers": [0]},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 80},
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "intermediate_size": 48, "moe_num_shared_experts": 1},
    "gemma4_text": MOE
    | {"enable_moe_block": True, "num_experts_per_tok": None, "top_k_experts": 2, "sliding_window": 32},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    "deepseek_v3": LATENT | {"head_dim": 8, "first_k_dense_replace": 1},
    # layers with other numbers of heads, without an indexer of their own, and with one that selects blocks
    "laguna": MOE
    | {"shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [4, 8, 8], "sliding_window": 32}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "glm_moe_dsa": LATENT
    | {"mlp_layer_types": ["dense"] * 3, "index_n_heads": 4, "index_head_dim": 16}
    | {"indexer_types": ["full", "shared", "full"]},
    "minimax_m3_vl_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 80,
        "shared_intermediate_size": 48,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_topk_blocks": 2,
    },
}


def counted(config: object, num_tokens: int) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 90, (1, num_tokens)), use_cache=False)
    return counter.get_total_flops()


NEW_TYPES = ("laguna", "glm_moe_dsa", "minimax_m3_vl_text", "gemma4_text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=current_models) if name in NEW_TYPES else name for name in MODELS]
)
def test_tokens_and_pairs_cost_what_torch_counts(name):
    config = AutoConfig.for_model(name.split(",")[0], **SIZE | MODELS[name])
    short = counted(config, 32)
    long = counted(config, 64)
    # eager attention computes all n * n pairs of every layer, those that a mask hides too
    per_pair = (long - 2 * short) / (64**2 - 2 * 32**2)
    per_token = (short - per_pair * 32**2) / 32
    model = make_cost_model(config)
    assert per_pair == all_pairs(model)
    assert per_token <= model.per_token <= 1.03 * per_token  # norms and biases are parameters, and no products
    assert bool(model.windows) == (name in ("gemma3_text", "gemma4_text", "mistral", "gpt_oss", "laguna"))


def all_pairs(model: CostModel) -> float:
    """Return the cost of attention for each pair, summed over all kinds; a window of one token is a scan."""
    return model.per_pair + sum(flops for tokens, flops in (*model.windows, *model.chunks) if tokens > 1)


# Checkpoints whose sizes are the defaults of transformers: parameters that a token meets, without an embedding that is
# only looked up, in 10^9, as published; FLOPs of a pair, layers x heads x (key + value) x 2.
PUBLISHED = {
    "llama": (6.61, 32 * 32 * 256 * 2),  # Llama 2 7B: 6.74 - 0.13
    "gpt2": (0.124, 12 * 12 * 128 * 2),  # the embedding is the LM head, too
    "gemma": (8.54, 28 * 16 * 512 * 2),  # 7B, likewise
    "falcon": (6.92, 32 * 71 * 128 * 2),  # 7B, likewise
    "mixtral": (12.75, 32 * 32 * 256 * 2),  # 8x7B: 12.88 - 0.13
    "deepseek_v3": (36.63, 61 * 128 * 320 * 2),  # 37.55 - 0.93
    "jamba": (11.84, 4 * 32 * 256 * 2),  # v0.1: 12 active, attention in 4 of 32 layers
    "zamba": (11.53, 13 * 16 * 928 * 2),  # one block of attention is met in 13 layers
    "phi4_multimodal": (3.82, 32 * 24 * 256 * 2),  # its text part, as Phi-4-mini: 3.84
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_cost_two_operations_per_published_parameter(name):
    billions, per_pair = PUBLISHED[name]
    model = make_cost_model(AutoConfig.for_model(name))
    assert model.per_token == pytest.approx(2e9 * billions, rel=0.01)
    assert all_pairs(model) == per_pair


SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
HYBRID = SIZE | SPECIAL | {"hidden_size": 128, "num_hidden_layers": 4}
MIXED = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {"layer_types": MIXED, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
GROUPS = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_chunk_size": 64}
HYBRIDS = {
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "bamba": GROUPS | {"attn_layer_indices": [3]},
    "granitemoehybrid": GROUPS | {"layer_types": MIXED, "num_local_experts": 0, "shared_intermediate_size": 160},
    "falcon_h1": GROUPS | {"mamba_d_ssm": 256},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 64, "n_groups": 2, "chunk_size": 64, "expand": 2},
    "kimi_linear": {
        "layer_types": MIXED,
        "mlp_layer_types": ["dense"] * 4,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
    },
    "mamba": {"state_size": 16},
}


def as_torch_counts(scan: ScanCosts) -> ScanCosts:
    """Return the costs without the products that transformers' code in torch has in another form than kernels.

    It repeats the keys of Mamba-2 for each head. The counter sees no triangular systems and no sums of elements.
    """
    key = scan.exchanged_per_kv_head // 2
    if scan.chunk == 1:  # Mamba-1: two, as many as its decays are counted with
        return scan._replace(per_token=0.0)
    size = (scan.exchanged_per_head - 1) // 2
    if scan.per_token == 4 * scan.heads * size * key:  # Mamba-2
        return scan._replace(per_pair=2.0 * scan.heads * (key + size))
    value = scan.per_token / (6 * scan.heads * key)
    is_kda = scan.exchanged_per_head == 2 * value + 1 + 2 * key
    return scan._replace(per_pair=scan.heads * (2.0 * key + 4.0 * value if is_kda else 4.0 * key + 2.0 * value))


@current_models  # transformers below 5.20 lacks kimi_linear, and its code in torch has other products than kernels
@pytest.mark.parametrize("name", HYBRIDS)
def test_scans_cost_what_torch_counts(name):
    """Within 1 % of a forward at whole chunks; without scans it would be 6 to 44 % less, and little less in Mamba."""
    num_tokens = 8 if name == "mamba" else 128  # its scan runs token by token
    config = AutoConfig.for_model(name, **HYBRID | HYBRIDS[name])
    total = counted(config, num_tokens)
    costs = make_cost_model(config)
    scans = sum(
        scan.layers * num_tokens * (scan.per_token + scan.per_pair * (scan.chunk if scan.chunk > 1 else 0))
        for scan in map(as_torch_counts, costs.mixers)
    )
    rest_of_model = costs.per_token * num_tokens + costs.per_pair * num_tokens**2
    assert (scans + rest_of_model) / total == pytest.approx(1, abs=0.01)
    assert scans / rest_of_model > 0.05 or name == "mamba"
    # a document in one chunk: states, and pairs of its tokens
    n = min(8, costs.mixers[0].chunk)
    in_one_chunk = sum(
        mixer.layers * (mixer.per_token * n + mixer.per_pair * n * (n + 1) / 2) for mixer in costs.mixers
    )
    expected = costs.per_token * n + costs.per_pair * n * (n + 1) / 2 + in_one_chunk
    assert costs(np.array([n]))[0] == pytest.approx(expected)


# Types that no tiny config can be made of here, or that are no model of text.
NOT_BUILT = """apertus1p5 blt diffusion_gemma evolla gemma4_assistant gemma4_unified_assistant granite4_vision molmo2
    musicgen musicgen_melody nemotron_h_omni pi0 vision-encoder-decoder""".split()


@pytest.mark.slow
def test_every_type_has_costs_of_its_own():
    types = sorted({*causal_types(), *image_text_types()} - set(NOT_BUILT))
    assert len(types) > 200
    state = torch.get_rng_state()
    models = {name: make_cost_model(CONFIG_MAPPING[name](**shrink(CONFIG_MAPPING[name]()))) for name in types}
    assert not [name for name, model in models.items() if model == LLAMA_7B]
    assert torch.equal(state, torch.get_rng_state())  # a run draws what it would have drawn


def test_without_a_config_it_is_a_llama_of_7b():
    assert make_cost_model(None) == LLAMA_7B
    llama = make_cost_model(AutoConfig.for_model("llama"))  # transformers' defaults are Llama 2 7B
    assert (llama.per_pair, llama.per_token) == (LLAMA_7B.per_pair, pytest.approx(LLAMA_7B.per_token, rel=1e-4))
    # attention costs as much as all matrices at 50,400 tokens
    n = np.array([50_400])
    assert LLAMA_7B(n)[0] == pytest.approx(2 * LLAMA_7B.per_token * n[0], rel=1e-3)


# Configs whose fields have another value in each layer, which cannot be read from the whole config, or are lists.
BY_LAYER = {
    "gemma4_text": shrink(CONFIG_MAPPING["gemma4_text"]()),
    "hunyuan_v1_moe": SIZE
    | MOE
    | {"moe_intermediate_size": [48] * 3, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", BY_LAYER)
def test_a_trainer_is_built_for_configs_by_layer(name, packing, tmp_path):
    settings = BY_LAYER[name] | {"vocab_size": 300}
    settings = {key: value for key, value in settings.items() if "implementation" not in key}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**settings))
    rows = Dataset.from_dict({"input_ids": [list(range(20, 40))] * 4})
    trainer = build_trainer(tmp_path, rows, model, packing=packing, per_device_train_batch_size=4)
    assert len(trainer.get_train_dataloader()) == 1
    assert trainer.data.cost_model == make_cost_model(model.config) != LLAMA_7B


def test_a_model_of_other_code_is_counted_by_its_class():
    class OtherConfig(LlamaConfig):
        model_type = "other"

    class OtherModel(LlamaForCausalLM):
        config_class = OtherConfig

    config = OtherConfig(**{name: value for name, value in SIZE.items() if "implementation" not in name})
    assert make_cost_model(config) == LLAMA_7B  # nothing says what it is made of
    assert make_cost_model(config, OtherModel) == make_cost_model(LlamaConfig(**config.to_diff_dict()))


def test_a_config_that_no_model_can_be_built_from_stops_nothing(caplog):
    class BrokenModel(LlamaForCausalLM):
        def __init__(self, config):
            raise RuntimeError("needs a kernel that is not installed")

    class BrokenConfig(LlamaConfig):
        model_type = "broken"

    assert make_cost_model(BrokenConfig(), BrokenModel) == LLAMA_7B
    assert "needs a kernel that is not installed" in caplog.text
    assert "Llama with 7B parameters" in caplog.text
