"""Choose the first of equal values in `topk`, so that two runs choose the same values.

In sparse attention (DeepSeek V3.2) an *indexer* scores the keys, and each query attends to the keys with the highest
scores. The indexer gives many keys a score of exactly 0. Which of them `torch.topk` chooses depends on the number of
tokens in the row. So a document in a pack may attend to other keys than the same document alone. Unpacked training has
the same ambiguity, because padding changes the choice. The comparisons of `check_isolation.py` and
`training/first_step.py` use this context.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FirstOfTies(TorchDispatchMode):
    """Within this context, `topk` chooses the first of equal values, whatever the width of the row.

    >>> with FirstOfTies():
    ...     torch.tensor([0.0, 1.0, 0.0, 0.0]).topk(3).indices.tolist()
    [1, 0, 2]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if function is torch.ops.aten.topk.default:
            function = _first_of_ties
        return function(*args, **(kwargs or {}))


def _first_of_ties(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Return values and indices as `torch.topk` does, with the first of equal values."""
    ordered, indices = values.sort(dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k), indices.narrow(dim, 0, k)
