"""Process one row with images into one document: its tokens, its labels and the tensors of its images.

A row is a row of the user's dataset or, with the setting `per_turn`, one turn of a conversation as a prompt and a
completion. `RowProcessor` processes it twice: before training for `measures.py`, which only caches lengths and hashes
(`measure_row`), and during training in a worker of the data loader, which needs the tensors.

Words:
    placeholder  a token that stands for a part of an image.
    image span   the range of tokens from the first to the last placeholder of an image (`image_spans`).
    output       a tensor that the processor returns beside tokens, such as `pixel_values`.
"""

import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Image
from torch import Tensor
from torch.utils._pytree import tree_all, tree_map
from transformers import ProcessorMixin
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ...compat import train_every_token
from ...layout import IGNORE_INDEX, TEXT_KEYS, ComparedContent
from ...samples.conversation import images_of, plain_tokenizer

IMAGES_FROM = 2**31  # images get numbers from here on where documents are compared; all token ids are smaller
# Names under which some processors return the kind of each token: 0 is text, other numbers are images
TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids")
Span: TypeAlias = tuple[int, int]  # index of the first token, and of the token after the last


class RowProcessor:
    """Processes one row with TRL's collator, as a batch of one row, without padding or truncation."""

    def __init__(self, collate: DataCollatorForVisionLanguageModeling):
        self.processor: ProcessorMixin = collate.processor
        self._collate = replace(collate, max_length=None, pad_to_multiple_of=None)

    def __reduce__(self) -> tuple[object, ...]:
        # `datasets` hashes the pickled object to find its cache, so the shapes that `by_size` remembers are not pickled
        return RowProcessor, (self._collate,)

    @property
    def shapes_depend_on_size(self) -> bool:
        """Whether the shapes of a processed image depend only on the size of the image. `measures.py` checks this."""
        # An image processor that is not part of transformers may choose the shape by what an image shows
        image_processor = getattr(self.processor, "image_processor", None)
        return type(image_processor).__module__.partition(".")[0] == "transformers"

    @cached_property
    def by_size(self) -> "RowProcessor":
        """A copy that returns shapes without pixels, and processes only images of new sizes (`SizeProcessor`)."""
        processor = copy.copy(self.processor)
        processor.image_processor = SizeProcessor(processor.image_processor)
        return RowProcessor(replace(self._collate, processor=processor))

    @cached_property
    def settings(self) -> bytes:
        """The settings of the image processor, which decide with an image what pixels the model reads."""
        return str(self.processor.image_processor.to_json_string()).encode()

    @cached_property
    def special_tokens(self) -> list[int]:
        """Sorted ids of the tokens that never stand for plain text, such as the tokens around an image."""
        tokenizer = plain_tokenizer(self.processor)
        return sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})

    def with_every_token_trained(self) -> "RowProcessor":
        """Return a copy that gives every token a label, whatever the settings of the loss are."""
        return RowProcessor(train_every_token(self._collate))

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Make the document of a row.

        Returns:
            `input_ids` and `labels` as arrays of shape (T,), and the outputs of the image processor as tensors of a
            batch of one row.
        """
        row = with_images(row)
        if row.get("completion") == "":
            # TRL fails on an empty completion, whose tokens are a tensor of floats: process the prompt as plain text
            text = {self._collate.dataset_text_field: row["prompt"], "images": row["images"]}
            document = self.with_every_token_trained()(text)
            return document | {"labels": np.full_like(document["labels"], IGNORE_INDEX)}
        document = dict(self._collate([row]))
        document.pop("attention_mask", None)  # one row has no padding, so all are ones
        return document | {name: document[name][0].numpy() for name in ("input_ids", "labels")}

    def cut(self, document: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop - 1` of a document with the images among them, as a document.

        The cut must not begin or end inside an image.
        """
        if start == 0 and stop == len(document["input_ids"]):
            return document
        spans = self.image_spans(document)
        images_inside = [
            i for i, (image_start, image_stop) in enumerate(spans) if start < image_stop and image_start < stop
        ]
        edges = [edge for i in images_inside for edge in spans[i]]
        assert all(start <= edge <= stop for edge in edges), "a document is never cut inside an image"
        cut_document = {name: document[name][start:stop] for name in ("input_ids", "labels")}
        cut_document |= {name: document[name][:, start:stop] for name in TOKEN_KINDS if name in document}
        if images_inside:
            cut_document |= images_between(document, images_inside[0], images_inside[-1] + 1, num_images=len(spans))
        return cut_document

    def compare(self, documents: Sequence[Mapping[str, Any]]) -> list[ComparedContent]:
        """Return the numbers that are compared to find documents with a common beginning.

        They are the tokens of each document. The first placeholder of each image is replaced by a number, which is
        equal for two images if the processor returns the same tensors for them. All images of a document count as one
        image if their outputs cannot be told apart.

        Returns:
            For each document the numbers of its tokens, (T,), and its image spans, which documents share as a whole or
            not at all.
        """
        numbers: dict[bytes, int] = {}
        compared = []
        for document in documents:
            tokens = np.asarray(document["input_ids"]).astype(np.int64)
            spans = self.image_spans(document)
            for i, (first_token, _) in enumerate(spans):
                digest = hashlib.blake2b()
                for name, values in sorted(images_between(document, i, i + 1, num_images=len(spans)).items()):
                    digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
                    digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
                tokens[first_token] = IMAGES_FROM + numbers.setdefault(digest.digest(), len(numbers))
            compared.append(ComparedContent(tokens, spans))
        return compared

    def image_spans(self, document: Mapping[str, Any]) -> list[Span]:
        """Return the spans of the images of a document, in order.

        Consecutive placeholders are taken for one image. If the outputs cannot be divided into as many images, one span
        is returned, from the first placeholder to the last. This can happen if other tokens, such as ends of rows,
        divide the placeholders of an image, or if no token divides those of two images. If no token is known to be a
        placeholder, the span is the whole document.
        """
        if "pixel_values" not in document:
            return []
        # Placeholders are the token of images, and the tokens whose kind is not text. No token is -1
        is_image = np.asarray(document["input_ids"]) == getattr(self.processor, "image_token_id", -1)
        for name in TOKEN_KINDS:
            if name in document:
                is_image = is_image | (document[name][0].numpy() != 0)
        edges = np.flatnonzero(np.diff(is_image.astype(np.int8), prepend=0, append=0)).tolist()
        if not edges:
            return [(0, len(is_image))]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return spans if _ends_of_images(document, len(spans)) is not None else [(edges[0], edges[-1])]

    def measure_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Process a row, and return its tokens and labels as lists, with the numbers that planning needs.

        `KINDS` in `measures.py` lists these numbers. `contents` has a hash for each image span, of the decoded pixels
        before processing. The hash depends on the number of tokens too, because one image may have more tokens in one
        document than in another.
        """
        document = self(row)
        tokens = document["input_ids"]
        labels = document["labels"]
        sizes = sequence_sizes(document)
        images = images_of(row)
        spans = self.image_spans(document)
        # Each span is one image. If their numbers differ, it is not known which images a span stands for. So its hash
        # is of all images of the row
        images_of_spans = [[image] for image in images] if len(spans) == len(images) else [images] * len(spans)
        # The digest tells whether a row is still the same, so it covers all that the model reads. The settings of the
        # image processor matter to pixels only
        digest = hashlib.sha256(self.settings if images else b"")
        for name in ("input_ids", "labels"):
            digest.update(np.ascontiguousarray(document[name], dtype="<i8").data)
        return {
            "input_ids": tokens.tolist(),
            "labels": labels.tolist(),
            "image_stop": spans[-1][1] if spans else 0,  # the token behind the last image
            "image_count": len(images),
            "image_values": int(sizes.sum()),  # pixel values, for the cost of the vision tower
            "image_squares": int((sizes**2).sum()),  # for the cost of attention in the vision tower
            "spans": [edge for span in spans for edge in span],  # [start, stop, start, stop, ...]
            "contents": [
                _hash_of_images(hashlib.blake2b(self.settings + b"%d" % (stop - start)), span_images)
                for (start, stop), span_images in zip(spans, images_of_spans, strict=True)
            ],
            "digest": _hash_of_images(digest, images),
            "differs": False,  # whether a row measured by its image sizes has other numbers; `measures.py` sets it
        }


@dataclass(frozen=True)
class EncodedImage:
    """An image as a dataset stores it: the bytes of its file, or the path of the file.

    Documents that wait to be packed, and checkpoints, have their images in this form, because it is small. A JPEG file
    has less than 1 byte per pixel, a decoded image has 3, and the output of an image processor has 12 or more.
    """

    path: str | None  # None if there are bytes only
    data: bytes | None = None  # None if the bytes are read from `path`
    mode: str | None = None  # mode of PIL that the decoded image is converted to; None leaves it as it is

    @classmethod
    def encode(cls, image: Any, mode: str | None = None) -> "EncodedImage":
        """Encode an image that `datasets` returned: a dictionary of bytes and path, a path, or a decoded image.

        Objects of another type are accepted here and refused by `decode`.
        """
        from PIL import Image as Pillow  # a requirement of data with images only

        if isinstance(image, Pillow.Image | np.ndarray):
            # A copy has no file and no format, so `datasets` encodes it without loss
            image = Image().encode_example(image.copy())
        if isinstance(image, str):
            return cls(image, mode=mode)
        path, data = (image.get("path"), image.get("bytes")) if isinstance(image, dict) else (None, None)
        return cls(path if data is None else None, data, mode)

    def decode(self) -> Any:
        """Return the image as an image of PIL."""
        return Image(mode=self.mode).decode_example({"path": self.path, "bytes": self.data})


def with_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with all its images decoded, as a list in the column `images`."""
    images = [image.decode() if isinstance(image, EncodedImage) else image for image in images_of(row)]
    return {name: row[name] for name in row if name != "image"} | {"images": images}


