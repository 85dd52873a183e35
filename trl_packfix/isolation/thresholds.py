"""Read from a model's config the lengths above which the model computes a document differently.

Such a *threshold*, in tokens, is a sliding window, a chunk, the number of keys that each query of sparse attention
chooses, or the original length of a scaled rotary embedding. The leak probe (`check_isolation.py`) tests a document
that is longer than all thresholds of a run, and `features/pack_forward/` compares batches that cross one.

Future models will name such fields in new ways. So every integer of the config is taken as a threshold, except those
that count something else by their names: widths, heads, layers, experts, token ids. Rotary embeddings that depend on
the length of the sequence are found by calling transformers' own functions.
"""

import re
from itertools import combinations
from math import inf
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..compat import nested_rope_keys

# Names of fields that count tokens although they have a word of `OTHER_WORDS`: the widths of convolutions
KERNEL_FIELDS = re.compile(r"conv_kernel(_size|_dim)?$|conv1d_width$|d_conv$|conv_L_cache$")
# Words in the names of fields that are no thresholds. "positions" and "ctx" name the longest sequence of the model,
# which `thresholds` reads separately
OTHER_WORDS = set(
    "vocab hidden intermediate embd embed embeds embedding embeddings ff ffn dff inner dim dims headdim rank lowrank "
    "width channels head heads layer layers expert experts group groups id ids token theta seed iters expand state "
    "model d freq types scalar multiple divisible positions ctx image patch mel proj projection classifier encoder "
    "decoder adapter parts prompt vision audio buckets forward".split()
)
# Names of fields that count blocks or chosen positions. If two names begin with the same word ("index_..."), one may be
# a number of blocks and the other their size, so their product is a threshold, too.
SELECTION_FIELDS = re.compile(r"top_?k|blocks|pool|chunks")
BLOCK_FIELDS = re.compile(r"pool|block_size")  # sizes of blocks; a "pool" may be a number or a size
# Field of DeepSeek-V4: for each kind of layer, the number of tokens that are compressed to one key. In layers of the
# kind INDEXED_KIND, `index_topk` counts compressed keys.
RATES_FIELD = "compress_rates"
INDEXED_KIND = "compressed_sparse_attention"
POSITIONS_FIELD = "max_position_embeddings"
ROPE_LENGTH_FIELDS = ("original_max_position_embeddings", POSITIONS_FIELD)


def thresholds(
    config: PreTrainedConfig, max_length: int | None, shortest: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the thresholds of a model, in tokens, by the names of their fields, in two dictionaries.

    Args:
        max_length: longest document of the run, in tokens; None is the model's number of positions.
        shortest: length of a document that is tested in any case. Thresholds below it need no other test.

    Returns:
        The thresholds to test, below `max_length`, and those that no document of the run exceeds, from `max_length` to
        the number of positions. Neither dictionary has a threshold above the number of positions, because no document
        of the model can exceed it.
    """
    stored_positions = vars(config).get(config.attribute_map.get(POSITIONS_FIELD, POSITIONS_FIELD))
    num_positions = stored_positions if isinstance(stored_positions, int) else inf
    longest = num_positions if max_length is None else max_length
    lengths = _length_fields(vars(config)) | _rope_thresholds(config)
    to_test = {name: n for name, n in lengths.items() if shortest <= n < longest}
    # The number of positions may itself be a threshold: dynamic RoPE has other angles in longer documents. Without a
    # `max_length`, `longest` is this number, so `to_test` does not have it. Then the 1 adds it to `unreachable`, which
    # the report names as not tested.
    end = num_positions + 1 if max_length is None else num_positions
    unreachable = {name: n for name, n in lengths.items() if longest <= n < end}
    return to_test, unreachable


def _length_fields(fields: dict[str, Any]) -> dict[str, int]:
    """Return the thresholds that fields of a config may hold, in tokens, by the names of the fields."""

    def may_count_tokens(name: str) -> bool:
        return bool(KERNEL_FIELDS.search(name)) or OTHER_WORDS.isdisjoint(name.lower().split("_"))

    numbers = {name: n for name, n in fields.items() if _is_length(n) and may_count_tokens(name)}
    lengths = dict(numbers)
    for first, second in combinations(numbers, 2):
        begin_alike = first.split("_")[0] == second.split("_")[0]
        if begin_alike and (SELECTION_FIELDS.search(first) or SELECTION_FIELDS.search(second)):
            lengths[f"{first} * {second}"] = numbers[first] * numbers[second]
    rates = fields.get(RATES_FIELD)
    if isinstance(rates, dict):
        lengths |= {f"{RATES_FIELD}.{kind}": rate for kind, rate in rates.items() if _is_length(rate)}
        if "index_topk" in lengths:
            lengths["index_topk"] *= rates.get(INDEXED_KIND, 1)
    # A model that chooses positions in blocks may take the last, unfinished block in addition. For example, with 2
    # blocks of 4 positions it takes all of 11 positions, but not of 12.
    block_size = max((n for name, n in numbers.items() if BLOCK_FIELDS.search(name)), default=0)
    return {name: n + block_size if SELECTION_FIELDS.search(name) else n for name, n in lengths.items()}


def _rope_thresholds(config: PreTrainedConfig) -> dict[str, int]:
    """Return the lengths above which rotary embeddings have other angles, in tokens, by the names of their fields."""
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    lengths: dict[str, int] = {}
    layer_types: list[str | None] = [*nested_rope_keys(config, rope)]
    for layer_type in layer_types or [None]:
        parameters = rope if layer_type is None else rope[layer_type]
        if parameters is None:  # layers of this type have no rotary embedding
            continue
        for name in ROPE_LENGTH_FIELDS:
            length = parameters.get(name, vars(config).get(name))
            if _is_length(length) and _depends_on_length(config, parameters, layer_type, length=length):
                label = name
                if lengths.get(name, length) != length:  # another type of layers has another length
                    label = f"{name} of {layer_type}"
                lengths[label] = length
    return lengths


def _depends_on_length(
    config: PreTrainedConfig, parameters: dict[str, Any], layer_type: str | None, *, length: int
) -> bool:
    """Return whether a sequence longer than `length` has other angles of rotary embeddings.

    True for types of rotary embeddings that transformers does not know.

    Args:
        parameters: the parameters of the rotary embeddings of one type of layer.
        layer_type: this type; None if all layers have the same parameters.
    """
    rope_type = parameters.get("rope_type", "default")
    # "default" is the type of the plain angles, for which some versions of transformers have no function
    if rope_type not in ROPE_INIT_FUNCTIONS:
        return rope_type != "default"
    # The model chooses one of two lists of factors (`short_factor`) by the length; phimoe also has `short_mscale`.
    short_names = {name for name in parameters if name.startswith("short_")}
    if any(parameters[name] != parameters.get(name.replace("short_", "long_")) for name in short_names):
        return True
    # The longer sequence has twice the length, because one more token among many may change nothing in fp32.
    (frequencies, scale), (long_frequencies, long_scale) = (
        ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=n, layer_type=layer_type)
        for n in (length, 2 * length)
    )
    return scale != long_scale or not torch.equal(frequencies, long_frequencies)


def _is_length(value: object) -> TypeGuard[int]:
    """Return whether the value of a field can be a length in tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
