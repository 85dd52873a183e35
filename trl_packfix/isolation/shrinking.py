"""Make a tiny config from a real one: only sizes shrink, everything else stays as it is.

Rope, windows, multipliers, noise and the kinds of layers are those of the real config. Widths, heads, experts, the
vocabulary and the number of layers are small. The first layers are used, as many as needed to have one of each kind.
What the class of the config computes from sizes, it computes again from the small ones.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.models import backbone, text_config

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
        adapter_in_dim adapter_out_dim adapter_input_size downsample_hidden_size expand_dim lru_width proj_dim
        projection_dim projector_hidden_size projector_input_dim projector_output_dim prompt_mid_dim text_hidden_size
        vision_output_dim""",
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
SHARED_LAYERS = "num_kv_shared_layers"  # the last ones; models with them list everything else per layer
KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")
# Size of a head, heads, and how often the width of the model is their product
MAMBA_HEADS = (("mamba_d_head", "mamba_n_heads", "mamba_expand"), ("head_dim", "num_heads", "expand"))

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


def tiny_like(config: PreTrainedConfig, build: Callable[[PreTrainedConfig], PreTrainedModel]) -> PreTrainedConfig:
    """A config of the same class with small sizes; `build` makes a model of such a config.

    Raises the error of transformers if it cannot.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):  # all layers, without memory
        model = build(type(config).from_dict(_shrunk(config, text, None)))
    return type(config).from_dict(_shrunk(config, text, _layers_of_all_kinds(model)))


def _shrunk(config: PreTrainedConfig, text: PreTrainedConfig, layers: range | None) -> dict[str, Any]:
    """Fields of the config with small sizes; its text part has these layers, or all if `layers` is None."""
    fields = _declared(config)
    values = _sized(fields, fields)
    for name, value in fields.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            values[name] = _shrunk(inner, text, layers)
        elif name == "per_layer_config" and value:
            by_layer = {int(layer): layer_fields for layer, layer_fields in value.items()}
            values[name] = {
                i - (layers.start if layers else 0): _sized(layer_fields, fields | layer_fields)
                for i, layer_fields in by_layer.items()
                if layers is None or i in layers
            }
    if config is text:
        num_layers = config.num_hidden_layers
    else:  # no text reaches its layers
        num_layers = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), 0)
        layers = range(2)
    if layers is not None:
        values |= {name: len(layers) for name in LAYERS if fields.get(name) == num_layers}
        if shared := fields.get(SHARED_LAYERS):
            values[SHARED_LAYERS] = max(0, layers.stop - num_layers + shared)
        for name, value in values.items():
            # A string may have as many characters by chance, such as "silu" in four layers.
            is_per_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
            if is_per_layer and len(value) == num_layers:
                values[name] = value[layers.start : layers.stop]
    return values | _computed(type(config), fields, values)


def _declared(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the config by the names that its class takes; it may store them by others."""
    parameters = inspect.signature(type(config).__init__).parameters
    names = {
        stored: name for name, stored in config.attribute_map.items() if name in parameters and stored not in parameters
    }
    return {names.get(name, name): value for name, value in config.to_dict().items()}