def sequence_sizes(document: Mapping[str, Any]) -> Tensor:
    """Count the numbers (pixel values) of each of the S sequences that the vision tower reads, shape (S,).

    A sequence is an image or a tile of an image. Processors return pixels in one of two forms: the patches of all
    images one after the other, with the grid of each image in `image_grid_thw`; or one entry per image or tile, where
    entries of zeros only are padding and have the size 0.
    """
    pixels: Tensor | None = document.get("pixel_values")
    if pixels is None:
        return torch.zeros(0, dtype=torch.int64)
    grid: Tensor | None = document.get("image_grid_thw")
    if grid is not None:
        values_per_patch = pixels.numel() // pixels.shape[0]
        return grid.prod(-1) * values_per_patch
    # A sequence is (channels, height, width), or (patches, values) if the processor has cut the image into patches
    num_axes = 3 if pixels.dim() > 3 else 2
    sequences = pixels.reshape(-1, *pixels.shape[-num_axes:]).flatten(1)
    return sequences.any(1) * sequences.shape[1]


def images_between(document: Mapping[str, Any], first: int, stop: int, *, num_images: int) -> dict[str, Tensor]:
    """Return the processor's outputs, by name, for the images `first` to `stop - 1` of a document."""
    if (first, stop) == (0, num_images):
        return {name: document[name] for name in _processor_outputs(document)}
    ends = _ends_of_images(document, num_images)
    assert ends is not None  # if the ends are unknown, all images count as one, which was returned above
    images = {}
    for name, (axis, stops) in ends.items():
        edges = [0, *stops]
        images[name] = document[name].narrow(axis, edges[first], edges[stop] - edges[first])
    return images


