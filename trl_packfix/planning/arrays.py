"""The array types of planning and data, and the key by which ends of documents are sorted.

Lengths, indices and offsets are int64, costs are float64, and masks are bool.
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

END_TOKEN_KEY = 2**32 - 1  # stands behind the last token of a document in sort keys; it is larger than any token id
