"""Run packs whose documents share prefixes, for the leak probe: documents that begin alike, with images or without.

With `share_prefixes` the collator computes the rows of a common beginning once, for all documents that have it. The
rows at the end of a document that no earlier document has are its *run*, which attends to the shared rows before it.
`PrefixProbe` and `ImagePrefixProbe` build such packs; `check_isolation.py` gets them from `make_probe` and judges them.
With images, documents also share an image, or only the text before an image of the same size.

Isolation alone is not enough here: a document that does not attend to its shared beginning at all changes no other
document. So each document must also have the states that it has alone, and the gradients with respect to its shared
tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data.prefix_collator import PrefixCollator
from ..layout import layout_of
from .image_probe import HIGH, SQUARE, WIDE, ImageExamples, ImageProbe
from .probe import SMALLEST_ROUNDING, Examples, GradientRows, Probe, replace_documents

TRUNK_TOKENS = 17  # length of the trunk, the beginning of most documents; some documents leave it earlier
BRANCH_TOKENS = 10  # tokens of the trunk after which some documents leave it, and length of the other beginning


class PrefixProbe(Probe):
    """A `Probe` whose packs compute every common beginning once.

    It compares only the states of a document from which a token is predicted: all but the last.
    """

    traces_leaks = False

    @property
    def _collate(self) -> PrefixCollator:
        return PrefixCollator(pad_to_multiple_of=self.degree, min_shared=1)

    def examples(self, max_length: int | None) -> Examples:
        """Draw a pack of text and variants of it.

        Most documents begin with the trunk. Two of them are equal, and one ends where others go on. One document shares
        nothing. Two documents have another common beginning: without them, every shared row would have the same rows
        before it.
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
            (4, self.tokens(12)),  # none
            (6, third[: TRUNK_TOKENS + 2].clone()),  # shared tokens only
            (7, torch.cat([other_trunk, self.tokens(4)])),
        ]
        documents = [ids[:max_length] for ids in documents]
        return documents, [replace_documents(documents, {i: ids[:max_length]}) for i, ids in changes]

    def long_examples(self, threshold: int) -> Examples:
        """Draw two documents that differ only behind the threshold, and one that differs from both before it."""
        trunk = self.tokens(threshold)
        documents = [torch.cat([trunk, self.tokens(n)]) for n in (7, 9)]
        documents.append(torch.cat([trunk[:BRANCH_TOKENS], self.tokens(6)]))
        return documents, [replace_documents(documents, {1: torch.cat([trunk, self.tokens(12)])})]

    def forward_packed(self, documents: list[Tensor], gradient: bool = False) -> list[Tensor]:
        num_rows, targets = self._predicting_rows(documents)
        states = self._row_states(documents, num_rows, gradient=gradient)
        return [states[target.rows] for target in targets]

    def forward_alone(self, ids: Tensor) -> Tensor:
        return super().forward_alone(ids)[:-1]

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Return the largest error of gradients, see `Probe.gradient`; on any number of ranks it compares both kinds.

        The states of a document's run are differentiated, so the gradient reaches its shared rows through attention
        only. It must be zero in rows that are not the document's. In the document's rows it must equal the gradient of
        the document alone.
        """
        _, targets = self._predicting_rows(documents)
        # A document whose rows all belong to other documents, too, has no run.
        targets = [target for target in targets if target.num_shared < len(target.rows)]
        limit = max(SMALLEST_ROUNDING, self.rounding**0.5)
        return self._gradient_error(self._make_batch(documents, self.group), targets, limit=limit)

    def _predicting_rows(self, documents: list[Tensor]) -> tuple[int, list[GradientRows]]:
        """Return the number of rows of the pack, and the rows of each document from which a token is predicted."""
        batch = self._make_batch(documents)
        layout = layout_of(batch)
        num_shared = layout.sizes(torch.ones(layout.document_count, device=self.device)).saved.tolist()
        targets = [
            GradientRows(document, layout.predicting(i).to(self.device), num_shared[i])
            for i, document in enumerate(documents)
        ]
        return batch["input_ids"].shape[1], targets


class ImagePrefixProbe(PrefixProbe, ImageProbe):
    """A `PrefixProbe` for documents with images, whose packs are made as in training with images.

    Gradients are taken with respect to the input of the decoder, which has embeddings of tokens and of images.
    """

    shares = True

    def image_examples(self) -> Examples:
        """Make a pack of documents with images, and variants of it.

        Three documents share an image, and one has a different image of the same size behind the same text. Two
        documents share two images, of which others share only the first, so that a run has some of the images of its
        document. The runs are in another order than the documents, so that a model which takes images in the order of
        documents fails. If ranks share the pack, an image lies across the middle of its rows, where a part ends.
        """
        image = self.images.image
        document = self.document
        head = self.tokens(TRUNK_TOKENS)
        other_head = self.tokens(BRANCH_TOKENS)
        square = image(*SQUARE)
        wide = image(*WIDE)
        high = image(*HIGH)
        question = self.tokens(6)
        between = self.tokens(3)
        documents = [
            document(head, square, question, self.tokens(9)),
            document(other_head, wide, self.tokens(5)),
            document(head, square, question, self.tokens(7)),
            document(head, image(*SQUARE), question, self.tokens(8)),
            document(head, self.tokens(4), high, self.tokens(6)),
            document(other_head, wide, between, high, question, self.tokens(2)),
            document(head, square, question[:2], self.tokens(11)),
            document(other_head, wide, between, high, question),
            document(other_head, wide, between, self.tokens(4)),
            document(self.tokens(8)),
        ]
        if not self.group.is_alone:  # the collator sorts a document that begins with an image to the end
            num_rows = self._make_batch(documents)["input_ids"].shape[1]
            documents.append(document(image(*HIGH), self.tokens(num_rows)))
        changes = [
            (0, document(head, image(*SQUARE), question, self.tokens(9))),  # another image
            (0, document(head, wide, question, self.tokens(9))),  # an image of other documents, of another size
            (2, document(head, square, question, self.tokens(12))),
            (3, document(head, square, question, self.tokens(8))),  # the image of other documents, which it then shares
            (4, document(head, self.tokens(9))),  # no image
            (7, document(other_head, wide, between, image(*HIGH), question)),  # another second image
            (1, document(self.tokens(6), high)),  # an image of other documents behind other text
        ]
        return documents, [replace_documents(documents, {i: new_document}) for i, new_document in changes]

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """Within this context gradients are enabled, and the first input of the decoder is put into the list.

        It is a leaf tensor, with respect to which a caller differentiates.
        """
        entered: list[Tensor] = []

        def catch(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if entered or kwargs.get("inputs_embeds") is None:
                return None
            entered.append(kwargs["inputs_embeds"].detach().requires_grad_())
            return args, kwargs | {"inputs_embeds": entered[0].clone()}

        decoder = self.inner.get_decoder()
        with decoder.register_forward_pre_hook(catch, with_kwargs=True), torch.enable_grad():
            yield entered


def make_probe(
    model: nn.Module,
    images: ImageExamples | None,
    degree: int = 1,
    *,
    user_attention: str | None = None,
    shares: bool = False,
) -> Probe:
    """Return the probe for a model, in one of four classes.

    Args:
        images: makes documents with images, which are tested in addition to documents of text; None for text only.
        shares: whether the documents of a pack share prefixes.
    """
    if images is None:
        text_class = PrefixProbe if shares else Probe
        return text_class(model, degree, user_attention)
    image_class = ImagePrefixProbe if shares else ImageProbe
    return image_class(model, images, degree, user_attention=user_attention)
