"""Lengths at which a model begins to treat a document in another way, read off its config.

Names say which fields are windows, chunks and the like. Which rotary embeddings depend on the length of the sequence,
and from which length on, is what transformers' own functions answer.
"""

import re
from math import inf
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

THRESHOLD = re.compile(
    r"window(_size|_len)?$|chunk_(size|length)$|block_size$|index_(topk|kpool)|conv_kernel|conv1d_width|d_conv$"
    r"|conv_L_cache"
)
POSITIONS = "max_position_embeddings"
ROPE_LENGTHS = ("original_max_position_embeddings", POSITIONS)


def thresholds(config: Any, max_length: int | None, shortest: int) -> tuple[dict[str, int], dict[str, int]]:
    """Thresholds in tokens, by name: those to test, and those that lie beyond `max_length` and are not tested.

    To test are those below `max_length` (None: the model's positions) that a document of `shortest` tokens does not
    pass. One that no document within the model's positions can pass is not a threshold of a shorter run.
    """
    positions = vars(config).get(config.attribute_map.get(POSITIONS, POSITIONS))
    positions = positions if isinstance(positions, int) else inf
    limit = positions if max_length is None else max_length
    found = {name: n for name, n in vars(config).items() if THRESHOLD.search(name) and _is_length(n)}
    found |= _rope_thresholds(config)
    to_test = {name: n for name, n in found.items() if shortest <= n < limit}
    return to_test, {name: n for name, n in found.items() if limit <= n < positions}


def _rope_thresholds(config: Any) -> dict[str, int]:
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    found = {}
    for layer_type in config.nested_rope_parameter_keys(rope) or [None]:
        parameters = rope if layer_type is None else rope[layer_type]
        for name in ROPE_LENGTHS:
            length = (parameters or {}).get(name, vars(config).get(name))
            if _is_length(length) and _depends_on_length(config, parameters, layer_type, length):
                found[name] = length
    return found


def _depends_on_length(config: Any, parameters: dict[str, Any], layer_type: str | None, length: int) -> bool:
    """Whether a sequence longer than `length` has other angles; so it may be where the type is not transformers'."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_INIT_FUNCTIONS:
        return rope_type != "default"
    short = {name for name in parameters if name.startswith("short_")}  # phimoe scales the angles by such a pair, too
    if any(parameters[name] != parameters.get(name.replace("short_", "long_")) for name in short):
        return True
    # Twice as long: in fp32 one token more among many does not show.
    within, beyond = (
        ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=n, layer_type=layer_type)
        for n in (length, 2 * length)
    )
    return within[1] != beyond[1] or not torch.equal(within[0], beyond[0])


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
