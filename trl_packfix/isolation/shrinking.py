"""Make a tiny config from the config of a real model: only sizes shrink, and everything else stays as it is.

`trl-packfix check --config-only` (`cli/check_model.py`) tests a model in this way without its weights. It builds a tiny
model with random weights, and runs the leak probe on it. The tests do the same for all model types.

Widths, heads, experts, the vocabulary and the number of layers are small. Rotary embeddings, windows, multipliers and
the kinds of layers are taken from the real config. The first layers are used, until there is one of each kind.
Fields that the class of the config computes from sizes are computed again from the small sizes.

Words: the *real* config is the one that comes in. A *field* is one of its settings. *Fields*, a dictionary of names and
values, describe a config, one layer, or a rotary embedding (rope).
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

VOCABULARY = 128  # number of tokens
FIRST_WORD = 16  # the first token that is not a special token of any model
WIDTH = 32  # hidden size
NUM_HEADS = 4  # number of attention heads
HEAD_DIM = 8  # width of a head
NOISE_STD = 0.02  # standard deviation of the noise on weights, as in the usual initialisation

# By value, the names of the fields that have at most this value in a tiny config
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
    NUM_HEADS: """num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_attention_heads_per_layer
        swa_num_attention_heads linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads
        num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num
        rotary_dim""",  # half of the dimensions of a head
    2: """num_kv_heads linear_num_key_heads n_mamba_heads n_groups mamba_n_groups o_groups heads_per_ngram hc_mult
        hc_count num_codebooks num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k n_group""",
    HEAD_DIM: """head_dim dim_head attention_head_size kv_channels swa_head_dim qk_nope_head_dim qk_rope_head_dim
        v_head_dim index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim d_rel
        state_size ssm_state_size mamba_d_state""",
    # Lengths above which a model computes tokens differently: short documents must exceed them in `tools/sweep`.
    9: """sliding_window sliding_window_size attention_chunk_size attention_window_size window_size local_attention
        keep_window_size chunk_size mamba_chunk_size linear_chunk_size rel_extent""",
    6: "index_topk",
    # `index_n_heads` is that of the indexer, which scores the keys for sparse attention. With few heads it gives many
    # keys a score of exactly 0, and its choice among them is arbitrary.
    16: """index_n_heads kv_lora_rank q_lora_rank o_lora_rank hc_lowrank laurel_rank adapter_rank ple_embed_dim
        router_hidden_size hidden_size_per_layer_input""",
    1: "topk_group n_shared_experts num_shared_experts moe_num_shared_experts",
    512: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        context_length""",
    # Sizes of vision towers, which text does not use.
    24: "image_size",
    12: "patch_size",
}
FIELD_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}  # by name of the field
# Names of fields that count tokens: the entries for 9, 6 and 512 tokens. `tiny_like` does not shrink them, because a
# test must find what the real model does at its own lengths. Only the sweep over all model types (`tools/sweep`) does
LENGTH_FIELDS = {name for size in (9, 6, 512) for name in _NAMES_BY_SIZE[size].split()}
# Names of fields with the number of layers
LAYER_COUNT_FIELDS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth"
).split()
# Field with the number of layers at the end of the model that share keys with earlier layers. In such models, all other
# fields that differ between layers are lists with an entry per layer. A list can be cut anywhere, so the tiny config of
# such a model may begin at a later layer than the first (`_layers_of_all_kinds`).
SHARED_LAYERS_FIELD = "num_kv_shared_layers"
KEY_VALUE_HEAD_FIELDS = ("num_key_value_heads", "swa_num_key_value_heads")  # fields with the number of key-value heads
# Fields of mixers: the size of a head, the number of heads, and their product in multiples of the model's width
MAMBA_HEAD_FIELDS = (("mamba_d_head", "mamba_n_heads", "mamba_expand"), ("head_dim", "num_heads", "expand"))

