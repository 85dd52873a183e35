"""Encodings of document boundaries.

A pack is one row of T tokens that holds N documents one after the other. Only this module computes encodings of their
boundaries, from the lengths of the documents, so all encodings agree.

    lengths       [3, 2]             one entry per document                  (N,)
    position_ids  [0, 1, 2, 0, 1]    restart at each document                (T,)
    cu_seq_lens   [0, 3, 5]          where each document starts, and the end (N + 1,)
    seq_idx       [0, 0, 0, 1, 1]    which document a token belongs to       (T,)
"""

import numpy as np
import numpy.typing as npt


def cu_seq_lens(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """int32, as varlen kernels need it."""
    lengths = np.asarray(lengths)
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def position_ids(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    bounds = cu_seq_lens(lengths).astype(np.int64)
    # [0, 1, 2, 3, 4] minus the start of each token's document, [0, 0, 0, 3, 3]
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))


def seq_idx(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """int32, as linear attention kernels need it."""
    lengths = np.asarray(lengths)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
