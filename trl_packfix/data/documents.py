"""Compute which spans of the table are documents, and sort them. They are cut, split, dropped and counted only here.

A document is a span (row, start, stop) of the tokenised table. Truncating, splitting, dropping and cutting into blocks
change spans; no token is rewritten. The ledger counts the documents and tokens that each of them affects.
"""

import hashlib
import json
import logging
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from ..planning.arrays import BoolArray, Int64Array
from ..planning.families import TokenOrder, sort_by_tokens
from ..samples.row import MAX_ROWS_NAMED
from .image_rows import ImageRows
from .reader import RowReader, TokenReader

logger = logging.getLogger(__name__)

Overlong = Literal["truncate", "split", "drop", "raise"]
TruncationMode = Literal["keep_start", "keep_end"]
IMAGE_ARRAYS = ("image_count", "image_values", "image_squares", "image_start", "image_stop")
COLUMNS = ("row", "start", "stop", "trained", "block", *IMAGE_ARRAYS)  # of `Documents`, in its file


@dataclass
class DocumentCounts:
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0  # with a label that is not -100; the first token of a document is never one

    def __add__(self, other: "DocumentCounts") -> "DocumentCounts":
        return DocumentCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Ledger:
    """Counts of the given documents by what was done with them. Each token is kept, truncated or dropped.

    `truncated` and `split` count the documents concerned and the tokens they lost. A split document loses no token, but
    the first token of each later fragment is no longer a target.
    """

    given: DocumentCounts = field(default_factory=DocumentCounts)
    kept: DocumentCounts = field(default_factory=DocumentCounts)
    truncated: DocumentCounts = field(default_factory=DocumentCounts)
    split: DocumentCounts = field(default_factory=DocumentCounts)
    fragments: int = 0  # documents that splitting made
    dropped: dict[str, DocumentCounts] = field(
        default_factory=dict
    )  # for `bad_row`, `empty`, `overlong` or `untrained`

    @property
    def lost_trained_tokens(self) -> int:
        """Given trained tokens that will not be trained: cut off, dropped, or the first of a later fragment."""
        return self.given.trained_tokens - self.kept.trained_tokens

    def __add__(self, other: "Ledger") -> "Ledger":
        reasons = sorted(self.dropped | other.dropped)
        dropped = {
            each: self.dropped.get(each, DocumentCounts()) + other.dropped.get(each, DocumentCounts())
            for each in reasons
        }
        others = {name: mine + getattr(other, name) for name, mine in vars(self).items() if name != "dropped"}
        return Ledger(**others, dropped=dropped)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Ledger":
        counts = {name: DocumentCounts(**values[name]) for name in ("given", "kept", "truncated", "split")}
        dropped = {reason: DocumentCounts(**count) for reason, count in values["dropped"].items()}
        return cls(**counts, fragments=values["fragments"], dropped=dropped)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lost_trained_tokens": self.lost_trained_tokens}


