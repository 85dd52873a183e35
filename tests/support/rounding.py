"""How far apart two trainings may end that differ in nothing but rounding: measured beside each comparison.

Rounding depends on the CPU and on its instructions, so no constant holds on every machine. The measure is the reference
trained once more with the same documents in every optimizer step, in other micro-batches ("regrouped") or with its
micro-batches in another order ("reversed"). What is compared with it is another sample of the same rounding: up to
`FACTOR` times as large, and never more than `LIMIT`, so that an error of 1e-4 fails wherever it is measured.
"""

from collections.abc import Sequence

import torch

FACTOR = 10.0
RESOLUTION = torch.finfo(torch.float32).eps  # two sums in fp32 may agree by chance; less than this is no measure
LIMIT = 5e-5


def tolerance(rounding: float) -> float:
    """Return the largest relative difference allowed where rounding alone was measured to make `rounding`."""
    return min(FACTOR * max(rounding, RESOLUTION), LIMIT)


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def weight_difference(
    weights: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, least_change: float = 1e-2
) -> float:
    """Return how far the found weights are from the expected ones, relative to the expected change since `start`.

    Both are measured in the Euclidean norm and in fp64.
    """
    change = (expected.double() - start.double()).norm()
    assert change > least_change, "nothing was trained, so nothing is compared"
    return ((weights.double() - expected.double()).norm() / change).item()
