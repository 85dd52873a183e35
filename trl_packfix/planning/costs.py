"""What a document costs: floating-point operations, from its length and the model's config. numpy only.

A token costs the same wherever it stands, in the matrices of the model; a pair of tokens that see each other costs the
two products of attention. So a document of n tokens costs `per_token * n + per_pair * n (n + 1) / 2`, and a pack the
sum of its documents. Only ratios of costs decide anything. The unit is FLOPs of one forward pass (a multiplication and
an addition are two); a backward pass takes about twice that, of both parts.

Images cost what the vision tower does with them. Every image, or tile of one, is a sequence of its own there, in which
all patches see each other.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Numbers = TypeVar("Numbers", npt.NDArray[Any], "Tensor")


class HeadCounts(NamedTuple):
    """Attention layers with the same heads: what an exchange between ranks sends."""

    layers: int
    heads: int
    kv_heads: int
    key_dim: int  # of queries, too
    value_dim: int


class ScanCosts(NamedTuple):
    """Recurrent layers with the same scan: what it computes, and what an exchange between ranks sends."""

    layers: int
    heads: int  # of values; of Mamba-1, channels
    kv_heads: int  # of keys; of Mamba-1, 1
    per_token: float  # FLOPs of one token with the states of one layer
    chunk: int  # tokens that are computed with each other
    per_pair: float  # FLOPs of a pair of them in one layer
    per_head: int  # numbers that a token sends and gets back for each head; one in fp32 counts as two
    per_kv_head: int


@dataclass(frozen=True)
class TowerCosts:
    """FLOPs of a forward pass of a vision tower, by the numbers in its input: a patch is some hundreds of them.

    >>> TowerCosts(per_value=10.0, per_pair=2.0)(3, 9)  # one image of three numbers
    48.0
    """

    per_value: float  # of one number in all matrices, and in attention within windows
    per_pair: float  # of two numbers of the same image, in all layers with full attention

    def __call__(self, values: Numbers, squares: Numbers) -> Numbers:
        """FLOPs of the images of each document, from their numbers and the sum of each image's squared, all (N,)."""
        return self.per_value * values + self.per_pair * squares


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a forward pass by document length.

    >>> CostModel(per_token=10, per_pair=2)(3)
    42.0
    """

    per_token: float  # in all matrices, LM head included
    per_pair: float  # of tokens, in all layers with full causal attention
    # (tokens, FLOPs of one pair) of the layers in which a token sees that many, itself included. A scan has a window of
    # 1: what a token costs beside matrices with weights.
    windows: tuple[tuple[int, float], ...] = ()
    chunks: tuple[tuple[int, float], ...] = ()  # the same where a token sees its own chunk only
    attention: tuple[HeadCounts, ...] = field(default=(), compare=False)  # for sequence parallelism; (): not known
    mixers: tuple[ScanCosts, ...] = field(default=(), compare=False)
    tower: TowerCosts = TowerCosts(0.0, 0.0)  # also where its costs cannot be counted

    @property
    def heads(self) -> int | None:
        """Heads of the layer with the fewest, attention or scan; None if they are not known."""
        return min([*(kind.heads for kind in self.attention), *(kind.heads for kind in self.mixers)], default=None)

    def shared_by(self, degree: int) -> "CostModel":
        """FLOPs on the ranks of a group, as if each rank had as many heads as the one with most.

        Heads that do not divide are split unevenly: 28 on 8 ranks are 4 on some, which take 8/7 of the mean.
        """
        layers = self.attention or self.mixers
        unevenness = max((-(-kind.heads // degree) * degree / kind.heads for kind in layers), default=1.0)
        if unevenness == 1:
            return self
        return replace(
            self,
            per_pair=self.per_pair * unevenness,
            windows=tuple((window, pair * unevenness) for window, pair in self.windows),
            chunks=tuple((chunk, pair * unevenness) for chunk, pair in self.chunks),
        )

    def __call__(self, n: Numbers) -> Numbers:
        """FLOPs of documents of these lengths, shape (N,): of an array, or a tensor on any device."""
        cost = self.per_token * n + self.per_pair * _count_pairs(n)
        for window, per_pair in self.windows:
            cost = cost + per_pair * (_count_pairs(n) - _count_pairs((n - window).clip(min=0)))
        for chunk, per_pair in self.chunks:
            whole = n // chunk
            cost = cost + per_pair * (whole * (chunk * (chunk + 1) / 2) + _count_pairs(n - whole * chunk))
        return cost


def _count_pairs(n: Numbers) -> Numbers:
    """Pairs of n tokens of which one sees the other or itself."""
    return n * (n + 1.0) / 2  # a float, which does not overflow as int32 does


LLAMA_7B = CostModel(
    per_token=2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096 * 32000,
    per_pair=4 * 32 * 4096,
    attention=(HeadCounts(layers=32, heads=32, kv_heads=32, key_dim=128, value_dim=128),),
)
"""Where no config is known: Llama 2 7B. Attention costs as much as the matrices in a document of 50,400 tokens."""


# Kinds of layers in which no token sees another, by the names of `layer_types` in configs. All others have attention.
_WITHOUT_PAIRS = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe", "recurrent"})

# Kinds of layers that select tokens by scores of every pair, and how often these are summed over the heads.
_SUMS_OF_SCORES = {"indexed_attention": 1, "compressed_sparse_attention": 1, "minimax_m3_sparse": 0}


def with_pairs_of(config: "PreTrainedConfig", per_token: float) -> CostModel:
    """The cost model of a decoder with this (text) config, read by the names that transformers' configs share.

    Counted are attention (grouped, latent, sliding, chunked, compressed) and the scores of its indexer, if it has one.
    Sparse attention counts all pairs: transformers computes them and masks those that are not selected.
    """
    full = 0.0
    windows: dict[int, float] = {}
    chunks: dict[int, float] = {}
    heads: Counter[tuple[int, int, int, int]] = Counter()
    kinds = _layer_kinds(config)
    num_heads = getattr(config, "num_attention_heads_per_layer", None) or [None] * len(kinds)
    indexers = getattr(config, "indexer_types", None) or ["full"] * len(kinds)  # "shared": those of the layer before
    for layer, kind, own, indexer in zip(config.per_layer_config, kinds, num_heads, indexers, strict=False):
        if kind in _WITHOUT_PAIRS:
            continue
        sizes = _read_heads(layer, own)
        heads[sizes] += 1
        query_heads, _, key, value = sizes
        pair = 2.0 * query_heads * (key + value)
        scores = 0.0
        if kind in _SUMS_OF_SCORES and indexer != "shared":
            size = getattr(layer, "index_head_dim", 0) + _SUMS_OF_SCORES[kind]
            scores = 2.0 * getattr(layer, "index_n_heads", 0) * size
        rate = (getattr(layer, "compress_rates", None) or {}).get(kind)  # tokens beyond the window are one of so many
        window = getattr(layer, "sliding_window", None) if rate or "sliding" in kind else None
        full += (pair + scores) / rate if rate else scores
        if window:
            windows[window] = windows.get(window, 0) + pair
        elif kind == "chunked_attention":
            chunks[layer.attention_chunk_size] = chunks.get(layer.attention_chunk_size, 0) + pair
        else:
            full += pair
    attention = tuple(HeadCounts(layers, *sizes) for sizes, layers in heads.items())
    return CostModel(per_token, full, tuple(sorted(windows.items())), tuple(sorted(chunks.items())), attention)


def with_scans(costs: CostModel, mixers: tuple[ScanCosts, ...]) -> CostModel:
    """The same cost model with the scans of recurrent layers.

    >>> scan = ScanCosts(layers=2, heads=1, kv_heads=1, per_token=5.0, chunk=2, per_pair=1.0, per_head=1, per_kv_head=1)
    >>> import numpy as np
    >>> with_scans(CostModel(per_token=10, per_pair=0), (scan,))(np.array([1, 3])).tolist()  # pairs of chunks: 1, 3 + 1
    [22.0, 68.0]
    """
    windows = dict(costs.windows)
    chunks = dict(costs.chunks)
    for scan in mixers:
        windows[1] = windows.get(1, 0.0) + scan.layers * scan.per_token
        if scan.per_pair:
            chunks[scan.chunk] = chunks.get(scan.chunk, 0.0) + scan.layers * scan.per_pair
    return replace(costs, windows=tuple(sorted(windows.items())), chunks=tuple(sorted(chunks.items())), mixers=mixers)


def tower_costs_of(config: "PreTrainedConfig", per_patch: float) -> TowerCosts:
    """The costs of a vision tower whose patch takes `per_patch` FLOPs in all matrices, as if each saw a whole window.

    AttributeError, TypeError: the config has other fields than those that transformers' configs share.
    """
    layers = getattr(config, "num_hidden_layers", None) or config.depth
    width = getattr(config, "embed_dim", None) or config.hidden_size
    if heads := getattr(config, "head_dim", None):
        width = heads * config.num_attention_heads
    height, breadth = config.patch_size if isinstance(config.patch_size, list | tuple) else 2 * (config.patch_size,)
    values = 3 * (getattr(config, "temporal_patch_size", None) or 1) * height * breadth
    pair = 4.0 * width
    full = getattr(config, "fullatt_block_indexes", None)
    if full is not None:
        per_patch += (layers - len(full)) * pair * (config.window_size / height) ** 2
        layers = len(full)
    return TowerCosts(per_patch / values, layers * pair / values**2)


def _layer_kinds(config: "PreTrainedConfig") -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds:
        return list(kinds)
    if not getattr(config, "num_attention_heads", None):
        return ["recurrent"] * config.num_hidden_layers
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def _read_heads(layer: "PreTrainedConfig", num_heads: int | None) -> tuple[int, int, int, int]:
    """`HeadCounts` of one layer, but for their number."""
    heads = num_heads or layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):  # multi-head latent attention: every head has its own keys
        key = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        kv_heads = heads
    else:
        key = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return heads, kv_heads, key, getattr(layer, "v_head_dim", None) or key
