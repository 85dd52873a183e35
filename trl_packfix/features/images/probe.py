"""Run packs with images, for the leak probe: `ImageProbe` builds documents with images, and variants of their pack.

The documents have their images in different places. If all had them in the same place, a model that takes the places
from another document would give the same result. `isolation/check_isolation.py` runs the packs and judges them, after
packs of text alone. The images come from `examples.py`, which passes them through the processor of the user's model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...data.rank_share import RankShare
from ...group import ALONE, Group
from ...isolation.probe import Documents, Examples, Probe, replace_documents

# Width and height in pixels. Processors that keep the aspect ratio give each size another number of tokens.
SQUARE = (112, 112)
WIDE = (196, 112)
HIGH = (112, 168)


class ImageDocument:
    """A document with images: its tensors by name, as the processor returns them. Its length is in tokens."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __len__(self) -> int:
        return len(self.values["input_ids"])


class ImageProbe(Probe):
    """A `Probe` whose packs are made as in training with images.

    A document is an `ImageDocument`, or a tensor of tokens if it has text only. Documents of text get the token types
    that the processor gives to text: without them paligemma attends to text in both directions.

    Attributes:
        images: an `ImageExamples`, which makes documents with images. Only the classes that `with_images` returns have
            it.
    """

    images: Any
    has_further_examples = True  # the test of a model also runs `further_examples`, after the packs of text

    @classmethod
    def with_images(cls, images: Any) -> type["ImageProbe"]:
        """Return a subclass for one run, which has the `ImageExamples` of its processor."""
        return type(cls.__name__, (cls,), {"images": images})

    def document(self, *content: Any) -> ImageDocument:
        """Return a document of tokens and images in this order."""
        return ImageDocument(self.images.join_content(content))

    def further_examples(self) -> Examples:
        """Make a pack of four documents with images in different places, and variants of it in which one is replaced.

        The second document ends with an image and the third begins with one, so a model that joins neighbouring images
        joins these. The last document has no image. If s ranks share the pack, each holds T / s consecutive tokens of
        it. s is a power of two, so a rank ends in the middle of the pack. The last document is so long that this place
        is in the middle of an image.
        """
        image = self.images.image
        tokens = self.tokens  # draws a document of so many random tokens
        document = self.document
        square = image(*SQUARE)
        high = image(*HIGH)
        second_wide = image(*WIDE)
        second_square = image(*SQUARE)
        head = tokens(5)
        tail = tokens(9)
        end = tokens(6)
        documents: Documents = [
            document(head, square, tail),
            document(tokens(3), second_wide, tokens(4), second_square),
            document(high, end),
        ]
        num_last = 11
        if not self.group.is_alone:
            # The last document is as long as the first two together without `end`, so the middle is inside `high`
            num_last = max(num_last, sum(map(len, documents[:2])) - len(end))
        documents.append(document(tokens(num_last)))
        changes = [
            (0, document(head, image(*SQUARE), tail)),  # another image
            (0, document(head, image(*HIGH), tail)),  # an image of another size
            (0, document(head, square, tokens(2), image(*WIDE), tail)),  # one image more
            (0, document(tokens(8))),  # no image
            (1, document(tokens(3), second_wide, tokens(4), image(*SQUARE))),  # another second image
            (2, document(image(*HIGH), end)),  # another image at the beginning
            (2, document(tokens(7), high)),  # the same image in another place
        ]
        return documents, [replace_documents(documents, {i: new_document}) for i, new_document in changes]

    def _make_batch(self, documents: Sequence[Any], group: Group = ALONE) -> dict[str, Any]:
        """Return the batch of a pack, or the part of it that this rank holds where the ranks of a group share it."""
        values = [self._values(document) for document in documents]
        share = RankShare(values, group)  # the list of documents, with the group of ranks that share the pack
        # `_collate` joins the tokens, `packed_batch` adds the images and, if ranks share the pack, cuts the part
        return self.move_batch(self.images.packed_batch(share, self._collate))

    def _values(self, document: Tensor | ImageDocument | Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of a document by name."""
        if isinstance(document, Mapping):  # a document of the dataset, as the reader of its rows makes it
            return dict(document)
        return document.values if isinstance(document, ImageDocument) else self.images.join_content([document])

    def make_unpacked_batch(self, ids: Tensor | ImageDocument | Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch of one document, as in unpacked training."""
        return self.move_batch(self.images.unpacked_batch(self._values(ids)))
