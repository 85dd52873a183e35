"""Repair a module that leaks: run it on each document of a pack separately, as rows of a padded batch or in a loop.

Everything around the module stays packed. Where parameters are sharded (ZeRO-3, FSDP) all documents share one call, so
that all ranks make the same calls. Elsewhere documents of similar length share a call, which bounds the padding.
`search.py` finds the modules and the way to run them; the leak probe then tests whether the repair worked.
"""

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_unflatten
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import CallArguments, ModelHooks
from ..attention.packed_forward import PackedForward, in_backward, packed_forward_entered, running_forward, running_pack
from ..attention.rows import DocumentRows, TensorAxes
from ..compat import recorded_router_logits, replace_router_logits
from .arguments import argument_leaves, output_leaves
from .axes import ModuleAxes
from .tracing import ShiftedPositions

# Beginnings of the argument names that pass boundaries on to kernels; a separate document has no boundaries
BOUNDARY_NAMES = ("cu_seq", "max_length_", "max_seqlen", "seq_idx")

AroundCall = Generator[Any, Any, None]
POSITIONS = TensorAxes((1,), 0)  # of `position_ids` as the collator makes them, (1, T)


@dataclass(frozen=True)
class RepairMode:
    """How a repaired module runs on documents."""

    rows: bool  # as rows of padded batches, else one after the other
    positions: bool  # with the `position_ids` of the pack, else without any, so that the module makes its own

    def __str__(self) -> str:
        text = "as rows of a padded batch" if self.rows else "one after the other"
        return text if self.positions else text + ", with its own positions"


REPAIR_MODES = (RepairMode(True, True), RepairMode(True, False), RepairMode(False, True), RepairMode(False, False))


@dataclass(frozen=True)
class Repair:
    """A repair: the class of the modules, the name of the first one, how many there are, and how they run."""

    module: str
    first: str
    count: int
    way: str

    def __str__(self) -> str:
        return f"{self.count} {self.module} ({self.first}) {self.way}"


@dataclass(frozen=True)
class ValueOfBatches:
    """A value without a form in a pack, as a repaired module returned it for each batch of documents.

    An example are the top-k indices (B, L, min(k, L)) of rows of L tokens: they are as wide as the rows are long, and
    they count the tokens of one row. A repaired module that gets this value as an argument reads the part of its own
    batch. Any other use raises, because this is not a tensor.

    Attributes:
        rows: the batches.
        values: one tensor per batch, of any shapes.
    """

    rows: DocumentRows
    values: list[Tensor]

    def select(self, rows: DocumentRows, index: int) -> Tensor:
        """Return the value of batch `index` of `rows`.

        Raises ValueError if the value was computed in other batches.
        """
        if rows is not self.rows:
            raise ValueError(
                f"a repaired module got a value of shape {tuple(self.values[0].shape)} that another repaired module "
                f"computed in {len(self.rows.groups)} batches of documents, and it computes {len(rows.groups)}: it is "
                'unknown how to divide such a value again. Set on_leak="unpack".'
            )
        return self.values[index]


class AroundCalls(ModelHooks):
    """Changes the inputs and the output of calls of some modules, while it is installed."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self._modules, self._running = modules, list[AroundCall | None]()  # what `_around` does in running calls

    def _register(self) -> list[RemovableHandle]:
        # always_call: after a forward that raises, its documents must not remain for the next one
        before = [each.register_forward_pre_hook(self._before, with_kwargs=True) for each in self._modules]
        return before + [each.register_forward_hook(self._after, always_call=True) for each in self._modules]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        call = self._around(module, args, kwargs)
        inputs = next(call, None)
        self._running.append(None if inputs is None else call)
        return inputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = self._running.pop() if self._running else None
        if call is None:
            return output
        if output is None:  # the call has raised
            return call.close()
        return call.send(output)

    @abstractmethod
    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Yields the changed arguments, gets the output, and yields the changed one; nothing if the call stays."""


