"""Predict the memory that a GPU needs at the peak of a training step, before any weight is loaded.

`trl-packfix plan --memory` (`cli/memory.py`) calls this module with the config of a model. `count_model` counts the
sizes of the model. `predict_peak` computes from them the memory for a micro-batch of a number of tokens, and
`largest_tokens` finds the largest micro-batch that fits.

    counted    The parameters, and the bytes that autograd saves for one token in the forward pass of each layer. They
               are counted on the model at its real size, made of fake tensors, which have shapes but no memory. So no
               architecture needs a rule of its own.
    modelled   What the engine divides between GPUs, gathers and buffers; the loss; the temporary tensors of the
               backward pass; the work space of flash attention.
    ignored    The CUDA context, the communicators (an estimated 0.1 to 0.4 GB each), and fragmentation.

`tests/data/test_model_memory.py` compares the prediction with the count of `torch.distributed._tools.mem_tracker`.

Words:
    engine         how GPUs share the states of the model: DDP (each GPU has all), ZeRO-2 or ZeRO-3.
    casts          copies of fp32 weights in bfloat16, which autocast makes in the forward pass.
    checkpointing  a layer saves only its input for the backward pass, and computes its activations again there.
    head           the last layer, which computes the logits of the vocabulary, and the loss.
"""

import copy
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..compat import not_logged
from ..planning.costs import HeadCounts, decoder_costs_of
from .model_costs import build_on_meta, experts_of, model_class_of

GIB = 2**30
# Number of tokens in the forward pass that is counted. It is a prime, so the size of a tensor is a multiple of it only
# if the tensor grows with the number of tokens
NUM_COUNTED_TOKENS = 509
LORA = LoraConfig(r=16, target_modules="all-linear")  # as in examples/configs/lora.yaml
# Tokens, and entries of the vocabulary, of the bfloat16 logits that TRL's fused loss has in memory at once
LOSS_TILE = (4096, 32768)
# Number of gathered weights that ZeRO-3 does not release between forward and backward, because they are used again
# within stage3_max_reuse_distance = 1e9 weights. From a layer to the end of the forward pass, and back to the layer in
# the backward pass, the weights behind it are counted twice. So at most half as many weights are behind it
NUM_REUSED_VALUES = 500_000_000
SUB_GROUP_SIZE = 1_000_000_000  # number of weights that ZeRO-3 updates at once
# Size of the gradients in the backward pass of a layer, as a share of what the layer saves. It is fitted to counts
TEMPORARY_SHARE = 0.35
ROWS_PER_DOCUMENT = 128  # rows that FlashAttention-2 adds for each document to the fp32 sum of gradients of queries
RESERVED = 1.0 * GIB  # estimated bytes that the CUDA context takes, and that the allocator cannot use
# The time of a step with gradient checkpointing over the time without. Measured for Llama-3-8B with LoRA on 8,192
# tokens: 1.36 on an H100 and 1.38 on an H200
CHECKPOINTING_FACTOR = 1.4
SAVED_ATTENTION = "packfix_saved"  # name of the attention that only saves tensors

Engine = Literal["DDP", "ZeRO-2", "ZeRO-3"]


@dataclass(frozen=True)
class TrainingMethod:
    """What is trained, and by which engine.

    Under DDP, full training has fp32 weights and autocast, and LoRA has a base model in bfloat16.
    """

    lora: bool  # whether adapters are trained; otherwise all weights are
    engine: Engine

    @property
    def name(self) -> str:
        """Name of the method in tables."""
        return f"{'LoRA' if self.lora else 'full'}, {self.engine}"


METHODS = tuple(TrainingMethod(lora, engine) for lora in (False, True) for engine in get_args(Engine))


