"""What the first step is tried with, few and short documents of the run, and what was found."""

from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import IterableDataset
from torch import Tensor
from torch.nn import functional as F

from ..data.collator import PackedDataCollator
from ..data.documents import make_documents
from ..data.loaders import DocumentDataset, PackedBatchSampler, dummy_document
from ..data.row_values import SOURCES, WEIGHTS, read_row_values
from ..isolation.isolation_report import PackingLeakError
from ..layout import IGNORE_INDEX, TEXT_KEYS, layout_of
from ..planning.schedule import NO_DOCUMENTS
from .loading import TrainingData

NUM_CANDIDATES = 32  # documents that are read, and of a pack
NUM_DOCUMENTS = 3
NUM_HALF_TOKENS = 16  # tokens of a document's beginning, and around its first trained one
MOST_TOKENS = 512  # of a document with images, which is not shortened

TEXT_ENTRIES = {*PackedDataCollator()([{"input_ids": [0]}]), WEIGHTS, SOURCES}  # entries of a batch

Document = dict[str, Any]


@dataclass(frozen=True)
class StepComparison:
    """The first step, packed and unpacked."""

    text: str  # the line of the report
    loss_gap: float | None = None  # relative; None if not compared
    gradient_gap: float | None = None
    problem: str | None = None  # what differs; None if nothing

    def metrics(self) -> dict[str, float]:
        """Return the numbers for a logger."""
        values = {"first_step/loss_gap": self.loss_gap, "first_step/gradient_gap": self.gradient_gap}
        return {name: value for name, value in values.items() if value is not None}

    def raise_if_different(self) -> None:
        if self.problem is not None:
            raise PackingLeakError(
                f"A few documents of the run were trained packed and unpacked before the first step: {self.problem}. "
                "So packs would train otherwise than rows, by more than rounding. For example, a module takes a mean "
                "over a batch, or a hook takes a pack for one document. Set `packing=False`, and please report it with "
                "this message."
            )


def document_length(document: Document) -> int:
    return len(document["input_ids"])


def num_trained(document: Document) -> int:
    return int((np.asarray(document["labels"])[1:] != IGNORE_INDEX).sum())


def mask_document(document: Document) -> Document:
    return document | {"labels": np.full(document_length(document), IGNORE_INDEX)}


def first_documents(data: TrainingData, dataset: IterableDataset) -> tuple[list[Document], int, int]:
    """Documents of the first packs of this rank, or of the first rows of a stream `dataset`.

    Also how many ranks share a pack of them, and which of these this one is. These ranks get the same documents.
    """
    if data.planner is None:
        degree = max(data.degrees, default=1)
        args = data.args
        stream = dataset.take(NUM_CANDIDATES)
        found = list[Document]()
        try:
            table = data.images.table(stream)
            reader = data.images.read(table, "train")
            values = read_row_values(table, args.weight_column, None, name="train")
            documents = make_documents(reader, args.max_length, args.effective_overlong)
            rows = DocumentDataset(reader, documents, values=values)
            found = rows.__getitems__([*range(min(NUM_CANDIDATES, len(rows)))])
        except ValueError:  # a bad row, which the stream refuses by its number, or drops
            pass
        return found, degree, data.ranks.rank % degree
    rows = DocumentDataset(data.reader, data.documents, values=data.row_values)
    packs = list(islice(PackedBatchSampler(data.planner, data.ranks.rank), data.args.gradient_accumulation_steps))
    first = max(packs, key=attrgetter("degree"))
    indices = [index for pack in packs for index in pack if pack.degree == first.degree and index != NO_DOCUMENTS]
    return rows.__getitems__(indices[:NUM_CANDIDATES]), first.degree, first.member


def choose_documents(documents: list[Document]) -> list[Document]:
    """`NUM_DOCUMENTS` of them, shortened: two that begin alike for longest, one with images, and short ones."""
    shortened = [_shorten(each) for each in documents] or [dummy_document(0)]
    fitting = [each for each in shortened if document_length(each) <= MOST_TOKENS] or [
        min(shortened, key=document_length)
    ]
    in_order = sorted(fitting, key=lambda each: np.asarray(each["input_ids"]).tolist())
    alike = max(range(len(in_order)), key=lambda i: _num_common(in_order[i : i + 2]))
    others = in_order[:alike] + in_order[alike + 2 :]
    chosen = in_order[alike : alike + 2] + sorted(others, key=lambda each: (is_text(each), document_length(each)))
    return (chosen * NUM_DOCUMENTS)[:NUM_DOCUMENTS]


def _num_common(pair: list[Document]) -> int:
    """Tokens with which both begin; 0 of one alone."""
    tokens = zip(*(each["input_ids"] for each in pair), strict=False)
    return sum(1 for _ in takewhile(lambda both: both[0] == both[-1], tokens)) * (len(pair) > 1)


def is_text(document: Document) -> bool:
    return document.keys() <= TEXT_KEYS | {WEIGHTS}


def _shorten(document: Document) -> Document:
    """Without its source. Of text the first tokens, and those around the first trained one.

    If another token is trained, not the last one: documents must be told apart without an end token, too.
    """
    document = {name: value for name, value in document.items() if name != SOURCES}
    if not is_text(document):
        return document
    trained = np.flatnonzero(np.asarray(document["labels"])[1:] != IGNORE_INDEX)  # the places that predict them
    start = max(NUM_HALF_TOKENS, int(trained[0]) - NUM_HALF_TOKENS // 2)
    kept = np.r_[0:NUM_HALF_TOKENS, start : start + NUM_HALF_TOKENS]
    kept = kept[kept < document_length(document) - (len(trained) > 1)]
    return document | {name: np.asarray(document[name])[kept] for name in TEXT_KEYS}


def to_int64(values: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))  # a copy: values of a table cannot be written


def is_plain(batch: dict[str, Any]) -> bool:
    """Return whether this is a whole pack of text whose documents share no row."""
    layout = layout_of(batch)
    tensors = {name for name, value in batch.items() if isinstance(value, Tensor)}
    return tensors <= TEXT_ENTRIES and layout.is_packed and not layout.weighs_rows


def longest_of(batch: dict[str, Any]) -> Tensor:
    """Return the tokens, (n,), of the longest document of a pack that has a trained token, so not of padding."""
    bounds = batch["cu_seq_lens_q"]
    trained = F.pad((batch["labels"][0] != IGNORE_INDEX).cumsum(0), (1, 0))[bounds].diff()
    first = int((bounds.diff() * (trained > 0)).argmax())
    return batch["input_ids"][0, bounds[first] : bounds[first + 1]].cpu()


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Return the distance relative to the spread of `other`: an untrained model has nearly equal values."""
    gap = float((one - other).norm() / (other - other.mean()).norm().clamp(min=torch.finfo(other.dtype).tiny))
    return gap if gap == gap else inf
