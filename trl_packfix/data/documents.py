"""Decide which spans of the tokenised table are documents, and count what is cut, split and dropped.

A `RowReader` (`reader.py`) gives the lengths and labels of the rows. `make_documents` makes `Documents` of them, which
are arrays of spans. `EpochPlanner` (`epochs.py`) plans these documents into packs, and the loaders (`loaders.py`) read
their tokens. Documents are cut, split, dropped and counted only in this module.

Words:
    document       one training example as the model sees it: the tokens from `start` to `stop` of one row (a span).
                   Cutting and splitting change spans. No token is rewritten.
    pack           documents that pass through the model together.
    trained token  a token whose label is not -100 and which is not the first token of its document.
    ledger         counts of all documents and tokens of the table, and of the documents and tokens that were kept,
                   truncated, split or dropped.
    fragment       one of several documents that were made from one long document.
    block          with the strategy `wrapped`, all documents are concatenated and cut every `max_length` tokens. The
                   tokens between two cuts are a block.
"""

import hashlib
import json
import logging
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..planning.arrays import BoolArray, Int64Array, index_in_group
from ..planning.packing import Overlong, TruncationMode
from ..planning.token_order import TokenOrder
from ..samples.row import MAX_ROWS_NAMED
from ..wording import count_of
from .reader import RowReader, TokenReader

logger = logging.getLogger(__name__)

IMAGE_ARRAYS = ("image_count", "image_values", "image_squares", "image_start", "image_stop")
DOCUMENT_ARRAYS = ("row", "start", "stop", "trained", "block", *IMAGE_ARRAYS)  # the attributes that have shape (N,)