@dataclass(frozen=True)
class Documents:
    """N documents as spans of a table, in table order. Arrays have the shape (N,)."""

    row: Int64Array
    start: Int64Array  # `start` and `stop` count tokens inside the row
    stop: Int64Array
    trained: Int64Array  # tokens
    ledger: Ledger
    block: Int64Array | None = None  # for `wrapped`, the block of `max_length` consecutive tokens that holds a document
    tokens: TokenOrder | None = None  # for `share_prefixes="family"`, the documents sorted by their tokens
    image_count: Int64Array | None = None  # None without images, as all that follow
    image_values: Int64Array | None = None  # numbers in the processed images, which the vision tower reads
    # Sum of the squares of the numbers of each image, or of each tile that the tower reads alone: what attention costs
    image_squares: Int64Array | None = None
    image_start: Int64Array | None = None  # the first token of an image in a document; 0 without
    image_stop: Int64Array | None = None  # the one after the last
    fingerprint: str = ""  # hashes of the documents, by which a restart compares them; empty if they were only counted
    file: Path | None = None  # their cache file; plans are cached beside it

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def lengths(self) -> Int64Array:
        return self.stop - self.start

    def count(self, mask: BoolArray | None = None) -> DocumentCounts:
        chosen = slice(None) if mask is None else mask
        lengths = self.lengths[chosen]
        trained = self.trained[chosen]
        return DocumentCounts(len(lengths), int(lengths.sum()), int(trained.sum()))

    def drop(self, mask: BoolArray, reason: str) -> "Documents":
        """The others; those of the mask are dropped and counted."""
        if not mask.any():
            return self
        self.ledger.dropped[reason] = self.ledger.dropped.get(reason, DocumentCounts()) + self.count(mask)
        return self.select(~mask)

    def select(self, chosen: BoolArray) -> "Documents":
        """The `chosen` documents, numbered anew from 0. The ledger stays that of all."""
        number = np.cumsum(chosen) - 1
        tokens = self.tokens
        file = self.file
        if tokens is not None:
            tokens = tokens.within(np.where(chosen, 0, -1))
            tokens = TokenOrder(number[tokens.order], tokens.common)
        if file is not None:  # it is not written: plans are cached under a name of its own
            digest = hashlib.sha256(np.packbits(chosen).data).hexdigest()
            file = file.with_name(f"{file.stem}-{digest[:16]}{file.suffix}")
        columns = {name: getattr(self, name) for name in COLUMNS}
        taken: dict[str, Any] = {name: None if values is None else values[chosen] for name, values in columns.items()}
        return replace(self, **taken, tokens=tokens, file=file)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All attributes except `file` as flat arrays of numbers by name, for a file; texts as their bytes."""
        arrays = {name: getattr(self, name) for name in COLUMNS}
        if self.tokens is not None:
            arrays |= {"token_order": self.tokens.order, "common_tokens": self.tokens.common}
        arrays["lengths"] = self.lengths
        for name, text in (("ledger", json.dumps(self.ledger.to_dict())), ("fingerprint", self.fingerprint)):
            arrays[name] = np.frombuffer(text.encode(), np.uint8)
        return {name: values for name, values in arrays.items() if values is not None}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], file: Path | None = None) -> "Documents":
        ledger, fingerprint = (arrays[name].tobytes().decode() for name in ("ledger", "fingerprint"))
        tokens = TokenOrder(arrays["token_order"], arrays["common_tokens"]) if "token_order" in arrays else None
        columns = {name: arrays[name] for name in COLUMNS if name in arrays}
        counts = Ledger.from_dict(json.loads(ledger))
        documents = cls(ledger=counts, fingerprint=fingerprint, file=file, tokens=tokens, **columns)
        # Of the cached property: mapped, they are shared by processes
        documents.__dict__["lengths"] = arrays["lengths"]
        return documents


def make_documents(
    reader: RowReader,
    max_length: int | None,
    overlong: Overlong = "truncate",
    *,
    truncation_mode: TruncationMode = "keep_start",
    wrapped: bool = False,
    keep_untrained: bool = False,
    may_be_empty: bool = False,
) -> Documents:
    """Spans of all documents of the table, after applying the policy for those longer than `max_length` tokens.

    Args:
        reader: the tokenised table; rows with `seq_lengths` hold several documents each.
        max_length: largest number of tokens of a document; None for no limit.
        overlong: cut to `max_length` (at the side that `truncation_mode` names), split into fragments of `max_length`,
            drop, or raise.
        wrapped: cut the concatenation of all documents every `max_length` tokens (TRL's `wrapped`). Each fragment
            becomes a document, and `block` is the index of its block. `overlong` is not used.
        keep_untrained: keep documents without a trained token (evaluation and prediction).
        may_be_empty: allow that no document remains, as in a part of a stream.
    """
    spans = _table_spans(reader)
    ledger = spans.ledger
    spans = spans.drop(reader.bad_rows()[spans.row], "bad_row")
    spans = spans.drop(spans.lengths == 0, "empty")
    if not keep_untrained:
        # Before cutting: documents that never had a target are not counted as lost by the cut.
        spans = spans.drop(spans.trained == 0, "untrained")
    if wrapped:
        assert max_length is not None
        spans = _cut_into_blocks(spans, reader, max_length)
    elif max_length is not None:
        if reader.image_stops is not None and overlong == "truncate":
            spans = _without_cut_images(spans, reader.image_stops, max_length, keeps_rows=keep_untrained)
        spans = _apply_overlong(spans, reader, max_length, overlong=overlong, truncation_mode=truncation_mode)
    if not keep_untrained:
        spans = spans.drop(spans.trained == 0, "untrained")
    ledger.kept = spans.count()
    if not len(spans) and not may_be_empty:
        refuse_no_documents(ledger, f"The dataset has {len(reader)} rows", max_length)
    of_images: dict[str, Any] = reader.of_images(spans.row, spans.start, spans.stop)
    return replace(spans, **of_images)


def refuse_no_documents(ledger: Ledger, counted: str, max_length: int | None) -> None:
    """`counted` says what the ledger counts."""
    dropped = ", ".join(f"{count.documents} {reason}" for reason, count in ledger.dropped.items()) or "none"
    raise ValueError(
        f"{counted} and {ledger.given.documents} documents, and no document remains to train on (dropped: {dropped}; "
        f"`max_length={max_length}`). A document needs at least two tokens, and the second or a later one must be "
        "trained. Check that `labels` are not all -100, that completions are not empty, and that `max_length` does "
        "not cut off the trained part."
    )


def drop_untrained(dataset: Dataset, num_given: int, max_length: int | None) -> Dataset:
    """The rows of a tokenised dataset that have a trained token, for unpacked training.

    They were cut to `max_length`, and some of the `num_given` rows may be dropped for it already.
    """
    documents = make_documents(TokenReader(dataset), max_length=None, may_be_empty=True)
    dropped = num_given - len(documents)
    if not len(documents):
        ledger = Ledger(given=DocumentCounts(num_given), dropped={"untrained": DocumentCounts(dropped)})
        refuse_no_documents(ledger, f"The dataset has {num_given} rows", max_length)
    if dropped:
        logger.warning("%d of %d documents have no trained token and are dropped from training.", dropped, num_given)
    return dataset if len(documents) == len(dataset) else dataset.select(documents.row)


def _table_spans(reader: RowReader) -> Documents:
    """One per row, or one per entry of `seq_lengths`."""
    packed = reader.seq_lengths()
    if packed is None:
        row = np.arange(len(reader))
        start = np.zeros(len(reader), dtype=np.int64)
        stop = reader.lengths.astype(np.int64)
    else:
        per_row, lengths = packed
        row = np.repeat(np.arange(len(reader)), per_row)
        total = np.bincount(row, weights=lengths, minlength=len(reader)).astype(np.int64)
        wrong = np.flatnonzero(total != reader.lengths)
        zero = np.flatnonzero(lengths < 1)
        if len(wrong) or len(zero):
            bad = int(wrong[0] if len(wrong) else row[zero[0]])
            raise ValueError(
                f"`seq_lengths` of row {bad} is {lengths[row == bad].tolist()[:MAX_ROWS_NAMED]} and the row has "
                f"{reader.lengths[bad]} tokens ({len(wrong)} rows do not add up, {len(zero)} lengths are below 1). "
                "The lengths of the documents in a packed row must be positive and add up to the row. Correct "
                "`seq_lengths`, or remove the column so that each row is one document."
            )
        stop = np.cumsum(lengths) - np.repeat(np.cumsum(total) - total, per_row)
        start = stop - lengths
    spans = Documents(row, start, stop, reader.count_trained(row, start, stop), Ledger())
    spans.ledger.given = spans.count()
    return spans


def _split_documents(spans: Documents, reader: RowReader, *, fragments: Int64Array, start: Int64Array) -> Documents:
    """`fragments[i]` documents in place of document i, each from `start`, counted inside it, to the next."""
    stop = np.append(start[1:], 0)
    stop[np.cumsum(fragments) - 1] = spans.lengths
    base = np.repeat(spans.start, fragments)
    row = np.repeat(spans.row, fragments)
    start = base + start
    stop = base + stop
    pieces = replace(spans, row=row, start=start, stop=stop, trained=np.repeat(spans.trained, fragments))
    changed = np.repeat(fragments > 1, fragments)
    pieces.trained[changed] = reader.count_trained(row[changed], start[changed], stop[changed])
    before = spans.count(fragments > 1)
    after = pieces.count(changed)
    spans.ledger.split = DocumentCounts(before.documents, 0, before.trained_tokens - after.trained_tokens)
    spans.ledger.fragments = after.documents
    return pieces


def _without_cut_images(spans: Documents, stops: Int64Array, max_length: int, *, keeps_rows: bool) -> Documents:
    """Drop documents whose images stop behind `max_length`: truncating them would cut an image."""
    stops = stops[spans.row]
    cut = stops > max_length
    if keeps_rows and cut.any():
        where = np.flatnonzero(cut)[:MAX_ROWS_NAMED]
        named = ", ".join(f"{spans.row[i]} (images up to token {stops[i]})" for i in where)
        raise ValueError(
            f"{cut.sum()} of {len(cut)} documents of an evaluation set have images that end behind "
            f"`max_length={max_length}`; the first are in rows {named}. An image cannot be cut, and evaluation gives a "
            "result for every row. Raise `max_length`, make the images smaller, or remove these rows."
        )
    return spans.drop(cut, "overlong")


def _apply_overlong(
    spans: Documents, reader: RowReader, max_length: int, *, overlong: Overlong, truncation_mode: str
) -> Documents:
    long = spans.lengths > max_length
    if not long.any():
        return spans
    if overlong == "raise":
        where = np.flatnonzero(long)[:MAX_ROWS_NAMED]
        named = ", ".join(f"{spans.row[i]} ({spans.lengths[i]} tokens)" for i in where)
        raise ValueError(
            f"{long.sum()} of {len(long)} documents are longer than `max_length={max_length}`; the first are in rows "
            f'{named}. `overlong="raise"` refuses such documents. Raise `max_length`, or set `overlong` to "truncate", '
            '"split" or "drop".'
        )
    if overlong == "drop":
        return spans.drop(long, "overlong")
    if overlong == "split" and reader.image_stops is None:
        fragments = -(-spans.lengths // max_length)
        return _split_documents(spans, reader, fragments=fragments, start=_index_in_group(fragments) * max_length)
    if overlong == "split":  # no image is cut; documents with an image of more than `max_length` tokens are dropped
        edges_of = [
            reader.cuts(row, max_length) if length > max_length else [0, length]
            for row, length in zip(spans.row.tolist(), spans.lengths.tolist(), strict=True)
        ]
        spans = spans.drop(np.array([edges is None for edges in edges_of]), "overlong")
        kept = [edges for edges in edges_of if edges is not None]
        fragments = np.array([len(edges) - 1 for edges in kept], dtype=np.int64)
        start = np.array([place for edges in kept for place in edges[:-1]], dtype=np.int64)
        return _split_documents(spans, reader, fragments=fragments, start=start)
    start = spans.start.copy()
    stop = spans.stop.copy()
    if truncation_mode == "keep_start":
        stop[long] = start[long] + max_length
    else:
        start[long] = stop[long] - max_length
    trained = spans.trained.copy()
    trained[long] = reader.count_trained(spans.row[long], start[long], stop[long])
    cut = replace(spans, start=start, stop=stop, trained=trained)
    before = spans.count(long)
    after = cut.count(long)
    lost = before.tokens - after.tokens, before.trained_tokens - after.trained_tokens
    spans.ledger.truncated = DocumentCounts(before.documents, *lost)
    return cut


def _cut_into_blocks(spans: Documents, reader: RowReader, max_length: int) -> Documents:
    """Cut the concatenation of all documents at every multiple of `max_length` tokens; `block` counts the blocks."""
    end = np.cumsum(spans.lengths)  # of each document in the concatenation
    begin = end - spans.lengths
    first_block = begin // max_length
    fragments = (end - 1) // max_length - first_block + 1
    edge = (np.repeat(first_block, fragments) + _index_in_group(fragments)) * max_length - np.repeat(begin, fragments)
    pieces = _split_documents(spans, reader, fragments=fragments, start=np.maximum(edge, 0))
    return replace(pieces, block=(np.cumsum(pieces.lengths) - pieces.lengths) // max_length)


def _index_in_group(counts: Int64Array) -> Int64Array:
    """Index of each element in its group, for groups of these sizes: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def token_order(reader: TokenReader | ImageRows, documents: Documents, chosen: Int64Array | None = None) -> TokenOrder:
    """The documents, or the `chosen` ones by number, sorted by their tokens, read up to the first difference of two.

    For common prefixes; images are compared by content. A document with labels that are neither its tokens nor -100
    shares nothing: a shared row has one next token. Such documents come last, with nothing in common.
    """
    row = documents.row
    start = documents.start
    stop = documents.stop
    chosen = np.arange(len(documents)) if chosen is None else chosen
    tokens = reader.comparison_reader if isinstance(reader, ImageRows) else reader
    may_share = tokens.labels_are_tokens(row[chosen], start[chosen], stop[chosen])
    numbers = chosen[may_share]
    others = chosen[~may_share]

    def read(places: np.ndarray, first: int, width: int) -> np.ndarray:
        wanted = numbers[places]
        return tokens.read_block(row[wanted], start[wanted] + first, stop[wanted], width=width)

    by_tokens = sort_by_tokens(documents.lengths[numbers], read)
    order = numbers[by_tokens.order]
    common = by_tokens.common
    if isinstance(reader, ImageRows):
        size = documents.lengths[order]
        before = np.concatenate([[0], size[:-1]])[: len(size)]
        is_same = (common == size) & (common == before)  # nothing of such a document is laid into a pack
        common = np.where(is_same, common, reader.outside_images(row[order], start[order], common))
    return TokenOrder(np.concatenate([order, others]), np.concatenate([common, np.zeros_like(others)]))
