"""Checks that all ranks have the same data. Each rank plans alone, and takes its share of the same plan.

With other documents on a rank, some would be trained twice and others never, and ranks with fewer steps would keep the
others waiting for ever.
"""

from accelerate.utils import gather_object

from ..data.documents import Documents
from ..data.stream import PackedStream

SEED = "Give whatever is drawn in your script a seed, such as `train_test_split(seed=42)` or `shuffle(seed=42)`"


def check_same_documents(documents: Documents, name: str, world_size: int) -> None:
    """Raise ValueError on all ranks if a rank has other documents than rank 0. All ranks must call it.

    Args:
        documents: those of this rank, with their fingerprint.
        name: what they are, as the beginning of a sentence names it.
        world_size: the number of processes.
    """
    if world_size == 1:
        return
    on_ranks: list[tuple[int, int, str]] = gather_object(
        [(len(documents), int(documents.lengths.sum()), documents.fingerprint)]
    )
    other = next((rank for rank, found in enumerate(on_ranks) if found != on_ranks[0]), None)
    if other is None:
        return
    first, second = (
        f"{num:,} documents of {tokens:,} tokens (fingerprint {fingerprint[:8]})"
        for num, tokens, fingerprint in (on_ranks[0], on_ranks[other])
    )
    raise ValueError(
        f"{name} has {first} on rank 0, and {second} on rank {other}. Each rank takes its share of the same plan, so "
        "documents would be trained or evaluated twice or never, and ranks with fewer steps would keep the others "
        f"waiting. {SEED}, and give all ranks the same files."
    )


def check_same_stream(stream: PackedStream, num_steps: int) -> None:
    """Raise ValueError on all ranks if ranks that read the same stream have read other documents. All must call it.

    Args:
        stream: that of this rank.
        num_steps: optimizer steps that were trained.
    """
    state = stream.state_after(num_steps)
    on_ranks: list[tuple[int, int]] = gather_object([(state["count"], state["digest"])])
    for rank, (alike, digest) in enumerate(on_ranks):
        first = rank - rank % alike
        if digest != on_ranks[first][1]:
            raise ValueError(
                f"After {num_steps} optimizer steps, rank {rank} has read other documents of the stream than rank "
                f"{first}. These ranks share one stream, so documents were trained twice or never. {SEED} or "
                "`interleave_datasets(seed=42)`, and give all ranks the same files."
            )
