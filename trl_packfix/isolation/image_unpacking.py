"""Train image-text models that cannot be packed: run the whole model below the head on documents as padded rows.

Some models build their masks or positions from images, before the decoder (gemma3 lets the tokens of an image see each
other). So not the decoder gets rows, as for text, but the model that joins images and text. The batches, their
documents and the loss stay those of packed training. The cost is the padding: all documents of a pack share one call,
so that every rank gathers the same parameters, and images stay in the order of their documents.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import ModelHooks
from ..attention.models import base_model
from ..attention.packed_forward import BOUNDARIES
from .unpacking import PADDING

DROPPED = (*BOUNDARIES, "position_ids")
TOKENS = ("input_ids", "token_type_ids", "mm_token_type_ids")  # inputs of shape (1, T)


class UnpackedImages(ModelHooks):
    """Runs the base model of `model` with each document of a packed row as a separate row, while it is installed.

    A forward without boundaries is unchanged. Rows are padded at their end with token 0; the probe runs such rows, so a
    model in which this token is an image is refused.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = base_model(model)
        self._running: list[Tensor | None] = []  # per call: which tokens of the rows are real, (B, L)

    def _register(self) -> list[RemovableHandle]:
        # always_call: after a forward that raises, its documents must not remain for the next one
        return [
            self.model.base_model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.base_model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        bounds = kwargs.get("cu_seq_lens_q")
        if bounds is None:
            self._running.append(None)
            return None
        assert not args, "packs are passed by name"
        lengths = bounds.diff()
        steps = torch.arange(int(kwargs["max_length_q"]) + PADDING, device=bounds.device)
        mask = steps < lengths[:, None]
        source = (bounds[:-1, None] + steps).clamp(max=bounds[-1] - 1)
        self._running.append(mask)
        rows = {name: value for name, value in kwargs.items() if name not in DROPPED}
        for name in TOKENS:
            if rows.get(name) is not None:
                rows[name] = rows[name][0][source].masked_fill(~mask, 0)
        return (), rows | {"attention_mask": mask.long()}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        mask = self._running.pop() if self._running else None
        if mask is None or output is None:
            return output
        if isinstance(output, tuple):
            return (output[0][mask][None], *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"][mask][None]
        if output.get("router_logits") is not None:
            output["router_logits"] = tuple(layer[mask.flatten()] for layer in output["router_logits"])
        return output
