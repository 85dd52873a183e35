"""Compute which spans of the table are documents, and sort them. They are cut, split, dropped and counted only here.

A document is a span (row, start, stop) of the tokenised table. Truncating, splitting, dropping and cutting into blocks
change spans; no token is rewritten. The ledger counts the documents and tokens that each of them affects.
"""

import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from ..planning.arrays import Int64Array
from ..planning.families import TokenOrder, sort_by_tokens
from ..samples.row import NUM_SHOWN
from .documents import Count, Documents, Ledger
from .image_rows import ImageRows
from .reader import Rows, TokenReader

logger = logging.getLogger(__name__)

Overlong = Literal["truncate", "split", "drop", "raise"]
TruncationMode = Literal["keep_start", "keep_end"]


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
    if wrapped:
        assert max_length is not None
        spans = _cut_into_blocks(spans, reader, max_length)
    elif max_length is not None:
        if reader.image_stops is not None and overlong == "truncate":
            spans = _without_cut_images(spans, reader.image_stops, max_length, keeps_rows=keep_untrained)
        spans = _apply_overlong(spans, reader, max_length, overlong=overlong, truncation_mode=truncation_mode)
    if not keep_untrained:
        spans = spans.without(spans.trained == 0, "untrained")
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


def drop_untrained(dataset: Dataset) -> Dataset:
    """The rows of a tokenised dataset that have a trained token, for unpacked training."""
    documents = make_documents(TokenReader(dataset), max_length=None)
    if len(documents) == len(dataset):
        return dataset
    dropped = len(dataset) - len(documents)
    logger.warning("%d of %d documents have no trained token and are dropped from training.", dropped, len(dataset))
    return dataset.select(documents.row)


def _table_spans(reader: Rows) -> Documents:
    """One per row, or one per entry of `seq_lengths`."""
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
    spans = Documents(row, start, stop, reader.count_trained(row, start, stop), Ledger())
    spans.ledger.given = spans.count()
    return spans


def _split(spans: Documents, reader: Rows, *, fragments: Int64Array, start: Int64Array) -> Documents:
    """`fragments[i]` documents in place of document i, each from `start`, counted inside it, to the next."""
    stop = np.append(start[1:], 0)
    stop[np.cumsum(fragments) - 1] = spans.lengths
    base, row = np.repeat(spans.start, fragments), np.repeat(spans.row, fragments)
    start, stop = base + start, base + stop
    pieces = replace(spans, row=row, start=start, stop=stop, trained=np.repeat(spans.trained, fragments))
    changed = np.repeat(fragments > 1, fragments)
    pieces.trained[changed] = reader.count_trained(row[changed], start[changed], stop[changed])
    before, after = spans.count(fragments > 1), pieces.count(changed)
    spans.ledger.split = Count(before.documents, 0, before.trained_tokens - after.trained_tokens)
    spans.ledger.fragments = after.documents
    return pieces


def _without_cut_images(spans: Documents, stops: Int64Array, max_length: int, *, keeps_rows: bool) -> Documents:
    """Drop documents whose images stop behind `max_length`: truncating them would cut an image."""
    stops = stops[spans.row]
    cut = stops > max_length
    if keeps_rows and cut.any():
        where = np.flatnonzero(cut)[:NUM_SHOWN]
        named = ", ".join(f"{spans.row[i]} (images up to token {stops[i]})" for i in where)
        raise ValueError(
            f"{cut.sum()} of {len(cut)} documents of an evaluation set have images that end behind "
            f"`max_length={max_length}`; the first are in rows {named}. An image cannot be cut, and evaluation gives a "
            "result for every row. Raise `max_length`, make the images smaller, or remove these rows."
        )
    return spans.without(cut, "overlong")


