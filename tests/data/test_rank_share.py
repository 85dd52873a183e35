"""A packed batch cut into the parts that the ranks of a group hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.features import needs, sharing
from torch.utils.data._utils.pin_memory import pin_memory

from trl_packfix import PackedDataCollator
from trl_packfix.data.collator import IGNORE_INDEX
from trl_packfix.data.loaders import PackCollator
from trl_packfix.data.rank_share import PER_TOKEN, RankShare, cut_part
from trl_packfix.group import Group
from trl_packfix.layout import LAYOUT_KEY


def documents(lengths, prompt):
    """Yield documents of tokens 1, 2, 3, ...; the first `prompt` labels of each document are not trained."""
    first = 1
    for length in lengths:
        tokens = torch.arange(first, first + length)
        labels = tokens.clone()
        labels[:prompt] = IGNORE_INDEX
        yield {"input_ids": tokens, "labels": labels}
        first += length


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.sampled_from([2, 4, 8]), st.integers(0, 3))
def test_parts_end_to_end_are_the_pack_and_labels_are_shifted_over_their_borders(lengths, degree, prompt):
    pack = PackedDataCollator(pad_to_multiple_of=degree)(list(documents(lengths, prompt)))
    rank_batches = [cut_part(pack, Group(degree, index)) for index in range(degree)]
    num_tokens = pack["input_ids"].shape[1]
    for name in PER_TOKEN:
        assert all(rank_batch[name].shape == (1, num_tokens // degree) for rank_batch in rank_batches)
        assert torch.equal(torch.cat([rank_batch[name] for rank_batch in rank_batches], 1), pack[name])
    following = torch.cat([rank_batch["shift_labels"] for rank_batch in rank_batches], 1)
    assert torch.equal(following[:, :-1], pack["labels"][:, 1:])
    assert following[0, -1] == IGNORE_INDEX
    assert all(rank_batch["cu_seq_lens_q"] is pack["cu_seq_lens_q"] for rank_batch in rank_batches)

    assert all(rank_batch[LAYOUT_KEY].num_tokens == num_tokens for rank_batch in rank_batches)


def test_the_checksum_is_that_of_the_whole_pack():
    def checksum(lengths, index=0, change=None):
        batch = PackedDataCollator(pad_to_multiple_of=2)(list(documents(lengths, 1)))
        if change:
            batch[change][0, -1] += 1
        return cut_part(batch, Group(2, index))[LAYOUT_KEY].checksum

    assert checksum([4, 4]) == checksum([4, 4], index=1)
    checksums = {checksum([4, 4]), checksum([5, 3]), checksum([4, 4], change="input_ids")}
    assert len(checksums | {checksum([4, 4], change="labels")}) == 4


def test_a_loader_pins_all_tensors_of_a_part(monkeypatch):
    """From other memory the host would wait for the copy to a GPU. Pinning needs a GPU, so only the calls are seen."""
    part = cut_part(PackedDataCollator(pad_to_multiple_of=2)(list(documents([3, 2], 0))), Group(2))
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args: pinned.append(self) or self.clone())
    pinned_layout = pin_memory(part)[LAYOUT_KEY]
    layout = part[LAYOUT_KEY]
    assert {id(layout.next_documents), id(layout.trained)} <= {id(tensor) for tensor in pinned}
    assert torch.equal(pinned_layout.trained, layout.trained)
    assert pinned_layout.trained is not layout.trained
    assert (pinned_layout.group, pinned_layout.checksum) == (layout.group, layout.checksum)


@pytest.mark.parametrize("setting", ["off", pytest.param("pack", marks=needs("prefixes"))])
@pytest.mark.parametrize("multiple, degree", [(None, 4), (5, 4)])
def test_rows_are_padded_for_the_ranks_that_share_them(setting, multiple, degree):
    """In one place, whatever makes the rows: padded again behind it, runs and images would lie in other rows."""
    documents_of_pack = [{"input_ids": [*range(5, 26), last, last + 1]} for last in (30, 40, 50)]
    make_collator = sharing(setting).make_collator
    collate = PackCollator(make_collator(PackedDataCollator(multiple)))
    pack = make_collator(PackedDataCollator(math.lcm(multiple or 1, degree)))(documents_of_pack)
    num_rows = pack["input_ids"].shape[1]
    assert num_rows % degree == 0
    assert num_rows % (multiple or 1) == 0
    assert collate(documents_of_pack)["input_ids"].shape[1] < num_rows
    rank_batches = [collate(RankShare(documents_of_pack, Group(degree, index))) for index in range(degree)]
    for name in ("input_ids", "position_ids", "seq_idx"):
        assert torch.equal(torch.cat([rank_batch[name] for rank_batch in rank_batches], dim=1), pack[name])
    for rank_batch in rank_batches:
        assert torch.equal(rank_batch["cu_seq_lens_k"], pack["cu_seq_lens_k"])
        assert rank_batch["layout"].shares_rows is (setting == "pack")