def _computed(config_class: type[PreTrainedConfig], fields: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Fields that the class computes from others, of the small config: those of the given one contradict its sizes.

    Without them the class computes what the given config has, and another value from small sizes.
    """
    parameters = inspect.signature(config_class.__init__).parameters
    unset = {
        name
        for name, value in fields.items()
        if type(value) is int and (name not in parameters or parameters[name].default is None)
    }
    given, anew = (
        _declared(config_class.from_dict(copy.deepcopy({n: v for n, v in values.items() if n not in unset})))
        for values in (fields, small)
    )
    return {n: anew[n] for n in unset & given.keys() & anew.keys() if given[n] == fields[n] != anew[n]}


def _sized(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    sizes = SIZES_OF_TYPE.get(config.get("model_type", ""), {})
    for name, value in fields.items():
        size = sizes.get(name) or (SIZES.get(name) if name not in LENGTHS else None)
        if isinstance(value, dict):
            value = _rope(_sized(value, config | value), config)
        elif name == "partial_rotary_factor":
            value = _even_share(value, config)
        elif isinstance(value, bool):
            pass
        elif isinstance(value, int) and size is not None:
            value = min(value, size)
        elif name in KEY_VALUE_HEADS and isinstance(value, int):
            value = key_value_heads(value, config.get(name.replace("key_value", "attention")))
        elif isinstance(value, list) and size is not None:
            value = [min(number, size) for number in value]
        elif names_a_token(name):
            value = _small_ids(value, 3 + 4 * sum(map(names_a_token, values)))
        values[name] = value
    if values.get("head_dim") and config["head_dim"] == sum(_halves(config)):
        values["head_dim"] = 2 * HEAD_DIM
    for size_of_head, heads, expand in MAMBA_HEADS:
        if isinstance(values.get(size_of_head), int) and {heads, expand} <= values.keys():
            width = values.get("mamba_d_ssm") or values[expand] * values["hidden_size"]
            values[size_of_head] = width // values[heads]
    return values


def _small_ids(value: object, first: int) -> object:
    """Ids within the small vocabulary: small ones stay, larger ones get distinct ids from `first` on."""
    if isinstance(value, list):
        return [_small_ids(number, first + i) for i, number in enumerate(value)]
    return first % FIRST_WORD if isinstance(value, int) and value >= FIRST_WORD else value


def _rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    head = config.get("qk_rope_head_dim") or config.get("head_dim")
    if head is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        head = config["hidden_size"] // config["num_attention_heads"]
    values = dict(rope)
    for name in ("short_factor", "long_factor"):
        if head and isinstance(rope.get(name), list):
            factors = rope[name]
            wanted = len(factors) * HEAD_DIM // head
            values[name] = [factors[i * len(factors) // wanted] for i in range(wanted)]
    if "mrope_section" in rope:
        values["mrope_section"] = mrope_section(values)
    return values


def _even_share(share: float | None, config: dict[str, Any]) -> float | None:
    """The rotated share of a small head: an even number of its dimensions, at least two."""
    rotated, others = _halves(config)
    if rotated and others and share == rotated / (rotated + others):
        return 0.5
    return share and max(2, 2 * round(share * HEAD_DIM / 2)) / HEAD_DIM


def _halves(config: dict[str, Any]) -> tuple[int, int]:
    """Dimensions of a head with rope and without, where a config has both: in a tiny head HEAD_DIM of each."""
    return config.get("qk_rope_head_dim") or 0, config.get("qk_nope_head_dim") or 0


def _layers_of_all_kinds(model: PreTrainedModel) -> range:
    """The first layers that include one of each kind, at least two.

    Where the last layers share keys with those before, these are many, and rounding grows with their number. The first
    of them are left out.
    """
    config = text_config(model)
    num_layers = config.num_hidden_layers
    for module in backbone(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            layers = [_layer_features(layer) for layer in module]
            offsets = defaultdict(set)  # a field that numbers the layers has one offset only
            for index, layer in enumerate(layers):
                for key, value in layer.items():
                    offsets[key].add(value - index if type(value) is int else None)
            counts = {key for key, seen in offsets.items() if len(seen) == 1 and seen != {None}}
            kinds = [{key: value for key, value in layer.items() if key not in counts} for layer in layers]
            stop = max(min(2, num_layers), *(kinds.index(kind) + 1 for kind in kinds))
            if not getattr(config, SHARED_LAYERS, 0):
                return range(stop)
            backwards = kinds[:stop][::-1]
            return range(stop - 1 - max(backwards.index(kind) for kind in kinds), stop)
    return range(num_layers)


def _layer_features(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The features that distinguish layers: classes of the modules inside, their settings, shapes of parameters."""
    features: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        features[name, "class"] = type(module)
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | str | int):
                features[name, key] = value
        for key, parameter in module.named_parameters(recurse=False):
            features[name, key] = tuple(parameter.shape)
    return features


def random_model(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """The model that `build` returns, with random weights in fp32 and noise added to all of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def names_a_token(name: str) -> bool:
    """Whether a field of a config holds the id of a token, or several."""
    return str(name).endswith(("token_id", "token_ids", "token_index"))  # labels are numbered


def mrope_section(rope: dict[str, Any]) -> list[int]:
    """Frequencies of time, height and width: in sum those that a tiny head rotates, in about the same shares."""
    wanted = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    section_of_model = rope["mrope_section"]
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
