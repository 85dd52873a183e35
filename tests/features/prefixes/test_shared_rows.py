"""The layout of a pack whose documents share rows; `tests/test_layout.py` asks it what it asks every layout."""

from dataclasses import replace

import pytest
import torch
from test_layout import turns
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trl_packfix.data.rank_share import cut_part
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.group import Group
from trl_packfix.layout import LAYOUT_KEY, SharedRowsLayout, layout_of


def test_a_batch_in_which_documents_share_rows_says_so():
    layout = layout_of(PrefixCollator(min_shared=1)(turns([3, 4])))
    assert type(layout) is SharedRowsLayout
    assert layout.shares_rows


def test_two_packs_that_share_other_rows_have_other_checksums():
    """Compare two packs that have equal tokens, labels and boundaries of runs."""
    documents = turns([6, 6, 6])
    batch = PrefixCollator(min_shared=1, pad_to_multiple_of=2)(documents)
    keys = batch[LAYOUT_KEY].kv_index.clone()
    keys[-1] -= 1
    other_batch = batch | {LAYOUT_KEY: replace(batch[LAYOUT_KEY], kv_index=keys)}
    assert cut_part(batch, Group(2))[LAYOUT_KEY].checksum != cut_part(other_batch, Group(2))[LAYOUT_KEY].checksum


def test_the_router_statistic_counts_a_row_once_for_each_document():
    """Rows with their counts give the statistic of the documents alone, end to end."""
    documents = turns([6, 4, 9])
    batch = PrefixCollator(min_shared=1, keeps_last_rows=True)(documents)
    layout = layout_of(batch)
    logits = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))  # of each token
    every = torch.cat([logits[document["input_ids"]] for document in documents])
    counts = layout.row_counts(layout.trained)
    loss = load_balancing_loss_func((logits[batch["input_ids"][0]],), 4, 2, counts)
    assert loss.item() == pytest.approx(load_balancing_loss_func((every,), 4, 2).item(), rel=1e-6)
    once = load_balancing_loss_func((logits[batch["input_ids"][0]],), 4, 2, counts.clamp(max=1))
    assert once.item() != pytest.approx(loss.item(), rel=1e-4)
