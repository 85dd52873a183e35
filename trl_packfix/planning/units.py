"""What planning packs into what: units into bins. numpy only.

A *unit* is planned as one: a document, a document with images, or documents that begin alike (`Pieces`). It has a
number of rows, by which it fits a bin, and a cost, by which bins are balanced. The cost depends on the ranks that share
the bin. After planning, units are expanded to their documents.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .arrays import Float64Array, Int64Array
from .costs import CostModel

Balance = Literal["step", "none"]
Synchronisation = Literal["micro", "step"]


@dataclass(frozen=True, kw_only=True)
class Bins:
    """The slots of every optimizer step, S = G * W, and how they are filled."""

    capacity: int  # most rows of a bin
    accumulation: int = 1  # G, micro-batches per optimizer step and rank
    world_size: int = 1  # W, data-parallel ranks, or groups of ranks that share a bin
    degree: int = 1  # ranks of a group
    balance: Balance = "step"  # deals the units of a step by cost, so that ranks finish together; "none": as they come
    synchronisation: Synchronisation = "micro"  # ranks wait for each other after every micro-batch, or after the step
    drop_last: bool = False  # leave out the last incomplete step
    evens_targets: bool = False  # evens out the trained tokens of the bins instead of their cost
    batch_size: int = 1  # documents per micro-batch of the unpacked run

    @property
    def num_slots(self) -> int:
        """S, bins of an optimizer step."""
        return self.accumulation * self.world_size


@dataclass(frozen=True, eq=False)
class Units:
    """Documents, each planned on its own.

    >>> Units(np.array([1, 3]), CostModel(per_token=10, per_pair=2), np.array([0.0, 5.0])).costs().tolist()
    [12.0, 47.0]
    """

    rows: Int64Array  # of each unit, shape (U,); those of a document are its tokens
    cost_model: CostModel
    image_costs: Float64Array | float = 0.0  # FLOPs of the images of each unit in the vision tower, shape (U,)
    targets: Int64Array | None = None  # trained tokens of each unit, shape (U,); None of units that are never evened
    _costs: dict[int, Float64Array] = field(init=False, repr=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def costs(self, degree: int = 1) -> Float64Array:
        """FLOPs of each unit on the `degree` ranks that share a bin together, shape (U,); they divide the images."""
        if degree not in self._costs:
            self._costs[degree] = self._language_costs(self.cost_model.shared_by(degree)) + self.image_costs
        return self._costs[degree]

    def _language_costs(self, cost_model: CostModel) -> Float64Array:
        return cost_model(self.rows)

    def visited(self, order: Int64Array) -> Int64Array:
        """The order in which units are visited, from a random one, both shape (U,)."""
        return order

    def documents(
        self, units: Int64Array, offsets: Int64Array, rng: np.random.Generator | None
    ) -> tuple[Int64Array, Int64Array]:
        """The documents of `units`, in each as `rng` draws them, and `offsets` into `units` as offsets into these."""
        return units, offsets

    def of(self, documents: Int64Array, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The inverse of `documents`: the units that these documents are, and `offsets` into the units."""
        return documents, offsets
