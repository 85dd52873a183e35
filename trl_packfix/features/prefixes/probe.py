"""Probe a model with packs whose documents share prefixes: does each document get what it gets alone?

With `share_prefixes` the collator computes the rows of a common beginning once, for all documents that have it. The
rows at the end of a document that no earlier document has are its *run*, which attends to the shared rows before it.
`PrefixProbe` makes such packs and runs the model on them, and `isolation/check_isolation.py` judges the results.
`images.py` has the probe of packs with images.

The general test, that documents do not change each other, is not enough here: a document that does not attend to its
shared beginning at all changes no other document. So each document must also have the hidden states that it has alone,
and the gradients with respect to its shared tokens.
"""

import torch
from torch import Tensor

from ...isolation.probe import SMALLEST_ROUNDING, Examples, GradientRows, Probe, replace_documents
from ...layout import layout_of
from .collator import PrefixCollator

TRUNK_TOKENS = 17  # length of the trunk, the beginning of most documents; some documents leave it earlier
BRANCH_TOKENS = 10  # tokens of the trunk after which some documents leave it, and length of the other beginning


class PrefixProbe(Probe):
    """A `Probe` whose packs compute every common beginning once.

    It compares only the *states* (last hidden states) of a document from which a token is predicted: all but the last.
    From `Probe` it has `tokens(n)`, which draws a document of n random tokens; `degree`, the number of ranks that share
    a pack; and the methods that make a batch (`_make_batch`), run the model on it (`_row_states`) and differentiate
    (`_gradient_error`).
    """

    traces_leaks = False  # `isolation/tracing.py` finds the modules of a leak only if documents have no common rows

    @property
    def _collate(self) -> PrefixCollator:
        """The collator of the packs."""
        return PrefixCollator(pad_to_multiple_of=self.degree, min_shared=1)

    def examples(self, max_length: int | None) -> Examples:
        """Draw the documents of a pack, and a list of variants of them in which one document is another one.

        Most documents begin with the trunk. Two of them are equal, and one ends where others go on. One document shares
        nothing. Two documents have another common beginning. Without them, a model that gives every run the first
        shared rows of the pack, whichever document the run belongs to, would be right.

        Args:
            max_length: most tokens of a document, behind which it is cut; None for no limit.
        """
        trunk = self.tokens(TRUNK_TOKENS)
        other_trunk = self.tokens(BRANCH_TOKENS)
        first = torch.cat([trunk, self.tokens(9)])
        third = torch.cat([trunk, self.tokens(7)])
        documents = [
            first,
            torch.cat([trunk[:BRANCH_TOKENS], self.tokens(6)]),
            third,
            first[: TRUNK_TOKENS + 3].clone(),  # ends where the first goes on
            third.clone(),  # equal to the third
            self.tokens(8),  # shares nothing
            torch.cat([third[: TRUNK_TOKENS + 4], self.tokens(5)]),
            torch.cat([other_trunk, self.tokens(6)]),
            torch.cat([other_trunk, self.tokens(9)]),
        ]
        changes = [
            (0, torch.cat([trunk, self.tokens(9)])),  # another run of the same length
            (0, torch.cat([trunk, self.tokens(12)])),  # a longer run
            (2, torch.cat([trunk[:14], self.tokens(8)])),  # fewer shared tokens
            (4, self.tokens(12)),  # no shared tokens
            (6, third[: TRUNK_TOKENS + 2].clone()),  # shared tokens only
            (7, torch.cat([other_trunk, self.tokens(4)])),  # a shorter run
        ]
        documents = [ids[:max_length] for ids in documents]
        return documents, [replace_documents(documents, {i: ids[:max_length]}) for i, ids in changes]

    def long_examples(self, threshold: int) -> Examples:
        """Draw two documents that have `threshold` tokens in common, and one that leaves them after `BRANCH_TOKENS`.

        In the variant the second document is longer.

        Args:
            threshold: length in tokens above which the model computes documents differently, such as a sliding window.
        """
        trunk = self.tokens(threshold)
        documents = [torch.cat([trunk, self.tokens(n)]) for n in (7, 9)]
        documents.append(torch.cat([trunk[:BRANCH_TOKENS], self.tokens(6)]))
        return documents, [replace_documents(documents, {1: torch.cat([trunk, self.tokens(12)])})]

    def forward_packed(self, documents: list[Tensor], gradient: bool = False) -> list[Tensor]:
        """Return the states of the predicting rows of each document in a pack, (length - 1, hidden) for each.

        With `gradient` they can be differentiated.
        """
        num_rows, targets = self._predicting_rows(documents)
        states = self._row_states(documents, num_rows, gradient=gradient)
        return [states[target.rows] for target in targets]

    def forward_alone(self, ids: Tensor) -> Tensor:
        """Return the states of the predicting rows of one document alone: all but the last."""
        return super().forward_alone(ids)[:-1]

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Return the largest error of gradients, 0 if there is none; None if the model has no such gradients.

        For each document a weighted sum of the states of its run is differentiated with respect to the embeddings of
        the pack. The sum has no states of shared rows, so the gradient reaches these rows only as the run reads them.
        There are two kinds of error: a gradient in rows that are not the document's, and a difference from the gradient
        of the document alone, relative to its largest value.
        """
        _, targets = self._predicting_rows(documents)
        # A document has no run if it shares all rows that predict a token (`rows`).
        targets = [target for target in targets if target.num_shared < len(target.rows)]
        # Relative errors up to this limit are rounding. The square root makes it generous, because gradients round more
        # than states (`rounding` is their relative error), and a wrong gradient differs by far more
        limit = max(SMALLEST_ROUNDING, self.rounding**0.5)
        return self._gradient_error(self._make_batch(documents, self.group), targets, limit=limit)

    def _predicting_rows(self, documents: list[Tensor]) -> tuple[int, list[GradientRows]]:
        """Return the number of rows of the pack, and the rows of each document from which a token is predicted."""
        batch = self._make_batch(documents)  # the whole pack, also where ranks share it
        layout = layout_of(batch)
        # `sizes` takes the number of trained tokens of each document, and counts only documents with some
        all_trained = torch.ones(layout.document_count, device=self.device)
        num_shared = layout.sizes(all_trained).shared_tokens.tolist()
        targets = [
            GradientRows(document, rows=layout.predicting_rows(i).to(self.device), num_shared=num_shared[i])
            for i, document in enumerate(documents)
        ]
        return batch["input_ids"].shape[1], targets
