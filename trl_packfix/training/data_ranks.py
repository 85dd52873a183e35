"""Which ranks read data of their own: under tensor parallelism fewer than there are ranks."""

from dataclasses import dataclass

from .config import SFTConfig


@dataclass(frozen=True)
class DataRanks:
    """The place of this process among the data-parallel ranks.

    With `DistributedConfig(tp_size=...)` of transformers, `copies` neighbouring processes hold one model between them:
    its heads and features (tensor parallelism), its experts (expert parallelism), or both. They must run the same
    batches, so together they are one data-parallel rank. What each of them counts is counted so many times.

    Attributes:
        rank: of this process, among the data-parallel ranks.
        count: number of data-parallel ranks.
        copies: processes that run the same batches.
        index: of this process among these.
    """

    rank: int
    count: int
    copies: int
    index: int

    @classmethod
    def of(cls, args: SFTConfig, copies: int) -> "DataRanks":
        rank, index = divmod(args.process_index, copies)
        return cls(rank, args.world_size // copies, copies, index)
