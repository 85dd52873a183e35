"""Sum what batches contain and what the model gives for them, and make the values of the log from the sums.

In training, the loss (`objective.py`) adds the sums of each micro-batch to `TrainingTotals`, on the device and without
waiting for it. Once per log the sums are gathered over all ranks, and `metrics` makes the logged values from them. An
evaluation (`evaluation.py`) adds its batches to `EvaluationTotals`, and gathers them once, at its end.

Words: A *trained token* is a token with a label. A *target* is a pair of a document and a trained token (`layout.py`).
A *source* is the name of the data set from which a document comes (`source_column`); losses are also logged by source.
A *window* is the time between two logs. With sequence parallelism the ranks of a *group* share a pack. *Copies* are
ranks that count the same tokens, because they divide one model between them (tensor parallelism). A *dummy* is a batch
without a trained token, for a rank that has no document in a micro-batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional as F

from ..data.collator import IGNORE_INDEX
from ..data.row_values import MAX_SOURCES, StreamSources
from ..group import Group
from ..layout import Sizes, Targets
from .lm_head import TokenScores


@dataclass(frozen=True)
class FetchedBatch:
    """What is counted of a micro-batch when it is fetched.

    Attributes:
        sizes: tokens of its documents, and how many of them this rank computes, as tensors ().
        trained: number of trained tokens of each document, (N,), in all parts of the pack.
        num_row_tokens: number of tokens on this rank, with padding.
        flops: FLOPs of forward and backward, ().
        group: the ranks that share the pack. Numbers of the whole pack are counted by its first rank only.
    """

    sizes: Sizes
    trained: Tensor
    num_row_tokens: int
    flops: Tensor
    group: Group


@dataclass(frozen=True)
class ScoredBatch:
    """What is counted of a micro-batch when the model has computed it.

    Attributes:
        outputs: the outputs of the model, with `entropy`, `is_top1` and `label_mask` of each position.
        targets: selects the values of these positions that count.
        aux_loss: the load-balancing loss of a mixture of experts, (); None if it is not trained.
    """

    outputs: Any
    targets: Targets
    aux_loss: Tensor | None

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the targets of one value per position."""
        return self.targets.select(values).sum()


# `group.count_once` is 0 on all ranks of a group but the first
OF_BATCHES: dict[str, Callable[[FetchedBatch], Tensor]] = {
    "trained_tokens": lambda batch: batch.group.count_once(batch.trained.sum()),
    "tokens": lambda batch: batch.group.count_once(batch.sizes.tokens),  # tokens of documents, without padding
    # Tokens that this rank computes, without padding: fewer than `tokens` if documents share prefixes
    "computed": lambda batch: batch.sizes.computed_rows,
    # Tokens on this rank, with padding. `torch.tensor` would synchronise with the device
    "row_tokens": lambda batch: batch.trained.new_full((), batch.num_row_tokens),
    "documents": lambda batch: batch.group.count_once((batch.trained > 0).sum()),
    # `micro_batches` counts packs and `rows` counts parts of packs on ranks. Dummies do not count in either
    "micro_batches": lambda batch: batch.group.count_once((batch.trained > 0).any()),
    "rows": lambda batch: (batch.trained > 0).any(),
    "flops": lambda batch: batch.group.count_once(batch.flops),
}
"""The sums over micro-batches, by name: what each batch adds when it is fetched. They are right for any loss."""

OF_OUTPUTS: dict[str, Callable[[ScoredBatch], Tensor]] = {
    "entropy": lambda batch: batch.sum(batch.outputs.entropy),
    "correct": lambda batch: batch.sum(batch.outputs.is_top1),
    "scored": lambda batch: batch.sum(batch.outputs.label_mask),  # number of labels
    "aux_loss": lambda batch: batch.targets.trained.new_zeros(()) if batch.aux_loss is None else batch.aux_loss,
}
"""The sums over outputs of the model, by name: what each batch adds. Only `Objective.compute_loss` adds them."""


@dataclass
class StepSpan:
    """Sums over a range of optimizer steps: the steps since the last log, or all steps of a training.

    Attributes:
        sums: sums over all ranks, by name.
        num_steps: number of optimizer steps.
        seconds: time of the steps, without evaluation and checkpoints before them.
        waited: seconds in which this rank waited for batches.
    """

    sums: dict[str, float]
    num_steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, span: "StepSpan") -> None:
        """Add the sums, steps and times of another span to this span. Sums without a name in this span are ignored."""
        self.sums = {name: value + span.sums.get(name, 0.0) for name, value in self.sums.items()}
        self.num_steps += span.num_steps
        self.seconds += span.seconds
        self.waited += span.waited


