"""What `ImageReading` says of documents, by hand."""

from types import SimpleNamespace

import pytest

from trl_packfix.features.images.reading import ImageReading


@pytest.mark.parametrize("ranks_with_images, lengths", [(2, [7, 9]), (1, [5])])
def test_all_ranks_take_documents_with_images_or_none_does(ranks_with_images, lengths):
    documents = [{"input_ids": range(length)} for length in (7, 5, 9)]
    reading = object.__new__(ImageReading)
    reading._trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2))
    images = SimpleNamespace(has_images=lambda document: len(document["input_ids"]) > 6)
    reading.examples = SimpleNamespace(images=images)
    selected = reading.select_alike_on_ranks(documents, lambda value: ranks_with_images * value)
    assert [len(document["input_ids"]) for document in selected] == lengths
