"""Repair a module that leaks: hooks run it on each document of a pack separately, in padded batches or one by one.

A module *leaks* if it lets a document of a pack change another one. Everything around the module stays packed. The
hooks divide the module's arguments into batches of documents, run the module on each batch, and join the outputs.
`axes.py` has learned which axes of arguments and outputs index tokens. `search.py` chooses the modules and a
`RepairMode` for them, and the leak probe then tests whether the repair worked.

Words:

    batch         one call of a repaired module, on documents of similar length as padded rows, or on one document. If
                  parameters are sharded (ZeRO-3, FSDP), all documents are in one batch, so that all ranks make the same
                  calls
    place         a name of a value among the arguments or outputs of a call (`arguments.py`)
    running pack  the packed forward of the whole model inside which a module is called
                  (`attention/packed_forward.py`); it knows where the documents begin

`DocumentRows` (`attention/rows.py`) has the batches of one pack, and converts tensors of the pack to tensors of a batch
(`split`) and back (`join`), by the `TensorAxes` of the tensor: the axes that index tokens, and the axis of rows.
"""

import threading
from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_unflatten
from torch.utils.hooks import RemovableHandle

from ..attention.forwards import CallArguments, ModelHooks, is_called_inside_itself
from ..attention.packed_forward import PackedForward, in_backward, packed_forward_entered, running_forward, running_pack
from ..attention.rows import DocumentRows, TensorAxes
from ..compat import recorded_router_logits, replace_router_logits
from .arguments import argument_leaves, output_leaves
from .axes import ModuleAxes
from .tracing import ShiftedPositions

# Beginnings of the names of arguments that pass boundaries on to kernels. A document on its own has no boundaries.
BOUNDARY_NAMES = ("cu_seq", "max_length_", "max_seqlen", "seq_idx")

AroundCall = Generator[Any, Any, None]  # yields the arguments of a call, gets its output, and yields the new output
POSITION_AXES = TensorAxes(tokens=(1,), batch=0)  # axes of `position_ids` as the collator makes them, (1, T)
LOGIT_AXES = TensorAxes(tokens=(0,), batch=0)  # axes of router logits, which have the tokens of all rows on one axis


@dataclass(frozen=True)
class RepairMode:
    """How a repaired module runs on documents."""

    as_rows: bool  # True: as rows of padded batches; False: one document after the other
    # True: with the pack's `position_ids`. False: without any, so that the module makes its own for each document
    gets_positions: bool

    def __str__(self) -> str:
        text = "as rows of a padded batch" if self.as_rows else "one after the other"
        return text if self.gets_positions else text + ", with its own positions"


# The modes in the order in which the search tries them
REPAIR_MODES = (RepairMode(True, True), RepairMode(True, False), RepairMode(False, True), RepairMode(False, False))


@dataclass(frozen=True)
class Repair:
    """A repair of all modules of one class, as reports describe it."""

    module: str  # name of the class
    first: str  # path of the first repaired module in the model
    count: int  # number of repaired modules
    way: str  # how they run on documents, in words

    def __str__(self) -> str:
        return f"{self.count} {self.module} ({self.first}) {self.way}"


@dataclass(frozen=True)
class ValueOfBatches:
    """An output of a repaired module that cannot be joined to a pack: its value for each batch of documents.

    An example are the top-k indices (B, L, min(k, L)) of rows of L tokens: they are as wide as the rows are long, and
    they count the tokens of one row. A repaired module that gets this object as an argument reads the value of the
    batch that it computes. Any other use raises an error, because this is not a tensor.

    Attributes:
        batches: the division of documents into batches.
        values: one tensor per batch, of any shapes, or None where the module returned none.
    """

    batches: DocumentRows
    values: list[Tensor | None]

    def select(self, batches: DocumentRows, index: int) -> Tensor | None:
        """Return the value of batch `index` of `batches`, the batches in which the reading module runs.

        Raises:
            ValueError: the value was computed in other batches.
        """
        if batches is not self.batches:
            shape = next(tuple(value.shape) for value in self.values if value is not None)
            raise ValueError(
                f"a repaired module got a value of shape {shape} that another repaired module "
                f"computed in {len(self.batches.padded_batches)} batches of documents, and it computes "
                f"{len(batches.padded_batches)}: it is unknown how to divide such a value again. Set "
                'on_leak="unpack".'
            )
        return self.values[index]


class RunningCall(NamedTuple):
    """A call of a module that is running."""

    module: nn.Module
    thread: int  # in which it runs
    around: AroundCall | None  # the generator that is around it; None if the call stays as it is


