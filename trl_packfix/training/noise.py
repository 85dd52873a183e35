"""NEFTune's noise on packs: each document gets the amplitude that it gets alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..attention.forwards import ModelHooks
from ..layout import layout_of


class DocumentNoise(ModelHooks):
    """NEFTune (arXiv 2310.05914): uniform noise of amplitude alpha / sqrt(L d) in packed forwards in train mode.

    L is the length of the document, d the size of the embeddings. The ranks that share a pack have one seed, and each
    draws from a generator of its own: otherwise equal places of the parts would get equal noise. An unpacked model
    embeds the documents longest first (`sorts_rows`); those with images keep their order, all in one call.
    """

    def __init__(self, model: PreTrainedModel, alpha: float, sorts_rows: bool = True):
        super().__init__()
        self.model = model
        self.alpha = alpha
        self.sorts_rows = sorts_rows
        # For each running forward of the model: lengths of its documents, (N,), the document of each token, (1, T), and
        # the index of the part if the batch is a part of a pack. None for a forward without boundaries.
        self._running: list[tuple[Tensor, Tensor, int | None] | None] = []
        self._num_rows = 0  # rows embedded so far in the latest forward

    def _register(self) -> list[RemovableHandle]:
        return [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            # always_call: documents of a forward that raises must not reach the next one
            self.model.register_forward_hook(self._leave, always_call=True),
            self.model.get_input_embeddings().register_forward_hook(self._add_noise),
        ]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bounds = kwargs.get("cu_seq_lens_q")
        layout = layout_of(kwargs)
        index = layout.index if layout.degree > 1 else None
        self._running.append(None if bounds is None else (bounds.diff(), kwargs["seq_idx"], index))
        self._num_rows = 0

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._running:
            self._running.pop()

    def _add_noise(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        running = self._running[-1] if self._running else None
        if running is None or not module.training:
            return output
        lengths, index, part = running
        if output.shape[:2] == index.shape:
            length = lengths[index]
        else:  # an unpacked model embeds documents as rows
            rows = lengths.clamp(min=1)
            if self.sorts_rows:
                rows = lengths[lengths > 0].sort(descending=True).values  # empty documents pad their number
            first = self._num_rows % len(rows)
            self._num_rows += len(output)
            length = rows[first : first + len(output), None]
        amplitude = self.alpha / (length * output.shape[-1]).sqrt()
        generator = None
        if part is not None:  # seeded from the random state that all ranks of a group share
            seed = int(torch.randint(2**62, ()))  # on the host: a seed on the device would have to be copied
            generator = torch.Generator(output.device).manual_seed(seed + part)
        noise = torch.empty_like(output).uniform_(-1, 1, generator=generator)
        return output + noise * amplitude.to(output.dtype).unsqueeze(-1)
