"""What a checkpoint holds of a stream: totals, and the documents that were read and not trained yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..samples.encoded_images import packed_images, unpacked_images
from .documents import Ledger
from .row_values import SOURCES, WEIGHTS
from .stream_images import ENCODED, EncodedRow
from .stream_reader import DocumentTokens

TOKENS = ("input_ids", "labels")


@dataclass(frozen=True)
class StreamCounts:
    """Totals of all passes."""

    ledger: Ledger = field(default_factory=Ledger)  # of the documents read; all else is of trained packs
    packs: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    with_images: int = 0  # documents
    most_images: int = 0  # in a pack
    tower_flops: float = 0.0
    language_flops: float = 0.0

    def __add__(self, other: "StreamCounts") -> "StreamCounts":
        totals = {name: mine + getattr(other, name) for name, mine in vars(self).items()}
        return StreamCounts(**totals | {"most_images": max(self.most_images, other.most_images)})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StreamCounts":
        return cls(**values | {"ledger": Ledger.from_dict(values["ledger"])})


def packed(documents: Sequence[DocumentTokens]) -> dict[str, Any]:
    """Documents as few values that `torch.load` reads with `weights_only`."""
    first = documents[0] if documents else {}
    state: dict[str, Any] = {"lengths": torch.tensor([len(document["input_ids"]) for document in documents])}
    for name in TOKENS if documents else ():
        state[name] = torch.from_numpy(np.concatenate([document[name] for document in documents]))
    if WEIGHTS in first:
        state[WEIGHTS] = torch.tensor([document[WEIGHTS] for document in documents], dtype=torch.float32)
    if SOURCES in first:
        state[SOURCES] = [document[SOURCES] for document in documents]
    if ENCODED in first:
        rows = [document[ENCODED] for document in documents]
        state[ENCODED] = [(row.text, row.start, row.stop, row.counts) for row in rows]
        state["images"] = packed_images([row.images for row in rows])
    return state


def unpacked(state: dict[str, Any]) -> list[DocumentTokens]:
    lengths = state["lengths"].tolist()
    columns = {name: [part.numpy().copy() for part in state[name].split(lengths)] for name in TOKENS if lengths}
    if WEIGHTS in state:
        columns[WEIGHTS] = list(state[WEIGHTS].numpy())
    if SOURCES in state:
        columns[SOURCES] = state[SOURCES]
    if ENCODED in state:
        of_rows = zip(state[ENCODED], unpacked_images(state["images"]), strict=True)
        columns[ENCODED] = [
            EncodedRow(text, images, start, stop, tuple(counts)) for (text, start, stop, counts), images in of_rows
        ]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