class AroundCalls(ModelHooks):
    """Changes the inputs and the output of calls of some modules, while it is installed.

    A subclass says how in `_around`, which runs before and after each call.
    """

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self._modules = modules
        self._running: list[RunningCall] = []  # the innermost last

    def _register(self) -> list[RemovableHandle]:
        before = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in self._modules]
        # The hook runs also after a call that raises, so that nothing of it remains in `_running`.
        return before + [module.register_forward_hook(self._after, always_call=True) for module in self._modules]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        """Run `_around` to its first yield, as a hook before a call, and return the changed arguments."""
        thread = threading.get_ident()
        # An earlier call in this thread that has not ended was interrupted, unless this one is called inside of it.
        is_running = any(running.module is module and running.thread == thread for running in self._running)
        if is_running and not is_called_inside_itself(module):
            self._end_interrupted()
        around = self._around(module, args, kwargs)
        inputs = next(around, None)  # None if `_around` has returned without a yield: the call stays as it is
        self._running.append(RunningCall(module, thread, None if inputs is None else around))
        return inputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Run `_around` to its second yield, as a hook after the call, and return the changed output."""
        around = self._running.pop().around if self._running else None
        if around is None:
            return output
        if output is None:  # the call has raised, or it has no output to change
            around.close()
            return None
        return around.send(output)

    def remove(self) -> None:
        super().remove()
        self._end_interrupted()

    def _end_interrupted(self) -> None:
        """End the generators around the calls of this thread that were interrupted."""
        for running in self._running[::-1]:
            if running.thread == threading.get_ident():
                if running.around is not None:
                    running.around.close()
                self._running.remove(running)

    @abstractmethod
    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Yield the changed arguments of a call, receive its output, and yield the changed output.

        To leave the call as it is, return without a yield.
        """


class RepairedModule(AroundCalls):
    """Runs `module` on each document separately in packed forwards, while it is installed."""

    def __init__(self, module: nn.Module, axes: ModuleAxes, mode: RepairMode):
        if not mode.as_rows and is_sharded(module):
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
        """Yield the arguments for the first batch of documents, get its output, and yield the output for the pack.

        Outside of packs, and inside another repaired module, nothing is yielded, and the call runs unchanged.
        """
        pack = _running_pack(module)
        if pack is None:
            return
        # 1. Divide the documents into batches. FSDP2 gathers the parameters of a module during its calls, so it may
        #    look unsharded here. If it was sharded before, it is sharded.
        self._is_sharded = self._is_sharded or is_sharded(module)
        budget: float = 0  # most tokens of a batch, padding included; with 0 each document is a batch of its own
        if self.mode.as_rows:  # a batch with no more tokens than the pack takes no more memory
            budget = inf if self._is_sharded else pack.num_tokens
        # `batches.padded_batches` has one document in each row. `forwards` has a `PackedForward` for each batch, whose
        # boundaries are those of the rows with their padding: attention and mixers inside the module read them.
        batches, forwards = pack.repaired_batches(budget)
        # 2. Run the first batch as the call that is under way, and all others in addition.
        inputs = self._inputs_of_batch(module, args, kwargs, batches=batches, index=0)
        # transformers records in a list what each router of experts returns, in the order of their calls.
        num_logits_before = len(recorded_router_logits())  # of routers that ran before this module
        with packed_forward_entered(forwards[0]):  # the module's forward runs between the two hooks
            output = yield inputs
        outputs = [output]
        num_routers = len(recorded_router_logits()) - num_logits_before  # inside this module
        for index, forward in enumerate(forwards[1:], start=1):
            with packed_forward_entered(forward):
                batch_args, batch_kwargs = self._inputs_of_batch(module, args, kwargs, batches=batches, index=index)
                outputs.append(module.forward(*batch_args, **batch_kwargs))  # not `module(...)`: hooks run once
        # 3. Join the logits that routers recorded: for each router the logits of all batches become those of the pack.
        if num_routers:
            batch_logits = recorded_router_logits()[num_logits_before:]  # of all routers for batch 0, then for batch 1
            logits_by_router = [batch_logits[i::num_routers] for i in range(num_routers)]
            # A checkpoint counts the tensors that a call saves for backward, and fails if the recomputed call saves
            # another number. The recomputed call records no logits and joins none, so the tensors that this join saves
            # must not be counted. The checkpoint counts in its hooks for saved tensors. torch runs only the innermost
            # such hooks, and these are the innermost here, and change nothing.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                joined_logits = [batches.join(logits, LOGIT_AXES) for logits in logits_by_router]
                replace_router_logits(num_logits_before, joined_logits)
        # 4. Join the outputs, place by place.
        leaves_by_batch, trees = zip(*map(output_leaves, outputs), strict=True)
        joined = []
        for leaves_at_place in zip(*leaves_by_batch, strict=True):
            places, values = zip(*leaves_at_place, strict=True)
            joined.append(self._join_batches(module, places[0], values, batches=batches))
        yield tree_unflatten(joined, trees[0])

    def _inputs_of_batch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, batches: DocumentRows, index: int
    ) -> CallArguments:
        """Return the arguments of the call for batch `index`, from the arguments of the call for the pack.

        Raises:
            ValueError: how to divide a tensor is unknown, because the module got none at this place in the probe.
        """
        batch = batches.padded_batches[index]
        leaves, tree = argument_leaves(module, args, kwargs)
        values = []
        for place, value in leaves:
            if place.startswith(BOUNDARY_NAMES) or (place == "position_ids" and not self.mode.gets_positions):
                value = None
            elif isinstance(value, ValueOfBatches):
                value = value.select(batches, index)
            elif isinstance(value, Tensor):
                # TRL's loss calls the backbone directly, and passes positions even if the whole model does not.
                axes = self.axes.inputs.get(place, POSITION_AXES if place == "position_ids" else None)
                # At a known place, None means that no axis of the tensor indexes tokens: it is not divided.
                is_known = axes is not None or place in self.axes.inputs
                # A scalar, such as the `num_items_in_batch` of transformers' trainer, is the same for all documents.
                if not is_known and value.dim() > 0:
                    raise ValueError(
                        f"a repaired module got a tensor of shape {tuple(value.shape)} at {place}, where the leak "
                        'probe saw none: how to divide it among documents is unknown. Set on_leak="unpack".'
                    )
                value = value if axes is None else batch.split(value, axes)
            elif place in self.axes.numbers:  # the number of tokens of a row, here with padding
                value = batch.longest
            values.append(value)
        return tree_unflatten(values, tree)

    def _join_batches(
        self, module: nn.Module, place: str, values: tuple[object, ...], *, batches: DocumentRows
    ) -> object:
        """Return the value that the pack has at a place of the output.

        Args:
            values: the value that the module returned at this place for each batch.

        Raises:
            ValueError: tensors would be joined, and some batches have none.
        """
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return values[0]
        axes = self.axes.outputs.get(place)
        # `widening`: places of tensors with a further axis whose size depends on the row length, such as top-k indices.
        # Neither these nor masks, with two token axes, can be joined to one tensor.
        if axes is not None and len(axes.tokens) == 1 and place not in self.axes.widening:
            if len(tensors) < len(values):
                raise ValueError(
                    f"a repaired {type(module).__name__} returned a tensor at {place or 'its output'} for "
                    f"{len(tensors)} of {len(values)} batches of documents, and None for the others: what documents "
                    'without a tensor have in the pack is unknown. Set on_leak="unpack".'
                )
            return batches.join(tensors, axes)
        # Integers are indices, which count the tokens of a row. They stay apart for each batch, in an object that is no
        # tensor. That is impossible for floats, which may have a gradient: a reentrant checkpoint handles gradients of
        # tensors only.
        if axes is not None and not tensors[0].is_floating_point():
            return ValueOfBatches(batches, [value if isinstance(value, Tensor) else None for value in values])
        # Final states of rows and attention weights have no form in a pack. None makes their use raise an error. A
        # scalar, such as a loss, is that of the pack only if all documents were in one batch.
        is_scalar = tensors[0].dim() == 0
        return tensors[0] if is_scalar and len(tensors) == 1 else None


