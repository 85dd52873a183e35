"""The settings of sequence parallelism: which degrees a run may use, and what its devices and links reach."""

from dataclasses import dataclass, field

FILL = 0.95  # with sequence parallelism: steps that are full to the token cannot be dealt at a low degree


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a device and its links reach; defaults are those of GPUs of the H100 class. Only ratios decide."""

    flops: float = 400e12  # operations per second of one device in training
    within: float = 300e9  # bytes per second that a device sends in an all-to-all to devices of its own node
    between: float = 50e9  # and to others
    latency_within: float = 20e-6  # seconds that an all-to-all takes whatever it sends
    latency_between: float = 60e-6
    ranks_per_node: int = 8  # ranks are numbered node after node
    passes: float = 4.0  # FLOPs of a training step over those of a forward pass: it, recomputed, and two backward
    exchanging_passes: int = 3  # in which attention exchanges tokens: forward, recomputed, backward
    bytes_per_value: int = 2  # of bf16 and fp16


def smallest_degree(max_length: int, tokens_per_rank: int) -> int:
    """The smallest power of two with room for a document of `max_length` tokens.

    >>> smallest_degree(131072, 16384), smallest_degree(100_000, 16384), smallest_degree(8192, 16384)
    (8, 8, 1)
    """
    return 1 << (-(-max_length // tokens_per_rank) - 1).bit_length()


def possible_degrees(
    max_length: int, tokens_per_rank: int, world_size: int, *, num_heads: int | None = None
) -> tuple[int, ...]:
    """The degrees that a run may use: powers of two that divide the ranks and do not exceed the attention heads.

    Raises:
        ValueError: none of them holds a document of `max_length`.

    >>> possible_degrees(131072, 16384, 24)
    (1, 2, 4, 8)
    """
    heads = num_heads or world_size
    divisor = world_size & -world_size
    degrees = tuple(1 << i for i in range(divisor.bit_length()) if 1 << i <= heads)
    needed = smallest_degree(max_length, tokens_per_rank)
    if needed > degrees[-1]:
        why = f"the model has {heads} attention heads" if divisor > heads else f"there are {world_size} ranks"
        raise ValueError(
            f"`max_length={max_length}` was given with `tokens_per_rank={tokens_per_rank}` on {world_size} ranks. A "
            f"document of that length needs a group of {needed} ranks, and {why}, so groups have at most "
            f"{degrees[-1]}: their size is a power of two that divides the number of ranks, with a head for each rank. "
            f"Set `max_length` to {degrees[-1] * tokens_per_rank} or less, raise `tokens_per_rank`, or train on a "
            f"multiple of {needed} ranks."
        )
    return degrees


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """How the ranks of a run share packs. Without sequence parallelism each has its own."""

    tokens_per_rank: int  # C, most tokens of a pack on one rank
    smallest: int = 1  # S, the smallest degree that holds a document of `max_length`: packs are planned for it
    degrees: tuple[int, ...] = (1,)  # those that may be chosen, ascending; S is one of them
    fill: float = 1.0  # packs are planned to this share of the tokens that the ranks hold
    speeds: Speeds = field(default_factory=Speeds)