@dataclass
class DocumentCounts:
    """Totals of a group of documents."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def __add__(self, other: "DocumentCounts") -> "DocumentCounts":
        return DocumentCounts(*map(add, astuple(self), astuple(other)))


@dataclass
class Ledger:
    """Counts of documents and tokens by what was done with them. Each token is kept, truncated or dropped."""

    given: DocumentCounts = field(default_factory=DocumentCounts)  # all documents of the table
    kept: DocumentCounts = field(default_factory=DocumentCounts)  # the documents that remain
    # Documents that were truncated, and the tokens that they lost
    truncated: DocumentCounts = field(default_factory=DocumentCounts)
    # Documents that were split, and the trained tokens that they lost: the first token of each later fragment is not
    # lost, but is no longer trained. `tokens` is 0
    split: DocumentCounts = field(default_factory=DocumentCounts)
    fragments: int = 0  # number of documents that were made by splitting
    # Documents that were dropped, by the reason: `bad_row`, `empty`, `overlong` or `untrained`
    dropped: dict[str, DocumentCounts] = field(default_factory=dict)

    @property
    def lost_trained_tokens(self) -> int:
        """Number of trained tokens of the table that will not be trained.

        They were cut off or dropped, or have become the first token of a later fragment.
        """
        return self.given.trained_tokens - self.kept.trained_tokens

    def __add__(self, other: "Ledger") -> "Ledger":
        dropped = {
            reason: self.dropped.get(reason, DocumentCounts()) + other.dropped.get(reason, DocumentCounts())
            for reason in sorted(self.dropped | other.dropped)
        }
        sums = {name: count + getattr(other, name) for name, count in vars(self).items() if name != "dropped"}
        return Ledger(**sums, dropped=dropped)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Ledger":
        """Return the ledger whose `to_dict()` is `values`."""
        counts = {name: DocumentCounts(**values[name]) for name in ("given", "kept", "truncated", "split")}
        dropped = {reason: DocumentCounts(**count) for reason, count in values["dropped"].items()}
        return cls(**counts, fragments=values["fragments"], dropped=dropped)

    def to_dict(self) -> dict[str, Any]:
        """Return all counts as plain dictionaries, and `lost_trained_tokens`, for JSON."""
        return {**asdict(self), "lost_trained_tokens": self.lost_trained_tokens}


@dataclass(frozen=True)
class Documents:
    """N documents as spans of a table, in the order of the table. Arrays have the shape (N,)."""

    row: Int64Array  # row of the table that holds the document
    start: Int64Array  # first token of the document, counted inside its row
    stop: Int64Array  # the token behind the last token of the document
    trained: Int64Array  # number of trained tokens
    # Counts of the table. `Documents` that are made of these by `drop`, `select`, cutting or splitting hold the same
    # `Ledger` object, in which the dropped, cut and split documents are counted
    ledger: Ledger
    block: Int64Array | None = None  # index of the block that holds the document; None if the strategy cuts no blocks
    # The order of the documents by their tokens. Shared prefixes need it, to plan documents that begin alike as one
    # unit; otherwise it is None
    token_order: TokenOrder | None = None
    # The following arrays, up to `image_stop`, are None if the rows have no images
    image_count: Int64Array | None = None  # number of images
    image_values: Int64Array | None = None  # number of values in the processed images, which the vision tower reads
    # The square of an image's number of values, summed over the images of the document. The cost of attention in the
    # tower grows with it. If the tower reads tiles of an image separately, each tile counts as an image
    image_squares: Int64Array | None = None
    image_start: Int64Array | None = None  # first token of the first image in the document; 0 without an image
    image_stop: Int64Array | None = None  # the token behind the last image in the document; 0 without an image
    # Hashes of the documents. A restart compares them, to find out whether the data has changed. `cached_documents`
    # (`cache.py`) sets it; else it is empty
    fingerprint: str = ""
    file: Path | None = None  # the cache file of the documents; plans are cached beside it

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def lengths(self) -> Int64Array:
        """Number of tokens of each document."""
        return self.stop - self.start

    def count(self, mask: BoolArray | None = None) -> DocumentCounts:
        """Count the documents under a mask of shape (N,), or all documents."""
        counted = slice(None) if mask is None else mask
        lengths = self.lengths[counted]
        trained = self.trained[counted]
        return DocumentCounts(len(lengths), int(lengths.sum()), int(trained.sum()))

    def drop(self, mask: BoolArray, reason: str) -> "Documents":
        """Return the documents outside a mask of shape (N,), and count the documents under it as dropped."""
        if not mask.any():
            return self
        self.ledger.dropped[reason] = self.ledger.dropped.get(reason, DocumentCounts()) + self.count(mask)
        return self.select(~mask)

    def select(self, mask: BoolArray) -> "Documents":
        """Return the documents under a mask of shape (N,), numbered from 0. They have the same ledger."""
        arrays = {name: getattr(self, name) for name in DOCUMENT_ARRAYS}
        selected: dict[str, Any] = {name: None if values is None else values[mask] for name, values in arrays.items()}
        token_order = self.token_order
        if token_order is not None:
            # Two steps. `within` keeps the documents of group 0 in their order, omits those of group -1, and computes
            # anew how many tokens each document has in common with the one before it (`common`). Then the numbers of
            # documents in `order` are replaced by those that they have in the selection
            token_order = token_order.within(np.where(mask, 0, -1))
            new_number = np.cumsum(mask) - 1
            token_order = replace(token_order, order=new_number[token_order.order])
        file = self.file
        if file is not None:
            # The selection is not cached, but its plans are cached under a name that depends on the mask
            digest = hashlib.sha256(np.packbits(mask).data).hexdigest()
            file = file.with_name(f"{file.stem}-{digest[:16]}{file.suffix}")
        return replace(self, **selected, token_order=token_order, file=file)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return all attributes except `file` as flat arrays of numbers, for a cache file. Text becomes its bytes."""
        arrays = {name: getattr(self, name) for name in DOCUMENT_ARRAYS}
        if self.token_order is not None:
            arrays |= {"token_order": self.token_order.order, "common_tokens": self.token_order.common}
        arrays["lengths"] = self.lengths
        for name, text in (("ledger", json.dumps(self.ledger.to_dict())), ("fingerprint", self.fingerprint)):
            arrays[name] = np.frombuffer(text.encode(), np.uint8)
        return {name: values for name, values in arrays.items() if values is not None}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], file: Path | None = None) -> "Documents":
        """Return the documents whose `to_arrays()` are `arrays`, with the cache file that holds these arrays."""
        ledger, fingerprint = (arrays[name].tobytes().decode() for name in ("ledger", "fingerprint"))
        token_order = None
        if "token_order" in arrays:
            token_order = TokenOrder(arrays["token_order"], arrays["common_tokens"])
        columns = {name: arrays[name] for name in DOCUMENT_ARRAYS if name in arrays}
        counts = Ledger.from_dict(json.loads(ledger))
        documents = cls(ledger=counts, fingerprint=fingerprint, file=file, token_order=token_order, **columns)
        # Set the cached property to the mapped array, which all processes of the node share, so that none makes its own
        documents.__dict__["lengths"] = arrays["lengths"]
        return documents


