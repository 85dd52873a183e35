"""The array types of planning and data, and the numbers and names that stand for something in arrays and tables.

Lengths, indices and offsets are int64, costs are float64, and masks are bool. This module needs no torch, so that the
dry runs of the command line start fast.
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

IGNORE_INDEX = -100  # label of a token that is not trained
TEXT_KEYS = frozenset(("input_ids", "labels"))  # entries of a document that has neither images nor values of its row
MASK_COLUMNS = ("completion_mask", "assistant_masks")  # 1 marks a trained token; they are used if there are no labels
END_TOKEN_KEY = 2**32 - 1  # stands behind the last token of a document in sort keys; it is larger than any token id
