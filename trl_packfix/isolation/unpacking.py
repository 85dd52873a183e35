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

from ..attention.models import backbone, base_model
from ..attention.packed_forward import BOUNDARIES, undivided_budget
from ..attention.rows import DocumentRows, PaddedBatch, TensorAxes
from .repair import AroundCall, AroundCalls, is_sharded

DROPPED = (*BOUNDARIES, "position_ids", "input_ids", "inputs_embeds", "attention_mask")
TOKENS = TensorAxes((1,), 0)  # of (rows, tokens, ...)
Output = tuple[Any, ...] | ModelOutput  # of a backbone
PADDING = 1  # tokens behind the longest row: transformers drops a mask that hides nothing, and some models need it


class UnpackedForward(AroundCalls):
    """Runs the backbone of `model` with each document of a packed row as a separate row, while it is installed.

    A forward without boundaries is unchanged. Documents of similar length share a call, with at most as many padded
    tokens as the pack has tokens. Where parameters are sharded (ZeRO-3, FSDP) all documents share one call, so that
    all ranks gather the same parameters in the same order.
    """

    def __init__(self, model: nn.Module):
        self.model = base_model(model)
        super().__init__(backbone(self.model))
        self._boundaries: list[Tensor | None] = []  # per running forward of the whole model

    def _register(self) -> list[RemovableHandle]:
        def push(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._boundaries.append(kwargs.get("cu_seq_lens_q"))  # many models do not pass them on to their backbone

        def pop(*call: object) -> None:
            if self._boundaries:
                self._boundaries.pop()

        return [
            self.model.register_forward_pre_hook(push, with_kwargs=True),
            self.model.register_forward_hook(pop, always_call=True),
            *super()._register(),
        ]

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is None:
            boundaries = self._boundaries[-1] if self._boundaries else None
        if boundaries is None:
            return
        # Image-text models compute the embeddings before the backbone.
        name = "input_ids" if args or kwargs.get("input_ids") is not None else "inputs_embeds"
        tokens = args[0] if args else kwargs[name]
        rest = {key: value for key, value in kwargs.items() if key not in DROPPED}
        budget = inf if is_sharded(module) else tokens.shape[1]
        lengths = [length for length in boundaries.diff().tolist() if length]  # empty documents pad their number
        documents = DocumentRows(lengths, tokens.device, undivided_budget(budget), padding=PADDING)

        def inputs(group: PaddedBatch) -> dict[str, Any]:
            sizes = torch.tensor(group.lengths, device=tokens.device)
            mask = torch.arange(group.longest, device=tokens.device) < sizes[:, None]
            return {**rest, name: group.split(tokens, TOKENS), "attention_mask": mask.long()}

        output = yield (), inputs(documents.groups[0])
        yield join_outputs(
            [output, *(module.forward(**inputs(group)) for group in documents.groups[1:])],
            states=lambda values: documents.join(values, TOKENS),
            routers=lambda values: documents.join(values, TensorAxes((0,), 0)),
        )


def join_outputs(
    outputs: list[Any], states: Callable[[list[Tensor]], Tensor], routers: Callable[[list[Tensor]], Tensor]
) -> Output:
    """The first of some outputs of a backbone with the states, and the router logits of each layer, of all of them."""
    output = outputs[0]
    if isinstance(output, tuple):
        return (states([each[0] for each in outputs]), *output[1:])
    output["last_hidden_state"] = states([each["last_hidden_state"] for each in outputs])
    if output.get("router_logits") is not None:
        layers = zip(*(each["router_logits"] for each in outputs), strict=True)
        output["router_logits"] = tuple(routers([*layer]) for layer in layers)
    return output


class UnpackedImages(AroundCalls):
    """`UnpackedForward` for image-text models: runs the whole base model on documents as rows.

    Some models build their masks or positions from images, before the decoder (gemma3 lets the tokens of an image see
    each other). All documents of a pack share one call, so that every rank gathers the same parameters, and images stay
    in the order of their documents. Rows are padded with token 0; the probe runs such rows, so a model in which this
    token is an image is refused.
    """

    def __init__(self, model: nn.Module):
        super().__init__(base_model(model).base_model)

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        bounds = kwargs.get("cu_seq_lens_q")
        if bounds is None:
            return
        assert not args, "packs are passed by name"
        steps = torch.arange(int(kwargs["max_length_q"]) + PADDING, device=bounds.device)
        mask = steps < bounds.diff()[:, None]  # which tokens of the rows are real, (B, L)
        source = (bounds[:-1, None] + steps).clamp(max=bounds[-1] - 1)
        rows = {name: value for name, value in kwargs.items() if name not in (*BOUNDARIES, "position_ids")}
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids"):  # (1, T)
            if rows.get(name) is not None:
                rows[name] = rows[name][0][source].masked_fill(~mask, 0)
        output = yield (), rows | {"attention_mask": mask.long()}
        yield join_outputs([output], lambda values: values[0][mask][None], lambda values: values[0][mask.flatten()])
