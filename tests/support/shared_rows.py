"""Batches in which documents share rows, as attention reads them."""

from typing import Any

from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward
from trl_packfix.layout import LAYOUT_KEY


def pack_of(batch: dict[str, Any]) -> PackedForward:
    """Return what attention reads of a batch whose documents share rows."""
    return PackedForward(*(batch[name] for name in CU_SEQ_LENS), **batch[LAYOUT_KEY].attention_fields())
