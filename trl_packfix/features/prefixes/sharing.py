"""The hooks of shared prefixes: methods that the rest of the package calls where a run with `share_prefixes` differs.

`trl_packfix.feature.features_of` makes the `PrefixSharing` of a run that shares prefixes, from its config. The methods
of its base class `Feature` change nothing. Hooks import the modules that do the work only when they are called, because
planning calls some of them in processes that need no torch.

Documents that begin alike are a *family*. A *unit* is what planning puts into a pack as a whole: a document, or a part
of a family. A *row* of a pack is the place of one token; documents share the rows of their common beginning.
"""

import logging
from typing import Any

from ...feature import FIELDS, PLAIN, Feature

logger = logging.getLogger(__name__)


class PrefixSharing(Feature):
    """The feature that computes a common beginning of documents once. `Feature` describes attributes and hooks.

    Args:
        setting: "pack", where documents share if they happen to be in one pack; or "family", where documents
            that begin alike are planned as one unit, too.
        plain: the feature of the run's packs without shared prefixes: images, or `PLAIN` for packs of text.
    """

    is_on = True
    # Parts of messages; the comments in `Feature` say what each of them names
    packs_text = "documents share prefixes"
    documents_text = "documents that share prefixes"
    off_text = '`share_prefixes="off"`'
    copies_text = "copied keys of shared prefixes"

    def __init__(self, setting: str, plain: Feature = PLAIN):
        self.setting = setting
        self._plain = plain
        # Whether documents that begin alike are planned as one unit: only with "family"
        self.regroups = setting in FIELDS["share_prefixes"].regrouping
        self.settings = {"share_prefixes": setting}  # the fields of `Packing` that switch the feature on

    @property
    def plain(self) -> Feature:
        return self._plain

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        """The most bytes of keys and values that attention copies at a time on a device."""
        from ...attention.runs import COPIED_BYTES

        return COPIED_BYTES

    def refuse_lengths(self, num_documents: int) -> None:
        """Raise ValueError, because lengths do not tell which documents begin alike."""
        raise ValueError(
            f"`--share-prefixes {self.setting}` was given with the lengths of {num_documents:,} documents. Which of "
            "them begin alike is known from their tokens. Give a dataset, or set `--share-prefixes off`."
        )

    def sort_tokens(self, reader: Any, documents: Any) -> Any:
        """Return the `TokenOrder` of the documents of a reader; None for "pack", which plans no families."""
        if not self.regroups:
            return None
        from .tokens import token_order

        return token_order(reader, documents)

    def make_units(self, units: Any, planner: Any, step_of_documents: Any = None) -> Any:
        """Return the units of families: a family, or its pieces where it is too long for a pack.

        Args:
            units: one unit for each document. They are returned for "pack".
            planner: the `EpochPlanner` of the run.
            step_of_documents: the optimizer step of each document, shape (N,), if another strategy has chosen it. Then
                all documents of a unit have the same step.
        """
        if not self.regroups:
            return units
        from .families import make_family_pieces

        tokens = planner.documents.token_order
        assert tokens is not None, "documents are not sorted by their tokens"
        if step_of_documents is None:
            return make_family_pieces(planner, tokens)
        # `within` sorts the documents of each step by themselves, so families do not cross steps. Copies are documents
        # with equal tokens. The call above puts them into different families, to spread them over the epoch. Here their
        # steps are chosen already, so they may be in one family.
        return make_family_pieces(planner, tokens.within(step_of_documents), splits_copies=False)

    def make_collator(self, collator: Any, *, keeps_last_rows: bool = False, compare: Any = None) -> Any:
        """Return a `PrefixCollator` with the settings of this collator.

        Args:
            collator: the `PackedDataCollator` of the run.
            keeps_last_rows: give a row to the last token of a document, also if all tokens before it are shared. No
                loss needs this row, but a router of experts counts its token in the load-balancing loss.
            compare: documents -> the content that is compared of each of them; None compares the tokens.
        """
        from .collator import PrefixCollator

        return PrefixCollator(**vars(collator), keeps_last_rows=keeps_last_rows, compare=compare)

    def in_evaluation(self, *, can_sort: bool, shares: bool) -> Feature:
        """Return the feature of the packs of an evaluation. Each feature gives a document the same result.

        Args:
            can_sort: whether the documents can be sorted by their tokens. If not, there are no families, and documents
                share if they happen to be in one pack.
            shares: whether documents may share at all.
        """
        if not shares:
            return self.plain
        return self if can_sort else PrefixSharing("pack", self.plain)

    def make_probe_class(self, probe_class: Any) -> Any:
        """Return the class of probes whose packs share prefixes, and hold images if other packs of the run do.

        A probe tests before training that documents of a pack do not change each other's results.
        """
        probe_class = self.plain.make_probe_class(probe_class)
        if probe_class.has_further_examples:  # only probes of packs with images have them
            from .images import ImagePrefixProbe

            return ImagePrefixProbe.with_images(probe_class.images)
        from .probe import PrefixProbe

        return PrefixProbe

    def refuse_model(self, reason: str, on_leak: str) -> None:
        """Raise PackingLeakError if training cannot go on without sharing; else warn that documents do not share.

        Training cannot go on if a leak has to raise, or if packs are planned with shared tokens ("family"), because
        without sharing these packs are longer than the capacity.

        Args:
            reason: why the model cannot compute packs with shared prefixes.
            on_leak: the setting of the run. All values but "raise" ask for training to go on.
        """
        from ...isolation.isolation_report import PackingLeakError

        # With another `on_leak` only "family" raises, and the message says why training cannot go on
        consequence = "" if on_leak == "raise" else ", and without sharing the planned packs do not fit"
        if self.regroups or on_leak == "raise":
            raise PackingLeakError(
                f"`share_prefixes={self.setting!r}` was given, and on this model {reason}. So a beginning that "
                f'documents share cannot be computed once{consequence}. Set `share_prefixes="off"`.'
            )
        logger.warning('Documents are packed whole: `share_prefixes="pack"` was given, and on this model %s.', reason)

    def report_section(self, planner: Any) -> Any:
        """Return the `PrefixSavings` of a run with this planner, for the report on its packs."""
        from .savings import planned_savings

        return planned_savings(planner)
