"""The section of a report on images counts as by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.planners import make_epochs

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.features.images.report import ImageNumbers
from trl_packfix.planning.costs import CostModel, TowerCosts
from trl_packfix.planning.schedule import Schedule

LENGTHS = np.array([10, 20, 30, 40, 50])
IMAGES = {"image_count": np.array([2, 0, 1, 3, 0]), "image_values": np.array([4, 0, 2, 6, 0])}
SQUARES = {"image_squares": np.array([8, 0, 4, 12, 0])}


def numbers_of(per_value=5.0, synchronisation="micro", **arrays):
    """Return the numbers of images of two micro-steps on two ranks: documents (0, 1) and 2, then 3 and 4, then none."""
    documents = Documents(np.arange(5), LENGTHS * 0, LENGTHS, LENGTHS - 1, Ledger(), **(arrays or IMAGES | SQUARES))
    model = CostModel(1.0, 0.0, tower=TowerCosts(per_value, 0.0))
    planner = make_epochs(
        documents, "stream", world_size=2, accumulation=3, cost_model=model, synchronisation=synchronisation
    )
    planner._latest_schedule[0] = Schedule(np.arange(5), np.array([0, 2, 3, 4, 5, 5, 5]), accumulation=3, world_size=2)
    return ImageNumbers.of_table(planner)


def test_images_of_a_table_are_those_of_packs_that_are_not_empty():
    numbers = numbers_of()
    assert (numbers.num_images, numbers.num_documents, numbers.per_pack, numbers.most) == (6, 3, 6 / 4, 3)
    # The tower costs 20 and 10, then 30 and 0; the language model 30 and 30, then 40 and 50
    assert numbers.tower_share == 60 / (60 + 150)
    assert numbers.tower_imbalance == (20 + 30) / 30
    assert numbers.language_imbalance == (30 + 50) / 75
    assert numbers_of(synchronisation="step").tower_imbalance == 50 / 30
    assert numbers_of(synchronisation="step").language_imbalance == 80 / 75
    assert numbers.most_waiting is None
    assert numbers.line() == ("6 in 3 documents; 1.5 in a pack, at most 3; vision tower: 28.6% of the modelled FLOPs")
    assert numbers.imbalances_text == "; of the language model alone 1.067, of the vision tower alone 1.667"


def test_a_tower_of_unknown_cost_is_not_in_the_numbers():
    numbers = numbers_of(0.0)
    assert numbers == ImageNumbers(num_images=6, num_documents=3, per_pack=1.5, most=3)
    assert numbers.line().endswith("; vision tower: cost not known, so not balanced")
    assert numbers.imbalances_text == ""


STREAM = SimpleNamespace(packing=SimpleNamespace(buffer_size=1000), most_bytes=3 * 2**20)


@pytest.mark.parametrize("packs, per_pack", [(8, 1.5), (1, 12), (0, 12)])
def test_images_of_a_stream_are_those_so_far(packs, per_pack):
    counts = SimpleNamespace(images=12, with_images=5, packs=packs, most_images=4, tower_flops=1.0, language_flops=3.0)
    numbers = ImageNumbers.of_stream(STREAM, counts)
    assert numbers == ImageNumbers(12, 5, per_pack, 4, tower_share=0.25, most_waiting=(1000, 3 * 2**20))
    assert numbers.line() == (
        f"12 in 5 documents; {per_pack:.1f} in a pack, at most 4; vision tower: 25.0% of the modelled FLOPs; "
        "at most 1,000 documents, or 3 MiB of encoded images, wait on a rank"
    )
    counts.tower_flops = 0.0
    counts.images = 0
    numbers = ImageNumbers.of_stream(STREAM, counts)
    assert numbers.tower_share is None
    assert numbers.line() == "at most 1,000 documents, or 3 MiB of encoded images, wait on a rank"
