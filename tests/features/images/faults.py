"""What the comparisons of packs with images must find; `ranks/faults.py` has the faults of the core."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from support.faults import Fault, changed
from torch.utils._pytree import tree_map_only

from trl_packfix.data import loaders
from trl_packfix.features.images import collator, parts, tower_hooks
from trl_packfix.features.images.collator import PackedImages
from trl_packfix.features.images.parts import TowerDivision
from trl_packfix.features.images.processor import RowProcessor
from trl_packfix.layout import ComparedContent
from trl_packfix.samples import conversation
from trl_packfix.samples.conversation import Conversation


def changed_inputs(change: Callable) -> Fault:
    """Return a fault that changes what enters the decoder of an image-text model by `change(part, inputs, rows)`."""

    def wrong(right, inputs, part_tokens, index):
        part = right(inputs, part_tokens, index)
        if part is inputs:
            return part
        return part | change(part, inputs, slice(index * part_tokens, (index + 1) * part_tokens))

    return changed(tower_hooks, "cut_to_part", wrong)


def first_features(part, inputs, rows):
    """Give every part the deepstack features of the images at the beginning of the pack."""
    name = "deepstack_visual_embeds"
    if part.get(name) is None:
        return {}
    return {
        name: [features[: len(own_features)] for features, own_features in zip(inputs[name], part[name], strict=True)]
    }


def images_in_other_order(right, batch, group, **kwargs):
    """Put the images of a pack that ranks share in another order on odd ranks."""
    if group.rank % 2 and "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].flip(0)
    return right(batch, group, **kwargs)


ON_PARTS: dict[str, Fault] = {
    "cut_late": changed_inputs(
        lambda part, inputs, rows: {"inputs_embeds": inputs["inputs_embeds"].roll(-1, 1)[:, rows]}
    ),
    "positions_of_the_first": changed_inputs(
        lambda part, inputs, rows: {"position_ids": inputs["position_ids"][..., : rows.stop - rows.start]}
    ),
    "features_of_the_first": changed_inputs(first_features),
    "features_late": changed(
        TowerDivision,
        "gather_outputs",
        lambda right, *args: tree_map_only(torch.Tensor, lambda tensor: tensor.roll(1, 0), right(*args)),
    ),
    "other_images": changed(loaders, "cut_part", images_in_other_order),
}


def by_placeholder(right, process, documents):
    """Compare images by their placeholder tokens."""
    compared = []
    for document in documents:
        spans = process.image_spans(document)
        compared.append(
            ComparedContent(np.asarray(document["input_ids"]), [(spans[0][0], spans[-1][1])] if spans else [])
        )
    return compared


def in_order_of_documents(right, images, documents, runs, position_ids):
    """Give each image once, but in the order of the documents, not of the rows."""
    entries = right(images, documents, runs, position_ids)
    wrong = right(images, documents, sorted(runs), position_ids)
    return entries | {name: wrong[name] for name in images.layout.images if name in wrong}


def images_of_last_turns(right, self, turn, processor):
    made = right(self, turn, processor)
    images = conversation._images_of_messages(self.messages)
    return made | {"images": images[len(images) - len(made["images"]) :]}


def images_of_neighbours(right, self, *args):
    entries = right(self, *args)
    if "pixel_values" in entries:
        entries["pixel_values"] = entries["pixel_values"].roll(1, self.layout.images["pixel_values"])
    return entries


ONE: dict[str, Fault] = {
    "compared_by_placeholder": changed(RowProcessor, "compare", by_placeholder),
    # Of a document whose first images are shared, these again in place of the others
    "first_images_again": changed(
        collator,
        "images_between",
        lambda right, document, first, stop, num_images: right(document, 0, stop - first, num_images=num_images),
    ),
    "images_of_the_last_turn": changed(Conversation, "row_of_turn", images_of_last_turns),
    "thoughts_kept": lambda: mock.patch("support.vision.stripping", lambda processor: processor),
    "images_of_other_rows": changed(PackedImages, "__call__", in_order_of_documents),
}
TRAINING: dict[str, Fault] = {
    # The images of a pack get no gradients. The proof of a degree compares states only
    "features_without_gradients": changed(parts, "exchange_pieces", lambda right, *args: right(*args).detach()),
}
FIRST_STEP: dict[str, Fault] = {"images of the neighbour": changed(PackedImages, "__call__", images_of_neighbours)}
