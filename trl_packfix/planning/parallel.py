"""The settings of sequence parallelism: which degrees a run may use, and how fast its devices and links are.

With sequence parallelism, a *group* of neighbouring ranks shares a pack, and each rank holds a *part* of its tokens.
The *degree* is the number of ranks in a group. `Packing.parallel` (`packing.py`) makes these settings from the config,
and `degrees.py` chooses by them the degree of each micro-step: the micro-batches that all ranks compute at the same
time.
"""

from dataclasses import dataclass, field

# Packs are planned to this share of the capacity. `degrees.py` later deals documents anew to groups of other sizes. If
# all packs were full, the documents would hardly fit another way.
FILL = 0.95


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How fast a device and its links are. The defaults fit GPUs of the H100 class.

    Only the ratios between these speeds decide which degrees are chosen.
    """

    flops: float = 400e12  # floating-point operations per second of one device in training
    within: float = 300e9  # bytes per second that a device sends to devices of its own node in an all-to-all
    between: float = 50e9  # bytes per second that it sends to devices of other nodes
    latency_within: float = 20e-6  # seconds of an all-to-all within a node, whatever it sends
    latency_between: float = 60e-6  # seconds of an all-to-all between nodes, whatever it sends
    ranks_per_node: int = 8  # ranks are numbered node after node
    # FLOPs of a training step / FLOPs of a forward pass: one forward, one recomputed, and two for backward
    passes: float = 4.0
    exchanging_passes: int = 3  # passes in which attention exchanges tokens: forward, recomputed forward, backward
    bytes_per_value: int = 2  # bytes of a number in bf16 or fp16


def smallest_degree(max_length: int, tokens_per_rank: int) -> int:
    """Return the smallest degree, a power of two, with room for a document of `max_length` tokens.

    >>> smallest_degree(131072, 16384), smallest_degree(100_000, 16384), smallest_degree(8192, 16384)
    (8, 8, 1)
    """
    # 2 to the number of bits of n - 1 is the smallest power of two from n on
    return 1 << (-(-max_length // tokens_per_rank) - 1).bit_length()


def possible_degrees(
    max_length: int, tokens_per_rank: int, world_size: int, *, num_heads: int | None = None
) -> tuple[int, ...]:
    """Return the degrees that a run may use, ascending: powers of two that divide the number of ranks.

    Args:
        max_length: most tokens of a document.
        tokens_per_rank: most tokens of a pack on one rank.
        world_size: number of ranks.
        num_heads: attention heads of the model; None if not known. No degree is above this number, because each rank of
            a group computes at least one head. A degree need not divide it.

    Raises:
        ValueError: a group of the largest possible degree cannot hold a document of `max_length`.

    >>> possible_degrees(131072, 16384, 24)
    (1, 2, 4, 8)
    """
    heads = num_heads or world_size
    divisor = world_size & -world_size  # the largest power of two that divides the number of ranks
    degrees = tuple(1 << i for i in range(divisor.bit_length()) if 1 << i <= heads)
    needed = smallest_degree(max_length, tokens_per_rank)
    if needed > degrees[-1]:
        reason = f"the model has {heads} attention heads" if divisor > heads else f"there are {world_size} ranks"
        remedies = "or raise `tokens_per_rank`"
        if num_heads is None or needed <= num_heads:  # with fewer heads, more ranks would not help
            remedies = f"raise `tokens_per_rank`, or train on a multiple of {needed} ranks"
        raise ValueError(
            f"`max_length={max_length}` was given with `tokens_per_rank={tokens_per_rank}` on {world_size} ranks. A "
            f"document of that length needs a group of {needed} ranks, and {reason}, so groups have at most "
            f"{degrees[-1]}: their size is a power of two that divides the number of ranks, with a head for each rank. "
            f"Set `max_length` to {degrees[-1] * tokens_per_rank} or less, {remedies}."
        )
    return degrees


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """How the ranks of a run share packs. By default, every rank has packs of its own."""

    tokens_per_rank: int  # most tokens of a pack on one rank
    smallest: int = 1  # the smallest degree that holds a document of `max_length`; packs are planned for it
    degrees: tuple[int, ...] = (1,)  # the degrees that may be chosen, ascending; `smallest` is one of them
    # Packs are planned to this share of the tokens that a group of `smallest` ranks holds: `FILL` if ranks share packs
    fill: float = 1.0
    speeds: Speeds = field(default_factory=Speeds)
