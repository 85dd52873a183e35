"""Join the outputs of a processor for the images of several documents, for packs and for padded batches.

A processor makes of text and images a dictionary: token ids, the pixels of the images, and further tensors such as
their sizes. `ImageRows` (`rows.py`) gives each document in this form. Here the outputs of the documents of a
batch are joined: `PackedImages` adds them to the batch of a pack (`PackCollator` in `data/loaders.py`), and
`PaddedImageCollator` makes the padded batches of unpacked evaluation.

Every processor has other outputs. An `ImageLayout` says along which axis each of them is joined. `ImageExamples`
(`examples.py`) finds this out by processing a few documents.

Words:
    run     the tokens of a document that have places of their own in the pack. It is the whole document, unless the
            document shares its beginning with a document before it (`features/prefixes/collator.py`).
    M-RoPE  rotary positions of three numbers for each token: time, height and width in its image.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ...data.collator import IGNORE_INDEX, TEXT_KEYS, DocumentRun
from ...data.loaders import PackContent
from .processor import images_between

SAMPLING_STEP = 16  # every 16th value of the images is compared between ranks that make the same pack


@dataclass(frozen=True)
class ImageLayout:
    """How the outputs of a processor are joined, by their names. An output belongs to one document.

    Args:
        tokens: names of outputs with a value for each token, shape (1, tokens), such as `mm_token_type_ids`.
        images: for every other output, the axis along which the outputs of documents are joined. It is 0 for the
            `pixel_values` of Qwen-VL and Llava, which have an entry for each image or patch, and for outputs with one
            entry for each document. It is 1 for Idefics, whose shape is (1, images, ...).
    """

    tokens: frozenset[str]  # names
    images: dict[str, int]  # axes by name


def join_padded(tensors: list[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along one axis. All other axes are padded with 0 at their end to the largest size."""
    num_axes = tensors[0].dim()
    largest_sizes = [max(tensor.shape[i] for tensor in tensors) for i in range(num_axes)]
    padded = []
    for tensor in tensors:
        padding: list[int] = []  # as `F.pad` takes it: two numbers for each axis, from the last axis to the first
        for i in reversed(range(num_axes)):
            padding += [0, 0 if i == axis else largest_sizes[i] - tensor.shape[i]]
        padded.append(F.pad(tensor, padding))
    return torch.cat(padded, dim=axis)


@dataclass
class PaddedImageCollator:
    """Collator that makes a padded batch of documents with images, one document in each row, as TRL's collator does."""

    layout: ImageLayout
    pad_token_id: int

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        padding_values = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}
        rows: list[dict[str, Any]] = []
        for document in documents:
            tokens = {name: torch.as_tensor(document[name], dtype=torch.int64) for name in ("input_ids", "labels")}
            token_outputs = {name: document[name][0] for name in self.layout.tokens & document.keys()}
            rows.append({"attention_mask": torch.ones_like(tokens["input_ids"]), **tokens, **token_outputs})
        batch = {}
        for name in sorted(set().union(*rows)):
            # A document without images lacks the outputs for tokens, which are then 0
            entries = [row.get(name, torch.zeros_like(row["input_ids"])) for row in rows]
            batch[name] = pad_sequence(entries, batch_first=True, padding_value=padding_values.get(name, 0))
        for name, axis in self.layout.images.items():
            outputs = [document[name] for document in documents if name in document]
            if outputs and axis == 1:
                # A row of the batch is a document, not an image, so documents are joined along axis 0, and their images
                # padded along axis 1. A document without images has an entry of padding only
                outputs = [document.get(name, outputs[0][:, :0]) for document in documents]
            if outputs:
                batch[name] = join_padded(outputs, axis=0)
        return batch


@dataclass
class RopeIndex:
    """Computes the M-RoPE positions of a document.

    `get_rope_index` of the model's class needs only the config of the model. So it is called on an object that has
    nothing else. Class and config, unlike a model with weights, can be sent to the workers of a data loader.
    """

    model_class: type[Any]  # class of the base model
    config: Any  # config of this model

    def __call__(self, document: dict[str, Any]) -> Tensor:
        """Return the position of each token in time, height and width, shape (3, tokens)."""
        tokens = torch.from_numpy(np.asarray(document["input_ids"], dtype=np.int64))[None]
        num_tokens = tokens.shape[1]
        # Of the outputs of the processor, each model takes other ones here
        parameters = inspect.signature(self.model_class.get_rope_index).parameters
        inputs = {name: value for name, value in document.items() if name in parameters and name not in TEXT_KEYS}
        if not any(name.endswith("_grid_thw") for name in inputs):
            # In a text all three positions are the position of the token
            return torch.arange(num_tokens).expand(3, -1)
        model = object.__new__(self.model_class)
        vars(model)["config"] = self.config
        positions, _ = model.get_rope_index(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)
        return positions[:, 0]