def _ends_of_images(document: Mapping[str, Any], num_images: int) -> dict[str, tuple[int, list[int]]] | None:
    """Find where each image of a document ends in the outputs of the processor.

    An output has one entry per image, or the patches of all images one after the other, counted by their grids.

    Returns:
        For each output by name: the axis along which the images lie, and the index on this axis after the last entry of
        each image. None if an output has neither form.
    """
    grid = document.get("image_grid_thw")
    patches = [] if grid is None or len(grid) != num_images else grid.prod(-1).cumsum(0).tolist()
    one_by_one = list(range(1, num_images + 1))
    ends = {}
    for name in _processor_outputs(document):
        shape = document[name].shape
        if patches and name == "pixel_values" and shape[0] == patches[-1]:
            ends[name] = (0, patches)
        elif shape[:1] == (num_images,):
            ends[name] = (0, one_by_one)
        elif shape[:2] == (1, num_images):
            ends[name] = (1, one_by_one)
        else:
            return None
    return ends


def _processor_outputs(document: Mapping[str, Any]) -> Collection[str]:
    """Return the names of the processor's outputs that describe images rather than tokens."""
    return document.keys() - TEXT_KEYS - {*TOKEN_KINDS}


def _hash_of_images(digest: Any, images: list[Any]) -> bytes:
    """Add the pixels of images to a digest of hashlib, and return the hash."""
    for image in images:
        pixels = np.asarray(image)
        digest.update(f"{pixels.dtype} {pixels.shape}".encode() + pixels.tobytes())
        # Pixels of the mode "P" are numbers of colours in a palette, of which a file may make some transparent
        palette = image.getpalette() if hasattr(image, "getpalette") else None  # None for arrays and other modes
        if palette is not None:
            digest.update(f"{palette} {image.info.get('transparency')}".encode())
    return bytes(digest.digest())


