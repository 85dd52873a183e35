"""Find the parts of a transformers model: the model inside PEFT's wrapper, its backbone, the config of its text."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside PEFT's wrapper, or the model itself.

    Raises:
        ValueError: it is not a transformers model.
    """
    inner: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    model = model if inner is None else inner()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"packing got a {type(model).__name__}: attention is set through transformers' interface, which only a "
            "PreTrainedModel has. Pass a PreTrainedModel, with or without PEFT, before DDP, FSDP or DeepSpeed wrap it."
        )
    return model


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM below its head, or the model itself if that part cannot be found."""
    # Look for the decoder first: bart-like causal LMs do not call their base model, but the decoder inside of it.
    decoder = model.get_decoder()
    # Models without a decoder return None or themselves here. modernbert-decoder returns its LM head, because the head
    # is the attribute `decoder`.
    is_not_backbone = decoder in (None, model, model.get_output_embeddings())
    module = model.base_model if is_not_backbone else decoder
    # llama4's models set no `base_model`, so `module` still has the head. The backbone is the transformers model
    # inside.
    if isinstance(module, PreTrainedModel) and getattr(module, "lm_head", None) is not None:
        inner_models = [child for child in module.children() if isinstance(child, PreTrainedModel)]
        return inner_models[0] if len(inner_models) == 1 else module
    return module


def below_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that may compute the last hidden states: the base model, the backbone, or both.

    Some models, such as bart, call the backbone directly, and TRL's loss calls the base model. If there are two, one
    is inside of the other. A model without a head gives [].
    """
    return [module for module in dict.fromkeys((model.base_model, backbone(model))) if module is not model]


def has_attention(model: nn.Module) -> bool:
    """Return whether a module of the model is attention, by the name of its class. Pure Mamba models have none."""
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the part that reads packs: the text decoder of a multimodal model, else the whole model."""
    return model.config.get_text_config(decoder=True)


def find_towers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model that read something else than text, such as images.

    They are the transformers models inside of it whose config is not the config of the text. A part that contains the
    text backbone is no tower.
    """
    text = text_config(model)
    decoder = backbone(model)
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module.config is not text and decoder not in module.modules()
    ]


def layer_configs(config: PreTrainedConfig) -> Any:
    """Return the configs that describe the layers: one per layer if layers override fields, else the config itself.

    Layers of Gemma 4 and Step-3.5 override fields. transformers then raises an error if such a field is read from the
    whole config.
    """
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def head_counts(config: PreTrainedConfig) -> list[int]:
    """Return the number of query heads of each layer, or one number for all layers; [] if the config has none."""
    counts = [getattr(layer, "num_attention_heads", None) for layer in layer_configs(config)]
    return [count for count in counts if isinstance(count, int) and count > 0]
