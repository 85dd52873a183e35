"""Images as a dataset stores them, encoded: in memory while their document waits, and in checkpoints.

A decoded image has 3 bytes per pixel, and what a processor makes of it 12 and more. A JPEG file has less than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Image, IterableDataset

from .checks import IMAGES


@dataclass(frozen=True)
class EncodedImage:
    """An image file: its bytes, or where they are."""

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

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else len(self.data)

    def decode(self) -> Any:
        return Image(mode=self.mode).decode_example({"path": self.path, "bytes": self.data})


def undecoded(dataset: IterableDataset) -> tuple[IterableDataset, str | None]:
    """The stream with its images encoded as they are stored, and the mode to which its feature converts them.

    Without features the dataset gives what it was made of, so its images may be decoded still.
    """
    dataset, mode = dataset.with_format(None), None
    if dataset.features is None:
        return dataset, None
    for name in IMAGES:
        feature = dataset.features.get(name)
        while feature is not None and not isinstance(feature, Image):  # of a list
            feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        mode = mode if feature is None else feature.mode
    return dataset.decode(False), mode


def packed_images(images: Sequence[Sequence[EncodedImage]]) -> dict[str, Any]:
    """The images of N documents, for a file of `torch.save`; an image in several of them is in it once."""
    # By identity: comparing images would compare their bytes
    different = {id(image): image for of_document in images for image in of_document}
    places, images_once = {key: i for i, key in enumerate(different)}, different.values()
    data = b"".join(image.data or b"" for image in images_once)
    return {
        "numbers": [[places[id(image)] for image in of_document] for of_document in images],
        "paths": [image.path for image in images_once],
        "modes": [image.mode for image in images_once],
        "sizes": [-1 if image.data is None else len(image.data) for image in images_once],
        "data": torch.from_numpy(np.frombuffer(data, np.uint8).copy()),
    }


def unpacked_images(packed: dict[str, Any]) -> list[tuple[EncodedImage, ...]]:
    images, start, data = [], 0, packed["data"].numpy().tobytes()
    for path, mode, size in zip(packed["paths"], packed["modes"], packed["sizes"], strict=True):
        images.append(EncodedImage(path, None if size < 0 else data[start : start + size], mode))
        start += max(size, 0)
    return [tuple(images[number] for number in numbers) for numbers in packed["numbers"]]
