"""Every setting of planning, once: another value than tests start from, and what that value changes."""

from dataclasses import fields
from typing import Any, Literal, NamedTuple

from trl_packfix.planning.costs import CostModel
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.parallel import Speeds

START = {"strategy": "stream", "batch_size": 4, "max_length": 512, "accumulation": 2, "world_size": 2}


class Change(NamedTuple):
    """Value of a field of `Packing` that differs from `START`.

    Attributes:
        value: the other value; all other fields are as in `START`.
        changes: "packs" of the first epoch, only the "places" where packs are trained, or "nothing" here: without
            `tokens_per_rank` there is one degree, and sharing in packs changes no pack.
        compared_as: the name under which checkpoints have it; None if a restart may have any value.
        default: its value in checkpoints of versions that did not have it.
        on_streams: whether streams have it, too.
    """

    value: Any
    changes: Literal["packs", "places", "nothing"]
    compared_as: str | None = None
    default: Any = None
    on_streams: bool = True


CHANGES = {
    "max_length": Change(256, "packs", "max_length", default=8),  # it has no default, and tests set this one
    "strategy": Change("bfd", "packs", "packing_strategy", default="stream"),
    "overlong": Change("drop", "packs", "overlong", default="truncate"),
    "truncation_mode": Change("keep_end", "packs", "truncation_mode", default="keep_start"),
    "seed": Change(1, "packs", "seed", default=0, on_streams=False),
    "shuffle": Change(False, "packs", "shuffle", default=True, on_streams=False),
    "drop_last": Change(True, "places", "dataloader_drop_last", default=False, on_streams=False),
    "batch_size": Change(2, "packs", "per_device_train_batch_size", default=1),
    "accumulation": Change(1, "places", "gradient_accumulation_steps", default=1),
    "world_size": Change(4, "places", "world_size", default=1),
    "tokens_per_rank": Change(512, "packs", "tokens_per_rank", default=None),
    "share_prefixes": Change("pack", "nothing", "share_prefixes", default="off", on_streams=False),
    "buffer_size": Change(100, "packs", "buffer_size", default=1000),
    "balance": Change("none", "places"),
    "synchronisation": Change("step", "places"),
    "degrees": Change((1,), "nothing"),
    "speeds": Change(Speeds(ranks_per_node=4), "places"),
    "cost_model": Change(CostModel(1.0, 2.0), "places"),
    "evens_targets": Change(True, "places"),
}
assert CHANGES.keys() == {field.name for field in fields(Packing)}, "a field of `Packing` is missing"
