"""Rows with images are cut only where no image is, by hand."""

import numpy as np
import pytest

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.features.images.rows import ImageRows


def dropped(lengths, image_stops, max_length, *, needs_all_rows=False):
    """Return the rows that remain, and the counts of those that are dropped."""
    reader = object.__new__(ImageRows)
    reader.image_stops = np.array(image_stops)
    lengths = np.array(lengths)
    rows = np.arange(len(lengths))
    spans = Documents(rows, rows * 0, lengths, lengths - 1, Ledger())
    documents = reader.drop_cut_images(spans, max_length, needs_all_rows=needs_all_rows)
    return documents.row.tolist(), {reason: counts.tokens for reason, counts in documents.ledger.dropped.items()}


def test_an_image_that_ends_behind_the_longest_is_not_cut():
    assert dropped([9, 9, 3], [4, 5, 0], 4) == ([0, 2], {"overlong": 9})
    assert dropped([9], [4], 4, needs_all_rows=True) == ([0], {})
    with pytest.raises(ValueError, match=r"1 of 3 documents .* in rows 1 \(images up to token 5\)"):
        dropped([9, 9, 3], [4, 5, 0], 4, needs_all_rows=True)
