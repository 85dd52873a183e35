"""Make the cost model of a language model: how many FLOPs a document of a given length costs.

Planning balances the ranks by these costs (`planning/costs.py`). `make_cost_model` reads them from the config of the
model, before its weights are loaded:

    cost per token   two FLOPs for each parameter that is applied to a token. The parameters are counted on the model
                     itself, which is built at its real size on torch's meta device, in a second and without memory.
                     So no architecture needs a rule of its own.
    cost per pair    attention computes products of pairs of tokens. Their number of FLOPs follows from the heads in the
                     config.
    scans            a recurrent layer carries a state from token to token, in a *scan*. What it computes with the state
                     is no product with parameters, so it is counted by the sizes of the modules.
    cost per value   with images, what the vision tower computes for each value (a color of a pixel): two FLOPs for each
                     parameter and patch, divided by the values of a patch (`with_tower`).
"""

import copy
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

from ..planning.costs import LLAMA_7B, CostModel, ScanCosts, TowerCosts, decoder_costs_of, tower_costs_of

if TYPE_CHECKING:
    from peft import LoraConfig

DELTA_CHUNK = 64  # number of tokens of a chunk in the kernels of flash-linear-attention

logger = logging.getLogger(__name__)

# Names of config fields: first the names that most models share, then the names of DBRX, Gemma 4 and Aria
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts", "moe_topk")


def make_cost_model(config: Any, model_class: type[PreTrainedModel] | None = None) -> CostModel:
    """Return the cost model of a causal language model, for text.

    If no model can be built, the costs are the costs of a Llama model with 7B parameters.

    Args:
        config: the config of the model.
        model_class: class to build if transformers has no model for the config, as with remote code.
    """
    text_class, config_part = model_class_of(config, model_class)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    if text_class is None or not hasattr(text, "num_hidden_layers"):  # nothing to build, or no stack of layers to count
        return LLAMA_7B
    try:
        model = build_on_meta(text_class, config_part)
        scans = (_scan_of_layer(module) for _, module in model.named_modules(remove_duplicate=False))
        # Layers with equal scans become one entry with their number; layers that share one module count separately
        layers_by_scan = Counter(scan for scan in scans if scan is not None)
        different_scans = tuple(scan._replace(layers=number) for scan, number in layers_by_scan.items())
        return decoder_costs_of(text, per_token=2.0 * active_parameters(model), scans=different_scans)
    except Exception as error:  # the code of the model may raise any error; costs only affect the balance of ranks
        logger.warning(
            f"{text_class.__name__} could not be built from its config alone ({type(error).__name__}: {error}), so "
            "the costs of a Llama with 7B parameters are used. Packs may be balanced worse between ranks."
        )
        return LLAMA_7B


