"""Tiny random models of all causal-LM and image-text model types of the installed transformers.

The default config of a type is shrunk field by field. Sizes listed by name in `shrinking.py` become small. Lists with
one entry per layer are cut to one layer of each kind. Dropout is off, and all other fields stay as they are. Types for
which this does not give a valid config have an entry in `EXCEPTIONS`. Noise is added to the initial weights, so that
weights initialised to zero or one (biases, norms, gates, sinks) have an effect, too.
"""

import inspect
from collections.abc import Sequence
from typing import Any

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

from trl_packfix.isolation.shrinking import (  # noqa: F401 - tests take all sizes from here
    FIELD_SIZES,
    FIRST_WORD,
    HEAD_DIM,
    KEY_VALUE_HEAD_FIELDS,
    LAYER_COUNT_FIELDS,
    NUM_HEADS,
    SIZES_OF_TYPE,
    VOCABULARY,
    WIDTH,
    key_value_heads,
    mrope_section,
    names_a_token,
    random_model,
)

ALWAYS = {"head_dim": HEAD_DIM, "is_decoder": True}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Real configs of these types have layers with a window, and the default config has none, or the reverse
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["laguna", "mellum", "ministral"], _BOTH),
    **dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "smollm3"], _BOTH | {"use_sliding_window": True}),
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": _BOTH | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
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
    """Return the model types that load as causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    """Return the model types that load as image-text models, here trained on text alone."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def all_types() -> list[tuple[str, str]]:
    """Return every model type with its kind."""
    return [(name, "causal") for name in causal_types()] + [(name, "image-text") for name in image_text_types()]


def build_model(model_type: str, kind: str = "causal", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny random model in fp32 on the CPU, the same for the same arguments.

    `changes` are fields of the config.
    """
    auto = {"causal": AutoModelForCausalLM, "image-text": AutoModelForImageTextToText}[kind]
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class()) | changes)
    return random_model(lambda: auto.from_config(config), seed)


def byte_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte (ids 4 to 259), made offline.

    EOS is `<|im_end|>`, and padding is `<|pad|>`.
    """
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
    """Return arguments that make a tiny config of the class of `config`."""
    fields: dict[str, Any] = vars(config)  # not getattr: configs with settings per layer raise
    stored = {
        name: config.attribute_map.get(name, name) for name in inspect.signature(type(config).__init__).parameters
    }
    values: dict[str, Any] = {}
    per_layer: dict[str, Sequence[Any]] = {}
    num_layers = next((fields[name] for name in LAYER_COUNT_FIELDS if isinstance(fields.get(name), int)), None)
    for name, key in stored.items():
        value = fields.get(key)
        if type(value) is int and name in LAYER_COUNT_FIELDS:
            values[name] = 2
        elif isinstance(value, dict) and "mrope_section" in value:
            values[name] = value | {"mrope_section": mrope_section(value)}
        elif isinstance(value, PreTrainedConfig):
            values[name] = shrink(value) | {"model_type": value.model_type}
        elif name in KEY_VALUE_HEAD_FIELDS:
            values[name] = key_value_heads(fields.get(key), fields.get(name.replace("key_value", "attention")))
        elif name in ALWAYS:
            values[name] = ALWAYS[name]
        elif type(value) is int and name in FIELD_SIZES:
            values[name] = min(value, FIELD_SIZES[name])
        elif type(value) is int and names_a_token(name) and value >= FIRST_WORD:
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
        values |= {name: [FIELD_SIZES.get(name, value[i]) for i in chosen] for name, value in per_layer.items()}
        values |= {name: len(chosen) for name in LAYER_COUNT_FIELDS if name in values}
    return values | SIZES_OF_TYPE.get(config.model_type, {}) | EXCEPTIONS.get(config.model_type, {})
