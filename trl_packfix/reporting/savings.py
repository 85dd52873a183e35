"""What common prefixes save: rows computed over tokens of documents, in the first epoch, and what a setting would save.

With "family" the numbers of the whole epoch follow from the order of the documents by their tokens. Otherwise some
packs, and some stretches of the table, are sorted for an estimate. Only `trl-packfix plan` makes it: training logs what
it computes. With images "pack" is estimated from fewer packs, whose images are processed.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..data.documents import token_order
from ..data.epochs import EpochPlanner
from ..data.image_rows import ImageRows
from ..data.prefix_collator import PrefixCollator
from ..data.reader import RowReader, TokenReader
from ..layout import layout_of
from ..planning.arrays import Int64Array
from ..planning.families import Pieces, SharePrefixes, TokenOrder, shared_by_neighbours

NUM_IMAGE_PACKS = 4
NUM_PACKS = 32  # packs that are sorted to estimate what "pack" saves
NUM_STRETCHES = 32  # of neighbours in the table, in documents, to estimate what "family" saves
STRETCH = 256
WORTH_SHARING = 0.95  # share of the tokens; the report names a setting that would compute less


@dataclass(frozen=True)
class PrefixSavings:
    """Shares of the tokens of the documents that are computed, in the first epoch; None where not known."""

    setting: SharePrefixes
    rows: float | None = None  # with this setting, 1.0 for "off"; of "pack" known in an estimate only
    flops: float | None = None  # the same in modelled FLOPs
    in_packs: float | None = None  # what "pack" would compute, and "family"
    in_families: float | None = None
    images: float | None = None  # of the images, those that go through the vision tower
    num_packs: int | None = None  # from which `in_packs` (with "pack" also `rows`) is estimated; None: all
    num_documents: int | None = None  # neighbours in the table, from which `in_families` is estimated; None: all
    num_families: int | None = None  # of these documents
    families_per_step: float | None = None  # mean, with "family"
    refused: str | None = None  # why documents are packed whole although the setting is "pack"

    def line(self, num_documents: int, unpacked_documents: int, enlarges_steps: str) -> str | None:
        """Say what is saved, and how many independent families a step has; None if nothing is worth a line.

        Args:
            num_documents: documents of the run.
            unpacked_documents: documents of an optimizer step of the unpacked run.
            enlarges_steps: the settings that give a step more documents.
        """
        if self.refused is not None:
            return f"not shared: {self.refused}"
        sample = "" if self.num_packs is None else f" (estimated from {self.num_packs} packs)"
        if self.images is not None:
            return f"{self.rows:.2f} of the tokens and {self.images:.2f} of the images are computed{sample}"
        if self.rows is None:
            return "computed once in each pack; the log's computed_share is the share of the tokens that is computed"
        families = f"{self.num_documents or num_documents:,} documents in {self.num_families:,} families"
        computed = f"{self.rows:.2f} of the tokens are computed"
        per_step = self.families_per_step
        wanted = ""
        if per_step is not None:
            if per_step < unpacked_documents:
                wanted = (
                    f", and unpacked {unpacked_documents:,} documents: for as many independent ones, raise "
                    f"{enlarges_steps} {unpacked_documents / per_step:.1f} times"
                )
            return f"{computed}, {families}; an optimizer step has about {per_step:,.1f} of them{wanted}"
        would = []
        if self.in_families is not None and self.in_families < WORTH_SHARING:
            neighbours = "" if self.num_documents is None else ", neighbours in the table, as an estimate"
            would = [f'"family" {self.in_families:.2f} ({families}{neighbours})']
        if self.setting == "pack":
            return "; with share_prefixes=".join([f"{computed}{sample}", *would])
        assert self.in_packs is not None
        if self.in_packs < WORTH_SHARING:
            would.insert(0, f'"pack" {self.in_packs:.2f} of the tokens{sample}')
        return f"not shared; share_prefixes would compute: {', '.join(would)}" if would else None


def planned_savings(planner: EpochPlanner) -> PrefixSavings | None:
    """What is known of a run with this planner without reading a token; None if it shares nothing."""
    if planner.packing.share_prefixes == "off":
        return None
    if not planner.packing.shares_families:
        return PrefixSavings("pack")
    schedule = planner.schedule(0)
    tokens = planner.documents.tokens
    pieces = planner.units()
    assert tokens is not None
    assert isinstance(pieces, Pieces)
    slot = np.full(len(planner.documents), -1)
    slot[schedule.order] = np.repeat(np.arange(len(schedule.offsets) - 1), np.diff(schedule.offsets))
    rows, flops = _shares(planner, tokens.within(slot))
    # a family is counted in each step that has documents of it
    step = slot[schedule.order] // planner.packing.bins.num_slots
    families = len(np.unique(step * len(planner.documents) + pieces.family[schedule.order]))
    num_families = pieces.num_families
    per_step = families / planner.num_steps
    return PrefixSavings("family", rows, flops, num_families=num_families, families_per_step=per_step)


def estimated_savings(planner: EpochPlanner, reader: RowReader) -> PrefixSavings | None:
    """The savings of a run that packs no families; None where prefixes cannot be shared, or tokens are not known.

    Also None for documents with images and "off": to know what sharing would save, images would be processed.
    """
    if isinstance(reader, ImageRows) and planner.packing.share_prefixes == "pack":
        return _estimated_with_images(planner, reader)
    if not isinstance(reader, TokenReader):
        return None
    schedule = planner.schedule(0)
    documents = planner.documents
    filled = _some_packs(schedule.offsets, NUM_PACKS)
    is_sampled = len(documents) > NUM_STRETCHES * STRETCH
    slot = np.full(len(documents), -1)
    for i in filled.tolist():
        slot[schedule.order[schedule.offsets[i] : schedule.offsets[i + 1]]] = i
    rows, flops = _shares(planner, token_order(reader, documents, np.flatnonzero(slot >= 0)).within(slot))
    in_families = None
    num_families = 0
    if documents.block is None:
        chosen = np.arange(len(documents))
        if is_sampled:
            first = np.linspace(0, len(documents) - STRETCH, NUM_STRETCHES).astype(np.int64)
            chosen = (first[:, None] + np.arange(STRETCH)).ravel()
        pieces = planner.make_pieces(token_order(reader, documents, chosen))
        in_families = float(pieces.rows.sum() / documents.lengths[chosen].sum())
        num_families = pieces.num_families
    setting = planner.packing.share_prefixes
    now = (rows, flops) if setting == "pack" else (1.0, 1.0)
    return PrefixSavings(
        setting,
        *now,
        in_packs=rows,
        in_families=in_families,
        num_packs=NUM_PACKS if len(filled) == NUM_PACKS else None,
        num_documents=NUM_STRETCHES * STRETCH if is_sampled else None,
        num_families=num_families,
    )


def _estimated_with_images(planner: EpochPlanner, reader: ImageRows) -> PrefixSavings:
    schedule = planner.schedule(0)
    documents = planner.documents
    collate = PrefixCollator(compare=reader.compare)
    image_costs = planner.image_costs
    filled = _some_packs(schedule.offsets, NUM_IMAGE_PACKS)
    totals = np.zeros(3)  # rows, FLOPs, images
    computed = np.zeros(3)
    for i in filled.tolist():
        pack = schedule.order[schedule.offsets[i] : schedule.offsets[i + 1]]
        batch, runs = collate.collate(
            [reader.read(documents.row[j], documents.start[j], documents.stop[j]) for j in pack]
        )
        assert documents.image_count is not None
        lengths = documents.lengths[pack]
        counts = documents.image_count[pack]
        shared = layout_of(batch).sizes(torch.ones(len(pack))).saved.numpy()
        own = np.zeros(len(pack))  # the share of the images of a document that are computed in its run
        for run in runs:
            own[run.document] = 1 - run.images_before / max(run.num_images, 1)
        costs = planner.packing.cost_model(lengths)
        saved = planner.packing.cost_model(shared)
        totals += [lengths.sum(), (costs + image_costs[pack]).sum(), counts.sum()]
        computed += [(lengths - shared).sum(), (costs - saved + own * image_costs[pack]).sum(), (own * counts).sum()]
    rows, flops, images = (computed / np.maximum(totals, 1)).tolist()
    num_packs = NUM_IMAGE_PACKS if len(filled) == NUM_IMAGE_PACKS else None
    return PrefixSavings("pack", rows, flops, in_packs=rows, images=images, num_packs=num_packs)


def _some_packs(offsets: Int64Array, num_packs: int) -> Int64Array:
    """Evenly spaced slots that hold a document, at most so many."""
    filled = np.flatnonzero(np.diff(offsets))
    return filled[np.linspace(0, len(filled) - 1, min(num_packs, len(filled))).astype(int)]


def _shares(planner: EpochPlanner, tokens: TokenOrder) -> tuple[float, float]:
    """Rows and FLOPs over those of whole documents, where documents next to each other share what they can."""
    lengths = planner.documents.lengths[tokens.order]
    cost = planner.packing.cost_model
    shared = shared_by_neighbours(tokens.common, lengths)
    images, own_images = (
        planner.image_costs_behind(tokens.order, rows).sum() for rows in (np.zeros_like(shared), shared)
    )
    whole = cost(lengths).sum()
    own = whole - cost(shared).sum() + own_images
    return 1 - float(shared.sum() / lengths.sum()), float(own / (whole + images))
