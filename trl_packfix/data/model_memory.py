"""Memory of one GPU at the peak of a training step, from a model's config and the tokens of a micro-batch.

    counted    parameters, and what autograd saves for one token in the forward of each layer: on the model at its real
               size, made of fake tensors, which have shapes and no memory. No architecture needs a rule of its own.
    modelled   what the engine divides, gathers and buffers; the loss; temporaries of the backward pass; the work space
               of flash attention.
    left out   the CUDA context, communicators (0.1 to 0.4 GB each, an estimate), fragmentation.

`tests/data/test_model_memory.py` compares it with what `torch.distributed._tools.mem_tracker` counts.
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
from ..planning.costs import HeadCounts, with_pairs_of
from .model_costs import build_on_meta, experts_of, model_class_of

GIB = 2**30
NUM_COUNTED_TOKENS = 509  # of the counted forward: a prime, so that it tells what grows with the tokens from weights
LORA = LoraConfig(r=16, target_modules="all-linear")  # as in examples/configs/lora.yaml
LOSS_TILE = 4096, 32768  # TRL's fused loss: tokens and words of the logits that are in memory at once, in bfloat16
NUM_REUSED_VALUES = 500_000_000  # numbers that ZeRO-3 keeps at the turn to backward: stage3_max_reuse_distance is 1e9
SUB_GROUP = 1_000_000_000  # numbers that ZeRO-3 updates at once: sub_group_size
TEMPORARY = 0.35  # of what a layer saves: gradients in its backward, fitted to counted memory
ROWS_PER_DOCUMENT = 128  # in fp32, of the sum of the gradients of the queries in FlashAttention-2
SAVED_ATTENTION = "packfix_saved"

Engine = Literal["DDP", "ZeRO-2", "ZeRO-3"]


@dataclass(frozen=True)
class TrainingMethod:
    """What is trained, and by what engine. Under DDP full training has fp32 weights and autocast, LoRA a bf16 base."""

    lora: bool
    engine: Engine

    @property
    def name(self) -> str:
        return f"{'LoRA' if self.lora else 'full'}, {self.engine}"


METHODS = tuple(TrainingMethod(lora, engine) for lora in (False, True) for engine in get_args(Engine))


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that autograd saves in a forward, per token."""

    layers: tuple[float, ...]  # within each layer that checkpointing computes again
    inputs: tuple[float, ...]  # of these layers
    others: float  # outside of them
    casts: float = 0.0  # copies of weights; bytes, not per token
    is_cached: bool = False  # autocast keeps the copies until the forward ends, also with checkpointing
    is_modelled: bool = False  # counted without autocast, with which experts cannot run on fake tensors


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of a model, and what it saves for the backward pass."""

    parameters: int  # of the base model
    trained: int  # all of them, or those of the adapters
    largest: int  # of one layer
    hidden: int
    vocab: int
    attention: tuple[HeadCounts, ...]  # of the layers that have it
    saved: SavedActivations


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on one GPU. The loss, the backward of a layer and the optimizer's step follow each other."""

    weights: float  # all of them, or this rank's part
    gathered: float  # weights that ZeRO-3 gathers, or copies in bfloat16 under autocast without checkpointing
    gradients: float  # with the buckets in which they are exchanged
    optimizer: float  # the states of AdamW, with fp32 weights under DeepSpeed
    activations: float  # saved for backward
    head: float  # and loss; under autocast with checkpointing also the copies of weights, freed after the forward
    layer: float  # temporaries of the backward of one layer; with checkpointing also what is computed again
    attention: float  # work space of the backward of flash attention in one layer
    step: float  # copies of gradients in the optimizer's step

    @property
    def total(self) -> float:
        states = self.weights + self.gathered + self.gradients + self.optimizer
        return states + max(self.activations + max(self.head, self.layer + self.attention), self.step)