@dataclass(frozen=True)
class SavedActivations:
    """What autograd saves in a forward pass."""

    layers: tuple[float, ...]  # bytes per token inside each layer that checkpointing computes again
    inputs: tuple[float, ...]  # bytes per token of the input of each of these layers
    outside: float  # bytes per token outside of these layers
    casts: float = 0.0  # bytes of the casts of all layers
    is_cached: bool = False  # whether autocast keeps all casts until the forward pass ends, also with checkpointing
    # Whether `casts` is computed from the number of parameters, which the command line reports. With experts it cannot
    # be counted, because experts run on fake tensors only without autocast
    is_modelled: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, and what it saves for the backward pass."""

    parameters: int  # number of parameters of the base model
    trained: int  # number of trained parameters: all of them, or the parameters of the adapters
    largest: int  # number of parameters of the largest layer
    hidden: int  # size of a hidden state
    vocab: int  # size of the vocabulary
    attention: tuple[HeadCounts, ...]  # attention heads, one entry for all layers with the same heads
    saved: SavedActivations


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on one GPU at the peak of a step, by what they hold.

    The loss, the backward pass of a layer and the step of the optimizer follow each other, so the peak is in one of
    them.
    """

    weights: float  # all weights, or the part of this rank
    gathered: float  # weights that ZeRO-3 gathers, or copies in bfloat16 under autocast without checkpointing
    gradients: float  # gradients, and the buckets in which they are exchanged
    optimizer: float  # states of AdamW; under DeepSpeed also the fp32 weights
    activations: float  # saved for the backward pass
    head: float  # logits and loss; with checkpointing also the casts, which autocast frees after the forward pass
    layer: float  # temporary tensors in the backward pass of one layer; with checkpointing also its activations
    attention: float  # work space of flash attention in the backward pass of one layer
    step: float  # copies of gradients in the step of the optimizer

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        model_states = self.weights + self.gathered + self.gradients + self.optimizer
        backward = self.activations + max(self.head, self.layer + self.attention)
        return model_states + max(backward, self.step)


def count_model(config: PreTrainedConfig, method: TrainingMethod, lora: LoraConfig = LORA) -> ModelSizes:
    """Count the sizes of a causal language model.

    Args:
        config: the config of the model.
        method: what is trained, and by which engine.
        lora: the adapters, if the method trains adapters.

    Raises:
        ValueError: transformers has no language model for the config, or its forward cannot run on fake tensors.
    """
    text_class, config_part = model_class_of(config)
    if text_class is None:
        raise ValueError(
            f"The memory of a {type(config).__name__} was asked for. transformers has no language model for this "
            "config, so nothing can be counted. Give another `--model`, or leave out `--memory`."
        )
    text = config_part.get_text_config()

    # First build the model on the meta device, with the dtype and the attention that it has in training. DeepSpeed
    # trains in bfloat16, without autocast. A model with experts is also counted so, because the products of experts run
    # on fake tensors only in bfloat16. The casts that it has under DDP are added at the end
    has_experts = experts_of(text)[0] > 0
    autocast = method.engine == "DDP" and not has_experts
    AttentionInterface.register(SAVED_ATTENTION, _saved_attention)
    dtype = torch.float32 if autocast and not method.lora else torch.bfloat16
    model = build_on_meta(text_class, config_part).train()
    model.to(dtype)
    model.set_attn_implementation(SAVED_ATTENTION)
    group_experts(model)

    # Then count its parameters
    parameters = model.num_parameters()
    # The head of an image model may be outside of its text part, which is counted here
    if model.get_output_embeddings() is None and not text.tie_word_embeddings:
        parameters += text.hidden_size * text.vocab_size
    trained = parameters
    layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in _checkpointed_layers(model)]
    largest = max(layer_sizes, default=0)
    if method.lora:
        is_text_part = config_part is not config
        if is_text_part and isinstance(lora.target_modules, str):
            # The pattern fits names of modules of the image model, not of its text part
            lora = replace(lora, target_modules=LORA.target_modules)
        add_adapters(model, lora, autocast=autocast)
        trained = model.num_parameters(only_trainable=True)

    # Finally run a forward pass on fake tensors, and count what autograd saves
    save_dropout_masks(model)
    try:
        saved = count_saved_bytes(model, autocast)
    except Exception as error:  # any error of the model's own code, such as a choice by values
        raise ValueError(
            f"The memory of {text_class.__name__} was asked for. Its forward cannot run on fake tensors "
            f"({type(error).__name__}: {error}), so what it saves for backward cannot be counted. Leave out `--memory`."
        ) from error
    if method.engine == "DDP" and has_experts and not method.lora:
        # Training has autocast, which casts all weights, but the forward pass was counted without autocast
        saved = replace(saved, casts=2 * parameters, is_cached=True, is_modelled=True)
    heads = decoder_costs_of(text, per_token=0.0).attention  # of the cost model, only the heads are needed
    return ModelSizes(parameters, trained, largest, text.hidden_size, text.vocab_size, heads, saved)


