"""Compute what a document costs, in floating-point operations (FLOPs), from its length and the model's config.

`data/model_costs.py` makes the `CostModel` of a model with the functions at the end of this module. Planning balances
ranks by it (`units.py`, `balance.py`), and reports and logs count FLOPs by it.

In the weight matrices of the model, every token costs the same. In attention, every pair of tokens that see each other
costs two products of vectors: the query with the key, and the attention weight with the value. So a document of n
tokens costs `per_token * n + per_pair * n (n + 1) / 2`, and a pack costs the sum of its documents. Costs are FLOPs of
one forward pass, in which a multiplication and an addition are two. A backward pass takes about twice as many, in
matrices and in attention. So it changes no decision of planning, for which only ratios of costs matter.

A *scan* is what a recurrent layer (Mamba, linear attention) has in place of attention: a state is carried from token to
token. With sequence parallelism, ranks that share a pack *exchange* tokens for heads before and after attention or a
scan, so that each rank computes all tokens of some heads.

Images cost what the vision tower computes for them. In the tower, every image, or tile of an image, is a sequence of
its own, in which all patches see each other.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Numbers = TypeVar("Numbers", npt.NDArray[Any], "Tensor")


class HeadCounts(NamedTuple):
    """The attention layers with equal heads: how many there are, and the size of their heads.

    `degrees.py` computes from it how many numbers ranks exchange.
    """

    layers: int  # number of such layers
    heads: int  # query heads of a layer
    kv_heads: int  # key and value heads of a layer
    key_dim: int  # numbers of one token in a query or key head
    value_dim: int  # numbers of one token in a value head

    @property
    def exchanged_per_head(self) -> int:
        """How many numbers ranks exchange for one token of a query head: those of its query and of its output."""
        return self.key_dim + self.value_dim

    @property
    def exchanged_per_kv_head(self) -> int:
        """How many numbers ranks exchange for one token of a key head: those of its key and of its value."""
        return self.key_dim + self.value_dim


class ScanCosts(NamedTuple):
    """The recurrent layers with equal scans: how many there are, what a scan computes, and what ranks exchange for it.

    Kernels compute a scan in *chunks* of consecutive tokens: inside a chunk by pairs of tokens, as in attention, and
    from chunk to chunk by the state.
    """

    layers: int  # number of such layers
    heads: int  # value heads of a layer; in Mamba-1, its channels
    kv_heads: int  # key heads of a layer; in Mamba-1, 1
    per_token: float  # FLOPs of one token with the states of one layer
    chunk: int  # tokens of a chunk
    per_pair: float  # FLOPs of a pair of tokens of one chunk in one layer
    # How many numbers ranks exchange for one token of one layer, before and after the scan together. They are traffic,
    # not FLOPs. A number in fp32 counts as two, because it has twice the bytes of the other numbers
    exchanged_per_head: int  # numbers for each value head
    exchanged_per_kv_head: int  # numbers for each key head


@dataclass(frozen=True)
class TowerCosts:
    """The FLOPs of a forward pass of a vision tower. Call it with the sizes of images.

    The size of an image is the number of *values* (pixels x channels) in its input. A patch has some hundreds of them.

    >>> TowerCosts(per_value=10.0, per_pair=2.0)(3, 9)  # one image of three values
    48.0
    """

    per_value: float  # FLOPs of one value in all matrices, and in attention within windows
    per_pair: float  # FLOPs of a pair of values of one image, in all layers with full attention

    def __call__(self, values: Numbers, squares: Numbers) -> Numbers:
        """Return the FLOPs of the images of each document, shape (N,).

        Args:
            values: number of values in all images of each document, shape (N,).
            squares: sum over the images of each document of (number of values) ** 2, shape (N,).
        """
        return self.per_value * values + self.per_pair * squares


@dataclass(frozen=True)
class CostModel:
    """The FLOPs of a forward pass of a model. Call it with the lengths of documents, in tokens.

    >>> CostModel(per_token=10, per_pair=2)(3)
    42.0
    """

    per_token: float  # FLOPs of one token in all matrices, LM head included
    per_pair: float  # FLOPs of a pair of tokens in all layers with full causal attention
    # (window, FLOPs of one pair) for layers in which a token sees at most `window` tokens, itself included. A scan
    # updates the state once for each token. This is entered as a window of 1, which has one pair for each token.
    windows: tuple[tuple[int, float], ...] = ()
    # (chunk, FLOPs of one pair) for layers in which a token sees only tokens of its own chunk of `chunk` tokens
    chunks: tuple[tuple[int, float], ...] = ()
    # The heads of the layers with attention, and of the layers with a scan. With sequence parallelism ranks exchange
    # tokens for these heads. They are not compared: cost models with equal FLOPs are equal.
    attention: tuple[HeadCounts, ...] = field(default=(), compare=False)  # (): heads are not known
    mixers: tuple[ScanCosts, ...] = field(default=(), compare=False)  # (): no layer has a scan
    tower: TowerCosts = TowerCosts(0.0, 0.0)  # zero without a vision tower, or if its costs cannot be counted

    @property
    def heads(self) -> int | None:
        """The number of heads of the layer with the fewest, attention or scan; None if it is not known."""
        return min([layers.heads for layers in self.attention + self.mixers], default=None)

    def shared_by(self, degree: int) -> "CostModel":
        """Return the cost model of a pack that `degree` ranks share, by dividing the heads of each layer among them.

        The cost is the cost on all ranks together. Heads that cannot be divided evenly cost as if every rank had as
        many heads as the rank with most. For example, of 28 heads on 8 ranks some ranks have 4, which take 8/7 of the
        mean time. The cost per token stays, because in matrices each rank computes an equal number of tokens.
        """
        # One factor stands for all layers: the factor of attention, or of scans in a model without attention
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
        """Return the FLOPs of documents of n tokens each, shape (N,). `n` is an array, or a tensor on any device."""
        cost = self.per_token * n + self.per_pair * _count_pairs(n)
        for window, per_pair in self.windows:
            cost = cost + per_pair * (_count_pairs(n) - _count_pairs((n - window).clip(min=0)))
        for chunk, per_pair in self.chunks:
            full_chunks = n // chunk
            pairs = full_chunks * (chunk * (chunk + 1) / 2) + _count_pairs(n - full_chunks * chunk)
            cost = cost + per_pair * pairs
        return cost


def _count_pairs(n: Numbers) -> Numbers:
    """Return how many pairs n tokens have in causal attention, a token with itself included."""
    return n * (n + 1.0) / 2  # a float, which does not overflow as int32 does


LLAMA_7B = CostModel(
    per_token=2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096 * 32000,
    per_pair=4 * 32 * 4096,
    attention=(HeadCounts(layers=32, heads=32, kv_heads=32, key_dim=128, value_dim=128),),
)
"""The costs of Llama 2 7B, for a model whose config is not known.

