"""Rows with weights and sources, and a training loop written by hand over their documents, one at a time."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset

SOURCES = ("code", "chat", "math")
WEIGHTS = (0.0, 0.3, 1.0, 2.5, 7.0)


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    labels: list[int]
    weight: float
    source: str


def weighted_rows(num: int = 24, longest: int = 60, seed: int = 0) -> Dataset:
    """Rows of 4 to `longest` tokens, of which between one and all are trained; sources come in runs, unevenly."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(rng.integers(4, longest + 1, num)):
        tokens = rng.integers(4, 260, length)
        first = int(rng.integers(1, length))
        rows.append(
            {
                "input_ids": tokens.tolist(),
                "labels": [-100] * first + tokens[first:].tolist(),
                "share": WEIGHTS[(3 * i + i // 5) % len(WEIGHTS)],
                "source": SOURCES[min(i % 7 // 2, 2)],
            }
        )
    return Dataset.from_list(rows)


def _inside(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def documents_of(batch: dict, rows: list[dict]) -> list[Document]:
    """The documents of a batch, packed or padded, without padding; each with the weight and source of its row."""
    if "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
        pairs = zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths), strict=True)
    else:
        mask = batch["attention_mask"].bool()
        rows_of_batch = zip(batch["input_ids"], batch["labels"], mask, strict=True)
        pairs = ((tokens[real], labels[real]) for tokens, labels, real in rows_of_batch)
    found = []
    for tokens, labels in pairs:
        if (labels[1:] != -100).any():
            (row,) = [row for row in rows if _inside(tokens.tolist(), row["input_ids"])]
            found.append(Document(tokens.tolist(), labels.tolist(), row["share"], row["source"]))
    return found


def loss_by_hand(
    model, documents: list[Document], weighting: str, uses_weights: bool = True, **loss: Any
) -> torch.Tensor:
    """sum(w_d * loss_t) / sum(w_d) over the trained tokens, or sum(w_d * mean_d) / sum(w_d) over the documents."""
    above, below = torch.zeros((), dtype=torch.float64), 0.0
    for document in documents:
        weight = document.weight if uses_weights else 1.0
        losses = token_losses(model, document, **loss)
        if weighting == "document":
            above, below = above + weight * losses.mean(), below + weight
        else:
            above, below = above + weight * losses.sum(), below + weight * len(losses)
    return above / (below or 1.0)


def token_losses(
    model, document: Document, loss_type: str = "nll", label_smoothing_factor: float = 0.0
) -> torch.Tensor:
    """Of the trained tokens of one document alone, in fp64."""
    log_probs = model(torch.tensor([document.tokens])).logits[0, :-1].double().log_softmax(-1)
    targets = torch.tensor(document.labels[1:])
    found = log_probs[torch.arange(len(targets)), targets.clamp(min=0)][targets != -100]
    found = (1 - label_smoothing_factor) * found + label_smoothing_factor * log_probs.mean(-1)[targets != -100]
    return -found * (found.exp().detach() if loss_type == "dft" else 1)


def train_by_hand(
    model, steps: list[list[Document]], learning_rate: float, weighting: str, uses_weights: bool = True
) -> tuple[list[float], list[dict[str, float]]]:
    """SGD; the loss of each step, and the mean loss of each step's trained tokens by source."""
    losses, by_source = [], []
    for documents in steps:
        model.zero_grad()
        loss = loss_by_hand(model, documents, weighting, uses_weights)
        loss.backward()
        with torch.no_grad():
            found = defaultdict(list)
            for document in documents:
                found[document.source] += token_losses(model, document).tolist()
            for parameter in model.parameters():
                parameter -= learning_rate * parameter.grad
        losses.append(loss.item())
        by_source.append({source: float(np.mean(values)) for source, values in found.items()})
    return losses, by_source
