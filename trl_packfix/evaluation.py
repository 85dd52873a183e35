"""Evaluation that does not depend on packing: total loss over total trained tokens of the whole set.

A mean of batch means moves with the batch size, with packing and with the number of ranks; a ratio of totals does not.
The loss is the negative log-likelihood whatever the training loss is (dft, label smoothing and auxiliary losses do not
enter it); only with `compute_loss_func` the numbers are TRL's own.
"""

from typing import Any

import torch
from torch.nn import functional as F

from .collator import IGNORE_INDEX


class EvaluationTotals:
    """Sums over the trained tokens of an evaluation set, on one rank, in fp64 where the device has it."""

    def __init__(self, device: torch.device):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(4, dtype=dtype, device=device)  # loss, entropy, correct, trained tokens

    def add_fused(self, outputs: Any) -> torch.Tensor:
        """Add the outputs of TRL's fused LM head; returns the mean loss of this batch."""
        return self._add(-outputs.log_probs, outputs.entropy, outputs.is_top1, outputs.label_mask)

    def add_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Add a batch of full logits, (B, T, V), with labels (B, T); returns the mean loss of this batch."""
        logits, labels = logits[:, :-1].float(), labels[:, 1:]
        log_probs = F.log_softmax(logits, dim=-1)
        mask = labels != IGNORE_INDEX
        loss = F.nll_loss(log_probs.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        entropy = -(log_probs.exp() * log_probs).sum(-1) * mask
        return self._add(loss, entropy, (logits.argmax(-1) == labels) & mask, mask)

    def _add(
        self, loss: torch.Tensor, entropy: torch.Tensor, correct: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch = torch.stack([x.sum(dtype=self.sums.dtype) for x in (loss, entropy, correct, mask)])
        self.sums += batch
        return batch[0] / batch[3].clamp(min=1)

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """`loss`, `entropy` and `mean_token_accuracy` over all ranks; empty where nothing was trained or counted."""
        loss, entropy, correct, tokens = accelerator.reduce(self.sums, reduction="sum").tolist()
        if not tokens:
            return {}
        return {"loss": loss / tokens, "entropy": entropy / tokens, "mean_token_accuracy": correct / tokens}
