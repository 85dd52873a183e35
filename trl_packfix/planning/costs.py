"""What a document costs: floating-point operations, from its length and the model's config. numpy only.

A token costs the same wherever it stands, in the matrices of the model; a pair of tokens that see each other costs the
two products of attention. So a document of n tokens costs `per_token * n + per_pair * n (n + 1) / 2`, and a pack the
sum of its documents. Only ratios of costs decide anything. The unit is FLOPs of one forward pass (a multiplication and
an addition are two); a backward pass takes about twice that, of both parts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float64Array


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a forward pass by document length.

    Attributes:
        per_token: FLOPs of one token in all matrices, LM head included.
        per_pair: FLOPs of one pair of tokens in all layers with full causal attention.
        windows: (tokens, FLOPs of one pair) of the layers in which a token sees that many, itself included.
        chunks: the same for layers in which a token sees its own chunk of so many tokens only.

    >>> CostModel(per_token=10, per_pair=2)([1, 3]).tolist()
    [12.0, 42.0]
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()
    chunks: tuple[tuple[int, float], ...] = ()

    def __call__(self, lengths: npt.ArrayLike) -> Float64Array:
        """FLOPs of each document, shape (N,)."""
        n = np.asarray(lengths, dtype=np.float64)
        cost = self.per_token * n + self.per_pair * _pairs(n)
        for window, per_pair in self.windows:
            cost += per_pair * (_pairs(n) - _pairs(np.maximum(n - window, 0)))
        for chunk, per_pair in self.chunks:
            whole, rest = np.divmod(n, chunk)
            cost += per_pair * (whole * _pairs(chunk) + _pairs(rest))
        return cost


def _pairs(n: Any) -> Any:
    """Pairs of n tokens of which one sees the other or itself."""
    return n * (n + 1) / 2


LLAMA_7B = CostModel(per_token=2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096 * 32000, per_pair=4 * 32 * 4096)
"""Where no config is known: Llama 2 7B. Attention costs as much as the matrices in a document of 50,400 tokens."""


def cost_model(config: Any) -> CostModel:
    """The cost model of a decoder with this config, read by the names that transformers' configs share.

    Counted are attention (grouped, latent, sliding, chunked), feed-forward layers (the active experts of a mixture and
    its shared ones), and the LM head; of recurrent layers (linear attention, mamba) the projections only, for their
    state costs little beside them. What a config does not say is taken from Llama: a feed-forward layer is gated unless
    its activation is a plain GELU or ReLU.

    Args:
        config: an object with attributes, such as a text config of transformers. Without `hidden_size` and
            `num_hidden_layers`, `LLAMA_7B` comes back.
    """
    hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not hidden or not layers:
        return LLAMA_7B
    matrices = 0.0
    full = 0.0
    windows: dict[int, float] = {}
    chunks: dict[int, float] = {}
    attention, pair = _attention(config, hidden)
    for index, kind in enumerate(_layer_kinds(config, layers)):
        matrices += _feed_forward(config, hidden, index)
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            matrices += _recurrent(config, hidden)
            continue
        matrices += attention
        if kind == "sliding_attention":
            windows[config.sliding_window] = windows.get(config.sliding_window, 0) + pair
        elif kind == "chunked_attention":
            chunks[config.attention_chunk_size] = chunks.get(config.attention_chunk_size, 0) + pair
        else:
            full += pair
    matrices += hidden * getattr(config, "vocab_size", 0)
    return CostModel(2 * matrices, full, tuple(sorted(windows.items())), tuple(sorted(chunks.items())))


def _layer_kinds(config: Any, layers: int) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds:
        return ["full_attention" if kind in ("attention", "hybrid") else kind for kind in kinds]
    if not getattr(config, "num_attention_heads", None):
        return ["recurrent"] * layers
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * layers


def _attention(config: Any, hidden: int) -> tuple[float, float]:
    """Weights of the projections of one layer, and FLOPs of one pair of tokens."""
    heads = getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or hidden // heads
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # multi-head latent attention
        query, value, rope = (
            config.qk_nope_head_dim + config.qk_rope_head_dim,
            config.v_head_dim,
            config.qk_rope_head_dim,
        )
        low = getattr(config, "q_lora_rank", None)
        weights = low * (hidden + heads * query) if low else hidden * heads * query
        weights += (
            hidden * (latent + rope) + latent * heads * (config.qk_nope_head_dim + value) + heads * value * hidden
        )
        return weights, 2.0 * heads * (query + value)
    groups = getattr(config, "num_key_value_heads", None) or heads
    return 2.0 * hidden * head * (heads + groups), 4.0 * heads * head


def _feed_forward(config: Any, hidden: int, layer: int) -> float:
    """Weights that one token meets in the feed-forward part of a layer."""
    width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    if isinstance(width, list | tuple):
        width = width[layer]
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    plain = (
        activation is not None and activation.startswith(("gelu", "relu")) and "hidden_activation" not in vars(config)
    )
    dense = (2.0 if plain else 3.0) * hidden * width
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for n in (getattr(config, name, None) for name in names) if n), 0)
    active = getattr(config, "num_experts_per_tok", None) or 0
    every = getattr(config, "decoder_sparse_step", None) or 1
    if (
        not (experts and active)
        or layer in (getattr(config, "mlp_only_layers", None) or ())
        or layer < (getattr(config, "first_k_dense_replace", None) or 0)
        or (layer + 1) % every
    ):
        return dense
    expert = getattr(config, "moe_intermediate_size", None) or width
    shared = (getattr(config, "n_shared_experts", None) or 0) * expert
    shared += getattr(config, "shared_expert_intermediate_size", None) or 0
    return 3.0 * hidden * (active * expert + shared) + hidden * experts


def _recurrent(config: Any, hidden: int) -> float:
    """Weights of the projections of one layer of linear attention or of a state space model."""
    if getattr(config, "linear_num_value_heads", None):
        key = config.linear_num_key_heads * config.linear_key_head_dim
        value = config.linear_num_value_heads * config.linear_value_head_dim
        return hidden * (2.0 * key + 3.0 * value + 2.0 * config.linear_num_value_heads)
    expand = getattr(config, "mamba_expand", None) or getattr(config, "expand", None) or 2
    return 3.0 * expand * hidden**2