class TrainingTotals:
    """Sums over the batches of a training.

    There are three groups of sums: `OF_BATCHES`, `OF_OUTPUTS`, and the loss and the trained tokens of each source. The
    last two groups are added only if this package computes the loss.

    Args:
        sources: names of the sources by which losses are summed.
        shares_rows: whether packs compute common prefixes of documents once. Then the log says which share of the
            tokens is computed.

    Attributes:
        sources: names of the sources.
        is_scored: whether outputs of the model were added in this optimizer step, by which `callbacks.py` finds out
            whether the loss of this package runs.
        training: sums of all windows that have ended.
        window: sums of the running window.
    """

    def __init__(self, sources: Sequence[str] = (), shares_rows: bool = False) -> None:
        self.shares_rows = shares_rows
        self.set_sources(sources)

    def set_sources(self, sources: Sequence[str], stream_sources: StreamSources | None = None) -> None:
        """Set all sums to zero, and sum losses by these sources from now on.

        Args:
            sources: names of the sources of a table.
            stream_sources: the numbers of the sources of a stream. This rank numbers a source when it first reads it.
                None for a table.
        """
        self._stream_sources = stream_sources
        self._name_sources(sources)
        # Sums of this rank that are not gathered yet, on the device: a vector for each group, by the names of the group
        self._pending: dict[tuple[str, ...], Tensor] = {}
        # Sums by source of a stream that are not gathered yet, (2, `MAX_SOURCES`), by this rank's numbers of sources
        self._pending_by_source: Tensor | None = None
        self.is_scored = False
        self.training = StepSpan(dict.fromkeys(self._names, 0.0))
        self._start_window()

    def _name_sources(self, sources: Sequence[str]) -> None:
        """Set the names of the sources, and with them the names of all sums."""
        self.sources = sources
        self._source_sums = tuple(f"{name}/{source}" for name in ("loss", "trained_tokens") for source in sources)
        groups = (tuple(OF_BATCHES), tuple(OF_OUTPUTS), self._source_sums)
        self._groups = [names for names in groups if names]
        self._names = [name for names in self._groups for name in names]

    def _start_window(self) -> None:
        """Begin a window, whose sums are logged next."""
        self.window = StepSpan(dict.fromkeys(self._names, 0.0))
        # The next fetch sets the start time, so that evaluation and checkpoints before it do not count
        self._window_started: float | None = None
        self._fetch_started = time.perf_counter()

    def end_window(self) -> StepSpan:
        """End the window, add it to the sums of the training, and begin a new window. Return the ended window."""
        window = self.window
        if self._window_started is not None:
            window.seconds = time.perf_counter() - self._window_started
        self.training.add(window)
        self._start_window()
        return window

    def start_fetch_timer(self) -> None:
        """Note the time before the batches of the next optimizer step are fetched."""
        self._fetch_started = time.perf_counter()
        if self._window_started is None:
            self._window_started = self._fetch_started

    def start_step(self) -> None:
        """Count an optimizer step, whose batches were just fetched, and the time of the fetch."""
        self.window.num_steps += 1
        self.is_scored = False
        self.window.waited += time.perf_counter() - self._fetch_started

    def add_batch(self, batch: FetchedBatch) -> None:
        """Add the counts of one micro-batch on this rank."""
        self._add({name: count(batch) for name, count in OF_BATCHES.items()})

    def add_outputs(self, batch: ScoredBatch) -> None:
        """Add what the model gives for one micro-batch on this rank."""
        self._add({name: total(batch) for name, total in OF_OUTPUTS.items()})
        self.is_scored = True

    def _add(self, values_by_name: dict[str, Tensor]) -> None:
        """Add the sums of one group for one micro-batch on this rank: scalars, by name."""
        names = tuple(values_by_name)
        values = values_by_name.values()
        sums = torch.stack([value.detach().to(sum_dtype(value.device)) for value in values])
        self._pending[names] = sums + self._pending[names] if names in self._pending else sums

    def add_sources(self, loss: Tensor, label_mask: Tensor, sources: Tensor) -> None:
        """Add the losses and trained tokens of each source in one micro-batch on this rank.

        The arguments are those of `sums_by_source`.
        """
        num_sources = len(self.sources) if self._stream_sources is None else MAX_SOURCES
        sums = sums_by_source(loss, label_mask, sources, num_sources=num_sources)
        if self._stream_sources is None:
            self._add(dict(zip(self._source_sums, sums.flatten(), strict=True)))
        elif self._pending_by_source is None:
            self._pending_by_source = sums
        else:
            self._pending_by_source = self._pending_by_source + sums

    def gather(self, accelerator: Accelerator, copies: int = 1) -> dict[str, float]:
        """Return the sums over all ranks of what was added since the last call, and add them to the window.

        All ranks must call this method together.

        Args:
            accelerator: the accelerator of the trainer, which adds numbers of all ranks.
            copies: number of ranks that have counted the same tokens. The sums are divided by it.
        """
        # A group of sums is pending on all ranks or on none: every rank gets the same number of micro-batches, dummies
        # included. So either all ranks return here, before they exchange anything, or none does
        if not self._pending:
            return dict.fromkeys(self._names, 0.0)
        if self._stream_sources is not None:
            self._agree_on_sources(self._stream_sources)
        # All ranks reduce vectors of the same length, with 0 for a group to which no rank has added anything
        dtype = next(iter(self._pending.values())).dtype
        pending = [self._pending.get(names, torch.zeros(len(names), dtype=dtype)) for names in self._groups]
        sums = torch.cat([group_sums.to(accelerator.device) for group_sums in pending])
        sums_of_ranks = (accelerator.reduce(sums, reduction="sum") / copies).tolist()
        gathered = dict(zip(self._names, sums_of_ranks, strict=True))
        self._pending = {}
        self.window.add(StepSpan(sums=gathered))
        return gathered

    def _agree_on_sources(self, rank_sources: StreamSources) -> None:
        """Number the sources of a stream alike on all ranks, and add this rank's sums by source to the pending sums.

        Each rank has read different sources, in its own order. On all ranks, sources are numbered by sorted name.
        """
        sources_of_ranks: list[list[str]] = gather_object([[*rank_sources]])
        names = sorted({name for sources in sources_of_ranks for name in sources})
        if names != self.sources:
            self._name_sources(names)
            for span in (self.window, self.training):
                span.sums = dict.fromkeys(self._names, 0.0) | span.sums
        sums = self._pending_by_source
        self._pending_by_source = None
        if sums is not None and names:
            # Move the sums from this rank's numbers of sources to the numbers on all ranks
            ordered = sums.new_zeros(2, len(names))
            ordered[:, [names.index(name) for name in rank_sources]] = sums[:, : len(rank_sources)]
            self._pending[self._source_sums] = ordered.flatten()

    def metrics(
        self, span: StepSpan, *, capacity: int | None, num_ranks: int = 1, peak_tflops: float | None = None
    ) -> dict[str, float]:
        """Return the values that are logged for the steps of `span`, by name. `LOGGED` describes them.

        Args:
            span: the sums and times of the steps.
            capacity: the most tokens of a micro-batch on one rank, by which computed tokens are divided for
                `efficiency`. If it is None, they are divided by all tokens with padding.
            num_ranks: number of ranks, by which FLOPs are divided.
            peak_tflops: peak speed of a device in TFLOP/s; None logs no `mfu`.
        """
        sums = span.sums
        elapsed = span.seconds
        # Entropy and accuracy are means over the labels that the model scored, not over `trained_tokens`: a subclass
        # may change the labels of a batch, and prompt tuning adds a label to each row
        num_scored = max(sums["scored"], 1.0)
        # "rows" counts the packs, or parts of packs, of all ranks, and "row_tokens" their tokens with padding
        capacities = sums["row_tokens"] if capacity is None else sums["rows"] * capacity
        output_metrics = {
            "entropy": sums["entropy"] / num_scored,
            "mean_token_accuracy": sums["correct"] / num_scored,
            "aux_loss": sums["aux_loss"] / max(sums["micro_batches"], 1.0),
        }
        speed = {}
        if self.shares_rows:
            speed["computed_share"] = round(sums["computed"] / max(sums["tokens"], 1.0), 4)
        if sums["flops"] and elapsed:
            tflops = sums["flops"] / elapsed / num_ranks / 1e12
            speed["tflops_per_second_per_rank"] = _round_value(tflops)
            if peak_tflops is not None:
                speed["mfu"] = _round_value(tflops / peak_tflops)
        return (output_metrics if sums["scored"] else {}) | {
            "trained_tokens": round(sums["trained_tokens"]),
            "documents_per_step": round(sums["documents"] / max(span.num_steps, 1), 2),
            "efficiency": round(sums["computed"] / max(capacities, 1.0), 4),
            "tokens_per_second": round(sums["tokens"] / elapsed, 1) if elapsed else 0.0,
            "data_wait": round(span.waited / elapsed, 4) if elapsed else 0.0,
            **speed,
            **source_metrics(self.sources, [sums[name] for name in self._source_sums]),
        }


