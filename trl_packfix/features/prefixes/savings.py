"""Count what shared prefixes save in the first epoch, and estimate what another setting would save.

Documents that begin with the same tokens can compute the rows of their common beginning once. With
`share_prefixes="pack"` they do so if they happen to be in one pack; with "family" such documents are planned as one
unit, a *family*, so they are in one pack. A family that is too large for one pack is cut into several units, and every
unit is called a *piece*. With "off" documents compute all rows. What is saved is told by the share that is still
computed: rows computed / tokens of the documents, and the same for FLOPs.

`PrefixSharing.report_section` calls `planned_savings` for the report. It reads no token: with "family", the order of
the documents by their tokens is known from planning. `estimated_savings` is called by `trl-packfix plan` only. It sorts
the tokens of some packs (for "pack") and of some *stretches*, documents that follow each other in the table (for
"family"). In training, the log has what was really computed.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ...data.documents import Documents
from ...data.epochs import EpochPlanner
from ...data.reader import RowReader, TokenReader
from ...planning.arrays import Int64Array
from ...planning.packing import SharePrefixes
from ...planning.token_order import TokenOrder
from ...reporting.feature_section import FeatureSection
from .families import Pieces, make_family_pieces, shared_by_neighbours
from .tokens import token_order

NUM_PACKS = 32  # packs that are sorted to estimate what "pack" saves
NUM_STRETCHES = 32  # stretches of the table that are sorted to estimate what "family" saves
STRETCH_LENGTH = 256  # documents in a stretch
WORTH_SHARING = 0.95  # the report names a setting that would compute a smaller share of the tokens


@dataclass(frozen=True)
class PrefixSavings(FeatureSection):
    """The shares of tokens, FLOPs and images that are computed in the first epoch; None if a share is not known.

    It is the section of the report about shared prefixes.
    """

    setting: SharePrefixes  # the value of `share_prefixes` in this run
    # Share of the tokens that is computed with this setting; with "pack" known only as an estimate
    rows: float | None = None
    flops: float | None = None  # share of the modelled FLOPs that is computed with this setting
    in_packs: float | None = None  # share of the tokens that "pack" computes, or would compute
    in_families: float | None = None  # share of the tokens that "family" computes, or would compute
    images: float | None = None  # share of the images that go through the vision tower
    num_packs: int | None = None  # packs from which `in_packs` is estimated (with "pack", also `rows`); None: all packs
    num_documents: int | None = None  # documents from which `in_families` is estimated; None: all documents
    num_families: int | None = None  # families of these documents
    families_per_step: float | None = None  # with "family", the mean number of families in an optimizer step
    # Why the model cannot share prefixes, although the setting is "pack". With "family" training is then refused
    refused: str | None = None

    @property
    def is_used(self) -> bool:
        """Whether documents of the run share rows."""
        return self.setting != "off" and self.refused is None

    def refuse(self, reason: str) -> Self:
        """Return these savings for a model that cannot share prefixes."""
        return replace(self, refused=reason)

    def independent_documents(self, unpacked_documents: int) -> tuple[float, str, str] | None:
        """Return how many independent documents an optimizer step has, for the advice on the learning rate.

        Documents of a family are not independent, so a family counts as one independent document.

        Args:
            unpacked_documents: documents of an optimizer step of the unpacked run.

        Returns:
            (families per step, beginning of the line of the report with this advice, end of this line, which names a
            setting without families); None if the run plans no families.
        """
        per_step = self.families_per_step
        if per_step is None:
            return None
        text = f"{per_step:,.1f} families per step (unpacked: {unpacked_documents:,} documents): "
        return per_step, text, '; or share_prefixes="pack"'

    def line(self, num_documents: int, unpacked_documents: int, step_size_settings: str) -> str | None:
        """Return the text of the line on prefixes; None if sharing would save too little.

        Args:
            num_documents: documents of the run.
            unpacked_documents: documents of an optimizer step of the unpacked run.
            step_size_settings: the settings that give a step more documents.
        """
        if self.refused is not None:
            return f"not shared: {self.refused}"
        sample_note = "" if self.num_packs is None else f" (estimated from {self.num_packs} packs)"
        if self.images is not None:
            return f"{self.rows:.2f} of the tokens and {self.images:.2f} of the images are computed{sample_note}"
        if self.rows is None:  # "pack", planned without reading a token
            return "computed once in each pack; the log's computed_share is the share of the tokens that is computed"
        families = f"{self.num_documents or num_documents:,} documents in {self.num_families:,} families"
        computed = f"{self.rows:.2f} of the tokens are computed"
        per_step = self.families_per_step
        if per_step is not None:
            text = f"{computed}, {families}; an optimizer step has about {per_step:,.1f} of them"
            if per_step < unpacked_documents:
                text += (
                    f", and unpacked {unpacked_documents:,} documents: for as many independent ones, raise "
                    f"{step_size_settings} {unpacked_documents / per_step:.1f} times"
                )
            return text
        # No families are packed: name the settings that would compute less.
        better_settings = []
        if self.setting == "off" and self.in_packs is not None and self.in_packs < WORTH_SHARING:
            better_settings.append(f'"pack" {self.in_packs:.2f} of the tokens{sample_note}')
        if self.in_families is not None and self.in_families < WORTH_SHARING:
            neighbours = "" if self.num_documents is None else ", neighbours in the table, as an estimate"
            better_settings.append(f'"family" {self.in_families:.2f} ({families}{neighbours})')
        if self.setting == "pack":
            text = f"{computed}{sample_note}"
            return f"{text}; with share_prefixes={better_settings[0]}" if better_settings else text
        return f"not shared; share_prefixes would compute: {', '.join(better_settings)}" if better_settings else None


def planned_savings(planner: EpochPlanner) -> PrefixSavings:
    """Count what a run that shares prefixes saves, as far as it is known without reading a token.

    With "pack", only the setting is known.
    """
    setting = planner.packing.share_prefixes
    if setting == "pack":
        return PrefixSavings(setting)
    schedule = planner.schedule(0)
    tokens = planner.documents.token_order  # all documents, sorted by their tokens
    pieces = planner.units()  # `family`: the number of the family of each document, shape (N,)
    assert tokens is not None
    assert isinstance(pieces, Pieces)
    slot = _slots_of_documents(planner)
    rows, flops = _computed_shares(planner, tokens.within(slot))  # sorted by tokens inside each pack
    # Count a family in every step that has documents of it. Each step has `num_slots` slots, one after the other.
    step = slot[schedule.order] // planner.packing.bins.num_slots
    step_and_family = step * len(planner.documents) + pieces.family[schedule.order]  # one number for each pair
    num_in_steps = len(np.unique(step_and_family))
    return PrefixSavings(
        "family",
        rows=rows,
        flops=flops,
        num_families=pieces.num_families,
        families_per_step=num_in_steps / planner.num_steps,
    )


def estimated_savings(planner: EpochPlanner, reader: RowReader) -> PrefixSavings | None:
    """Estimate what a run without families saves, and what the other settings would save.

    Returns:
        The savings; None if prefixes cannot be shared or tokens are not known. For documents with images they are
        estimated only with "pack".
    """
    setting = planner.packing.share_prefixes
    has_images = reader.image_counts is not None
    if not isinstance(reader, TokenReader) and not (has_images and setting == "pack"):
        return None
    documents = planner.documents
    # 1. Sort the documents of some packs.
    slots = _spaced_slots(planner, NUM_PACKS)
    slot = _slots_of_documents(planner)
    sampled_tokens = token_order(reader, documents, selection=np.flatnonzero(np.isin(slot, slots))).within(slot)
    rows, flops = _computed_shares(planner, sampled_tokens)  # sorted by tokens inside each slot's pack
    images = _computed_share_of_images(documents, reader, sampled_tokens) if has_images else None
    # 2. Make families of some stretches. Blocks of a concatenated table have no families.
    is_sampled = len(documents) > NUM_STRETCHES * STRETCH_LENGTH
    in_families = None
    num_families = 0
    if documents.block is None:  # the table is not concatenated and cut into blocks
        numbers = np.arange(len(documents))
        if is_sampled:
            first = np.linspace(0, len(documents) - STRETCH_LENGTH, NUM_STRETCHES).astype(np.int64)
            numbers = (first[:, None] + np.arange(STRETCH_LENGTH)).ravel()
        pieces = make_family_pieces(planner, token_order(reader, documents, selection=numbers))
        in_families = float(pieces.rows.sum() / documents.lengths[numbers].sum())  # `rows`: computed rows of each piece
        num_families = pieces.num_families
    return PrefixSavings(
        setting,
        rows=rows if setting == "pack" else 1.0,
        flops=flops if setting == "pack" else 1.0,
        in_packs=rows,
        in_families=in_families,
        images=images,
        num_packs=NUM_PACKS if len(slots) == NUM_PACKS else None,
        num_documents=NUM_STRETCHES * STRETCH_LENGTH if is_sampled else None,
        num_families=num_families,
    )


def _slots_of_documents(planner: EpochPlanner) -> Int64Array:
    """Return the slot of each document in the first epoch, shape (N,); -1 for documents that the epoch does not reach.

    A slot is the place of one pack in the schedule.
    """
    schedule = planner.schedule(0)
    slots = np.full(len(planner.documents), -1)
    slots[schedule.order] = np.repeat(np.arange(len(schedule.offsets) - 1), np.diff(schedule.offsets))
    return slots


def _spaced_slots(planner: EpochPlanner, num: int) -> Int64Array:
    """Return at most `num` evenly spaced slots of the first epoch that hold documents."""
    slots = np.flatnonzero(np.diff(planner.schedule(0).offsets))
    return slots[np.linspace(0, len(slots) - 1, min(num, len(slots))).astype(int)]


def _computed_shares(planner: EpochPlanner, tokens: TokenOrder) -> tuple[float, float]:
    """Return the shares of the rows and of the FLOPs that are computed, if neighbours share what they can.

    Args:
        planner: the planner of the documents.
        tokens: M documents, sorted by their tokens inside each pack. `order` has their numbers, and `common` the number
            of tokens that each has in common with the document before it, both of shape (M,).
    """
    lengths = planner.documents.lengths[tokens.order]
    cost_model = planner.packing.cost_model
    # Rows that each document shares with the one before it, shape (M,): all common tokens but the last. After the last
    # one the documents go on differently, so each needs a row of its own to predict its next token. Equal documents
    # share all rows, and documents that could share only a few rows share none
    shared = shared_by_neighbours(tokens.common, lengths)
    # FLOPs of all images in the vision tower, and of the images behind the shared tokens
    image_costs = planner.image_costs_behind(tokens.order, np.zeros_like(shared)).sum()
    own_image_costs = planner.image_costs_behind(tokens.order, shared).sum()
    costs = cost_model(lengths).sum()
    # Attention is causal, so the shared tokens of a document cost what a document of only these tokens would
    own_costs = costs - cost_model(shared).sum() + own_image_costs
    return 1 - float(shared.sum() / lengths.sum()), float(own_costs / (costs + image_costs))


def _computed_share_of_images(documents: Documents, reader: RowReader, tokens: TokenOrder) -> float:
    """Return the share of the images that are computed, if neighbours share what they can.

    Args:
        documents: the documents, with images.
        reader: the reader of their rows.
        tokens: M documents, sorted by their tokens inside each pack, as in `_computed_shares`.
    """
    order = tokens.order
    shared = shared_by_neighbours(tokens.common, documents.lengths[order])
    assert documents.image_count is not None
    behind = reader.image_arrays(documents.row[order], documents.start[order] + shared, documents.stop[order])
    return float(behind["image_count"].sum() / max(documents.image_count[order].sum(), 1))
