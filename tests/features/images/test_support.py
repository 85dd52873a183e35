"""What the core finds in the folder of images."""

import pytest
from datasets import Dataset

from trl_packfix.features.images.reading import ImageReading
from trl_packfix.features.images.support import Images

CHATS = Dataset.from_dict({"images": [[]], "conversations": [[{"from": "human", "value": "a"}]]})


def test_the_columns_of_a_set_decide_how_it_is_read():
    assert Images().reading_class(CHATS) is ImageReading
    assert Images().reading_class(CHATS.remove_columns("images")) is None


def test_conversations_that_the_collator_of_images_cannot_read_are_refused():
    with pytest.raises(ValueError, match="The eval dataset of 1 rows has images and `conversations`"):
        Images().check_texts(CHATS, "eval", per_turn=False)
    Images().check_texts(CHATS, "eval", per_turn=True)
    Images().check_texts(CHATS.remove_columns("images"), "eval", per_turn=False)
