"""The layout of a pack whose documents share rows; `tests/test_layout.py` asks it what it asks every layout."""

from dataclasses import replace

from test_layout import turns

from trl_packfix.data.rank_share import cut_part
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.group import Group
from trl_packfix.layout import LAYOUT_KEY


def test_two_packs_that_share_other_rows_have_other_checksums():
    """Compare two packs that have equal tokens, labels and boundaries of runs."""
    documents = turns([6, 6, 6])
    batch = PrefixCollator(min_shared=1, pad_to_multiple_of=2)(documents)
    keys = batch[LAYOUT_KEY].kv_index.clone()
    keys[-1] -= 1
    other_batch = batch | {LAYOUT_KEY: replace(batch[LAYOUT_KEY], kv_index=keys)}
    assert cut_part(batch, Group(2))[LAYOUT_KEY].checksum != cut_part(other_batch, Group(2))[LAYOUT_KEY].checksum