def add_adapters(model: Any, lora: LoraConfig, *, autocast: bool) -> None:
    """Add adapters to a model, as in training, where their inputs are not cast (`training/lora_inputs.py`)."""
    get_peft_model(model, copy.copy(lora), autocast_adapter_dtype=autocast)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False  # type: ignore[attr-defined]  # an attribute of each subclass
    model.enable_input_require_grads()


def save_dropout_masks(model: nn.Module) -> None:
    """Let dropout save its mask, one byte for each number, as on CUDA. On a CPU it would save a float for each."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x, rate=module.p: torch.native_dropout(x, rate, True)[0]  # type: ignore[method-assign, misc]


def group_experts(model: nn.Module) -> None:
    """Replace the forward of modules that loop over experts by one that computes all experts as grouped products.

    Such a module, as in the model Step-3.7, asks to which experts the tokens are sent. Fake tensors have no values to
    answer this.
    """
    for module in model.modules():
        # transformers sets `has_gate` on the modules of experts that it can compute without a loop
        loops_over_experts = (
            hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") and not hasattr(module, "has_gate")
        )
        if loops_over_experts:
            # Imported here, because only later releases of transformers have this name
            from transformers.integrations.moe import grouped_mm_experts_forward

            module.__dict__ |= {
                "has_gate": True,
                "has_bias": False,
                "has_post_expert_norm": False,
                "is_transposed": False,
                "_is_expert_parallel": False,
            }
            module.forward = partial(grouped_mm_experts_forward, module)


class _SavedByFlashAttention(torch.autograd.Function):
    """Saves what flash attention saves, and computes nothing.

    Flash attention saves its inputs, its output, and for each row and head the log-sum-exp of the logits in fp32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return gradients without values, of the shapes of queries, keys and values."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _saved_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """Save tensors as flash attention does, in the form of an attention function of transformers.

    Args:
        module: the attention module. It is not needed.
        query, key, value: shape (1, heads, T, head dimension).
        mask: the mask. It is not needed.

    Returns:
        An output without values, shape (1, T, heads, head dimension), and no attention weights.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    attend: Any = _SavedByFlashAttention.apply
    return attend(query, key, value).transpose(1, 2), None


def _checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that checkpointing computes again. A module inside another one is not among them."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside_layer = any(name.startswith(f"{layer_name}.") for layer_name in layers)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside_layer:
            layers[name] = module
    return list(layers.values())


