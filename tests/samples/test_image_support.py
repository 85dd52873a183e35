"""What is left of images without the folder of their feature."""

import pytest
from datasets import Dataset

from trl_packfix.samples.image_support import ImageSupport

TEXT = Dataset.from_dict({"text": ["a"]})
IMAGES = Dataset.from_dict({"image": [None], "text": ["a"]})
WITHOUT = "A dataset with the column `image` was given, and this installation .* without its folder `features/images`"


def test_rows_of_text_need_no_support():
    assert ImageSupport().reading_class(TEXT) is None
    assert ImageSupport().with_named_images(TEXT, "train") is TEXT
    assert ImageSupport().count_turns(IMAGES, None) is None


def test_packs_and_lengths_of_images_are_refused():
    with pytest.raises(ValueError, match=WITHOUT + ".*Set `packing=False`, or install trl_packfix anew"):
        ImageSupport().reading_class(IMAGES)
    with pytest.raises(ValueError, match=WITHOUT + ".*Remove the column .*, or install trl_packfix anew"):
        ImageSupport().read_table(IMAGES, None, None)
