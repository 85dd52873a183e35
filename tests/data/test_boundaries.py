"""One pack, all encodings of its boundaries, and the collator that writes them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_packfix import PackedDataCollator


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.sampled_from([None, 1, 8, 64]))
def test_collator_flattens_documents_and_pads_with_one_document(lengths, multiple):
    total = sum(lengths)
    documents = [{"input_ids": ids, "labels": ids} for ids in np.split(np.arange(total) + 1, np.cumsum(lengths)[:-1])]
    batch = PackedDataCollator(pad_to_multiple_of=multiple, pad_token_id=0)(documents)
    padding = -total % (multiple or 1)
    if padding:
        lengths = [*lengths, padding]  # padding is one final document
    tokens = [*range(1, total + 1)] + [0] * padding
    positions = [place for length in lengths for place in range(length)]
    bounds = [0, *np.cumsum(lengths).tolist()]
    longest = max(lengths)
    values = {name: value.tolist() if torch.is_tensor(value) else value for name, value in batch.items()}
    assert values == {
        "input_ids": [tokens],
        # the first token of a document is never a target
        "labels": [[token if token and place else -100 for token, place in zip(tokens, positions, strict=True)]],
        "position_ids": [positions],
        "seq_idx": [[i for i, length in enumerate(lengths) for _ in range(length)]],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    dtypes = [batch[name].dtype for name in ("position_ids", "cu_seq_lens_q", "seq_idx")]
    assert dtypes == [torch.int64, torch.int32, torch.int32]


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
        ({"position_ids": [0, 0, 1]}, "Document 0 of the batch has `position_ids` that begin again.*one by one"),
    ],
)
def test_collator_refuses_columns_that_it_would_ignore(columns, message):
    with pytest.raises(ValueError, match=message):
        PackedDataCollator()([{"input_ids": [1, 2, 3]} | columns])