def make_documents(
    reader: RowReader,
    max_length: int | None,
    overlong: Overlong = "truncate",
    *,
    truncation_mode: TruncationMode = "keep_start",
    cuts_blocks: bool = False,
    keep_untrained: bool = False,
    may_be_empty: bool = False,
) -> Documents:
    """Compute the documents of a table, and count in their ledger what is cut, split and dropped.

    Rows that could not be tokenised, empty documents and documents without a trained token are dropped.

    Args:
        reader: the tokenised table. A row with `seq_lengths` holds several documents.
        max_length: largest number of tokens of a document, or None for no limit.
        overlong: what happens to a longer document. "truncate" cuts it to `max_length`, "split" splits it into
            fragments of `max_length`, "drop" drops it, "raise" raises an error.
        truncation_mode: which tokens of a truncated document remain, "keep_start" or "keep_end".
        cuts_blocks: concatenate all documents and cut the concatenation every `max_length` tokens, as TRL's `wrapped`.
            Each fragment becomes a document, and `block` is the index of its block. `overlong` is not used.
        keep_untrained: keep documents without a trained token, for evaluation and prediction.
        may_be_empty: return no documents, in place of an error, if none remains. A stream is read in small tables, some
            of which may have no document.

    Raises:
        ValueError: no document remains, a document is refused by `overlong="raise"`, `seq_lengths` do not match the
            tokens, or an image of an evaluation set would be cut.
    """
    spans = _table_spans(reader)
    ledger = spans.ledger
    spans = spans.drop(reader.bad_rows()[spans.row], "bad_row")
    spans = spans.drop(spans.lengths == 0, "empty")
    if not keep_untrained:
        # Drop them before cutting, so that documents that never had a trained token are not counted as lost by the cut
        spans = spans.drop(spans.trained == 0, "untrained")
    if cuts_blocks:
        assert max_length is not None
        spans = _cut_into_blocks(spans, reader, max_length)
    elif max_length is not None:
        if overlong == "truncate" and reader.image_stops is not None:
            # Training drops the documents with an image that truncating would cut. Evaluation and prediction need all
            # rows, so they refuse such documents. Only the end can be truncated: TRL refuses "keep_end" with images
            spans = _drop_cut_images(spans, reader.image_stops, max_length, needs_all_rows=keep_untrained)
        spans = _apply_overlong(spans, reader, max_length, overlong=overlong, truncation_mode=truncation_mode)
    if not keep_untrained:
        # The cut may have removed all trained tokens of a document
        spans = spans.drop(spans.trained == 0, "untrained")
    ledger.kept = spans.count()
    if not len(spans) and not may_be_empty:
        refuse_no_documents(ledger, f"The dataset has {len(reader)} rows", max_length)
    image_arrays: dict[str, Any] = reader.image_arrays(spans.row, spans.start, spans.stop)
    return replace(spans, **image_arrays)


def refuse_no_documents(ledger: Ledger, counted: str, max_length: int | None) -> None:
    """Raise the error that no document remains to train on.

    Args:
        ledger: counts of the documents that were dropped.
        counted: the beginning of the message, a clause that says which rows were counted.
        max_length: the setting, which the message names.

    Raises:
        ValueError: always.
    """
    dropped = ", ".join(f"{count.documents} {reason}" for reason, count in ledger.dropped.items()) or "none"
    raise ValueError(
        f"{counted} and {ledger.given.documents} documents, and no document remains to train on (dropped: {dropped}; "
        f"`max_length={max_length}`). A document needs at least two tokens, and the second or a later one must be "
        "trained. Check that `labels` are not all -100, that completions are not empty, and that `max_length` does "
        "not cut off the trained part."
    )


def drop_untrained(dataset: Dataset, num_rows: int, max_length: int | None) -> Dataset:
    """Drop the rows without a trained token from a tokenised dataset, for unpacked training.

    Args:
        dataset: the tokenised rows, cut to `max_length` already.
        num_rows: number of rows before tokenisation. Tokenisation may have dropped rows without a trained token.
        max_length: the setting, which the message of the error names.

    Raises:
        ValueError: no row has a trained token.
    """
    # Rows of an unpacked run have no `seq_lengths`, so each row is one document, or none if it was dropped
    documents = make_documents(TokenReader(dataset), max_length=None, may_be_empty=True)
    num_dropped = num_rows - len(documents)
    if not len(documents):
        ledger = Ledger(given=DocumentCounts(num_rows), dropped={"untrained": DocumentCounts(num_dropped)})
        refuse_no_documents(ledger, f"The dataset has {num_rows} rows", max_length)
    if num_dropped:
        logger.warning("%d of %d documents have no trained token and are dropped from training.", num_dropped, num_rows)
    return dataset if len(documents) == len(dataset) else dataset.select(documents.row)


