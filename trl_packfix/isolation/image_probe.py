"""The leak probe for packs with images: documents of unequal layout, and what is changed in them.

Documents that all have their images in the same places prove nothing: a model that takes the places from another
document gives the same result.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..data.rank_share import RankShare
from .probe import Documents, Examples, Probe, replace_documents
from .probed_model import LOCAL_RANK, LocalRank

if TYPE_CHECKING:
    from ..data.image_examples import ImageExamples as ImageExamples
else:  # without the libraries of datasets and images
    ImageExamples = Any
# Width and height in pixels. Processors that keep the aspect ratio give each size another number of tokens.
SQUARE = (112, 112)
WIDE = (196, 112)
HIGH = (112, 168)


class ImageDocument:
    """A document with images, by the names of its entries; its length is its number of tokens."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __len__(self) -> int:
        return len(self.values["input_ids"])


class ImageProbe(Probe):
    """A `Probe` whose packs are those of training with images; documents of text alone are tensors of tokens.

    They run with the token types that the processor gives to text: paligemma sees text without them in both directions.
    """

    shares = False  # whether documents of a pack share common beginnings

    def __init__(self, model: nn.Module, images: ImageExamples, degree: int = 1, *, user_attention: str | None = None):
        super().__init__(model, degree, user_attention)
        self.images = images

    def document(self, *parts: Any) -> ImageDocument:
        """Of tokens and images in this order."""
        return ImageDocument(self.images.joined(parts))

    def image_examples(self) -> Examples:
        """Four documents of unequal layout, and the same pack with another in the place of one.

        The second ends with an image and the third begins with one, so a model that joins neighbouring images joins
        them. The last has no image. Where ranks share the pack it is so long that the middle of the pack, where a part
        ends at every degree, is in the middle of an image.
        """
        image = self.images.image
        tokens = self.tokens
        document = self.document
        square, high, first, last = (image(*size) for size in (SQUARE, HIGH, WIDE, SQUARE))
        head = tokens(5)
        tail = tokens(9)
        end = tokens(6)
        documents: Documents = [
            document(head, square, tail),
            document(tokens(3), first, tokens(4), last),
            document(high, end),
        ]
        before = sum(map(len, documents[:2]))
        documents.append(document(tokens(max(11, before - len(end)) if self.degree > 1 else 11)))
        changes = [
            (0, document(head, image(*SQUARE), tail)),  # another image
            (0, document(head, image(*HIGH), tail)),  # of another size
            (0, document(head, square, tokens(2), image(*WIDE), tail)),  # one image more
            (0, document(tokens(8))),  # no image
            (1, document(tokens(3), first, tokens(4), image(*SQUARE))),
            (2, document(image(*HIGH), end)),
            (2, document(tokens(7), high)),  # in another place
        ]
        return documents, [replace_documents(documents, {i: other}) for i, other in changes]

    def _make_batch(self, documents: Sequence[Any], ranks: LocalRank = LOCAL_RANK) -> dict[str, Any]:
        values = [self._values(document) for document in documents]
        part = RankShare(values, ranks.degree, ranks.index)
        return self.move_batch(self.images.packed(part, self.shares, pad_to_multiple_of=self.degree))

    def _values(self, document: Tensor | ImageDocument) -> dict[str, Any]:
        return document.values if isinstance(document, ImageDocument) else self.images.joined([document])

    def make_row(self, ids: Tensor | ImageDocument) -> dict[str, Any]:
        return self.move_batch(self.images.alone(self._values(ids)))

    @property
    def evaluated(self) -> nn.Module:
        # Models may build their masks in another way in eval mode (paligemma); attention is in the decoder
        return self.inner.get_decoder()