In a document of 50,400 tokens, attention costs as much as the matrices.
"""

# Kinds of layers without attention, by their names in `layer_types` of configs. All other kinds have attention.
_WITHOUT_PAIRS = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe", "recurrent"})

# Kinds of layers with an *indexer*, which scores every pair of tokens by heads of its own, to select the tokens that
# are seen. The score of a pair is a sum over these heads. Each head multiplies two vectors of `index_head_dim` numbers.
# The value here is 1 if the product is also multiplied by a weight of the head, and 0 if it is not.
_SCORE_WEIGHTS = {"indexed_attention": 1, "compressed_sparse_attention": 1, "minimax_m3_sparse": 0}


def decoder_costs_of(config: "PreTrainedConfig", per_token: float, scans: tuple[ScanCosts, ...] = ()) -> CostModel:
    """Return the cost model of a text decoder: its matrices, its attention and its scans.

    Attention may be grouped, latent, sliding, chunked or compressed. Compressed attention merges every `rate` earlier
    tokens into one, and also sees a window of single tokens. The scores of an indexer count, too. Sparse attention
    counts all pairs, because transformers computes all of them and masks the ones that are not selected.

    Args:
        config: the text config, read by the names that the configs of transformers share. Its `per_layer_config` has a
            config for each layer.
        per_token: FLOPs of one token in all matrices.
        scans: all scans of the model. The config does not have their sizes.
    """
    full_pair_cost = 0.0  # FLOPs of a pair of tokens in all layers in which every token sees all tokens before it
    windows: defaultdict[int, float] = defaultdict(float)
    chunks: defaultdict[int, float] = defaultdict(float)
    heads: Counter[tuple[int, int, int, int]] = Counter()  # (query heads, key heads, key dim, value dim) -> layers
    kinds = _layer_kinds(config)
    num_heads = getattr(config, "num_attention_heads_per_layer", None) or [None] * len(kinds)
    indexers = getattr(config, "indexer_types", None) or ["full"] * len(kinds)  # "shared": no scores of its own
    # Not strict: a list of a config may have more entries than the model has layers
    for layer, kind, layer_heads, indexer in zip(config.per_layer_config, kinds, num_heads, indexers, strict=False):
        if kind in _WITHOUT_PAIRS:
            continue
        head_sizes = _read_heads(layer, layer_heads)
        heads[head_sizes] += 1
        query_heads, _, key_dim, value_dim = head_sizes
        pair_cost = 2.0 * query_heads * (key_dim + value_dim)
        score_cost = 0.0  # FLOPs of a pair in the indexer
        if kind in _SCORE_WEIGHTS and indexer != "shared":
            num_products = getattr(layer, "index_head_dim", 0) + _SCORE_WEIGHTS[kind]
            score_cost = 2.0 * getattr(layer, "index_n_heads", 0) * num_products
        # First add the pairs of the indexer. Without compression it scores every earlier token. With compression,
        # `rate` tokens are merged to one. A token scores each merged token and attends to it, so there is one pair for
        # every `rate` earlier tokens.
        rate = (getattr(layer, "compress_rates", None) or {}).get(kind)  # None without compression
        full_pair_cost += (pair_cost + score_cost) / rate if rate else score_cost
        # Then add the attention to single tokens, which layers with compression have, too: of a window, of a chunk, or
        # of all earlier tokens. Configs have a `sliding_window` even for layers without a window.
        window = getattr(layer, "sliding_window", None) if rate or "sliding" in kind else None
        if window:
            windows[window] += pair_cost
        elif kind == "chunked_attention":
            chunks[layer.attention_chunk_size] += pair_cost
        else:
            full_pair_cost += pair_cost
    for scan in scans:
        windows[1] += scan.layers * scan.per_token  # a window of one token: a scan updates its state for each token
        if scan.per_pair:
            chunks[scan.chunk] += scan.layers * scan.per_pair
    return CostModel(
        per_token,
        per_pair=full_pair_cost,
        windows=tuple(sorted(windows.items())),
        chunks=tuple(sorted(chunks.items())),
        attention=tuple(HeadCounts(layers, *head_sizes) for head_sizes, layers in heads.items()),
        mixers=scans,
    )


def tower_costs_of(config: "PreTrainedConfig", per_patch: float) -> TowerCosts:
    """Return the costs of a vision tower. In layers with windows, every patch counts as if its window were full.

    Args:
        config: the config of the tower, read by the names that the configs of transformers share.
        per_patch: FLOPs of one patch in all matrices.

    Raises:
        AttributeError, TypeError: the config has other fields.
    """
    layers = getattr(config, "num_hidden_layers", None) or config.depth
    hidden_size = getattr(config, "embed_dim", None) or config.hidden_size  # dimensions of all heads together
    head_dim = getattr(config, "head_dim", None)
    if head_dim:  # heads may be wider than the hidden states
        hidden_size = head_dim * config.num_attention_heads
    is_square = not isinstance(config.patch_size, list | tuple)
    height, width = (config.patch_size, config.patch_size) if is_square else config.patch_size  # pixels of a patch
    patch_values = 3 * (getattr(config, "temporal_patch_size", None) or 1) * height * width
    # FLOPs of two patches in one layer: two products of vectors, with two FLOPs for each dimension
    per_pair = 4.0 * hidden_size
    full_layers = getattr(config, "fullatt_block_indexes", None)  # the other layers have windows
    if full_layers is not None:
        patches_in_window = (config.window_size / height) ** 2
        per_patch += (layers - len(full_layers)) * per_pair * patches_in_window
        layers = len(full_layers)
    return TowerCosts(per_value=per_patch / patch_values, per_pair=layers * per_pair / patch_values**2)


def _layer_kinds(config: "PreTrainedConfig") -> list[str]:
    """Return the kind of each layer, by the names that `layer_types` of configs uses."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds:
        return list(kinds)
    if not getattr(config, "num_attention_heads", None):
        return ["recurrent"] * config.num_hidden_layers
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def _read_heads(layer: "PreTrainedConfig", num_heads: int | None) -> tuple[int, int, int, int]:
    """Return the fields of the `HeadCounts` of one layer, without the number of layers.

    Args:
        layer: the config of the layer.
        num_heads: the layer's number of query heads, if it differs from the number in the config.

    Returns:
        (heads, kv_heads, key_dim, value_dim).
    """
    heads = num_heads or layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):  # multi-head latent attention: every head has its own keys
        key_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        kv_heads = heads
    else:
        key_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return heads, kv_heads, key_dim, getattr(layer, "v_head_dim", None) or key_dim
