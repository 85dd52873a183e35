"""The first packs of a run: made by the reader and the collator of training, and read back from the batch."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..data.collator import IGNORE_INDEX, TEXT_KEYS, PackedDataCollator
from ..data.epochs import EpochPlanner
from ..data.loaders import DocumentDataset
from ..data.prefix_collator import PrefixCollator
from ..data.reader import RowReader
from ..layout import LAYOUT_KEY

NUM_PACKS = 8
REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")  # a special token several times: the tokens of an image
STYLES = ("blue", "yellow", "green", "magenta", "cyan", "red")  # documents are numbered too, for output without colour
LEGEND = (
    "[n] document n of the pack, each in one colour; [[trained tokens]] are also bold; [... n ...] n tokens omitted"
)

TokenSpan = tuple[bool, int, int]  # of tokens of a document: whether they are trained, the first, one after the last


@dataclass(frozen=True)
class ShownDocument:
    """One document of a batch: a span of a row of the table."""

    row: int
    start: int
    stop: int
    positions: tuple[int, int]  # first and last position id
    runs: list[TokenSpan]
    tokens: np.ndarray | None  # ids, shape (stop - start,)
    shared: int = 0  # tokens whose rows are those of the document before it
    num_images: int | None = None  # None if the table has none

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """Rows of its own: of a document that shares, a last row is not computed."""
        own = self.num_tokens - self.shared
        return 0 if self.shared and own == 1 else own

    @property
    def own_runs(self) -> list[TokenSpan]:
        """The runs of the tokens that are not shared, from the first of these."""
        runs = [(trained, max(first - self.shared, 0), end - self.shared) for trained, first, end in self.runs]
        return [run for run in runs if run[2] > 0]

    @property
    def num_trained(self) -> int:
        return sum(end - first for trained, first, end in self.runs if trained)

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        parts = []
        for trained, first, end in self.runs:
            ids = None if self.tokens is None else self.tokens[first:end]
            text = None if ids is None or tokenizer is None else _decode_tokens(tokenizer, ids)
            parts.append({"trained": trained, "input_ids": None if ids is None else ids.tolist(), "text": text})
        values = {"row": self.row, "start": self.start, "stop": self.stop, "position_ids": list(self.positions)}
        values |= {"trained_tokens": self.num_trained, "parts": parts}
        return values if self.num_images is None else values | {"images": self.num_images}


@dataclass(frozen=True)
class ShownPack:
    """One pack. With shared prefixes its documents are sorted by their tokens, and have more tokens than rows:
    `cu_seq_lens` count rows, and `cu_seq_lens_k` the tokens of documents with a row of their own."""

    place: str  # step, micro-batch and rank as text
    capacity: int
    cu_seq_lens: list[int]
    documents: list[ShownDocument]
    rank: int  # the first of `degree` ranks that share the pack
    degree: int
    cu_seq_lens_k: list[int]  # empty without shared prefixes

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        documents = [document.to_dict(tokenizer) for document in self.documents]
        values = {"place": self.place, "capacity": self.capacity, "cu_seq_lens": self.cu_seq_lens}
        values |= {"documents": documents}
        if self.cu_seq_lens_k:
            values |= {"cu_seq_lens_k": self.cu_seq_lens_k}
            for shown, document in zip(documents, self.documents, strict=True):
                shown["shared_tokens"] = document.shared
        ranks = self.ranks()
        return values | {"ranks": ranks} if ranks else values

    def ranks(self) -> list[dict[str, Any]]:
        """Which rows of the pack, and runs of which of its documents, each rank holds; the last may have padding.

        Empty for a pack of one rank.
        """
        if self.degree == 1:
            return []
        starts = np.array(self.cu_seq_lens[:-1])
        ends = np.array(self.cu_seq_lens[1:])
        of_runs = np.array([i for i, document in enumerate(self.documents) if document.num_rows])
        size = -(-self.cu_seq_lens[-1] // self.degree)
        edges = [min(i * size, self.cu_seq_lens[-1]) for i in range(self.degree + 1)]
        return [
            {"rank": rank, "tokens": [first, end], "documents": of_runs[(starts < end) & (ends > first)].tolist()}
            for rank, (first, end) in enumerate(itertools.pairwise(edges), self.rank)
        ]

    def without_tokens(self) -> "ShownPack":
        return replace(self, documents=[replace(document, tokens=None) for document in self.documents])


def first_packs(planner: EpochPlanner, reader: RowReader, num_packs: int = NUM_PACKS) -> list[ShownPack]:
    """The first packs of a run that trains with this planner, each read back from a batch of the collator.

    Of a step with more packs they are evenly spaced, because the most expensive ones come first.
    """
    filled = np.flatnonzero(np.diff(planner.schedule(0).offsets))
    of_step = int(np.searchsorted(filled, planner.packing.accumulation * planner.packing.world_size))
    filled = filled[: max(num_packs, of_step)]
    num = min(num_packs, len(filled))
    return [_read_pack(planner, reader, slot) for slot in filled[np.arange(num) * len(filled) // num].tolist()]


def _read_pack(planner: EpochPlanner, reader: RowReader, slot: int) -> ShownPack:
    packing = planner.packing
    schedule = planner.schedule(0)
    documents = planner.documents
    chosen = schedule.order[schedule.offsets[slot] : schedule.offsets[slot + 1]]
    read = DocumentDataset(reader, documents).__getitems__(chosen.tolist())
    prefixes = PrefixCollator(shares=packing.share_prefixes != "off", compare=reader.compare)
    trained = prefixes(read)
    keys = []
    shared = [0] * len(read)
    if LAYOUT_KEY in trained:
        order, shared, _ = prefixes.order_documents(read)
        chosen = chosen[order]
        read = [read[i] for i in order]
        keys = trained["cu_seq_lens_k"].tolist()
    # Each document whole, as the picture and the text show it
    batch = PackedDataCollator()([{name: row[name] for name in TEXT_KEYS if name in row} for row in read])
    tokens, labels, positions = (batch[name][0].numpy() for name in ("input_ids", "labels", "position_ids"))
    whole = batch["cu_seq_lens_q"].tolist()
    counts = documents.image_count
    shown = [
        ShownDocument(
            row=int(documents.row[document]),
            start=int(documents.start[document]),
            stop=int(documents.stop[document]),
            positions=(int(positions[first]), int(positions[end - 1])),
            runs=_token_spans(labels[first:end] != IGNORE_INDEX),
            tokens=tokens[first:end],
            shared=common,
            num_images=None if counts is None else int(counts[document]),
        )
        for document, (first, end), common in zip(chosen, itertools.pairwise(whole), shared, strict=True)
    ]
    (step, micro), rank = divmod(slot // packing.world_size, packing.accumulation), slot % packing.world_size
    degree = int(schedule.degrees[slot // packing.world_size])
    place = f"step {step}" + (f".{micro}" if packing.accumulation > 1 else "")
    if packing.world_size > 1:
        place += f", rank {rank}" if degree == 1 else f", ranks {rank}-{rank + degree - 1}"
    capacity = degree * packing.parallel.tokens_per_rank
    return ShownPack(place, capacity, trained["cu_seq_lens_q"].tolist(), shown, rank, degree, keys)


def _token_spans(trained: np.ndarray) -> list[TokenSpan]:
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    return [(bool(trained[first]), first, end) for first, end in itertools.pairwise(edges)]


def pack_text(
    pack: ShownPack, tokenizer: PreTrainedTokenizerBase | None, *, num_documents: int = 8, num_tokens: int = 60
) -> Text:
    """So many documents of a pack, and tokens of each, half from its start and half from its end; ids without
    a tokenizer."""
    text = Text()
    given = sum(document.num_tokens for document in pack.documents)
    size = f"{pack.cu_seq_lens[-1]:,} of {pack.capacity:,} tokens"
    computed = f" computed, for {given:,} of the documents" if pack.cu_seq_lens_k else ""
    text.append(f"{pack.place}: {len(pack.documents):,} documents, {size}{computed}\n", "bold")
    for name, starts in (("cu_seq_lens", pack.cu_seq_lens), ("cu_seq_lens_k", pack.cu_seq_lens_k)):
        if starts:
            more = " ..." if len(starts) > num_documents + 1 else ""
            text.append(f"{name} {' '.join(map(str, starts[: num_documents + 1]))}{more}\n")
    for held in pack.ranks():
        (first, end), numbers = held["tokens"], held["documents"]
        which = " to ".join(f"[{number}]" for number in dict.fromkeys((*numbers[:1], *numbers[-1:]))) or "padding"
        text.append(f"rank {held['rank']}: tokens {first:,}-{end - 1:,}, {which}\n")
    for number, document in enumerate(pack.documents[:num_documents]):
        style = STYLES[number % len(STYLES)]
        images = f"images: {document.num_images:,}, " if document.num_images else ""
        shared = f", the first {document.shared:,} tokens shared with [{number - 1}]" if document.shared else ""
        span, (low, high) = f"row {document.row:,}, tokens {document.start:,}-{document.stop - 1:,}", document.positions
        line = f"{span}, {document.num_trained:,} trained, {images}position_ids {low}..{high}{shared}"
        text.append(f"[{number}] {line}\n", f"bold {style}")
        if document.tokens is None:
            continue
        text.append("    ")
        if document.shared:
            text.append(f"[... {document.shared:,} shared ...] ", style)
        for part, trained in _text_of_parts(
            document.tokens[document.shared :], document.own_runs, tokenizer, num=num_tokens
        ):
            text.append(f"[[{part}]]" if trained else part, f"bold {style}" if trained else style)
        text.append("\n")
    if tail := pack.documents[num_documents:]:
        text.append(f"... and {len(tail):,} documents of {sum(each.num_tokens for each in tail):,} tokens\n")
    return text


def _text_of_parts(
    tokens: np.ndarray, runs: list[TokenSpan], tokenizer: PreTrainedTokenizerBase | None, *, num: int
) -> Iterator[tuple[str, bool]]:
    """Text of each run and whether it is trained, without the middle of a long document."""
    length = len(tokens)
    half = num // 2
    hidden = (half, length - half) if length > num else (length, length)
    num_trained = sum(max(0, min(end, hidden[1]) - max(first, hidden[0])) for yes, first, end in runs if yes)
    omitted = f"{hidden[1] - hidden[0]:,}" + f", {num_trained:,} of them trained" * (num_trained > 0)
    for trained, first, end in runs:
        for low, high in ((first, min(end, hidden[0])), (max(first, hidden[1]), end)):
            if low < high:
                text = " ".join(map(str, tokens[low:high]))
                if tokenizer is not None:
                    text = _decode_tokens(tokenizer, tokens[low:high])
                    text = REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", text)
                yield text.replace("\n", "\\n"), trained
            if low == first and first <= hidden[0] < min(end, hidden[1]):
                yield f" [... {omitted} ...] ", False


def _decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
