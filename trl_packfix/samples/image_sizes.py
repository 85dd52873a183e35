"""Lengths of documents from the sizes of their images, without processing a pixel.

How many tokens an image gets depends on its width and height in every image processor of transformers. So images of one
size are processed once, and the others of that size get arrays of the same shapes without content.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import ProcessorMixin

if TYPE_CHECKING:
    from PIL.Image import Image


def depends_on_sizes(processor: ProcessorMixin) -> bool:
    """Whether the shapes of processed images may be taken from images of the same sizes."""
    # Those of others than transformers may look at what an image shows
    image_processor = getattr(processor, "image_processor", None)
    return type(image_processor).__module__.partition(".")[0] == "transformers"


class SizeProcessor:
    """An image processor that remembers the shapes of what it returned for images of some sizes, without the content.

    Images of other sizes are processed, but as plain images of one colour: if the result depends on more than the size,
    it differs from that of the user's images.
    """

    def __init__(self, image_processor: Any):
        self._image_processor = image_processor
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while a copy is made there is no `_image_processor` yet
            raise AttributeError(name)
        return getattr(self._image_processor, name)

    def __call__(self, images: object, **kwargs: object) -> Any:
        from PIL import Image  # a requirement of data with images only

        try:
            sizes = _each(images, lambda image: (image.size, image.mode))
        except TypeError:  # arrays, for example
            return self._image_processor(images=images, **kwargs)
        key = repr((sizes, sorted(kwargs.items(), key=str)))
        if key not in self._known:
            plain = _each(images, lambda image: Image.new(image.mode, image.size, 1))
            outputs = self._image_processor(images=plain, **kwargs)
            self._known[key] = type(outputs)({name: _shape(value) for name, value in outputs.items()})
        return copy.copy(self._known[key])


def _each(images: object, function: Callable[["Image"], object]) -> object:
    """The function of each image, nested as the images are. TypeError: something else than images of PIL."""
    from PIL import Image

    if isinstance(images, Image.Image):
        return function(images)
    if not isinstance(images, list | tuple):
        raise TypeError(f"not an image: {type(images).__name__}")
    return [_each(image, function) for image in images]


def _shape(value: Any) -> Any:
    """Of pixels and masks: the shape, and for each image or tile whether it is not padding. It needs no memory."""
    if not isinstance(value, Tensor) or (value.dim() < 4 and not value.is_floating_point()):
        return value  # the sizes and grids of images, by which placeholders are expanded
    inner = min(value.dim(), 3 if value.dim() > 3 else 2)
    outer = value.shape[: value.dim() - inner]
    is_image = value.reshape(*outer, -1).any(-1).to(value.dtype)
    return is_image.reshape(*outer, *[1] * inner).expand(value.shape)
