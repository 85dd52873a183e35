"""Batches of a stream on the device, and restarts of streams."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from .loaders import document_loader
from .stream import PackedStream
from .stream_images import ProcessedPacks

logger = logging.getLogger(__name__)


def stream_loader(
    stream: PackedStream,
    collate: Callable[[Any], dict[str, Any]],
    device: torch.device | None,
    *,
    pin_memory: bool,
    num_workers: int = 0,
    worker_kwargs: dict[str, Any] | None = None,
) -> DataLoaderShard:
    """Batches of the stream, on the device. Images are processed in `num_workers` processes of their own."""
    if stream.rows.process is None:
        num_workers = 0
    settings = dict(worker_kwargs or {}) if num_workers else {}
    if not settings.pop("in_order", True) and stream.rank == 0:
        logger.warning(
            "dataloader_in_order=False was given; packs with images of a stream stay in order, because a restart goes "
            "on behind the last one."
        )
    stream.num_ahead = num_workers * (settings.get("prefetch_factor") or 2)
    settings |= {"num_workers": num_workers, "pin_memory": pin_memory}
    return document_loader(ProcessedPacks(stream.rows.process), stream, collate, device=device, **settings)


def stream_file(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / f"packed_stream_{rank}.pt"


def resume(stream: PackedStream, checkpoint: str, num_steps: int, *, num_skipped: int, ignore_data_skip: bool) -> None:
    """Set the stream to its state after `num_steps` steps. The Trainer then discards `num_skipped` batches."""
    if ignore_data_skip:
        stream.begin(num_steps)
        return
    state = _saved(checkpoint, stream.rank, stream) if stream_file(checkpoint, stream.rank).is_file() else None
    if state is None or not stream.continues(state):
        first = _saved(checkpoint, 0, stream)
        states = [_saved(checkpoint, rank, stream) for rank in range(first["settings"]["world_size"])]
        state = stream.merged(states)
        if stream.rank == 0:
            waiting = sum(len(one["documents"]["lengths"]) for one in states[:: first["count"]])
            how = "every rank reads all of it" if state["count"] > stream.num_alike else "divided between the ranks"
            logger.warning(
                f"Resuming a stream of {len(states)} ranks on {stream.packing.world_size}: {waiting:,} documents that "
                f"wait for a pack, and the rest of pass {state['num_passes'] + 1}, are packed anew ({how}). Random "
                "numbers (dropout) differ."
            )
    stream.load_state_dict(state, num_skipped)


def _saved(checkpoint: str, rank: int, stream: PackedStream) -> dict[str, Any]:
    file = stream_file(checkpoint, rank)
    if not file.is_file():
        raise ValueError(
            f"`resume_from_checkpoint={checkpoint!r}` was given on {stream.packing.world_size} ranks and has no "
            f"`{file.name}`, the position in the stream of rank {rank}. It is on another node, and another number of "
            "ranks needs the positions of all. Copy all of it to every node, or set `ignore_data_skip=True` to start "
            "the stream from its beginning."
        )
    return torch.load(file, weights_only=True)
