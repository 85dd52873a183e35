"""Parts of a transformers model: the model inside PEFT's wrapper, its backbone, the config of its text part."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    inner: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    model = model if inner is None else inner()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"packing got a {type(model).__name__}: attention is set through transformers' interface, which only a "
            "PreTrainedModel has. Pass a PreTrainedModel, with or without PEFT, before DDP, FSDP or DeepSpeed wrap it."
        )
    return model


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a causal LM below its head; the model itself if that part cannot be found."""
    decoder = model.get_decoder()  # bart-like causal LMs call the decoder inside their base model
    # The head of modernbert-decoder is named `decoder`.
    below = model.base_model if decoder in (None, model, model.get_output_embeddings()) else decoder
    if isinstance(below, PreTrainedModel) and getattr(below, "lm_head", None) is not None:
        # llama4's models set no `base_model`: it is the transformers model inside them
        inside = [child for child in below.children() if isinstance(child, PreTrainedModel)]
        return inside[0] if len(inside) == 1 else below
    return below


def below_head(model: PreTrainedModel) -> list[nn.Module]:
    """What a forward of the model calls for its last states: its base model, the backbone, or both, one in the other.

    Some models, as bart, call the backbone directly, and TRL's loss calls the base model. Empty for a model without a
    head.
    """
    return [module for module in dict.fromkeys((model.base_model, backbone(model))) if module is not model]


def has_attention(model: nn.Module) -> bool:
    """Whether a module of the model is attention, by its name. Pure Mamba models have none."""
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def text_config(model: PreTrainedModel) -> Any:
    """The config of the part that reads packs: of a multimodal model that of its text decoder, else the model's."""
    return model.config.get_text_config(decoder=True)


def towers(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of a model that read something else than its text, such as images."""
    text = text_config(model)
    decoder = backbone(model)
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module.config is not text and decoder not in module.modules()
    ]


def layer_configs(config: PreTrainedConfig) -> Any:
    """The config of each layer where layers override fields (Gemma 4, Step-3.5), else the config itself.

    Where they do, transformers raises for such a field of the whole config.
    """
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def head_counts(config: PreTrainedConfig) -> list[int]:
    """Query heads of each layer that says so, or of all."""
    counts = [getattr(layer, "num_attention_heads", None) for layer in layer_configs(config)]
    return [count for count in counts if isinstance(count, int) and count > 0]