def count_model(config: PreTrainedConfig, method: TrainingMethod, lora: LoraConfig = LORA) -> ModelSizes:
    """The sizes of a causal language model with this config, trained by this method, with these adapters if by LoRA."""
    text_class, config_part = model_class_of(config)
    if text_class is None:
        raise ValueError(
            f"The memory of a {type(config).__name__} was asked for. transformers has no language model for this "
            "config, so nothing can be counted. Give another `--model`, or leave out `--memory`."
        )
    text = config_part.get_text_config()
    # Products of grouped experts run on fake tensors in bfloat16 only
    has_experts = experts_of(text)[0] > 0
    autocast = method.engine == "DDP" and not has_experts
    AttentionInterface.register(SAVED_ATTENTION, _saved_attention)
    dtype = torch.float32 if autocast and not method.lora else torch.bfloat16
    model = build_on_meta(text_class, config_part).train()
    model.to(dtype)
    model.set_attn_implementation(SAVED_ATTENTION)
    group_experts(model)
    parameters = trained = sum(p.numel() for p in model.parameters())
    # The text part of an image model may have no head; it is outside
    if model.get_output_embeddings() is None and not text.tie_word_embeddings:
        parameters = trained = parameters + text.hidden_size * text.vocab_size
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in _checkpointed_layers(model)), default=0)
    if method.lora:
        if config_part is not config and isinstance(lora.target_modules, str):  # a pattern for names of the whole
            lora = replace(lora, target_modules=LORA.target_modules)
        add_adapters(model, lora, autocast=autocast)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    drop_as_cuda(model)
    try:
        saved = saved_in_forward(model, autocast)
    except Exception as error:  # any error of the model's own code, such as a choice by values
        raise ValueError(
            f"The memory of {text_class.__name__} was asked for. Its forward cannot run on fake tensors "
            f"({type(error).__name__}: {error}), so what it saves for backward cannot be counted. Leave out `--memory`."
        ) from error
    if method.engine == "DDP" and has_experts and not method.lora:
        saved = replace(saved, casts=2 * parameters, is_cached=True, is_modelled=True)
    heads = with_pairs_of(text, 0.0).attention
    return ModelSizes(parameters, trained, largest, text.hidden_size, text.vocab_size, heads, saved)


def add_adapters(model: Any, lora: LoraConfig, *, autocast: bool) -> None:
    """Add adapters whose inputs are not cast, as in training."""
    get_peft_model(model, copy.copy(lora), autocast_adapter_dtype=autocast)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False  # type: ignore[attr-defined]  # an attribute of each kind
    model.enable_input_require_grads()


def drop_as_cuda(model: nn.Module) -> None:
    """Dropout that saves its mask, a byte per number, as on CUDA; on a CPU it saves factors."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x, rate=module.p: torch.native_dropout(x, rate, True)[0]  # type: ignore[method-assign, misc]


def group_experts(model: nn.Module) -> None:
    """Compute as grouped products what loops over the experts that were hit (Step-3.7), which fake tensors cannot."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") and not hasattr(module, "has_gate"):
            from transformers.integrations.moe import grouped_mm_experts_forward  # a name of later releases

            own = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False}
            module.__dict__ |= own | {"is_transposed": False, "_is_expert_parallel": False}
            module.forward = partial(grouped_mm_experts_forward, module)


class _SavedByFlashAttention(torch.autograd.Function):
    """What flash attention saves: its inputs, its output, a number in fp32 per row and head. Nothing is computed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _saved_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """An attention of transformers: (1, H, T, D) -> (1, T, H, D)."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    attend: Any = _SavedByFlashAttention.apply
    return attend(query, key, value).transpose(1, 2), None


def _checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that checkpointing computes again."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return list(layers.values())


def saved_in_forward(model: PreTrainedModel, autocast: bool) -> SavedActivations:
    """What autograd saves in a forward without the LM head. The model, on the meta device, gets fake tensors."""
    fake = FakeTensorMode()
    with fake:
        make_fake(model)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, Any] = {}  # storage -> itself, so that no other gets its address
    totals = {"tokens": 0, "casts": 0}
    layers: list[int] = []
    inputs: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage._cdata not in weights:
            seen[storage._cdata] = storage
            totals["casts" if storage.nbytes() % NUM_COUNTED_TOKENS else "tokens"] += storage.nbytes()
        return tensor

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        inputs.append(states.numel() * states.element_size())
        layers.append(-totals["tokens"])

    def end(module: nn.Module, args: tuple[Any, ...], out: object) -> None:
        layers[-1] += totals["tokens"]

    for layer in _checkpointed_layers(model):
        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end)
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    errors_of_torch = logging.getLogger("torch._subclasses.fake_tensor")  # it logs an error that it also raises
    with not_logged(errors_of_torch), fake, context, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.base_model(input_ids=torch.zeros(1, NUM_COUNTED_TOKENS, dtype=torch.long), use_cache=False)
    others = totals["tokens"] - sum(layers)
    per_layer, per_input = (tuple(size / NUM_COUNTED_TOKENS for size in sizes) for sizes in (layers, inputs))
    return SavedActivations(per_layer, per_input, others / NUM_COUNTED_TOKENS, totals["casts"], is_cached=autocast)


