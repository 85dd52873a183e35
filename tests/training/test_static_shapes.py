"""`pad_documents_to_multiple_of`: packs of one shape, and models that do not see the padding."""

import pytest
import torch

from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.rank_share import cut_part
from trl_packfix.group import Group
from trl_packfix.layout import layout_of

STATIC = PackedDataCollator(512, pad_documents_to_multiple_of=72, max_length=64)


def documents(*lengths):
    return [{"input_ids": list(range(5, 5 + n))} for n in lengths]


@pytest.mark.parametrize("lengths", [(7,), (3, 2, 4), (64,) * 8, (512,), (1,) * 64], ids=str)
def test_every_pack_has_the_same_shapes(lengths):
    batch = STATIC(documents(*lengths))
    plain = PackedDataCollator()(documents(*lengths))
    longest = max(64, *lengths)
    num_tokens = sum(lengths)
    bounds = batch["cu_seq_lens_q"]
    assert bounds.shape == (73,)
    assert bounds[-1] == 512
    assert batch["cu_seq_lens_k"] is bounds
    assert batch["max_length_q"] == batch["max_length_k"] == longest
    padded = bounds.diff()[len(lengths) :].tolist()
    assert padded == sorted(padded, reverse=True)
    assert max(padded) <= longest
    assert (batch["labels"][0, num_tokens:] == -100).all()
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert batch[name].shape == (1, 512)
        assert torch.equal(batch[name][:, :num_tokens], plain[name])


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_part_of_a_pack_has_the_same_shapes(degree):
    """Packs that are nearly empty, and documents shorter and longer than a part, must give the same shapes, too."""
    collate = PackedDataCollator(32, pad_documents_to_multiple_of=8, max_length=100)
    shapes = set()
    for lengths in ((1,), (7, 3), (min(100, 32 * degree),), (16 * degree,) * 2, (5,) * 6):
        part = cut_part(collate.collate(documents(*lengths), degree)[0], Group(degree))
        longest = part["max_length_q"]
        shapes.add((part["input_ids"].shape, part["cu_seq_lens_q"].shape, longest))
        assert layout_of(part).document_count == 8
        assert part["cu_seq_lens_q"][-1] == 32 * degree >= longest
    assert shapes == {((1, 32), (9,), min(100, 32 * degree))}


def test_more_documents_get_the_next_multiple():
    assert STATIC(documents(*(1,) * 73))["cu_seq_lens_q"].shape == (145,)
