"""What the first step is tried with, few and short documents of the run, and what was found."""

from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.loaders import dummy_document
from ..data.row_values import SOURCES, WEIGHTS
from ..isolation.isolation_report import PackingLeakError
from ..layout import IGNORE_INDEX, READ

NUM_DOCUMENTS = 4
HALF = 24  # tokens of a document's beginning, and around its first trained one
MOST_TOKENS = 512  # of a document with images, which is not shortened

Document = dict[str, Any]


@dataclass(frozen=True)
class StepComparison:
    """The first step, packed and unpacked.

    Attributes:
        text: the line of the report.
        loss_gap, gradient_gap: relative; None if not compared.
        problem: what differs; None if nothing.
    """

    text: str
    loss_gap: float | None = None
    gradient_gap: float | None = None
    problem: str | None = None

    def metrics(self) -> dict[str, float]:
        """The numbers for a logger."""
        values = {"first_step/loss_gap": self.loss_gap, "first_step/gradient_gap": self.gradient_gap}
        return {name: value for name, value in values.items() if value is not None}

    def raise_if_different(self) -> None:
        """Raise `PackingLeakError` if the two differ by more than rounding."""
        if self.problem is not None:
            raise PackingLeakError(
                f"A few documents of the run were trained packed and unpacked before the first step: {self.problem}. "
                "So packs would train another model. Set `packing=False`, and please report it with this message."
            )


def length(document: Document) -> int:
    return len(document["input_ids"])


def num_trained(document: Document) -> int:
    return int((np.asarray(document["labels"])[1:] != IGNORE_INDEX).sum())


def masked(document: Document) -> Document:
    return document | {"labels": np.full(length(document), IGNORE_INDEX)}


def chosen(documents: list[Document]) -> list[Document]:
    """`NUM_DOCUMENTS` of them, shortened: two that begin alike for longest, one with images, and short ones."""
    shortened = [_shortened(each) for each in documents if num_trained(each) and each.get(WEIGHTS, 1) > 0] or [
        dummy_document(0)
    ]
    fitting = [each for each in shortened if length(each) <= MOST_TOKENS] or [min(shortened, key=length)]
    in_order = sorted(fitting, key=lambda each: np.asarray(each["input_ids"]).tolist())
    alike = max(range(len(in_order)), key=lambda i: _num_common(*in_order[i : i + 2]))
    others = in_order[:alike] + in_order[alike + 2 :]
    chosen = in_order[alike : alike + 2] + sorted(others, key=lambda each: (is_text(each), length(each)))
    return (chosen * NUM_DOCUMENTS)[:NUM_DOCUMENTS]


def _num_common(one: Document, other: Document | None = None) -> int:
    """Tokens with which both begin; 0 without another."""
    pairs = () if other is None else zip(one["input_ids"], other["input_ids"], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def is_text(document: Document) -> bool:
    return document.keys() <= READ | {WEIGHTS}


def _shortened(document: Document) -> Document:
    """Without its source. Of text the first tokens, and those around the first trained one."""
    document = {name: value for name, value in document.items() if name != SOURCES}
    if not is_text(document) or length(document) <= 2 * HALF:
        return document
    first = int((np.asarray(document["labels"])[1:] != IGNORE_INDEX).argmax())  # the place that predicts it
    start = max(HALF, first - HALF // 2)
    kept = np.r_[0:HALF, start : start + HALF]
    kept = kept[kept < length(document)]
    return document | {name: np.asarray(document[name])[kept] for name in READ}


def int64(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))  # a copy: values of a table cannot be written


def longest_of(batch: dict[str, Any]) -> Tensor:
    """The tokens of the longest document of a pack, (n,)."""
    bounds = batch["cu_seq_lens_q"]
    first = int(bounds.diff().argmax())
    return batch["input_ids"][0, bounds[first] : bounds[first + 1]].cpu()


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Relative to the spread of the values: those of an untrained model are nearly equal."""
    gap = float((one - other).norm() / (other - other.mean()).norm().clamp(min=torch.finfo(torch.float64).tiny))
    return gap if gap == gap else inf