def make_fake(model: nn.Module) -> None:
    """Tensors of the CPU without memory: autocast does not know the meta device."""
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor not in copies:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                copies[tensor] = nn.Parameter(copy, tensor.requires_grad) if is_weight else copy
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
    """The peak of a step on one GPU, of `gpus` among which the engine divides, with micro-batches of `tokens`.

    The loss is TRL's in tiles (`fused_loss`), or has all logits. `copied_keys` are bytes of keys of shared prefixes,
    with their gradients. With `offload` the inputs of layers that checkpointing saves lie on the host, except one.
    """
    saved = sizes.saved
    inputs = max(saved.inputs, default=0.0) if offload else sum(saved.inputs)
    casts = saved.casts if checkpointing else 0.0
    longest = max(saved.layers, default=0.0) * tokens
    layer = (checkpointing + TEMPORARY) * longest + casts / max(len(saved.layers), 1)
    # The sum of the gradients of the queries in fp32, and those of keys and values by query head where these share
    rows = tokens + ROWS_PER_DOCUMENT * documents
    attention = (
        4.0 * rows * kind.heads * kind.key_dim
        + (2.0 * tokens * kind.heads * (kind.key_dim + kind.value_dim) if kind.kv_heads < kind.heads else 0)
        for kind in sizes.attention
    )
    return PeakMemory(
        **_model_state_bytes(sizes, method, gpus, casts=0.0 if checkpointing else saved.casts),
        activations=(saved.others + (inputs if checkpointing else sum(saved.layers))) * tokens,
        head=_head_bytes(sizes, method, tokens, fused=fused_loss) + (casts if saved.is_cached else 0),
        layer=layer,
        attention=max(attention, default=0.0) + copied_keys,
    )


def _model_state_bytes(sizes: ModelSizes, method: TrainingMethod, gpus: int, *, casts: float) -> dict[str, float]:
    every = sizes.parameters
    trained = sizes.trained
    head = sizes.hidden * sizes.vocab
    adapters = trained if method.lora else 0
    if method.engine == "DDP":
        weights = 2 * every + 4 * adapters if method.lora else 4 * every
        gradients = 4 * trained * (2 if gpus > 1 else 1)  # with the buckets
        return {"weights": weights, "gathered": casts, "gradients": gradients, "optimizer": 8 * trained, "step": 0}
    buckets = 2 * min(2 * sizes.hidden**2, trained)  # two of `reduce_bucket_size`, in bfloat16
    states = {"gradients": 4 * trained / gpus + buckets, "optimizer": 12 * trained / gpus}  # summed in fp32
    if method.engine == "ZeRO-2":
        return states | {"weights": 2 * (every + adapters), "gathered": 0, "step": 0}
    gathered = head + min(every - head, max(NUM_REUSED_VALUES, 2 * sizes.largest)) if gpus > 1 else 0
    step = 4 * min(trained / gpus, SUB_GROUP)
    return states | {"weights": 2 * (every + adapters) / gpus, "gathered": 2 * gathered, "step": step}


def _head_bytes(sizes: ModelSizes, method: TrainingMethod, tokens: int, *, fused: bool) -> float:
    """The gradient of the weight is summed in fp32, then in its own dtype, too."""
    own = 4 if method.engine == "DDP" else 6
    of_weight = 0 if method.lora else own * sizes.hidden * sizes.vocab
    if fused:  # states of all tokens as they are, in fp32 and in their own dtype
        return of_weight + 2 * min(tokens, LOSS_TILE[0]) * LOSS_TILE[1] + 8 * tokens * sizes.hidden
    # log-probabilities and two gradients in fp32; then the gradient of the logits in half precision, and of the weight
    return max(12 * tokens * sizes.vocab, 2 * tokens * sizes.vocab + of_weight)


def largest_tokens(predict: Callable[..., PeakMemory], memory: float, most: int) -> int:
    """The most tokens, at most `most`, whose peak needs at most `memory` bytes; 0 if none does."""
    return bisect_right(range(1, most + 1), memory, key=lambda tokens: predict(tokens=tokens).total)