def _apply_overlong(
    spans: Documents, reader: Rows, max_length: int, *, overlong: Overlong, truncation_mode: str
) -> Documents:
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
    if overlong == "split" and reader.image_stops is not None:
        return _split_outside_images(spans, reader, max_length)
    if overlong == "split":
        fragments = -(-spans.lengths // max_length)
        return _split(spans, reader, fragments=fragments, start=_index_in_group(fragments) * max_length)
    start, stop = spans.start.copy(), spans.stop.copy()
    if truncation_mode == "keep_start":
        stop[long] = start[long] + max_length
    else:
        start[long] = stop[long] - max_length
    trained = spans.trained.copy()
    trained[long] = reader.count_trained(spans.row[long], start[long], stop[long])
    cut = replace(spans, start=start, stop=stop, trained=trained)
    before, after = spans.count(long), cut.count(long)
    lost = before.tokens - after.tokens, before.trained_tokens - after.trained_tokens
    spans.ledger.truncated = Count(before.documents, *lost)
    return cut


def _split_outside_images(spans: Documents, reader: Rows, max_length: int) -> Documents:
    """Split documents so that no image is cut; drop those with an image of more than `max_length` tokens."""
    edges_of = [
        reader.cuts(row, max_length) if length > max_length else [0, length]
        for row, length in zip(spans.row.tolist(), spans.lengths.tolist(), strict=True)
    ]
    spans = spans.without(np.array([edges is None for edges in edges_of]), "overlong")
    kept = [edges for edges in edges_of if edges is not None]
    fragments = np.array([len(edges) - 1 for edges in kept], dtype=np.int64)
    start = np.array([place for edges in kept for place in edges[:-1]], dtype=np.int64)
    return _split(spans, reader, fragments=fragments, start=start)


def _cut_into_blocks(spans: Documents, reader: Rows, max_length: int) -> Documents:
    """Cut the concatenation of all documents at every multiple of `max_length` tokens; `block` counts the blocks."""
    end = np.cumsum(spans.lengths)  # of each document in the concatenation
    begin = end - spans.lengths
    first_block = begin // max_length
    fragments = (end - 1) // max_length - first_block + 1
    edge = (np.repeat(first_block, fragments) + _index_in_group(fragments)) * max_length - np.repeat(begin, fragments)
    pieces = _split(spans, reader, fragments=fragments, start=np.maximum(edge, 0))
    return replace(pieces, block=(np.cumsum(pieces.lengths) - pieces.lengths) // max_length)


def _index_in_group(counts: Int64Array) -> Int64Array:
    """Index of each element in its group, for groups of these sizes: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def token_order(reader: TokenReader | ImageRows, documents: Documents, chosen: Int64Array | None = None) -> TokenOrder:
    """The documents, or the `chosen` ones by number, sorted by their tokens, read up to the first difference of two.

    For common prefixes; images are compared by content. A document with labels that are neither its tokens nor -100
    shares nothing: a shared row has one next token. Such documents come last, with nothing in common.
    """
    row, start, stop = documents.row, documents.start, documents.stop
    chosen = np.arange(len(documents)) if chosen is None else chosen
    tokens = reader.compared if isinstance(reader, ImageRows) else reader
    may_share = tokens.labels_are_tokens(row[chosen], start[chosen], stop[chosen])
    numbers, others = chosen[may_share], chosen[~may_share]

    def read(places: np.ndarray, first: int, width: int) -> np.ndarray:
        wanted = numbers[places]
        return tokens.read_block(row[wanted], start[wanted] + first, stop[wanted], width=width)

    by_tokens = sort_by_tokens(documents.lengths[numbers], read)
    order, common = numbers[by_tokens.order], by_tokens.common
    if isinstance(reader, ImageRows):
        size = documents.lengths[order]
        before = np.concatenate([[0], size[:-1]])[: len(size)]
        is_same = (common == size) & (common == before)  # nothing of such a document is laid into a pack
        common = np.where(is_same, common, reader.outside_images(row[order], start[order], common))
    return TokenOrder(np.concatenate([order, others]), np.concatenate([common, np.zeros_like(others)]))
