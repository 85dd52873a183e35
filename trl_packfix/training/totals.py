"""Sum what batches contain and what the model gives for them, and make the values of the log from the sums.

In training, the loss (`objective.py`) adds the sums of each micro-batch to `TrainingTotals`, on the device and without
waiting for it. Once per log the sums are gathered over all ranks, and `metrics` makes the logged values from them. An
evaluation (`evaluation.py`) adds its batches to `EvaluationTotals`, and gathers them once, at its end.

Words: A *trained token* is a token with a label. A *target* is a pair of a document and a trained token (`layout.py`):
documents with a common prefix may share a token, which is then a target of each. A *source* is the name of the data set
from which a document comes (`source_column`); losses are also logged by source. A *window* is the time between two
logs. With sequence parallelism the ranks of a *group* share a pack. *Copies* are ranks that count the same tokens,
because they divide one model between them (tensor parallelism). A *dummy* is a batch without a trained token, for a
rank that has no document in a micro-batch.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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
from .lm_head import TokenScores, entropies

OF_BATCHES = ("trained_tokens", "tokens", "computed", "row_tokens", "documents", "micro_batches", "rows", "flops")
"""Sums over micro-batches, to which `TrainingTotals.add_batch` adds. They are right for any loss."""

OF_OUTPUTS = ("entropy", "correct", "scored", "aux_loss")
"""Sums over outputs of the model, to which `TrainingTotals.add_outputs` adds. Only the loss of this package does."""


@dataclass
class StepSpan:
    """Sums over a range of optimizer steps: the steps since the last log, or all steps of a training.

    Attributes:
        sums: sums over all ranks, by name. By default, a name to which nothing was added has 0.
        num_steps: number of optimizer steps.
        seconds: time of the steps, without evaluation and checkpoints before them.
        waited: seconds in which this rank waited for batches.
    """

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, span: "StepSpan") -> None:
        """Add the sums, steps and times of another span to this span."""
        for name, value in span.sums.items():
            self.sums[name] += value
        self.num_steps += span.num_steps
        self.seconds += span.seconds
        self.waited += span.waited


class TrainingTotals:
    """Sums over the batches of a training.

    There are three groups of sums: `OF_BATCHES`, `OF_OUTPUTS`, and the loss and the trained tokens of each source. The
    last two groups are added only if this package computes the loss.

    Args:
        device: the device of the sums.
        sources: names of the sources by which losses are summed.
        shares_rows: whether packs compute common prefixes of documents once. Then the log says which share of the
            tokens is computed.

    Attributes:
        device: the device of the sums.
        sources: names of the sources.
        is_scored: whether outputs of the model were added in this optimizer step, by which `callbacks.py` finds out
            whether the loss of this package runs.
        training: sums of all windows that have ended.
        window: sums of the running window.
    """

    def __init__(self, device: torch.device, sources: Sequence[str] = (), shares_rows: bool = False) -> None:
        self.device = device
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
        self.sources = sources
        # The sources of a table are known. Of a stream it is only known how many this rank may number at most
        self._num_sources = len(sources) if stream_sources is None else MAX_SOURCES
        self._empty_pending()
        self.is_scored = False
        self.training = StepSpan()
        self._start_window()

    def _empty_pending(self) -> None:
        """Set the sums of this rank that are not gathered yet to zero. They stay on the device."""
        zeros = partial(torch.zeros, dtype=sum_dtype(self.device), device=self.device)
        self._pending = {name: zeros(()) for name in (*OF_BATCHES, *OF_OUTPUTS)}
        # Losses and trained tokens by source, (2, sources); of a stream by this rank's numbers of sources
        self._pending_by_source = zeros((2, self._num_sources))

    def _start_window(self) -> None:
        """Begin a window, whose sums are logged next."""
        self.window = StepSpan()
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

    def add_batch(self, sizes: Sizes, trained: Tensor, *, num_row_tokens: int, flops: Tensor, group: Group) -> None:
        """Add the counts of one micro-batch on this rank, when it is fetched.

        Args:
            sizes: the number of tokens of its documents (`tokens`), and how many tokens this rank computes for them
                (`computed_rows`), both ().
            trained: number of trained tokens of each document, (N,), in all parts of the pack.
            num_row_tokens: number of tokens on this rank, with padding.
            flops: FLOPs of forward and backward, ().
            group: the ranks that share the pack. Numbers of the whole pack are counted by its first rank only.
        """
        is_trained = trained > 0
        # `group.count_once` is 0 on all ranks of a group but the first
        self._add(
            trained_tokens=group.count_once(trained.sum()),
            tokens=group.count_once(sizes.tokens),  # tokens of documents, without padding
            # Tokens that this rank computes, without padding. A token that several documents share is computed once
            computed=sizes.computed_rows,
            # Tokens on this rank, with padding. `torch.tensor` would synchronise with the device
            row_tokens=trained.new_full((), num_row_tokens),
            documents=group.count_once(is_trained.sum()),
            # `micro_batches` counts packs and `rows` counts parts of packs on ranks. Dummies do not count in either
            micro_batches=group.count_once(is_trained.any()),
            rows=is_trained.any(),
            flops=group.count_once(flops),
        )

    def add_outputs(self, outputs: Any, targets: Targets, aux_loss: Tensor | None) -> None:
        """Add what the model gives for one micro-batch on this rank.

        Args:
            outputs: the outputs of the model, with `entropy`, `is_top1` and `label_mask` of each position.
            targets: selects the values of these positions that count.
            aux_loss: the load-balancing loss of a mixture of experts, (); None if it is not trained. If ranks share the
                pack, the first of them has the loss of the whole pack, and the others have 0.
        """
        self._add(
            entropy=targets.select(outputs.entropy).sum(),
            correct=targets.select(outputs.is_top1).sum(),
            scored=targets.select(outputs.label_mask).sum(),  # number of labels
        )
        if aux_loss is not None:
            self._add(aux_loss=aux_loss)
        self.is_scored = True

    def _add(self, **values: Tensor) -> None:
        """Add scalars of one micro-batch on this rank to the pending sums, by name."""
        for name, value in values.items():
            # The device of a value may be another one: batches of a loader of the user's, or layers on several GPUs
            self._pending[name] += value.detach().to(self.device, non_blocking=True)

    def add_sources(self, loss: Tensor, label_mask: Tensor, sources: Tensor) -> None:
        """Add the losses and trained tokens of each source in one micro-batch on this rank.

        The arguments are those of `sums_by_source`.
        """
        sums = sums_by_source(loss, label_mask, sources, num_sources=self._num_sources)
        self._pending_by_source += sums.to(self.device, non_blocking=True)

    def gather(self, accelerator: Accelerator, copies: int = 1) -> dict[str, float]:
        """Return the sums over all ranks of what was added since the last call, and add them to the window.

        All ranks must call this method together.

        Args:
            accelerator: the accelerator of the trainer, which adds numbers of all ranks.
            copies: number of ranks that have counted the same tokens. The sums are divided by it.
        """
        if self._stream_sources is not None:
            self._agree_on_sources(self._stream_sources)
        names = [*self._pending, *self._source_sums]
        # All ranks reduce vectors of the same length, with 0 for a sum to which no rank has added anything
        sums = torch.cat([torch.stack([*self._pending.values()]), self._pending_by_source.flatten()])
        sums_of_ranks = (accelerator.reduce(sums, reduction="sum") / copies).tolist()
        gathered = dict(zip(names, sums_of_ranks, strict=True))
        self._empty_pending()
        self.window.add(StepSpan(gathered))
        return gathered

    @property
    def _source_sums(self) -> list[str]:
        """The names of the sums by source: the losses of all sources, and then their trained tokens."""
        return [f"{name}/{source}" for name in ("loss", "trained_tokens") for source in self.sources]

    def _agree_on_sources(self, rank_sources: StreamSources) -> None:
        """Number the sources of a stream alike on all ranks, and order this rank's pending sums by these numbers.

        Each rank has read different sources, in its own order. On all ranks, sources are numbered by sorted name.
        """
        sources_of_ranks: list[list[str]] = gather_object([[*rank_sources]])
        self.sources = sorted({name for sources in sources_of_ranks for name in sources})
        # Move the sums from this rank's numbers of sources to the numbers on all ranks
        sums = self._pending_by_source
        numbers = [self.sources.index(name) for name in rank_sources]
        self._pending_by_source = sums.new_zeros(2, len(self.sources))
        self._pending_by_source[:, numbers] = sums[:, : len(rank_sources)]

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
    entropy = entropies(log_probs) * mask
    is_top1 = (logits.argmax(-1) == shift_labels) & mask
    return TokenScores(log_probs=-loss, entropy=entropy, is_top1=is_top1, label_mask=mask)
