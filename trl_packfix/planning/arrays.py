"""The array types of planning and data, indices of groups, numbers with a meaning of their own, and names of columns.

Lengths, indices and offsets are int64, costs are float64, and masks are bool. This module needs no torch, so that the
dry runs of the command line start fast.
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

IGNORE_INDEX = -100  # label of a token that is not trained
TEXT_KEYS = frozenset(("input_ids", "labels"))  # keys of a plain text document; others are images, a weight ...
MASK_COLUMNS = ("completion_mask", "assistant_masks")  # 1 marks a trained token; they are used if there are no labels
# Where documents are sorted by their tokens, this follows the last token. It is larger than any token id, so a document
# comes behind all longer documents that begin with its tokens.
END_TOKEN_KEY = 2**32 - 1


def offsets_of(sizes: Int64Array | BoolArray) -> Int64Array:
    """Return where groups of these sizes begin that follow each other, and where the last ends: [2, 3] -> [0, 2, 5]."""
    return np.concatenate([[0], np.cumsum(sizes)])


def index_in_group(sizes: Int64Array) -> Int64Array:
    """Return the index of each element in its group, for groups of these sizes: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def restarts(positions: npt.ArrayLike) -> bool:
    """Return whether the positions of a row begin again, so that the row holds several documents.

    Positions in several dimensions, as of images, are not looked at.
    """
    array = np.asarray(positions)
    return array.ndim == 1 and bool((array[1:] == 0).any())
