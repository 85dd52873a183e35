"""The stream and the Trainer: its state goes into checkpoints and comes back from them, its counts into the report."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .accounting import make_stream_report
from .streaming import PackedStream, StreamCounts

logger = logging.getLogger(__name__)


def state_file(checkpoint: str | Path, rank: int) -> Path:
    """Where the state of one rank's stream is in a checkpoint."""
    return Path(checkpoint) / f"packed_stream_{rank}.pt"


def resume(stream: PackedStream, checkpoint: str, num_steps: int, num_skipped: int, ignore_data_skip: bool) -> None:
    """Set the stream to where it was after `num_steps` steps; the Trainer then throws `num_skipped` batches away."""
    file = state_file(checkpoint, stream.rank)
    if ignore_data_skip:
        stream.begin(num_steps)
    elif file.is_file():
        stream.load_state_dict(torch.load(file, weights_only=True), num_skipped)
    else:
        logger.warning(
            "%s does not exist: the stream is read and packed again from its first document. That leads to the same "
            "batches, and takes as long as the first time.",
            file,
        )


class StreamCallback(TrainerCallback):
    """Saves the state of every rank's stream with each checkpoint, and reports then and at the end what was read.

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
        stream = train_dataloader.dataset
        self._report(args, stream, state.global_step)
        if args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # each node saves the states of its own ranks
        torch.save(stream.state_dict(state.global_step), state_file(folder, args.process_index))

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
