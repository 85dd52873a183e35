"""Tiny random models of all causal-LM and image-text model types of the installed transformers.

The default config of a type is shrunk field by field. Sizes listed here by name become small. Lists with one entry per
layer are cut to one layer of each kind. Dropout is off, and all other fields stay as they are. Types for which this
does not give a valid config have an entry in `EXCEPTIONS`. Noise is added to the initial weights, so that weights
initialised to zero or one (biases, norms, gates, sinks) have an effect, too.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY = 128  # tokens; those below FIRST_WORD may be special tokens of a model
FIRST_WORD = 16
WIDTH = 32
HEADS = 4
HEAD_DIM = 8
NOISE = 0.02  # standard deviation, as in the usual initialisation

# The largest value of a field, by its name; a smaller value in the type's config stays.
_NAMES_BY_SIZE = {
    VOCABULARY: """vocab_size decoder_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base
        pronunciation_vocab_size shape_vocab_size text_vocab_size unpadded_vocab_size vocab_size_per_layer_input""",
    WIDTH: """hidden_size d_model n_embd emb_dim embed_dim embedding_size input_embedding_size output_embedding_size
        hidden_size_global mamba_d_ssm out_hidden_size pronunciation_embed_dim shape_embed_dim
        adapter_in_dim adapter_out_dim adapter_input_size downsample_hidden_size expand_dim proj_dim projection_dim
        projector_hidden_size prompt_mid_dim text_hidden_size vision_output_dim""",
    48: """intermediate_size moe_intermediate_size n_inner d_inner dim_ff dff mlp_dim ffn_dim ffn_hidden_size
        decoder_ffn_dim encoder_ffn_dim expert_ffn_hidden_size feed_forward_size intermediate_size_mlp
        dense_intermediate_size prefix_dense_intermediate_size shared_intermediate_size
        shared_expert_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    HEADS: """num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_attention_heads_per_layer
        swa_num_attention_heads linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads
        num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num rotary_dim""",
    2: """num_kv_heads linear_num_key_heads n_mamba_heads n_groups mamba_n_groups o_groups heads_per_ngram hc_mult
        hc_count num_codebooks num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k n_group""",
    HEAD_DIM: """head_dim dim_head attention_head_size kv_channels swa_head_dim qk_nope_head_dim qk_rope_head_dim
        v_head_dim index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim d_rel
        state_size ssm_state_size mamba_d_state""",
    # Lengths above which a model computes tokens differently: short documents must exceed them.
    9: """sliding_window sliding_window_size attention_chunk_size attention_window_size window_size local_attention
        keep_window_size chunk_size mamba_chunk_size linear_chunk_size rel_extent""",
    6: "index_topk",
    # An indexer with few heads gives many tokens a score of exactly 0, and its choice among them is arbitrary.
    16: """index_n_heads kv_lora_rank q_lora_rank o_lora_rank hc_lowrank laurel_rank adapter_rank ple_embed_dim
        router_hidden_size hidden_size_per_layer_input""",
    1: "topk_group n_shared_experts num_shared_experts moe_num_shared_experts",
    512: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        context_length""",
    # of vision parts, which text does not use
    24: "image_size",
    12: "patch_size",
}
SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
LENGTHS = {name for size in (9, 6, 512) for name in _NAMES_BY_SIZE[size].split()}  # in tokens
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth"
).split()
KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Sizes that depend on the model type, not only on the name of the field
SIZES_OF_TYPE: dict[str, dict[str, int]] = {
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "mamba2": {"num_heads": 8},
}
# Real configs of these types have layers with a window, and the default config has none, or the reverse
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["laguna", "mellum", "ministral"], _BOTH),
    **dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "smollm3"], _BOTH | {"use_sliding_window": True}),
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "index_topk": 6,
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": _BOTH | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    # axial positions do not support documents of any length
    "reformer": {"axial_pos_embds": False, "hash_seed": 0, "num_buckets": 2},
    **dict.fromkeys(
        "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text glm_ocr_text paddleocr_vl_text hunyuan_vl_text".split(),
        {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    ),
    **dict.fromkeys(
        "glm4v_text glm4v_moe_text".split(),
        {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    ),
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "glm5_next_text": {"index_kpool": 3},
    "granite4_vision": {"deepstack_layer_map": []},
    "step3p5": {"sliding_window": 9},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 9},
}


def causal_types() -> list[str]:
    """Model types that load as causal language models, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    """Model types that load as image-text models, here trained on text alone, in alphabetical order."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build_model(model_type: str, kind: str = "causal", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random model in fp32 on the CPU, the same for the same arguments.

    Args:
        model_type: of `causal_types()`, or of `image_text_types()` with `kind="image-text"`.
        changes: fields of the config, which override all others.
    """
    auto = {"causal": AutoModelForCausalLM, "image-text": AutoModelForImageTextToText}[kind]
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class()) | changes)
    return random_model(lambda: auto.from_config(config), seed)


