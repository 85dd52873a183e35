"""The *units* that planning packs, and the *slots* that the packs go to. Imports numpy, not torch.

A *unit* is planned as one thing: a document, with its images if it has any, or several documents that a feature
plans as one (a subclass of `Units`). It has a number of rows, by which it fits into a pack, and a cost in FLOPs, by
which packs are balanced. A *slot* is the place of one pack: one micro-batch of one rank, or of one group of ranks that
share the pack. The *degree* is the number of ranks in the group; the cost of a unit depends on it.

`data/epochs.py` makes units from the lengths of documents, and `Packing` makes the `Bins`, which describe the slots,
from the settings. After planning, units are replaced by their documents. Letters: N documents, U units, S slots of an
optimizer step. The *unpacked run* is the training that TRL would do with the same config and without packing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .arrays import Float64Array, Int64Array
from .costs import CostModel

Balance = Literal["step", "none"]  # values of `Bins.balance`
Synchronisation = Literal["micro", "step"]  # values of `Bins.synchronisation`


@dataclass(frozen=True, kw_only=True)
class Bins:
    """The S = G * W slots of every optimizer step, and how they are filled."""

    capacity: int  # most rows of a pack
    accumulation: int = 1  # G, micro-batches per optimizer step and rank
    world_size: int = 1  # W, data-parallel ranks, or groups of ranks that share a pack
    degree: int = 1  # ranks of a group
    balance: Balance = "step"  # "step" deals the units of a step so that ranks finish together; "none" does not
    # When ranks wait for each other: after every micro-batch ("micro"), or only after the last one of a step ("step")
    synchronisation: Synchronisation = "micro"
    drop_last: bool = False  # the last step is omitted if it is incomplete
    # The packs of a step get about equal numbers of trained tokens, and not equal costs, because the user's own loss
    # may be a mean per micro-batch
    evens_targets: bool = False
    batch_size: int = 1  # documents per micro-batch of the unpacked run

    @property
    def num_slots(self) -> int:
        """S, the number of slots in an optimizer step."""
        return self.accumulation * self.world_size

    def fits(self, packs: Iterable[Int64Array], units: "Units") -> bool:
        """Return whether each pack may be in a slot. This is the only rule about what may share a pack.

        All functions that deal units anew call this method, and keep the packs that were planned if it returns False.
        Functions that halve a pack do not call it. So any rule that is added here must hold for each part of a pack for
        which it holds, as the limit on rows does.

        Args:
            packs: indices of the units in each pack.
            units: all units.
        """
        return all(units.rows[pack].sum() <= self.capacity for pack in packs)


@dataclass(frozen=True, eq=False)
class Units:
    """U units. Here each unit is one document, so U = N. Features that plan several documents as one have a subclass.

    >>> Units(np.array([1, 3]), CostModel(per_token=10, per_pair=2), np.array([0.0, 5.0])).costs().tolist()
    [12.0, 47.0]
    """

    rows: Int64Array  # rows of each unit, shape (U,); a document has a row for each token
    cost_model: CostModel
    image_costs: Float64Array | float = 0.0  # FLOPs of the images of each unit in the vision tower, shape (U,)
    targets: Int64Array | None = None  # trained tokens of each unit, shape (U,); needed for `Bins.evens_targets`
    _costs: dict[int, Float64Array] = field(init=False, repr=False, default_factory=dict)  # by degree, once computed

    def __len__(self) -> int:
        return len(self.rows)

    def costs(self, degree: int = 1) -> Float64Array:
        """Return the FLOPs of each unit on all `degree` ranks of a group together, shape (U,)."""
        if degree not in self._costs:
            # If the ranks have unequal numbers of attention heads, each counts with the most heads that one of them has
            cost_model = self.cost_model.shared_by(degree)
            self._costs[degree] = self._language_costs(cost_model) + self.image_costs
        return self._costs[degree]

    def _language_costs(self, cost_model: CostModel) -> Float64Array:
        """Return the FLOPs of each unit in the language model, shape (U,)."""
        return cost_model(self.rows)

    def sort_by_step(
        self, order: Int64Array, step_of_documents: Int64Array, num_steps: int
    ) -> tuple[Int64Array, Int64Array]:
        """Sort the units by the optimizer step that their documents have in the unpacked run.

        Documents keep this step in packed training. Here each unit is a document, so `order` is sorted already.

        Args:
            order: indices of the documents in the order in which the unpacked run visits them, shape (N,).
            step_of_documents: the step of each document, by its index, shape (N,); -1 for a document that the unpacked
                run does not reach. Such documents are last in `order`.
            num_steps: the number of steps.

        Returns:
            The sorted units, shape (U,), and where the units of each step begin in them, shape (num_steps + 1,).
        """
        num_reached = int((step_of_documents >= 0).sum())
        step_of_reached = step_of_documents[order[:num_reached]]  # ascending
        return order, np.searchsorted(step_of_reached, np.arange(num_steps + 1))

    def visiting_order(self, order: Int64Array) -> Int64Array:
        """Return the order in which units are visited, shape (U,). Subclasses may change the random `order`."""
        return order

    def to_documents(
        self, units: Int64Array, offsets: Int64Array, rng: np.random.Generator | None
    ) -> tuple[Int64Array, Int64Array]:
        """Replace the units of slots by their documents.

        Args:
            units: indices of units, slot after slot.
            offsets: slot i has the units from `offsets[i]` up to `offsets[i + 1]`.
            rng: draws the order of the documents in each unit; without it they are in the order of their indices.

        Returns:
            The indices of the documents, slot after slot, and the offsets of the slots into them.
        """
        return units, offsets

    def from_documents(self, documents: Int64Array, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Replace the documents of slots by their units, the inverse of `to_documents`.

        Args:
            documents: indices of documents, slot after slot; the documents of a unit follow each other.
            offsets: slot i has the documents from `offsets[i]` up to `offsets[i + 1]`.

        Returns:
            The indices of the units, slot after slot, and the offsets of the slots into them.
        """
        return documents, offsets
