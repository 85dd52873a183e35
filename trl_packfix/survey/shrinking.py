"""Make a tiny config from a real one: only sizes shrink, everything else stays as it is.

Rope, windows, multipliers, noise and the kinds of layers are those of the real config. Widths, heads, experts, the
vocabulary and the number of layers are small. The first layers are used, as many as needed to have one of each kind.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.models import backbone, text_config
from .zoo import (
    FIRST_WORD,
    HEAD_DIM,
    KEY_VALUE_HEADS,
    LAYERS,
    LENGTHS,
    SIZES,
    SIZES_OF_TYPE,
    key_value_heads,
    mrope_section,
    names_a_token,
)


def tiny_like(config: PreTrainedConfig, build: Callable[[PreTrainedConfig], PreTrainedModel]) -> PreTrainedConfig:
    """A config of the same class with small sizes; `build` makes a model of such a config.

    Raises the error of transformers if it cannot make such a config, or a model of it.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):  # all layers, without memory
        model = build(type(config).from_dict(_shrunk(config, text, None)))
    return type(config).from_dict(_shrunk(config, text, _num_kinds(model)))


def _shrunk(config: PreTrainedConfig, text: PreTrainedConfig, depth: int | None) -> dict[str, Any]:
    """Fields of the config with small sizes; its text part has the first `depth` layers, or all if `depth` is None."""
    fields = config.to_dict()
    values: dict[str, Any] = {}
    for name, value in fields.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            values[name] = _shrunk(inner, text, depth)
        elif name == "per_layer_config" and value:
            layers = {int(layer): layer_fields for layer, layer_fields in value.items()}
            values[name] = {
                i: _sized(layer_fields, fields) for i, layer_fields in layers.items() if depth is None or i < depth
            }
    values = _sized(fields, fields) | values
    sizes = SIZES_OF_TYPE.get(config.model_type, {})
    values |= {name: min(values[name], size) for name, size in sizes.items() if isinstance(values.get(name), int)}
    if config is text:
        num_layers = config.num_hidden_layers
    else:  # no text reaches its layers
        num_layers, depth = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), 0), 2
    if depth is not None:
        values |= {name: depth for name in LAYERS if fields.get(name) == num_layers}
        for name, value in values.items():
            # A string may have as many characters by chance, such as "silu" in four layers.
            is_per_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
            if is_per_layer and len(value) == num_layers:
                values[name] = value[:depth]
    return values


def _sized(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Some or all fields of `config`, with small sizes."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        size = SIZES.get(name) if name not in LENGTHS else None
        if isinstance(value, dict):
            value = _rope(value, config)
        elif name == "partial_rotary_factor":
            value = _even_share(value)
        elif isinstance(value, bool):
            pass
        elif name in KEY_VALUE_HEADS and isinstance(value, int):
            value = key_value_heads(value, config.get(name.replace("key_value", "attention")))
        elif isinstance(value, int) and size is not None:
            value = min(value, size)
        elif isinstance(value, list) and size is not None:
            value = [min(number, size) for number in value]
        elif names_a_token(name):
            value = _small_ids(value, 3 + 4 * sum(map(names_a_token, values)))
        values[name] = value
    if isinstance(values.get("mamba_d_head"), int):
        width = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
        values["mamba_d_head"] = width // values["mamba_n_heads"]
    return values


def _small_ids(value: Any, first: int) -> Any:
    """Ids within the small vocabulary: small ones stay, larger ones get distinct ids from `first` on."""
    if isinstance(value, list):
        return [_small_ids(number, first + i) for i, number in enumerate(value)]
    return first % FIRST_WORD if isinstance(value, int) and value >= FIRST_WORD else value


def _rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters for a small head, of all layers or per kind of layer; other fields are unchanged."""
    head = config.get("qk_rope_head_dim") or config.get("head_dim")
    if head is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        head = config["hidden_size"] // config["num_attention_heads"]
    values = {name: _rope(value, config) if isinstance(value, dict) else value for name, value in rope.items()}
    for name in ("short_factor", "long_factor"):
        if head and isinstance(rope.get(name), list):
            factors = rope[name]
            wanted = len(factors) * HEAD_DIM // head
            values[name] = [factors[i * len(factors) // wanted] for i in range(wanted)]
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = _even_share(rope["partial_rotary_factor"])
    if "mrope_section" in rope:
        values["mrope_section"] = mrope_section(values)
    return values


def _even_share(share: float | None) -> float | None:
    """The rotated share of a small head: an even number of its dimensions, at least two."""
    return share and max(2, 2 * round(share * HEAD_DIM / 2)) / HEAD_DIM


def _num_kinds(model: PreTrainedModel) -> int:
    """Number of first layers that include one of each kind, at least two."""
    num_layers = text_config(model).num_hidden_layers
    for module in backbone(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            layers = [_features(layer) for layer in module]
            offsets = defaultdict(set)  # a field that numbers the layers has one offset only
            for index, layer in enumerate(layers):
                for key, value in layer.items():
                    offsets[key].add(value - index if type(value) is int else None)
            counts = {key for key, of_field in offsets.items() if len(of_field) == 1 and of_field != {None}}
            kinds = [{key: value for key, value in layer.items() if key not in counts} for layer in layers]
            return max(min(2, num_layers), *(kinds.index(kind) + 1 for kind in kinds))
    return num_layers


def _features(layer: nn.Module) -> dict[tuple[str, str], Any]:
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
