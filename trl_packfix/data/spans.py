"""Compute which spans of the table are documents. Documents are cut, split, dropped and counted only here.

A document is a span (row, start, stop) of the tokenised table. Truncating, splitting, dropping and cutting into blocks
change spans; no token is rewritten. The ledger counts the documents and tokens that each of them affects.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from ..planning.arrays import BoolArray, Int64Array
from ..samples.row import NUM_SHOWN
from .documents import Count, Documents, Ledger
from .reader import Rows, TokenReader

logger = logging.getLogger(__name__)

Overlong = Literal["truncate", "split", "drop", "raise"]
TruncationMode = Literal["keep_start", "keep_end"]


@dataclass
class _Spans:
    """The spans of the documents, while policies are applied to them."""

    reader: Rows
    ledger: Ledger
    row: Int64Array
    start: Int64Array
    stop: Int64Array
    trained: Int64Array

    @property
    def lengths(self) -> Int64Array:
        return self.stop - self.start

    def count(self, mask: BoolArray | None = None) -> Count:
        chosen = slice(None) if mask is None else mask
        lengths, trained = self.lengths[chosen], self.trained[chosen]
        return Count(len(lengths), int(lengths.sum()), int(trained.sum()))

    def without(self, mask: BoolArray, reason: str) -> "_Spans":
        """The others; those of the mask are dropped and counted."""
        if not mask.any():
            return self
        self.ledger.dropped[reason] = self.ledger.dropped.get(reason, Count()) + self.count(mask)
        columns = {name: getattr(self, name)[~mask] for name in ("row", "start", "stop", "trained")}
        return replace(self, **columns)

    def split(self, fragments: Int64Array, start: Int64Array, stop: Int64Array) -> "_Spans":
        """`fragments[i]` spans in place of document i; `start` and `stop` count tokens inside the document."""
        base = np.repeat(self.start, fragments)
        row, start, stop = np.repeat(self.row, fragments), base + start, base + stop
        pieces = replace(self, row=row, start=start, stop=stop, trained=np.repeat(self.trained, fragments))
        changed = np.repeat(fragments > 1, fragments)
        pieces.trained[changed] = self.reader.count_trained(row[changed], start[changed], stop[changed])
        before, after = self.count(fragments > 1), pieces.count(changed)
        assert before.tokens == after.tokens
        self.ledger.split = Count(before.documents, 0, before.trained_tokens - after.trained_tokens)
        self.ledger.fragments = after.documents
        return pieces


def make_documents(
    reader: Rows,
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
    spans = spans.without(reader.bad_rows()[spans.row], "bad_row")
    spans = spans.without(spans.lengths == 0, "empty")
    if not keep_untrained:
        # Before cutting: documents that never had a target are not counted as lost by the cut.
        spans = spans.without(spans.trained == 0, "untrained")
    block = None
    if wrapped:
        assert max_length is not None
        spans = _cut_into_blocks(spans, max_length)
        block = (np.cumsum(spans.lengths) - spans.lengths) // max_length
    elif max_length is not None:
        if reader.image_stops is not None and overlong == "truncate":
            spans = _without_cut_images(spans, reader.image_stops, max_length, keeps_rows=keep_untrained)
        spans = _apply_overlong(spans, max_length, overlong=overlong, truncation_mode=truncation_mode)
    if not keep_untrained:
        trained = spans.trained > 0
        block = block[trained] if block is not None else None
        spans = spans.without(~trained, "untrained")
    ledger.kept = spans.count()
    if not len(spans.row) and not may_be_empty:
        refuse_no_documents(ledger, f"The dataset has {len(reader)} rows", max_length)
    of_images: dict[str, Any] = reader.of_images(spans.row, spans.start, spans.stop)
    return Documents(spans.row, spans.start, spans.stop, spans.trained, ledger, block, **of_images)


def refuse_no_documents(ledger: Ledger, counted: str, max_length: int | None) -> None:
    """`counted` says what the ledger counts."""
    dropped = ", ".join(f"{count.documents} {reason}" for reason, count in ledger.dropped.items()) or "none"
    raise ValueError(
        f"{counted} and {ledger.given.documents} documents, and no document remains to train on (dropped: {dropped}; "
        f"`max_length={max_length}`). A document needs at least two tokens, and the second or a later one must be "
        "trained. Check that `labels` are not all -100, that completions are not empty, and that `max_length` does "
        "not cut off the trained part."
    )


def drop_untrained(dataset: Dataset) -> Dataset:
    """The rows of a tokenised dataset that have a trained token, for unpacked training."""
    documents = make_documents(TokenReader(dataset), max_length=None)
    if len(documents) == len(dataset):
        return dataset
    dropped = len(dataset) - len(documents)
    logger.warning("%d of %d documents have no trained token and are dropped from training.", dropped, len(dataset))
    return dataset.select(documents.row)


def _table_spans(reader: Rows) -> _Spans:
    """One span per row, or one per entry of `seq_lengths`."""
    packed = reader.seq_lengths()
    if packed is None:
        row = np.arange(len(reader))
        start, stop = np.zeros(len(reader), dtype=np.int64), reader.lengths.astype(np.int64)
    else:
        per_row, lengths = packed
        row = np.repeat(np.arange(len(reader)), per_row)
        total = np.bincount(row, weights=lengths, minlength=len(reader)).astype(np.int64)
        wrong = np.flatnonzero(total != reader.lengths)
        zero = np.flatnonzero(lengths < 1)
        if len(wrong) or len(zero):
            bad = int(wrong[0] if len(wrong) else row[zero[0]])
            raise ValueError(
                f"`seq_lengths` of row {bad} is {lengths[row == bad].tolist()[:NUM_SHOWN]} and the row has "
                f"{reader.lengths[bad]} tokens ({len(wrong)} rows do not add up, {len(zero)} lengths are below 1). "
                "The lengths of the documents in a packed row must be positive and add up to the row. Correct "
                "`seq_lengths`, or remove the column so that each row is one document."
            )
        stop = np.cumsum(lengths) - np.repeat(np.cumsum(total) - total, per_row)
        start = stop - lengths
    spans = _Spans(reader, Ledger(), row, start, stop, reader.count_trained(row, start, stop))
    spans.ledger.given = spans.count()
    return spans


def _without_cut_images(spans: _Spans, image_stops: Int64Array, max_length: int, *, keeps_rows: bool) -> _Spans:
    """Drop documents whose images end behind `max_length`: truncating them would cut an image."""
    cut = image_stops[spans.row] > max_length
    if keeps_rows and cut.any():
        where = np.flatnonzero(cut)[:NUM_SHOWN]
        named = ", ".join(f"{spans.row[i]} (images up to token {image_stops[spans.row[i]]})" for i in where)
        raise ValueError(
            f"{cut.sum()} of {len(cut)} documents of an evaluation set have images that end behind "
            f"`max_length={max_length}`; the first are in rows {named}. An image cannot be cut, and evaluation gives a "
            "result for every row. Raise `max_length`, make the images smaller, or remove these rows."
        )
    return spans.without(cut, "overlong")


def _apply_overlong(spans: _Spans, max_length: int, *, overlong: Overlong, truncation_mode: str) -> _Spans:
    long = spans.lengths > max_length
    if not long.any():
        return spans
    if overlong == "raise":
        where = np.flatnonzero(long)[:NUM_SHOWN]
        named = ", ".join(f"{spans.row[i]} ({spans.lengths[i]} tokens)" for i in where)
        raise ValueError(
            f"{long.sum()} of {len(long)} documents are longer than `max_length={max_length}`; the first are in rows "
            f'{named}. `overlong="raise"` refuses such documents. Raise `max_length`, or set `overlong` to "truncate", '
            '"split" or "drop".'
        )
    if overlong == "drop":
        return spans.without(long, "overlong")
    if overlong == "split" and spans.reader.image_stops is not None:
        return _split_outside_images(spans, long, max_length)
    if overlong == "split":
        fragments = np.where(long, -(-spans.lengths // max_length), 1)
        offset = _index_in_group(fragments) * max_length
        return spans.split(fragments, offset, np.minimum(offset + max_length, np.repeat(spans.lengths, fragments)))
    start, stop = spans.start.copy(), spans.stop.copy()
    if truncation_mode == "keep_start":
        stop[long] = start[long] + max_length
    else:
        start[long] = stop[long] - max_length
    trained = spans.trained.copy()
    trained[long] = spans.reader.count_trained(spans.row[long], start[long], stop[long])
    cut = replace(spans, start=start, stop=stop, trained=trained)
    before, after = spans.count(long), cut.count(long)
    lost = before.tokens - after.tokens, before.trained_tokens - after.trained_tokens
    spans.ledger.truncated = Count(before.documents, *lost)
    return cut


def _split_outside_images(spans: _Spans, long: BoolArray, max_length: int) -> _Spans:
    """Split documents so that no image is cut; drop those with an image of more than `max_length` tokens."""
    edges_of = [
        spans.reader.cuts(row, max_length) if is_long else [0, length]
        for row, length, is_long in zip(spans.row.tolist(), spans.lengths.tolist(), long.tolist(), strict=True)
    ]
    spans = spans.without(np.array([edges is None for edges in edges_of]), "overlong")
    kept = [edges for edges in edges_of if edges is not None]
    fragments = np.array([len(edges) - 1 for edges in kept], dtype=np.int64)
    start = np.array([place for edges in kept for place in edges[:-1]], dtype=np.int64)
    stop = np.array([place for edges in kept for place in edges[1:]], dtype=np.int64)
    return spans.split(fragments, start, stop)


def _cut_into_blocks(spans: _Spans, max_length: int) -> _Spans:
    """Cut the concatenation of all documents at every multiple of `max_length` tokens."""
    lengths = spans.lengths
    begin = np.cumsum(lengths) - lengths  # offset of each document in the concatenation
    first_block = begin // max_length
    fragments = (begin + lengths - 1) // max_length - first_block + 1
    edge = (np.repeat(first_block, fragments) + _index_in_group(fragments)) * max_length - np.repeat(begin, fragments)
    return spans.split(fragments, np.maximum(edge, 0), np.minimum(edge + max_length, np.repeat(lengths, fragments)))


def _index_in_group(counts: Int64Array) -> Int64Array:
    """Index of each element in its group, for groups of these sizes: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
