"""One pack, all encodings of its boundaries, and the collator that writes them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_packfix import PackedDataCollator


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.sampled_from([None, 1, 8, 64]))
def test_collator_flattens_documents_and_pads_with_one_document(lengths, multiple):
    documents = []
    first = 1
    for n in lengths:
        ids = np.arange(first, first + n)
        documents.append({"input_ids": ids, "labels": ids})
        first += n
    batch = PackedDataCollator(pad_to_multiple_of=multiple, pad_token_id=0)(documents)
    total = sum(lengths)
    padding = -sum(lengths) % (multiple or 1)
    shape = (1, total + padding)
    for key in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert batch[key].shape == shape
    assert batch["input_ids"][0, :total].tolist() == list(range(1, total + 1))
    expected = lengths + [padding] * (padding > 0)
    bounds = batch["cu_seq_lens_q"]
    index = batch["seq_idx"][0]
    positions = batch["position_ids"][0]
    assert bounds[0] == 0, "padding is one final document"
    assert bounds.diff().tolist() == expected, "padding is one final document"
    assert index.tolist() == [i for i, n in enumerate(expected) for _ in range(n)]
    assert positions.tolist() == [i for n in expected for i in range(n)]
    assert (positions.dtype, bounds.dtype, index.dtype) == (torch.int64, torch.int32, torch.int32)
    assert batch["max_length_q"] == batch["max_length_k"] == max(expected)
    starts = positions == 0
    assert (batch["labels"][0][starts] == -100).all(), "the first token of a document is never a target"
    trained = batch["labels"][0, :total][~starts[:total]]
    assert torch.equal(trained, batch["input_ids"][0, :total][~starts[:total]])
    assert (batch["labels"][0, total:] == -100).all()
    assert "attention_mask" not in batch
    assert batch["use_cache"] is False


def test_collator_takes_lists_tensors_missing_labels_masks_of_ones_and_a_mask_beside_labels():
    batch = PackedDataCollator()([{"input_ids": [1, 2]}, {"input_ids": torch.tensor([3, 4]), "labels": [-100, 4]}])
    assert batch["labels"].tolist() == [[-100, 2, -100, 4]]
    columns = {"attention_mask": [1, 1, 1], "completion_mask": [0, 0, 1], "labels": [-100, -100, 3]}
    assert PackedDataCollator()([{"input_ids": [1, 2, 3]} | columns])["labels"].tolist() == [[-100, -100, 3]]


@pytest.mark.parametrize("document", [{"input_ids": []}, {"input_ids": [1, 2], "labels": [1]}])
def test_collator_refuses_documents_without_one_label_per_token(document):
    with pytest.raises(ValueError, match="Document 1 of the batch has"):
        PackedDataCollator()([{"input_ids": [1]}, document])


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"completion_mask": [0, 0, 1]}, "have `completion_mask` and no `labels`.*all 3 tokens.*Give `labels`"),
        ({"assistant_masks": [0, 0, 1]}, "have `assistant_masks` and no `labels`"),
        ({"seq_lengths": [1, 2]}, r"have `seq_lengths` \(\[1, 2\] in the first\).*see each other.*one by one"),
        ({"attention_mask": [1, 1, 0]}, "Document 0 of the batch is padded.*attended to.*`padding=False`"),
        ({"attention_mask": torch.tensor([0, 1, 1])}, "Document 0 of the batch is padded"),
    ],
)
def test_collator_refuses_columns_that_it_would_ignore(columns, message):
    with pytest.raises(ValueError, match=message):
        PackedDataCollator()([{"input_ids": [1, 2, 3]} | columns])