# Sizes that depend on the model type, not only on the name of the field, by type
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
    """Return a config of the class of `config` with small sizes.

    Args:
        build: makes a model of a config of this class. If it raises an error, the error is passed on.
    """
    text = config.get_text_config(decoder=True)
    # 1. Build a narrow model with all layers, on a device without memory, to see their kinds.
    narrow_config = type(config).from_dict(_shrink_fields(config, text, None))
    with torch.device("meta"):
        narrow_model = build(narrow_config)
    # 2. Leave out the layers behind the first layer of the last kind.
    layers = _layers_of_all_kinds(narrow_model)
    return type(config).from_dict(_shrink_fields(config, text, layers))


def _shrink_fields(config: PreTrainedConfig, text: PreTrainedConfig, layers: range | None) -> dict[str, Any]:
    """Return the fields of a config, or of a config inside it, with small sizes.

    Args:
        text: the config of the text model, which is `config` or inside it.
        layers: the layers that the text model gets; None is all layers.
    """
    fields = _declared_fields(config)
    # 1. Shrink the sizes of this config, of the configs inside it, and of single layers.
    values = _shrink_sizes(fields, fields)
    for name, value in fields.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            values[name] = _shrink_fields(inner, text, layers)
        elif name == "per_layer_config" and value:  # fields that a layer overrides, by number of the layer
            # Layers are numbered anew in the tiny model. The config may have stored their numbers as texts.
            first_layer = layers.start if layers else 0
            by_layer = {int(layer): layer_fields for layer, layer_fields in value.items()}
            values[name] = {
                i - first_layer: _shrink_sizes(layer_fields, fields | layer_fields)
                for i, layer_fields in by_layer.items()
                if layers is None or i in layers
            }
    # 2. Shrink the numbers of layers, and the lists with an entry per layer.
    own_layers = layers  # the layers of this config
    if config is text:
        num_layers = config.num_hidden_layers
    else:  # a part of the model that reads no text: any two of its layers will do
        num_layers = next((fields[name] for name in LAYER_COUNT_FIELDS if isinstance(fields.get(name), int)), 0)
        own_layers = range(2)
    if own_layers is not None:
        values |= {name: len(own_layers) for name in LAYER_COUNT_FIELDS if fields.get(name) == num_layers}
        num_shared = fields.get(SHARED_LAYERS_FIELD)
        if num_shared:
            num_left_out = num_layers - own_layers.stop  # at the end of the model, where layers share keys
            values[SHARED_LAYERS_FIELD] = max(0, num_shared - num_left_out)
        for name, value in values.items():
            # Of strings only a pattern has a character per layer. "silu" has four by chance.
            is_per_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
            if is_per_layer and len(value) == num_layers:
                values[name] = value[own_layers.start : own_layers.stop]
    # 3. Compute other fields from the small sizes.
    return values | _recompute_fields(type(config), fields, values)


def _declared_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config by the names of its constructor's parameters. The config may store other names."""
    parameters = inspect.signature(type(config).__init__).parameters
    declared_names = {
        stored: name for name, stored in config.attribute_map.items() if name in parameters and stored not in parameters
    }
    return {declared_names.get(stored, stored): value for stored, value in config.to_dict().items()}