class SizeProcessor:
    """An image processor that returns arrays of the right shapes without pixels, and remembers them by image size.

    In every image processor of transformers, the number of tokens of an image depends on its width and height only. So
    one image of each size is processed, and all further images of this size get the remembered arrays. The processed
    image has one colour and is not the user's. If the shapes depend on more than the size, they differ from the shapes
    of the user's images, and `measures.py` notices this in the rows that it compares.
    """

    def __init__(self, image_processor: Any):
        self._image_processor = image_processor
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks for methods before `_image_processor` is set
            raise AttributeError(name)
        return getattr(self._image_processor, name)

    def __call__(self, images: object, **kwargs: object) -> Any:
        from PIL import Image as Pillow  # a requirement of data with images only

        if not tree_all(lambda image: isinstance(image, Pillow.Image), images):  # arrays, for example
            return self._image_processor(images=images, **kwargs)
        sizes = tree_map(lambda image: (image.size, image.mode), images)
        key = repr((sizes, sorted(kwargs.items(), key=str)))
        if key not in self._known:
            # The colour is not black. If the processor does not normalise pixels, black pixels are 0, and `_shape`
            # takes an image or tile of zeros for padding
            one_colour_images = tree_map(lambda image: Pillow.new(image.mode, image.size, 1), images)
            outputs = self._image_processor(images=one_colour_images, **kwargs)
            self._known[key] = type(outputs)({name: _shape(value) for name, value in outputs.items()})
        return copy.copy(self._known[key])


def _shape(value: Any) -> Any:
    """Return an output of the image processor without its content.

    Pixels, which are floats, are replaced by a tensor of the same shape that takes no memory: each image or tile has
    one number, expanded to its shape, which is 0 for padding and 1 otherwise. Integers of 4 or more axes are masks of
    pixels, and are replaced in the same way. Other integers, such as the sizes and grids of images, are returned as
    they are, because the number of placeholders of an image is computed from them.
    """
    if not isinstance(value, Tensor) or (value.dim() < 4 and not value.is_floating_point()):
        return value
    # The last axes are the pixels of an image or a tile, as in `sequence_sizes`
    num_axes_of_image = min(value.dim(), 3 if value.dim() > 3 else 2)
    outer_shape = value.shape[: value.dim() - num_axes_of_image]
    is_image = value.reshape(*outer_shape, -1).any(-1).to(value.dtype)
    return is_image.reshape(*outer_shape, *[1] * num_axes_of_image).expand(value.shape)