@dataclass(frozen=True)
class PackedImages(PackContent):
    """Makes the entries that the batch of a pack has because its documents have images.

    Args:
        layout: how the outputs of the processor are joined.
        rope_index: computes M-RoPE positions, or None for models without them.
        placeholder: a document with an image and without trained tokens. It is added to packs without any image, so
            that every rank calls the vision tower. None adds nothing.
    """

    layout: ImageLayout
    rope_index: RopeIndex | None = None
    placeholder: dict[str, Any] | None = None
    # If ranks share a pack, the tokens of an image may lie in the parts of several ranks. So each rank gets all tokens,
    # and cuts out its part inside the model, after the vision tower
    is_cut_in_model: ClassVar[bool] = True

    def has_images(self, document: dict[str, Any]) -> bool:
        """Return whether a document has images."""
        return bool(self.layout.images.keys() & document.keys())

    def with_placeholder(self, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the documents of a pack. If none of them has an image, the placeholder is added at the end."""
        if self.placeholder is None or any(map(self.has_images, documents)):
            return documents
        return [*documents, self.placeholder]

    def __call__(
        self, documents: list[dict[str, Any]], runs: list[DocumentRun], position_ids: Tensor
    ) -> dict[str, Any]:
        """Join the outputs of the processor for the documents of a pack.

        An image in a beginning that documents share is there once.

        Args:
            documents: the documents of the pack.
            runs: the runs of the pack, in the order of their tokens. A `DocumentRun` is the tokens of
                `documents[run.document]` from the token `run.first` on.
            position_ids: position of each token in its document, shape (1, T), with padding.

        Returns:
            The joined outputs by name. On models with M-RoPE also `position_ids` of shape (4, 1, T): first the position
            of each token in its document, by which documents are told apart, then time, height and width.
        """
        entries = {}
        for name in self.layout.tokens & set[str]().union(*documents):
            values = []
            for run in runs:
                document = documents[run.document]
                # A document without images lacks the output, and all its tokens have the value 0
                text_values = torch.zeros(1, len(document["input_ids"]), dtype=torch.int64)
                values.append(document.get(name, text_values)[:, run.first :])
            joined = torch.cat(values, dim=1)
            entries[name] = F.pad(joined, (0, position_ids.shape[1] - joined.shape[1]))
        # Take the outputs for the images that begin in each run: the images of its document without the first
        # `images_before`, which begin in tokens that the document shares. A run in which no image begins is left out if
        # images begin before it. With `images_before` 0, `images_between` returns all outputs of the document, also if
        # its images were not counted (`num_images` is 0 if no documents share tokens)
        run_outputs = [
            images_between(documents[run.document], run.images_before, run.num_images, num_images=run.num_images)
            for run in runs
            if run.images_before == 0 or run.images_before < run.num_images
        ]
        for name, axis in self.layout.images.items():
            tensors = [outputs[name] for outputs in run_outputs if name in outputs]
            if tensors:
                entries[name] = join_padded(tensors, axis)
        if self.rope_index is not None:
            positions = [self.rope_index(documents[run.document])[:, run.first :] for run in runs]
            num_tokens = sum(position.shape[1] for position in positions)
            # As in a text, all three positions are the position of the token
            padding = position_ids[0, num_tokens:].expand(3, -1)
            rope_positions = torch.cat([*positions, padding], dim=1)
            entries["position_ids"] = torch.cat([position_ids[None], rope_positions[:, None]])
        return entries

    def checksum_tensors(self, batch: dict[str, Any]) -> list[Tensor]:
        """Return every 16th value of the pixels of a pack, by which ranks compare whether they made the same pack."""
        pixels = batch.get("pixel_values")
        return [] if pixels is None else [pixels.flatten()[::SAMPLING_STEP].contiguous()]
