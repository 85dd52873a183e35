"""Lengths above which a model computes a document differently, read from its config.

No list of names has the next model's window. So every integer of the config is one, but for those that count something
else by their names: widths, heads, layers, experts, token ids. Rotary embeddings that depend on the length of the
sequence are found by calling transformers' own functions.
"""

import re
from itertools import combinations
from math import inf
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..compat import nested_rope_keys

# Fields in tokens that have a word of the other list, too
KERNEL_FIELDS = re.compile(r"conv_kernel(_size|_dim)?$|conv1d_width$|d_conv$|conv_L_cache$")
# Words in the names of fields that count no tokens
OTHER_FIELDS = set(
    "vocab hidden intermediate embd embed embeds embedding embeddings ff ffn dff inner dim dims headdim rank lowrank "
    "width channels head heads layer layers expert experts group groups id ids token theta seed iters expand state "
    "model d freq types scalar multiple divisible positions ctx image patch mel proj projection classifier encoder "
    "decoder adapter parts prompt vision audio buckets forward".split()
)
# Fields that count blocks, or chosen positions: those of one family ("index_...") may be multiplied
SELECTION_FIELDS = re.compile(r"top_?k|blocks|pool|chunks")
BLOCK_FIELDS = re.compile(r"pool|block_size")
# Tokens that layers of a kind compress to one key, by kind (DeepSeek-V4); `index_topk` then counts compressed keys
RATES = "compress_rates"
INDEXED = "compressed_sparse_attention"
POSITIONS = "max_position_embeddings"
ROPE_LENGTHS = ("original_max_position_embeddings", POSITIONS)


def thresholds(
    config: PreTrainedConfig, max_length: int | None, shortest: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Thresholds in tokens, by name: those to test, and those not tested because they lie beyond `max_length`.

    Those to test are below `max_length` (None: the model's positions) and not exceeded by a document of `shortest`
    tokens. A threshold that no document within the model's positions can exceed is in neither.
    """
    positions = vars(config).get(config.attribute_map.get(POSITIONS, POSITIONS))
    positions = positions if isinstance(positions, int) else inf
    limit = positions if max_length is None else max_length
    lengths = _length_fields(vars(config)) | _rope_thresholds(config)
    to_test = {name: n for name, n in lengths.items() if shortest <= n < limit}
    # Where no length is given, dynamic RoPE may be meant for documents beyond the positions
    last = positions + (max_length is None)
    return to_test, {name: n for name, n in lengths.items() if limit <= n < last}


def _length_fields(fields: dict[str, Any]) -> dict[str, int]:
    """The fields that may hold a length above which tokens are computed differently, in tokens.

    Positions that are chosen in blocks may be all positions until one more block is full.
    """
    numbers = {
        name: n
        for name, n in fields.items()
        if _is_length(n) and (KERNEL_FIELDS.search(name) or not OTHER_FIELDS.intersection(name.lower().split("_")))
    }
    lengths = dict(numbers)
    for first, second in combinations(numbers, 2):
        if SELECTION_FIELDS.search(first + second) and first.split("_")[0] == second.split("_")[0]:
            lengths[f"{first} * {second}"] = numbers[first] * numbers[second]
    rates = fields.get(RATES)
    if isinstance(rates, dict):
        lengths |= {f"{RATES}.{kind}": rate for kind, rate in rates.items() if _is_length(rate)}
        if "index_topk" in lengths:
            lengths["index_topk"] *= rates.get(INDEXED, 1)
    block = max((n for name, n in numbers.items() if BLOCK_FIELDS.search(name)), default=0)
    return {name: n + block * bool(SELECTION_FIELDS.search(name)) for name, n in lengths.items()}


def _rope_thresholds(config: PreTrainedConfig) -> dict[str, int]:
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    lengths = {}
    layer_types: list[str | None] = [*nested_rope_keys(config, rope)]
    for layer_type in layer_types or [None]:
        parameters = rope if layer_type is None else rope[layer_type]
        if parameters is None:  # layers of this type have no rotary embedding
            continue
        for name in ROPE_LENGTHS:
            length = parameters.get(name, vars(config).get(name))
            if _is_length(length) and _depends_on_length(config, parameters, layer_type, length=length):
                lengths[name] = length
    return lengths


def _depends_on_length(
    config: PreTrainedConfig, parameters: dict[str, Any], layer_type: str | None, *, length: int
) -> bool:
    """Whether a sequence longer than `length` has other angles; assumed for RoPE types that transformers lacks."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_INIT_FUNCTIONS:
        return rope_type != "default"
    short = {name for name in parameters if name.startswith("short_")}  # phimoe also scales the angles by such a pair
    if any(parameters[name] != parameters.get(name.replace("short_", "long_")) for name in short):
        return True
    # Twice as long: one more token among many may change nothing in fp32.
    within, beyond = (
        ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=n, layer_type=layer_type)
        for n in (length, 2 * length)
    )
    return within[1] != beyond[1] or not torch.equal(within[0], beyond[0])


def _is_length(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
