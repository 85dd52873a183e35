"""What the report says of images: how many, in how many packs, and what they cost.

The readers of rows with images make this section of the report, an `ImageNumbers`: `ImageRows` for a table,
`StreamImages` for a stream.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...data.epochs import EpochPlanner
from ...planning.schedule import imbalance
from ...reporting.feature_section import ContentSection

if TYPE_CHECKING:  # the module needs torch, and `trl-packfix plan` makes reports without torch
    from ...data.stream import PackedStream, StreamCounts


@dataclass(frozen=True)
class ImageNumbers(ContentSection):
    """The images of the documents: in the first epoch of a table, or in the packs of a stream so far.

    Planning balances the sum of the costs of the vision tower and the language model between ranks. So the costs of
    one of the two models may be uneven. The *imbalance* of a model says how much longer a step takes because ranks wait
    for each other, if only this model took time: 1.0 if ranks never wait.
    """

    num_images: int
    num_documents: int  # documents with images
    per_pack: float  # mean number of images in a pack
    most: int  # largest number of images in a pack
    tower_share: float | None = None  # FLOPs of the vision tower / all FLOPs; None if the cost of the tower is unknown
    tower_imbalance: float | None = None  # imbalance of the tower alone; None if its cost is unknown, or for a stream
    language_imbalance: float | None = None  # imbalance of the language model alone; None if `tower_imbalance` is None
    # Limits of the number of documents, and of bytes of images, that wait on a rank to be packed; None for a table
    most_waiting: tuple[int, int] | None = None

    @classmethod
    def of_table(cls, planner: EpochPlanner) -> "ImageNumbers":
        """Count the images in the first epoch of a table."""
        counts = planner.documents.image_count
        assert counts is not None, "the documents have no images"
        schedule = planner.schedule(0)
        costs = planner.image_costs  # FLOPs of the vision tower for each of N documents, shape (N,)
        # A slot is the place of one pack in the schedule. A few slots may stay without documents
        has_pack = np.diff(schedule.offsets) > 0
        images_of_slots = schedule.slot_sums(counts).ravel()  # number of images in each slot
        images_of_packs = images_of_slots[has_pack]
        section = cls(
            num_images=int(counts.sum()),
            num_documents=int((counts > 0).sum()),
            per_pack=float(images_of_packs.mean()),
            most=int(images_of_packs.max()),
        )
        if not costs.any():  # they are all 0 if the cost of the tower is unknown
            return section
        language_costs = planner.packing.cost_model(planner.documents.lengths)  # FLOPs of the language model, (N,)
        return replace(
            section,
            tower_share=float(costs.sum() / (costs.sum() + language_costs.sum())),
            # `synchronisation`: whether ranks wait for each other after a micro-batch, or only after an optimizer step
            tower_imbalance=imbalance(schedule, costs, planner.packing.synchronisation),
            language_imbalance=imbalance(schedule, language_costs, planner.packing.synchronisation),
        )

    @classmethod
    def of_stream(cls, stream: "PackedStream", counts: "StreamCounts") -> "ImageNumbers":
        """Make the section from the counts of a stream so far."""
        flops = counts.tower_flops + counts.language_flops
        return cls(
            num_images=counts.images,
            num_documents=counts.with_images,
            per_pack=counts.images / max(counts.packs, 1),
            most=counts.most_images,
            tower_share=counts.tower_flops / flops if counts.tower_flops else None,
            most_waiting=(stream.packing.buffer_size, stream.most_bytes),
        )

    @property
    def imbalances_text(self) -> str:
        """The imbalances of the two models, as text; "" if they are not known.

        The text is the end of the line of the report on the imbalance of ranks, which is that of both models together.
        """
        if self.tower_imbalance is None:
            return ""
        tower = f"of the vision tower alone {self.tower_imbalance:.3f}"
        return f"; of the language model alone {self.language_imbalance:.3f}, {tower}"

    def line(self) -> str:
        """Return the text of the line on images. Of a stream without images so far it has only the limits."""
        tower = "cost not known, so not balanced"
        if self.tower_share is not None:
            tower = f"{self.tower_share:.1%} of the modelled FLOPs"
        text = (
            f"{self.num_images:,} in {self.num_documents:,} documents; {self.per_pack:.1f} in a pack, at most "
            f"{self.most:,}; vision tower: {tower}"
        )
        if self.most_waiting is None:
            return text
        documents, size = self.most_waiting
        waiting = f"at most {documents:,} documents, or {size / 2**20:,.0f} MiB of encoded images, wait on a rank"
        return f"{text}; {waiting}" if self.num_images else waiting
