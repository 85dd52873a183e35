"""The cost model of a model config: cost per token from the model's parameters, cost per pair from the config.

A token costs two operations per parameter that is applied to it. The parameters are counted on the model itself, which
torch's meta device builds at its real size within a second and without memory. So no architecture needs its own rule.
The scans of recurrent layers have none; they are read from the modules.
A patch costs the same in the vision tower, by the parameters of the tower.
"""

import copy
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import set_zero3_state

from ..planning.costs import LLAMA_7B, CostModel, ScanCosts, TowerCosts, tower_costs_of, with_pairs_of, with_scans

DELTA_CHUNK = 64  # tokens of a chunk in flash-linear-attention's kernels

logger = logging.getLogger(__name__)

# Config fields that most models share, then those of DBRX, Gemma 4 and Aria
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts", "moe_topk")


def make_cost_model(config: Any, model_class: type[PreTrainedModel] | None = None) -> CostModel:
    """The cost model of a causal language model with this config, on text alone.

    `model_class` is built if transformers has no model for `config`, as with remote code. Without it such a config, and
    any other object, gets the costs of a Llama with 7B parameters.
    """
    text_class, config_part = model_class_of(config, model_class)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    if text_class is None or not hasattr(text, "num_hidden_layers"):
        return LLAMA_7B
    try:
        model = build_on_meta(text_class, config_part)
        scans = (_scan_of_layer(module) for _, module in model.named_modules(remove_duplicate=False))
        layers = Counter(scan for scan in scans if scan is not None)
        mixers = tuple(scan._replace(layers=number) for scan, number in layers.items())
        return with_scans(with_pairs_of(text, 2.0 * active_parameters(model)), mixers)
    except Exception as error:  # any error of the model's own code; costs only affect the balance of ranks
        logger.warning(
            f"{text_class.__name__} could not be built from its config alone ({type(error).__name__}: {error}), so "
            "the costs of a Llama with 7B parameters are used. Packs may be balanced worse between ranks."
        )
        return LLAMA_7B


def model_class_of(config: Any, model_class: type[PreTrainedModel] | None = None) -> tuple[Any, Any]:
    """The class of the language model in a config, or None, and the part of the config that builds it."""
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    known: tuple[tuple[Any, Any], ...] = (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
        (text, MODEL_MAPPING),  # the text parts of image models, whose LM head is outside of them
        (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (config, {type(config): model_class}),
    )
    return next(
        (mapping[type(config_part)], config_part) for config_part, mapping in known if type(config_part) in mapping
    )


def with_tower(
    costs: CostModel, config: Any, model_class: type[PreTrainedModel] | None = None, *, is_trained: bool = True
) -> CostModel:
    """The same cost model, with the costs of images in the vision tower; without them if they cannot be counted.

    A tower without a trained weight counts a third: it has no backward pass. The projector behind it is not counted,
    unless it is a part of it.
    """
    whole_class: Any = model_class or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if whole_class is None or getattr(config, "vision_config", None) is None:
        return costs
    try:
        tower = vision_tower(build_on_meta(whole_class, config))
        if tower is None:
            return costs
        # Every parameter is applied to each patch, or to each square of patches behind a merger; embeddings to none.
        square = (getattr(tower.config, "spatial_merge_size", None) or 1) ** 2
        parameters = 0.0
        for name, module in tower.named_modules():
            if not isinstance(module, nn.Embedding):
                size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
                parameters += size / square if "merger" in name else size
        of_tower = tower_costs_of(tower.config, 2 * parameters)
        if not is_trained:
            of_tower = TowerCosts(of_tower.per_value / 3, of_tower.per_pair / 3)
        return replace(costs, tower=of_tower)
    except Exception as error:  # any error of the model's own code, or a config with other names
        logger.warning(
            f"The costs of the vision tower of {whole_class.__name__} cannot be counted ({type(error).__name__}: "
            f"{error}). Ranks are balanced by the language model alone."
        )
        return costs


def vision_tower(model: PreTrainedModel) -> PreTrainedModel | None:
    """The module whose config is `config.vision_config`; None without one."""
    kind = type(getattr(model.config, "vision_config", None))
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and type(part.config) is kind)
    return next(parts, None)


