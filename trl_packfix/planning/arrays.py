"""The array types of planning and data: lengths, indices and offsets are int64, costs float64, masks bool."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

END_TOKEN_KEY = 2**32 - 1  # in place of the tokens behind the end of a document: sorts after all of them
