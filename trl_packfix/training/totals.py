"""Sums over what was trained, for the log: added on the device, brought together once per logging step."""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback


class TrainingTotals(TrainerCallback):
    """Sums over what was trained; reset when training begins.

    Attributes:
        pending: sums of this rank that no other rank has heard of, on the device, shape (len(NAMES),); None: nothing.
        window: sums over all ranks since the last log.
        num_steps: optimizer steps since the last log.
        waited: seconds in which this rank had no batch, since the last log; `data_wait` is their share.
        num_documents: over all ranks since training began.
    """

    NAMES = ("entropy", "correct", "trained_tokens", "tokens", "row_tokens", "documents", "micro_batches", "aux_loss")

    def __init__(self) -> None:
        self.reset()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reset()

    def reset(self) -> None:
        self.pending: Tensor | None = None
        self.num_documents = 0
        self.start_window()

    def start_window(self) -> None:
        self.window = dict.fromkeys(self.NAMES, 0.0)
        self.num_steps = 0
        self.started: float | None = None  # evaluation and checkpoints between two windows do not count
        self.waited = 0.0
        self._fetching = time.perf_counter()

    def start_fetch(self) -> None:
        """The batches of the next optimizer step are asked for."""
        self._fetching = time.perf_counter()
        if self.started is None:
            self.started = self._fetching

    def start_step(self) -> None:
        """They are there."""
        self.num_steps += 1
        self.waited += time.perf_counter() - self._fetching

    def add(self, values: list[Tensor]) -> None:
        """Sums of one micro-batch on this rank, scalars in the order of `NAMES`."""
        dtype = torch.float32 if values[0].device.type == "mps" else torch.float64
        sums = torch.stack([value.detach().to(dtype) for value in values])
        self.pending = sums if self.pending is None else self.pending + sums

    def gather(self, accelerator: Any) -> dict[str, float]:
        """What all ranks have added since the last call, which also enters the window; all ranks must call."""
        if self.pending is None:
            return dict.fromkeys(self.NAMES, 0.0)
        sums = accelerator.reduce(self.pending, reduction="sum").tolist()
        self.pending = None
        gathered = dict(zip(self.NAMES, sums, strict=True))
        self.window = {name: self.window[name] + value for name, value in gathered.items()}
        self.num_documents += round(gathered["documents"])
        return gathered

    def metrics(self, capacity: int | None) -> dict[str, float]:
        """What is logged about the window. `capacity`: most tokens of a pack; None: rows are as long as they are."""
        sums, elapsed = self.window, time.perf_counter() - (self.started or time.perf_counter())
        trained, micro_batches = max(sums["trained_tokens"], 1.0), sums["micro_batches"]
        room = sums["row_tokens"] if capacity is None else micro_batches * capacity
        return {
            "entropy": sums["entropy"] / trained,
            "mean_token_accuracy": sums["correct"] / trained,
            "trained_tokens": round(sums["trained_tokens"]),
            "documents_per_step": round(sums["documents"] / max(self.num_steps, 1), 2),
            "efficiency": round(sums["tokens"] / max(room, 1.0), 4),
            "tokens_per_second": round(sums["tokens"] / elapsed, 1) if elapsed else 0.0,
            "data_wait": round(self.waited / elapsed, 4) if elapsed else 0.0,
            "aux_loss": sums["aux_loss"] / max(micro_batches, 1.0),
        }
