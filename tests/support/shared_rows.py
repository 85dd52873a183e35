"""Batches in which documents share rows, as attention reads them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward, running_forward
from trl_packfix.layout import LAYOUT_KEY


def pack_of(batch: dict[str, Any]) -> PackedForward:
    """Return what attention reads of a batch whose documents share rows."""
    return PackedForward(*(batch[name] for name in CU_SEQ_LENS), **batch[LAYOUT_KEY].attention_fields())


def detach_keys(layers: Iterable[torch.nn.Module], rows: Callable[[PackedForward], Any]) -> None:
    """Let no gradient reach the keys and values of some rows of packs whose documents share rows."""

    def detach(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        running = running_forward()
        if running is None or running.kv_index is None:
            return output
        is_detached = torch.zeros(output.shape[1], 1, dtype=torch.bool)
        is_detached[rows(running)] = True
        return torch.where(is_detached, output.detach(), output)

    for layer in layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.register_forward_hook(detach)
