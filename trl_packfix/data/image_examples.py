"""Documents with random images of any size, made by a processor, and how its outputs are joined in a pack."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..samples.processor import RowProcessor
from .collator import IGNORE_INDEX, TEXT_KEYS, DocumentRun
from .image_collator import ImageLayout, PackedImages, RopeIndex
from .loaders import PackCollator
from .prefix_collator import PrefixCollator

if TYPE_CHECKING:
    from PIL import Image  # text is trained without it, and nothing that is required installs it

SMALL = (56, 56)  # width and height in pixels: two by two patches of Qwen-VL


class ImageExamples:
    """Makes documents with random images of any size through a processor, in the form of its chat template.

    The leak probe runs them, and one of them stands in for images where a pack has none.
    """

    def __init__(self, process: RowProcessor, text_field: str = "text", rope_index: RopeIndex | None = None):
        # The user's collator may train completions or answers only, so it may refuse plain messages.
        self.process = process.without_masks()
        self.processor = process.processor
        self.text_field = text_field
        self._random = np.random.default_rng(0)
        self.layout = self._learn_layout()
        self.images = PackedImages(self.layout, rope_index)

    def image(self, width: int, height: int) -> "Image.Image":
        from PIL import Image

        return Image.fromarray(self._random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def document(self, images: "list[Image.Image]", text: str = "a") -> dict[str, Any]:
        if self.processor.chat_template is None:
            token = getattr(self.processor, "image_token", "<image>")
            return self.process({"images": images, self.text_field: token * len(images) + text})
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        return self.process({"images": images, "messages": [{"role": "user", "content": content}]})

    def placeholder(self) -> dict[str, Any]:
        """A document with one small image and no trained token."""
        document = self.document([self.image(*SMALL)])
        return document | {"labels": np.full(len(document["input_ids"]), IGNORE_INDEX)}

    def joined(self, parts: "Sequence[Tensor | Image.Image]") -> dict[str, Any]:
        """A document of tokens, (n,), and images in this order, without the text that a chat template adds."""
        pieces: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Tensor):
                pieces.append({"input_ids": part})
                continue
            piece = self.document([part])
            spans = self.process.image_spans(piece)
            start = spans[0][0]
            stop = spans[-1][1]
            cut = {name: piece[name][:, start:stop] for name in self.layout.tokens & piece.keys()}
            pieces.append(piece | cut | {"input_ids": piece["input_ids"][start:stop]})
        tokens = np.concatenate([np.asarray(piece["input_ids"]) for piece in pieces])
        kinds = dict.fromkeys(self.layout.tokens, torch.zeros(1, len(tokens), dtype=torch.int64))
        runs = [DocumentRun(i) for i in range(len(pieces))]
        return {"input_ids": tokens} | kinds | PackedImages(self.layout)(pieces, runs, torch.from_numpy(tokens)[None])

    def packed(
        self, documents: list[dict[str, Any]], shares: bool = False, *, pad_to_multiple_of: int = 1
    ) -> dict[str, Any]:
        """The batch of documents in one pack, or of a part (`RankShare`) of it, as in training, without labels.

        With `shares` documents share every common beginning.
        """
        rows = PrefixCollator(pad_to_multiple_of, min_shared=1, shares=shares, compare=self.process.compare)
        batch = PackCollator(rows, self.images)(documents)
        return {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}

    def alone(self, document: dict[str, Any]) -> dict[str, Any]:
        """The batch of one document in unpacked training, without labels."""
        batch = {name: value for name, value in document.items() if name not in TEXT_KEYS}
        return batch | {"input_ids": torch.as_tensor(document["input_ids"])[None], "use_cache": False}

    def _learn_layout(self) -> ImageLayout:
        image, other = self.image(*SMALL), self.image(*SMALL)
        one = self.document([image])
        longer = self.document([image], "a b c d e")
        two = self.document([image, other])
        tokens = set()
        images = {}
        for name in sorted(one.keys() - TEXT_KEYS):
            shapes: list[Any] = [getattr(document[name], "shape", None) for document in (one, longer, two)]
            with_text, with_images = (_changed_axes(shapes[0], shape) for shape in shapes[1:])
            # Other axes may shrink: llava_onevision cuts an image into patches only if it is alone in its document. An
            # output that does not change at all has a row per document, such as its number of images.
            grown = [i for i in with_images or () if shapes[2][i] > shapes[0][i]]
            if with_text == [1] and with_images in ([], [1]) and len(one[name].shape) == 2:
                tokens.add(name)
            elif with_text == [] and (grown in ([0], [1]) or (with_images == [] and shapes[0][0] == 1)):
                images[name] = grown[0] if grown else 0
            else:
                sizes = [None if shape is None else tuple(shape) for shape in shapes]
                raise ValueError(
                    f"The processor ({type(self.processor).__name__}) returns `{name}` of shapes {sizes} for an image, "
                    "for the same with more text, and for two images, and packing is on. The documents of a pack are "
                    "joined along one axis, of tokens or of images, and this has none or several. Set `packing=False` "
                    "and `padding_free=False`."
                )
        return ImageLayout(frozenset(tokens), images)


def _changed_axes(shape: tuple[int, ...] | None, other: tuple[int, ...] | None) -> list[int] | None:
    if shape is None or other is None or len(shape) != len(other):
        return None
    return [i for i, pair in enumerate(zip(shape, other, strict=True)) if pair[0] != pair[1]]
