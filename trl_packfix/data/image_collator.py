"""Documents with images -> one packed batch: pixels joined, and for each document the positions that it has alone."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..samples.processor import images_between
from .collator import IGNORE_INDEX, TEXT_KEYS, DocumentRun


@dataclass(frozen=True)
class ImageLayout:
    """Which axis of a processor's output grows with what, by name, in a batch of one row."""

    tokens: frozenset[str]  # names of (1, tokens) outputs, such as `mm_token_type_ids`
    # The axis that grows with the number of images: 0 for `pixel_values` of Qwen-VL and Llava, 1 for Idefics. 0 also
    # for outputs with one row per document
    images: dict[str, int]


def join_padded(parts: list[Tensor], axis: int) -> Tensor:
    """The outputs of several documents as one. All axes but this one are padded with 0 at their end."""
    largest = [max(part.shape[i] for part in parts) for i in range(parts[0].dim())]
    missing = [[0 if i == axis else size - part.shape[i] for i, size in enumerate(largest)] for part in parts]
    paddings = [[size for each in reversed(sizes) for size in (0, each)] for sizes in missing]
    return torch.cat([F.pad(part, each) for part, each in zip(parts, paddings, strict=True)], dim=axis)


@dataclass
class PaddedImageCollator:
    """Documents with images as rows of a padded batch, as TRL's collator makes it, for padded evaluation."""

    layout: ImageLayout
    pad_token_id: int

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "attention_mask": 0}
        rows: list[dict[str, Any]] = []
        for document in documents:
            tokens = {name: torch.as_tensor(document[name], dtype=torch.int64) for name in ("input_ids", "labels")}
            kinds = {name: document[name][0] for name in self.layout.tokens & document.keys()}
            rows.append({"attention_mask": torch.ones_like(tokens["input_ids"]), **tokens, **kinds})
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {}
        for name in sorted(set().union(*rows)):
            parts = [row.get(name, torch.zeros(0, dtype=torch.int64)) for row in rows]
            value = fill.get(name, 0)
            batch[name] = torch.stack([F.pad(part, (0, longest - len(part)), value=value) for part in parts])
        for name, axis in self.layout.images.items():
            outputs = [document[name] for document in documents if name in document]
            if outputs and axis == 1:  # one row of images per document, padded to the same number of images
                outputs = [document.get(name, outputs[0][:, :0]) for document in documents]
            if outputs:
                batch[name] = join_padded(outputs, axis=0)
        return batch


@dataclass
class RopeIndex:
    """The positions of a document, (3, tokens), on models that count images in time, height and width (M-RoPE).

    `get_rope_index` of the model's class needs the config only, so no weights are sent to the workers of a data loader.
    """

    model_class: type[Any]
    config: Any

    def __call__(self, document: dict[str, Any]) -> Tensor:
        tokens = torch.from_numpy(np.asarray(document["input_ids"], dtype=np.int64))[None]
        named = inspect.signature(self.model_class.get_rope_index).parameters
        inputs = {name: value for name, value in document.items() if name in named and name not in TEXT_KEYS}
        if not any(name.endswith("_grid_thw") for name in inputs):  # text: the model counts on in all three
            return torch.arange(tokens.shape[1]).expand(3, -1)
        model = object.__new__(self.model_class)
        vars(model)["config"] = self.config
        length = tokens.shape[1]
        inputs = {name: value[:, :length] if name.endswith("type_ids") else value for name, value in inputs.items()}
        positions, _ = model.get_rope_index(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)
        return positions[:, 0]


@dataclass(frozen=True)
class PackedImages:
    """What the batch of a pack has because its documents have images.

    That is what the processor returns for the images, joined over documents. On models with M-RoPE `position_ids` have
    the shape (4, 1, T): the position of each token in its document, by which documents are told apart, then time,
    height and width. Images in a beginning that documents share are there once.
    """

    layout: ImageLayout
    rope_index: RopeIndex | None = None
    # A document with an image and without trained tokens. It is added to packs without any image, so that every rank
    # calls the vision tower; None adds nothing
    placeholder: dict[str, Any] | None = None

    def has_images(self, document: dict[str, Any]) -> bool:
        return bool(self.layout.images.keys() & document.keys())

    def with_placeholder(self, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.placeholder is None or any(map(self.has_images, documents)):
            return documents
        return [*documents, self.placeholder]

    def __call__(
        self, documents: list[dict[str, Any]], runs: list[DocumentRun], position_ids: Tensor
    ) -> dict[str, Any]:
        """The entries of the batch of these runs; `position_ids` are those of the text, (1, T)."""
        entries = {}
        for name in self.layout.tokens & set[str]().union(*documents):
            texts = [torch.zeros(1, len(document["input_ids"]), dtype=torch.int64) for document in documents]
            parts = [documents[i].get(name, texts[i])[:, first:] for i, first, *_ in runs]
            missing = position_ids.shape[1] - sum(part.shape[1] for part in parts)  # padding
            entries[name] = F.pad(torch.cat(parts, dim=1), (0, missing))
        with_images = [
            documents[i] if before == 0 else images_between(documents[i], before, num, num=num)
            for i, _, before, num in runs
            if before == 0 or before < num
        ]
        for name, axis in self.layout.images.items():
            parts = [outputs[name] for outputs in with_images if name in outputs]
            if parts:
                entries[name] = join_padded(parts, axis)
        if self.rope_index is not None:
            positions = [self.rope_index(documents[i])[:, first:] for i, first, *_ in runs]
            rest = position_ids[0, sum(part.shape[1] for part in positions) :].expand(3, -1)  # padding
            entries["position_ids"] = torch.cat([position_ids[None], torch.cat([*positions, rest], dim=1)[:, None]])
        return entries


NO_IMAGES = PackedImages(ImageLayout(frozenset(), {}))
