"""Sums over batches, added on the device: of training, gathered over ranks once per logging step, and of evaluation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional as F

from ..data.collator import IGNORE_INDEX
from ..data.row_values import MAX_SOURCES, StreamSources
from ..layout import Targets
from .lm_head import TokenScores


@dataclass
class StepSpan:
    """Sums over the optimizer steps since the last log, or over all steps of a training."""

    sums: dict[str, float]  # by name, over all ranks
    num_steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds for batches, on this rank

    def add(self, other: "StepSpan") -> None:
        self.sums = {name: value + other.sums.get(name, 0.0) for name, value in self.sums.items()}
        self.num_steps += other.num_steps
        self.seconds += other.seconds
        self.waited += other.waited


class TrainingTotals:
    """Sums over the trained batches; `set_sources` begins anew.

    Sums of batches (`OF_BATCHES`) are counted when batches are fetched, so they are right for any loss. Sums of outputs
    (`OF_OUTPUTS`) and by source exist only if our loss was computed.
    """

    # `tokens` are those of documents, `computed` those of them that the model computes: fewer if prefixes are shared.
    # `micro_batches` counts packs, `rows` their parts: as many unless ranks share packs.
    OF_BATCHES = ("trained_tokens", "tokens", "computed", "row_tokens", "documents", "micro_batches", "rows", "flops")
    OF_OUTPUTS = ("entropy", "correct", "scored", "aux_loss")  # `scored` counts labels

    def __init__(self, sources: Sequence[str] = (), shares_prefixes: bool = False) -> None:
        self.shares_prefixes = shares_prefixes
        self.set_sources(sources)

    def set_sources(self, sources: Sequence[str], of_stream: StreamSources | None = None) -> None:
        """Sum losses by these sources from now on, or by those that ranks meet in a stream."""
        self._of_stream = of_stream
        self._name_sources(sources)
        # Sums of this rank that are not gathered yet, on the device, by the group of their names
        self._pending: dict[tuple[str, ...], Tensor] = {}
        self._pending_of_stream: Tensor | None = None  # by source of a stream, as this rank numbers them
        self.num_documents = 0  # over all ranks
        self.is_scored = False  # outputs were added in this optimizer step
        self.training = StepSpan(dict.fromkeys(self._names, 0.0))  # all windows that have ended
        self._start_window()

    def _name_sources(self, sources: Sequence[str]) -> None:
        self.sources = sources
        self._of_sources = tuple(f"{name}/{source}" for name in ("loss", "trained_tokens") for source in sources)
        self._groups = [group for group in (self.OF_BATCHES, self.OF_OUTPUTS, self._of_sources) if group]
        self._names = [name for group in self._groups for name in group]

    def _start_window(self) -> None:
        """Begin a window, of what is summed up to the next log."""
        self.window = StepSpan(dict.fromkeys(self._names, 0.0))
        self._started: float | None = None  # set by the next fetch: evaluation and checkpoints do not count
        self._fetching = time.perf_counter()

    def end_window(self) -> StepSpan:
        """Add the window to those of the training, and begin another. Returns the one that ends."""
        window = self.window
        if self._started is not None:
            window.seconds = time.perf_counter() - self._started
        self.training.add(window)
        self._start_window()
        return window

    def start_fetch(self) -> None:
        """Called before the batches of the next optimizer step are fetched."""
        self._fetching = time.perf_counter()
        if self._started is None:
            self._started = self._fetching

    def start_step(self) -> None:
        """Called when these batches are fetched."""
        self.window.num_steps += 1
        self.is_scored = False
        self.window.waited += time.perf_counter() - self._fetching

    def add(self, names: tuple[str, ...], values: list[Tensor]) -> None:
        """Sums of one micro-batch on this rank, scalars in the order of `names`."""
        sums = torch.stack([value.detach().to(sum_dtype(value.device)) for value in values])
        self._pending[names] = sums + self._pending[names] if names in self._pending else sums

    def add_sources(self, loss: Tensor, label_mask: Tensor, sources: Tensor) -> None:
        """Add the losses and trained tokens of each source in one micro-batch on this rank, see `sums_by_source`."""
        num_sources = len(self.sources) if self._of_stream is None else MAX_SOURCES  # a stream is not known before
        sums = sums_by_source(loss, label_mask, sources, num_sources=num_sources)
        if self._of_stream is None:
            self.add(self._of_sources, list(sums.flatten()))
        else:
            before = self._pending_of_stream
            self._pending_of_stream = sums if before is None else before + sums

    def gather(self, accelerator: Accelerator, copies: int = 1) -> dict[str, float]:
        """Sum over all ranks what was added since the last call, of which `copies` ranks have counted the same.

        The sums are added to the window. All ranks must call.
        """
        if not self._pending:
            return dict.fromkeys(self._names, 0.0)
        if self._of_stream is not None:
            self._agree_on_sources(self._of_stream)
        dtype = next(iter(self._pending.values())).dtype
        parts = [self._pending.get(names, torch.zeros(len(names), dtype=dtype)) for names in self._groups]
        sums = torch.cat([part.to(accelerator.device) for part in parts])
        gathered = dict(zip(self._names, (accelerator.reduce(sums, reduction="sum") / copies).tolist(), strict=True))
        self._pending = {}
        self.window.add(StepSpan(gathered))
        self.num_documents += round(gathered["documents"])
        return gathered

    def _agree_on_sources(self, own: StreamSources) -> None:
        """Number the sources of a stream alike on all ranks: each rank has read different sources, in its own order."""
        everyone: list[list[str]] = gather_object([[*own]])
        names = sorted({name for of_rank in everyone for name in of_rank})
        if names != self.sources:
            self._name_sources(names)
            for span in (self.window, self.training):
                span.sums = dict.fromkeys(self._names, 0.0) | span.sums
        sums = self._pending_of_stream
        self._pending_of_stream = None
        if sums is not None and names:
            ordered = sums.new_zeros(2, len(names))
            ordered[:, [names.index(name) for name in own]] = sums[:, : len(own)]
            self._pending[self._of_sources] = ordered.flatten()

    def metrics(
        self, span: StepSpan, *, capacity: int | None, num_ranks: int = 1, peak_tflops: float | None = None
    ) -> dict[str, float]:
        """Compute the values that are logged for the steps of `span`.

        `capacity` is in tokens on one rank; without one, `efficiency` is the share of real tokens in the rows.
        """
        sums = span.sums
        elapsed = span.seconds
        # Of the labels that were scored: a subclass may change those of the batch, and prompt tuning adds one to a row
        scored = max(sums["scored"], 1.0)
        micro_batches = sums["micro_batches"]
        capacities = sums["row_tokens"] if capacity is None else sums["rows"] * capacity
        of_outputs = {
            "entropy": sums["entropy"] / scored,
            "mean_token_accuracy": sums["correct"] / scored,
            "aux_loss": sums["aux_loss"] / max(micro_batches, 1.0),
        }
        speed = {}
        if self.shares_prefixes:
            speed["computed_share"] = round(sums["computed"] / max(sums["tokens"], 1.0), 4)
        if sums["flops"] and elapsed:
            speed["tflops_per_second_per_rank"] = _round_value(sums["flops"] / elapsed / num_ranks / 1e12)
            if peak_tflops is not None:
                speed["mfu"] = _round_value(sums["flops"] / elapsed / num_ranks / 1e12 / peak_tflops)
        return (of_outputs if sums["scored"] else {}) | {
            "trained_tokens": round(sums["trained_tokens"]),
            "documents_per_step": round(sums["documents"] / max(span.num_steps, 1), 2),
            "efficiency": round(sums["computed"] / max(capacities, 1.0), 4),
            "tokens_per_second": round(sums["tokens"] / elapsed, 1) if elapsed else 0.0,
            "data_wait": round(span.waited / elapsed, 4) if elapsed else 0.0,
            **speed,
            **source_metrics(self.sources, [sums[name] for name in self._of_sources]),
        }


LOGGED = {  # keys of the log: unit, and what it is. docs/logging.md is made of these
    "entropy": ("nats", "of the predictions at trained tokens, mean"),
    "mean_token_accuracy": ("share", "trained tokens that the model ranks first"),
    "aux_loss": ("nats", "router loss of a mixture of experts, mean over micro-batches"),
    "trained_tokens": ("tokens", "trained, all ranks"),
    "documents_per_step": ("documents", "with a trained token, in an optimizer step, all ranks"),
    "efficiency": ("share", "tokens that are computed over the capacity of the micro-batches"),
    "tokens_per_second": ("tokens/s", "of documents, without padding, all ranks"),
    "data_wait": ("share", "of the time in which rank 0 waited for batches"),
    "computed_share": ("share", "tokens that are computed over those of the documents, with `share_prefixes`"),
    "tflops_per_second_per_rank": (
        "TFLOP/s",
        "of the documents, each as it costs alone ([FLOPs](gpus.md#flops-and-mfu))",
    ),
    "mfu": ("share", "the same over the peak of the device"),
    "num_tokens": ("tokens", "of documents, forwarded since training began, all ranks"),
    "loss/NAME": ("nats per token", "of a source (`source_column`), without weights"),
    "trained_tokens/NAME": ("tokens", "of a source"),
    "train_samples_per_second": ("documents/s", "of the whole training, in its last log"),
}


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums for the log: fp64 where the device has it, else fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_by_source(loss: Tensor, label_mask: Tensor, sources: Tensor, *, num_sources: int) -> Tensor:
    """Return the loss and the trained tokens of each source, (2, S).

    The arguments have one value for each position, or for each target of a document.
    """
    sums = torch.zeros(2, num_sources, dtype=sum_dtype(loss.device), device=loss.device)
    values = torch.stack([(loss.detach() * label_mask).flatten(), label_mask.flatten()]).to(sums.dtype)
    return sums.scatter_add_(1, sources.flatten().expand(2, -1), values)


def source_metrics(sources: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the mean loss and the trained tokens of each source that has a trained token.

    `sums` has first the loss of each source, then its trained tokens.
    """
    pairs = zip(sources, sums[: len(sources)], sums[len(sources) :], strict=True)
    seen = [(source, loss, tokens) for source, loss, tokens in pairs if tokens]
    losses = {f"loss/{source}": loss / tokens for source, loss, tokens in seen}
    return losses | {f"trained_tokens/{source}": round(tokens) for source, _, tokens in seen}


