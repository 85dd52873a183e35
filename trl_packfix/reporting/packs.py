"""Read the first packs of a run back from its batches, to show them as text, JSON or pictures.

`first_packs` makes batches with the reader and the collator of training, and reads from them what the model would get.
`trl-packfix show` prints the packs (`pack_text`), `pictures.py` draws them, and `build.py` puts them into the report.

A *document* is one training example, and a *pack* is the documents that pass through the model together as one row of
tokens. A *token row* is the place of one token in this row; other rows are rows of the table. A *trained* token counts
in the loss. With shared prefixes, documents of a pack that begin alike compute the token rows of their common beginning
only once. The token rows of a document that it does not share with a document before it are its *run*. With sequence
parallelism several ranks share a pack, and each of them holds a part of its rows; the number of these ranks is the
*degree*.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from ..data.collator import PackedDataCollator
from ..data.epochs import EpochPlanner
from ..data.reader import RowReader
from ..planning.arrays import IGNORE_INDEX, TEXT_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_PACKS = 8
REPEATED_TOKEN = re.compile(r"(<[^<>\s]+>)\1{3,}")  # a special token several times, as for the patches of an image
STYLES = ("blue", "yellow", "green", "magenta", "cyan", "red")  # documents are numbered too, for output without colour
LEGEND = (
    "[n] document n of the pack, each in one colour; [[trained tokens]] are also bold; [... n ...] n tokens omitted; "
    "{left out ...} a text of the row that is not in the tokens"
)

TokenSpan = tuple[bool, int, int]
"""Consecutive tokens of a document: (whether they are trained, the first token, the one behind the last token)."""


@dataclass(frozen=True)
class ShownDocument:
    """One document of a batch. Its tokens are a span of a row of the table."""

    row: int  # number of the row
    start: int  # first token of the document in the row
    stop: int  # one behind its last token
    positions: tuple[int, int]  # first and last position id
    spans: list[TokenSpan]  # all tokens of the document, by whether they are trained
    tokens: np.ndarray | None  # ids, shape (stop - start,)
    shared: int = 0  # number of tokens at the beginning that share the rows of the document before it in the pack
    num_images: int | None = None  # None if the table has no images
    # Texts of the row that the chat template leaves out, such as an earlier thought of the assistant.
    # `cli/omissions.py` sets them: (number of tokens before the place of the text, its description)
    left_out: tuple[tuple[int, str], ...] = ()
    # Number of tokens before the document was cut; None in a table whose rows are packs
    uncut_length: int | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, shared ones included."""
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """The number of token rows that are computed for this document.

        If the only token that is not shared is the last one, its row is not computed, because it predicts nothing.
        """
        num_own_tokens = self.num_tokens - self.shared
        return 0 if self.shared and num_own_tokens == 1 else num_own_tokens

    @property
    def own_spans(self) -> list[TokenSpan]:
        """The spans of the tokens that are not shared; token 0 is the first one that is not shared."""
        spans = [(trained, max(first - self.shared, 0), end - self.shared) for trained, first, end in self.spans]
        return [(trained, first, end) for trained, first, end in spans if end > 0]

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return sum(end - first for trained, first, end in self.spans if trained)

    @property
    def cut_from(self) -> int | None:
        """The number of tokens before the document was cut; None if it was not."""
        return None if self.uncut_length == self.num_tokens else self.uncut_length

    def to_dict(self, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
        """Return the document as JSON values; its spans have texts if there is a tokenizer."""
        span_values = []
        for trained, first, end in self.spans:
            ids = None if self.tokens is None else self.tokens[first:end]
            text = None if ids is None or tokenizer is None else _decode_tokens(tokenizer, ids)
            span_values.append({"trained": trained, "input_ids": None if ids is None else ids.tolist(), "text": text})
        values = {
            "row": self.row,
            "start": self.start,
            "stop": self.stop,
            "position_ids": list(self.positions),
            "cut_from": self.cut_from,
            "trained_tokens": self.num_trained,
            "parts": span_values,
        }
        if self.num_images is not None:
            values["images"] = self.num_images
        if self.left_out:
            values["left_out"] = [list(omission) for omission in self.left_out]
        return values


@dataclass(frozen=True)
class ShownPack:
    """One pack. With shared prefixes its documents are sorted by their tokens, and have more tokens than rows."""

    place: str  # step, micro-batch and ranks as text
    capacity: int  # most token rows of the pack
    cu_seq_lens: list[int]  # 0, and the number of token rows up to the end of each run: where the queries end
    documents: list[ShownDocument]
    rank: int  # the first of the ranks that share the pack
    degree: int  # the number of ranks that share the pack
    # 0, and for each run the number of tokens, shared ones included, up to its end: where the keys end. A run is the
    # rows that a document does not share with the one before it; a document without such rows has no run, and no entry.
    # The list is empty if documents share no token rows
    cu_seq_lens_k: list[int]

    def to_dict(self, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
        """Return the pack as JSON values; the documents have texts if there is a tokenizer."""
        documents = [document.to_dict(tokenizer) for document in self.documents]
        values = {
            "place": self.place,
            "capacity": self.capacity,
            "cu_seq_lens": self.cu_seq_lens,
            "documents": documents,
        }
        if self.cu_seq_lens_k:
            values["cu_seq_lens_k"] = self.cu_seq_lens_k
            for document_values, document in zip(documents, self.documents, strict=True):
                document_values["shared_tokens"] = document.shared
        ranks = self.ranks()
        if ranks:
            values["ranks"] = ranks
        return values

    def ranks(self) -> list[dict[str, Any]]:
        """Return which token rows each rank holds (`"tokens": [first, end]`), and which documents have runs there.

        The list has an entry for each rank, and is empty if one rank has the pack alone. The last rank may also hold
        padding.
        """
        if self.degree == 1:
            return []
        run_starts = np.array(self.cu_seq_lens[:-1])
        run_ends = np.array(self.cu_seq_lens[1:])
        documents_with_run = np.array([i for i, document in enumerate(self.documents) if document.num_rows])
        num_rows = self.cu_seq_lens[-1]
        rows_per_rank = -(-num_rows // self.degree)
        edges = [min(i * rows_per_rank, num_rows) for i in range(self.degree + 1)]
        return [
            {
                "rank": rank,
                "tokens": [first, end],
                "documents": documents_with_run[(run_starts < end) & (run_ends > first)].tolist(),
            }
            for rank, (first, end) in enumerate(itertools.pairwise(edges), self.rank)
        ]

    def without_tokens(self) -> "ShownPack":
        """Return the pack without the ids of its tokens."""
        return replace(self, documents=[replace(document, tokens=None) for document in self.documents])


def first_packs(planner: EpochPlanner, reader: RowReader, num_packs: int = NUM_PACKS) -> list[ShownPack]:
    """Return the first packs of a run that trains with this planner, each read back from a batch of the collator.

    If the first step has more than `num_packs` packs, evenly spaced ones are returned: a step begins with its most
    expensive packs, and the first ones alone would not be typical.
    """
    # A slot is the place of one pack: micro-step x ranks + rank. With sequence parallelism some slots are empty.
    # `offsets[slot]` is where the documents of a slot begin.
    slots = np.flatnonzero(np.diff(planner.schedule(0).offsets))
    num_of_first_step = int(np.searchsorted(slots, planner.packing.accumulation * planner.packing.world_size))
    slots = slots[: max(num_packs, num_of_first_step)]
    num = min(num_packs, len(slots))
    spaced_slots = slots[np.arange(num) * len(slots) // num]
    return [_read_pack(planner, reader, slot) for slot in spaced_slots.tolist()]


def _read_pack(planner: EpochPlanner, reader: RowReader, slot: int) -> ShownPack:
    """Read the pack of one slot of the first epoch."""
    packing = planner.packing  # the settings
    schedule = planner.schedule(0)
    documents = planner.documents  # spans of rows of the table: `row`, `start` and `stop`
    # 1. Read the documents, and collate them as in training.
    numbers = schedule.order[schedule.offsets[slot] : schedule.offsets[slot + 1]]
    spans = [column[numbers].tolist() for column in (documents.row, documents.start, documents.stop)]
    dataset_rows = [reader.read(row, start, stop) for row, start, stop in zip(*spans, strict=True)]
    cu_seq_lens = None
    cu_seq_lens_k = []
    shared = [0] * len(dataset_rows)  # token rows that each document shares with the document before it
    # The collator of training, which a feature may replace. `reader.compare` returns numbers by which images are
    # compared
    collator: Any = packing.feature.make_collator(PackedDataCollator(), compare=reader.compare)
    if collator.shares:  # with shared prefixes, documents may share token rows
        training_batch = collator(dataset_rows)
        # Documents sorted by their tokens, and how many token rows each shares with the document before it. The third
        # result, what was compared, is not needed
        order, shared_in_order, _ = collator.order_documents(dataset_rows)
        if any(shared_in_order):
            shared = shared_in_order
            numbers = numbers[order]
            dataset_rows = [dataset_rows[i] for i in order]
            cu_seq_lens = training_batch["cu_seq_lens_q"].tolist()
            cu_seq_lens_k = training_batch["cu_seq_lens_k"].tolist()
    # 2. Collate them without sharing, too: text and picture show the tokens of whole documents.
    text_rows = [{name: row[name] for name in TEXT_KEYS if name in row} for row in dataset_rows]
    batch = PackedDataCollator().arrays(text_rows)
    tokens, labels, positions = (batch[name] for name in ("input_ids", "labels", "position_ids"))
    bounds = batch["cu_seq_lens"].tolist()
    packed_before = reader.seq_lengths() is not None  # whether the rows of the table are packs of several documents
    image_count = documents.image_count
    shown = [
        ShownDocument(
            row=int(documents.row[number]),
            start=int(documents.start[number]),
            stop=int(documents.stop[number]),
            positions=(int(positions[first]), int(positions[end - 1])),
            spans=_token_spans(labels[first:end] != IGNORE_INDEX),
            tokens=tokens[first:end],
            shared=num_shared,
            num_images=None if image_count is None else int(image_count[number]),
            uncut_length=None if packed_before else int(reader.lengths[documents.row[number]]),
        )
        for number, (first, end), num_shared in zip(numbers, itertools.pairwise(bounds), shared, strict=True)
    ]
    # 3. Say where the pack is trained.
    micro_step, rank = divmod(slot, packing.world_size)
    step, micro_batch = divmod(micro_step, packing.accumulation)
    degree = int(schedule.degrees[micro_step])  # equal for all packs of a micro-step
    place = f"step {step}.{micro_batch}" if packing.accumulation > 1 else f"step {step}"
    if packing.world_size > 1:
        place += f", rank {rank}" if degree == 1 else f", ranks {rank}-{rank + degree - 1}"
    return ShownPack(
        place=place,
        capacity=degree * packing.parallel.tokens_per_rank,
        cu_seq_lens=cu_seq_lens or bounds,  # without shared rows each document is one run
        documents=shown,
        rank=rank,
        degree=degree,
        cu_seq_lens_k=cu_seq_lens_k,
    )


def _token_spans(is_trained: np.ndarray) -> list[TokenSpan]:
    """Divide the tokens of a document into spans of trained tokens and spans of other tokens."""
    changes = (np.flatnonzero(np.diff(is_trained)) + 1).tolist()
    edges = [0, *changes, len(is_trained)]
    return [(bool(is_trained[first]), first, end) for first, end in itertools.pairwise(edges)]


def pack_text(
    pack: ShownPack, tokenizer: "PreTrainedTokenizerBase | None", *, num_documents: int = 8, num_tokens: int = 60
) -> Text:
    """Return the first documents of a pack as text with styles, by `LEGEND`.

    Args:
        pack: the pack.
        tokenizer: decodes the tokens; without it their ids are shown.
        num_documents: most documents that are shown.
        num_tokens: most tokens of a document that are shown, half of them from its start and half from its end.
    """
    text = Text()
    # 1. Sizes and boundaries of the pack
    size = f"{pack.cu_seq_lens[-1]:,} of {pack.capacity:,} tokens"
    if pack.cu_seq_lens_k:
        total = sum(document.num_tokens for document in pack.documents)
        size += f" computed, for {total:,} of the documents"
    text.append(f"{pack.place}: {len(pack.documents):,} documents, {size}\n", "bold")
    for name, bounds in (("cu_seq_lens", pack.cu_seq_lens), ("cu_seq_lens_k", pack.cu_seq_lens_k)):
        if bounds:
            more = " ..." if len(bounds) > num_documents + 1 else ""
            text.append(f"{name} {' '.join(map(str, bounds[: num_documents + 1]))}{more}\n")
    # 2. The rows of each rank
    for rank_rows in pack.ranks():
        first, end = rank_rows["tokens"]
        numbers = rank_rows["documents"]
        first_and_last = dict.fromkeys(numbers[:1] + numbers[-1:])  # once, if it is the same document
        documents = " to ".join(f"[{number}]" for number in first_and_last) or "padding"
        text.append(f"rank {rank_rows['rank']}: tokens {first:,}-{end - 1:,}, {documents}\n")
    # 3. The documents and their tokens
    for number, document in enumerate(pack.documents[:num_documents]):
        style = STYLES[number % len(STYLES)]
        images = f"images: {document.num_images:,}, " if document.num_images else ""
        shared = f", the first {document.shared:,} tokens shared with [{number - 1}]" if document.shared else ""
        cut = "" if document.cut_from is None else f" (cut from {document.cut_from:,})"
        low, high = document.positions
        text.append(
            f"[{number}] row {document.row:,}, tokens {document.start:,}-{document.stop - 1:,}{cut}, "
            f"{document.num_trained:,} trained, {images}position_ids {low}..{high}{shared}\n",
            f"bold {style}",
        )
        if document.tokens is None:
            continue
        text.append("    ")
        if document.shared:
            text.append(f"[... {document.shared:,} shared ...] ", style)
        own_tokens = document.tokens[document.shared :]
        left_out = [(max(place - document.shared, 0), description) for place, description in document.left_out]
        span_texts = _span_texts(own_tokens, document.own_spans, tokenizer, num=num_tokens, left_out=left_out)
        for span_text, trained in span_texts:
            text.append(f"[[{span_text}]]" if trained else span_text, f"bold {style}" if trained else style)
        text.append("\n")
    hidden = pack.documents[num_documents:]
    if hidden:
        num_hidden = sum(document.num_tokens for document in hidden)
        text.append(f"... and {len(hidden):,} documents of {num_hidden:,} tokens\n")
    return text


def _span_texts(
    tokens: np.ndarray,
    spans: list[TokenSpan],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    num: int,
    left_out: list[tuple[int, str]],
) -> Iterator[tuple[str, bool]]:
    """Yield the text of each span, and whether it is trained. The middle of a long document is omitted.

    Args:
        tokens: ids of the tokens.
        spans: spans of `tokens`.
        tokenizer: decodes the tokens; without it their ids are shown.
        num: most tokens that are shown.
        left_out: texts that have no tokens, each with the number of tokens before its place.
    """
    length = len(tokens)
    hidden_start = num // 2 if length > num else length
    hidden_end = length - num // 2 if length > num else length
    num_trained = sum(
        max(0, min(end, hidden_end) - max(first, hidden_start)) for trained, first, end in spans if trained
    )
    omission = f" [... {hidden_end - hidden_start:,}"
    omission += f", {num_trained:,} of them trained ...] " if num_trained else " ...] "
    # After these cuts each span is omitted as a whole, or shown as a whole
    cuts = [hidden_start, hidden_end, *(place for place, _ in left_out)]
    for trained, first, end in _cut_spans(spans, cuts):
        yield from _descriptions_at(first, left_out)
        if first == hidden_start:
            yield omission, False
        if hidden_start <= first < hidden_end:
            continue
        text = " ".join(map(str, tokens[first:end]))
        if tokenizer is not None:
            text = _decode_tokens(tokenizer, tokens[first:end])
            text = REPEATED_TOKEN.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", text)
        yield text.replace("\n", "\\n"), trained
    yield from _descriptions_at(length, left_out)


def _cut_spans(spans: list[TokenSpan], places: list[int]) -> Iterator[TokenSpan]:
    """Yield the spans, each cut at the places that lie inside it."""
    for trained, first, end in spans:
        edges = [first, *sorted({place for place in places if first < place < end}), end]
        yield from ((trained, low, high) for low, high in itertools.pairwise(edges))


def _descriptions_at(token: int, left_out: list[tuple[int, str]]) -> Iterator[tuple[str, bool]]:
    """Yield (text, False) for each entry of `left_out` whose place is directly before this token."""
    for place, description in left_out:
        if place == token:
            yield f" {{left out {description}}} ", False


def _decode_tokens(tokenizer: "PreTrainedTokenizerBase", ids: np.ndarray) -> str:
    """Return the text of tokens, with special tokens, exactly as the tokenizer decodes it."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
