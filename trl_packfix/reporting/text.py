"""Show packs as text. They are made by the reader and the collator of training, and read back from the batch."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..data.collator import IGNORE_INDEX, READ, PackedDataCollator
from ..data.epochs import EpochPlanner
from ..data.loaders import DocumentDataset
from ..data.prefix_collator import PrefixCollator
from ..data.reader import Rows
from .sample import plan_sample

REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")  # a special token several times: the tokens of an image
STYLES = ("blue", "yellow", "green", "magenta", "cyan", "red")  # documents are numbered too, for output without colour
LEGEND = (
    "[n] document n of the pack, each in one colour; [[trained tokens]] are also bold; [... n ...] n tokens omitted"
)


@dataclass(frozen=True)
class ShownDocument:
    """One document of a batch.

    Attributes:
        row, start, stop: its span of the table.
        positions: its first and last position id.
        runs: (whether trained, first, one after the last) for each run of its tokens, from its start.
        tokens: its token ids, shape (n,).
        shared: tokens whose rows are those of the document before it.
        num_images: its images; None if the table has none.
    """

    row: int
    start: int
    stop: int
    positions: tuple[int, int]
    runs: list[tuple[bool, int, int]]
    tokens: np.ndarray
    shared: int = 0
    num_images: int | None = None

    @property
    def own(self) -> "ShownDocument":
        """The part that is not shared, for display."""
        runs = [(trained, max(first - self.shared, 0), end - self.shared) for trained, first, end in self.runs]
        return replace(self, tokens=self.tokens[self.shared :], runs=[run for run in runs if run[2] > 0], shared=0)

    @property
    def has_rows(self) -> bool:
        """Whether it has a run: of a document that shares, a last row of its own is not computed."""
        return len(self.tokens) - self.shared > (1 if self.shared else 0)

    @property
    def num_trained(self) -> int:
        return sum(end - first for trained, first, end in self.runs if trained)


@dataclass(frozen=True)
class ShownPack:
    """One pack of T rows: its step, micro-batch and rank as text, and its documents in order.

    `cu_seq_lens` count rows. With shared prefixes documents have more tokens than rows: `cu_seq_lens_k` counts the
    tokens of documents with a row of their own.

    `parts` has the first row, and one after the last, of each rank that shares the pack, from `rank` on.
    """

    place: str
    capacity: int
    cu_seq_lens: list[int]
    documents: list[ShownDocument]
    rank: int
    parts: list[tuple[int, int]]
    cu_seq_lens_k: list[int] | None = None

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None, has_tokens: bool = True) -> dict[str, Any]:
        """All attributes as JSON values. `text` is None without a tokenizer, `input_ids` if only lengths are known."""
        return {
            "place": self.place,
            "capacity": self.capacity,
            "cu_seq_lens": self.cu_seq_lens,
            "documents": [
                {
                    "row": document.row,
                    "start": document.start,
                    "stop": document.stop,
                    "position_ids": list(document.positions),
                    **({} if self.cu_seq_lens_k is None else {"shared_tokens": document.shared}),
                    "trained_tokens": document.num_trained,
                    **({} if document.num_images is None else {"images": document.num_images}),
                    "parts": [
                        {
                            "trained": trained,
                            "input_ids": document.tokens[first:end].tolist() if has_tokens else None,
                            "text": None if tokenizer is None else _decode(tokenizer, document.tokens[first:end]),
                        }
                        for trained, first, end in document.runs
                    ],
                }
                for document in self.documents
            ],
            **({} if self.cu_seq_lens_k is None else {"cu_seq_lens_k": self.cu_seq_lens_k}),
        } | ({"ranks": self.ranks()} if len(self.parts) > 1 else {})

    def ranks(self) -> list[dict[str, Any]]:
        """Which rows of the pack, and runs of which of its documents, each rank holds."""
        starts, ends = np.array(self.cu_seq_lens[:-1]), np.array(self.cu_seq_lens[1:])
        of_runs = np.array([i for i, document in enumerate(self.documents) if document.has_rows])
        return [
            {
                "rank": rank,
                "tokens": [first, end],
                "documents": of_runs[(starts < end) & (ends > first)].tolist(),
            }
            for rank, (first, end) in enumerate(self.parts, self.rank)
        ]


def shown_packs(planner: EpochPlanner, reader: Rows, num_packs: int) -> Iterator[ShownPack]:
    """The first packs of a run that trains with this planner, each read back from a batch of the collator."""
    documents, parallel = planner.documents, planner.packing.parallel
    dataset, collate = DocumentDataset(reader, documents), PackedDataCollator()
    counts = documents.image_count
    for pack in plan_sample(planner, reader, num_packs).packs:
        read = dataset.__getitems__(pack.documents)
        batch = collate([{name: row[name] for name in READ if name in row} for row in read])
        tokens, labels, positions = (batch[name][0].numpy() for name in ("input_ids", "labels", "position_ids"))
        bounds = batch["cu_seq_lens_q"].tolist()
        shown = [
            ShownDocument(
                row=int(documents.row[document]),
                start=int(documents.start[document]),
                stop=int(documents.stop[document]),
                positions=(int(positions[first]), int(positions[end - 1])),
                runs=_runs(labels[first:end] != IGNORE_INDEX),
                tokens=tokens[first:end],
                shared=common,
                num_images=None if counts is None else int(counts[document]),
            )
            for document, first, end, common in zip(
                pack.documents, bounds[:-1], bounds[1:], pack.shared or [0] * len(pack.documents), strict=True
            )
        ]
        keys = None
        if pack.shared:
            runs = PrefixCollator(compare=reader.compare)(read)
            bounds, keys = runs["cu_seq_lens_q"].tolist(), runs["cu_seq_lens_k"].tolist()
        capacity = planner.packing.capacity if parallel is None else pack.degree * parallel.tokens_per_rank
        place = pack.place(planner.packing.accumulation, planner.packing.world_size)
        yield ShownPack(place, capacity, bounds, shown, pack.rank, pack.parts(bounds[-1]), keys)


def pack_text(
    pack: ShownPack,
    tokenizer: PreTrainedTokenizerBase | None,
    has_tokens: bool = True,
    *,
    num_documents: int = 8,
    num_tokens: int = 60,
) -> Text:
    """A pack as text, in colour if the terminal has it.

    Args:
        tokenizer: decodes the token ids; None shows the ids.
        has_tokens: False if only lengths are known; then no token is shown.
        num_documents: largest number of documents to show.
        num_tokens: largest number of tokens to show per document, half from its start and half from its end.
    """
    text = Text()
    text.append(_heading(pack) + "\n", "bold")
    for name, starts in (("cu_seq_lens", pack.cu_seq_lens), ("cu_seq_lens_k", pack.cu_seq_lens_k)):
        if starts is not None:
            more = " ..." if len(starts) > num_documents + 1 else ""
            text.append(f"{name} {' '.join(map(str, starts[: num_documents + 1]))}{more}\n")
    for share in pack.ranks() if len(pack.parts) > 1 else ():
        text.append(_rank_line(share) + "\n")
    for number, document in enumerate(pack.documents[:num_documents]):
        style = STYLES[number % len(STYLES)]
        text.append(_document_line(number, document) + "\n", f"bold {style}")
        if has_tokens:
            text.append("    ")
            if document.shared:
                text.append(f"[... {document.shared:,} shared ...] ", style)
            for part, trained in _parts(document.own if document.shared else document, tokenizer, num_tokens):
                text.append(f"[[{part}]]" if trained else part, f"bold {style}" if trained else style)
            text.append("\n")
    if tail := pack.documents[num_documents:]:
        num_hidden = sum(len(document.tokens) for document in tail)
        text.append(f"... and {len(tail):,} documents of {num_hidden:,} tokens\n")
    return text


def _heading(pack: ShownPack) -> str:
    heading = f"{pack.place}: {len(pack.documents):,} documents, {pack.cu_seq_lens[-1]:,} of {pack.capacity:,} tokens"
    if pack.cu_seq_lens_k is None:
        return heading
    return heading + f" computed, for {sum(len(document.tokens) for document in pack.documents):,} of the documents"


def _rank_line(share: dict[str, Any]) -> str:
    """The rows of a rank, and the documents with rows there: "rank 1: tokens 8-15, [2] to [4]"."""
    (first, end), numbers = share["tokens"], share["documents"]
    which = " to ".join(f"[{number}]" for number in dict.fromkeys((*numbers[:1], *numbers[-1:]))) or "padding"
    return f"rank {share['rank']}: tokens {first:,}-{end - 1:,}, {which}"


def _document_line(number: int, document: ShownDocument) -> str:
    images = f"images: {document.num_images:,}, " if document.num_images else ""
    shared = f", the first {document.shared:,} tokens shared with [{number - 1}]" if document.shared else ""
    first, last = document.positions
    return (
        f"[{number}] row {document.row:,}, tokens {document.start:,}-{document.stop - 1:,}, "
        f"{document.num_trained:,} trained, {images}position_ids {first}..{last}{shared}"
    )


def _parts(
    document: ShownDocument, tokenizer: PreTrainedTokenizerBase | None, num_tokens: int
) -> Iterator[tuple[str, bool]]:
    """Text of each run and whether it is trained, without the middle of a long document."""
    length, half = len(document.tokens), num_tokens // 2
    hidden = (half, length - half) if length > num_tokens else (length, length)
    num_trained = sum(max(0, min(end, hidden[1]) - max(first, hidden[0])) for yes, first, end in document.runs if yes)
    omitted = f"{hidden[1] - hidden[0]:,}" + f", {num_trained:,} of them trained" * (num_trained > 0)
    for trained, first, end in document.runs:
        for low, high in ((first, min(end, hidden[0])), (max(first, hidden[1]), end)):
            if low < high:
                ids = document.tokens[low:high]
                yield " ".join(map(str, ids)) if tokenizer is None else _decode(tokenizer, ids, one_line=True), trained
            if low == first and first <= hidden[0] < min(end, hidden[1]):
                yield f" [... {omitted} ...] ", False


def _decode(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, one_line: bool = False) -> str:
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # of one row
    if not one_line:
        return text
    return REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", text).replace("\n", "\\n")


def _runs(trained: np.ndarray) -> list[tuple[bool, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    return [(bool(trained[first]), first, end) for first, end in itertools.pairwise(edges)]
