"""Documents -> the batch of a pack that a rank computes: tokens, common beginnings, images, and the part of the rank.

Only the rows pad, in one place: T is a multiple of the setting and of the number of ranks that share the pack.
"""

from dataclasses import dataclass
from typing import Any

from .collator import PackedDataCollator
from .image_collator import NO_IMAGES, PackedImages
from .parts import PartOf, cut_part


@dataclass
class PackCollator:
    rows: PackedDataCollator  # a `PrefixCollator` shares common beginnings
    images: PackedImages = NO_IMAGES

    def __call__(self, pack: list[dict[str, Any]]) -> dict[str, Any]:
        part = PartOf.like(pack, pack)
        documents = self.images.with_placeholder(part)
        batch, runs = self.rows.collate(documents, part.degree)
        batch |= self.images(documents, runs, batch["position_ids"])
        return cut_part(batch, part.degree, part.member, has_images=bool(self.images.layout.images))