class RepairedModule(AroundCalls):
    """Runs `module` on each document separately in packed forwards, while it is installed."""

    def __init__(self, module: nn.Module, axes: ModuleAxes, mode: RepairMode):
        if not mode.rows and is_sharded(module):
            raise ValueError(
                f"{type(module).__name__} must run on documents one after the other, but its parameters are sharded "
                "(ZeRO-3 or FSDP): ranks with different numbers of documents would wait for each other forever. Set "
                'on_leak="unpack".'
            )
        super().__init__(module)
        self.axes = axes
        self.mode = mode
        self._is_sharded = is_sharded(module)

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        running = _running_pack(module)
        if running is None:
            return
        # FSDP2 gathers parameters for a call and shards them again after it: once sharded, always sharded.
        self._is_sharded = self._is_sharded or is_sharded(module)
        budget = (inf if self._is_sharded else running.num_tokens) if self.mode.rows else 0
        rows, forwards = running.documents(budget)
        inputs = self._inputs_of_batch(module, args, kwargs, rows=rows, index=0)
        num_before = len(recorded_router_logits())
        with packed_forward_entered(forwards[0]):  # the module's forward runs between the two hooks
            output = yield inputs
        outputs = [output]
        num_routers = len(recorded_router_logits()) - num_before
        for index, forward in enumerate(forwards[1:], start=1):
            with packed_forward_entered(forward):
                args_here, kwargs_here = self._inputs_of_batch(module, args, kwargs, rows=rows, index=index)
                outputs.append(module.forward(*args_here, **kwargs_here))
        if num_routers:  # of each router the logits of all batches, with their padding, become those of the pack
            of_rows = recorded_router_logits()[num_before:]
            of_routers = [of_rows[i::num_routers] for i in range(num_routers)]
            # A checkpoint that computes this again records no logits: what it saves here it would look for in vain
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                replace_router_logits(num_before, [rows.join(logits, TensorAxes((0,), 0)) for logits in of_routers])
        first, tree = output_leaves(output)
        values = zip(*([value for _, value in output_leaves(each)[0]] for each in outputs), strict=True)
        joined = [self._join_batches(place, [*each], rows) for (place, _), each in zip(first, values, strict=True)]
        yield tree_unflatten(joined, tree)

    def _inputs_of_batch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: DocumentRows, index: int
    ) -> CallArguments:
        """Return the arguments of the call for batch `index` of `rows`."""
        group = rows.groups[index]
        leaves, tree = argument_leaves(module, args, kwargs)
        values = []
        for place, value in leaves:
            if place.startswith(BOUNDARY_NAMES) or (place == "position_ids" and not self.mode.positions):
                value = None
            elif isinstance(value, ValueOfBatches):
                value = value.select(rows, index)
            elif isinstance(value, Tensor):
                # TRL's loss calls the backbone directly, and passes positions even if the whole model does not.
                axes = self.axes.inputs.get(place, POSITIONS if place == "position_ids" else None)
                # A scalar, such as the `num_items_in_batch` of transformers' trainer, is the same for all documents
                if axes is None and place not in self.axes.inputs and value.dim() > 0:
                    raise ValueError(
                        f"a repaired module got a tensor of shape {tuple(value.shape)} at {place}, where the leak "
                        'probe saw none: how to divide it among documents is unknown. Set on_leak="unpack".'
                    )
                value = value if axes is None else group.split(value, axes)
            elif place in self.axes.numbers:
                value = group.longest
            values.append(value)
        return tree_unflatten(values, tree)

    def _join_batches(self, place: str, values: list[object], rows: DocumentRows) -> object:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return values[0]
        axes = self.axes.outputs.get(place)
        if axes is not None and len(axes.tokens) == 1 and place not in self.axes.widening:
            return rows.join(tensors, axes)
        # Indices count the tokens of a row. They have no gradient, which an object that is no tensor would hide from
        # a reentrant checkpoint.
        if axes is not None and not tensors[0].is_floating_point():
            return ValueOfBatches(rows, tensors)
        # Final states of rows and attention weights have no form in a pack: None, so that their use raises.
        return tensors[0] if tensors[0].dim() == 0 and len(tensors) == 1 else None


class RestartedPositions(ModelHooks):
    """Restarts `shifted` positions that `module` gets in each document, in packed forwards.

    For models that count positions over the whole pack (bart), or from another start than the batch does (roberta).
    """

    def __init__(self, module: nn.Module, shifted: ShiftedPositions):
        super().__init__()
        self.module = module
        self.shifted = shifted

    def __str__(self) -> str:
        return f"with positions from {self.shifted.first} in each document"

    def _register(self) -> list[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._restart_positions, with_kwargs=True)]

    def _restart_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallArguments | None:
        running = _running_pack(module)
        if running is None:
            return None
        leaves, tree = argument_leaves(module, args, kwargs)
        _, at, axis, first = self.shifted
        values = []
        for place, value in leaves:
            if place == at:
                bounds = running.cu_seq_lens_q
                # where the document of each token starts; without `output_size` the host would wait for their sum
                starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=value.shape[axis])
                value = value - value.index_select(axis, starts) + first
            values.append(value)
        return tree_unflatten(values, tree)


def _running_pack(module: nn.Module) -> PackedForward | None:
    """The packed forward whose documents this module must separate; None outside of packs and in repaired modules."""
    if running_forward() is None and module.training and in_backward():
        raise ValueError(
            f"{type(module).__name__} is repaired for packing and is recomputed in backward without the boundaries of "
            "its forward: the checkpointing is not transformers' own. Switch it off, and set "
            "`gradient_checkpointing=True`."
        )
    return running_pack()


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are gathered per call: DeepSpeed ZeRO-3 marks them with `ds_id`, FSDP2's are DTensors."""
    return any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in module.parameters())
