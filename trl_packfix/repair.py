"""Right on models that cannot be packed: the documents of a pack as rows of right-padded batches.

The batches, their documents and the loss stay those of packed training; only the backbone sees rows. Later padding
cannot reach earlier tokens of a causal model, so each document is computed as it is alone. It costs the padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .forwards import base_model

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_ids")


class UnpackedForward:
    """Makes the backbone of `model` see each document of a packed row as a row of its own; `remove()` ends it.

    A forward without boundaries is left alone. Documents of similar length go together, in calls of no more padded
    tokens than the pack has tokens. Where parameters are sharded (ZeRO-3, FSDP) all documents go in one call, so that
    all ranks gather the same parameters in the same order.

    Attributes:
        num_tokens, num_padded: tokens of the packs so far, and tokens that the backbone saw for them.
    """

    def __init__(self, model: nn.Module):
        self.num_tokens = self.num_padded = 0
        self._boundaries: list[Tensor | None] = []  # of each forward of the whole model that is running
        self._running: list[_Documents | None] = []  # of each call of the backbone
        inner = base_model(model)
        # Of bart-like models the causal LM calls the decoder inside its base model.
        decoder = inner.get_decoder()
        backbone = inner.base_model if decoder is None or decoder is inner else decoder
        # always_call: a forward that raises must not leave its documents to the next one
        self._handles = [
            inner.register_forward_pre_hook(self._hear, with_kwargs=True),
            inner.register_forward_hook(self._forget, always_call=True),
            backbone.register_forward_pre_hook(self._enter, with_kwargs=True),
            backbone.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hear(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Many models do not hand boundaries on to their backbone.
        self._boundaries.append(kwargs.get("cu_seq_lens_q"))

    def _forget(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._boundaries:
            self._boundaries.pop()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is None:
            boundaries = self._boundaries[-1] if self._boundaries else None
        if boundaries is None:
            self._running.append(None)
            return None
        tokens = args[0] if args else kwargs["input_ids"]
        rest = {key: value for key, value in kwargs.items() if key not in (*BOUNDARIES, "input_ids", "attention_mask")}
        documents = _Documents(tokens, boundaries.diff().tolist(), rest, _is_sharded(module))
        self._running.append(documents)
        self.num_tokens += tokens.shape[1]
        self.num_padded += documents.num_padded
        return (), documents.inputs(0)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        documents = self._running.pop() if self._running else None
        if documents is None or output is None:
            return output
        outputs = [output] + [module.forward(**documents.inputs(i)) for i in range(1, len(documents.groups))]
        if isinstance(output, tuple):
            return (documents.flatten([each[0] for each in outputs])[None], *output[1:])
        output["last_hidden_state"] = documents.flatten([each["last_hidden_state"] for each in outputs])[None]
        if output.get("router_logits") is not None:
            layers = zip(*(each["router_logits"] for each in outputs), strict=True)
            output["router_logits"] = tuple(documents.flatten(list(layer)) for layer in layers)
        return output


class _Documents:
    """The documents of one pack, grouped into right-padded batches."""

    def __init__(self, tokens: Tensor, lengths: list[int], rest: dict[str, Any], is_sharded: bool):
        self.lengths, self.rest = lengths, rest
        self.parts = tokens[0].split(lengths)
        self.groups: list[list[int]] = []
        budget = float("inf") if is_sharded else sum(lengths)
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            group = self.groups[-1] if self.groups else None
            if group is None or (len(group) + 1) * lengths[group[0]] > budget:
                self.groups.append([i])
            else:
                group.append(i)

    @property
    def num_padded(self) -> int:
        return sum(len(group) * self.lengths[group[0]] for group in self.groups)

    def inputs(self, number: int) -> dict[str, Any]:
        rows = [self.parts[i] for i in self.groups[number]]
        return {
            **self.rest,
            "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        }

    def flatten(self, batches: list[Tensor]) -> Tensor:
        """Values of each group, (rows, length, ...) or (rows * length, ...), as (T, ...) without padding, in order."""
        found: dict[int, Tensor] = {}
        for group, values in zip(self.groups, batches, strict=True):
            shape = (len(group), self.lengths[group[0]], values.shape[-1])
            found.update(zip(group, values.reshape(shape), strict=True))
        return torch.cat([found[i][: self.lengths[i]] for i in range(len(self.lengths))])


def _is_sharded(module: nn.Module) -> bool:
    """Whether parameters are gathered per call: DeepSpeed ZeRO-3 marks them with `ds_id`, FSDP2 makes DTensors."""
    return any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in module.parameters())
