"""NEFTune's noise on packs: each document gets noise of the amplitude that it would get unpacked.

NEFTune adds uniform noise to the embeddings of a document; its amplitude depends on the length of the document. A pack
is one row of several documents, so the length of the row would give a wrong amplitude. `loading.py` puts the hooks of
`DocumentNoise` on the model instead of the hook of transformers. If a model mixes documents in packs, it may be
*unpacked*: then it computes the documents of a pack as rows of a padded batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..attention.forwards import ModelHooks
from ..group import Group
from ..layout import layout_of


@dataclass
class _RunningDocuments:
    """The documents of a running forward."""

    lengths: Tensor  # (N,)
    document_of_token: Tensor  # (1, T)
    group: Group  # the ranks that share the pack
    num_rows: int = 0  # rows that an unpacked model has embedded so far


class DocumentNoise(ModelHooks):
    """Hooks that add NEFTune's noise (arXiv 2310.05914) in packed forwards in train mode.

    The noise is uniform, of amplitude alpha / sqrt(L d). L is the length of the document in tokens, d the size of the
    embeddings.

    The ranks that share a pack have equal random states, so equal places of their parts of the pack would get equal
    noise. So each of them draws from a generator with a seed of its own: a common seed plus the index of its part.

    Args:
        model: the model, which may compute the documents of a pack as one row, or unpacked, as padded rows.
        alpha: `neftune_noise_alpha`.
        embeds_longest_first: whether an unpacked model embeds the longest documents first, in one or several calls.
            With images it embeds all documents in one call, in the order of the pack.
    """

    def __init__(self, model: PreTrainedModel, alpha: float, embeds_longest_first: bool = True):
        super().__init__()
        self.model = model
        self.alpha = alpha
        self.embeds_longest_first = embeds_longest_first
        # A stack with an entry for each running forward. An entry is None if the batch has no boundaries of documents.
        self._running: list[_RunningDocuments | None] = []

    def _register(self) -> list[RemovableHandle]:
        """Register the hooks on the model and on its embeddings, and return their handles."""
        return [
            self.model.register_forward_pre_hook(self._push_documents, with_kwargs=True),
            # With `always_call`, the documents of a forward that raises are removed, too
            self.model.register_forward_hook(self._pop_documents, always_call=True),
            self.model.get_input_embeddings().register_forward_hook(self._add_noise),
        ]

    def remove(self) -> None:
        super().remove()
        self._running.clear()  # of forwards that were interrupted

    def _push_documents(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the documents of a forward that begins."""
        bounds = kwargs.get("cu_seq_lens_q")
        group = layout_of(kwargs).group  # the ranks that share the pack
        self._running.append(None if bounds is None else _RunningDocuments(bounds.diff(), kwargs["seq_idx"], group))

    def _pop_documents(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Forget the documents of a forward that ends."""
        if self._running:
            self._running.pop()

    def _add_noise(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return embeddings, (B, T, d), with the noise of their documents."""
        running: _RunningDocuments | None = self._running[-1] if self._running else None
        if running is None or not module.training:
            return output
        lengths = running.lengths
        # There are two cases. A pack is embedded as one row: `length` has the length of the document of each token,
        # (1, T). An unpacked model embeds each document as a row: `length` has the length of each row, (B, 1)
        if output.shape[:2] == running.document_of_token.shape:
            length = lengths[running.document_of_token]
        else:
            # Empty documents only make the number of documents constant. With images each of them is a row of padding,
            # and the limit avoids a division by 0. Without images they are no rows
            row_lengths = lengths.clamp(min=1)
            if self.embeds_longest_first:
                row_lengths = lengths[lengths > 0].sort(descending=True).values
            # Each call embeds the rows behind those of the call before. If a model embeds all rows once more in a
            # forward, they begin again with the first one
            first_row = running.num_rows % len(row_lengths)
            running.num_rows += len(output)
            length = row_lengths[first_row : first_row + len(output), None]
        amplitude = self.alpha / (length * output.shape[-1]).sqrt()
        generator = None
        if not running.group.is_alone:
            # All ranks of a group draw the same seed. It is drawn on the host, so that it need not be copied from the
            # device.
            seed = int(torch.randint(2**62, ()))
            generator = torch.Generator(output.device).manual_seed(seed + running.group.rank)
        noise = torch.empty_like(output).uniform_(-1, 1, generator=generator)
        return output + noise * amplitude.to(output.dtype).unsqueeze(-1)