def model_class_of(config: Any, model_class: type[PreTrainedModel] | None = None) -> tuple[Any, Any]:
    """Find the class of the language model that a config describes.

    Args:
        config: the config of a model.
        model_class: the class to return if transformers has none.

    Returns:
        The class, or None if there is none; and the config from which it is built, which is `config` or its text part.
    """
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    mappings: tuple[tuple[Any, Any], ...] = (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
        (text, MODEL_MAPPING),  # the text parts of image models, whose LM head is outside of them
        (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    )
    for config_part, mapping in mappings:
        if type(config_part) in mapping:
            return mapping[type(config_part)], config_part
    return model_class, config


def with_tower(
    costs: CostModel,
    config: Any,
    model_class: type[PreTrainedModel] | None = None,
    *,
    is_trained: bool = True,
    lora: "LoraConfig | None" = None,
) -> CostModel:
    """Add the costs of images in the vision tower to a cost model.

    The projector behind the tower is not counted, unless it is a module of the tower.

    Args:
        costs: the costs of the language model.
        config: the config of the whole model.
        model_class: class of the whole model; by default, the class that transformers has for the config.
        is_trained: whether the tower has a trained weight. Otherwise it has no backward pass, which costs twice as
                much as the forward pass, so it costs a third.
        lora: the adapters, if only they are trained. Then the tower is trained if it gets any.

    Returns:
        The cost model with the costs of the tower; `costs` if the model has no tower or it cannot be counted.
    """
    image_model_class: Any = model_class or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if image_model_class is None or getattr(config, "vision_config", None) is None:
        return costs
    try:
        model = build_on_meta(image_model_class, config)
        tower = vision_tower(model)
        if tower is None:
            return costs
        # A parameter is applied to each patch. A merger joins squares of patches, and its parameters are applied to
        # each square. Embeddings are looked up, so they cost nothing
        patches_per_square = (getattr(tower.config, "spatial_merge_size", None) or 1) ** 2
        parameters_per_patch = 0.0
        for name, module in tower.named_modules():
            if not isinstance(module, nn.Embedding):
                size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
                parameters_per_patch += size / patches_per_square if "merger" in name else size
        tower_costs = tower_costs_of(tower.config, 2 * parameters_per_patch)
        if lora is not None:
            from peft import get_peft_model

            get_peft_model(model, lora, low_cpu_mem_usage=True)  # on the meta device, too
            is_trained = any(parameter.requires_grad for parameter in tower.parameters())
        if not is_trained:
            tower_costs = TowerCosts(per_value=tower_costs.per_value / 3, per_pair=tower_costs.per_pair / 3)
        return replace(costs, tower=tower_costs)
    except Exception as error:  # the code of the model may raise any error, or the config has other names
        logger.warning(
            f"The costs of the vision tower of {image_model_class.__name__} cannot be counted ({type(error).__name__}: "
            f"{error}). Ranks are balanced by the language model alone."
        )
        return costs


def vision_tower(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the first module whose config has the class of `config.vision_config`; None if there is none."""
    config_class = type(getattr(model.config, "vision_config", None))
    towers = (
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and type(module.config) is config_class
    )
    return next(towers, None)


def build_on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, at its real size and without memory.

    One rank can do this without the other ranks. Under ZeRO-3 transformers would otherwise divide the submodels that
    have their own configs between the ranks, and wait for the other ranks.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # needs no other package, and the parameters are the same
    # `set_zero3_state` says that the weights are divided already, so transformers does not divide them
    with torch.random.fork_rng(devices=[]), torch.device("meta"), set_zero3_state():
        return model_class(config)


def active_parameters(model: PreTrainedModel) -> float:
    """Count the parameters that are applied to one token of text.

    - If several layers share a module, its parameters count once for each layer.
    - Embeddings do not count, because they are looked up.
    - Experts count by the share of the experts that a token is sent to.
    - A submodel with its own config (a tower for images or sound) does not count.
    - If the model has no LM head, the parameters of a head are added.
    """
    text = model.config.get_text_config()
    num_experts, expert_share = experts_of(text)
    total = 0.0 if model.get_output_embeddings() is not None else float(text.hidden_size * text.vocab_size)
    shares = {"": 1.0}  # share of the parameters of each module that is applied to a token, by the name of the module
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, child = name.rpartition(".")
        shares[name] = shares[parent] * (expert_share if child == "experts" else 1.0)
        if isinstance(module, PreTrainedModel) and type(module.config) not in (type(model.config), type(text)):
            shares[name] = 0.0
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            # Some modules hold all experts in one parameter, whose first axis numbers the experts. It gets the share of
            # experts, unless the module has this share already, by its name
            has_axis_of_experts = parameter.ndim == 3 and len(parameter) == num_experts
            share = expert_share if has_axis_of_experts and shares[name] == 1 else shares[name]
            total += parameter.numel() * share
    return total


def _scan_of_layer(module: nn.Module) -> ScanCosts | None:
    """Return the costs of the scan of a recurrent layer.

    A scan carries a state from token to token, which decays (`A_log`). The costs are the costs of fast kernels, which
    compute it in chunks of tokens. The code of transformers in torch costs more, because it repeats the keys of Mamba-2
    for each head. `per_token` and `per_pair` are FLOPs: two for each multiplication with an addition. A pair is two
    tokens of one chunk. `exchanged_per_head` and `exchanged_per_kv_head` count the numbers that ranks send each other
    for a token, with sequence parallelism (`ScanCosts`).

    Returns:
        The costs, or None if the module is not a recurrent layer of a known kind.
    """
    decays = getattr(module, "A_log", None)
    if not isinstance(decays, nn.Parameter):
        return None
    names = "num_v_heads num_heads num_k_heads head_k_dim head_v_dim head_dim ssm_state_size n_groups chunk_size"
    sizes: list[Any] = [getattr(module, name, None) for name in names.split()]
    value_heads, heads, key_heads, key_dim, value_dim, head_dim, state_dim, groups, chunk = sizes  # None if not there
    is_mamba2 = state_dim is not None and heads and groups and chunk and head_dim
    if is_mamba2:  # each head has a state of `head_dim` by `state_dim` numbers
        return ScanCosts(
            layers=1,
            heads=heads,
            kv_heads=groups,
            per_token=4.0 * heads * head_dim * state_dim,  # the token is written to the state, and read from it
            chunk=chunk,
            # Two products: queries with keys (C with B), once for all heads of a group, and their scores with the
            # inputs of each head
            per_pair=2.0 * (groups * state_dim + heads * head_dim),
            exchanged_per_head=2 * head_dim + 1,  # an input, an output and a time step
            exchanged_per_kv_head=2 * state_dim,  # a key and a query (B and C)
        )
    is_mamba1 = state_dim is not None and decays.ndim > 1
    if is_mamba1:  # each channel has a state of `state_dim` numbers
        channels = decays.numel() // state_dim
        return ScanCosts(
            layers=1,
            heads=channels,
            kv_heads=1,
            # The token is written to the state, and read from it. The product of the state and the decays is not in
            # here: `active_parameters` counts two operations for each parameter, and so for each decay in `A_log`
            per_token=4.0 * channels * state_dim,
            chunk=1,
            per_pair=0.0,
            exchanged_per_head=3,  # an input, an output and a time step
            exchanged_per_kv_head=2 * state_dim,
        )
    # Linear attention with a delta rule: Gated DeltaNet, or Kimi Delta Attention (KDA)
    heads = value_heads or heads
    key_dim = key_dim or head_dim
    value_dim = value_dim or head_dim
    if not (heads and key_dim and value_dim):
        return None
    # KDA has a decay for each row of the state, (key_dim, value_dim), and Gated DeltaNet one for the whole state
    num_decays = 1 if value_heads else key_dim
    return ScanCosts(
        layers=1,
        heads=heads,
        kv_heads=key_heads or heads,
        per_token=6.0 * heads * key_dim * value_dim,  # three products of a token with the state
        chunk=DELTA_CHUNK,
        # The delta rule solves a system of equations in each chunk. Of the five products, three multiply `key_dim`
        # numbers for each pair: keys with keys (the system), its inverse with keys, and queries with keys. Two multiply
        # `value_dim` numbers: the inverse with values, and the scores of queries and keys with the solved values
        per_pair=heads * (6.0 * key_dim + 4.0 * value_dim),
        # A value, an output, the rate of the delta rule, and the decays, which count twice because they are in fp32
        exchanged_per_head=2 * value_dim + 1 + 2 * num_decays,
        exchanged_per_kv_head=2 * key_dim,  # a key and a query
    )


def experts_of(config: PreTrainedConfig) -> tuple[float, float]:
    """Return the number of experts of a layer, and the share of them that a token is sent to.

    A model without experts has (0, 1).
    """
    num_experts = _read_setting(config, _EXPERTS)
    num_active = _read_setting(config, _EXPERTS_PER_TOKEN)
    if not num_experts or not num_active:
        return 0.0, 1.0
    num_without_parameters = getattr(config, "zero_expert_num", None) or 0  # LongCat also sends tokens to these
    return num_experts, num_active / (num_experts + num_without_parameters)


def _read_setting(config: PreTrainedConfig, names: tuple[str, ...]) -> float:
    """Return the value of the first of some fields that is set in a config or in a config inside it; 0 if none is.

    If the field has a value for each layer, the mean is returned.
    """
    inner_configs = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    for config_part in [config, *inner_configs]:
        for name in names:
            value = getattr(config_part, name, None)
            if value:
                return sum(value) / len(value) if isinstance(value, list | tuple) else value
    return 0.0
