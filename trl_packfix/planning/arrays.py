"""The two array types of planning: lengths, indices and offsets are int64, costs are float64."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
