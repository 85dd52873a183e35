"""Checks that all ranks have the same documents.

Each rank computes the plan of packs by itself and trains its share of the plan. If a rank had other documents than rank
0, its plan would differ: some documents would be trained twice and some never, and a rank with fewer steps would let
the other ranks wait for ever. `loading.py` and the callbacks call these checks before training and between its steps.
"""

from accelerate.utils import gather_object

from ..data.documents import Documents
from ..data.stream import PackedStream

SEED_REMEDY = "Give whatever is drawn in your script a seed, such as `train_test_split(seed=42)` or `shuffle(seed=42)`"


def check_same_documents(documents: Documents, name: str, world_size: int) -> None:
    """Raise ValueError on all ranks if a rank has other documents than rank 0. All ranks must call it.

    Args:
        documents: the documents of this rank. Their fingerprint is a hash of lengths and sampled tokens.
        name: how a message names the dataset, at the beginning of a sentence.
        world_size: the number of processes.
    """
    if world_size == 1:
        return
    # Number of documents, number of tokens and fingerprint of each rank
    summaries: list[tuple[int, int, str]] = gather_object(
        [(len(documents), int(documents.lengths.sum()), documents.fingerprint)]
    )
    for rank, summary in enumerate(summaries):
        if summary != summaries[0]:
            raise ValueError(
                f"{name} has {_describe_summary(*summaries[0])} on rank 0, and {_describe_summary(*summary)} on rank "
                f"{rank}. Each rank takes its share of the same plan, so documents would be trained or evaluated twice "
                "or never, and ranks with fewer steps would keep the others waiting. "
                f"{SEED_REMEDY}, and give all ranks the same files."
            )


def _describe_summary(num_documents: int, num_tokens: int, fingerprint: str) -> str:
    """Return how a message names the documents of a rank."""
    return f"{num_documents:,} documents of {num_tokens:,} tokens (fingerprint {fingerprint[:8]})"


def check_same_stream(stream: PackedStream, num_steps: int) -> None:
    """Raise ValueError on all ranks if ranks that share a stream have read different documents. All ranks must call it.

    Args:
        stream: the stream of this rank.
        num_steps: the number of optimizer steps that were trained.
    """
    # The position of this rank in the stream, as checkpoints save it. "count" is how many neighbouring ranks read the
    # same rows, and "digest" a hash of the documents that this rank has read
    state = stream.state_after(num_steps)
    rank_states: list[tuple[int, int]] = gather_object([(state["count"], state["digest"])])
    for rank, (num_sharing, digest) in enumerate(rank_states):
        first_rank = rank - rank % num_sharing  # of the ranks that read the same rows
        if digest != rank_states[first_rank][1]:
            raise ValueError(
                f"After {num_steps} optimizer steps, rank {rank} has read other documents of the stream than rank "
                f"{first_rank}. These ranks share one stream, so documents were trained twice or never. "
                f"{SEED_REMEDY} or "
                "`interleave_datasets(seed=42)`, and give all ranks the same files."
            )