def build_on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device, at its real size, also on one rank alone.

    Under ZeRO-3 transformers divides the parts that a model builds from their configs between the ranks, and would wait
    for them.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # needs no other package, and the parameters are the same
    with torch.random.fork_rng(devices=[]), torch.device("meta"), set_zero3_state():
        return model_class(config)


def active_parameters(model: PreTrainedModel) -> float:
    """Parameters that are applied to one token of text.

    - The parameters of a module that several layers share count once per layer.
    - Embeddings do not count: they are looked up.
    - Experts count by the share of them that a token is sent to.
    - A submodel with its own config (a tower for images or sound) does not count.
    - For a model without an LM head, one is added.
    """
    text = model.config.get_text_config()
    num_experts, share = experts_of(text)
    total = 0.0 if model.get_output_embeddings() is not None else float(text.hidden_size * text.vocab_size)
    shares = {"": 1.0}  # module name -> share of its parameters that is applied to a token
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, child = name.rpartition(".")
        shares[name] = shares[parent] * (share if child == "experts" else 1.0)
        if isinstance(module, PreTrainedModel) and type(module.config) not in (type(model.config), type(text)):
            shares[name] = 0.0
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            are_experts = parameter.ndim == 3 and len(parameter) == num_experts and shares[name] == 1
            total += parameter.numel() * (share if are_experts else shares[name])
    return total


def _scan_of_layer(module: nn.Module) -> ScanCosts | None:
    """The scan of a recurrent layer, which has decays (`A_log`); None of a layer of another kind.

    Counted is what kernels compute, in chunks. transformers' code in torch repeats the keys of Mamba-2 for each head.
    """
    decays = getattr(module, "A_log", None)
    if not isinstance(decays, nn.Parameter):
        return None
    names = "num_v_heads num_heads num_k_heads head_k_dim head_v_dim head_dim ssm_state_size n_groups chunk_size"
    value_heads, heads, key_heads, key, value, size, state, groups, chunk = (
        getattr(module, name, None) for name in names.split()
    )
    if state is not None and heads and groups and chunk and size:  # Mamba-2: states of `size` by `state` per head
        per_pair = 2.0 * (groups * state + heads * size)
        per_token = 4.0 * heads * size * state
        return ScanCosts(1, heads, groups, per_token, chunk, per_pair, 2 * size + 1, 2 * state)
    if state is not None and decays.ndim > 1:  # Mamba-1: each channel has `state` numbers
        channels = decays.numel() // state
        # beside the two operations of its decays, which are parameters. Its kernels begin with no state
        return ScanCosts(1, channels, 1, 4.0 * channels * state, 1, 0.0, 3, 2 * state)
    heads = value_heads or heads
    key = key or size
    value = value or size
    if not (heads and key and value):
        return None
    decay = 1 if value_heads else key  # KDA has one for each row of a key
    per_pair = heads * (6.0 * key + 4.0 * value)
    per_token = 6.0 * heads * key * value
    per_head = 2 * value + 1 + 2 * decay  # decays are in fp32
    return ScanCosts(1, heads, key_heads or heads, per_token, DELTA_CHUNK, per_pair, per_head, 2 * key)


def experts_of(config: PreTrainedConfig) -> tuple[float, float]:
    """Number of experts of a layer, and the share of them that a token is sent to; (0, 1) without experts."""
    num_experts = _read_setting(config, _EXPERTS)
    active = _read_setting(config, _EXPERTS_PER_TOKEN)
    if not num_experts or not active:
        return 0.0, 1.0
    return num_experts, active / (num_experts + (getattr(config, "zero_expert_num", None) or 0))


def _read_setting(config: PreTrainedConfig, names: tuple[str, ...]) -> float:
    """The first of these fields that is set, in the config or a config inside it; the mean if it differs by layer."""
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        for name in names:
            value = getattr(part, name, None)
            if value:
                return sum(value) / len(value) if isinstance(value, list | tuple) else value
    return 0.0
