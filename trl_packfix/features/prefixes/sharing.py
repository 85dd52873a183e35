"""The hooks of shared prefixes: what the core finds where a run with `share_prefixes` differs from one without.

`trl_packfix.feature.features_of` makes the `PrefixSharing` of a run from its config. Hooks import the modules that do
the work when they are called: planning calls some of them in processes that need no torch.
"""

import logging
from typing import Any

from ...feature import FIELDS, Feature

logger = logging.getLogger(__name__)
SHARING = FIELDS["share_prefixes"]


class PrefixSharing(Feature):
    """Documents that begin alike compute their common beginning once, in the packs where they meet.

    Args:
        setting: "off"; "pack", which shares in the packs of a run without the feature; or "family", which also plans
            documents that begin alike as one unit.
    """

    packs_text = "documents share prefixes"
    documents_text = "documents that share prefixes"
    off_text = '`share_prefixes="off"`'
    copies_text = "copied keys of shared prefixes"

    def __init__(self, setting: str = "off"):
        self.setting = setting
        self.is_on = setting != SHARING.off
        self.regroups = setting in SHARING.regrouping
        self.needs_lookup = self.is_on
        self.settings = {"share_prefixes": setting}

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        if not self.is_on:
            return 0
        from ...attention.runs import COPIED_BYTES

        return COPIED_BYTES

    def refuse_lengths(self, num_documents: int) -> None:
        if self.is_on:
            raise ValueError(
                f"`--share-prefixes {self.setting}` was given with the lengths of "
                f"{num_documents:,} documents. Which of them begin alike is known from their tokens. Give a "
                "dataset, or set `--share-prefixes off`."
            )

    def sort_tokens(self, reader: Any, documents: Any) -> Any:
        if not self.regroups:
            return None
        from .tokens import token_order

        return token_order(reader, documents)

    def make_units(self, units: Any, planner: Any, step_of_documents: Any = None) -> Any:
        if not self.regroups:
            return units
        from .families import make_family_pieces

        tokens = planner.documents.tokens
        assert tokens is not None, "documents are not sorted by their tokens"
        if step_of_documents is None:
            return make_family_pieces(planner, tokens)
        return make_family_pieces(planner, tokens.within(step_of_documents), splits_copies=False)

    def make_collator(self, collator: Any, *, keeps_last_rows: bool = False, compare: Any = None) -> Any:
        if not self.is_on:
            return collator
        from .collator import PrefixCollator

        return PrefixCollator(**vars(collator), keeps_last_rows=keeps_last_rows, compare=compare)

    def in_evaluation(self, *, packs_images: bool, shares: bool) -> "PrefixSharing":
        # Evaluation gives one result per document, so packs that share nothing are as good.
        if not (shares and self.is_on):
            return PrefixSharing()
        # To sort documents with images by their tokens, all images would have to be processed.
        return PrefixSharing("pack") if packs_images else self

    def make_probe_class(self, probe_class: Any) -> Any:
        if not self.is_on:
            return probe_class
        from ...isolation.image_probe import ImageProbe

        if issubclass(probe_class, ImageProbe):
            from .images import ImagePrefixProbe

            return ImagePrefixProbe
        from .probe import PrefixProbe

        return PrefixProbe

    def refuse_model(self, reason: str, on_leak: str) -> None:
        from ...isolation.isolation_report import PackingLeakError

        # Packs of families are planned with shared tokens, and do not fit without sharing.
        consequence = "" if on_leak == "raise" else ", and without sharing the planned packs do not fit"
        if self.regroups or on_leak == "raise":
            raise PackingLeakError(
                f"`share_prefixes={self.setting!r}` was given, and on this model {reason}. So a beginning that "
                f'documents share cannot be computed once{consequence}. Set `share_prefixes="off"`.'
            )
        logger.warning('Documents are packed whole: `share_prefixes="pack"` was given, and on this model %s.', reason)

    def report_section(self, planner: Any) -> Any:
        if not self.is_on:
            return None
        from .savings import planned_savings

        return planned_savings(planner)

    def estimate(self, planner: Any, reader: Any) -> Any:
        from .savings import estimated_savings, planned_savings

        # The plan of families has their savings already.
        return planned_savings(planner) if self.regroups else estimated_savings(planner, reader)
