"""Train models that cannot be packed: run documents of a pack as rows of right-padded batches, below the head.

The batches, their documents and the loss stay those of packed training; only the backbone gets rows. In a causal model
padding at the end cannot change earlier tokens, so each document is computed as it is alone. The cost is the padding.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

from ..attention.forwards import ModelHooks
from ..attention.models import backbone, base_model
from ..attention.packed_forward import BOUNDARIES, undivided
from ..attention.rows import Axes, DocumentRows, Group
from .repair import is_sharded

DROPPED = (*BOUNDARIES, "position_ids", "input_ids", "inputs_embeds", "attention_mask")
TOKENS = Axes((1,), 0)  # of (rows, tokens, ...)
Output = tuple[Any, ...] | ModelOutput  # of a backbone
PADDING = 1  # tokens behind the longest row: transformers drops a mask that hides nothing, and some models need it


class UnpackedForward(ModelHooks):
    """Runs the backbone of `model` with each document of a packed row as a separate row, while it is installed.

    A forward without boundaries is unchanged. Documents of similar length share a call, with at most as many padded
    tokens as the pack has tokens. Where parameters are sharded (ZeRO-3, FSDP) all documents share one call, so that
    all ranks gather the same parameters in the same order.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = base_model(model)
        self.num_tokens = self.num_padded = 0  # of all packs so far; that the backbone computed for them
        self._boundaries: list[Tensor | None] = []  # per running forward of the whole model
        # Per call of the backbone its documents, and the inputs of a group of them
        self._running: list[tuple[DocumentRows, Callable[[Group], dict[str, Any]]] | None] = []

    def _register(self) -> list[RemovableHandle]:
        rows = backbone(self.model)
        # always_call: after a forward that raises, its documents must not remain for the next one
        return [
            self.model.register_forward_pre_hook(self._push_boundaries, with_kwargs=True),
            self.model.register_forward_hook(self._pop_boundaries, always_call=True),
            rows.register_forward_pre_hook(self._enter, with_kwargs=True),
            rows.register_forward_hook(self._leave, always_call=True),
        ]

    def _push_boundaries(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Many models do not pass boundaries on to their backbone.
        self._boundaries.append(kwargs.get("cu_seq_lens_q"))

    def _pop_boundaries(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._boundaries:
            self._boundaries.pop()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is None:
            boundaries = self._boundaries[-1] if self._boundaries else None
        if boundaries is None:
            self._running.append(None)
            return None
        # Image-text models compute the embeddings before the backbone.
        name = "input_ids" if args or kwargs.get("input_ids") is not None else "inputs_embeds"
        tokens = args[0] if args else kwargs[name]
        rest = {key: value for key, value in kwargs.items() if key not in DROPPED}
        budget = inf if is_sharded(module) else tokens.shape[1]
        lengths = [length for length in boundaries.diff().tolist() if length]  # empty documents pad their number
        documents = DocumentRows(lengths, tokens.device, undivided(budget), padding=PADDING)
        self.num_tokens += tokens.shape[1]
        self.num_padded += documents.num_padded

        def inputs(group: Group) -> dict[str, Any]:
            sizes = torch.tensor(group.lengths, device=tokens.device)
            mask = torch.arange(group.longest, device=tokens.device) < sizes[:, None]
            return {**rest, name: group.split(tokens, TOKENS), "attention_mask": mask.long()}

        self._running.append((documents, inputs))
        return (), inputs(documents.groups[0])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Output | None) -> Output | None:
        state = self._running.pop() if self._running else None
        if state is None or output is None:
            return output
        documents, inputs = state
        outputs: list[Any] = [output]
        outputs += [module.forward(**inputs(group)) for group in documents.groups[1:]]
        if isinstance(output, tuple):
            return (documents.join([one[0] for one in outputs], TOKENS), *output[1:])
        output["last_hidden_state"] = documents.join([one["last_hidden_state"] for one in outputs], TOKENS)
        if output.get("router_logits") is not None:
            layers = zip(*(one["router_logits"] for one in outputs), strict=True)
            output["router_logits"] = tuple(documents.join(list(layer), Axes((0,), 0)) for layer in layers)
        return output


class UnpackedImages(ModelHooks):
    """`UnpackedForward` for image-text models: runs the whole base model on documents as rows.

    Some models build their masks or positions from images, before the decoder (gemma3 lets the tokens of an image see
    each other). All documents of a pack share one call, so that every rank gathers the same parameters, and images stay
    in the order of their documents. Rows are padded with token 0; the probe runs such rows, so a model in which this
    token is an image is refused.
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
        rows = {name: value for name, value in kwargs.items() if name not in (*BOUNDARIES, "position_ids")}
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids"):  # (1, T)
            if rows.get(name) is not None:
                rows[name] = rows[name][0][source].masked_fill(~mask, 0)
        return (), rows | {"attention_mask": mask.long()}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Output | None) -> Output | None:
        mask = self._running.pop() if self._running else None
        if mask is None or output is None:
            return output
        if isinstance(output, tuple):
            return (output[0][mask][None], *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"][mask][None]
        if output.get("router_logits") is not None:
            output["router_logits"] = tuple(layer[mask.flatten()] for layer in output["router_logits"])
        return output