class RestartedPositions(ModelHooks):
    """Restarts the positions that a module gets in each document of a packed forward, while it is installed.

    Some models count positions over the whole pack (bart), or from another number than the collator (roberta).

    Args:
        module: the module whose argument is changed.
        shifted: which argument it is, and from which number positions start in a document alone.
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
        pack = _running_pack(module)
        if pack is None:
            return None
        leaves, tree = argument_leaves(module, args, kwargs)
        axis = self.shifted.axis
        values = []
        for place, value in leaves:
            if place == self.shifted.place:
                boundaries = pack.cu_seq_lens_q
                # For each token the first token of its document. Without `output_size` the host would wait for the GPU,
                # to read the sum of the lengths.
                first_tokens = torch.repeat_interleave(
                    boundaries[:-1], boundaries.diff(), output_size=value.shape[axis]
                )
                value = value - value.index_select(axis, first_tokens) + self.shifted.first
            values.append(value)
        return tree_unflatten(values, tree)


def _running_pack(module: nn.Module) -> PackedForward | None:
    """Return the packed forward whose documents this module must separate.

    It is None outside of packs, and inside a repaired module, which has separated the documents already.

    Raises:
        ValueError: the module is recomputed in a backward that has lost the boundaries of its forward.
    """
    # A forward in backward recomputes a checkpointed layer, and should run in the packed forward of its first run. With
    # `running_pack`, None could also mean that the layer is inside a repaired module.
    has_lost_boundaries = running_forward() is None and module.training and in_backward()
    if has_lost_boundaries:
        raise ValueError(
            f"{type(module).__name__} is repaired for packing and is recomputed in backward without the boundaries of "
            "its forward: the checkpointing is not transformers' own. Switch it off, and set "
            "`gradient_checkpointing=True`."
        )
    return running_pack()


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module's parameters are gathered for each call, under DeepSpeed ZeRO-3 or FSDP2.

    ZeRO-3 marks parameters with `ds_id`, and FSDP2 makes them DTensors.
    """
    return any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in module.parameters())
