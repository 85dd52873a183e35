"""One row with images -> one document: its tokens, labels, and what the model needs of its images."""

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Image
from torch import Tensor
from transformers import ProcessorMixin
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..compat import training_every_token
from ..layout import IGNORE_INDEX, TEXT_KEYS, ComparedContent
from .conversation import plain_tokenizer

IMAGES_FROM = 2**31  # numbers that stand for images where documents are compared: above all tokens
# Marks tokens of images where a processor returns it: 1 is an image, 0 is text
TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids")
Span: TypeAlias = tuple[int, int]  # of tokens


class RowProcessor:
    """A row alone through TRL's collator, which gives what it gives in a batch, without padding or cutting."""

    def __init__(self, collate: DataCollatorForVisionLanguageModeling):
        self.processor: ProcessorMixin = collate.processor
        self._collate = replace(collate, max_length=None, pad_to_multiple_of=None)

    def __reduce__(self) -> tuple[object, ...]:
        return RowProcessor, (self._collate,)  # without the sizes known so far: `datasets` hashes it to find its cache

    @property
    def depends_on_sizes(self) -> bool:
        """Whether the shapes of processed images may be taken from images of the same sizes."""
        # Those of others than transformers may look at what an image shows
        image_processor = getattr(self.processor, "image_processor", None)
        return type(image_processor).__module__.partition(".")[0] == "transformers"

    @cached_property
    def by_size(self) -> "RowProcessor":
        """The same without processing images, if others of the same size were processed: pixels are left out."""
        processor = copy.copy(self.processor)
        processor.image_processor = SizeProcessor(processor.image_processor)
        return RowProcessor(replace(self._collate, processor=processor))

    @cached_property
    def settings(self) -> bytes:
        """What decides the pixels of an image, besides the image."""
        return str(self.processor.image_processor.to_json_string()).encode()

    @cached_property
    def special_tokens(self) -> list[int]:
        """Tokens that no text has, such as those around an image."""
        tokenizer = plain_tokenizer(self.processor)
        return sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})

    def without_masks(self) -> "RowProcessor":
        """The same for rows in which every token is trained."""
        return RowProcessor(training_every_token(self._collate))

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The document of a row: `input_ids` and `labels` as arrays, (tokens,), the rest as tensors of one row."""
        row = with_images(row)
        if row.get("completion") == "":  # TRL joins its tokens, and those of an empty text are no whole numbers
            text = {self._collate.dataset_text_field: row["prompt"], "images": row["images"]}
            document = self.without_masks()(text)
            return document | {"labels": np.full_like(document["labels"], IGNORE_INDEX)}
        document = dict(self._collate([row]))
        document.pop("attention_mask", None)  # all ones: one row has no padding
        return document | {name: document[name][0].numpy() for name in ("input_ids", "labels")}

    def cut(self, document: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens of a part of a document, and the images among them. It does not begin or end inside an image."""
        if start == 0 and stop == len(document["input_ids"]):
            return document
        spans = self.image_spans(document)
        within = [i for i, (first, behind) in enumerate(spans) if first >= start and behind <= stop]
        overlapping = [i for i, (first, behind) in enumerate(spans) if behind > start and first < stop]
        assert within == overlapping, "a document is never cut inside an image"
        cut = {name: document[name][start:stop] for name in ("input_ids", "labels")}
        cut |= {name: document[name][:, start:stop] for name in TOKEN_KINDS if name in document}
        return cut | (images_between(document, within[0], within[-1] + 1, num=len(spans)) if within else {})

    def compare(self, documents: Sequence[Mapping[str, Any]]) -> list[ComparedContent]:
        """What is compared to find common beginnings: tokens and, in place of its first placeholder, each image.

        Two images have the same number there if the processor returns the same for them. All images of a document count
        as one if their outputs cannot be told apart.
        """
        numbers: dict[bytes, int] = {}
        compared = []
        for document in documents:
            tokens = np.asarray(document["input_ids"]).astype(np.int64)
            spans = self.image_spans(document)
            for i, (first, _) in enumerate(spans):
                digest = hashlib.blake2b()
                for name, values in sorted(images_between(document, i, i + 1, num=len(spans)).items()):
                    digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
                    digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
                tokens[first] = IMAGES_FROM + numbers.setdefault(digest.digest(), len(numbers))
            compared.append(ComparedContent(tokens, spans))
        return compared

    def image_spans(self, document: Mapping[str, Any]) -> list[Span]:
        """The span of each image whose outputs can be told apart from the others, else of all, or of all tokens."""
        if "pixel_values" not in document:
            return []
        is_image = np.asarray(document["input_ids"]) == getattr(self.processor, "image_token_id", -1)
        for name in TOKEN_KINDS:
            if name in document:
                is_image = is_image | (document[name][0].numpy() != 0)
        edges = np.flatnonzero(np.diff(is_image.astype(np.int8), prepend=0, append=0)).tolist()
        if not edges:
            return [(0, len(is_image))]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return spans if _ends_of_images(document, len(spans)) is not None else [(edges[0], edges[-1])]

    def measured(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What planning needs of the document of a row.

        Each image that `compare` tells apart has a hash of the image as it was given. Images of one content may have
        more tokens in one document than in another, and then are not the same.
        """
        document = self(row)
        tokens = document["input_ids"]
        labels = document["labels"]
        sizes = sequence_sizes(document)
        images = images_of(row)
        spans = self.image_spans(document)
        of_spans = [[image] for image in images] if len(spans) == len(images) else [images] * len(spans)
        digest = hashlib.sha256(self.settings if images else b"")
        for name in ("input_ids", "labels"):
            digest.update(np.ascontiguousarray(document[name], dtype="<i8").data)
        return {
            "length": len(tokens),
            "trained": int((labels[1:] != IGNORE_INDEX).sum()),
            "first_is_labelled": bool(len(labels) and labels[0] != IGNORE_INDEX),
            "image_stop": spans[-1][1] if spans else 0,
            "image_count": len(images),
            "image_values": int(sizes.sum()),
            "image_squares": int((sizes**2).sum()),
            "tokens": tokens.tolist(),
            "is_target": (labels != IGNORE_INDEX).tolist(),
            "spans": [place for span in spans for place in span],
            "contents": [
                _hash_of_images(hashlib.blake2b(self.settings + b"%d" % (stop - first)), of_span)
                for (first, stop), of_span in zip(spans, of_spans, strict=True)
            ],
            "digest": _hash_of_images(digest, images),
            "differs": False,
        }


@dataclass(frozen=True)
class EncodedImage:
    """An image as a dataset stores it: the bytes of its file, or where they are.

    So it is in memory while its document waits, and in checkpoints. A decoded image has 3 bytes per pixel, and what a
    processor makes of it 12 and more. A JPEG file has less than one.
    """

    path: str | None  # None if there are bytes only
    data: bytes | None = None  # None if they are read from `path`
    mode: str | None = None  # to which the decoded image is converted; None: the mode that it has

    @classmethod
    def of(cls, image: Any, mode: str | None = None) -> "EncodedImage":
        """An image in a form that `datasets` gives: bytes and path, a path, or decoded. Decoding refuses others."""
        from PIL import Image as Pillow  # a requirement of data with images only

        if isinstance(image, Pillow.Image | np.ndarray):
            # A copy has no file and no format, so `datasets` encodes it without loss
            image = Image().encode_example(image.copy())
        if isinstance(image, str):
            return cls(image, mode=mode)
        path, data = (image.get("path"), image.get("bytes")) if isinstance(image, dict) else (None, None)
        return cls(path if data is None else None, data, mode)

    def decode(self) -> Any:
        return Image(mode=self.mode).decode_example({"path": self.path, "bytes": self.data})


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row of the dataset; [] if it has none."""
    images = [row["image"]] if "image" in row else row.get("images")
    return [image for image in images or [] if image is not None]


def with_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with all its images in `images`, decoded."""
    images = [image.decode() if isinstance(image, EncodedImage) else image for image in images_of(row)]
    return {name: row[name] for name in row if name != "image"} | {"images": images}


def sequence_sizes(document: Mapping[str, Any]) -> Tensor:
    """Numbers in each sequence that the vision tower reads, shape (S,): an image, or a tile of one.

    Processors return images as the patches of all of them, with the grid of each; or as tiles, as patches of several
    images or as images of one size each, padded with zeros to the most tiles.
    """
    pixels: Tensor | None = document.get("pixel_values")
    if pixels is None:
        return torch.zeros(0, dtype=torch.int64)
    grid: Tensor | None = document.get("image_grid_thw")
    if grid is not None:
        return grid.prod(-1) * (pixels.numel() // pixels.shape[0])
    sequences = pixels.reshape(-1, *pixels.shape[-3 if pixels.dim() > 3 else -2 :]).flatten(1)
    return sequences.any(1) * sequences.shape[1]


def images_between(document: Mapping[str, Any], first: int, stop: int, *, num: int) -> dict[str, Tensor]:
    """What the processor returns for the images `first` to `stop - 1` of the `num` images of a document, by name."""
    if (first, stop) == (0, num):
        return {name: document[name] for name in _processor_outputs(document)}
    ends = _ends_of_images(document, num)
    assert ends is not None  # else they count as one
    images = {}
    for name, (axis, stops) in ends.items():
        edges = [0, *stops]
        images[name] = document[name].narrow(axis, edges[first], edges[stop] - edges[first])
    return images


def _ends_of_images(document: Mapping[str, Any], num: int) -> dict[str, tuple[int, list[int]]] | None:
    """For each output of the processor its axis of images, and where each of `num` images ends there; None if unknown.

    An output has one entry per image, or the patches of all images, with the grid of each.
    """
    grid = document.get("image_grid_thw")
    patches = [] if grid is None or len(grid) != num else grid.prod(-1).cumsum(0).tolist()
    ends = {}
    for name in _processor_outputs(document):
        shape = document[name].shape
        if patches and name == "pixel_values" and shape[0] == patches[-1]:
            ends[name] = 0, patches
        elif num in shape[:1] or (shape[:1] == (1,) and num in shape[1:2]):
            ends[name] = 0 if shape[0] == num else 1, [*range(1, num + 1)]
        else:
            return None
    return ends


def _processor_outputs(document: Mapping[str, Any]) -> Collection[str]:
    """The outputs of the processor that are of images."""
    return document.keys() - TEXT_KEYS - {*TOKEN_KINDS}


def _hash_of_images(digest: Any, images: list[Any]) -> bytes:
    for image in images:
        pixels = np.asarray(image)
        digest.update(f"{pixels.dtype} {pixels.shape}".encode() + pixels.tobytes())
    return bytes(digest.digest())


class SizeProcessor:
    """An image processor that remembers the shapes of what it returned for images of some sizes, without the content.

    How many tokens an image gets depends on its width and height in every image processor of transformers. So images of
    one size are processed once, and the others of that size get arrays of the same shapes without content. The first of
    a size is a plain image of one colour: if the result depends on more than the size, it differs from that of the
    user's images.
    """

    def __init__(self, image_processor: Any):
        self._image_processor = image_processor
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while a copy is made there is no `_image_processor` yet
            raise AttributeError(name)
        return getattr(self._image_processor, name)

    def __call__(self, images: object, **kwargs: object) -> Any:
        from PIL import Image as Pillow  # a requirement of data with images only

        try:
            sizes = _map_images(images, lambda image: (image.size, image.mode))
        except TypeError:  # arrays, for example
            return self._image_processor(images=images, **kwargs)
        key = repr((sizes, sorted(kwargs.items(), key=str)))
        if key not in self._known:
            plain = _map_images(images, lambda image: Pillow.new(image.mode, image.size, 1))
            outputs = self._image_processor(images=plain, **kwargs)
            self._known[key] = type(outputs)({name: _shape(value) for name, value in outputs.items()})
        return copy.copy(self._known[key])


def _map_images(images: object, function: Callable[[Any], object]) -> object:
    """The function of each image, nested as the images are. TypeError: something else than images of PIL."""
    from PIL import Image as Pillow

    if isinstance(images, Pillow.Image):
        return function(images)
    if not isinstance(images, list | tuple):
        raise TypeError(f"not an image: {type(images).__name__}")
    return [_map_images(image, function) for image in images]


def _shape(value: Any) -> Any:
    """Of pixels and masks: the shape, and for each image or tile whether it is not padding. It needs no memory."""
    if not isinstance(value, Tensor) or (value.dim() < 4 and not value.is_floating_point()):
        return value  # the sizes and grids of images, by which placeholders are expanded
    inner = min(value.dim(), 3 if value.dim() > 3 else 2)
    outer = value.shape[: value.dim() - inner]
    is_image = value.reshape(*outer, -1).any(-1).to(value.dtype)
    return is_image.reshape(*outer, *[1] * inner).expand(value.shape)
