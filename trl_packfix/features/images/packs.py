"""Choose the probe that tests packs with images on a model, and the way to train a model that fails this test."""

from typing import Any

from ...feature import Feature
from .probe import ImageProbe
from .unpacking import UnpackedImages


class ImagePacks(Feature):
    """Feature of packs with images: it chooses the classes of the probe and of unpacking.

    Args:
        examples: an `ImageExamples`, which makes documents through the processor of the run, for the probe.
    """

    has_towers = True

    def __init__(self, examples: Any):
        self.examples = examples

    def make_probe_class(self, probe_class: Any) -> Any:
        """Return the `ImageProbe` that makes its documents with the examples of this run."""
        return ImageProbe.with_images(self.examples)

    def make_unpacked_class(self, unpacked_class: Any) -> Any:
        """Return the class that runs the documents of a pack as rows, for models with images."""
        return UnpackedImages
