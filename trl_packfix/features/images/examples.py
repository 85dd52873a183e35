"""Make documents with random images through the processor of a model, and find out how its outputs are joined.

The trainer makes an `ImageExamples` for a dataset with images (`reading.py`). Before the first step the proof of
isolation runs its documents through the model, packed and unpacked (`probe.py`). `ImageExamples` tries the processor to
find the axes along which the outputs for several documents are joined. This `ImageLayout` is used for every batch
(`collator.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...data.collator import IGNORE_INDEX, TEXT_KEYS, DocumentRun, PackedDataCollator
from ...data.loaders import PackCollator
from ...feature import Feature
from .collator import ImageLayout, PackedImages, RopeIndex
from .probe import ImageProbe
from .processor import RowProcessor
from .unpacking import UnpackedImages

if TYPE_CHECKING:
    from PIL import Image  # text is trained without it, and nothing that is required installs it

SMALL = (56, 56)  # width and height of an image in pixels: two by two patches of Qwen-VL


class ImageExamples(Feature):
    """Makes documents with random images of any size, and batches of these documents.

    It is the `Feature` of packs with images: its probe tests a model on these documents.

    Args:
        process: makes the document of a row, with the processor of the model.
        text_field: the column of plain text, for a processor without a chat template.
        rope_index: the method of the model that computes M-RoPE positions, or None for models without them.

    Raises:
        ValueError: an output of the processor cannot be joined over documents.
    """

    has_towers = True  # so the model gets the attention and the hooks of vision towers while it takes packs

    def __init__(self, process: RowProcessor, text_field: str = "text", rope_index: RopeIndex | None = None):
        # `process` has the settings of the run, which may train completions or answers only. Messages without
        # completions or answers, such as the messages of these documents, would then be refused
        self.process = process.with_every_token_trained()
        self.processor = process.processor
        self.text_field = text_field
        self._random = np.random.default_rng(0)
        self.layout = self._learn_layout()
        self.images = PackedImages(self.layout, rope_index)

    def make_probe_class(self, probe_class: Any) -> Any:
        """Return the `ImageProbe` that makes its documents with these examples."""
        return ImageProbe.with_images(self)

    def make_unpacked_class(self, unpacked_class: Any) -> Any:
        """Return the hooks that run the documents of a pack as rows of a padded batch, for models with images.

        They are installed if documents of a pack change each other in the model, no repair helps or is allowed, and
        `on_leak` does not raise an error.
        """
        return UnpackedImages

    def image(self, width: int, height: int) -> "Image.Image":
        """Return an image of random pixels."""
        from PIL import Image

        return Image.fromarray(self._random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def document(self, images: "list[Image.Image]", text: str = "a") -> dict[str, Any]:
        """Return a document of images followed by text, as a message of the user under the chat template."""
        if self.processor.chat_template is None:
            token = getattr(self.processor, "image_token", "<image>")
            return self.process({"images": images, self.text_field: token * len(images) + text})
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        return self.process({"images": images, "messages": [{"role": "user", "content": content}]})

    def placeholder(self) -> dict[str, Any]:
        """Return a document with one small image and no trained token.

        It is added to packs without images, so that all ranks run the vision tower and gather its weights.
        """
        document = self.document([self.image(*SMALL)])
        return document | {"labels": np.full(len(document["input_ids"]), IGNORE_INDEX)}

    def join_content(self, content: "Sequence[Tensor | Image.Image]") -> dict[str, Any]:
        """Return a document of tokens and images in a given order, without the text that a chat template adds.

        Args:
            content: token ids, of shape (n,), and images.
        """
        # Make a document of each entry of the content
        pieces: list[dict[str, Any]] = []
        for entry in content:
            if isinstance(entry, Tensor):
                pieces.append({"input_ids": entry})
                continue
            piece = self.document([entry])
            # Cut off the tokens of the chat template, before and behind the image
            image_spans = self.process.image_spans(piece)
            first, _ = image_spans[0]
            _, stop = image_spans[-1]
            token_outputs = {name: piece[name][:, first:stop] for name in self.layout.tokens & piece.keys()}
            pieces.append(piece | token_outputs | {"input_ids": piece["input_ids"][first:stop]})
        # Join the pieces as the documents of a pack are joined, without boundaries
        tokens = np.concatenate([np.asarray(piece["input_ids"]) for piece in pieces])
        runs = [DocumentRun(i) for i in range(len(pieces))]  # of each piece, all tokens
        # Without M-RoPE only the shape of the third argument, the positions, is read: that of the tokens
        outputs = PackedImages(self.layout)(pieces, runs, torch.from_numpy(tokens)[None])
        # `outputs` lacks the outputs for tokens if no piece has an image. They are then 0, as for text
        text_outputs = dict.fromkeys(self.layout.tokens, torch.zeros(1, len(tokens), dtype=torch.int64))
        return {"input_ids": tokens} | text_outputs | outputs

    def packed_batch(
        self, documents: list[dict[str, Any]], text_collator: PackedDataCollator | None = None
    ) -> dict[str, Any]:
        """Return the batch of a pack as in training, without labels.

        Args:
            documents: the documents of the pack. If they are a `RankShare`, the list of documents with the group of
                ranks that share the pack, the batch is the part that this rank holds.
            text_collator: joins the tokens of the documents; None for a `PackedDataCollator`.
        """
        batch = PackCollator(text_collator or PackedDataCollator(), self.images)(documents)
        return {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}

    def unpacked_batch(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the batch of one document in unpacked training, without labels."""
        batch = {name: value for name, value in document.items() if name not in TEXT_KEYS}
        return batch | {"input_ids": torch.as_tensor(document["input_ids"])[None], "use_cache": False}

    def _learn_layout(self) -> ImageLayout:
        """Find out what each output of the processor grows with: process three documents, and compare the shapes.

        Raises:
            ValueError: an output grows along several axes, or along an axis of neither tokens nor images.
        """
        image = self.image(*SMALL)
        second_image = self.image(*SMALL)
        one_image = self.document([image])
        more_text = self.document([image], "a b c d e")
        two_images = self.document([image, second_image])
        token_outputs = set()
        image_axes = {}  # axis of images, by the name of an output
        for name in sorted(one_image.keys() - TEXT_KEYS):
            shapes: list[Any] = [
                getattr(document[name], "shape", None) for document in (one_image, more_text, two_images)
            ]
            changed_by_text = _changed_axes(shapes[0], shapes[1])
            changed_by_image = _changed_axes(shapes[0], shapes[2])
            # Axes that do not grow may shrink: llava_onevision cuts an image into patches only if its document has no
            # second image
            grown_by_image = [axis for axis in changed_by_image or () if shapes[2][axis] > shapes[0][axis]]
            is_per_token = changed_by_text == [1] and changed_by_image in ([], [1]) and len(one_image[name].shape) == 2
            is_per_image = changed_by_text == [] and grown_by_image in ([0], [1])
            # An output that never changes has one row for each document, such as its number of images
            is_per_document = changed_by_text == [] and changed_by_image == [] and shapes[0][0] == 1
            if is_per_token:
                token_outputs.add(name)
            elif is_per_image:
                image_axes[name] = grown_by_image[0]
            elif is_per_document:
                image_axes[name] = 0
            else:
                sizes = [None if shape is None else tuple(shape) for shape in shapes]
                raise ValueError(
                    f"The processor ({type(self.processor).__name__}) returns `{name}` of shapes {sizes} for an image, "
                    "for the same with more text, and for two images, and packing is on. The documents of a pack are "
                    "joined along one axis, of tokens or of images, and this has none or several. Set `packing=False` "
                    "and `padding_free=False`."
                )
        return ImageLayout(frozenset(token_outputs), image_axes)


def _changed_axes(shape: tuple[int, ...] | None, new_shape: tuple[int, ...] | None) -> list[int] | None:
    """Return the axes along which two shapes differ; None if one is missing or has another number of axes."""
    if shape is None or new_shape is None or len(shape) != len(new_shape):
        return None
    return [i for i, (size, new_size) in enumerate(zip(shape, new_shape, strict=True)) if size != new_size]