def _table_spans(reader: RowReader) -> Documents:
    """Return the documents before any cut: one for each row, or one for each entry of `seq_lengths`.

    Raises:
        ValueError: the `seq_lengths` of a row are not positive or do not add up to its number of tokens.
    """
    packed_rows = reader.seq_lengths()
    if packed_rows is None:
        row = np.arange(len(reader))
        start = np.zeros(len(reader), dtype=np.int64)
        stop = reader.lengths.astype(np.int64)
    else:
        documents_per_row, lengths = packed_rows
        row = np.repeat(np.arange(len(reader)), documents_per_row)
        row_totals = np.bincount(row, weights=lengths, minlength=len(reader)).astype(np.int64)
        wrong_rows = np.flatnonzero(row_totals != reader.lengths)
        wrong_lengths = np.flatnonzero(lengths < 1)
        if len(wrong_rows) or len(wrong_lengths):
            bad = int(wrong_rows[0] if len(wrong_rows) else row[wrong_lengths[0]])
            raise ValueError(
                f"`seq_lengths` of row {bad} is {lengths[row == bad].tolist()[:MAX_ROWS_NAMED]} and the row has "
                f"{reader.lengths[bad]} tokens (do not add up: {count_of(len(wrong_rows), 'row')}, below 1: "
                f"{count_of(len(wrong_lengths), 'length')}). The lengths of the documents in a packed row must be "
                "positive and add up to the row. Correct `seq_lengths`, or remove the column so that each row is one "
                "document."
            )
        # Sum the lengths over the whole table, then subtract the tokens of all rows before the row of the document
        stop = np.cumsum(lengths) - np.repeat(np.cumsum(row_totals) - row_totals, documents_per_row)
        start = stop - lengths
    spans = Documents(row, start, stop, reader.count_trained(row, start, stop), Ledger())
    spans.ledger.given = spans.count()
    return spans


def _split_documents(
    spans: Documents, reader: RowReader, *, num_fragments: Int64Array, fragment_start: Int64Array
) -> Documents:
    """Split each document into fragments, and count in the ledger what was split.

    Args:
        spans: N documents.
        reader: the table, to count the trained tokens of the fragments.
        num_fragments: number of fragments of each document, shape (N,); 1 for a document that stays whole.
        fragment_start: first token of each fragment, counted inside its document, shape (sum of `num_fragments`,). A
            fragment ends where the next fragment of its document begins.

    Returns:
        The fragments as documents, in the order of the documents.
    """
    last_fragment = np.cumsum(num_fragments) - 1
    fragment_stop = np.append(fragment_start, 0)[1:]  # as many as `fragment_start`, also if there are none
    fragment_stop[last_fragment] = spans.lengths
    document_start = np.repeat(spans.start, num_fragments)
    row = np.repeat(spans.row, num_fragments)
    start = document_start + fragment_start
    stop = document_start + fragment_stop
    fragments = replace(spans, row=row, start=start, stop=stop, trained=np.repeat(spans.trained, num_fragments))
    # Only split documents must be counted anew: the first token of each fragment is not trained
    is_split = num_fragments > 1
    changed = np.repeat(is_split, num_fragments)
    fragments.trained[changed] = reader.count_trained(row[changed], start[changed], stop[changed])
    before = spans.count(is_split)
    after = fragments.count(changed)
    spans.ledger.split = DocumentCounts(before.documents, 0, before.trained_tokens - after.trained_tokens)
    spans.ledger.fragments = after.documents
    return fragments


def _drop_cut_images(spans: Documents, image_stops: Int64Array, max_length: int, *, needs_all_rows: bool) -> Documents:
    """Drop the documents with an image that ends behind `max_length` tokens. Truncating would cut the image.

    With images each document is a whole row, so places in the row are places in the document.

    Args:
        spans: N documents.
        image_stops: the token behind the last image of each row, shape (R,).
        max_length: largest number of tokens of a document.
        needs_all_rows: refuse such documents, because evaluation has a result for every row.

    Raises:
        ValueError: `needs_all_rows`, and an image would be cut.
    """
    stops = image_stops[spans.row]
    is_too_long = stops > max_length
    if needs_all_rows and is_too_long.any():
        shown = np.flatnonzero(is_too_long)[:MAX_ROWS_NAMED]
        named = ", ".join(f"{spans.row[i]} (images up to token {stops[i]})" for i in shown)
        raise ValueError(
            f"{is_too_long.sum()} of {len(is_too_long)} documents of an evaluation set have images that end behind "
            f"`max_length={max_length}`; the first are in rows {named}. An image cannot be cut, and evaluation "
            "gives a result for every row. Raise `max_length`, make the images smaller, or remove these rows."
        )
    return spans.drop(is_too_long, "overlong")


