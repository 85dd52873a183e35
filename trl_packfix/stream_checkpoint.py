"""The stream and the Trainer: its state comes back from a checkpoint, its counts go into the report."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from .accounting import make_stream_report
from .streaming import PackedStream, StreamCounts, stream_file


def resume(stream: PackedStream, checkpoint: str, num_steps: int, num_skipped: int, ignore_data_skip: bool) -> None:
    """Set the stream to where it was after `num_steps` steps; the Trainer then throws `num_skipped` batches away.

    Raises:
        ValueError: the state of this rank is not there; what `PackedStream.load_state_dict` refuses.
    """
    file = stream_file(checkpoint, stream.rank)
    if ignore_data_skip:
        stream.begin(num_steps)
        return
    if not file.is_file():
        raise ValueError(
            f"`resume_from_checkpoint={checkpoint!r}` was given and has no `{file.name}`, which says where the stream "
            f"of rank {stream.rank} of {stream.world_size} was. More ranks than before, or a checkpoint that lies on "
            "another node, cannot be continued. Launch as many ranks as before and copy the checkpoint to every node, "
            "or set `ignore_data_skip=True` to begin the stream anew."
        )
    stream.load_state_dict(torch.load(file, weights_only=True), num_skipped)


class StreamCallback(TrainerCallback):
    """Reports, with each checkpoint and at the end, what was read and trained.

    Raises:
        ValueError: when training begins, the ranks read different streams.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1:
            return
        first = next(iter(self.trainer.train_dataset))["input_ids"]
        firsts = gather_object([np.asarray(first).tolist()])
        other = [rank for rank in range(args.world_size) if firsts[rank] != firsts[0]]
        if other:
            raise ValueError(
                f"The stream begins with {len(firsts[0])} tokens on rank 0 and with others on {len(other)} of "
                f"{args.world_size} ranks (the first is rank {other[0]}). Ranks share one stream, and if each reads "
                "another, documents are trained twice or never. Give `shuffle` a `seed`, and every rank the same files."
            )

    def on_save(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self._report(args, train_dataloader.dataset, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self._report(args, train_dataloader.dataset, state.global_step)
        if args.packing_report and self.trainer.is_world_process_zero():
            self.trainer.packing_report.show()

    def _report(self, args: Any, stream: PackedStream, num_steps: int) -> None:
        """The report again, with what was read and trained until so many steps; all ranks together."""
        counts, before = stream.counts(num_steps), self.trainer.packing_report
        if stream.share.count < stream.world_size:  # each rank knows its own shards only
            counts = sum(gather_object([counts]), StreamCounts())
        report = make_stream_report(stream, args.max_steps, counts)
        self.trainer.packing_report = replace(report, attention=before.attention, isolation=before.isolation)
        if args.packing_report and self.trainer.is_world_process_zero():
            self.trainer.packing_report.save(args.output_dir)