def _recompute_fields(
    config_class: type[PreTrainedConfig], fields: dict[str, Any], small_fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields that the class of a config computes from other fields, computed from the small sizes.

    The values of the real config would contradict the small sizes. Which fields are computed is found by a trial. The
    class makes two configs without a value for any field that may be computed: one from the other fields of the real
    config, and one from these fields with small sizes. A field is computed if it has the real value in the first
    config, and another value in the second.

    Args:
        fields: all fields of the real config.
        small_fields: the same fields with small sizes.
    """
    parameters = inspect.signature(config_class.__init__).parameters
    may_be_computed = {
        name
        for name, value in fields.items()
        if type(value) is int and (name not in parameters or parameters[name].default is None)
    }

    def compute_fields(values: dict[str, Any]) -> dict[str, Any]:
        set_values = {name: value for name, value in values.items() if name not in may_be_computed}
        return _declared_fields(config_class.from_dict(copy.deepcopy(set_values)))

    from_real = compute_fields(fields)
    from_small = compute_fields(small_fields)
    return {
        name: from_small[name]
        for name in may_be_computed & from_real.keys() & from_small.keys()
        if from_real[name] == fields[name] != from_small[name]
    }


def _shrink_sizes(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return some fields with small sizes.

    Args:
        fields: the fields to shrink: all fields of a config, of one of its layers, or of its rotary embedding.
        config: all fields of the real config, on which small sizes depend.
    """
    values: dict[str, Any] = {}
    sizes_of_type = SIZES_OF_TYPE.get(config.get("model_type", ""), {})
    for name, value in fields.items():
        # `FIELD_SIZES` also has the fields of `LENGTH_FIELDS`, for the sweep.
        size_of_name = None if name in LENGTH_FIELDS else FIELD_SIZES.get(name)
        size = sizes_of_type.get(name) or size_of_name
        if isinstance(value, dict):
            # It may describe a rotary embedding. In other dictionaries `_shrink_rope` changes nothing, and those of
            # inner configs and of single layers are replaced later, by `_shrink_fields`.
            value = _shrink_rope(_shrink_sizes(value, config | value), config)
        elif name == "partial_rotary_factor":
            value = _even_share(value, config)
        elif isinstance(value, bool):
            pass
        elif isinstance(value, int) and size is not None:
            value = min(value, size)
        elif name in KEY_VALUE_HEAD_FIELDS and isinstance(value, int):
            value = key_value_heads(value, config.get(name.replace("key_value", "attention")))
        elif isinstance(value, list) and size is not None:
            value = [min(number, size) for number in value]
        elif names_a_token(name):
            # The small ids begin at 3. Each field of token ids before this one has room for four, so up to three fields
            # have different ids.
            num_before = sum(map(names_a_token, values))
            value = _small_ids(value, 3 + 4 * num_before)
        values[name] = value
    # Where a part of each head has rotary embeddings, both parts of a small head have `HEAD_DIM` dimensions.
    if values.get("head_dim") and config["head_dim"] == sum(_rotated_and_plain(config)):
        values["head_dim"] = 2 * HEAD_DIM
    # All heads of a mixer together have its width.
    for size_of_head, heads, expand in MAMBA_HEAD_FIELDS:
        if isinstance(values.get(size_of_head), int) and {heads, expand} <= values.keys():
            width = values.get("mamba_d_ssm") or values[expand] * values["hidden_size"]
            values[size_of_head] = width // values[heads]
    return values


def _small_ids(value: object, first_id: int) -> object:
    """Return token ids within the small vocabulary; `value` is an id, a list of ids, or no id at all.

    A large id becomes `first_id`, and a large id in place i of a list `first_id + i`. These are counted modulo
    `FIRST_WORD`.
    """
    if isinstance(value, list):
        return [_small_ids(number, first_id + i) for i, number in enumerate(value)]
    return first_id % FIRST_WORD if isinstance(value, int) and value >= FIRST_WORD else value


def _shrink_rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rotary embedding for a small head. `config` has the fields of the real config."""
    head_size = config.get("qk_rope_head_dim") or config.get("head_dim")
    if head_size is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        head_size = config["hidden_size"] // config["num_attention_heads"]
    values = dict(rope)
    for name in ("short_factor", "long_factor"):  # a factor per frequency; some of them stand for all
        if head_size and isinstance(rope.get(name), list):
            factors = rope[name]
            num_factors = len(factors) * HEAD_DIM // head_size
            values[name] = [factors[i * len(factors) // num_factors] for i in range(num_factors)]
    if "mrope_section" in rope:
        values["mrope_section"] = mrope_section(values)
    return values


def _even_share(share: float | None, config: dict[str, Any]) -> float | None:
    """Return the share of the dimensions of a small head that rotate: an even number of them, at least two.

    Args:
        share: this share in the real config; None or 0 is returned as it is.
        config: all fields of the real config.
    """
    rotated, plain = _rotated_and_plain(config)
    if rotated and plain and share == rotated / (rotated + plain):
        return 0.5  # a small head has `HEAD_DIM` dimensions of each kind
    return share and max(2, 2 * round(share * HEAD_DIM / 2)) / HEAD_DIM


def _rotated_and_plain(config: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of dimensions of a head with and without rotary embedding, as `config` has them.

    A number is 0 if the config does not name it.
    """
    return config.get("qk_rope_head_dim") or 0, config.get("qk_nope_head_dim") or 0


def _layers_of_all_kinds(model: PreTrainedModel) -> range:
    """Return the range of the first layers that include one of each kind, at least two layers.

    If the last layers share keys with earlier layers, they are a kind of their own, and the first layers up to them are
    nearly all. But rounding grows with the number of layers, so this range then begins at a later layer if it can.
    """
    config = text_config(model)
    num_layers = config.num_hidden_layers
    for module in backbone(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            features_of_layers = [_layer_features(layer) for layer in module]
            # A feature that numbers the layers, such as `layer_idx`, does not make a kind. It is an integer that
            # differs from the index of the layer by the same number (its offset) in all layers.
            offsets = defaultdict(set)
            for index, features in enumerate(features_of_layers):
                for key, value in features.items():
                    offsets[key].add(value - index if type(value) is int else None)
            numbering = {key for key, values in offsets.items() if len(values) == 1 and values != {None}}
            kinds = [
                {key: value for key, value in features.items() if key not in numbering}
                for features in features_of_layers
            ]
            stop = max(min(2, num_layers), *(kinds.index(kind) + 1 for kind in kinds))
            if not getattr(config, SHARED_LAYERS_FIELD, 0):
                return range(stop)
            # Begin at the last layer from which on each kind is still there. For example, for the kinds A A B A C (stop
            # = 5) the last B is at layer 2, and the range is 2 to 4: B A C.
            backwards = kinds[:stop][::-1]
            return range(stop - 1 - max(backwards.index(kind) for kind in kinds), stop)
    return range(num_layers)


def _layer_features(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the features that distinguish layers: classes and settings of the modules inside, shapes of parameters.

    A key is the name of a module inside and the name of the feature.
    """
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
    """Return the model that `build` returns, with random weights in fp32 and noise added to all of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE_STD)
    return model


def names_a_token(name: str) -> bool:
    """Return whether a field of a config holds the id of a token, or several ids. A name may be an integer."""
    return str(name).endswith(("token_id", "token_ids", "token_index"))


def mrope_section(rope: dict[str, Any]) -> list[int]:
    """Return the numbers of frequencies for time, height and width in a tiny head, in about the shares of `rope`.

    Their sum is the number of frequencies with which a tiny head rotates.
    """
    num_frequencies = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    section_of_model = rope["mrope_section"]
    section = [num_frequencies * share // sum(section_of_model) for share in section_of_model]
    return [num_frequencies - sum(section[1:]), *section[1:]]


def key_value_heads(value: int | None, query_heads: int | None) -> int:
    """Return the number of key-value heads in a tiny config, for a real model with `value` of them and `query_heads`.

    It is 1 if `value` is 1, `NUM_HEADS` if both are equal, and else half of `NUM_HEADS`.

    >>> key_value_heads(8, 8), key_value_heads(8, 32), key_value_heads(1, 32)
    (4, 2, 1)
    """
    if value == 1:
        return 1
    return NUM_HEADS if value is not None and value == query_heads else NUM_HEADS // 2
