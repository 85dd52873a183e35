"""Documents as spans of a table, and the ledger that counts what was cut, split and dropped. numpy only."""

import hashlib
import json
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..planning.arrays import BoolArray, Int64Array
from ..planning.families import TokenOrder

OF_IMAGES = ("image_count", "image_values", "image_squares", "image_start", "image_stop")
COLUMNS = ("row", "start", "stop", "trained", "block", *OF_IMAGES)  # of `Documents`, in its file


@dataclass
class Count:
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0  # with a label that is not -100; the first token of a document is never one

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Ledger:
    """Counts of the given documents by what was done with them. Each token is kept, truncated or dropped.

    `truncated` and `split` count the documents concerned and the tokens they lost. A split document loses no token, but
    the first token of each later fragment is no longer a target.
    """

    given: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    truncated: Count = field(default_factory=Count)
    split: Count = field(default_factory=Count)
    fragments: int = 0  # documents that splitting made
    dropped: dict[str, Count] = field(default_factory=dict)  # for `bad_row`, `empty`, `overlong` or `untrained`

    @property
    def lost_trained_tokens(self) -> int:
        """Given trained tokens that will not be trained: cut off, dropped, or the first of a later fragment."""
        return self.given.trained_tokens - self.kept.trained_tokens

    def __add__(self, other: "Ledger") -> "Ledger":
        reasons = sorted(self.dropped | other.dropped)
        dropped = {each: self.dropped.get(each, Count()) + other.dropped.get(each, Count()) for each in reasons}
        others = {name: mine + getattr(other, name) for name, mine in vars(self).items() if name != "dropped"}
        return Ledger(**others, dropped=dropped)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Ledger":
        counts = {name: Count(**values[name]) for name in ("given", "kept", "truncated", "split")}
        dropped = {reason: Count(**count) for reason, count in values["dropped"].items()}
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
    fingerprint: str = ""  # hash of the documents, by which a restart compares them; empty if they were only counted
    file: Path | None = None  # their cache file; plans are cached beside it

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def lengths(self) -> Int64Array:
        return self.stop - self.start

    def count(self, mask: BoolArray | None = None) -> Count:
        chosen = slice(None) if mask is None else mask
        lengths, trained = self.lengths[chosen], self.trained[chosen]
        return Count(len(lengths), int(lengths.sum()), int(trained.sum()))

    def without(self, mask: BoolArray, reason: str) -> "Documents":
        """The others; those of the mask are dropped and counted."""
        if not mask.any():
            return self
        self.ledger.dropped[reason] = self.ledger.dropped.get(reason, Count()) + self.count(mask)
        return self.taken(~mask)

    def taken(self, chosen: BoolArray) -> "Documents":
        """The `chosen` documents, numbered anew from 0. The ledger stays that of all."""
        number, tokens, file = np.cumsum(chosen) - 1, self.tokens, self.file
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