def count_saved_bytes(model: PreTrainedModel, autocast: bool) -> SavedActivations:
    """Run a forward pass without the LM head, and count the bytes that autograd saves for the backward pass.

    Args:
        model: a model on the meta device. Its weights become fake tensors.
        autocast: whether the forward pass runs under autocast.
    """
    fake_mode = FakeTensorMode()
    with fake_mode:
        make_fake(model)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    # Storages that were counted, by address. They are kept alive, so that no new storage gets the same address
    counted: dict[int, Any] = {}
    totals = {"tokens": 0, "casts": 0}
    totals_before: list[int] = []  # before each layer
    layer_bytes: list[int] = []
    input_bytes: list[int] = []

    def count_tensor(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted and storage._cdata not in weights:
            counted[storage._cdata] = storage
            # The size of a cast does not grow with the number of tokens, see `NUM_COUNTED_TOKENS`
            kind = "casts" if storage.nbytes() % NUM_COUNTED_TOKENS else "tokens"
            totals[kind] += storage.nbytes()
        return tensor

    def begin_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        input_bytes.append(states.numel() * states.element_size())
        totals_before.append(totals["tokens"])

    def end_layer(module: nn.Module, args: tuple[Any, ...], out: object) -> None:
        layer_bytes.append(totals["tokens"] - totals_before[-1])

    for layer in _checkpointed_layers(model):
        layer.register_forward_pre_hook(begin_layer, with_kwargs=True)
        layer.register_forward_hook(end_layer)
    errors_of_torch = logging.getLogger("torch._subclasses.fake_tensor")  # torch logs an error that it also raises
    autocast_mode = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    saved_tensors = torch.autograd.graph.saved_tensors_hooks(count_tensor, lambda x: x)
    with not_logged(errors_of_torch), fake_mode, autocast_mode, saved_tensors:
        model.base_model(input_ids=torch.zeros(1, NUM_COUNTED_TOKENS, dtype=torch.long), use_cache=False)
    outside_bytes = totals["tokens"] - sum(layer_bytes)
    return SavedActivations(
        layers=tuple(size / NUM_COUNTED_TOKENS for size in layer_bytes),
        inputs=tuple(size / NUM_COUNTED_TOKENS for size in input_bytes),
        outside=outside_bytes / NUM_COUNTED_TOKENS,
        casts=totals["casts"],
        is_cached=autocast,
    )


def make_fake(model: nn.Module) -> None:
    """Replace the weights and buffers of a model by CPU tensors, which have no memory under `FakeTensorMode`.

    Tensors on the meta device have no memory, either, but autocast does not know this device.
    """
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor not in copies:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                copies[tensor] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
            setattr(module, name, copies[tensor])


def predict_peak(
    sizes: ModelSizes,
    method: TrainingMethod,
    *,
    tokens: int,
    gpus: int,
    checkpointing: bool,
    fused_loss: bool = True,
    documents: int = 1,
    copied_keys: float = 0.0,
    offload: bool = False,
) -> PeakMemory:
    """Predict the memory at the peak of a training step on one GPU.

    Args:
        sizes: the sizes of the model, counted for this method.
        method: what is trained, and by which engine.
        tokens: number of tokens of a micro-batch.
        gpus: number of GPUs among which the engine divides the states of the model.
        checkpointing: whether layers compute their activations again in the backward pass.
        fused_loss: whether TRL's loss in tiles is used, which never has all logits in memory.
        documents: number of documents of a micro-batch.
        copied_keys: bytes of the keys that attention copies for shared prefixes, with their gradients.
        offload: whether checkpointing saves the inputs of layers on the host. The GPU then has the input of one layer.
    """
    saved = sizes.saved
    input_bytes = max(saved.inputs, default=0.0) if offload else sum(saved.inputs)
    saved_by_layers = input_bytes if checkpointing else sum(saved.layers)
    # With checkpointing, the casts of a layer are in memory only while the layer is computed. Otherwise the casts of
    # all layers stay in memory during the step, as `gathered` weights. Casts do not grow with the number of tokens
    lasting_casts = 0.0 if checkpointing else saved.casts
    temporary_casts = saved.casts - lasting_casts
    casts_of_layer = temporary_casts / max(len(saved.layers), 1)
    largest_layer = max(saved.layers, default=0.0) * tokens
    # With checkpointing, the activations of the layer are there a second time, computed again
    share_of_layer = 1 + TEMPORARY_SHARE if checkpointing else TEMPORARY_SHARE
    layer = share_of_layer * largest_layer + casts_of_layer
    # Flash attention sums the gradients of queries in fp32. If several query heads share a head of keys and values, it
    # computes the gradients of keys and values for each query head
    rows = tokens + ROWS_PER_DOCUMENT * documents
    attention_bytes = []
    for heads in sizes.attention:
        query_gradients = 4.0 * rows * heads.heads * heads.key_dim
        key_value_gradients = 2.0 * tokens * heads.heads * (heads.key_dim + heads.value_dim)
        shares_heads = heads.kv_heads < heads.heads
        attention_bytes.append(query_gradients + key_value_gradients if shares_heads else query_gradients)
    return PeakMemory(
        **_model_state_bytes(sizes, method, gpus, casts=lasting_casts),
        activations=(saved.outside + saved_by_layers) * tokens,
        # The head is the end of the forward pass, at which autocast still has the temporary casts of all layers
        head=_head_bytes(sizes, method, tokens, fused=fused_loss) + (temporary_casts if saved.is_cached else 0),
        layer=layer,
        attention=max(attention_bytes, default=0.0) + copied_keys,
    )


def describe_unneeded_checkpointing(peak: float, memory: float, prefix: str = "") -> str:
    """Return a text that says that a run fits without gradient checkpointing; "" if the run does not fit.

    Args:
        peak: bytes at the peak of a step without checkpointing.
        memory: bytes of the GPU.
        prefix: the words in front of "fits without gradient checkpointing".
    """
    if peak > memory - RESERVED:
        return ""
    sizes = f"{peak / GIB:.0f} of {memory / GIB:.0f} GiB"
    return f"{prefix}fits without gradient checkpointing ({sizes}): about {CHECKPOINTING_FACTOR:g} times faster"


def _model_state_bytes(sizes: ModelSizes, method: TrainingMethod, gpus: int, *, casts: float) -> dict[str, float]:
    """Return the bytes of the states of the model on one GPU, by the fields of `PeakMemory`.

    A number has 4 bytes in fp32 and 2 in bfloat16. AdamW has two fp32 states for each trained parameter. DeepSpeed also
    has an fp32 copy of each trained weight.

    Args:
        sizes: the sizes of the model.
        method: what is trained, and by which engine.
        gpus: number of GPUs.
        casts: bytes of the casts that are in memory during the whole step.
    """
    parameters = sizes.parameters
    trained = sizes.trained
    adapters = trained if method.lora else 0
    if method.engine == "DDP":
        weights = 2 * parameters + 4 * adapters if method.lora else 4 * parameters
        gradients = 4 * trained * (2 if gpus > 1 else 1)  # several GPUs exchange them in buckets of the same size
        return {"weights": weights, "gathered": casts, "gradients": gradients, "optimizer": 8 * trained, "step": 0}
    # DeepSpeed sums gradients in fp32. It has two buckets of `reduce_bucket_size` = hidden ** 2 numbers, with 2 bytes
    # for each number
    buckets = 2 * min(2 * sizes.hidden**2, trained)
    divided_states = {"gradients": 4 * trained / gpus + buckets, "optimizer": 12 * trained / gpus}
    weights = 2 * (parameters + adapters)  # all in bfloat16, adapters too
    if method.engine == "ZeRO-2":
        return divided_states | {"weights": weights, "gathered": 0, "step": 0}
    # ZeRO-3 has gathered the head, and those layers that are used again soon, or at least two layers
    head = sizes.hidden * sizes.vocab
    gathered_in_layers = min(parameters - head, max(NUM_REUSED_VALUES, 2 * sizes.largest))
    num_gathered = head + gathered_in_layers if gpus > 1 else 0
    step = 4 * min(trained / gpus, SUB_GROUP_SIZE)
    return divided_states | {"weights": weights / gpus, "gathered": 2 * num_gathered, "step": step}


def _head_bytes(sizes: ModelSizes, method: TrainingMethod, tokens: int, *, fused: bool) -> float:
    """Return the bytes that the head and the loss need at their peak, in the backward pass of the loss."""
    # The gradient of the weight is summed in fp32. Under DeepSpeed it is also there in bfloat16
    bytes_per_weight = 4 if method.engine == "DDP" else 6
    weight_gradient = 0 if method.lora else bytes_per_weight * sizes.hidden * sizes.vocab
    if fused:
        # One tile of logits, and for all tokens the gradients of the hidden states, in fp32 and in their own dtype
        tile = 2 * min(tokens, LOSS_TILE[0]) * LOSS_TILE[1]
        return weight_gradient + tile + 8 * tokens * sizes.hidden
    # First the log-probabilities and two gradients in fp32. Then the gradient of the logits in half precision, and the
    # gradient of the weight
    loss_backward = 12 * tokens * sizes.vocab
    head_backward = 2 * tokens * sizes.vocab + weight_gradient
    return max(loss_backward, head_backward)


def largest_tokens(predict: Callable[..., PeakMemory], memory: float, max_tokens: int) -> int:
    """Return the largest number of tokens of a micro-batch that fits into the memory of a GPU.

    Args:
        predict: returns the memory for a number of `tokens`.
        memory: bytes of the GPU.
        max_tokens: the largest number of tokens to consider.

    Returns:
        A number of tokens, or 0 if no micro-batch fits.
    """
    # The memory grows with the number of tokens, so the numbers that fit come first
    return bisect_right(range(1, max_tokens + 1), memory, key=lambda tokens: predict(tokens=tokens).total)