def _apply_overlong(
    spans: Documents, reader: RowReader, max_length: int, *, overlong: Overlong, truncation_mode: str
) -> Documents:
    """Cut, split, drop or refuse the documents of more than `max_length` tokens, see `make_documents`."""
    is_long = spans.lengths > max_length
    if not is_long.any():
        return spans
    if overlong == "raise":
        shown = np.flatnonzero(is_long)[:MAX_ROWS_NAMED]
        named = ", ".join(f"{spans.row[i]} ({spans.lengths[i]} tokens)" for i in shown)
        raise ValueError(
            f"{is_long.sum()} of {len(is_long)} documents are longer than `max_length={max_length}`; the first are in "
            f'rows {named}. `overlong="raise"` refuses such documents. Raise `max_length`, or set `overlong` to '
            '"truncate", "split" or "drop".'
        )
    if overlong == "drop":
        return spans.drop(is_long, "overlong")
    if overlong == "split":
        if reader.image_stops is not None:  # rows have images, which must not be cut
            return _split_between_images(spans, reader, max_length)
        num_fragments = -(-spans.lengths // max_length)
        fragment_start = index_in_group(num_fragments) * max_length
        return _split_documents(spans, reader, num_fragments=num_fragments, fragment_start=fragment_start)
    # The setting is "truncate"
    start = spans.start
    stop = spans.stop
    if truncation_mode == "keep_start":
        stop = np.minimum(stop, start + max_length)
    else:
        start = np.maximum(start, stop - max_length)
    trained = spans.trained.copy()
    trained[is_long] = reader.count_trained(spans.row[is_long], start[is_long], stop[is_long])
    truncated = replace(spans, start=start, stop=stop, trained=trained)
    before = spans.count(is_long)
    after = truncated.count(is_long)
    spans.ledger.truncated = DocumentCounts(
        before.documents, before.tokens - after.tokens, before.trained_tokens - after.trained_tokens
    )
    return truncated


def _split_between_images(spans: Documents, reader: RowReader, max_length: int) -> Documents:
    """Split the documents of more than `max_length` tokens, each of which is a row, so that no image is cut.

    A document with an image that does not fit into a fragment is dropped.
    """
    # The edges of a document are the places where it begins, is cut, and ends
    edges_of_documents = [
        reader.find_cuts(row, max_length) if length > max_length else [0, length]
        for row, length in zip(spans.row.tolist(), spans.lengths.tolist(), strict=True)
    ]
    spans = spans.drop(np.array([edges is None for edges in edges_of_documents]), "overlong")
    edges_of_remaining = [edges for edges in edges_of_documents if edges is not None]
    num_fragments = np.array([len(edges) - 1 for edges in edges_of_remaining], dtype=np.int64)
    fragment_start = np.array([edge for edges in edges_of_remaining for edge in edges[:-1]], dtype=np.int64)
    return _split_documents(spans, reader, num_fragments=num_fragments, fragment_start=fragment_start)


def _cut_into_blocks(spans: Documents, reader: RowReader, max_length: int) -> Documents:
    """Concatenate all documents, and cut the concatenation at every multiple of `max_length` tokens.

    Returns:
        The fragments as documents, and in `block` the index of the block that holds each fragment.
    """
    # Places in the concatenation
    document_stop = np.cumsum(spans.lengths)
    document_start = document_stop - spans.lengths
    first_block = document_start // max_length
    last_block = (document_stop - 1) // max_length
    num_fragments = last_block - first_block + 1
    block = np.repeat(first_block, num_fragments) + index_in_group(num_fragments)
    # The first fragment begins with its document, and each later fragment begins with its block
    fragment_start = np.maximum(block * max_length - np.repeat(document_start, num_fragments), 0)
    fragments = _split_documents(spans, reader, num_fragments=num_fragments, fragment_start=fragment_start)
    return replace(fragments, block=block)