# The keys of the log, with their unit and description. `tools/logged.py` makes docs/logging.md from them
LOGGED = {
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
    """Return the summed loss (row 0) and the number of trained tokens (row 1) of each source, (2, `num_sources`).

    Args:
        loss: the loss of each position, or of each target of a document, in any shape.
        label_mask: whether a position is trained, in the shape of `loss`.
        sources: the number of the source of a position, in the shape of `loss`.
        num_sources: the number of sources.
    """
    sums = torch.zeros(2, num_sources, dtype=sum_dtype(loss.device), device=loss.device)
    values = torch.stack([(loss.detach() * label_mask).flatten(), label_mask.flatten()]).to(sums.dtype)
    return sums.scatter_add_(1, sources.flatten().expand(2, -1), values)


def source_metrics(sources: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the mean loss and the trained tokens of each source that has a trained token.

    Args:
        sources: the names of the sources.
        sums: the summed loss of each source, followed by the number of trained tokens of each source.
    """
    triples = zip(sources, sums[: len(sources)], sums[len(sources) :], strict=True)
    trained = [(source, loss, tokens) for source, loss, tokens in triples if tokens]
    losses = {f"loss/{source}": loss / tokens for source, loss, tokens in trained}
    return losses | {f"trained_tokens/{source}": round(tokens) for source, _, tokens in trained}


def _round_value(value: float) -> float:
    """Round to four significant digits, because decimals would make the values of small models on a CPU zero."""
    return float(f"{value:.4g}")


class EvaluationTotals:
    """Sums over the trained tokens of an evaluation set, on one rank. Losses are also summed by source.

    Args:
        device: the device of the sums.
        names: the names of the sources.
    """

    def __init__(self, device: torch.device, names: Sequence[str] = ()):
        self.names = names
        # In this order: loss, entropy, correct predictions, trained tokens; the loss of each source; the trained tokens
        # of each source
        self.sums = torch.zeros(4 + 2 * len(names), dtype=sum_dtype(device), device=device)

    def add(self, scores: Any, targets: Targets, sources: Tensor | None = None) -> Tensor:
        """Add a batch, and return its mean loss over trained tokens, a scalar.

        Args:
            scores: the `TokenScores` of the model or of `scores_of`, with one value per position.
            targets: selects the values of these positions that count.
            sources: the number of the source of each target; None without sources.
        """
        token_values = (-scores.log_probs, scores.entropy, scores.is_top1, scores.label_mask)
        target_values = [targets.select(values) for values in token_values]
        batch_sums = torch.stack([values.sum(dtype=self.sums.dtype) for values in target_values])
        self.sums[:4] += batch_sums
        if sources is not None:
            source_sums = sums_by_source(target_values[0], target_values[3], sources, num_sources=len(self.names))
            self.sums[4:] += source_sums.flatten()
        return batch_sums[0] / batch_sums[3].clamp(min=1)

    def metrics(self, accelerator: Accelerator, copies: int = 1) -> dict[str, float]:
        """Return the metrics over all ranks, by name; empty if the set has no trained token.

        Args:
            accelerator: the accelerator of the trainer, which adds numbers of all ranks.
            copies: number of ranks that have counted the same tokens. The sums are divided by it.
        """
        sums = (accelerator.reduce(self.sums, reduction="sum") / copies).tolist()
        loss, entropy, correct, tokens, *source_sums = sums
        if not tokens:
            return {}
        metrics = {"loss": loss / tokens, "entropy": entropy / tokens, "mean_token_accuracy": correct / tokens}
        return metrics | source_metrics(self.names, source_sums)


def scores_of(logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None) -> TokenScores:
    """Return the log-probability, entropy and correctness of each prediction, as the fused LM head returns them.

    Args:
        logits: the logits, (B, T, V). With prompt tuning they have more positions than the labels.
        labels: the labels, (B, T).
        shift_labels: the label of the next token of each position, (B, T), for a part of a pack, whose last label is
            in the next part. None makes them from `labels`.
    """
    if shift_labels is None:
        num_virtual = logits.shape[1] - labels.shape[1]  # virtual tokens that prompt tuning adds before a row
        logits = logits[:, :-1]
        shift_labels = F.pad(labels, (num_virtual, 0), value=IGNORE_INDEX)[:, 1:]
    logits = logits.float()
    log_probs = F.log_softmax(logits, dim=-1)
    mask = shift_labels != IGNORE_INDEX
    loss = F.nll_loss(log_probs.transpose(1, 2), shift_labels, ignore_index=IGNORE_INDEX, reduction="none")
    entropy = -(log_probs.exp() * log_probs).sum(-1) * mask
    is_top1 = (logits.argmax(-1) == shift_labels) & mask
    return TokenScores(log_probs=-loss, entropy=entropy, is_top1=is_top1, label_mask=mask)
