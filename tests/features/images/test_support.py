"""What the core finds in the folder of images."""

import pytest
from datasets import Dataset

from trl_packfix.attention.tower_support import tower_support
from trl_packfix.features import images
from trl_packfix.features.images.reading import ImageReading
from trl_packfix.features.images.support import Images
from trl_packfix.features.images.towers import Towers
from trl_packfix.samples.image_support import image_support

CHATS = Dataset.from_dict({"images": [[]], "conversations": [[{"from": "human", "value": "a"}]]})


def test_the_core_finds_the_support_of_the_folder():
    assert isinstance(images.tower_support(), Towers)
    assert isinstance(images.image_support(), Images)
    assert isinstance(tower_support(), Towers)
    assert isinstance(image_support(), Images)


def test_the_columns_of_a_set_decide_how_it_is_read():
    assert Images().reading_class(CHATS) is ImageReading
    assert Images().reading_class(CHATS.remove_columns("images")) is None


def test_conversations_that_the_collator_of_images_cannot_read_are_refused():
    with pytest.raises(ValueError, match="The eval dataset of 1 rows has images and `conversations`"):
        Images().check_texts(CHATS, "eval", per_turn=False)
    Images().check_texts(CHATS, "eval", per_turn=True)
    Images().check_texts(CHATS.remove_columns("images"), "eval", per_turn=False)
