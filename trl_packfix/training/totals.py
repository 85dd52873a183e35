"""Sums over the trained batches, for the log: added on the device, gathered over ranks once per logging step."""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback


class TrainingTotals(TrainerCallback):
    """Sums over the trained batches; reset when training begins.

    Sums of batches (`OF_BATCHES`) are counted when batches are fetched, so they are right for any loss. Sums of outputs
    (`OF_OUTPUTS`) exist only if our loss was computed.

    Attributes:
        window: sums over all ranks since the last log.
        num_steps: optimizer steps since the last log.
        is_scored: whether outputs were added in this optimizer step.
        waited: seconds that this rank waited for batches since the last log; `data_wait` is their share of the time.
        num_documents: over all ranks since training began.
    """

    # `micro_batches` counts packs, `rows` their parts: as many unless ranks share packs
    OF_BATCHES = ("trained_tokens", "tokens", "row_tokens", "documents", "micro_batches", "rows")
    OF_OUTPUTS = ("entropy", "correct", "aux_loss", "scored")
    GROUPS = (OF_BATCHES, OF_OUTPUTS)
    NAMES = OF_BATCHES + OF_OUTPUTS

    def __init__(self) -> None:
        self.reset()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reset()

    def reset(self) -> None:
        # Sums of this rank that are not gathered yet, on the device, by the group of their names
        self._pending: dict[tuple[str, ...], Tensor] = {}
        self.num_documents = 0
        self.is_scored = False
        self.start_window()

    def start_window(self) -> None:
        self.window = dict.fromkeys(self.NAMES, 0.0)
        self.num_steps = 0
        self.started: float | None = None  # set by the next fetch: evaluation and checkpoints do not count
        self.waited = 0.0
        self._fetching = time.perf_counter()

    def start_fetch(self) -> None:
        """Called before the batches of the next optimizer step are fetched."""
        self._fetching = time.perf_counter()
        if self.started is None:
            self.started = self._fetching

    def start_step(self) -> None:
        """Called when these batches are fetched."""
        self.num_steps += 1
        self.is_scored = False
        self.waited += time.perf_counter() - self._fetching

    def add_batch(self, values: list[Tensor]) -> None:
        """Sums of one micro-batch on this rank, scalars in the order of `OF_BATCHES`."""
        self._add(self.OF_BATCHES, values)

    def add_outputs(self, values: list[Tensor]) -> None:
        """Sums over the outputs of one micro-batch on this rank, scalars in the order of `OF_OUTPUTS`."""
        self._add(self.OF_OUTPUTS, values)
        self.is_scored = True

    def _add(self, names: tuple[str, ...], values: list[Tensor]) -> None:
        dtype = torch.float32 if values[0].device.type == "mps" else torch.float64
        sums = torch.stack([value.detach().to(dtype) for value in values])
        self._pending[names] = sums + self._pending[names] if names in self._pending else sums

    def gather(self, accelerator: Any) -> dict[str, float]:
        """Sum over all ranks what was added since the last call, and add it to the window. All ranks must call."""
        if not self._pending:
            return dict.fromkeys(self.NAMES, 0.0)
        dtype = next(iter(self._pending.values())).dtype
        parts = [self._pending.get(names, torch.zeros(len(names), dtype=dtype)) for names in self.GROUPS]
        sums = torch.cat([part.to(accelerator.device) for part in parts])
        gathered = dict(zip(self.NAMES, accelerator.reduce(sums, reduction="sum").tolist(), strict=True))
        self._pending = {}
        self.window = {name: self.window[name] + value for name, value in gathered.items()}
        self.num_documents += round(gathered["documents"])
        return gathered

    def metrics(self, capacity: int | None) -> dict[str, float]:
        """The values logged for the window.

        Args:
            capacity: most tokens of a pack on one rank. None if micro-batches are not filled: then `efficiency` is the
                share of real tokens in the rows.
        """
        sums, elapsed = self.window, time.perf_counter() - (self.started or time.perf_counter())
        trained, micro_batches = max(sums["trained_tokens"], 1.0), sums["micro_batches"]
        capacities = sums["row_tokens"] if capacity is None else sums["rows"] * capacity
        of_outputs = {
            "entropy": sums["entropy"] / trained,
            "mean_token_accuracy": sums["correct"] / trained,
            "aux_loss": sums["aux_loss"] / max(micro_batches, 1.0),
        }
        return (of_outputs if sums["scored"] else {}) | {
            "trained_tokens": round(sums["trained_tokens"]),
            "documents_per_step": round(sums["documents"] / max(self.num_steps, 1), 2),
            "efficiency": round(sums["tokens"] / max(capacities, 1.0), 4),
            "tokens_per_second": round(sums["tokens"] / elapsed, 1) if elapsed else 0.0,
            "data_wait": round(self.waited / elapsed, 4) if elapsed else 0.0,
        }
