"""The leak probe for packs whose documents share prefixes: documents that begin alike, and what must hold for them.

With images documents also share an image, or only the text before an image of the same size.

Isolation alone is not enough here. A document that does not attend to its shared beginning at all moves no other. So
each document must also have the states, and the gradients with respect to its shared tokens, that it has alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data.prefix_collator import PrefixCollator
from ..layout import layout_of
from .image_probe import HIGH, SQUARE, WIDE, ImageExamples, ImageProbe
from .probe import SMALLEST_ROUNDING, Examples, Probe, replace_documents

TRUNK = 17  # tokens that most documents begin with; some leave it earlier
BRANCH = 10


class PrefixProbe(Probe):
    """A `Probe` whose packs share every common beginning.

    States of a document are those from which a token is predicted: all but the last.
    """

    traces_leaks = False

    @property
    def _collate(self) -> PrefixCollator:
        return PrefixCollator(pad_to_multiple_of=self.degree, min_shared=1)

    def examples(self, max_length: int | None) -> Examples:
        """Documents with a common beginning, two that are equal, one that ends where others go on, and one apart.

        Two more have another beginning: with one alone, every shared row would have the same rows before it.
        """
        trunk = self.tokens(TRUNK)
        other_trunk = self.tokens(BRANCH)
        first = torch.cat([trunk, self.tokens(9)])
        third = torch.cat([trunk, self.tokens(7)])
        documents = [
            first,
            torch.cat([trunk[:BRANCH], self.tokens(6)]),
            third,
            first[: TRUNK + 3].clone(),
            third.clone(),
            self.tokens(8),
            torch.cat([third[: TRUNK + 4], self.tokens(5)]),
            torch.cat([other_trunk, self.tokens(6)]),
            torch.cat([other_trunk, self.tokens(9)]),
        ]
        changes = [
            (0, torch.cat([trunk, self.tokens(9)])),
            (0, torch.cat([trunk, self.tokens(12)])),
            (2, torch.cat([trunk[:14], self.tokens(8)])),
            (4, self.tokens(12)),
            (6, third[: TRUNK + 2].clone()),
            (7, torch.cat([other_trunk, self.tokens(4)])),
        ]
        documents = [ids[:max_length] for ids in documents]
        return documents, [replace_documents(documents, {i: ids[:max_length]}) for i, ids in changes]

    def long_examples(self, threshold: int) -> Examples:
        """Two documents that part behind the threshold, and one that leaves them before it."""
        trunk = self.tokens(threshold)
        ends = [self.tokens(n) for n in (7, 9)]
        documents = [*(torch.cat([trunk, end]) for end in ends), torch.cat([trunk[:BRANCH], self.tokens(6)])]
        return documents, [replace_documents(documents, {1: torch.cat([trunk, self.tokens(12)])})]

    def forward_packed(self, documents: list[Tensor], gradient: bool = False) -> list[Tensor]:
        num_rows, rows, _ = self._shared(documents)
        states = self._of_rows(documents, num_rows, gradient=gradient)
        return [states[rows_of_one] for rows_of_one in rows]

    def forward_alone(self, ids: Tensor) -> Tensor:
        return super().forward_alone(ids)[:-1]

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Largest gradient of one document's states with respect to the embeddings of rows that are not its own.

        If the gradient with respect to its own rows is not that of the document alone, the relative difference: the
        states are those of its run, so its shared rows get it through attention only.
        """
        _, rows, shared = self._shared(documents)
        # not of documents all of whose rows belong to others, too
        places = [each for each in zip(documents, rows, shared, strict=True) if each[2] < len(each[1])]
        limit = max(SMALLEST_ROUNDING, self.rounding**0.5)
        return self._wrong_gradient(self._make_batch(documents, self.ranks), places, limit=limit)

    def _shared(self, documents: list[Tensor]) -> tuple[int, list[Tensor], list[int]]:
        """Rows of the pack, those of each document from which a token is predicted, and how many of them it shares."""
        batch = self._make_batch(documents)
        layout = layout_of(batch)
        saved = layout.sizes(torch.ones(layout.count, device=self.device)).saved
        rows = [layout.predicting(i).to(self.device) for i in range(len(documents))]
        return batch["input_ids"].shape[1], rows, saved.tolist()


class ImagePrefixProbe(PrefixProbe, ImageProbe):
    """A `PrefixProbe` whose packs are those of training with images.

    Its gradients are those of what enters the decoder, tokens and images.
    """

    shares = True

    def image_examples(self) -> Examples:
        """An image that three documents share, another of its size behind the same text, and two images that two share.

        A third document shares the first of these two, so that a run has some of the images of its document. If ranks
        share the pack, the middle of its rows, where a part ends, is in the middle of an image.
        The runs are in another order than the documents, so images in the order of documents would be seen.
        """
        image = self.images.image
        document = self.document
        head = self.tokens(TRUNK)
        other_head = self.tokens(BRANCH)
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
        if self.degree > 1:  # the collator sorts a document that begins with an image to the end
            before = self._make_batch(documents)["input_ids"].shape[1]
            documents.append(document(image(*HIGH), self.tokens(before)))
        changes = [
            (0, document(head, image(*SQUARE), question, self.tokens(9))),  # another image
            (0, document(head, wide, question, self.tokens(9))),  # that of other documents, of another size
            (2, document(head, square, question, self.tokens(12))),
            (3, document(head, square, question, self.tokens(8))),  # the same image
            (4, document(head, self.tokens(9))),  # no image
            (7, document(other_head, wide, between, image(*HIGH), question)),
            (1, document(self.tokens(6), high)),
        ]
        return documents, [replace_documents(documents, {i: other}) for i, other in changes]

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """As that of `Probe`, of what enters the decoder."""
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
    """A probe of documents of text and, with `images`, of documents with images; if it `shares`, of their prefixes."""
    if images is None:
        return (PrefixProbe if shares else Probe)(model, degree, user_attention)
    return (ImagePrefixProbe if shares else ImageProbe)(model, images, degree, user_attention=user_attention)