def random_model(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """The model that `build` returns, with random weights in fp32 and noise added to all of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def byte_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per byte (ids 4 to 259), `<|im_end|>` as EOS, `<|pad|>` as padding; made offline."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>"],
        **settings,
    )


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that make a tiny config of the class of `config`."""
    fields: dict[str, Any] = vars(config)  # not getattr: configs with settings per layer raise
    stored = {
        name: config.attribute_map.get(name, name) for name in inspect.signature(type(config).__init__).parameters
    }
    values: dict[str, Any] = {}
    per_layer: dict[str, Sequence[Any]] = {}
    num_layers = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    for name, key in stored.items():
        value = fields.get(key)
        if isinstance(value, dict) and "mrope_section" in value:
            values[name] = value | {"mrope_section": mrope_section(value)}
        elif isinstance(value, PreTrainedConfig):
            values[name] = shrink(value) | {"model_type": value.model_type}
        elif name in KEY_VALUE_HEADS:
            values[name] = key_value_heads(fields.get(key), fields.get(name.replace("key_value", "attention")))
        elif name == "head_dim":
            values[name] = HEAD_DIM
        elif name == "is_decoder":
            values[name] = True
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and name in LAYERS:
            values[name] = 2
        elif isinstance(value, int) and name in SIZES:
            values[name] = min(value, SIZES[name])
        elif isinstance(value, int) and names_a_token(name) and value >= FIRST_WORD:
            values[name] = 3 + sum(map(names_a_token, values))
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            values[name] = 0.0
        elif name == "eos_token_id" and isinstance(value, list):
            values[name] = 2
        elif isinstance(value, list | tuple) and len(value) == num_layers and value != list(range(num_layers)):
            per_layer[name] = value
    if per_layer:
        kinds = list(zip(*per_layer.values(), strict=True))
        chosen = sorted({kinds.index(kind) for kind in kinds})
        chosen = [0, 1] if len(chosen) == 1 else chosen
        values |= {name: [SIZES.get(name, value[i]) for i in chosen] for name, value in per_layer.items()}
        values |= {name: len(chosen) for name in LAYERS if name in values}
    return values | SIZES_OF_TYPE.get(config.model_type, {}) | EXCEPTIONS.get(config.model_type, {})


def names_a_token(name: str) -> bool:
    """Whether a field of a config holds the id of a token, or several."""
    return name.endswith(("token_id", "token_ids", "token_index"))


def mrope_section(rope: dict[str, Any]) -> list[int]:
    """Frequencies of time, height and width: in sum those that a tiny head rotates, in about the same shares."""
    wanted, section_of_model = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2, rope["mrope_section"]
    section = [wanted * share // sum(section_of_model) for share in section_of_model]
    return [wanted - sum(section[1:]), *section[1:]]


def key_value_heads(value: int | None, query_heads: int | None) -> int:
    """Number of key-value heads: 1 if `value` is 1, all HEADS if it equals `query_heads`, else half of them.

    >>> key_value_heads(8, 8), key_value_heads(8, 32), key_value_heads(1, 32)
    (4, 2, 1)
    """
    if value == 1:
        return 1
    return HEADS if value is not None and value == query_heads else HEADS // 2