def _round_value(value: float) -> float:
    """Round to four significant digits, which also suits the small values of small models on a CPU."""
    return float(f"{value:.4g}")


class EvaluationTotals:
    """Sums over the trained tokens of an evaluation set, on one rank; losses also by source."""

    def __init__(self, device: torch.device, names: Sequence[str] = ()):
        self.names = names
        # loss, entropy, correct, trained tokens; losses by source; trained tokens by source
        self.sums = torch.zeros(4 + 2 * len(names), dtype=sum_dtype(device), device=device)

    def add(self, scores: Any, targets: Targets, sources: Tensor | None = None) -> Tensor:
        """Add a batch, with the source of each target, and return the mean loss of the batch."""
        of_tokens = (-scores.log_probs, scores.entropy, scores.is_top1, scores.label_mask)
        values = [targets.select(tensor) for tensor in of_tokens]
        batch = torch.stack([x.sum(dtype=self.sums.dtype) for x in values])
        self.sums[:4] += batch
        if sources is not None:
            by_source = sums_by_source(values[0], values[3], sources, num_sources=len(self.names))
            self.sums[4:] += by_source.flatten()
        return batch[0] / batch[3].clamp(min=1)

    def metrics(self, accelerator: Accelerator, copies: int = 1) -> dict[str, float]:
        """Return means over all ranks, of which `copies` have counted each token; empty without a trained token."""
        loss, entropy, correct, tokens, *by_source = (accelerator.reduce(self.sums, reduction="sum") / copies).tolist()
        if not tokens:
            return {}
        metrics = {"loss": loss / tokens, "entropy": entropy / tokens, "mean_token_accuracy": correct / tokens}
        return metrics | source_metrics(self.names, by_source)


def scores_of(logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None) -> TokenScores:
    """Return the scores of full logits (B, T, V) for labels (B, T); with prompt tuning the logits have more positions.

    `shift_labels` (B, T) are the labels of the next token, of a part of a pack: the last one is not in `labels`.
    """
    if shift_labels is None:
        num_virtual = logits.shape[1] - labels.shape[1]  # tokens of prompt tuning before each row, without labels
        logits = logits[:, :-1]
        shift_labels = F.pad(labels, (num_virtual, 0), value=IGNORE_INDEX)[:, 1:]
    logits = logits.float()
    log_probs = F.log_softmax(logits, dim=-1)
    mask = shift_labels != IGNORE_INDEX
    loss = F.nll_loss(log_probs.transpose(1, 2), shift_labels, ignore_index=IGNORE_INDEX, reduction="none")
    entropy = -(log_probs.exp() * log_probs).sum(-1) * mask
    is_top1 = (logits.argmax(-1) == shift_labels) & mask
    return TokenScores(log_probs=-loss, entropy=entropy, is_top1=is_top1, label_mask=mask)
