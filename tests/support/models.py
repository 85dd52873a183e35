"""A tiny tokenizer and tiny random models, made offline."""

import torch
from sweep.zoo import byte_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_packfix.attention import choice
from trl_packfix.attention.forwards import mark_packed_forwards

# ChatML. The generation markers are what `assistant_only_loss` reads; tools are listed in the system turn.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Smallest sizes that keep each architecture's own features: grouped-query attention, two layers, one of them with a
# sliding window where the model has windows (16 tokens, so that short documents already cross it).
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
WINDOWED = {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
# RoPE that depends on the length of the sequence, from 48 tokens on
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": 48,
}
ARCHITECTURES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": WINDOWED,
    "gpt_oss": WINDOWED | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mixtral": EXPERTS | {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "router_aux_loss_coef": 0.0,
    },
    "bart": {"dropout": 0.0, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    # One layer of each kind. Unless it is said, all layers of LFM2 are attention
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # With the heads of the default config a step takes seconds.
    "qwen3_next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 16,  # with 4 of them all forget within two tokens, and no test sees a leak
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}
ALIASES = {"gemma3": "gemma3_text"}


def longrope(long=4.0, length=48):
    """Return the config of a RoPE that divides frequencies by `long` in sequences of more than `length` tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [long] * 4, "original_max_position_embeddings": length}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0} | factors
    return {"rope_parameters": rope, "max_position_embeddings": 256}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte (ids 4 to 259) with the template of ChatML.

    EOS is `<|im_end|>`, and padding is `<|pad|>`.
    """
    return byte_tokenizer(chat_template=CHAT_TEMPLATE)


def with_attention(model, name):
    """Set the attention of the model by its name, without the check of transformers, and return the model."""
    model.config._attn_implementation_internal = name
    return model


def build_tiny_model(
    model_type: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **config
) -> PreTrainedModel:
    """Return a random causal LM of about 30,000 parameters, the same for the same arguments.

    Further keywords change its config, `attn_implementation` included.
    """
    model_type = ALIASES.get(model_type, model_type)
    attn_implementation = config.pop("attn_implementation", None)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = AutoConfig.for_model(model_type, **(SIZES | special | ARCHITECTURES.get(model_type, {}) | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attn_implementation)
    return model


def select_attention(model: nn.Module, *args, **settings) -> choice.AttentionChoice:
    """Set on the model what `choose_attention` chooses for packs; undo with `set_attention(model, chosen.previous)`."""
    choice_made = choice.choose_attention(model, *args, **settings)
    if choice_made.name != choice_made.previous:
        choice.set_attention(model, choice_made.name)
    return choice_made


def attend_packs(model: nn.Module, **settings):
    """Let the model take packs, with the attention that is chosen for them, and return the guard that ends it."""
    select_attention(model, **settings)
    return mark_packed_forwards(model)
