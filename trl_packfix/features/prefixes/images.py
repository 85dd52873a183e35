"""The probe of packs with images that share prefixes.

Documents that begin alike share an image as a whole, or nothing of it: where their images differ, only the text before
the image is shared. The probe tests on the model whether each document gets what it gets alone. `probe.py` has the
same for documents of text.

A *row* of a pack is the place of one token. The *run* of a document is its rows that no earlier document has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...isolation.probe import Examples, replace_documents
from ..images.probe import HIGH, SQUARE, WIDE, ImageProbe
from .collator import PrefixCollator
from .probe import BRANCH_TOKENS, TRUNK_TOKENS, PrefixProbe


class ImagePrefixProbe(PrefixProbe, ImageProbe):
    """A `PrefixProbe` for documents with images, whose packs are made as in training with images.

    Gradients are taken with respect to the input of the decoder, which has embeddings of tokens and of images.
    `tokens(n)` draws n random tokens, and `images` (`ImageExamples`) draws images and processes them.
    """

    @property
    def _collate(self) -> PrefixCollator:
        """The collator of the packs, which compares images by their content."""
        return replace(super()._collate, compare=self.images.process.compare)

    def further_examples(self) -> Examples:
        """Make a pack of documents with images, and variants of it.

        Documents 0, 2 and 6 share an image, and document 3 has a different image of the same size behind the same text.
        Documents 5 and 7 share two images, and documents 1 and 8 share only the first of these with them. So the run of
        a document may have only its second image. The runs are in another order than the documents, so that a model
        which takes images in the order of documents fails. If ranks share the pack, an image lies across the middle of
        its rows, where a part ends.
        """
        image = self.images.image  # makes a random image of a width and a height in pixels
        document = self.document  # joins tokens and images to a document
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
        if not self.group.is_alone:
            # This document becomes the last one in the pack. Behind its image it has as many rows as all other
            # documents together, so the image is in the middle of the pack.
            num_rows = self._make_batch(documents)["input_ids"].shape[1]
            documents.append(document(image(*HIGH), self.tokens(num_rows)))
        changes = [
            (0, document(head, image(*SQUARE), question, self.tokens(9))),  # another image
            (0, document(head, wide, question, self.tokens(9))),  # an image of other documents, of another size
            (2, document(head, square, question, self.tokens(12))),  # other and more text behind the shared image
            (3, document(head, square, question, self.tokens(8))),  # the image of other documents, which it then shares
            (4, document(head, self.tokens(9))),  # no image
            (7, document(other_head, wide, between, image(*HIGH), question)),  # another second image
            (1, document(self.tokens(6), high)),  # an image of other documents behind other text
        ]
        return documents, [replace_documents(documents, {i: new_document}) for i, new_document in changes]

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """Within this context gradients are enabled, and the input of the decoder's first forward is put into a list.

        Until then the list is empty. The input is a leaf tensor, with respect to which a caller differentiates.
        """
        decoder_inputs: list[Tensor] = []

        def catch_input(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if decoder_inputs or kwargs.get("inputs_embeds") is None:
                return None
            decoder_inputs.append(kwargs["inputs_embeds"].detach().requires_grad_())
            # A copy, because some decoders change their input in place, which autograd refuses for a leaf
            return args, kwargs | {"inputs_embeds": decoder_inputs[0].clone()}

        decoder = self.inner.get_decoder()
        with decoder.register_forward_pre_hook(catch_input, with_kwargs=True), torch.enable_grad():
            yield decoder_inputs
