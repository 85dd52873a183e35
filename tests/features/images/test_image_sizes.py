"""Lengths from the sizes of images: the processor's own for every family, and what happens where they are not."""

import logging

import numpy as np
import pytest
from datasets import Dataset
from features.images.processed import processor_of
from support.vision import FAMILIES, FEATURES, message, picture, rows
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from trl_packfix.features.images.measures import CHECK_INTERVAL, measure
from trl_packfix.samples.turns import TurnRule

ROWS = rows(40)


class Counting:
    """An image processor that counts its calls."""

    def __init__(self, image_processor):
        self.image_processor = image_processor
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.image_processor, name)

    def __call__(self, images, **kwargs):
        self.calls += 1
        return self.image_processor(images=images, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_give_what_the_processor_gives(family):
    process = processor_of(family)
    wanted = [process.measure_row(dict(row)) for row in ROWS]
    counting = process.processor.image_processor = Counting(process.processor.image_processor)
    sizes_measured = [process.by_size.measure_row(dict(row)) for row in ROWS]
    assert sizes_measured == wanted
    sizes = {str([image.size for image in row["images"]]) for row in ROWS if row["images"]}
    with_images = sum(bool(row["images"]) for row in ROWS)
    assert 1 < counting.calls == len(sizes) < with_images, "every row was processed, or none"
    assert len({len(row["input_ids"]) for row in wanted}) > 5
    assert max(row["image_count"] for row in wanted) == 2


class BrightIsLarge(LlavaImageProcessorPil):
    """Bright images get more tokens."""

    def __call__(self, images, **kwargs):
        first = images
        while isinstance(first, list | tuple):
            first = first[0]
        if np.asarray(first).mean() > 128:
            kwargs["crop_size"] = {"height": 48, "width": 48}
            kwargs["size"] = {"shortest_edge": 48}
        return super().__call__(images, **kwargs)


def content_dependent_process():
    process = processor_of("llava")
    stock = process.processor.image_processor
    process.processor.image_processor = BrightIsLarge(size=stock.size, crop_size=stock.crop_size, do_pad=False)
    return process


def test_a_processor_that_looks_at_the_content_runs_on_every_row(caplog, monkeypatch):
    process = content_dependent_process()
    images = [picture(24, 24, i) if i % 3 else picture(24, 24, i).point(lambda value: 255) for i in range(40)]
    chat = [message("user", "ab", 1), message("assistant", "c")]
    dataset = Dataset.from_list([{"images": [image], "messages": chat} for image in images], features=FEATURES)
    wanted = [len(process(row)["input_ids"]) for row in dataset]
    assert len(set(wanted)) == 2
    with caplog.at_level(logging.WARNING):
        # Not of transformers, so sizes are not trusted
        measures = measure(dataset, process, "train", num_proc=None, drops=False)
        assert [*map(len, measures["input_ids"])] == wanted
        assert "have another length" not in caplog.text
        monkeypatch.setattr(BrightIsLarge, "__module__", "transformers.models.llava")
        measures = measure(dataset, process, "train", num_proc=None, drops=False)
        assert [*map(len, measures["input_ids"])] == wanted
    differing = sum(wanted[row] != wanted[1] for row in range(0, 40, CHECK_INTERVAL))
    assert differing > 0
    assert f"{differing} of 3 compared rows of the train dataset have another length" in caplog.text


def test_compared_turns_are_counted_by_their_rows(caplog, monkeypatch):
    """If each turn is a document, the turns of every 16th row are compared, and the warning names the row."""
    monkeypatch.setattr(BrightIsLarge, "__module__", "transformers.models.llava")
    images = [picture(24, 24, i) for i in range(40)]
    images[16] = images[16].point(lambda value: 255)
    chat = [message("user", "ab", 1), message("assistant", "c"), message("user", "d"), message("assistant", "e")]
    dataset = Dataset.from_list([{"images": [image], "messages": chat} for image in images], features=FEATURES)
    with caplog.at_level(logging.WARNING):
        turns = measure(dataset, content_dependent_process(), "train", num_proc=None, drops=False, rule=TurnRule())
    assert len(turns) == 80
    assert "2 of 6 compared rows of the train dataset have another length" in caplog.text
    assert "the first is row 16" in caplog.text
