"""A module that leaks sees each document of a pack by itself: as rows of a padded batch, or one after the other.

Everything around the module stays packed. One call for all documents keeps the calls of all ranks equal where
parameters are sharded (ZeRO-3, FSDP); elsewhere documents of similar length share a call, and padding stays bounded.
`search.py` finds the modules and the way; only the leak probe says whether it helped.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_unflatten
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import DocumentBatch, DocumentBatches, ModelHooks, PackedForward, in_backward, packed_forwards
from ..attention.rows import Axes
from .arguments import argument_leaves, output_leaves
from .axes import ModuleAxes

# What models call boundaries on the way to their kernels; a document by itself has none
BOUNDARY_NAMES = ("cu_seq", "max_length_", "max_seqlen", "seq_idx")

POSITIONS = Axes((1,), 0)  # of `position_ids` as the collator makes them, (1, T)


@dataclass(frozen=True)
class Way:
    """How a module sees the documents: in batches of rows or alone; with the positions of the pack, or its own."""

    rows: bool
    positions: bool

    def __str__(self) -> str:
        text = "as rows of a padded batch" if self.rows else "one after the other"
        return text if self.positions else text + ", with its own positions"


WAYS = (Way(True, True), Way(True, False), Way(False, True), Way(False, False))


@dataclass(frozen=True)
class Repair:
    """What was repaired: the class of the modules, the first of them by name, how many, and the way."""

    module: str
    first: str
    count: int
    way: str

    def __str__(self) -> str:
        return f"{self.count} {self.module} ({self.first}) {self.way}"


class RepairedModule(ModelHooks):
    """Makes `module` see documents by themselves in packed forwards, and only there, while it is installed.

    Raises ValueError if the way is a loop over documents and the module's parameters are sharded: ranks that hold other
    numbers of documents would gather parameters at other times.
    """

    def __init__(self, module: nn.Module, axes: ModuleAxes, way: Way):
        if not way.rows and is_sharded(module):
            raise ValueError(
                f"{type(module).__name__} was to see documents one after the other, but its parameters are sharded "
                "(ZeRO-3 or FSDP): ranks with other numbers of documents would wait for each other forever. Set "
                'on_leak="unpack".'
            )
        super().__init__()
        self.module, self.axes, self.way = module, axes, way
        self._is_sharded = is_sharded(module)
        self._running: list[tuple[DocumentBatches, tuple, dict[str, Any]] | None] = []

    def _register(self) -> list[RemovableHandle]:
        return [
            self.module.register_forward_pre_hook(self._enter, with_kwargs=True),
            # always_call: a forward that raises must not leave its documents to the next one
            self.module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        running = _running(module)
        if running is None:
            self._running.append(None)
            return None
        # FSDP2 shards a module between its calls: what was sharded once will be again.
        self._is_sharded = self._is_sharded or is_sharded(module)
        budget = (inf if self._is_sharded else running.num_tokens) if self.way.rows else 0
        documents = running.documents(budget)
        self._running.append((documents, args, kwargs))
        first = documents.batches[0]
        packed_forwards.append(first.forward)
        return self._inputs(module, args, kwargs, first)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self._running.pop() if self._running else None
        if state is None:
            return output
        packed_forwards.pop()
        if output is None:
            return None
        documents, args, kwargs = state
        outputs = [output]
        for batch in documents.batches[1:]:
            packed_forwards.append(batch.forward)
            try:
                args_here, kwargs_here = self._inputs(module, args, kwargs, batch)
                outputs.append(module.forward(*args_here, **kwargs_here))
            finally:
                packed_forwards.pop()
        leaves = [output_leaves(each)[0] for each in outputs]
        joined = [
            self._join(places[0][0], [value for _, value in places], documents) for places in zip(*leaves, strict=True)
        ]
        return tree_unflatten(joined, output_leaves(output)[1])

    def _inputs(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], batch: DocumentBatch
    ) -> tuple[tuple, dict[str, Any]]:
        leaves, tree = argument_leaves(module, args, kwargs)
        given = []
        for place, value in leaves:
            if place.startswith(BOUNDARY_NAMES) or (place == "position_ids" and not self.way.positions):
                value = None
            elif isinstance(value, Tensor):
                # TRL's loss calls the backbone itself, and hands down positions where the whole model does not.
                axes = self.axes.inputs.get(place, POSITIONS if place == "position_ids" else None)
                if axes is None and place not in self.axes.inputs:
                    raise ValueError(
                        f"a repaired module was given a tensor of shape {tuple(value.shape)} at {place}, where the "
                        'leak probe saw none: how to divide it among documents is unknown. Set on_leak="unpack".'
                    )
                value = value if axes is None else batch.group.split(value, axes)
            elif place in self.axes.numbers:
                value = batch.group.longest
            given.append(value)
        return tree_unflatten(given, tree)

    def _join(self, place: str, values: list[Any], documents: DocumentBatches) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        axes = self.axes.outputs.get(place)
        # States at the end of a row and attention weights have no place in a pack; whoever needs them will say so.
        if axes is None or len(axes.tokens) != 1:
            return values[0] if values[0].dim() == 0 and len(values) == 1 else None
        return documents.rows.join(values, axes)


class RestartedPositions(ModelHooks):
    """Makes positions that `module` is given at `place` start with `first` at each document, in packed forwards.

    For models that count positions over the whole pack (bart), or from another number than the batch does (roberta).
    """

    def __init__(self, module: nn.Module, place: str, axis: int, first: int):
        super().__init__()
        self.module, self.place, self.axis, self.first = module, place, axis, first

    def _register(self) -> list[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._enter, with_kwargs=True)]

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        running = _running(module)
        if running is None:
            return None
        leaves, tree = argument_leaves(module, args, kwargs)
        given = [self._restarted(value, running) if place == self.place else value for place, value in leaves]
        return tree_unflatten(given, tree)

    def _restarted(self, positions: Tensor, running: PackedForward) -> Tensor:
        bounds = running.cu_seq_lens_q
        # where the document of each token starts; without `output_size` the host would wait for their sum
        starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=positions.shape[self.axis])
        return positions - positions.index_select(self.axis, starts) + self.first


def _running(module: nn.Module) -> PackedForward | None:
    """The packed forward that this module has to divide; None outside of packs and inside a repaired module."""
    running = packed_forwards[-1] if packed_forwards else None
    if running is None and module.training and in_backward():
        raise ValueError(
            f"{type(module).__name__} is repaired for packing and is recomputed in backward, but the packed forward it "
            "belongs to was not carried there: the checkpointing is not transformers' own. Switch it off, and set "
            "`activation_checkpointing=True` or call `model.activation_checkpointing_enable()`."
        )
    return None if running is None or running.rows is not None else running


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are gathered per call: DeepSpeed ZeRO-3 marks them with `ds_id`, FSDP2 makes DTensors."""
    return any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in module.parameters())
